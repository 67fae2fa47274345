"""A process reward model's score of every step: one forward pass a trajectory, read at step ends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.collate import pad_rows
from data.records import Trajectory
from data.steps import check_ends
from models.scalar_head import scores_from_logits


def _by_length(trajectories: Sequence[Trajectory], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length whose padded size stays within `batch_tokens`."""
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in trajectories]
    batches: list[list[int]] = []
    for index in sorted(range(len(trajectories)), key=lengths.__getitem__):
        if batches and lengths[index] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.inference_mode()
def score_trajectories(
    model: Any,
    trajectories: Sequence[Trajectory],
    *,
    pad_id: int,
    batch_tokens: int = 16384,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[list[float]]:
    """Scores in [0, 1] of every step of every trajectory, in order.

    Trajectories with the same ids are scored once; `on_progress` gets the number of distinct ones done.
    Raises BadInput for a trajectory without token ids.
    """
    for trajectory in trajectories:
        check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
    model.eval()
    device = next(model.parameters()).device
    keys = [(tuple(t.prompt_ids), tuple(t.response_ids)) for t in trajectories]
    distinct = list(dict.fromkeys(keys))
    first = dict(zip(reversed(keys), reversed(trajectories), strict=True))
    chosen = [first[key] for key in distinct]
    scores: dict[Any, list[float]] = {}
    for batch in _by_length(chosen, batch_tokens):
        rows = [[*chosen[i].prompt_ids, *chosen[i].response_ids] for i in batch]
        ids, attention_mask, _ = pad_rows(rows, [0] * len(rows), pad_id)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids.to(device), attention_mask=attention_mask.to(device)).logits
        table = scores_from_logits(logits).cpu()
        for row, index in enumerate(batch):
            start = len(chosen[index].prompt_ids)
            positions = [start + end - 1 for end in chosen[index].step_ends]
            scores[distinct[index]] = [round(float(table[row, position]), 6) for position in positions]
        on_progress(len(scores))
    return [scores[key] for key in keys]
