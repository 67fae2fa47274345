"""Steps join to the response; their token ends are what a search over every prefix finds."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.data.records import BadInput
from espalier.data.splitters import split_lines
from espalier.data.steps import check_join
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import read_tokens, token_step_ends
from espalier.sampling.requests import decode

LINES = st.text(alphabet="ab \n\t\r\u2028\0é🙂", max_size=30)


@given(st.text() | LINES)
def test_lines_join_to_the_response(response: str) -> None:
    assert "".join(split_lines(response)) == response


@given(LINES.filter(str.strip))
def test_no_step_of_a_response_with_text_is_blank(response: str) -> None:
    assert all(step.strip() for step in split_lines(response))


@pytest.mark.parametrize(
    ("response", "steps"),
    [
        ("", []),
        ("\n", ["\n"]),
        (" \n\n", [" \n\n"]),
        ("a", ["a"]),
        ("a\nb", ["a\n", "b"]),
        ("a\nb\n", ["a\n", "b\n"]),
        ("a\n\n \nb", ["a\n\n \n", "b"]),
        ("a\n  ", ["a\n  "]),
        ("\n\na\nb", ["\n\na\n", "b"]),
        ("a\u2028b\r\nc", ["a\u2028b\r\n", "c"]),
    ],
)
def test_blank_lines_belong_to_the_step_before_them(response: str, steps: list[str]) -> None:
    assert split_lines(response) == steps


def test_a_splitter_that_loses_text_is_refused() -> None:
    with pytest.raises(BadInput, match="p/0: the steps do not join"):
        check_join(["a", "b"], "a b", "p/0")


def ends_by_search(steps: list[str], prompt_ids: list[int], response_ids: list[int], text_of: Any) -> list[int]:
    """Every prefix of the response decoded, with the whole prompt before it."""
    ends, target = [], text_of(prompt_ids)
    for step in steps[:-1]:
        target += step
        ends.append(next(n for n in range(len(response_ids) + 1)
                         if text_of([*prompt_ids, *response_ids[:n]]).startswith(target)))  # fmt: skip
    return [*ends, len(response_ids)] if steps else []


def check_ends(tokenizer: Any, prompt: str, response: str) -> list[int]:
    text_of = decode(tokenizer)
    prompt_ids = tokenizer(prompt).input_ids
    response_ids = [*tokenizer(response).input_ids, tokenizer.eos_token_id]
    steps = split_lines(response)
    ends = token_step_ends(steps, read_tokens(prompt_ids, response_ids, text_of))
    assert ends == ends_by_search(steps, prompt_ids, response_ids, text_of)
    for number, end in enumerate(ends, 1):
        assert text_of(response_ids[:end]) == "".join(steps[:number])
    return ends


def test_token_ends_of_solutions_are_those_of_a_search(tokenizer: Any, task: WordArithmetic) -> None:
    for row in task.demonstrations("train")[:60]:
        ends = check_ends(tokenizer, row.prompt, row.completion)
        assert ends == sorted(set(ends))


ODD = st.lists(
    st.sampled_from(["🙂", "é", "naïve", "buys: 3 + 4 = 7", " ", "\n", "\n\n", "\0", "\u2028", "中文", "####"])
)


@given(ODD.map("".join))
def test_token_ends_of_text_outside_the_training_text_are_those_of_a_search(tokenizer: Any, response: str) -> None:
    if response:
        check_ends(tokenizer, "How many 🙂 now?\n", response)


def test_the_tokens_of_two_steps_written_out(tokenizer: Any) -> None:
    first = tokenizer("buys: 3 + 4 = 7\n").input_ids
    last = tokenizer("#### 7").input_ids
    ids = [*first, *last, tokenizer.eos_token_id]
    ends = token_step_ends(["buys: 3 + 4 = 7\n", "#### 7"], read_tokens([], ids, decode(tokenizer)))
    assert ends == [len(first), len(first) + len(last) + 1]


def test_tokens_the_sampler_split_otherwise_than_the_tokenizer_are_kept_as_they_are(tokenizer: Any) -> None:
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
    newline = tokenizer("\n").input_ids
    ids = [*letters, *newline, *letters, *newline, *letters]
    assert token_step_ends(["ab\n", "ab\n", "ab"], read_tokens([5, 6], ids, decode(tokenizer))) == [3, 6, 8]


def test_a_token_over_a_border_belongs_to_the_step_it_begins_in() -> None:
    words = {1: "a", 2: "\nb", 3: "c"}
    assert token_step_ends(["a\n", "bc"], read_tokens([], [1, 2, 3], lambda ids: "".join(words[i] for i in ids))) == [
        2,
        3,
    ]


def test_a_step_that_ends_in_a_character_of_several_tokens_holds_all_of_them(tokenizer: Any) -> None:
    ids = tokenizer("一。二。").input_ids
    assert len(ids) == 12
    assert token_step_ends(["一。", "二。"], read_tokens([], ids, decode(tokenizer))) == [6, 12]


def test_a_tokenizer_that_drops_a_leading_space_is_read_in_its_prompt() -> None:
    words = {1: "Q", 2: " a", 3: "\n", 4: " b"}

    def text_of(ids: Any) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert token_step_ends([" a\n", " b"], read_tokens([1], [2, 3, 4], text_of)) == [2, 3]


def test_random_token_ids_give_ends_that_never_fall_and_reach_the_last_token(tokenizer: Any) -> None:
    rng = random.Random(0)
    text_of = decode(tokenizer)
    for _ in range(100):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 40))]
        steps = split_lines(text_of(ids))
        ends = token_step_ends(steps, read_tokens([], ids, text_of))
        assert len(ends) == len(steps)
        assert ends == sorted(ends)
        assert not ends or ends[-1] == len(ids)
