"""Steps and tokens: every splitter's pieces find their token ends; segments by the tokens' probabilities."""

import math
import random
from typing import Any

import pytest

from espalier.data.records import BadInput
from espalier.data.splitters import SPLITTERS, cut_points_by_probability, is_cut_point, splitter
from espalier.data.steps import Decoder
from espalier.data.token_text import read_tokens, steps_at_token_ends, token_step_ends

RESPONSE = (
    "\nWe buy 3 pens. Then 4 more, so $x = 3 + 4.$ It is 7 🙂. 共有7个。好\n"
    "Thought 2: how many? ** it is \\[ 7 \\]\nAction 2: Finish[The answer is 7.]\n\n#### 7\n"
)


@pytest.fixture(scope="module")
def word_pieces() -> Any:
    """A tokenizer of WordPiece's kind: a word's later pieces are written `##x`, a space stands between words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyzDGHSW0123456789.,?"
    vocabulary = {
        word: number for number, word in enumerate(["[UNK]", "[END]", *letters, *(f"##{x}" for x in letters)])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]", unk_token="[UNK]")


@pytest.mark.parametrize("name", SPLITTERS)
def test_steps_find_their_tokens_without_tokenising_again(name: str, tokenizer: Any) -> None:
    decode = Decoder(tokenizer)
    prompt_ids, ids = tokenizer("How many?\n").input_ids, [*tokenizer(RESPONSE).input_ids, tokenizer.eos_token_id]
    steps = splitter(name)(decode(ids))
    ends = token_step_ends(steps, read_tokens(prompt_ids, ids, decode))
    assert ends[-1] == len(ids)
    for number, end in enumerate(ends, 1):
        assert decode(ids[:end]) == "".join(steps[:number])


def test_steps_find_their_word_pieces(word_pieces: Any) -> None:
    decode = Decoder(word_pieces)
    prompt_ids = word_pieces("Go on").input_ids
    ids = [*word_pieces("He had 3.5 pens. Dr. Who had 42. So?").input_ids, word_pieces.eos_token_id]

    def text_of(num: int) -> str:
        return decode([*prompt_ids, *ids[:num]])[len(decode(prompt_ids)) :]

    steps = splitter("sentences")(text_of(len(ids)))
    assert steps == [" He had 3.5 pens.", " Dr. Who had 42.", " So?"]
    ends = token_step_ends(steps, read_tokens(prompt_ids, ids, decode))
    assert [text_of(end) for end in ends] == ["".join(steps[: number + 1]) for number in range(3)]
    assert steps_at_token_ends(ends, read_tokens(prompt_ids, ids, decode)) == (steps, ends)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, [2, 5, 6, 8]),
        ({"threshold": 0.4}, [5, 8]),
        ({"threshold": 1.0}, [1, 2, 3, 5, 6, 7, 8]),
        ({"num_segments": 1}, [8]),
        ({"num_segments": 2}, [2, 8]),
        ({"num_segments": 3}, [2, 5, 8]),
        ({"num_segments": 9}, [2, 5, 8]),
        ({"cut_points_per_segment": 1}, [2, 5, 6, 8]),
        ({"cut_points_per_segment": 2}, [5, 8]),
        ({"cut_points_per_segment": 9}, [8]),
    ],
)
def test_segments_end_after_improbable_tokens(options: dict[str, Any], ends: list[int]) -> None:
    probabilities = [0.99, 0.5, 0.95, 1.0, 0.3, 0.8, 0.99, 0.99]
    assert cut_points_by_probability([math.log(p) for p in probabilities], **options) == ends


def test_equal_numbers_of_cut_points_stand_in_each_segment() -> None:
    rng = random.Random(0)
    for _ in range(200):
        logprobs = [math.log(rng.choice([0.5, 0.999])) for _ in range(rng.randint(0, 40))]
        is_cut = is_cut_point(logprobs)
        num = rng.randint(1, 12)
        ends = cut_points_by_probability(logprobs, num_segments=num)
        starts = [0, *ends[:-1]]
        counts = [sum(is_cut[start:end]) for start, end in zip(starts, ends, strict=bool(ends))]
        assert len(ends) == (max(1, min(num, sum(is_cut))) if logprobs else 0)
        assert not ends or (max(counts) - min(counts) <= 1 and ends[-1] == len(logprobs))


def test_a_token_of_no_probability_is_a_cut_point_and_no_tokens_have_no_segments() -> None:
    assert cut_points_by_probability([-math.inf, 0.0]) == [1, 2]
    assert cut_points_by_probability([]) == []
    assert cut_points_by_probability([0.0, 0.0]) == [2]


@pytest.mark.parametrize(
    ("logprobs", "options", "message"),
    [
        ([0.5], {}, "token 0: a log-probability is a number of at most 0, got 0.5"),
        ([0.0, math.nan], {}, "token 1: a log-probability"),
        ([None], {}, "token 0: a log-probability is a number of at most 0, got None"),
        ([0.0], {"threshold": 0.0}, "the threshold of cut points must be over 0"),
        ([0.0], {"threshold": 1.5}, "at most 1, got 1.5"),
        ([0.0], {"num_segments": 0}, "num_segments must be a whole number of at least 1, got 0"),
        ([0.0], {"cut_points_per_segment": -1}, "cut_points_per_segment must be a whole number of at least 1, got -1"),
        ([0.0], {"num_segments": 0.9}, "num_segments must be a whole number"),
        ([0.0], {"num_segments": 1, "cut_points_per_segment": 1}, "not both"),
    ],
)
def test_what_is_no_probability_or_number_is_refused(logprobs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cut_points_by_probability(logprobs, **options)


def test_segments_of_tokens_become_steps_that_join_and_find_their_ends_again(tokenizer: Any) -> None:
    rng = random.Random(0)
    decode = Decoder(tokenizer)
    prompt_ids, ids = tokenizer("How many?\n").input_ids, [*tokenizer(RESPONSE).input_ids, tokenizer.eos_token_id]
    for _ in range(50):
        ends = cut_points_by_probability([math.log(rng.choice([0.5, 1.0])) for _ in ids])
        steps, step_ends = steps_at_token_ends(ends, read_tokens(prompt_ids, ids, decode))
        assert "".join(steps) == decode(ids)
        assert all(steps)
        assert token_step_ends(steps, read_tokens(prompt_ids, ids, decode)) == step_ends
        assert step_ends[-1] == len(ids)


def test_an_end_inside_a_character_moves_to_the_end_of_the_character(tokenizer: Any) -> None:
    ids = [*tokenizer("🙂b").input_ids, tokenizer.eos_token_id]
    assert len(ids) == 6
    assert steps_at_token_ends([1, 2, 5, 6], read_tokens([], ids, Decoder(tokenizer))) == (["🙂", "b"], [4, 6])
    assert steps_at_token_ends([], read_tokens([], [], Decoder(tokenizer))) == ([], [])
    assert steps_at_token_ends([1], read_tokens([], [tokenizer.eos_token_id], Decoder(tokenizer))) == ([], [])


@pytest.mark.parametrize("ends", [[], [0, 3], [2], [2, 2, 3], [3, 2], [4]])
def test_ends_that_do_not_rise_to_the_number_of_tokens_are_refused(ends: list[int]) -> None:
    with pytest.raises(BadInput, match="token ends must rise to the number of tokens, 3"):
        steps_at_token_ends(ends, read_tokens([], [1, 2, 3], lambda ids: "a" * len(ids)))
