"""A process reward model's score of every step: one forward pass a trajectory, read at step ends.

As a reward in reinforcement learning (`ProcessReward`) scores become rewards at step ends in one of three forms.
A sum of positive scores pays for more steps whatever they say; "progress" cannot, because its sum telescopes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.collate import pad_rows
from data.records import BadInput, Trajectory
from data.steps import check_ends
from models.scalar_head import load_process_reward, scores_from_logits
from rewards.score import Score


def by_length(trajectories: Sequence[Trajectory], batch_tokens: int) -> list[list[int]]:
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
    for batch in by_length(chosen, batch_tokens):
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


def minimum_weights(scores: Sequence[float], temperature: float) -> list[float]:
    """Shares that sum to 1 and go to the lowest scores: softmax(-score / temperature).

    PURE (Cheng et al. 2025, eq. 8): with process rewards times these shares, the sum over the steps to come is
    nearly the minimum over them; the temperature says how nearly.
    """
    lowest = min(scores, default=0.0)
    weights = [math.exp((lowest - score) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def step_rewards(scores: Sequence[float], form: str, offset: float, temperature: float) -> list[float]:
    """Scores in [0, 1] of S steps → rewards of S steps.

    - "score": score - offset (0.5 makes a doubtful step cost);
    - "progress": the change of the score from step to step, the first against `offset` (PAV, Setlur et al. 2024):
      they sum to last - offset, so that more steps pay nothing;
    - "minimum": (score - offset) times its `minimum_weights`: they sum to nearly the lowest.
    """
    moved = [score - offset for score in scores]
    if form == "progress":
        return [after - before for before, after in zip([0.0, *moved], moved, strict=False)]
    if form == "minimum":
        weights = minimum_weights(moved, temperature)
        return [value * weight for value, weight in zip(moved, weights, strict=True)]
    return moved


FORMS = ("score", "progress", "minimum")


class ProcessReward:
    """A trained process reward model (`path`) as rewards at step ends; see `step_rewards` for the forms.

    Each reward is clipped to at most `limit` away from 0 where `limit` is above 0. `batch_tokens` bounds the
    padded size of a forward pass. Raises BadInput on a form that does not exist or a temperature not above 0.
    """

    def __init__(
        self,
        path: str,
        form: str = "progress",
        offset: float = 0.5,
        temperature: float = 0.1,
        limit: float = 0.0,
        batch_tokens: int = 16384,
        attention: str = "sdpa",
    ):
        if form not in FORMS:
            raise BadInput(f"the form of a process reward is one of {', '.join(FORMS)}, got '{form}'")
        if temperature <= 0:
            raise BadInput(f"the temperature of a process reward must be above 0, got {temperature:g}")
        self.model = load_process_reward(path, attention=attention).requires_grad_(False)
        self.form, self.offset, self.temperature = form, offset, temperature
        self.limit, self.batch_tokens = limit, batch_tokens

    def to(self, device: torch.device) -> None:
        """Move the network."""
        self.model.to(device)  # type: ignore[arg-type]

    def vocabulary_sizes(self) -> dict[str, int]:
        """Of the one network."""
        return {"process reward model": int(self.model.config.vocab_size)}

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Outcome 0 and one reward a step. Raises BadInput for a trajectory without token ids."""
        rows = score_trajectories(self.model, trajectories, pad_id=0, batch_tokens=self.batch_tokens)
        found = []
        for scores in rows:
            rewards = step_rewards(scores, self.form, self.offset, self.temperature)
            if self.limit > 0:
                rewards = [min(max(value, -self.limit), self.limit) for value in rewards]
            mean = sum(scores) / len(scores) if scores else 0.0
            found.append(Score(0.0, rewards, {"process": mean}))
        return found
