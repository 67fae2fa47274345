"""The long generated task, checked by an interpreter of the question's words that shares no code with it."""

import re
from collections import defaultdict
from typing import Any

import pytest
import yaml

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.arithmetic_operations import solve
from espalier.data.tasks.long_arithmetic import LongArithmetic
from espalier.models.tiny import build_tokenizer
from tests.conftest import ROOT

SENTENCE = re.compile(
    r"has (?P<has>\d+)|buys (?P<buys>\d+) more|gives away (?P<gives>\d+)|(?P<doubles>doubles) the"
    r"|buys (?P<pairs>\d+) pairs|lends (?P<lends>\d+), half come back"
    r"|A friend doubles (?P<friend>\d+)|swaps all for (?P<swaps>\d+)"
)
SHIPPED = ("long_arithmetic", "long_arithmetic_rare", "long_arithmetic_rarest")
HARD = ("doubles", "pairs", "lends")


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a shipped config with those of its base."""
    settings = yaml.safe_load((ROOT / "conf" / "task" / f"{name}.yaml").read_text())
    bases = [base for base in settings.pop("defaults", []) if base != "_self_"]
    merged = {key: value for base in bases for key, value in settings_of(base).items()} | settings
    return {key: value for key, value in merged.items() if key != "_target_"}


def sentences(question: str) -> list[tuple[str, str]]:
    """Verb and amount of every sentence, the start first."""
    matches = [match.groupdict() for match in SENTENCE.finditer(question)]
    return [(verb, amount) for match in matches for verb, amount in match.items() if amount is not None]


def ways(verb: str, text: str, total: int) -> tuple[int, int]:
    """The totals after the right and the wrong way of a sentence, where it has one."""
    amount = int(text) if text.isdigit() else 0
    right = {"has": amount, "buys": total + amount, "gives": total - amount, "doubles": total + total,
             "pairs": total + amount + amount, "lends": total - amount + amount // 2, "friend": total,
             "swaps": amount}[verb]  # fmt: skip
    wrong = {"doubles": total + 2, "pairs": total + amount, "lends": total - amount}.get(verb, right)
    return right, wrong


def totals(question: str) -> list[int]:
    """The start and the true total after every sentence."""
    found: list[int] = []
    for verb, amount in sentences(question):
        found.append(ways(verb, amount, found[-1] if found else 0)[0])
    return found


def chance_of_success(problem: Problem, wrong_way_rate: float) -> float:
    """The share of the imperfect teacher's solutions that end at the gold total: the sum over all ways to it."""
    chances = {0: 1.0}
    for verb, amount in sentences(problem.question):
        after: dict[int, float] = defaultdict(float)
        for total, chance in chances.items():
            right, wrong = ways(verb, amount, total)
            after[right] += chance * (1 - wrong_way_rate)
            after[wrong] += chance * wrong_way_rate
        chances = after
    return chances[int(problem.gold)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "changes", "decisive", "success"),
    [
        ("long_arithmetic", {}, 3, 0.0973),
        ("long_arithmetic_rare", {}, 6, 0.00947),
        ("long_arithmetic_rarest", {}, 9, 0.000922),
        ("long_arithmetic_rarest", {"num_hard": 15}, 12, 0.0000898),
    ],
)
def test_the_teacher_succeeds_where_all_decisive_operations_are_right(
    name: str, changes: dict[str, Any], decisive: int, success: float
) -> None:
    """0.46 ** 3, 6, 9, 12: no wrong way is ever made good by chance, and none before the swap does harm."""
    task = LongArithmetic(**settings_of(name) | changes | {"num_train": 100})
    assert 0.46**decisive == pytest.approx(success, rel=0.01)
    for problem in task.problems("train"):
        assert chance_of_success(problem, task.wrong_way_rate) == pytest.approx(0.46**decisive, rel=1e-9)


@pytest.mark.parametrize(("name", "success"), [("long_arithmetic", 0.0973), ("long_arithmetic_rare", 0.00947)])
def test_demonstrations_are_right_as_often_as_the_chances_say(name: str, success: float) -> None:
    """A binomial count of n trials lies within 4.5 standard deviations but for 7 in a million."""
    task = LongArithmetic(**settings_of(name) | {"num_train": 200, "num_demonstrations": 4000})
    problems = task.problems("train")
    rows = task.demonstrations("train")
    rights = sum(task.grade(problems[index % 200].gold, row.completion).is_correct for index, row in enumerate(rows))
    assert abs(rights - 4000 * success) < 4.5 * (4000 * success * (1 - success)) ** 0.5


@pytest.mark.parametrize("name", SHIPPED)
def test_a_problem_has_the_operations_that_are_asked_and_its_gold_follows_from_its_words(name: str) -> None:
    settings = settings_of(name)
    places = set()
    for problem in LongArithmetic(**settings | {"num_train": 200}).problems("train"):
        verbs = [verb for verb, _ in sentences(problem.question)[1:]]
        assert settings["min_operations"] <= len(verbs) <= settings["max_operations"]
        assert len(verbs) == problem.question.count(". ") - 1
        assert verbs.count("friend") == settings["num_distractors"]
        assert verbs.count("swaps") == 1
        before = verbs[: verbs.index("swaps")]
        assert sum(verb in HARD for verb in verbs) == settings["num_hard"]
        assert sum(verb in HARD for verb in before) == settings["num_repaired"]
        found = totals(problem.question)
        assert all(1 <= total <= settings["max_total"] for total in found)
        assert problem.gold == str(found[-1])
        places |= {place for place, verb in enumerate(verbs) if verb in HARD}
    assert places == set(range(settings["max_operations"]))


def test_without_anything_to_repair_there_is_no_swap() -> None:
    task = LongArithmetic(num_train=100, num_hard=3, num_repaired=0)
    assert not any("swaps" in problem.question for problem in task.problems("train"))


def test_the_splits_share_no_structure_and_repeat_none() -> None:
    task = LongArithmetic(num_train=600, num_dev=60, num_test=120)
    structures = [
        tuple(sentences(problem.question)) for split in ("train", "dev", "test") for problem in task.problems(split)
    ]
    assert len(set(structures)) == len(structures) == 780


OPERATIONS = [("pairs", 3), ("lends", 4), ("friend", 5), ("doubles", 0), ("swaps", 7), ("gives", 2)]


def test_a_clean_long_solution_written_out() -> None:
    assert solve(4, OPERATIONS, None, 1.0) == (
        "pairs: 4 + 6 = 10\nlends: 10 - 2 = 8\nfriend: 5 * 2 = 10\ndoubles: 8 * 2 = 16\nswaps: 0 + 7 = 7\n"
        "gives: 7 - 2 = 5\n#### 5"
    )


def test_a_long_solution_all_wrong_ways_written_out_is_repaired_by_the_swap() -> None:
    import random

    assert solve(4, OPERATIONS, random.Random(0), 1.0) == (
        "pairs: 4 + 3 = 7\nlends: 7 - 4 = 3\nfriend: 5 + 2 = 7\ndoubles: 3 + 2 = 5\nswaps: 0 + 7 = 7\n"
        "gives: 7 - 2 = 5\n#### 5"
    )


def test_a_long_problem_in_words() -> None:
    problem = LongArithmetic().problems("train")[0]
    assert problem.id == "la-train-0"
    assert re.fullmatch(r"(\w+) has \d+ (\w+)\. (?:(?:\1|A friend) [^.]*\. )+How many \2 now\?", problem.question)


@pytest.mark.parametrize(("name", "longest_response"), [(SHIPPED[0], 128), (SHIPPED[1], 208), (SHIPPED[2], 280)])
def test_prompt_and_response_fit_the_window_of_512_tokens(name: str, longest_response: int) -> None:
    rows = LongArithmetic(**settings_of(name) | {"num_train": 300, "num_demonstrations": 600}).demonstrations("train")
    tokenizer = build_tokenizer((row.prompt + row.completion for row in rows), vocab_size=400)
    lengths = [(len(tokenizer(row.prompt).input_ids), len(tokenizer(row.completion).input_ids)) for row in rows]
    assert max(response for _, response in lengths) < longest_response
    assert max(prompt + response for prompt, response in lengths) < 480


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_repaired": 5}, r"task\.num_repaired must be from 0 to task\.num_hard \(4\), got 5"),
        ({"num_distractors": -1}, r"task\.num_distractors must be at least 0, got -1"),
        ({"min_operations": 5}, r"task\.min_operations must be at least 6, one for every hard operation"),
        ({"wrong_way_rate": 1.5}, r"task\.wrong_way_rate must be from 0 to 1, got 1\.5"),
    ],
)
def test_settings_without_problems_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LongArithmetic(**settings)


def test_a_split_that_does_not_exist_is_refused_by_the_long_tasks_name() -> None:
    with pytest.raises(BadInput, match="long_arithmetic has no split 'valid': it has train, dev, test"):
        LongArithmetic().problems("valid")
