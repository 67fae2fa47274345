"""Rows are dealt to ranks by tokens and cut into micro-batches by tokens: every row once, balanced;
gradients depend on neither."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from espalier.data.records import Trajectory
from espalier.rl import row_shares
from espalier.rl.learner import RowSums, UpdateSums
from espalier.rl.row_shares import (
    computed_tokens,
    deal_longest_first,
    deal_neighbours,
    deal_rows,
    deal_trajectories,
    micro_batches,
    read_shares,
    shared_tokens,
)


def ragged_lengths(number: int, seed: int = 0) -> list[int]:
    """Responses of 500 tokens in the mean, 2,000 at most: the exponential law, cut."""
    rng = random.Random(seed)
    return [min(2000, max(1, round(rng.expovariate(1 / 500)))) for _ in range(number)]


def rows_of(prompts: Sequence[int], responses: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose prompts are of the lengths `prompts`, one token for each problem, four rollouts of a problem."""
    width = max(prompt + response for prompt, response in zip(prompts, responses, strict=True))
    ids = torch.randint(1000, 30000, (len(prompts), width), generator=torch.Generator().manual_seed(0)).int()
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, :prompt] = row // 4 + 1
        mask[row, : prompt + response] = True
    return ids, mask


def most_above_mean(lengths: Sequence[int], deal: Sequence[Sequence[int]]) -> float:
    loads = [sum(lengths[item] for item in items) for items in deal]
    return max(loads) / (sum(loads) / len(loads))


def test_the_longest_goes_first_each_to_the_rank_with_the_fewest_tokens() -> None:
    # 9 to rank 0, 8 to 1, 7 to 1 (8 < 9: 15), 5 to 0 (14), 3 to 0 (17), 2 to 1 (17)
    assert deal_longest_first([3, 9, 8, 2, 7, 5], 2) == [[0, 1, 5], [2, 3, 4]]
    assert deal_longest_first([4, 4, 4], 2) == [[0, 2], [1]]
    assert deal_longest_first([], 3) == [[], [], []]


@pytest.mark.parametrize("number", [0, 1, 3, 64, 500])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_every_row_has_one_rank_and_none_has_more_than_the_mean_and_one_row(number: int, num_ranks: int) -> None:
    lengths = ragged_lengths(number, seed=num_ranks)
    for deal in (deal_longest_first(lengths, num_ranks), deal_neighbours(lengths, [0] * number, num_ranks)):
        assert len(deal) == num_ranks
        assert sorted(item for items in deal for item in items) == list(range(number))
        assert all(items == sorted(items) for items in deal)
        loads = [sum(lengths[item] for item in items) for items in deal]
        assert max(loads) <= sum(lengths) / num_ranks + max(lengths, default=0)


def test_neighbours_are_cut_where_the_most_loaded_rank_has_least() -> None:
    # 5 4 | 3 3 3 | 9 is best of all cuts into three runs: 9 tokens at most
    assert deal_neighbours([5, 4, 3, 3, 3, 9], [0] * 6, 3) == [[0, 1], [2, 3, 4], [5]]
    # rows 1 and 3 repeat 2 tokens of the row before them: 5 + 3 | 5 + 3
    assert deal_neighbours([5, 5, 5, 5], [0, 2, 0, 2], 2) == [[0, 1], [2, 3]]
    assert computed_tokens([5, 5, 5, 5], [0, 2, 0, 2], [0, 1]) == 8
    assert computed_tokens([5, 5, 5, 5], [0, 2, 2, 2], [0, 2, 3]) == 15 - 2 - 2


def test_what_rows_share_is_counted_where_a_packed_pass_would_share_it() -> None:
    prompts = [20, 20, 20, 20, 30, 30, 30, 30, 9, 9]  # nine tokens are too few to be shared
    ids, mask = rows_of(prompts, [5] * 10)
    assert shared_tokens(ids, mask) == [0, 20, 20, 20, 0, 30, 30, 30, 0, 0]
    equal = torch.ones(2, 40, dtype=torch.int32)
    assert shared_tokens(equal, torch.tensor([[True] * 40, [True] * 25 + [False] * 15])) == [0, 25]


def test_siblings_share_a_rank_where_that_loads_none_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares, "world_size", lambda: 4)
    ids, mask = rows_of([100] * 64, [20 + number % 4 for number in range(64)])
    packed = deal_rows(ids, mask, torch.arange(64).flip(0), is_packed=True)
    assert [rows.tolist() for rows in packed] == [list(range(start, start + 16)) for start in (0, 16, 32, 48)]
    # a long row between two others: as neighbours one rank would have 1,480 tokens, apart none has more than 1,000
    monkeypatch.setattr(row_shares, "world_size", lambda: 2)
    ids, mask = rows_of([20] * 3, [480, 980, 480])
    assert [rows.tolist() for rows in deal_rows(ids, mask, torch.arange(3), is_packed=True)] == [[1], [0, 2]]


def test_a_deal_does_not_depend_on_the_order_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares, "world_size", lambda: 3)
    ids, mask = rows_of([20] * 40, ragged_lengths(40))
    rows = torch.arange(1, 40, 2)
    one = deal_rows(ids, mask, rows, is_packed=True)
    other = deal_rows(ids.clone(), mask.clone(), rows.flip(0), is_packed=True)
    assert [part.tolist() for part in one] == [part.tolist() for part in other]
    assert torch.equal(torch.cat(one).sort().values, rows)


def test_one_process_has_every_row() -> None:
    ids, mask = rows_of([20] * 4, [3, 9, 1, 4])
    (own,) = deal_rows(ids, mask, torch.tensor([3, 0, 2]), is_packed=True)
    assert own.tolist() == [0, 2, 3]


def learnt_minibatches(number: int, size: int, share: float, seed: int = 0) -> list[list[int]]:
    """Minibatches of a shuffle of `number` rows, ascending, without those of groups of 8 that agree (1 - `share`)."""
    rng = random.Random(seed)
    differ = [rng.random() < share for _ in range(number // 8)]
    order = list(range(number))
    rng.shuffle(order)
    cuts = [sorted(order[start : start + size]) for start in range(0, number, size)]
    return [[row for row in cut if differ[row // 8]] for cut in cuts]


@pytest.mark.parametrize(
    ("size", "share", "expected"),
    [
        (2048, 1.0, (1.027, 1.000, 1.000)),
        (512, 1.0, (1.105, 1.131, 1.000)),
        (64, 1.0, (1.245, 1.393, 1.001)),
        (2048, 0.5, (1.021, 1.076, 1.000)),
        (512, 0.5, (1.114, 1.159, 1.000)),
        (64, 0.5, (1.371, 1.589, 1.006)),
    ],
)
def test_the_figures_of_the_page_four_ranks_of_2048_ragged_rollouts(
    size: int, share: float, expected: tuple[float, float, float]
) -> None:
    """docs/reinforcement.md: tokens of the most loaded rank over the mean, in the mean over minibatches of `size` rows,
    of which `share` have a gradient: dealt by count, by owners that stay, by tokens anew."""
    lengths = ragged_lengths(2048)
    assert (sum(lengths) / len(lengths), max(lengths)) == (pytest.approx(500, abs=5), 2000)
    owners = {row: number for number, rows in enumerate(deal_longest_first(lengths, 4)) for row in rows}
    found = []
    for rows in learnt_minibatches(2048, size, share):
        of_rows = [lengths[row] for row in rows]
        by_count = [part.tolist() for part in torch.tensor_split(torch.arange(len(rows)), 4)]
        by_owner = [[item for item, row in enumerate(rows) if owners[row] == number] for number in range(4)]
        deals = (by_count, by_owner, deal_longest_first(of_rows, 4))
        found.append([most_above_mean(of_rows, deal) for deal in deals])
    assert torch.tensor(found).mean(0).tolist() == pytest.approx(expected, abs=0.0006)


def test_micro_batches_hold_as_many_rows_as_fit_into_their_tokens_and_one_at_least() -> None:
    lengths = torch.tensor([9, 3, 8, 4, 7, 5])
    mask = torch.arange(9) < lengths[:, None]
    rows = torch.tensor([5, 0, 3, 1, 4])

    def cuts(is_packed: bool, tokens: int) -> list[tuple[list[int], int]]:
        return [(cut.tolist(), length) for cut, length in micro_batches(mask, rows, 64, is_packed, tokens)]

    # by number, in tokens: 9 + 3, 4 + 7, 5
    assert cuts(True, 12) == [([0, 1], 9), ([3, 4], 7), ([5], 5)]
    # by length, padding counted: 2 x 4, then 5 and 7 (2 x 7 = 14 > 12) alone, then 9
    assert cuts(False, 12) == [([1, 3], 4), ([5], 5), ([4], 7), ([0], 9)]
    assert cuts(True, 1) == [([row], int(lengths[row])) for row in (0, 1, 3, 4, 5)]
    assert list(micro_batches(mask, rows[:0], 4, True, 12)) == []
    assert list(micro_batches(mask, rows[:0], 4, True)) == []


def test_the_luckiest_token_is_that_of_the_sum_over_epochs() -> None:
    mask = torch.tensor([[False, True, True, False], [False, False, True, True], [False, True, True, True]])
    rises = torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 0.0, 3.0, 0.5], [0.0, 0.25, 0.5, 1.0]])

    def add(sums: UpdateSums, cuts: list[tuple[list[int], torch.Tensor]]) -> None:
        """As one rank measured it in these micro-batches."""
        part = RowSums(keeps_rises=sums is two)
        for rows, values in cuts:
            part.add_rises(values, mask[rows, : values.shape[1]])
        sums.merge(part, torch.tensor([row for rows, _ in cuts for row in rows], dtype=torch.long))

    one, two = UpdateSums(mask), UpdateSums(mask, num_epochs=2)
    for sums in (one, two):
        sums.num_counted = 10
        add(sums, [([2, 0], rises[[2, 0]]), ([1], rises[[1]])])
        add(sums, [])  # of a rank without rows
    assert one.means()["kl_luckiest"] == pytest.approx(0.3)
    add(two, [([0], torch.tensor([[0.0, 0.5, 1.5]]))])  # 2 + 1.5 at its second token
    assert two.means()["kl_luckiest"] == pytest.approx(0.35)
    add(one, [([0], torch.tensor([[0.0, float("nan"), 0.0]]))])
    assert math.isnan(one.means()["kl_luckiest"])
    assert UpdateSums(mask[:0]).means()["kl_luckiest"] == 0.0
    assert UpdateSums(mask[:0], num_epochs=2).means()["kl_luckiest"] == 0.0


def trajectory(number: int, prompt: int, response: int, kind: int = 0) -> Trajectory:
    """Of a problem whose tokens are all `prompt`; `kind` tells responses apart."""
    ids = [[prompt] * 20, [100 + kind] * response]
    return Trajectory(f"t{number}", "p", "", "", [], *ids, [], "stop", "1", None, False)


def test_trajectories_are_dealt_by_tokens_and_equal_ones_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [trajectory(0, 1, 30), trajectory(1, 2, 9, 1), trajectory(2, 1, 30), trajectory(3, 2, 8, 2),
            trajectory(4, 1, 5, 3)]  # fmt: skip
    assert deal_trajectories(rows, True) == [[[0, 1, 2, 3, 4]]]
    monkeypatch.setattr(row_shares, "world_size", lambda: 2)
    # 50 to rank 0 (its copy costs nothing), 29 and 28 to rank 1 (57), 25 to rank 0
    assert deal_trajectories(rows, False) == [[[0, 2, 4]], [[1, 3]]]
    # packed, neighbours compute a prompt of 20 tokens once: 50 | 29 + 8 + 25
    assert deal_trajectories(rows, True) == [[[0, 2]], [[1, 3, 4]]]
    # four rollouts of each of two problems: 60 | 60 by problem, not 70 | 70 with half of each
    even = [trajectory(number, number // 4, 10, number) for number in range(8)]
    assert deal_trajectories(even, True) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert deal_trajectories(even, False) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    assert deal_trajectories([], True) == [[], []]
    assert deal_trajectories(rows[:1], True) == [[[0]], []]
    # no more than 35 tokens to a rank at a time, or one row and its copies
    monkeypatch.setattr(row_shares, "MOST_TOKENS", 70)
    assert deal_trajectories(rows, False) == [[[0, 2], [4]], [[1], [3]]]
    assert deal_trajectories(even, False) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    empty = Trajectory("e", "p", "", "", [], [], [], [], "stop", "1", None, False)
    assert deal_trajectories([empty, empty], False) == [[[0, 1]], []]


def test_what_ranks_read_comes_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [trajectory(0, 1, 30), trajectory(1, 2, 9, 1), trajectory(2, 1, 30), trajectory(3, 2, 8, 2)]
    asked: list[list[str]] = []

    def read(given: list[Trajectory]) -> list[str]:
        asked.append([one.id for one in given])
        return [one.id for one in given]

    assert read_shares(rows, read, False) == ["t0", "t1", "t2", "t3"]
    monkeypatch.setattr(row_shares, "world_size", lambda: 2)
    monkeypatch.setattr(row_shares, "ask", lambda calls: [call() for call in calls])
    assert read_shares(rows, read, False) == ["t0", "t1", "t2", "t3"]
    assert read_shares(rows[:1], read, False) == ["t0"]
    # a rank without rows is not asked
    assert asked == [["t0", "t1", "t2", "t3"], ["t0", "t2"], ["t1", "t3"], ["t0"]]
    asked.clear()
    monkeypatch.setattr(row_shares, "MOST_TOKENS", 2)  # a row and its copies at a time
    assert read_shares([*rows, trajectory(4, 3, 4)], read, False) == ["t0", "t1", "t2", "t3", "t4"]
    assert asked == [["t0", "t2"], ["t1"], ["t4"], ["t3"]]
    with pytest.raises(ValueError, match="shorter"):
        read_shares(rows, lambda given: read(given)[:1], False)
