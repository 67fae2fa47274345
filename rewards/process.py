"""A process reward model's score of every step: one forward pass a trajectory, read at step ends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.packing import Layout, place_rows
from data.records import Trajectory
from data.steps import check_ends
from models.logprobs import model_inputs, network
from models.packed_attention import takes_packed_rows
from models.scalar_head import scores_from_logits


def _batches(rows: Sequence[Sequence[int]], is_packed: bool, batch_tokens: int) -> list[list[int]]:
    """Indices in batches of at most `batch_tokens` tokens (and one row at least). Packed: in order, so that
    trajectories of one problem share their prompt; padded: of similar length, padding counted."""
    order = list(range(len(rows))) if is_packed else sorted(range(len(rows)), key=lambda index: len(rows[index]))
    batches: list[list[int]] = []
    size = 0
    for index in order:
        size = size + len(rows[index]) if is_packed or not batches else len(rows[index]) * (len(batches[-1]) + 1)
        if not batches or size > batch_tokens:
            batches.append([])
            size = len(rows[index])
        batches[-1].append(index)
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
    rows = [[*t.prompt_ids, *t.response_ids] for t in chosen]
    is_packed = takes_packed_rows(network(model))
    for batch in _batches(rows, is_packed, batch_tokens):
        placed = place_rows([rows[index] for index in batch], Layout("shared" if is_packed else "padded", pad_id))
        inputs = {name: v.to(device) if torch.is_tensor(v) else v for name, v in model_inputs(placed).items()}
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(**inputs).logits
        table = scores_from_logits(logits.flatten(0, 1)).cpu()
        for path, index in zip(placed.paths, batch, strict=True):
            start = len(chosen[index].prompt_ids)
            places = path[[start + end - 1 for end in chosen[index].step_ends]]
            scores[distinct[index]] = [round(float(value), 6) for value in table[places]]
        on_progress(len(scores))
    return [scores[key] for key in keys]
