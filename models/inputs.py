"""What a network is called with, and which network that is under its wrappers."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.models.shapes import ROWS, missing


def network(model: Any) -> Any:
    """Return the transformers model under an engine's wrapper, adapters, or a reference that switches them off."""
    while True:
        inner = getattr(model, "module", None)
        if inner is None:
            if not hasattr(model, "get_base_model"):
                return model
            inner = model.get_base_model()
        model = inner


def model_inputs(batch: Any) -> dict[str, Any]:
    """Return what the model is called with: `Batch` or `PlacedRows`. Packed rows come with a mask of four dimensions
    that nothing reads, so that transformers makes none, and rounded up to a size that other batches have
    (`models.shapes`): logits [1, T', V] of more tokens than the batch's T."""
    if batch.segments is None:
        return {"input_ids": batch.ids, "attention_mask": batch.attention_mask}
    nothing = torch.zeros(1, 1, 1, 1, device=batch.ids.device)
    more = missing(batch.ids.shape[1], ROWS, batch.ids)
    return {
        "input_ids": pad(batch.ids, (0, more)),
        "attention_mask": nothing,
        "position_ids": pad(batch.position_ids, (0, more)),
        "segments": replace(batch.segments, num_unread=more),
    }
