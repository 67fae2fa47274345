"""What a network is called with, and which network that is under its wrappers."""

from typing import Any

import torch


def network(model: Any) -> Any:
    """The transformers model under an engine's wrapper, adapters, or a reference that switches them off."""
    while True:
        inner = getattr(model, "module", None)
        if inner is None:
            if not hasattr(model, "get_base_model"):
                return model
            inner = model.get_base_model()
        model = inner


def model_inputs(batch: Any) -> dict[str, Any]:
    """What the model is called with: `Batch` or `PlacedRows`. Packed rows come with a mask of four dimensions that
    nothing reads, so that transformers makes none."""
    if batch.segments is None:
        return {"input_ids": batch.ids, "attention_mask": batch.attention_mask}
    nothing = torch.zeros(1, 1, 1, 1, device=batch.ids.device)
    named = {"position_ids": batch.position_ids, "segments": batch.segments}
    return {"input_ids": batch.ids, "attention_mask": nothing, **named}
