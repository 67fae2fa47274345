"""Which option, and which truth value, a response that reasons before or after its answer has chosen."""

import pytest

from espalier.data.answers.grading import grade_answer
from espalier.data.answers.letters import choose_letter
from espalier.data.answers.truth_values import choose_truth


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


# --- truth values -----------------------------------------------------------------------------------------------

LEFT_OPEN = [
    "We cannot determine whether the conclusion is true.",
    "It is impossible to determine whether the statement is true or false.",
    "The premises do not tell us if the statement is true. So it is unknown.",
    "There is not enough information to say that the statement is true.",
    "We do not know whether the conclusion is true.\nTherefore, the answer is Unknown.",
    "Nothing shows that the conclusion is true. Nothing shows it is false. It is uncertain.",
    "We can't conclude that the statement is false, nor that the statement is true.",
    "The claim is false in one model. Therefore we cannot determine whether the conclusion is true.",
]
SUPPOSED_THEN_SETTLED = [
    ("If the statement is true, then Rex is red, which contradicts premise 2. So it is false.", "False"),
    ("Assume the conclusion is false. Then we get a contradiction. Hence it is true.", "True"),
    ("Suppose the statement is true. Then Rex is red. This cannot be. Thus, it must be false.", "False"),
    ("The statement that Rex is not red is false.", "False"), ("The claim does not follow, so it is false.", "False"),
    ("Since Rex is not red, the statement is false.", "False"),
    ("At first sight the conclusion is true. Premise 3 denies it. So it is false.", "False"),
    ("We must decide whether the claim is true or false. Premise 2 settles it: the claim is true.", "True"),
    ("Rex is not a dog, so the conclusion is true.", "True"),
]  # fmt: skip
ASSERTS_NOTHING = [
    "It is not the case that the statement is true.", "If the statement is true, Rex is red.",
    "The statement is true. But it cannot be determined.", "I do not think the statement is true.",
    "Nobody said that the question is whether the claim is false.", "It is not true that the statement is false.",
]  # fmt: skip


@pytest.mark.parametrize(("response", "truth"), [*((text, "Unknown") for text in LEFT_OPEN), *SUPPOSED_THEN_SETTLED])
def test_a_truth_value_that_is_supposed_or_left_open_is_none(response: str, truth: str) -> None:
    assert choose_truth(response)[0] == truth


@pytest.mark.parametrize("response", ASSERTS_NOTHING)
def test_what_is_denied_supposed_or_taken_back_is_not_right(response: str) -> None:
    graded = {
        gold: grade_answer(prediction=response, gold=gold, kind="boolean3") for gold in ("True", "False", "Unknown")
    }
    assert not any(grade.is_correct for grade in graded.values())
