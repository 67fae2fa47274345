"""A critic's values of intermediate states, read from the folder that a run of PPO leaves (RUN/critic)."""

from collections.abc import Sequence
from typing import Any

import torch

from espalier.data.batches.packing import pad_rows
from espalier.models.logits import response_values
from espalier.models.scalar_head import critic_form, load_critic
from espalier.runtime.distributed import device

_ROWS = 64  # of one pass


@torch.no_grad()
def critic_values_at(folder: str, rows: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the values of states: for each row of token ids those of its first `lengths` tokens (at least 1, at most
    all), read at the state's last token. Raises BadModel where the folder is no critic."""
    model: Any = load_critic(folder, "reward_model", "eager").to(device()).eval()  # type: ignore[arg-type]
    is_probability = critic_form(model.config) == "probability"
    found: list[list[float]] = []
    for start in range(0, len(rows), _ROWS):
        cut = [[*row, 0] for row in rows[start : start + _ROWS]]  # a token behind the last state, itself not read
        asked = lengths[start : start + _ROWS]
        ids, attention_mask, wanted = pad_rows(cut, [0] * len(cut), 0)
        wanted[:] = False
        for number, places in enumerate(asked):
            wanted[number, list(places)] = True
        values = response_values(model, *(tensor.to(device()) for tensor in (ids, attention_mask, wanted)))
        values = torch.sigmoid(values) if is_probability else values
        found += [values[number, [place - 1 for place in places]].tolist() for number, places in enumerate(asked)]
    return found
