"""Logits of a batch at the places that are read, and the rows that have to be computed one at a time.

Rows that change one another even where they are padded (`models.packing_check`) are computed alone (`one_by_one`).
"""

from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.batches.batch import Batch
from espalier.data.batches.packing import Layout, place_rows
from espalier.models.attention_kernels import BadAttention
from espalier.models.inputs import model_inputs, network
from espalier.models.last_layer import reads_of
from espalier.models.packing_check import is_cut, packing_of


def one_by_one(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of each row of a padded batch, without its padding, where the network needs them alone; else
    nothing. Raises BadAttention for packed rows that it cannot take, BadInput for a row that it does not."""
    check, segments = packing_of(model), inputs.get("segments")
    if segments is not None:
        if check.choice_for(segments.longest) != "packed":
            raise BadAttention(f"packed rows for {type(network(model)).__name__}: {check.reason or 'too long a row'}: "
                               "set update.layout=auto")  # fmt: skip
        return []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if check.choice_for(ids.shape[1]) != "alone" or len(ids) < 2:  # positions run through the padding too
        return []
    if is_cut(model) and not getattr(model, "takes_turns", False):
        raise BadAttention(f"{type(network(model)).__name__}: rows have to be computed one at a time, and ranks would "
                           "make unequal numbers of passes with ZeRO-3: set deepspeed=zero2")  # fmt: skip
    lengths = mask.sum(-1).tolist()
    return [{"input_ids": ids[row : row + 1, :size], "attention_mask": mask[row : row + 1, :size]}
            for row, size in enumerate(lengths)]  # fmt: skip


def all_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return logits [B, T, L] of a whole batch; 0 in the padding of rows that are computed one at a time."""
    alone = one_by_one(model, inputs)
    if not alone:
        logits: torch.Tensor = model(**inputs).logits
        return logits
    length = inputs["input_ids"].shape[1]
    rows = [model(**row).logits[0] for row in alone]
    return torch.stack([pad(row, (0, 0, 0, length - len(row))) for row in rows])


def reads_at(model: Any, inputs: dict[str, Any], positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what tells the last layer that only `positions` [R] of the flattened batch are read."""
    segments = inputs.get("segments")
    num_unread = 0 if segments is None else segments.num_unread
    return reads_of(network(model), positions, inputs["input_ids"].numel(), num_unread)


def read_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return logits [P, L] of a scalar head at a batch's reads, by one forward pass."""
    return _logits_at(model, model_inputs(batch), batch.read_places)


def _logits_at(model: Any, inputs: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    """Return logits [R, L] at positions of the flattened batch."""
    reads = {} if one_by_one(model, inputs) else reads_at(model, inputs, positions)
    return all_logits(model, inputs | reads).flatten(0, 1).index_select(0, positions)


def response_values(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what a scalar head of one output says before ids[:, t], at [:, t-1]: [B, T-1] in float32, arguments and
    packing as of `response_logprobs`."""
    wanted = attention_mask.bool() if response_mask is None else response_mask & attention_mask.bool()
    inputs, positions, rows_at, columns_at = place_before(model, ids, attention_mask, wanted)
    values = _logits_at(model, inputs, positions)[:, 0].float()
    shape = (ids.shape[0], ids.shape[1] - 1)
    return torch.zeros(shape, device=ids.device).index_put((rows_at, columns_at), values)


def place_before(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, wanted: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place rows for a pass that reads at the token before each `wanted` one [B, T].

    Returns (the model's inputs, where in them the token before each wanted one lies [R], rows [R], columns [R] of those
    tokens in [B, T-1]).
    """
    rows_at, columns_at = wanted[:, 1:].nonzero(as_tuple=True)
    lengths = attention_mask.sum(-1).tolist()
    is_packed = packing_of(model).choice_for(max(lengths, default=0)) == "packed"
    kind = "shared" if is_packed else "padded"
    placed = place_rows([row[:size] for row, size in zip(ids.tolist(), lengths, strict=True)], Layout(kind))
    starts = torch.zeros(ids.shape, dtype=torch.long)
    for row, path in enumerate(placed.paths):
        starts[row, : len(path)] = path
    inputs = {
        name: value.to(ids.device) if torch.is_tensor(value) else value for name, value in model_inputs(placed).items()
    }
    return inputs, starts.to(ids.device)[rows_at, columns_at], rows_at, columns_at
