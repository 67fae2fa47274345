"""Trajectories split at improbable tokens, by hand; a token is a letter."""

import math
from collections.abc import Sequence

import pytest

from espalier.data.records import BadInput, Trajectory
from espalier.values.cut_points import split_at_cut_points
from espalier.values.monte_carlo import states_of

END = 0
ROW = Trajectory("p/0", "p", "Q", "abcde", ["abcde"], [9], [1, 2, 3, 4, 5, END], [6], "stop", "7", "7", True)
SURE, DOUBT = math.log(0.95), math.log(0.4)


def decode(ids: Sequence[int]) -> str:
    return "".join("abcde"[token - 1] for token in ids if 0 < token < 6)


def test_steps_end_after_improbable_tokens_and_states_follow() -> None:
    found = split_at_cut_points(ROW, [SURE, DOUBT, SURE, SURE, DOUBT, SURE], decode)
    assert (found.steps, found.step_ends) == (["ab", "cde"], [2, 6])
    assert [(state.prefix, state.prefix_ids) for state in states_of(found)] == [("ab", [1, 2])]
    assert (found.response, found.response_ids, found.is_correct) == (ROW.response, ROW.response_ids, True)


def test_so_many_cut_points_make_a_segment() -> None:
    found = split_at_cut_points(ROW, [DOUBT] * 5 + [SURE], decode, cut_points_per_segment=2)
    assert found.steps == ["ab", "cd", "e"]


@pytest.mark.parametrize("logprobs", [[], [SURE] * 5])
def test_a_trajectory_without_its_probabilities_is_refused(logprobs: list[float]) -> None:
    with pytest.raises(BadInput, match=r"trajectory 'p/0' has 6 tokens and . log-probabilities"):
        split_at_cut_points(ROW, logprobs, decode)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(BadInput, match="trajectory 'p/0': its tokens do not read as its text"):
        split_at_cut_points(ROW, [SURE] * 6, lambda ids: "x" * len(ids))
