"""Generalized advantage estimation (Schulman et al. 2016): PPO with a critic.

delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; after the last token V and A are 0.
The critic's targets are A + V, before any whitening.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from espalier.data.records import BadInput
from espalier.rl.credit.token_maps import rewards_to_go
from espalier.rl.credit_watch import LambdaWatch
from espalier.rl.critic import describe_values
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    is_last: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
) -> torch.Tensor:
    """Round `exact_advantages` to float32: [B, T], 0 outside `mask`."""
    return exact_advantages(rewards, values, mask, is_last, gamma, lam).float()


def exact_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    is_last: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
) -> torch.Tensor:
    """Compute advantages [B, T] in float64, 0 outside `mask`.

    `is_last` marks the last token of every response: nothing behind it counts. A row may hold one response (padded)
    or several one behind the other (packed); `lam` is one number or one per token [B, T].
    """
    found = torch.zeros(rewards.shape, dtype=torch.float64)
    advantage = torch.zeros(len(rewards), dtype=torch.float64)
    value_after = torch.zeros(len(rewards), dtype=torch.float64)
    for t in range(rewards.shape[1] - 1, -1, -1):
        goes_on = (mask[:, t] & ~is_last[:, t]).double()
        value = values[:, t].double()
        lam_t = lam[:, t].double() if isinstance(lam, torch.Tensor) else lam
        delta = rewards[:, t].double() + gamma * value_after * goes_on - value
        here = delta + gamma * lam_t * advantage * goes_on
        # outside a response what was carried stays as it is: it is read again only by a token that goes on into it
        advantage, value_after = torch.where(mask[:, t], here, advantage), torch.where(mask[:, t], value, value_after)
        found[:, t] = here * mask[:, t]
    return found


def last_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Mark the last true position of every row of `mask` [N, T] (none where a row has none): [N, T] bool."""
    after = torch.zeros_like(mask)
    after[:, :-1] = mask[:, 1:]
    return mask & ~after


class GAE:
    """`critic_lam` is the lambda of the critic's targets, null for `lam` (1: unbiased targets, VC-PPO, Yuan et al.
    2025). With `length_alpha` above 0 lambda depends on the response's length, 1 - 1 / (length_alpha * tokens), at
    least 0 (VAPO, Yue et al. 2025); the critic's targets keep `lam` or `critic_lam`.
    """

    needs_critic = True
    reads_token_rewards = True
    takes_implicit_rewards = True
    samples_more = False
    smallest_group = 1

    def __init__(self, gamma: float, lam: float, critic_lam: float | None = None, length_alpha: float = 0.0):
        for name, value in (("gamma", gamma), ("lam", lam), ("critic_lam", 1.0 if critic_lam is None else critic_lam)):
            if not 0 <= value <= 1:
                raise BadInput(f"advantage.{name} must be from 0 to 1, got {value}")
        self.gamma, self.lam, self.critic_lam, self.length_alpha = gamma, lam, critic_lam, length_alpha
        self.watch = LambdaWatch(length_alpha)

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate advantages and the critic's targets, [N, T] both."""
        assert experience.rewards is not None
        assert experience.values is not None
        mask = experience.response_mask
        given = (experience.rewards, experience.values, mask, last_tokens(mask), self.gamma)
        advantages = generalized_advantages(*given, self._lam(mask))
        if self.critic_lam is None:
            targets = advantages if self.length_alpha <= 0 else generalized_advantages(*given, self.lam)
        else:
            targets = generalized_advantages(*given, self.critic_lam)
        returns = (targets + experience.values) * mask
        metrics = describe_values(replace(experience, returns=returns))
        if self.length_alpha > 0:
            metrics["lam"] = self.watch.look(self._lam(mask))
        return Estimate(advantages, returns, metrics, to_come=rewards_to_go(experience.rewards, mask, self.gamma))

    def _lam(self, mask: torch.Tensor) -> float | torch.Tensor:
        if self.length_alpha <= 0:
            return self.lam
        lengths = mask.sum(-1, keepdim=True).clamp(min=1).float()
        return (1 - 1 / (self.length_alpha * lengths)).clamp(0, 1).expand(mask.shape)
