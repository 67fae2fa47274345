"""Which rank computes which rollouts, and in which micro-batches.

Rank 0 deals. Rows are dealt anew for every pass and every minibatch: what a pass costs is balanced even where some rows
of the iteration are left out of it (those without a gradient). How they travel: `rl.row_parts`.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import TypeVar

import torch

from espalier.data.batches.packing import MIN_SHARED, in_batches
from espalier.data.records import Trajectory
from espalier.runtime.distributed import world_size
from espalier.runtime.leading import ask
from espalier.training.cut_networks import read_by_all_ranks

R = TypeVar("R")

MOST_TOKENS = 2**22
"""Of rows that travel to all ranks at a time, prompts included: some 80 MB of an update's rows, once more on rank 0 on
their way."""
Cut = tuple[torch.Tensor, int]
"""A micro-batch: (row numbers [r], tokens of the longest)."""


def deal_longest_first(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal items of `lengths` tokens: the items of every rank, ascending. The longest goes first, each to the rank with
    the fewest tokens so far (Graham 1969); of equal items and ranks the one with the lower number.

    No rank has more tokens than the mean over ranks and the longest item together.
    """
    loads = [(0, number) for number in range(num_ranks)]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        load, number = loads[0]
        dealt[number].append(item)
        heapq.heapreplace(loads, (load + lengths[item], number))
    return [sorted(items) for items in dealt]


def deal_neighbours(lengths: Sequence[int], shared: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal items as runs of neighbours: of all such cuts the one whose most loaded rank computes the fewest tokens.
    `shared[i]`: tokens that item i has in common with the one before, computed once where both are of one rank."""

    def cut(limit: int) -> list[list[int]]:
        runs: list[list[int]] = [[]]
        load = 0
        for item, length in enumerate(lengths):
            more = length - shared[item] if runs[-1] else length
            if runs[-1] and load + more > limit:
                runs.append([])
                load, more = 0, length
            runs[-1].append(item)
            load += more
        return runs

    low, high = max(lengths, default=0), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= num_ranks else (middle + 1, high)
    runs = cut(low)
    return runs + [[] for _ in range(num_ranks - len(runs))]


def computed_tokens(lengths: Sequence[int], shared: Sequence[int], items: Sequence[int]) -> int:
    """Count the tokens of a packed pass over `items`, ascending: what neighbours have in common once."""
    common = sum(min(shared[before + 1 : item + 1]) for before, item in pairwise(items))
    return sum(lengths[item] for item in items) - common


def deal_packed(lengths: Sequence[int], shared: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal items of packed passes: neighbours stay together unless the most loaded rank then has more to compute."""
    deals = (deal_neighbours(lengths, shared, num_ranks), deal_longest_first(lengths, num_ranks))
    return min(deals, key=lambda deal: max(computed_tokens(lengths, shared, items) for items in deal))


def shared_tokens(ids: torch.Tensor, attention_mask: torch.Tensor) -> list[int]:
    """Count the tokens that each row of `ids` [R, T] begins with as the row before it; 0 where a packed pass would not
    share them (`data.batches.packing`)."""
    differs = (ids[1:] != ids[:-1]) | ~(attention_mask[1:].bool() & attention_mask[:-1].bool())
    found = torch.where(differs.any(-1), differs.to(torch.uint8).argmax(-1), ids.shape[1])
    return [0, *(size if size >= MIN_SHARED else 0 for size in found.tolist())][: len(ids)]


def deal_rows(
    ids: torch.Tensor, attention_mask: torch.Tensor, rows: torch.Tensor, is_packed: bool
) -> list[torch.Tensor]:
    """Deal `rows` [R] of `ids`, `attention_mask` [N, T] by tokens: the rows of every rank, ascending; every row once.

    Where the pass packs rows, the rollouts of a problem share their prompt on a rank (`deal_packed`).
    """
    ordered, num_ranks = rows.sort().values, world_size()
    if num_ranks == 1:
        return [ordered]
    lengths = attention_mask[ordered].sum(-1).tolist()
    if is_packed:
        dealt = deal_packed(lengths, shared_tokens(ids[ordered], attention_mask[ordered]), num_ranks)
    else:
        dealt = deal_longest_first(lengths, num_ranks)
    return [ordered[items] for items in dealt]


def deal_trajectories(trajectories: Sequence[Trajectory], is_packed: bool) -> list[list[list[int]]]:
    """Deal trajectories by the tokens of prompt and response, as `deal_rows` deals rows: of every rank the places of
    its rows, ascending, in portions of which all ranks together get `MOST_TOKENS` tokens, and each rank one row at
    least. Those with equal tokens count once and stay together, so that they get one score."""
    if world_size() == 1:
        return [[list(range(len(trajectories)))]]
    places: dict[tuple[int, ...], list[int]] = {}
    for place, one in enumerate(trajectories):
        places.setdefault((*one.prompt_ids, *one.response_ids), []).append(place)
    rows, copies, num_ranks = list(places), list(places.values()), world_size()
    lengths = list(map(len, rows))
    if is_packed:
        shared = [0, *(_common_tokens(*pair) for pair in pairwise(rows))][: len(rows)]
        dealt = deal_packed(lengths, shared, num_ranks)
    else:
        dealt = deal_longest_first(lengths, num_ranks)
    most, found = MOST_TOKENS // num_ranks, list[list[list[int]]]()
    for items in dealt:
        found.append([])
        held = 0
        for item in items:
            new = lengths[item] * len(copies[item])
            if not found[-1] or held + new > most:
                found[-1].append([])
                held = 0
            found[-1][-1] += copies[item]
            held += new
    return [[sorted(portion) for portion in portions] for portions in found]


def _common_tokens(row: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that both begin with; 0 where a packed pass would not share them."""
    shorter = min(len(row), len(other))
    size = next((place for place in range(shorter) if row[place] != other[place]), shorter)
    return size if size >= MIN_SHARED else 0


def read_shares(
    trajectories: Sequence[Trajectory], read: Callable[[list[Trajectory]], Sequence[R]], is_packed: bool
) -> list[R]:
    """Return what `read` gives of each of the trajectories (picklable), in order: each rank reads its share, a portion
    at a time, when rank 0 asks (`runtime.leading`). A number may depend on which rows stand beside one another, so on
    the number of ranks, by rounding. Reward models that ZeRO-3 cuts are read in turns (`training.cut_networks`)."""
    pairs: list[tuple[int, R]] = []
    for shares in zip_longest(*deal_trajectories(trajectories, is_packed), fillvalue=()):
        found = ask([partial(_read, read, [trajectories[place] for place in places]) for places in shares])
        pairs += [pair for places, part in zip(shares, found, strict=True) for pair in zip(places, part, strict=True)]
    return [answer for _, answer in sorted(pairs, key=lambda pair: pair[0])]


def _read(read: Callable[[list[Trajectory]], Sequence[R]], trajectories: list[Trajectory]) -> list[R]:
    with read_by_all_ranks():
        return list(read(trajectories)) if trajectories else []


def micro_batches(
    attention_mask: torch.Tensor, rows: torch.Tensor, size: int, is_packed: bool, max_tokens: int = 0
) -> Iterator[Cut]:
    """Cut `rows` [R] of `attention_mask` [N, T] into at most `size` each, or where `max_tokens` is above 0 into as many
    as have so many tokens together, and one at least.

    Where the pass packs rows, they are taken by number: the rollouts of a problem are neighbours and share their
    prompt (`max_tokens` counts it for each). Where it pads them, by length (`max_tokens` counts the padding).
    """
    ordered = rows.sort().values if max_tokens else rows
    lengths = attention_mask[ordered].sum(-1)
    if max_tokens:
        batches = in_batches([range(length) for length in lengths.tolist()], is_packed, max_tokens)
        cuts = [torch.tensor(batch) for batch in batches]
    else:
        cuts = list(torch.argsort(ordered if is_packed else lengths, stable=True).split(size)) if len(rows) else []
    for cut in cuts:
        yield ordered[cut], int(lengths[cut].max())


def cuts_of_ranks(
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    rows: torch.Tensor,
    is_packed: bool,
    size: int,
    max_tokens: int = 0,
) -> list[list[Cut]]:
    """Return the micro-batches of every rank: of `rows` [R] of `ids`, `attention_mask` [N, T], dealt by tokens."""
    deal = deal_rows(ids, attention_mask, rows, is_packed)
    return [list(micro_batches(attention_mask, own, size, is_packed, max_tokens)) for own in deal]


Take = Callable[[torch.Tensor], torch.Tensor]


def taker(rows: torch.Tensor, length: int, device: torch.device) -> Take:
    """Return what takes the first `length` tokens of `rows` [R] from a tensor [N, T] to `device`: [R, length]. Token
    ids become int64 there, which models read."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor[rows, :length].to(device)
        return part.long() if part.dtype == torch.int32 else part

    return take
