"""Epochs of minibatches over one experience.

The loss of a minibatch is the sum over its response tokens divided by their number, over all its
micro-batches: the gradient does not depend on how it is cut. Which rollouts make which minibatch is a
function of (seed, iteration, epoch) alone.

Without a KL penalty a rollout whose advantages are all 0 (its group agreed) has no gradient: its tokens are
counted and its forward and backward passes are left out.
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from rl.experience import micro_batches, policy_logprobs
from rl.losses import clipped_surrogate, clipped_tokens, k3_divergence
from rl.types import Experience
from training.engine import Engine, autocast
from training.loop import NotFinite

Sums = dict[str, tuple[float, float]]


def learning_rate(step: int, peak: float, warmup_steps: int) -> float:
    """Linear warm-up over `warmup_steps` optimizer steps, then constant. `step` from 0."""
    return peak * min(1.0, (step + 1) / max(1, warmup_steps))


@dataclass
class PolicyUpdate:
    """Sizes in rollouts; `temperature` is the sampler's."""

    engine: Engine
    precision: str
    temperature: float
    num_epochs: int
    minibatch_size: int
    micro_batch_size: int
    learning_rate: float
    warmup_steps: int
    clip_low: float
    clip_high: float
    kl_coefficient: float
    seed: int

    def __call__(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Train on the experience of `iteration` (from 0); means over its tokens and steps."""
        if experience.advantages is None:
            raise ValueError("advantages have not been estimated")
        if experience.returns is not None:
            raise ValueError("this estimator gives returns for a critic, and there is no critic to fit")
        sums: Sums = defaultdict(lambda: (0.0, 0.0))
        epochs = [self._cut(len(experience.ids), iteration, epoch) for epoch in range(self.num_epochs)]
        minibatches = [rows for epoch in epochs for rows in epoch]
        rate = 0.0
        self.engine.model.train()
        for index, rows in enumerate(minibatches):
            rate = learning_rate(iteration * len(minibatches) + index, self.learning_rate, self.warmup_steps)
            norm = self._step(experience, rows, rate, sums)
            _add(sums, "grad_norm", norm, 1)
        means = {name: total / max(count, 1.0) for name, (total, count) in sums.items()}
        return {**means, "learning_rate": rate}

    def _cut(self, num_rollouts: int, iteration: int, epoch: int) -> list[torch.Tensor]:
        order = list(range(num_rollouts))
        random.Random(f"{self.seed}/{iteration}/{epoch}").shuffle(order)
        size = self.minibatch_size
        return [torch.tensor(order[start : start + size]) for start in range(0, num_rollouts, size)]

    def _step(self, experience: Experience, rows: torch.Tensor, rate: float, sums: Sums) -> float:
        """One optimizer step; the gradient norm."""
        count = int(experience.response_mask[rows].sum())
        for name in ("surrogate_loss", "clip_share"):
            _add(sums, name, 0.0, count)
        if experience.reference_logprobs is None and experience.advantages is not None:
            rows = rows[experience.advantages[rows].any(dim=1)]
        for cut, length in micro_batches(experience.attention_mask, rows, self.micro_batch_size):
            total = self._loss(experience, cut, length, sums)
            if not math.isfinite(float(total.detach())):
                raise NotFinite(f"the loss is {float(total.detach())} on rollouts {cut.tolist()[:8]}")
            self.engine.backward(total / count)
        norm = self.engine.step(rate)
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient norm is {norm}: try a lower learning_rate")
        return norm

    def _loss(self, experience: Experience, cut: torch.Tensor, length: int, sums: Sums) -> torch.Tensor:
        """The summed loss of a micro-batch, with its graph."""

        def take(tensor: Any) -> torch.Tensor:
            part: torch.Tensor = tensor[cut, :length].to(self.engine.device)
            return part

        mask, old = take(experience.response_mask), take(experience.old_logprobs)
        advantages = take(experience.advantages)
        with autocast(self.engine.device, self.precision):
            logprobs, _ = policy_logprobs(
                self.engine.model, take(experience.ids), take(experience.attention_mask), self.temperature
            )
        clip = (mask, self.clip_low, self.clip_high)
        total, count = clipped_surrogate(logprobs, old, advantages, *clip)
        _add(sums, "surrogate_loss", float(total.detach()), 0)
        _add(sums, "clip_share", clipped_tokens(logprobs.detach(), old, advantages, *clip)[0], 0)
        _add(sums, "kl_old", float(k3_divergence(old, logprobs.detach(), mask)[0]), count)
        if experience.reference_logprobs is not None:
            penalty, _ = k3_divergence(logprobs, take(experience.reference_logprobs), mask)
            _add(sums, "kl_reference", float(penalty.detach()), count)
            total = total + self.kl_coefficient * penalty
        return total


def _add(sums: Sums, name: str, total: float, count: float) -> None:
    old = sums[name]
    sums[name] = (old[0] + total, old[1] + count)
