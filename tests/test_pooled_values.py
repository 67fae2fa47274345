"""Values of states from all samples there are: trees by hand and by brute force, unbiasedness by simulation.

The simulated policy writes tokens of a small tree whose values are known exactly.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from espalier.data.records import BadInput, Trajectory
from espalier.rewards.monte_carlo import Count, StateKey, state_key
from espalier.rewards.pooled_values import PooledValue, pooled_values
from espalier.rewards.smoothed_values import smoothed_values
from espalier.rewards.state_tree import state_tree

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


def test_ends_at_a_state_of_another_are_counted() -> None:
    assert state_tree(ROWS).num_ends == 0
    assert state_tree([*ROWS, trajectory("p/4", [1, 2, END], [3], False)]).num_ends == 1
    assert state_tree([*ROWS, trajectory("p/4", [7, 8, END], [2, 3], False)]).num_ends == 0, "END is a step of its own"


def test_states_that_were_sampled_elsewhere_can_be_added() -> None:
    assert key(1, 2, 9) in state_tree(ROWS, [key(1, 2, 9)]).keys


def test_pooled_values_by_hand() -> None:
    """(1,2,3,4): 2 of 4 and one right way: 3/5. (1,2,5,6): one wrong way, 0. (1,2): 1 of 2, visits 3/5, 0 and 1.
    (1): three visits, each by (1, 2). The prompt: three visits by (1), one by (7, 8)."""
    counts = {key(1, 2, 3, 4): Count(2, 4), key(1, 2): Count(1, 2)}
    found = pooled_values(ROWS, counts)
    middle = (1 + 0.6 + 0 + 1) / (2 + 3)
    assert found[key(1, 2, 3, 4)] == PooledValue(0.6, 2, 4, 1)
    assert found[key(1, 2, 5, 6)] == PooledValue(0.0, 0, 0, 1)
    assert found[key(1, 2)] == PooledValue(middle, 1, 2, 3)
    assert found[key(1)].value == pytest.approx(middle)
    assert found[key()].value == pytest.approx((3 * middle + 0.0) / 4)


def test_without_completions_the_prompt_is_worth_the_share_of_right_trajectories() -> None:
    assert pooled_values(ROWS, {})[key()] == PooledValue(0.5, 0, 0, 4)


# --- a policy whose values are known ------------------------------------------------------------------------

# Tokens 1 and 2 are steps, 3 and 4 the right and the wrong answer. A step may be followed by an answer at once.
CHANCES = {(): (0.6, 0.4, 0.0), (1,): (0.3, 0.3, 0.2), (2,): (0.2, 0.2, 0.1), (1, 1): (0, 0, 0.9), (1, 2): (0, 0, 0.4),
           (2, 1): (0, 0, 0.5), (2, 2): (0, 0, 0.05)}  # fmt: skip


def exact(prefix: tuple[int, ...]) -> float:
    one, two, right = CHANCES[prefix]
    return right + (one * exact((*prefix, 1)) if one else 0) + (two * exact((*prefix, 2)) if two else 0)


def write_on(prefix: tuple[int, ...], rng: random.Random) -> list[int]:
    """The rest of a response, its answer included."""
    found = list(prefix)
    while found[-1:] not in ([3], [4]):
        one, two, right = CHANCES[tuple(found)]
        draw = rng.random()
        found.append(1 if draw < one else 2 if draw < one + two else 3 if draw < one + two + right else 4)
    return found[len(prefix) :]


def simulate(
    seed: int, num: int, completions: int, keeps: Callable[[list[int]], bool] = lambda ids: True
) -> dict[StateKey, PooledValue]:
    rng = random.Random(seed)
    drawn = [write_on((), rng) for _ in range(num)]
    rows = [
        trajectory(f"p/{k}", ids, range(1, len(ids) + 1), ids[-1] == 3) for k, ids in enumerate(drawn) if keeps(ids)
    ]
    counts = {}
    for state in state_tree(rows).keys:
        if state[1]:
            rights = sum(write_on(state[1], rng)[-1] == 3 for _ in range(completions))
            counts[state] = Count(rights, completions)
    return pooled_values(rows, counts)


def errors(prefix: tuple[int, ...], **settings: object) -> tuple[float, float]:
    """(mean error, its standard error) of a state's pooled value over many simulations that visited it."""
    found = [simulate(seed, **settings).get(key(*prefix)) for seed in range(3000)]  # type: ignore[arg-type]
    gaps = [one.value - exact(prefix) for one in found if one is not None]
    return statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5


def test_the_simulated_values_are_what_they_should_be() -> None:
    assert exact((1,)) == pytest.approx(0.3 * 0.9 + 0.3 * 0.4 + 0.2)
    assert exact((2,)) == pytest.approx(0.2 * 0.5 + 0.2 * 0.05 + 0.1)


@pytest.mark.parametrize("prefix", [(), (1,), (2,), (1, 1)])
def test_pooled_values_are_unbiased(prefix: tuple[int, ...]) -> None:
    mean, error = errors(prefix, num=3, completions=2)
    assert abs(mean) < 4 * error
    assert error < 0.01


def test_pooled_values_scatter_less_than_completions_alone() -> None:
    values = [simulate(seed, num=4, completions=2).get(key(1)) for seed in range(1500)]
    found = [one for one in values if one is not None]
    alone = statistics.pvariance([one.num_correct / 2 for one in found])
    assert statistics.pvariance([one.value for one in found]) < 0.7 * alone


def test_a_choice_of_trajectories_by_what_follows_a_state_biases_it() -> None:
    """Keeping trajectories of three steps alone forgets the answers that came at once: condition 2."""
    mean, error = errors((2,), num=3, completions=0, keeps=lambda ids: len(ids) == 3)
    assert mean > 3.5 * error


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

    from espalier.rewards import smoothed_values as module

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
