"""ReAct responses: steps with their flags, and cleaning."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.splitters import clean_react_response, cleaned_react, react_steps, split_react

GOOD = (
    " The passage says all cats purr.\n"
    "Action 1: Read[option A]\n"
    "Observation 1: It says some cats purr.\n"
    "That is weaker.\n"
    "\n"
    "Thought 2: ok\n"
    "State 2: A is out, B is left.\n"
    "Action 2: Read[option A]\n"
    "Action 3: Finish[The answer is B.]\n"
)


def test_a_response_that_goes_on_from_thought_1_is_cut_at_its_labels() -> None:
    steps = react_steps(GOOD)
    assert "".join(step.text for step in steps) == GOOD
    assert [(step.type, step.index) for step in steps] == [
        *(("Thought", 1), ("Action", 1), ("Observation", 1), ("Thought", 2)),
        *(("State", 2), ("Action", 2), ("Action", 3)),
    ]
    assert steps[2].text == "Observation 1: It says some cats purr.\nThat is weaker.\n\n"
    assert [step.is_finish for step in steps] == [False] * 6 + [True]
    assert [step.is_duplicate for step in steps] == [False] * 5 + [True, False]
    assert [step.is_short for step in steps] == [False] * 3 + [True] + [False] * 3


LINES = st.lists(
    st.sampled_from(
        [
            *(
                "Thought 1: a",
                "Thought 2: so it is",
                "Thought:",
                "Action 2: Read[x]",
                " Observation 3: y",
                "State 1: z",
            ),
            *("Action 3: Finish[The answer is A.]", "Action 4: Finish[", "Thought is hard", "plain", "", " ", "\r"),
            *("Context: other", "Finish[The answer is B.]", "Thought 99999999999: x", "Action", "\0", "\ud800"),
        ]
    )
).map("\n".join)


@settings(max_examples=300, deadline=None)
@given(LINES)
def test_every_response_is_split_and_cleaned_without_an_error(response: str) -> None:
    assert "".join(split_react(response)) == response
    for joins_lines in (True, False):
        cleaned = cleaned_react(response, joins_lines=joins_lines)
        assert (cleaned.text is None) == bool(cleaned.reason)
        if cleaned.text is not None:
            assert cleaned.text.count("Finish[") >= 1
            assert sum(step.is_finish for step in react_steps(cleaned.text)) == 1
            assert clean_react_response(cleaned.text, joins_lines=joins_lines) == cleaned.text


def test_an_unlabelled_finish_that_joining_would_make_a_second_one_rejects_the_response() -> None:
    response = "Action 2: Read[x]\nFinish[The answer is B.]\nAction 3: Finish[The answer is A.]"
    assert cleaned_react(response).reason == "2 Finish steps once lines are joined, one is wanted"
    assert clean_react_response(response, joins_lines=False) == response


@pytest.mark.parametrize(
    ("response", "steps"),
    [
        ("Thought 1: a\nAction 1: b", [("Thought 1: a\n", "Thought", 1), ("Action 1: b", "Action", 1)]),
        ("\n\nThought 1: a\n", [("\n\nThought 1: a\n", "Thought", 1)]),
        ("so\n\n Thought 2: a", [("so\n\n", "Thought", 1), (" Thought 2: a", "Thought", 2)]),
        ("Thought: a\r\nAction: b", [("Thought: a\r\n", "Thought", None), ("Action: b", "Action", None)]),
        ("x\nThoughts 2: a\nThought about it", [("x\nThoughts 2: a\nThought about it", "Thought", 1)]),
        ("x\nAction 2 Finish[The answer is A.]", [
            ("x\n", "Thought", 1),
            ("Action 2 Finish[The answer is A.]", "Action", 2),
        ]),
    ],
)  # fmt: skip
def test_these_steps_are_found(response: str, steps: list[tuple[str, str, int | None]]) -> None:
    assert [(step.text, step.type, step.index) for step in react_steps(response)] == steps


def test_cleaning_joins_lines_drops_short_steps_and_ends_at_the_finish_line() -> None:
    assert clean_react_response(GOOD + "It is B.\nThought 4: more") == (
        "The passage says all cats purr.\n"
        "Action 1: Read[option A]\n"
        "Observation 1: It says some cats purr. That is weaker.\n"
        "State 2: A is out, B is left.\n"
        "Action 2: Read[option A]\n"
        "Action 3: Finish[The answer is B.]"
    )


def test_the_strict_form_keeps_lines_as_they_are() -> None:
    assert clean_react_response(GOOD + "It is B.\n", joins_lines=False) == GOOD.strip()


def test_a_finish_line_of_another_question_does_not_count() -> None:
    two = GOOD + "\nContext: Dogs bark.\nThought 1: x\nAction 1: Finish[The answer is A.]\n"
    assert clean_react_response(two) == clean_react_response(GOOD)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "the response is empty"),
        (" \n ", "the response is empty"),
        ("Context: x\nAction 1: Finish[The answer is A.]", "the response is empty"),
        ("a\nThought 2: the answer is A", "no Finish step, one is wanted"),
        ("a\nThought 2: Finish[The answer is A.]", "no Finish step, one is wanted"),
        (GOOD + GOOD, "2 Finish steps, one is wanted"),
        ("a\nAction 1: Finish[The answer is A.]", "2 lines, at least 3 are wanted"),
    ],
)
def test_a_rejected_response_has_a_reason(response: str, reason: str) -> None:
    assert cleaned_react(response, min_steps=3).reason == reason
    assert clean_react_response(response, min_steps=3) is None


def test_a_finish_step_over_two_lines_keeps_its_answer() -> None:
    response = "a\nAction 1: Finish[The answer is\nB.] yes\nso"
    assert clean_react_response(response) == "a\nAction 1: Finish[The answer is B.] yes"
    assert clean_react_response(response, joins_lines=False) == "a\nAction 1: Finish[The answer is\nB.] yes"
