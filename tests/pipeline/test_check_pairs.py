"""How often the chosen side of a pair is the worse one: by hand, against drawn values, the verdict and the refusal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues
from espalier.data.row_index import hash_of
from espalier.pipeline.pairs.check_pairs import CheckPairs
from espalier.pipeline.pairs.pair_evidence import PairEvidence, count_pairs, equal_steps, sides_of
from espalier.pipeline.stage import StageContext
from espalier.values.value_prior import ValuePrior

UNIFORM = ValuePrior(1.0, 1.0)


def row(name: str, rights: list[int], *, is_correct: bool, ids: list[int] | None = None, num: int = 4) -> StepValues:
    """A trajectory, one token per step, whose inner states have `rights` of `num` completions right."""
    size = len(rights) + 1
    return StepValues(
        name, name.partition("/")[0], "Q", [f"{step}\n" for step in range(size)], [9],
        ids or [int(name.partition("/")[2]) * 100 + step for step in range(size)], list(range(1, size + 1)),
        [*(one / num for one in rights), float(is_correct)], [*rights, int(is_correct)], [*(num for _ in rights), 1],
        is_correct,
    )  # fmt: skip


def pair(name: str, kind: str = "process", chosen: int = 3, rejected: int = 3) -> PreferencePair:
    problem = name.partition("/")[0]
    return PreferencePair(name, problem, kind, "Q", "c", "r", [9], [1] * chosen, [2] * rejected, 0.9, 0.1)


RIGHT = row("p/0", [1, 4], is_correct=True)
WRONG = row("p/1", [3, 0], is_correct=False)
OTHER = row("p/2", [0, 4, 2], is_correct=True, ids=[0, 201, 202, 203])  # begins as p/0 does
ROWS = {one.id: one for one in (RIGHT, WRONG, OTHER)}


def test_a_pairs_sides_are_read_from_its_id() -> None:
    assert sides_of(pair("p/0>p/1"), ROWS.get) == ((RIGHT, None), (WRONG, None))
    assert sides_of(pair("p/0>p/1~2@round3"), ROWS.get) == ((RIGHT, None), (WRONG, None))
    assert sides_of(pair("p/0#0>p/1#0", "step"), ROWS.get) == ((RIGHT, 1), (WRONG, 1))
    assert sides_of(pair("p/0#2>p/1#1", "partial"), ROWS.get) == ((RIGHT, 2), (WRONG, 1))
    assert sides_of(pair("p/0>p/7"), ROWS.get) is None


def test_solutions_are_compared_after_equally_many_steps_where_their_states_differ() -> None:
    assert equal_steps(RIGHT, WRONG) == [1, 2]
    assert equal_steps(RIGHT, OTHER) == [2]
    assert count_pairs((RIGHT, None), (WRONG, None)) == []  # the outcomes say it
    assert count_pairs((RIGHT, None), (OTHER, None)) == [((4, 4), (4, 4))]
    assert count_pairs((RIGHT, 1), (WRONG, 1)) == [((1, 4), (3, 4))]
    assert count_pairs((RIGHT, 3), (WRONG, 3)) == [((1000, 1000), (0, 1000))]


def evidence(
    *pairs: PreferencePair, prior: ValuePrior | None = UNIFORM, rows: dict[str, StepValues] = ROWS
) -> dict[str, Any]:
    found = PairEvidence()
    for one in pairs:
        if sides := sides_of(one, rows.get):
            found.add(one, *sides)
    return found.figures(prior, np.asarray([hash_of(name) for name in sorted({one.problem_id for one in pairs})]))


def test_outcomes_make_a_pair_right_or_wrong_and_equal_counts_leave_it_open() -> None:
    both = evidence(pair("p/0>p/1", chosen=5), pair("p/1>p/0"), pair("p/0>p/2"))
    assert (both["right_over_wrong"], both["wrong_over_right"], both["both_right"], both["both_wrong"]) == (1, 1, 1, 0)
    assert both["wrong_order"]["mean"] == pytest.approx((0 + 1 + 0.5) / 3, abs=1e-4)
    assert both["chosen_more_tokens"]["mean"] == pytest.approx(2 / 3, abs=1e-4)
    assert both["chosen_more_steps"]["mean"] == pytest.approx(-1 / 3, abs=1e-4)


def test_a_step_pair_is_wrong_as_often_as_the_posteriors_say() -> None:
    """One completion each, right and wrong, under a uniform distribution: 1/6 (2v against 2 - 2v, by hand)."""
    rows = {one.id: one for one in (row("p/0", [1], is_correct=True, num=1), row("p/1", [0], is_correct=False, num=1))}
    assert evidence(pair("p/0#0>p/1#0", "step"), rows=rows)["wrong_order"]["mean"] == pytest.approx(1 / 6, abs=1e-4)
    assert evidence(pair("p/1#0>p/0#0", "step"), rows=rows)["wrong_order"]["mean"] == pytest.approx(5 / 6, abs=1e-4)
    assert evidence(pair("p/0#0>p/1#0", "step"), rows=rows, prior=None)["wrong_order"]["mean"] == 0.5
    ends = evidence(pair("p/0#1>p/1#0", "step"), rows=rows)["wrong_order"]["mean"]  # a right end over anything
    assert ends < 0.01


def cut(name: str, rejected: StepValues, steps: int) -> PreferencePair:
    """A pair whose rejected side ends behind a step."""
    return replace(pair(name), rejected_ids=rejected.response_ids[: rejected.step_ends[steps - 1]])


def test_a_cut_side_is_compared_after_equally_many_steps_where_completions_succeeded_behind_it() -> None:
    """One completion each behind the first steps, of another state each: 1/6 or 5/6 as of a step pair."""
    assert sides_of(cut("p/0>p/1", WRONG, 1), ROWS.get) == ((RIGHT, None), (WRONG, 1))
    assert sides_of(replace(pair("p/0>p/1"), rejected_ids=WRONG.response_ids), ROWS.get)[1] == (WRONG, None)  # type: ignore[index]
    assert count_pairs((RIGHT, None), (WRONG, 1)) == [((1, 4), (3, 4))]
    assert count_pairs((RIGHT, None), (WRONG, 2)) == []  # 0 of 4: nothing speaks against the blame
    short = row("p/4", [], is_correct=True)
    assert count_pairs((short, None), (WRONG, 1)) == [((1000, 1000), (3, 4))]
    good, bad = row("p/0", [0], is_correct=True, num=1), row("p/1", [1], is_correct=False, num=1)
    rows = {one.id: one for one in (good, bad)}
    found = evidence(cut("p/0>p/1", bad, 1), rows=rows)
    assert (found["wrong_order"]["mean"], found["right_over_wrong"]) == (pytest.approx(5 / 6, abs=1e-4), 1)
    lost = {one.id: one for one in (good, row("p/1", [0], is_correct=False, num=1))}
    assert evidence(cut("p/0>p/1", lost["p/1"], 1), rows=lost)["wrong_order"]["mean"] == 0.0


def test_a_cut_side_is_not_compared_with_a_state_without_completions() -> None:
    """A right solution whose first state was not cut, over a wrong one that is blamed where 1 of 4 succeeded."""
    good = replace(row("p/0", [0, 4], is_correct=True), num_completions=[0, 4, 1])
    bad = row("p/1", [1, 0], is_correct=False)
    assert count_pairs((good, None), (bad, 1)) == []
    found = evidence(cut("p/0>p/1", bad, 1), rows={one.id: one for one in (good, bad)})
    assert (found["wrong_order"]["mean"], found["right_over_wrong"]) == (0.0, 1)


def test_pairs_cut_at_steps_that_lead_to_right_answers_are_refused(tmp_path: Path) -> None:
    """A reward model that blames the first step of every wrong solution: all of their completions are right."""
    rows, pairs = [], []
    for number in range(30):
        good, bad = row(f"p{number}/0", [1, 4], is_correct=True), row(f"p{number}/1", [4, 0], is_correct=False)
        rows += [good, bad]
        pairs.append(cut(f"{good.id}>{bad.id}", bad, 1))
    with pytest.raises(BadInput, match=r"'would harm': (9\d|100) % .* of 30 pairs are expected in the wrong order"):
        ran(tmp_path, pairs, rows)
    whole = [replace(one, rejected_ids=bad.response_ids) for one, bad in zip(pairs, rows[1::2], strict=True)]
    assert ran(tmp_path, whole, rows)["verdict"] == "in order"


def test_the_expected_share_is_that_of_drawn_values() -> None:
    rng = np.random.default_rng(0)
    alpha, beta, num = 0.5, 2.0, 4
    values = rng.beta(alpha, beta, (200_000, 2))
    labels = rng.binomial(num, values)
    chosen = labels[:, 0] - labels[:, 1] >= 2
    wrong = (values[chosen, 0] < values[chosen, 1]).mean()
    prior = ValuePrior(alpha, beta)
    counts = [(right, num) for right in range(num + 1)]
    higher = prior.higher(counts, counts)
    expected = np.mean([higher[bad, good] for good, bad in labels[chosen][:5_000]])
    assert expected == pytest.approx(wrong, abs=0.005)


def ran(folder: Path, pairs: list[PreferencePair], rows: list[StepValues], scores: list[StepScores] | None = None,
        **settings: float) -> dict[str, Any]:  # fmt: skip
    write_records(folder / "pairs.jsonl", pairs)
    write_records(folder / "values.jsonl", rows)
    if scores is not None:
        write_records(folder / "scores.jsonl", scores)
    stage = CheckPairs(str(folder / "values.jsonl"), str(folder / "scores.jsonl") if scores else "", **settings)
    return stage.run(str(folder / "pairs.jsonl"), StageContext(None, folder / "o.json", 1.0))


def test_pairs_in_the_wrong_order_are_refused_unless_that_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, pairs = [], []
    for number in range(30):
        rows += [row(f"p{number}/0", [number % 5], is_correct=False), row(f"p{number}/1", [4], is_correct=True)]
        pairs.append(pair(f"p{number}/0>p{number}/1"))
    with pytest.raises(BadInput, match=r"'would harm': 100 % \[100, 100\] of 30 pairs.*stage.largest_wrong_share=1"):
        ran(tmp_path, pairs, rows)
    assert ran(tmp_path, pairs, rows, largest_wrong_share=1.0)["verdict"] == "weak"
    turned = [pair(f"p{number}/1>p{number}/0") for number in range(30)]
    caplog.clear()
    assert ran(tmp_path, turned, rows)["verdict"] == "in order"
    assert not caplog.records
    assert ran(tmp_path, [pair("q/0>q/1")], rows)["verdict"] == "not known"


def test_scores_that_order_states_by_chance_on_unseen_problems_make_pairs_weak(tmp_path: Path) -> None:
    """Solutions of two inner steps; scores agree at the first step and not at the second, or at both."""
    rows, pairs, chance, good = [], [], [], []
    for number in range(30):
        name = f"p{number}"
        rows += [row(f"{name}/0", [3, 3], is_correct=True), row(f"{name}/1", [1, 1], is_correct=False)]
        pairs.append(pair(f"{name}/0>{name}/1"))
        chance += [
            StepScores(f"{name}/0", name, [0.9, 0.1, 0.9], False),
            StepScores(f"{name}/1", name, [0.5] * 3, False),
        ]
        good += [StepScores(f"{name}/0", name, [0.9] * 3, False), StepScores(f"{name}/1", name, [0.5] * 3, False)]
    weak = ran(tmp_path, pairs, rows, chance)
    assert weak["score_agreement"]["mean"] == 0.5
    assert (weak["wrong_order"]["mean"], weak["verdict"]) == (0.0, "weak")
    fine = ran(tmp_path, pairs, rows, good)
    assert (fine["score_agreement"]["mean"], fine["verdict"]) == (1.0, "in order")
    seen = [StepScores(one.id, one.problem_id, one.scores, True) for one in chance]
    assert ran(tmp_path, pairs, rows, seen)["score_agreement"] is None


def test_agreement_of_scores_that_may_be_of_problems_that_were_seen_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two problems one was not seen; of the other the scores say nothing, then that it was."""
    rows, pairs = [], []
    for name in ("p", "q"):
        rows += [row(f"{name}/0", [3, 3], is_correct=True), row(f"{name}/1", [1, 1], is_correct=False)]
        pairs.append(pair(f"{name}/0>{name}/1"))
    for is_seen, message in (
        (False, ""),
        (None, "of 1 of 2 problems nobody knows whether the reward model was trained on them"),
        (True, "1 of 2 problems were in the reward model's training set and take no part in the agreement"),
    ):
        scores = [StepScores(one.id, one.problem_id, [0.5 + one.is_correct / 4] * 3, one.problem_id == "q" and is_seen)
                  for one in rows]  # fmt: skip
        caplog.clear()
        ran(tmp_path, pairs, rows, scores)
        assert message in caplog.text
        assert bool(message) == ("trained" in caplog.text or "training" in caplog.text)
