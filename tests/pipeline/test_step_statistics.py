"""What the statistics of labelled steps say, by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.answers.grade import Grade
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, StepValues
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.step_statistics import (
    StepStatistics,
    correlation,
    first_error,
    first_errors,
    impossible_patterns,
    inner_means,
    length_bias,
    positions,
    terminal_means,
    widths,
)
from espalier.values.labels import wilson_interval


def row(name: str, rights: list[int], *, num: int = 4, is_correct: bool) -> StepValues:
    """States with `rights` of `num` completions, then the outcome."""
    values = [one / num for one in rights]
    spans = [wilson_interval(one, num) for one in rights]
    outcome = float(is_correct)
    steps = [f"{number}\n" for number in range(len(rights) + 1)]
    size = len(steps)
    return StepValues(
        name, name.partition("/")[0], "Q", steps, [9], list(range(size)), list(range(1, size + 1)),
        [*values, outcome], [*rights, int(is_correct)], [*(num for _ in rights), 1], is_correct,
        low=[*(low for low, _ in spans), outcome], high=[*(high for _, high in spans), outcome], prompt_value=0.5,
    )  # fmt: skip


GOOD = row("p/0", [2, 3, 4], is_correct=True)
LOST = row("p/1", [2, 0, 0], is_correct=False)
ODD = row("p/2", [2, 0, 3], is_correct=False)


def test_the_first_error_is_where_every_later_value_is_zero() -> None:
    assert [first_error(one) for one in (GOOD, LOST, ODD)] == [None, 1, 3]
    assert first_error(replace(LOST, values=[0.5, None, 0.0, 0.0])) is None
    assert first_error(replace(LOST, values=[0.0, 0.0, 0.0, 0.0])) == 0
    found = first_errors([GOOD, LOST, ODD])
    assert (found["wrong"], found["known"], found["by_step"], found["at_last_step"]) == (2, 2, {"2": 1, "4": 1}, 1)
    assert found["by_tenth"] == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]


def test_right_after_certain_wrong_is_listed_with_its_chance() -> None:
    low = wilson_interval(3, 4)[0]
    assert impossible_patterns(ODD) == [
        {"trajectory": "p/2", "step": 2, "later_step": 3, "num_completions": 4, "chance": round((1 - low) ** 4, 6)}
    ]
    assert impossible_patterns(GOOD) == impossible_patterns(LOST) == []
    lucky = impossible_patterns(row("p/3", [0, 0], num=100, is_correct=True))
    assert [(one["step"], one["later_step"]) for one in lucky] == [(2, 3), (1, 3)]
    assert lucky[0]["chance"] == pytest.approx(0.95**100, abs=1e-6)


def test_positions_by_hand() -> None:
    """Steps 1 to 3 of 4 lie at 0.25, 0.5 and 0.75, in tenths 2, 5 and 7; the last is a row of its own."""
    found = {one["place"]: one for one in positions([GOOD, LOST])}
    assert [found[place]["count"] for place in ("0.2", "0.5", "0.7", "last step", "0.0")] == [2, 2, 2, 2, 0]
    assert found["0.5"]["mean_value"] == 0.375
    assert found["0.5"]["histogram"] == [1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert found["last step"]["mean_label"] == 0.5
    assert found["0.0"]["mean_value"] is None


def test_length_bias_by_hand() -> None:
    """Right ones have 2 and 3 steps, wrong ones 4 and 5: correlation -2 / sqrt(5)."""
    rows = [row(f"p/{k}", [2] * (size - 1), is_correct=size < 4) for k, size in enumerate((2, 3, 4, 5))]
    found = length_bias(rows)
    assert (found["right"]["mean_steps"], found["wrong"]["mean_tokens"]) == (2.5, 4.5)
    assert found["steps_and_outcome"] == pytest.approx(-2 / 5**0.5, abs=1e-5)
    assert found["position_and_value"] is None, "every value is 1/2"
    assert correlation([1, 2, 3], [2, 4, 6]) == 1.0


def test_means_of_inner_steps_and_outcomes_are_apart_with_intervals_over_problems() -> None:
    """Problem p: values 0.5 and 0, wrong; q: 1, right. Drawn whole: p p (mean 1/4), p q (1/2), q q (1)."""
    rows = [row("p/0", [2, 0], is_correct=False), row("q/0", [4], is_correct=True)]
    found = inner_means(rows)
    assert found["steps"] == 3
    assert found["mean_value"] == {"mean": 0.5, "low": 0.25, "high": 1.0, "n": 2}
    assert found["share_of_zero"] == {"mean": 0.33333, "low": 0.0, "high": 0.5, "n": 2}
    assert terminal_means(rows) == {"accuracy": {"mean": 0.5, "low": 0.0, "high": 1.0, "n": 2}, "labelled_steps": 2}
    unknown = replace(rows[0], values=[None, None, 0.0], labels=[None, None, 0.0])
    assert inner_means([unknown])["mean_value"] is None


def test_widths_and_labels_left_out() -> None:
    found = widths([replace(GOOD, labels=[None, 0.5, 1.0, 1.0], weights=[0.0, 0.5, 1.0, 1.0])])
    assert found["left_out"] == 1
    assert found["mean_weight"] == 0.75, "of the inner steps: 0.5 and 1"
    assert sum(found["histogram"]) == 3


class Marked:
    """An answer stands after ####."""

    def grade(self, gold: str, text: str, num_options: int) -> Grade:
        return Grade(text.partition("####")[2].strip() or None, False)


def test_the_stage_writes_one_document_and_finds_leaks_with_a_task(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    leak = replace(GOOD, id="p/9", steps=["a\n", "#### 7\n", "so\n", "#### 7"])
    write_records(path, [GOOD, LOST, ODD, leak])
    task: Any = Marked()
    found = StepStatistics().run(str(path), StageContext(task, tmp_path / "s.json", 10.0))
    assert found["leaks"] == {"count": 1, "listed": [{"trajectory": "p/9", "step": 2, "num_steps": 4, "answer": "7"}]}
    assert (found["trajectories"], found["problems"], found["steps"]) == (4, 1, 16)
    assert found["terminal"]["accuracy"] == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1}
    assert found["impossible"]["count"] == 1
    assert StepStatistics().run(str(path), StageContext(None, tmp_path / "s.json", 10.0))["leaks"] is None


def test_a_file_without_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text("")
    with pytest.raises(BadInput, match=r"labels.jsonl: no labelled step to describe"):
        StepStatistics().run(str(path), StageContext(None, tmp_path / "s.json", 10.0))
