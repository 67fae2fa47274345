"""Answers with stated probabilities, read by a rule; nothing ambiguous becomes a number."""

import pytest

from espalier.data.answers.confidence_phrases import phrase_confidence
from espalier.data.answers.stated_answers import stated_answers, stated_forecast


def test_an_answer_line_and_a_confidence_line_are_read() -> None:
    assert stated_answers("Answer: fish\nConfidence: 60%") == [("fish", 0.6)]
    assert stated_answers("I think so.\n  Answer:  the red fish \nConfidence: 0.25\n") == [("the red fish", 0.25)]


def test_a_paragraph_names_alternatives_in_its_order() -> None:
    stated = stated_answers("It is fish (60%), or else rice (30%) or old eggs (10 %).")
    assert stated == [("fish", 0.6), ("rice", 0.3), ("old eggs", 0.1)]


def test_an_answer_without_a_confidence_is_certain() -> None:
    assert stated_answers("Answer: fish") == [("fish", 1.0)]


@pytest.mark.parametrize(
    "response",
    [
        "",
        "fish",
        "Answer: fish\nConfidence: 150%",
        "Answer: fish\nConfidence: high",
        "Answer: fish\nAnswer: rice\nConfidence: 50%",
        "Answer: fish\nConfidence: 50%\nConfidence: 90%",
        "It is fish (160%) or rice (20%).",
        "Confidence: 50%",
    ],
)
def test_what_is_missing_impossible_or_contradicts_itself_is_nothing(response: str) -> None:
    assert stated_answers(response) == []
    assert stated_forecast(response, "fish").most_confident == (None, 1.0)


def test_a_repeated_answer_counts_once_and_as_it_was_said_first() -> None:
    assert stated_answers("It is fish (60%), or else Fish (40%).") == [("fish", 0.6)]


def test_the_gold_has_what_is_stated_of_any_of_its_names() -> None:
    response = "It is fish (60%), or else rice (30%)."
    assert stated_forecast(response, "rice").gold == 0.3
    assert stated_forecast(response, ["the fish", "trout"]).gold == 0.6
    assert stated_forecast(response, "eggs").gold == 0.0


def test_letters_and_numbers_are_answers_as_they_are_written() -> None:
    assert stated_answers("Answer: A\nConfidence: 60%") == [("A", 0.6)]
    assert stated_forecast("Answer: A\nConfidence: 60%", "a").gold == 0.6
    assert stated_forecast("Answer: -5\nConfidence: 60%", "5").gold == 0.0
    assert stated_forecast("Answer: 1.5\nConfidence: 60%", ["15", "1.5"]).gold == 0.6
    assert stated_answers("It is A (60%), or else 34 (30%) or 3/4 (10%).") == [("A", 0.6), ("34", 0.3), ("3/4", 0.1)]


@pytest.mark.parametrize(
    "line",
    ["confidence: 60%", "**Confidence:** 60%", "Confidence is 60%", "I am 60% confident.", "CONFIDENCE = 0.6",
     "Confidence: 60% or so"],
)  # fmt: skip
def test_a_confidence_that_cannot_be_read_is_no_certainty(line: str) -> None:
    assert stated_answers(f"Answer: fish\n{line}") == []
    assert stated_answers(f"{line}\nAnswer: fish") == []
    assert stated_answers(f"Answer: fish, {line}") == []


def test_two_confidences_of_which_one_cannot_be_read_contradict_each_other() -> None:
    assert stated_answers("Answer: fish\nConfidence: 60%\n**Confidence:** 90%") == []
    assert stated_answers("I said so with confidence.\nAnswer: fish\nConfidence: 60%") == [("fish", 0.6)]


def test_a_comma_begins_another_alternative_of_a_paragraph_and_none_of_an_answer_line() -> None:
    assert stated_answers("It is Washington, D.C. (60%).")[0][0] == "D.C."
    assert stated_answers("Answer: Washington, D.C.\nConfidence: 60%") == [("Washington, D.C.", 0.6)]


def test_the_most_confident_answer_is_the_first_of_equals() -> None:
    assert stated_forecast("It is rice (20%), or else fish (40%) or eggs (40%).", "x").most_confident == ("fish", 0.4)


RLCR = (
    "<think> It swims. </think>\n<answer> fish </answer>\n<analysis> It may float. </analysis>\n"
    "<confidence> 0.6 </confidence>"
)


@pytest.mark.parametrize(
    ("response", "confidence"),
    [
        (RLCR, 0.6),
        (RLCR.removeprefix("<think>"), 0.6),  # where the prompt opens the reasoning
        (RLCR.removeprefix("<think> It swims. </think>\n"), 0.6),
        (RLCR.replace("<analysis> It may float. </analysis>\n", ""), 0.6),
        (RLCR.replace("It swims", "Answer: rice\nor <answer> rice </answer>"), 0.6),
        (RLCR.replace("It may float", "My confidence, 90%, is (80%) too high\nAnswer: rice"), 0.6),
        (RLCR.replace(" 0.6 ", "1"), 1.0),
        (RLCR.replace(" 0.6 ", "\n.25\n"), 0.25),
        (RLCR.replace(" 0.6 ", "0"), 0.0),
    ],
)
def test_tags_behind_the_reasoning_are_read_as_published(response: str, confidence: float) -> None:
    assert stated_answers(response) == [("fish", confidence)]
    assert stated_forecast(response, "fish").gold == confidence


@pytest.mark.parametrize(
    "response",
    [
        RLCR.replace(" 0.6 ", ""),
        RLCR.replace(" 0.6 ", "60%"),
        RLCR.replace(" 0.6 ", "60"),
        RLCR.replace(" 0.6 ", "1.01"),
        RLCR.replace(" 0.6 ", "-0.6"),
        RLCR.replace(" 0.6 ", "high"),
        RLCR.replace(" 0.6 ", "0.6 or 0.7"),
        RLCR.replace(" fish ", " "),
        RLCR.replace("</confidence>", ""),
        RLCR.replace("<confidence>", ""),
        RLCR.replace("</answer>", ""),
        RLCR.replace("<answer>", "<Answer>"),
        RLCR.replace("</think>", ""),
        RLCR.replace("</analysis>", ""),
        RLCR.replace(" fish ", " fish </answer> <answer> rice "),
        RLCR.replace(" 0.6 ", " 0.6 </confidence> <confidence> 0.9 "),
        RLCR.replace("</think>", "</think> I say"),
        RLCR + " Or so.",
        RLCR.partition("\n<confidence>")[0],
        "<answer>fish</answer>",
        "<confidence>0.6</confidence> <answer>fish</answer>",
        "Answer: fish\n<confidence>0.6</confidence>",
        "Answer: fish\nConfidence: 60%\n<answer>fish</answer>",
        "It is <answer>fish (60%)</answer>.",
    ],
)
def test_tags_that_are_malformed_offer_nothing(response: str) -> None:
    assert stated_answers(response) == []


def test_lines_behind_reasoning_without_tags_are_read_as_lines() -> None:
    assert stated_answers("<think>An <answer> is due.</think>\nAnswer: fish\nConfidence: 60%") == [("fish", 0.6)]


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("She was born in 1950.", 1.0),
        ("She was likely born in Rome.", 0.75),
        ("It is unlikely that she was born in Rome.", 0.15),
        ("It is almost certain that she sang.", 0.95),
        ("It is possible, even likely, that she sang.", 0.3),
        ("I am 40% sure that she probably sang.", 0.4),
        ("There is a toss-up here.", 0.5),
        ("She grew 120% faster.", 1.0),
        ("It is not likely that she sang.", 0.15),
        ("It isn't very likely that she sang.", 0.15),
        ("It isn’t probable.", 0.1),
        ("It is not unlikely that she sang.", 0.75),
        ("It is not at all possible.", 0.05),
        ("It is impossible that she sang.", 0.05),
        ("She starred in Mission: Impossible.", 1.0),
        ("She found it impossible to return to Russia.", 1.0),
        ("It is possible, if not probable, that she sang.", 0.3),
        ("It is not probable that she sang.", 0.1),
        ("It is not impossible.", 0.3),
        ("It is not doubtful that she sang.", 0.75),
        ("It is not known, but likely, that she sang.", 0.75),
        ("She sang; not so likely, but possible, is Rome.", 0.15),
    ],
)
def test_words_state_the_confidence_of_the_table(text: str, confidence: float) -> None:
    assert phrase_confidence(text) == confidence
