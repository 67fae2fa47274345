"""Epochs of minibatches over one experience: the policy's steps, and the critic's where there is one.

The loss of a minibatch is the weighted sum over its response tokens, over all micro-batches and ranks, divided by
one number for the whole minibatch: the gradient does not depend on how it is cut. Which rollouts make which
minibatch is a function of (seed, iteration, epoch) alone.

Where nothing but the surrogate has a gradient, a rollout whose advantages are all 0 (its group agreed) has none:
its tokens are counted and its forward and backward passes are left out.

Where one step on all rollouts is the whole update, its pass is also the first over them: the old policy's log-probs are
read off it (`makes_one_pass`), and a pass is saved.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.records import BadInput
from espalier.models.logprobs import logit_scores
from espalier.models.packing_check import packs_rows
from espalier.rl.critic import Critic
from espalier.rl.experience import empty_loss, micro_batches, most_passes, own_rows, policy_logits, policy_logprobs
from espalier.rl.kl import KLController, divergence, full_divergence
from espalier.rl.losses import (
    NORMALISERS,
    clipped_surrogate,
    clipped_tokens,
    importance_weights,
    token_weights,
)
from espalier.rl.types import Experience
from espalier.runtime.distributed import gather_over_ranks, sum_over_ranks, sum_tensor_over_ranks
from espalier.runtime.schemas import RLConfig
from espalier.training.engine import Engine, autocast
from espalier.training.loop import NotFinite, Sums
from espalier.training.schedule import check_schedule, learning_rate


def steps_per_iteration(config: RLConfig) -> int:
    """Optimizer steps of an iteration with all its rollouts."""
    return config.update.num_epochs * math.ceil(
        config.rollout.num_problems * config.rollout.group_size / config.update.minibatch_size
    )


@dataclass
class Update:
    """`temperature` and `max_tokens` are the sampler's; `reference` is read where `kl.kind` is full alone."""

    engine: Engine
    config: RLConfig
    temperature: float
    max_tokens: int
    kl: KLController
    critic: Critic | None = None
    reference: Any | None = None

    def __post_init__(self) -> None:
        config = self.config
        if config.update.loss_aggregation not in NORMALISERS:
            raise BadInput(
                f"update.loss_aggregation must be one of {', '.join(NORMALISERS)}, got "
                f"'{config.update.loss_aggregation}'"
            )
        for name, schedule in (("update.schedule", config.update.schedule), ("critic.schedule", self._critic_schedule)):
            check_schedule(schedule, name)
        if config.update.tis_cap and config.update.tis_cap < 1:
            raise BadInput(f"update.tis_cap must be at least 1 (0: none), got {config.update.tis_cap:g}")
        if config.update.dual_clip and config.update.dual_clip <= 1:
            raise BadInput(f"update.dual_clip must be above 1 (0: none), got {config.update.dual_clip:g}")

    @property
    def _critic_schedule(self) -> str:
        return self.critic.config.schedule if self.critic else "constant"

    def makes_one_pass(self, num_rollouts: int) -> bool:
        """Whether the only step on all rollouts needs nothing of them that an earlier pass would give."""
        config = self.config
        is_one_step = config.update.num_epochs == 1 and config.update.minibatch_size >= num_rollouts
        return is_one_step and self.critic is None and config.kl.coefficient == 0 and config.update.entropy_bonus == 0

    def rows_with_gradient(self, experience: Experience, rows: torch.Tensor) -> torch.Tensor:
        """Return those of `rows` [R] that can have a gradient."""
        assert experience.advantages is not None
        if self._has_more_than_surrogate(experience):
            return rows
        return rows[experience.advantages[rows].any(dim=1)]

    def __call__(
        self, experience: Experience, iteration: int, before_step: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Train on the experience of `iteration` (from 0); means over its tokens and steps. `kl_luckiest` is what the
        luckiest token alone, over all epochs, makes of the mean `kl_old`: one that was drawn by luck and became likely
        has a ratio of thousands.

        With `before_step` (see `makes_one_pass`) the log-probs and entropies of `rows_with_gradient` are written into
        the experience; then it is called, before any weight changes.
        """
        if experience.advantages is None:
            raise ValueError("advantages have not been estimated")
        if (experience.returns is None) != (self.critic is None):
            raise ValueError(
                "this estimator gives returns for a critic, and there is no critic to fit"
                if self.critic is None
                else "there is a critic, and this estimator gives no returns to fit it to"
            )
        sums = Sums()
        rates: dict[str, float] = {}
        warmup = self.critic.config.num_warmup_iterations if self.critic else 0
        self.largest_ratio, self.num_counted = 0.0, 0
        self.rises = torch.zeros(experience.ids.shape, dtype=torch.float64)
        for step, rows in self._minibatches(len(experience.ids), iteration):
            if iteration >= warmup:
                rates["learning_rate"] = self._rate(step, warmup)
                self._step(experience, rows, rates["learning_rate"], sums, before_step)
            if self.critic is not None:
                rates["value_learning_rate"] = self._critic_rate(step)
                self.critic.step(experience, rows, rates["value_learning_rate"], sums)
        found = {**sums.means(), **rates, "ratio_max": max(gather_over_ranks(self.largest_ratio))}
        return found | {"kl_luckiest": self._luckiest()}

    def _luckiest(self) -> float:
        """The largest sum over epochs of a token's k3, of those that became likelier, as its share of the mean."""
        rises = sum_tensor_over_ranks(self.rises)
        largest = float(rises.max()) if rises.numel() else 0.0
        return largest / max(1.0, sum_over_ranks([float(self.num_counted)])[0])

    def _minibatches(self, num_rollouts: int, iteration: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(step of the run from 0, rows). An iteration begins at the same step whatever the ones before it had."""
        size, planned = self.config.update.minibatch_size, steps_per_iteration(self.config)
        number = 0
        for epoch in range(self.config.update.num_epochs):
            order = list(range(num_rollouts))
            random.Random(f"{self.config.seed}/{iteration}/{epoch}").shuffle(order)
            for start in range(0, num_rollouts, size):
                yield iteration * planned + min(number, planned - 1), torch.tensor(order[start : start + size])
                number += 1

    def _rate(self, step: int, num_warmup_iterations: int) -> float:
        """The policy's: its schedule begins behind the iterations in which the critic alone is trained."""
        config, planned = self.config, steps_per_iteration(self.config)
        before = num_warmup_iterations * planned
        total = config.num_iterations * planned - before
        return learning_rate(
            step - before, config.update.learning_rate, config.update.warmup_steps, config.update.schedule, total
        )

    def _critic_rate(self, step: int) -> float:
        assert self.critic is not None
        config, total = self.critic.config, self.config.num_iterations * steps_per_iteration(self.config)
        return learning_rate(step, config.learning_rate, config.warmup_steps, config.schedule, total)

    def _step(
        self,
        experience: Experience,
        rows: torch.Tensor,
        rate: float,
        sums: Sums,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        """One optimizer step of the policy."""
        config, mask = self.config, experience.response_mask
        weights, divisor = token_weights(mask[rows], config.update.loss_aggregation, self.max_tokens)
        every_weight = torch.zeros(mask.shape).index_copy(0, rows, weights)
        counted = own_rows(rows)
        share = token_weights(mask[counted], config.update.loss_aggregation, self.max_tokens)[1]
        sums.add({"surrogate_loss": (0.0, share), "clip_share": (0.0, int(mask[counted].sum()))})
        if config.update.entropy_bonus:
            sums.add({"entropy_bonus": (0.0, share)})
        sums.add(dict.fromkeys(self._names(experience), (0.0, 0.0)))
        rows = self.rows_with_gradient(experience, rows)
        scored = torch.zeros(2, *mask.shape) if before_step is not None else None
        self.engine.model.train()
        ratios = [0.0, 0.0]
        is_packed = packs_rows(self.engine.model) and self._penalty_kind(experience) != "full"
        cuts = list(micro_batches(experience.attention_mask, own_rows(rows), config.update.micro_batch_size, is_packed))
        num_passes = most_passes(len(cuts))
        self.engine.start_step(num_passes)
        for cut, length in cuts:
            total = self._loss(experience, every_weight, cut, length, sums, ratios, scored)
            if not math.isfinite(float(total.detach())):
                raise NotFinite(f"the loss is {float(total.detach())} on rollouts {cut.tolist()[:8]}")
            self.engine.backward(total / max(divisor, 1.0))
        for _ in range(num_passes - len(cuts)):
            self.engine.backward(empty_loss(self.engine.model, experience.ids, experience.attention_mask))
        if before_step is not None and scored is not None:
            whole = sum_tensor_over_ranks(scored)
            experience.old_logprobs[rows], experience.entropies[rows] = whole[0, rows], whole[1, rows]
            before_step()
        if self._is_guarded(ratios, sums):
            return
        norm = self.engine.step(rate) if num_passes else 0.0  # no rank has anything to learn from
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient norm is {norm}: try a lower update.learning_rate")
        sums.add({"grad_norm": (norm, 1)})

    def _has_more_than_surrogate(self, experience: Experience) -> bool:
        """Whether a rollout without advantages can have a gradient all the same."""
        return self._penalty_kind(experience) != "" or self.config.update.entropy_bonus != 0

    def _penalty_kind(self, experience: Experience) -> str:
        """Of the KL penalty in the loss; "" where there is none."""
        is_there = experience.reference_logprobs is not None and self.config.kl.place == "loss"
        return self.config.kl.kind if is_there else ""

    def _names(self, experience: Experience) -> list[str]:
        """Metrics that a rank without rows must name too."""
        names = ["kl_old", "approximate_kl", "ratio"]
        if self.config.update.tis_cap > 0:
            names += ["importance_weight", "importance_capped"]
        return [*names, "kl_reference"] if self._penalty_kind(experience) else names

    def _is_guarded(self, ratios: list[float], sums: Sums) -> bool:
        """Whether this minibatch is left out because the policy has run away from the one that made it."""
        limit = self.config.update.max_mean_ratio
        if limit <= 0:
            return False
        total, tokens = sum_over_ranks(ratios)
        is_skipped = not total <= limit * max(tokens, 1.0)  # also where it is not a number
        sums.add({"skipped": (float(is_skipped), 1)})
        if is_skipped:
            self.engine.discard()
        return is_skipped

    def _loss(
        self,
        experience: Experience,
        every_weight: torch.Tensor,
        cut: torch.Tensor,
        length: int,
        sums: Sums,
        ratios: list[float],
        scored: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The summed loss of a micro-batch, with its graph; its log-probs and entropies go into `scored` [2, N, T], and
        are the old ones then."""

        def take(tensor: Any) -> torch.Tensor:
            part: torch.Tensor = tensor[cut, :length].to(self.engine.device)
            return part

        config, kind = self.config, self._penalty_kind(experience)
        ids, attention_mask = take(experience.ids), take(experience.attention_mask)
        mask, weights = take(experience.response_mask), take(every_weight)
        old, advantages = take(experience.old_logprobs), take(experience.advantages)
        logits = None
        with autocast(self.engine.device, config.precision):
            if kind == "full":  # whole distributions, of padded rows
                logits = policy_logits(self.engine.model, ids, attention_mask)
                logprobs, entropies = _scores_of(logits, ids, self.temperature)
            else:
                logprobs, entropies = policy_logprobs(self.engine.model, ids, attention_mask, mask, self.temperature)
                if scored is not None:
                    old = logprobs.detach()
                    scored[:, cut, :length] = torch.stack((old, entropies.detach())).float().cpu()
        surrogate_weights = weights
        if config.update.tis_cap > 0:
            truncated = importance_weights(old, take(experience.rollout_logprobs), config.update.tis_cap)
            surrogate_weights = weights * truncated
            chosen = truncated[mask]
            sums.add({"importance_weight": (float(chosen.sum()), len(chosen))})
            sums.add({"importance_capped": (float((chosen >= config.update.tis_cap).sum()), len(chosen))})
        clip = (mask, config.update.clip_low, config.update.clip_high)
        total, _ = clipped_surrogate(logprobs, old, advantages, *clip, config.update.dual_clip, surrogate_weights)
        terms = self._count(logprobs.detach(), old, advantages, clip, total, sums, ratios)
        self.rises[cut, :length] += (terms * (logprobs.detach() > old)).double().cpu()
        if kind:
            terms = self._penalty(kind, logits, logprobs, take(experience.reference_logprobs), ids, attention_mask)
            if config.kl.max_token > 0:
                terms = terms.clamp(-config.kl.max_token, config.kl.max_token)
            sums.add({"kl_reference": (float(terms.detach()[mask].sum()), int(mask.sum()))})
            total = total + self.kl.coefficient * (terms[mask] * weights[mask]).sum()
        if config.update.entropy_bonus:
            bonus = config.update.entropy_bonus * (entropies[mask] * weights[mask]).sum()
            sums.add({"entropy_bonus": (float(bonus.detach()), 0)})
            total = total - bonus
        return total

    def _penalty(
        self,
        kind: str,
        logits: torch.Tensor | None,
        logprobs: torch.Tensor,
        reference_logprobs: torch.Tensor,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        """The KL term of every token [B, T]."""
        if kind != "full":
            return divergence(logprobs, reference_logprobs, kind)
        with torch.no_grad(), autocast(self.engine.device, self.config.precision):
            reference = policy_logits(self.reference, ids, attention_mask)
        assert logits is not None
        return full_divergence(logits, reference, self.temperature)

    def _count(
        self,
        logprobs: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        clip: tuple[torch.Tensor, float, float],
        surrogate: torch.Tensor,
        sums: Sums,
        ratios: list[float],
    ) -> torch.Tensor:
        """Add a micro-batch's metrics; the k3 of every token [B, T] of it, 0 outside the response."""
        mask = clip[0]
        tokens = int(mask.sum())
        terms = divergence(old, logprobs, "k3").where(mask, 0.0)
        ratio = torch.exp(logprobs[mask] - old[mask])
        ratios[0] += float(ratio.double().sum())
        ratios[1] += tokens
        self.num_counted += tokens
        if tokens:
            self.largest_ratio = max(self.largest_ratio, float(ratio.max()))
        sums.add(
            {
                "surrogate_loss": (float(surrogate.detach()), 0),
                "clip_share": (clipped_tokens(logprobs, old, advantages, *clip)[0], 0),
                "kl_old": (float(terms[mask].sum()), tokens),
                "approximate_kl": (float(divergence(logprobs, old, "mse")[mask].sum()), tokens),
                "ratio": (float(ratio.sum()), tokens),
            }
        )
        return terms


def _scores_of(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Aligned logits [B, T, V] → (log-probs, entropies) [B, T], both with a graph."""
    scores = logit_scores(logits[:, 1:].flatten(0, 1), ids[:, 1:].flatten(), temperature)
    shape = (ids.shape[0], ids.shape[1] - 1)
    return pad(scores.logprobs.view(shape), (1, 0)), pad(scores.entropies.view(shape), (1, 0))
