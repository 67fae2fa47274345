"""Epochs of minibatches over one experience: every learner takes a step on each, the policy first.

Which rollouts make which minibatch is a function of (seed, iteration, epoch) alone.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from espalier.rl.learner import Learner, UpdateSums
from espalier.rl.losses import whiten
from espalier.rl.types import Estimate, Experience
from espalier.runtime.schemas import RLConfig


def most_rollouts(config: RLConfig) -> int:
    """Count the rollouts that an iteration trains on at most: every branch of its trees, or what the filter keeps."""
    rollout = config.rollout
    per_group = int(config.filter["num_kept"]) if config.filter else rollout.group_size * math.prod(rollout.branches)
    return rollout.num_problems * per_group


def critic_iterations(config: RLConfig) -> int:
    """Count the first iterations, in which the policy stands still and a critic alone is trained."""
    return config.critic.num_warmup_iterations if config.critic is not None else 0


def steps_per_iteration(config: RLConfig) -> int:
    """Return optimizer steps of an iteration with all its rollouts."""
    return config.update.num_epochs * math.ceil(most_rollouts(config) / config.update.minibatch_size)


def with_value_loss(means: dict[str, float], config: RLConfig) -> dict[str, float]:
    """Return the metrics of an update whose `loss` is the policy's and `critic.loss_coefficient` times the critic's."""
    if config.critic is None:
        return means
    return means | {"loss": means.get("loss", 0.0) + config.critic.loss_coefficient * means["value_loss"]}


@dataclass
class Update:
    """Steps of `learners` in their order."""

    config: RLConfig
    learners: Sequence[Learner]

    def assign(self, experience: Experience, estimate: Estimate) -> Experience:
        """Return the experience with the estimate's advantages, whitened where that is asked for, and returns. Raises
        BadInput where a learner cannot learn them."""
        advantages = estimate.advantages
        if self.config.update.whitening != "none":
            advantages = whiten(advantages, experience.response_mask, self.config.update.whitening == "standard")
        for learner in self.learners:
            learner.check(experience, estimate)
        weights = estimate.return_weights
        return replace(experience, advantages=advantages, returns=estimate.returns, return_weights=weights)

    def __call__(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Train on the experience of `iteration` (from 0); means over its tokens and steps, and learning rates."""
        if experience.advantages is None:
            raise ValueError("advantages have not been estimated")
        fits_returns = any(learner.fits_returns for learner in self.learners)
        if (experience.returns is not None) != fits_returns:
            raise ValueError(
                "there is a critic, and this estimator gives no returns to fit it to"
                if fits_returns
                else "this estimator gives returns for a critic, and there is no critic to fit"
            )
        sums = UpdateSums(experience.response_mask, self.config.update.num_epochs)
        rates: dict[str, float] = {}
        for number, rows in self._minibatches(len(experience.ids), iteration):
            for learner in self.learners:
                rates |= learner.step(experience, rows, number, sums)
        return with_value_loss(sums.means(), self.config) | rates

    def _minibatches(self, num_rollouts: int, iteration: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Return (step of the run from 0, rows). An iteration begins at the same step whatever the ones before it
        had."""
        size, planned = self.config.update.minibatch_size, steps_per_iteration(self.config)
        number = 0
        for epoch in range(self.config.update.num_epochs):
            order = list(range(num_rollouts))
            random.Random(f"{self.config.seed}/{iteration}/{epoch}").shuffle(order)
            for start in range(0, num_rollouts, size):
                yield iteration * planned + min(number, planned - 1), torch.tensor(order[start : start + size])
                number += 1
