"""Rows that grow by tokens: what rounding their sizes up for bf16 products on a CPU changes, and what it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.models.scalar_head import load_process_reward
from espalier.values.exact import cached_rows
from espalier.values.exact.cached_rows import CachedRows, join_rows

ADDED = [[[5, 9, 30], [31], [7, 8]], [[40] * 9, [41, 42], [43]], [[50], [51, 52, 53], [54]]]


def grown(network: Any) -> tuple[list[torch.Tensor], CachedRows]:
    """What the body gives at each new token of three rows that are extended three times, and the rows."""
    rows, found = CachedRows.empty(3), []
    for added in ADDED:
        hidden, rows = rows.extend_hidden(network, added)
        found += [hidden[k, : len(ids)].float() for k, ids in enumerate(added)]
        rows = join_rows([rows.pick(torch.tensor([k])) for k in range(3)])
    return found, rows


def sizes_of(network: Any) -> set[int]:
    """Of the products of linear layers from now on, filled as they are computed."""
    found: set[int] = set()

    def look(layer: Any, inputs: Any) -> None:
        found.add(inputs[0].shape[:-1].numel())

    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(look)
    return found


def test_products_in_bf16_have_few_sizes_and_say_the_same(tiny_prm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_process_reward(str(tiny_prm)).eval()
    sizes = sizes_of(network)
    truth, whole = grown(network)
    assert sizes == {9, 27}  # in float32 as they are
    sizes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found, rows = grown(network)
        assert sizes == {64, 128}
        monkeypatch.setattr(cached_rows, "missing", lambda *_: 0)
        plain, _ = grown(network)
    assert rows.mask.tolist() == whole.mask.tolist()
    assert [keys.shape for keys, _ in rows.layers] == [keys.shape for keys, _ in whole.layers]
    for one, other, want in zip(found, plain, truth, strict=True):
        assert float((one - want).abs().max()) <= 2 * float((other - want).abs().max()) + 0.02


def test_rows_that_need_no_rounding_are_not_copied(tiny_prm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_process_reward(str(tiny_prm)).eval()
    _, rows = CachedRows.empty(3).extend_hidden(network, ADDED[0])
    monkeypatch.setattr(cached_rows, "pad", None)  # a pad by nothing is a copy
    _, longer = rows.extend_hidden(network, ADDED[1])
    assert longer.mask.sum(1).tolist() == [12, 3, 3]
