"""Every instruction of IFEval on a text that follows it and on one that does not, in each published form of a label."""

import json
from typing import Any

import pytest

from benchmarks.grading.verifier_cases import FOLLOWED
from espalier.data.sources import BadRow
from espalier.data.verifiers.instruction_labels import read_instructions
from espalier.data.verifiers.instructions import INSTRUCTIONS, RLVR_NAMES, count_sentences, count_words, holds


def test_all_25_instructions_have_a_case() -> None:
    assert [case[0] for case in FOLLOWED] == list(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == len(RLVR_NAMES) == 25
    assert {identity for identity, _, _ in RLVR_NAMES.values()} == set(INSTRUCTIONS)


@pytest.mark.parametrize(("identity", "arguments", "good", "bad"), FOLLOWED)
def test_an_instruction_tells_who_follows_it(identity: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    label = {"instruction_id_list": [identity], "kwargs": [{**arguments, "unused": None}]}
    (instruction,) = read_instructions(label)
    assert instruction.is_followed(good)
    assert not instruction.is_followed(bad)
    assert not instruction.is_followed("  ")


def test_the_forms_of_labels_mean_the_same() -> None:
    one = read_instructions('{"func_name": "verify_paragraph_count", "N": 3, "quantifier": null}')
    two = read_instructions(
        "[{'instruction_id': ['length_constraints:number_paragraphs'], 'kwargs': [{'num_paragraphs': 3}]}]"
    )
    label = {"instruction_id_list": ["length_constraints:number_paragraphs"], "kwargs": [{"num_paragraphs": 3.0}]}
    three = read_instructions(json.dumps(label))
    assert one == two == three
    assert one[0].is_followed("a * * * b *** c")


@pytest.mark.parametrize(("label", "message"), [
    ({"func_name": "verify_nothing"}, "there is no instruction 'verify_nothing'"),
    ({"func_name": "verify_bullet_points"}, "lacks 'num_bullets'"),
    ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "about"}, "relation must be one of"),
    ({"func_name": "verify_bullet_points", "N": "three"}, "must be a whole number"),
    ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, "of equal length"),
    ({"func_name": "verify_keywords", "keyword_list": "cat"}, "keywords must be a list of texts, got 'cat'"),
    ({"func_name": "validate_forbidden_words", "forbidden_words": [3]}, "forbidden_words must be a list of texts"),
    ([], "names no instruction"),
    ("not json", "neither JSON nor a Python literal"),
])  # fmt: skip
def test_a_label_that_is_none_is_refused_by_name(label: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        read_instructions(label)


def test_counts_by_hand() -> None:
    assert count_words("It's a well-known fact: 3 of 4.") == 9
    assert count_words("") == count_sentences("...") == 0
    assert count_sentences("Dr. Ng came at 3.5 p. He left! Did he? Yes") == 4
    assert count_sentences("他来了。她走了！") == 2
    assert [holds(n, "around", 30) for n in (26, 27, 33, 34)] == [False, True, True, False]


def test_a_choice_is_looked_for_in_the_response_and_not_the_other_way_round() -> None:
    (choice,) = read_instructions({"func_name": "validate_choice", "options": "yes, no or maybe"})
    assert choice.is_followed("I say yes.")
    assert not choice.is_followed("e")


def test_a_letter_with_a_bracket_is_no_article() -> None:
    (choice,) = read_instructions({"func_name": "validate_choice", "options": "a), b), c), d)"})
    assert [choice.is_followed(text) for text in ("It is b) 42.", "(c)", "D", "D)")] == [True] * 4
    assert not choice.is_followed("This is a long answer to a question.")
    (listed,) = read_instructions({"func_name": "validate_choice", "options": "(A), (B), or (C)"})
    assert listed.is_followed("The answer is (C).")
    assert not listed.is_followed("A cat or a dog.")


@pytest.mark.parametrize(
    "options", ["(yes, no, maybe)", "yes, no, maybe)", "('yes', 'no', 'maybe')", "['yes', \"no\", 'maybe']"]
)
def test_brackets_around_a_list_of_choices_are_no_part_of_them(options: str) -> None:
    (choice,) = read_instructions({"func_name": "validate_choice", "options": options})
    assert [choice.is_followed(f"I say {word}.") for word in ("yes", "no", "maybe", "never")] == [True] * 3 + [False]


def test_a_tuple_s_text_keeps_its_first_and_last_choice() -> None:
    text = "('My answer is yes.', 'My answer is no.', 'My answer is maybe.')"
    (choice,) = read_instructions({"func_name": "validate_choice", "options": text})
    assert all(choice.is_followed(f"Well. My answer is {word}.") for word in ("yes", "no", "maybe"))
    (letters,) = read_instructions({"func_name": "validate_choice", "options": "((A), (B))"})
    assert [letters.is_followed(reply) for reply in ("It is (B).", "A cat or a dog.")] == [True, False]


def test_a_section_that_is_marked_by_a_sign_needs_no_number() -> None:
    (sections,) = read_instructions({"func_name": "validate_sections", "section_splitter": "Part:", "N": 2})
    assert sections.is_followed("Part: one thing\nPart: 2 more")
    assert not sections.is_followed("Part: one thing\nPart 2 more")
