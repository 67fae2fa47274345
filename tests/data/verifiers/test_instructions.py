"""Every instruction of IFEval on a text that follows it and on one that does not, in each published form of a label."""

import json
from typing import Any

import pytest

from espalier.data.sources import BadRow
from espalier.data.verifiers.instruction_labels import read_instructions
from espalier.data.verifiers.instructions import INSTRUCTIONS, RLVR_NAMES, count_sentences, count_words, holds

# id, arguments, a text that follows it, a text that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["river", "boat"]}, "A Boat on the river.", "A boat on the lake."),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}, "Sun, sun.", "Sun, Sunday."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "Concatenate.", "The Cat."),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "less than"}, "Quit.", "q Q"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz einfacher deutscher Satz über das Wetter.",
     "This is a plain English sentence about the weather."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "Mr. Lee ran!", "A. B. Go! Stop!"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "don't stop now", "well-known man"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
     "First.\n\n**Then** more.", "Then.\n\nFirst."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [place]", "[name], []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. More.", "Bye. PS more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n- two\n* three"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "My answer is nothing."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     "Section 1 a\nSection 2 b", "Section 1 a\nSubsection 2 b"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', 'Here: {"a": 1}'),
    ("detectable_format:title", {}, "<<Joy>> text", "<< >> text"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes.", "Yes. Say it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "GO NOW ok", "GO now"),
    ("change_case:english_capital", {}, "THIS IS A PLAIN ENGLISH SENTENCE.", "THIS IS A PLAIN ENGLISH SENTENCe."),
    ("change_case:english_lowercase", {}, "this is a plain english sentence.", "This is a plain english sentence."),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'So. "that is all."\n', "That is all. Bye."),
    ("startend:quotation", {}, ' "all of it" ', '"half" of it'),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
]  # fmt: skip


def test_all_25_instructions_have_a_case() -> None:
    assert [case[0] for case in CASES] == list(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == len(RLVR_NAMES) == 25
    assert {identity for identity, _, _ in RLVR_NAMES.values()} == set(INSTRUCTIONS)


@pytest.mark.parametrize(("identity", "arguments", "good", "bad"), CASES)
def test_an_instruction_tells_who_follows_it(identity: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    label = {"instruction_id_list": [identity], "kwargs": [{**arguments, "unused": None}]}
    (instruction,) = read_instructions(label)
    assert instruction.is_followed(good)
    assert not instruction.is_followed(bad)
    assert not instruction.is_followed("  ")


def test_the_forms_of_labels_mean_the_same() -> None:
    one = read_instructions('{"func_name": "verify_paragraph_count", "N": 3, "quantifier": null}')
    two = read_instructions("[{'instruction_id': ['length_constraints:number_paragraphs'], 'kwargs': [{'num_paragraphs': 3}]}]")
    three = read_instructions(json.dumps({"instruction_id_list": ["length_constraints:number_paragraphs"], "kwargs": [{"num_paragraphs": 3.0}]}))  # fmt: skip
    assert one == two == three
    assert one[0].is_followed("a * * * b *** c")


@pytest.mark.parametrize(("label", "message"), [
    ({"func_name": "verify_nothing"}, "there is no instruction 'verify_nothing'"),
    ({"func_name": "verify_bullet_points"}, "lacks 'num_bullets'"),
    ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "about"}, "relation must be one of"),
    ({"func_name": "verify_bullet_points", "N": "three"}, "must be a whole number"),
    ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, "of equal length"),
    ([], "names no instruction"),
    ("not json", "neither JSON nor a Python literal"),
])  # fmt: skip
def test_a_label_that_is_none_is_refused_by_name(label: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        read_instructions(label)


def test_counts_by_hand() -> None:
    assert count_words("It's a well-known fact: 3 of 4.") == 7
    assert count_words("") == count_sentences("...") == 0
    assert count_sentences("Dr. Ng came at 3.5 p. He left! Did he? Yes") == 4
    assert count_sentences("他来了。她走了！") == 2
    assert [holds(n, "around", 30) for n in (26, 27, 33, 34)] == [False, True, True, False]


def test_a_choice_is_looked_for_in_the_response_and_not_the_other_way_round() -> None:
    (choice,) = read_instructions({"func_name": "validate_choice", "options": "yes, no or maybe"})
    assert choice.is_followed("I say yes.")
    assert not choice.is_followed("e")
