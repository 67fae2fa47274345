"""Rows on their way to a rank: nothing but their tokens travels, so many at a time, and what comes back stands where it
belongs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from espalier.models.load import load_policy
from espalier.rl import row_parts, row_shares
from espalier.rl.experience import RowScorer
from espalier.rl.row_parts import OLD, Masks, RowPart, joined, on_ranks, portions, positions
from espalier.rl.row_shares import Cut, cuts_of_ranks
from espalier.runtime.answers import packed, unpacked


def ragged(num: int, width: int, seed: int = 0) -> tuple[Masks, dict[str, torch.Tensor]]:
    """Random rows with prompts of 2 to 5 tokens, two rows without a response among them; advantages, and log-probs of
    before."""
    draws = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, 6, (num, 1), generator=draws)
    ends = prompts + torch.randint(1, width - 5, (num, 1), generator=draws)
    ends[1], ends[num - 1] = prompts[1], prompts[num - 1]
    places = torch.arange(width)
    attention, response = places < ends, (places >= prompts) & (places < ends)
    ids = torch.randint(5, 200, (num, width), generator=draws).int() * attention
    values = {name: torch.randn(num, width, generator=draws) * response for name in ("advantages", OLD)}
    return (ids, attention, response), values


def on_fake_ranks(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> list[list[bytes]]:
    """Have calls made here as they are on other ranks; what each order was, as it travels."""
    orders: list[list[bytes]] = []

    def ask(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        assert len(calls) == num_ranks
        orders.append([packed(call.args[-1]) for call in calls])  # type: ignore[attr-defined]
        return [call.func(*call.args[:-1], unpacked(order))  # type: ignore[attr-defined]
                for call, order in zip(calls, orders[-1], strict=True)]  # fmt: skip

    monkeypatch.setattr(row_shares, "world_size", lambda: num_ranks)
    monkeypatch.setattr(row_parts, "ask", ask)
    return orders


def test_a_part_has_its_rows_and_no_byte_of_others() -> None:
    masks, values = ragged(200, 60)
    cuts = [(torch.tensor([7, 3]), 40), (torch.tensor([1]), 5), (torch.tensor([150, 20, 31]), 60)]
    part = RowPart.of(masks, values, cuts, num_empty=2)
    content = packed(part)
    arrived = unpacked(content)
    rows = torch.cat([rows for rows, _ in cuts])
    assert torch.equal(arrived.numbers, rows)
    found = arrived.experience()
    assert [place.tolist() for place, _ in arrived.cuts] == [[0, 1], [2], [3, 4, 5]]
    assert [length for _, length in arrived.cuts] == [40, 5, 60]
    assert arrived.num_empty == 2
    for tensor, whole in zip((found.ids, found.attention_mask, found.response_mask), masks, strict=True):
        assert torch.equal(tensor, whole[rows, : tensor.shape[1]])
    width = int(masks[1][rows].sum(-1).max())
    assert torch.equal(found.advantages, values["advantages"][rows, :width])
    assert torch.equal(found.old_logprobs, values[OLD][rows, :width])
    assert (found.values, found.returns, found.rollout_logprobs.numel()) == (None, None, 0)
    num_tokens, num_learnt = int(masks[1][rows].sum()), int(masks[2][rows].sum())
    assert len(content) < 5 * num_tokens + 8 * num_learnt + 16 * len(rows) + 6000  # pickle's own words
    gap = masks[1].clone()
    gap[20, 1] = False
    with pytest.raises(ValueError, match="padded on the right"):
        RowPart.of((masks[0], gap, masks[2]), values, cuts, 0)


def test_positions_of_runs_stand_one_behind_another() -> None:
    assert positions(torch.tensor([10, 7, 3]), torch.tensor([2, 0, 3])).tolist() == [10, 11, 3, 4, 5]
    assert positions(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)).tolist() == []


def test_portions_hold_every_pass_once_and_no_more_tokens_than_may_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares, "MOST_TOKENS", 100)
    mask = torch.ones(12, 30, dtype=torch.bool)

    def cut(*rows: int) -> Cut:
        return torch.tensor(rows), 30

    # 30 tokens a row: three rows at a time; a pass of five comes alone
    one = [cut(0), cut(1), cut(2), cut(3, 4, 5, 6, 7), cut(8)]
    other = [cut(9, 10), cut(11)]
    assert list(portions(mask, [one, other])) == [(0, 1), (1, 3), (3, 4), (4, 5)]
    assert list(portions(mask, [one[:1], []])) == [(0, 1)]
    assert list(portions(mask, [[], []])) == []


@pytest.mark.parametrize("most_tokens", [1, 700, 2**22])
def test_every_row_is_computed_once_wherever_and_stands_in_its_place(
    most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_shares, "MOST_TOKENS", most_tokens)
    orders = on_fake_ranks(monkeypatch, 3)
    masks, values = ragged(40, 50)
    rows = torch.tensor([row for row in range(40) if row % 5])
    cuts = cuts_of_ranks(masks[0], masks[1], rows, False, 4)

    def double(part: RowPart) -> tuple[int, torch.Tensor]:
        found = part.experience()
        assert found.advantages is not None
        outputs = [2 * found.advantages[cut, :length][found.response_mask[cut, :length]] for cut, length in part.cuts]
        return len(part.cuts) + part.num_empty, joined(outputs)

    whole, passes = torch.zeros(masks[0].shape), []
    for part, (num_passes, outputs) in on_ranks(double, masks, values, cuts):
        passes.append(num_passes)
        part.fill(whole, outputs)
    expected = torch.zeros(masks[0].shape)
    expected[rows] = 2 * values["advantages"][rows]
    assert torch.equal(whole, expected)
    # every rank makes as many passes as the one with the most
    most = max(map(len, cuts))
    assert [sum(passes[number::3]) for number in range(3)] == [most] * 3
    # what travels at a time is within the bound, or one pass of every rank
    sizes = [[len(unpacked(order).ids) for order in one] for one in orders]
    num_passes = [len(unpacked(one[0]).cuts) + unpacked(one[0]).num_empty for one in orders]
    assert all(sum(size) <= most_tokens or num == 1 for size, num in zip(sizes, num_passes, strict=True))
    assert sum(map(sum, sizes)) == int(masks[1][rows].sum())
    assert {1: len(orders) == most, 700: 1 < len(orders) < most, 2**22: len(orders) == 1}[most_tokens]


def test_log_probs_of_rows_in_parts_are_those_of_all_at_once(tiny_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_policy(str(tiny_policy), "eager")
    masks, _ = ragged(12, 20)
    expected = RowScorer(masks, 3, "fp32").logprobs(model, 1.0)
    monkeypatch.setattr(row_shares, "MOST_TOKENS", 30)
    model.train()
    found = RowScorer(masks, 3, "fp32").logprobs(model, 1.0)
    assert not model.training
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    some = RowScorer(masks, 3, "fp32").logprobs(model, 1.0, torch.tensor([2, 5]))[0]
    assert torch.equal(some[[2, 5]].bool(), expected[0][[2, 5]].bool())
    assert not some[[0, 1, 3, 4, *range(6, 12)]].any()
