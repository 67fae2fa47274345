"""Every instruction of IFEval on a text that follows it and on one that does not, in each published form of a label.

Names and arguments of the RLVR sets are those of Lambert et al. 2024 (Tulu 3), with what each of them asks for.
"""

import json
from typing import Any

import pytest

from benchmarks.grading.verifier_cases import FOLLOWED
from espalier.data.sources import BadRow
from espalier.data.verifiers.instruction_labels import Instruction, read_instructions
from espalier.data.verifiers.instructions import INSTRUCTIONS, RLVR_NAMES, count_sentences, count_words, holds
from espalier.data.verifiers.verify import Check, verify, write_checks

# Published name → its arguments there, ours, a text that follows it and one that does not.
RLVR: dict[str, tuple[dict[str, Any], Instruction, str, str]] = {
    "verify_keywords": (
        {"keyword_list": ["sea", "sky"]}, Instruction("keywords:existence", {"keywords": ["sea", "sky"]}),
        "The sky and the Sea.", "The sky."),
    "verify_keyword_frequency": (
        {"word": "sun", "N": 2},
        Instruction("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "exactly"}),
        "Sun and sun.", "Sun, sun, sun."),
    "validate_forbidden_words": (
        {"forbidden_words": ["cat"]}, Instruction("keywords:forbidden_words", {"forbidden_words": ["cat"]}),
        "A dog.", "A cat."),
    "verify_letter_frequency": (
        {"letter": "q", "N": 1},
        Instruction("keywords:letter_frequency", {"letter": "q", "let_frequency": 1, "let_relation": "exactly"}),
        "quit", "q q"),
    "validate_response_language": (
        {"language": "de"}, Instruction("language:response_language", {"language": "de"}),
        "Das ist ein ganz einfacher deutscher Satz über das Wetter.",
        "This is a plain English sentence about the weather."),
    "verify_sentence_constraint": (
        {"N": 2, "quantifier": "at least"},
        Instruction("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}),
        "One is here. Two is too.", "One is here."),
    "verify_paragraph_count": (
        {"N": 2}, Instruction("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
        "one\n* * *\ntwo", "one\n\ntwo"),
    "validate_word_constraint": (
        {"N": 20, "quantifier": "around"},
        Instruction("length_constraints:number_words", {"num_words": 20, "relation": "around"}), "a " * 18, "a " * 17),
    "validate_paragraphs": (
        {"N": 3, "first_word": "Then", "i": 2},
        Instruction("length_constraints:nth_paragraph_first_word",
                    {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Then"}),
        "First.\n\nThen.\n\nLast.", "Then.\n\nFirst.\n\nLast."),
    "validate_placeholders": (
        {"N": 2}, Instruction("detectable_content:number_placeholders", {"num_placeholders": 2}),
        "[name] [place] [day]", "[name]"),
    "verify_postscript": (
        {"postscript_marker": "P.S."},
        Instruction("detectable_content:postscript", {"postscript_marker": "P.S."}), "Bye. P.S. More.", "Bye. P.S."),
    "verify_bullet_points": (
        {"N": 2}, Instruction("detectable_format:number_bullet_lists", {"num_bullets": 2}),
        "* one\n* two", "* one\n* two\n* three"),
    "validate_choice": (
        {"options": ["red", "blue"]},
        Instruction("detectable_format:constrained_response", {"options": ["red", "blue"]}),
        "It is red.", "It is green."),
    "validate_highlighted_sections": (
        {"N": 2}, Instruction("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
        "*one* *two* *three*", "*one*"),
    "validate_sections": (
        {"N": 2, "section_splitter": "Section"},
        Instruction("detectable_format:multiple_sections",
                    {"section_spliter": "Section", "num_sections": 2, "relation": "exactly"}),
        "Section 1 a\nSection 2 b", "Section 1 a\nSection 2 b\nSection 3 c"),
    "validate_json_format": ({}, Instruction("detectable_format:json_format"), '{"a": 1}', "a: 1"),
    "validate_title": ({}, Instruction("detectable_format:title"), "<<Joy>> text", "Joy text"),
    "validate_repeat_prompt": (
        {"original_prompt": "Say it."}, Instruction("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}),
        "Say it. Yes.", "Yes."),
    "validate_two_responses": ({}, Instruction("combination:two_responses"), "one\n******\ntwo", "one\n***\ntwo"),
    "validate_frequency_capital_words": (
        {"N": 1, "quantifier": "at most"},
        Instruction("change_case:capital_word_frequency", {"capital_frequency": 1, "capital_relation": "at most"}),
        "GO now", "GO NOW"),
    "validate_uppercase": (
        {}, Instruction("change_case:english_capital"), "THIS IS A PLAIN ENGLISH SENTENCE.",
        "This is a plain English sentence."),
    "validate_lowercase": (
        {}, Instruction("change_case:english_lowercase"), "this is a plain english sentence.",
        "This is a plain English sentence."),
    "validate_end": (
        {"end_phrase": "That is all."}, Instruction("startend:end_checker", {"end_phrase": "That is all."}),
        "So. That is all.", "That is all. Bye."),
    "validate_quotation": ({}, Instruction("startend:quotation"), '"all of it"', '"half" of it'),
    "validate_no_commas": ({}, Instruction("punctuation:no_comma"), "one; two", "one, two"),
}  # fmt: skip


def test_all_25_instructions_have_a_case() -> None:
    assert [case[0] for case in FOLLOWED] == list(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == len(RLVR) == 25
    assert RLVR.keys() == RLVR_NAMES.keys()
    assert {instruction.id for _, instruction, _, _ in RLVR.values()} == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", RLVR)
def test_a_name_of_the_rlvr_sets_means_what_it_asks_for_there(name: str) -> None:
    arguments, wanted, good, bad = RLVR[name]
    # a row of these sets has every argument of all of them, null where it is another's
    every = dict.fromkeys(key for other, *_ in RLVR.values() for key in other)
    label = json.dumps({"func_name": name, **every, **arguments})
    assert read_instructions(label) == (wanted,)
    scores = [verify(text, write_checks([Check("ifeval", label)]))[0].result.score for text in (good, bad, "")]
    assert scores == [1.0, 0.0, 0.0]


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
