"""Which option a response that reasons before or after its answer has chosen."""

import pytest

from espalier.data.answers.grading import grade_answer
from espalier.data.answers.letters import choose_letter


def right_letters(response: str) -> str:
    """The golds of A to D that the response is right for: of an honest grader none or one."""
    return "".join(
        gold for gold in "ABCD" if grade_answer(prediction=response, gold=gold, kind="choice", num_options=4).is_correct
    )


OPTION_BY_OPTION = [
    "Option A: The text never says that.\nOption B: Line 2 says so.\n\nTherefore, the correct answer is B.",
    "**Option A:** The text never says that.\n**Option B:** Line 2 says so.\n\n**Answer: B**",
    "- Option A (cats): not in the text.\n- Option B (dogs): in the text.\nSo the answer is (B).",
    "Option A. The text never says that. Option B. The text says so. The answer is B.",
    "Option A – no support. Option B – line 2. The answer is B.",
    "Choice (A): no. Choice (B): yes.\nThe correct choice is B",
    "Answer A: no. Answer B: yes. Thus the answer is B.",
    "选项A：不符合。选项B：符合。答案是B。",
    "Comparing option A and option B, we see B follows. The answer is B.",
    "If we choose A, then X contradicts. If we choose B, all holds. The answer is B.",
    "If the answer is A, X contradicts. If the answer is B, all holds. So the answer is B.",
    "Suppose the answer is A. Then X would contradict. So the answer is B.",
    "Suppose the answer were (C): a contradiction. The best choice is (B).",
    "Is the answer A? The text says no such thing. The answer is B.",
    "We may choose A or C only without rule 2. The answer is B.",
    "Option A: too broad. Option C: off topic. I choose B.",
    "Option A is tempting, and I would go with option B.",
    "Option A talks about cats.\nOption B talks about dogs.\n\nSo it must be B.",
    "Option A: too broad.\nOption B: line 2.\nOption B is correct.",
]
ANSWER_FIRST = [
    "Answer: B\nOption A: no. Option C: no.",
    "The best answer is (B). Option (A) would need a premise that is not there; option (C) repeats the argument.",
    "The correct answer is B.\n\nExplanation:\nOption A: no.\nOption B: Line 2 says so.\nOption C: Too broad.",
    "正确答案是B。选项A：太宽。选项C：无关。",
]
STILL_IN_DOUBT = [
    "At first glance the answer is A. But X. The answer is B.",
    "Option A is correct. The answer is B.",
    "I choose A. The answer is B.",
    "The answer is B. Option A is right.",
    "The answer is B. Actually, option A is in line 2.",
    "The answer is B. Wait, A is right.",
    "Option A: The text says so.\nOption B: Line 2 says so.",
    "Option A: The text says so.\nOption B: Line 2 says so.\nOption C: Too much.",
    "选项A：符合。选项B：符合。",
    "Option A is tempting, and one may go with option B.",
    "Let us look at each option.\nOption A talks about cats.\nOption B talks about dogs.",
    "Answer: A\nAnswer: B",
    "The correct option is A and the answer is B.",
    "The answer is A or option B.",
]
ONLY_SUPPOSED = [
    "If the answer is B, then rule 2 is broken.", "If we choose B, all holds.", "Suppose option B is what they mean.",
    "We must see whether the answer is B.", "Is the answer B?", "Assuming the correct option is B, all holds.",
]  # fmt: skip


@pytest.mark.parametrize("response", [*OPTION_BY_OPTION, *ANSWER_FIRST])
def test_the_answer_counts_and_not_the_options_that_are_discussed(response: str) -> None:
    assert right_letters(response) == "B"


@pytest.mark.parametrize("response", STILL_IN_DOUBT)
def test_two_answers_stay_wrong(response: str) -> None:
    assert right_letters(response) == ""


@pytest.mark.parametrize("response", ONLY_SUPPOSED)
def test_an_answer_that_is_only_supposed_chooses_nothing(response: str) -> None:
    assert choose_letter(response, 4)[0] is None


@pytest.mark.parametrize(("response", "letter"), [
    ("The answer is A. Wait, option B is right.", "B"), ("The answer is A. No, I choose C.", "C"),
    ("Option B", "B"), ("Option B: line 2 says so.", "B"), ("It must be option B.", "B"), ("We go with (D).", "D"),
    ("选择B", "B"), ("选项B", "B"), ("我选择C。", "C"), ("The answer B follows from line 2.", "B"),
])  # fmt: skip
def test_an_option_that_is_named_alone_is_chosen(response: str, letter: str) -> None:
    assert choose_letter(response, 4)[0] == letter
