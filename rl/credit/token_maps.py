"""From rollouts, steps and states to response tokens: the maps that estimators share."""

from collections.abc import Sequence

import torch

from espalier.rl.types import Experience


def spread_rollouts(values: Sequence[float], response_mask: torch.Tensor) -> torch.Tensor:
    """Give every response token its rollout's number: [N] → [N, T]."""
    return torch.tensor(values, dtype=torch.float32)[:, None] * response_mask


def spread_over_tokens(step_ends: Sequence[int], values: Sequence[float]) -> list[float]:
    """Give every one of the T tokens of a response the number of the step that holds it.

    `step_ends` (S of them, the last is T) count tokens up to and including each step, `values` are S numbers.
    """
    lengths = [end - start for start, end in zip([0, *step_ends], step_ends, strict=False)]
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def spread_steps(
    step_ends: Sequence[Sequence[int]], values: Sequence[Sequence[float]], response_mask: torch.Tensor
) -> torch.Tensor:
    """Give every response token the number of the step that holds it: [N, T].

    `step_ends[n]` count response tokens up to and including each step; a token that covers a border belongs to
    the step its first character is in (`data.token_text`), the end token to the last step. Raises
    ValueError where a row's steps do not reach its last token.
    """
    spread = torch.zeros(response_mask.shape)
    for row, (ends, numbers) in enumerate(zip(step_ends, values, strict=True)):
        positions = response_mask[row].nonzero().squeeze(1)
        if (ends[-1] if ends else 0) != len(positions):
            raise ValueError(f"rollout {row} has {len(positions)} response tokens and steps up to {list(ends)[-1:]}")
        if len(positions):
            spread[row, positions] = torch.tensor(spread_over_tokens(ends, numbers), dtype=spread.dtype)
    return spread


def total_rewards(experience: Experience) -> torch.Tensor:
    """Sum all rewards of every rollout, [N] in float64, with the KL penalty where it is part of the reward."""
    assert experience.rewards is not None
    return experience.rewards.double().sum(-1)


def rewards_to_go(rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Sum what is to come: G_t = r_t + gamma G_{t+1}, [N, T], 0 outside the response."""
    found = torch.zeros(rewards.shape, dtype=torch.float64)
    carried = torch.zeros(len(rewards), dtype=torch.float64)
    for t in range(rewards.shape[1] - 1, -1, -1):
        carried = (rewards[:, t].double() + gamma * carried) * response_mask[:, t]
        found[:, t] = carried
    return found.float()
