"""Values of states from all samples there are: trees by hand and by brute force, posterior means."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from espalier.data.records import BadInput, Trajectory
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.smoothed import smoothed_values
from espalier.values.state_tree import state_tree

END = 0


def trajectory(name: str, ids: Sequence[int], step_ends: Sequence[int], is_correct: bool) -> Trajectory:
    steps = ["s"] * len(step_ends)
    return Trajectory(name, name.partition("/")[0], "Q", "s" * len(steps), steps, [90], list(ids), list(step_ends),
                      "stop", "7", "7", is_correct)  # fmt: skip


# p/0 and p/1 share the state (1, 2); p/2 goes its own way; p/3 passes (1, 2) without a step end there.
ROWS = [
    trajectory("p/0", [1, 2, 3, 4, END], [2, 4, 5], True),
    trajectory("p/1", [1, 2, 5, 6, END], [2, 4, 5], False),
    trajectory("p/2", [7, 8, END], [2, 3], False),
    trajectory("p/3", [1, 2, 9, END], [1, 4], True),
]


def key(*prefix: int) -> StateKey:
    return state_key("p", prefix)


def test_the_tree_holds_prompt_and_steps_and_every_way_through_it() -> None:
    tree = state_tree(ROWS)
    assert tree.keys == [key(), key(1), key(1, 2), key(1, 2, 3, 4), key(1, 2, 5, 6), key(7, 8)]
    assert tree.parents == [-1, 0, 1, 2, 2, 0]
    assert tree.paths == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5], [0, 1, 2]]
    assert tree.num_visits() == [4, 3, 3, 1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for number in range(25):
        ids = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 9))]
        ends = sorted({rng.randrange(1, len(ids) + 1) for _ in range(3)} | {len(ids)})
        rows.append(trajectory(f"{'pq'[number % 2]}/{number}", ids, ends, rng.random() < 0.5))
    tree = state_tree(rows)
    prefixes = {(row.problem_id, tuple(row.response_ids[:end])) for row in rows for end in row.step_ends[:-1]}
    assert set(tree.keys) == prefixes | {("p", ()), ("q", ())}
    for state, (problem, prefix) in enumerate(tree.keys):
        above = [
            other
            for other in tree.keys
            if other[0] == problem and other[1] != prefix and prefix[: len(other[1])] == other[1]
        ]
        assert (tree.keys[tree.parents[state]] if tree.parents[state] >= 0 else None) == max(
            above, key=lambda k: len(k[1]), default=None
        )
        through = [number for number, row in enumerate(rows)
                   if row.problem_id == problem and tuple(row.response_ids[: len(prefix)]) == prefix]  # fmt: skip
        assert [number for number, path in enumerate(tree.paths) if state in path] == through


def test_a_trajectory_cut_off_at_a_state_did_not_go_on_from_it() -> None:
    cut = replace(trajectory("p/4", [1, 2], [2], False), finish_reason="length")
    assert state_tree([*ROWS, cut]).paths[4] == [0, 1]


def test_states_that_were_sampled_elsewhere_can_be_added() -> None:
    assert key(1, 2, 9) in state_tree(ROWS, [key(1, 2, 9)]).keys


# --- smoothed values ----------------------------------------------------------------------------------------


def test_smoothed_values_of_lone_states_are_near_their_shares_where_there_is_much_data() -> None:
    counts = {key(1, 2): Count(300, 400), key(7, 8): Count(4, 400)}
    found = smoothed_values(ROWS, counts)
    assert found[key(1, 2)].value == pytest.approx(0.75, abs=0.03)
    assert found[key(7, 8)].value == pytest.approx(0.01, abs=0.02)
    assert found[key(1, 2)].deviation < found[key(1, 2, 5, 6)].deviation
    low, high = found[key(1, 2)].interval()
    assert low <= found[key(1, 2)].value <= high
    assert found[key(7, 8)].share_above(0.5) < 0.001


def test_a_state_without_completions_is_drawn_to_its_neighbours() -> None:
    rows = [trajectory(f"p/{k}", [1, 2, 3, END], [1, 2, 3, 4], True) for k in range(2)]
    good = smoothed_values(rows, {key(1): Count(50, 50), key(1, 2, 3): Count(50, 50)})
    bad = smoothed_values(rows, {key(1): Count(1, 50), key(1, 2, 3): Count(0, 50)})
    assert good[key(1, 2)].value > 0.9
    assert bad[key(1, 2)].value < 0.2


def test_posteriors_are_shares_and_the_sums_over_a_tree_are_exact() -> None:
    """Belief propagation on three states against the sum over all 5^3 value combinations."""
    import itertools

    import numpy as np

    from espalier.values import smoothed as module

    rows = [trajectory("p/0", [1, 2, END], [1, 2, 3], True), trajectory("p/1", [1, 3, END], [1, 2, 3], False)]
    tree = state_tree(rows)
    counts = {key(1): Count(1, 3), key(1, 2): Count(2, 2)}
    likelihood = module._log_likelihood(tree, [True, False], counts, 5)
    kernel, start = module._first_kernel(5), np.full(5, 0.2)
    posterior, moves = module._sum_product(
        likelihood, np.asarray(tree.parents), module._levels(tree.parents), start, kernel
    )
    want = np.zeros_like(posterior)
    for values in itertools.product(range(5), repeat=len(tree.keys)):
        weight = start[values[0]] * np.exp(sum(likelihood[s, v] for s, v in enumerate(values)))
        for state, parent in enumerate(tree.parents):
            weight *= kernel[values[parent], values[state]] if parent >= 0 else 1.0
        for state, value in enumerate(values):
            want[state, value] += weight
    want /= want.sum(axis=1, keepdims=True)
    assert np.allclose(posterior, want)
    assert moves.sum() == pytest.approx(len(tree.keys) - 1)


def test_nothing_gives_nothing_and_a_grid_of_two_is_refused() -> None:
    assert smoothed_values([], {}) == {}
    with pytest.raises(BadInput, match="at least 3 grid points"):
        smoothed_values(ROWS, {}, num_points=2)
