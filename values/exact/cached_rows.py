"""Rows of tokens with the keys and values that a network has computed of them, so that each token is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from espalier.data.records import BadInput
from espalier.models.shapes import SEGMENT, missing

_MAX_GAP = 1e-3  # between log-probs with and without a cache, in nats
_STEP = 8  # rows, and tokens of a row, to a multiple of which a pass is rounded up: 64 tokens together


@dataclass(frozen=True)
class CachedRows:
    """N rows of T places; where `mask` [N, T] bool is false there is no token, at any place of a row.

    `layers`: keys and values [N, H, T, D] of every layer; none at all of rows without a place.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    mask: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int) -> "CachedRows":
        """Return rows without tokens."""
        return cls([], torch.zeros(num_rows, 0, dtype=torch.bool))

    def pick(self, rows: torch.Tensor) -> "CachedRows":
        """Return the rows of these numbers [M], without the places that none of them has."""
        mask = self.mask.index_select(0, rows)
        kept = mask.any(0).nonzero().squeeze(1)
        is_whole = len(kept) == mask.shape[1]

        def pick(part: torch.Tensor) -> torch.Tensor:
            picked = part.index_select(0, rows.to(part.device))  # first: places of all rows would be copied for each
            return picked if is_whole else picked.index_select(2, kept.to(part.device))

        return CachedRows([(pick(keys), pick(values)) for keys, values in self.layers], mask.index_select(1, kept))

    @torch.no_grad()
    def extend(self, model: Any, added: Sequence[Sequence[int]]) -> "tuple[torch.Tensor, CachedRows]":
        """Append at least one token to every row: (logits [N, V] behind its last token in float32, the longer rows)."""
        hidden, rows = self.extend_hidden(model, added)
        last = torch.tensor([len(row) - 1 for row in added], device=hidden.device)
        read = hidden[torch.arange(len(added), device=hidden.device), last]
        return model.get_output_embeddings()(read).float(), rows

    @torch.no_grad()
    def extend_hidden(self, model: Any, added: Sequence[Sequence[int]]) -> "tuple[torch.Tensor, CachedRows]":
        """Append at least one token to every row: (what the body gives at each of them [N, T, D], of a shorter row
        anything behind its end; the longer rows).

        Where a CPU computes in bf16, rows, tokens and places are rounded up for the pass (`models.shapes`).
        """
        product = _product(model)
        if filler := missing(len(added), _STEP, product):
            hidden, rows = self._with_rows(filler).extend_hidden(model, [*added, *[[0]] * filler])
            number = torch.arange(len(added))
            return hidden[: len(added)], rows.pick(number)
        places = missing(self.mask.shape[1], SEGMENT, product) if self.layers else 0
        kept = self._with_places(places) if places else self  # padded by nothing all keys and values would be copied
        return kept._extend_hidden(model, added, product)

    def _with_rows(self, number: int) -> "CachedRows":
        """Return these rows, and behind them so many without a token."""
        layers = [(pad(keys, (0, 0) * 3 + (0, number)), pad(values, (0, 0) * 3 + (0, number)))
                  for keys, values in self.layers]  # fmt: skip
        return CachedRows(layers, pad(self.mask, (0, 0, 0, number)))

    def _with_places(self, number: int) -> "CachedRows":
        """Return these rows with so many more places, at which there is no token."""
        layers = [(pad(keys, (0, 0, 0, number)), pad(values, (0, 0, 0, number))) for keys, values in self.layers]
        return CachedRows(layers, pad(self.mask, (0, number)))

    def _extend_hidden(
        self, model: Any, added: Sequence[Sequence[int]], product: torch.Tensor
    ) -> "tuple[torch.Tensor, CachedRows]":
        lengths = torch.tensor([len(row) for row in added])
        longest = int(lengths.max())
        longest += missing(longest, _STEP, product)
        device = next(model.parameters()).device
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in added])
        more = torch.arange(longest) < lengths[:, None]
        mask = torch.cat([self.mask, more], dim=1)
        places = torch.minimum(torch.arange(longest), lengths[:, None] - 1)  # filler has no position of its own
        positions = (self.mask.sum(1)[:, None] + places).to(device)
        cache = DynamicCache(self.layers) if self.layers else DynamicCache()
        hidden = model.base_model(
            input_ids=ids.to(device),
            attention_mask=mask.long().to(device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )[0]
        return hidden, CachedRows([(layer.keys, layer.values) for layer in cache.layers], mask)


def _product(model: Any) -> torch.Tensor:
    """Return a tensor [0] of the device and the dtype in which the model multiplies now."""
    weight = next(model.parameters())
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return torch.empty(0, dtype=dtype, device=weight.device)


def join_rows(parts: Sequence[CachedRows]) -> CachedRows:
    """Return the rows of all parts, in order."""
    longest = max(part.mask.shape[1] for part in parts)
    mask = torch.cat([pad(part.mask, (0, longest - part.mask.shape[1])) for part in parts])
    model_layers = next((part.layers for part in parts if part.layers), [])
    layers = []
    for number, (keys, values) in enumerate(model_layers):
        both = []
        for kind, like in enumerate((keys, values)):
            rows = [
                pad(part.layers[number][kind], (0, 0, 0, longest - part.mask.shape[1]))
                if part.layers
                else like.new_zeros(len(part.mask), like.shape[1], longest, like.shape[3])
                for part in parts
            ]
            both.append(torch.cat(rows))
        layers.append((both[0], both[1]))
    return CachedRows(layers, mask)


@torch.no_grad()
def check_cache(model: Any, ids: Sequence[int], longest: int) -> None:
    """Raise BadInput where the network gives other probabilities from cached keys and values, in rows of unequal
    lengths of up to `longest` tokens, than in a pass over the whole (layers with a state, scaled logits; sliding
    windows, which short rows do not show: so `ids` are repeated up to that length, or as far as there are
    positions)."""
    longest = min(longest, getattr(model.config, "max_position_embeddings", None) or longest)
    if longest < 2:
        return
    ids = [ids[place % len(ids)] for place in range(longest)]
    cut = longest // 2
    device = next(model.parameters()).device
    _, rows = CachedRows.empty(2).extend(model, [ids[:cut], ids[:1]])
    found, _ = rows.extend(model, [ids[cut:], ids[1:]])
    truth = model(input_ids=torch.tensor([ids], device=device)).logits[0, -1].float()
    gap = float((torch.log_softmax(found, -1) - torch.log_softmax(truth, -1)).abs().max())
    if not gap <= _MAX_GAP:
        raise BadInput(f"exact values: {type(model).__name__} gives other probabilities from cached keys and values "
                       f"(a gap of {gap:.2g} nats): choose another estimator for this network")  # fmt: skip
