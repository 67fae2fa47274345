"""What other responses to a problem still had to come at each token: a baseline for rewards to come.

A baseline of token t leaves the expected gradient as it is where it depends on the problem and on t alone. To be of use
it has to say what is left from t on, as the rewards to come do: a process reward that the other response has behind it
by then counts no more. Its outcome always lies ahead: it is never behind a token of the response that is compared.
"""

from collections.abc import Sequence

import torch

from espalier.rl.types import RolloutGroup


def expected_to_come(groups: Sequence[RolloutGroup], num_tokens: int, gamma: float = 1.0) -> torch.Tensor:
    """Average, for response token t (from 0), what the group's rollouts had to come there: [groups, T].

    That is a rollout's process rewards at token t and later, and its outcome, each times `gamma` for every token
    between t and it; the outcome of a rollout that ended before t is not discounted. Without process rewards and with
    `gamma` 1 every token has the group's mean reward. A KL penalty is no part of it.
    """
    places = torch.arange(num_tokens, dtype=torch.float64)
    found = torch.zeros(len(groups), num_tokens, dtype=torch.float64)
    for row, group in enumerate(groups):
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            trajectory = rollout.trajectory
            found[row] += score.outcome * gamma ** (len(trajectory.response_ids) - 1 - places).clamp(min=0)
            for end, value in zip(trajectory.step_ends, score.steps, strict=False):
                ahead = end - 1 - places
                found[row] += torch.where(ahead >= 0, value * gamma ** ahead.clamp(min=0), 0.0)
        found[row] /= len(group.rollouts)
    return found


def spread_baselines(
    baselines: torch.Tensor, groups: Sequence[RolloutGroup], response_mask: torch.Tensor
) -> torch.Tensor:
    """Put the baseline of each rollout's group (`baselines` [groups, tokens]) at its response tokens: [N, T]."""
    numbers = [number for number, group in enumerate(groups) for _ in group.rollouts]
    position = response_mask.long().cumsum(-1) - 1
    rows = baselines[numbers].gather(1, position.clamp(min=0))
    return (rows * response_mask).float()
