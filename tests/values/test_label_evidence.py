"""What labels by contrast rest on, by hand."""

from pathlib import Path

import pytest

from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.label_by_contrast import LabelByContrast
from espalier.values.contrast import Continuation, Contrast, RightEvidence, count_behind, right_evidence
from tests.values.test_contrast import FLAT, solution


def test_a_step_that_is_right_by_one_of_twenty_samples_is_counted_as_thin() -> None:
    """Of the step r 6 of 6 samples are right, of w 1 of 20, and of v none of 3."""
    ways = [("ra", True)] * 6 + [("wa", True)] + [("wb", False)] * 19 + [("va", False)] * 3
    continuations = [Continuation(solution(f"s{k}", way, is_correct), 0) for k, (way, is_correct) in enumerate(ways)]
    found = right_evidence(continuations, count_behind(continuations), Contrast(FLAT))
    assert found == RightEvidence(steps=2, by_one=1, contradicted=1)


def test_labels_that_rest_on_little_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    context, stage = StageContext(None, Path("out.jsonl"), 60), LabelByContrast("t", "s")
    stage._note_evidence(RightEvidence(steps=100, by_one=50, contradicted=9), context)
    assert not caplog.text
    stage._note_evidence(RightEvidence(steps=100, by_one=51, contradicted=11), context)
    assert "51 of 100 steps that are called right rest on one right solution each" in caplog.text
    assert "11 of 100 steps that are called right, because a right solution passed" in caplog.text
    assert (context.counts["right_by_one_solution"], context.counts["right_beside_far_better"]) == (51, 11)
