"""Verifiers on responses they accept and refuse, and rows with several of them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grading.verifier_cases import ANSWERS, FOLLOWED, SCORES
from benchmarks.grading.verifiers import published_cases
from espalier.data.answers.grading import grade_answer
from espalier.data.sources import BadRow
from espalier.data.verifiers.verify import (
    VERIFIERS,
    Check,
    Judged,
    grade_by_verifiers,
    is_never_right,
    judged,
    verify,
    write_checks,
)


def score(name: str, truth: Any, text: str, num_tokens: int | None = None) -> float:
    """One verifier's score."""
    (verdict,) = verify(text, write_checks([Check(name, truth)]), num_tokens)
    return verdict.result.score


@pytest.mark.parametrize(("name", "truth", "good", "bad"), ANSWERS)
def test_a_verifier_accepts_what_is_right_and_nothing_else(
    name: str, truth: Any, good: list[str], bad: list[str]
) -> None:
    assert {text: score(name, truth, text) for text in good} == dict.fromkeys(good, 1.0)
    assert {text: score(name, truth, text) for text in bad} == dict.fromkeys(bad, 0.0)


@pytest.mark.parametrize(("name", "truth", "text", "num_tokens", "wanted"), SCORES)
def test_scores_between_by_hand(name: str, truth: Any, text: str, num_tokens: int, wanted: float) -> None:
    assert score(name, truth, text, num_tokens) == pytest.approx(wanted)


def test_several_instructions_score_the_share_that_is_followed() -> None:
    label = [{"instruction_id": ["punctuation:no_comma", "startend:quotation"], "kwargs": [None, {}]}]
    assert score("ifeval", label, "no comma") == 0.5


def test_symbolic_equality_works_in_worker_threads() -> None:
    gold = write_checks([Check("math", "\\sqrt{18}")])
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda k: verify(f"{k}: \\boxed{{3\\sqrt{{2}}}}", gold)[0].result.score, range(6)))
    assert found == [1.0] * 6


def test_a_row_is_right_where_all_its_verifiers_say_so() -> None:
    gold = write_checks([Check("gsm8k", "4"), Check("format", r".*####", 0.1), Check("max_length", 100)])
    assert grade_by_verifiers("#### 4", gold).is_correct
    half = grade_by_verifiers("so 4", gold)
    assert (half.verdict, half.answer, half.reason) == ("wrong", "4", "gsm8k 1, format 0")
    assert grade_answer(prediction="#### 4", gold=gold, kind="verifiers").is_correct
    assert [verdict.name for verdict in verify("#### 4", gold, 3)] == ["gsm8k", "format", "max_length"]


def test_what_only_counts_tokens_is_never_graded_right() -> None:
    assert grade_by_verifiers("x", write_checks([Check("max_length", 9)])).verdict == "unparseable"


@pytest.mark.parametrize(("rows", "message"), [
    ([{"name": "gsm9k", "ground_truth": "1"}], "there is no verifier 'gsm9k': use one of boolean3, choice, code"),
    ([{"name": "gsm8k", "ground_truth": ""}], "verifier gsm8k: the ground truth is empty"),
    ([{"name": "gsm8k", "ground_truth": None}], "must be a text or a list of texts"),
    ([{"name": "max_length", "ground_truth": 0}], "verifier max_length: a length is a whole number"),
    ([{"name": "format", "ground_truth": "("}], "verifier format: the format is no regular expression"),
    ([{"name": "gsm8k", "ground_truth": "1", "wieght": 2}], "not 'wieght'"),
    ([{"name": "gsm8k", "ground_truth": "1", "weight": "2"}], "the weight of gsm8k must be a number"),
    ([{"name": "gsm8k", "ground_truth": "18 apples"}], "verifier gsm8k: the ground truth is no number: '18 apples'"),
    ([{"name": "gsm8k", "ground_truth": "She has 18.\n####"}], "verifier gsm8k: the ground truth is no number"),
    ([{"name": "gsm8k", "ground_truth": ["18", "between 3 and 4"]}], "verifier gsm8k: the ground truth is no number"),
    ([], "no list of verifiers"),
    ("18", "no list of verifiers"),
])  # fmt: skip
def test_a_gold_that_names_no_good_verifiers_is_refused(rows: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        verify("x", json.dumps(rows))


def test_a_penalty_is_nothing_a_right_response_needs() -> None:
    gold = write_checks([Check("gsm8k", "4"), Check("format", "", -0.5), Check("flan", "x", 0.0)])
    assert grade_by_verifiers("so 4", gold).is_correct
    assert grade_by_verifiers("a</think> <answer>4</answer>", gold).is_correct
    assert not grade_by_verifiers("so 5", gold).is_correct
    alone = write_checks([Check("gsm8k", "4", -1.0), Check("max_length", 9)])
    assert not grade_by_verifiers("so 4", alone).is_correct
    assert not grade_by_verifiers("so 5", alone).is_correct
    assert is_never_right(alone)
    assert not is_never_right(gold)


def test_a_judge_is_asked_by_the_reward_and_no_text_is_right_by_it() -> None:
    gold = write_checks([Check("gsm8k", "4"), Check("judge", "the number four", 0.5)])
    assert [verdict.name for verdict in verify("so 4", gold, 9)] == ["gsm8k"]
    assert judged(gold) == Judged(0.5, "the number four")
    assert grade_by_verifiers("so 4", gold).is_correct
    assert judged(write_checks([Check("gsm8k", "4")])) is None
    alone = write_checks([Check("judge", None)])
    assert judged(alone) == Judged(1.0, "")
    assert is_never_right(alone)
    assert not grade_by_verifiers("so 4", alone).is_correct
    with pytest.raises(BadRow, match="a row has one judge"):
        write_checks([Check("judge", "a"), Check("judge", "b")])
    for strange in ([4], {"answer": 4}, True):
        with pytest.raises(BadRow, match="verifier judge: the right answer for a judge is a text"):
            write_checks([Check("judge", strange)])


def test_a_pattern_that_takes_years_takes_a_second_and_is_asked_again() -> None:
    gold = write_checks([Check("format", "(a+)+b")])
    started = time.monotonic()
    for _ in range(2):
        (verdict,) = verify("a" * 60, gold)
        assert (verdict.result.score, verdict.result.answer) == (0.0, None)
        assert "no verdict" in verdict.result.reason
    assert time.monotonic() - started > 1
    assert score("format", "(a+)+b", "a" * 60 + "b") == 1.0


LONG = [
    "." * 99_999 + "x", "<<" * 50_000, "<answer>" * 12_000, "</answer>" + "</think> <answer>" * 6_000,
    " " * 99_999 + "x", "```json\n" + " " * 99_999 + "x", "final answer " * 8_000,
    "final answer x" + " " * 99_000 + "y", "[" * 99_999, "*" * 99_999, "\n" * 99_999 + "x", "a-" * 50_000,
    "1," * 50_000, "\\boxed{" * 14_000, "$" * 99_999, "```\n" * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:9]))
def test_no_degenerate_text_takes_long(text: str) -> None:
    checks = [
        Check(name, "12") for name in ("gsm8k", "math", "strict_math", "flan", "string_matcher", "string_f1", "puzzle")
    ]
    checks += [
        Check("format", ""),
        *(Check("ifeval", {"instruction_id": [i], "kwargs": [a]}) for i, a, _, _ in FOLLOWED),
    ]
    gold = write_checks(checks)
    started = time.process_time()
    verify(text, gold)
    assert time.process_time() - started < 5


def test_every_published_name_has_a_verifier_and_a_right_and_a_wrong_response() -> None:
    answers = {"gsm8k", "math", "strict_math", "ifeval", "flan", "max_length", "up_to_max_length", "string_matcher",
               "string_f1", "puzzle"}  # fmt: skip
    right = {name for name, _, good, _ in ANSWERS if good} | {name for name, *_, wanted in SCORES if wanted == 1}
    wrong = {name for name, _, _, bad in ANSWERS if bad} | {name for name, *_, wanted in SCORES if wanted == 0}
    assert answers <= right & wrong
    assert answers | {"code", "code_stdio"} <= VERIFIERS.keys()  # programs: test_code_verifier.py


def test_every_verifier_has_a_case() -> None:
    tested = {case[0] for case in [*ANSWERS, *SCORES]}
    assert set(VERIFIERS) - tested == {"code", "judge"}  # test_code_verifier.py, tests/rewards/test_judge_scores.py


def test_published_solutions_are_right_with_their_own_answer_alone(datasets_dir: Path) -> None:
    found = published_cases(datasets_dir, 60)
    for name in ("gsm8k", "math"):
        for what in ("accepted", "refused"):
            num_right, number = found[name][what]
            assert num_right == number > 50, (name, what)
    assert found["recorded"] >= 0.85  # eight rows are of one problem, whose right answers are recorded as wrong
