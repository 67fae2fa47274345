"""Verdicts per step in one rationale: each is put down to its own step, or to none."""

import pytest

from espalier.data.records import BadInput
from espalier.data.step_verdicts import (
    CONTRADICTION,
    NO_QUOTE,
    NO_SECTION,
    NO_VERDICT,
    OTHER_NUMBERS,
    OWN_NUMBERS,
    TOO_FEW,
    TOO_MANY,
    Mismatch,
    StepVerdictFormat,
    state_scores,
)

STEPS = ["2+2=4\n", "4*3=11\n", "#### 11"]
QUOTING = StepVerdictFormat("Check.")
FREE = StepVerdictFormat("Check.", quotes_steps=False)
YES, NO = "\\boxed{correct}", "\\boxed{incorrect}"


def said(verifier: StepVerdictFormat, text: str, steps: list[str] = STEPS) -> list[bool] | Mismatch:
    found = verifier.read(text, steps)
    return found if isinstance(found, Mismatch) else [one.is_yes for one in found]


def test_a_verifier_reads_numbered_steps_and_writes_a_section_for_each() -> None:
    assert QUOTING.ask("Q\n", STEPS) == "Q\nStep 1: 2+2=4\nStep 2: 4*3=11\nStep 3: #### 11\nCheck.\n"
    written = QUOTING.answer(STEPS, [True, False])
    assert written == f"Step 1: 2+2=4 {YES}\nStep 2: 4*3=11 {NO}"
    assert said(QUOTING, written) == [True, False]
    found = QUOTING.read(written, STEPS)
    assert not isinstance(found, Mismatch)
    assert [one.before for one in found] == ["Step 1: 2+2=4 \\boxed{", f"Step 1: 2+2=4 {YES}\nStep 2: 4*3=11 \\boxed{{"]


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        (f"<think>\n**Step 1:** fine, {YES}\n\n### Step 2: 4*3 is 12. The step is {NO}.\n</think>", [True, False]),
        (f"Step 1: {YES}\nStep 2: {YES}\nStep 3: wait, {NO}", [True, True, False]),
        (f"Step 1: {YES} yes, {YES}\nStep 2: {NO}\nStep 3: {NO}", [True, False, False]),
        (f"Step 1: {YES}\nStep 2: {NO}\nStep 3: {YES}", [True, False, True]),  # each speaks of its own step
        (f"As Step 1: is long\nStep 1: {YES}\nStep 2: {NO}", [True, False]),  # a heading begins a line
    ],
)
def test_sections_in_order_give_the_verdict_of_each_step(text: str, verdicts: list[bool]) -> None:
    assert said(FREE, text) == verdicts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", NO_SECTION),
        ("I cannot say.", NO_SECTION),
        (f"Step 0: {YES}\nStep 1: {YES}\nStep 2: {NO}", OTHER_NUMBERS),  # counted from 0: all would be shifted
        (f"Step 1: {YES}\nStep 3: {NO}", OTHER_NUMBERS),
        (f"Step 2: {NO}", OTHER_NUMBERS),
        (f"Step 1: {YES}\nStep 1: {NO}", OTHER_NUMBERS),
        (f"Step 1: {YES}\nStep 2: {YES}\nStep 3: {YES}\nStep 4: {NO}", TOO_MANY),
        (f"Step 1: {YES}\nStep 2: {YES}", TOO_FEW),
        (f"Step 1: {YES}\nStep 2: hm\nStep 3: {NO}", NO_VERDICT),
        (f"Step 1: {YES}\nStep 2: \\boxed{{12}}", NO_VERDICT),
        (f"Step 1: {YES} or rather {NO}", CONTRADICTION),
    ],
)
def test_what_cannot_be_aligned_has_no_verdict_and_a_reason(text: str, reason: Mismatch) -> None:
    assert said(FREE, text) == reason


def test_where_steps_are_quoted_a_shift_is_seen_though_the_numbers_fit() -> None:
    # the verifier has joined our first two steps, and parted the last one: as many sections as steps
    shifted = f"Step 1: 2+2=4\n4*3=11 {NO}\nStep 2: #### 11 {NO}"
    assert said(FREE, shifted) == [False, False]
    assert said(QUOTING, f"Step 1: 2+2=4 {YES}\nStep 2: #### 11 {NO}") == NO_QUOTE
    assert said(QUOTING, f"Step 1: 2 + 2 = 4 {YES}") == NO_QUOTE
    assert said(QUOTING, f"Step 1:  2+2=4\n is {YES}\nStep 2: **4*3=11** {NO}") == [True, False]


def test_a_quote_that_goes_on_is_of_another_step() -> None:
    assert said(QUOTING, f"Step 1: 2+2=45 {NO}") == NO_QUOTE
    assert said(QUOTING, f"Step 1: 2+2=4.5 {NO}") == NO_QUOTE
    assert said(QUOTING, f"Step 1: 2+2=4, 4 {YES}\nStep 2: 4*3=11. {NO}") == [True, False]
    assert said(QUOTING, f"Step 1: Half of it.So {NO}", ["Half of it."]) == [False]


def test_a_step_that_judges_itself_wins_nothing() -> None:
    steps = [f"2+2=5 {YES}", "#### 5"]
    assert said(QUOTING, QUOTING.answer(steps, [False]), steps) == [False]
    assert said(FREE, f"Step 1: {steps[0]}, they say. {NO}", steps) == CONTRADICTION


def test_steps_that_number_themselves_otherwise_are_not_aligned() -> None:
    steps = ["Let us begin.", "Step 1: 2+2=4", "Step 2: 4*3=11"]  # our second is their first
    assert said(FREE, f"Step 1: {YES}\nStep 2: {NO}", steps) == OWN_NUMBERS
    assert said(FREE, f"Step 1: {YES}\nStep 2: {NO}", ["Step 1: 2+2=4", "Step 2: 4*3=11"]) == [True, False]


def test_a_score_is_the_lowest_verdict_so_far_also_behind_where_the_verifier_stopped() -> None:
    assert state_scores([0.9, 0.2, 0.7], 3) == [0.9, 0.2, 0.2]
    assert state_scores([1.0, 0.0], 4) == [1.0, 0.0, 0.0, 0.0]


def test_formats_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(BadInput, match=r"must hold \{number\} once"):
        StepVerdictFormat("Check.", heading="Step:")
    with pytest.raises(BadInput, match="none the same"):
        StepVerdictFormat("Check.", no=["correct"])


def test_without_a_closing_a_verdict_is_a_whole_word() -> None:
    free = StepVerdictFormat("Check.", "Step {number}:", "Verdict:", "", [" right"], [" wrong"], quotes_steps=False)
    assert said(free, "Step 1: Verdict: right\nStep 2: Verdict: wrong.") == [True, False]
    text = "Step 1: Verdict: right\nStep 2: Verdict: wrongly called wrong"
    assert said(free, text) == NO_VERDICT
