"""The policy's loss on one micro-batch (clipped surrogate, KL penalty, entropy bonus), and what is measured of it.

It is a weighted sum over response tokens; the weights (`loss_aggregation`) and what the whole minibatch is divided by
are the caller's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.records import BadInput
from espalier.models.logprobs import logit_scores
from espalier.models.precision import autocast
from espalier.rl.experience import empty_loss, filler_row, policy_logits, policy_logprobs
from espalier.rl.kl import KLController, bounded, divergence, full_divergence
from espalier.rl.learner import RowSums
from espalier.rl.losses import (
    CORRECTIONS,
    LEVELS,
    NORMALISERS,
    clipped_surrogate,
    clipped_tokens,
    importance_weights,
    is_driven_off,
)
from espalier.rl.row_parts import OLD
from espalier.rl.row_shares import taker
from espalier.rl.types import Experience
from espalier.runtime.schemas import RLConfig
from espalier.training.engine import Engine


@dataclass
class PolicyLoss:
    """`temperature` is the sampler's; `reference` is read where `kl.kind` is full alone.

    Raises BadInput on settings that do not exist.
    """

    engine: Engine
    config: RLConfig
    temperature: float
    kl: KLController
    reference: Any | None = None

    def __post_init__(self) -> None:
        config = self.config
        if config.update.loss_aggregation not in NORMALISERS:
            raise BadInput(
                f"update.loss_aggregation must be one of {', '.join(NORMALISERS)}, got "
                f"'{config.update.loss_aggregation}'"
            )
        update = config.update
        if update.tis_cap and update.tis_cap < 1:
            raise BadInput(f"update.tis_cap must be at least 1 (0: none), got {update.tis_cap:g}")
        if not 0 <= update.tis_floor <= 1:
            raise BadInput(f"update.tis_floor must be from 0 to 1, got {update.tis_floor:g}")
        if update.correction not in CORRECTIONS:
            raise BadInput(f"update.correction must be one of {', '.join(CORRECTIONS)}, got '{update.correction}'")
        if update.correction == "divergence" and not 0 < update.divergence_limit < 1:
            raise BadInput(f"update.divergence_limit must be between 0 and 1, got {update.divergence_limit:g}")
        if update.tis_level not in LEVELS:
            raise BadInput(f"update.tis_level must be one of {', '.join(LEVELS)}, got '{update.tis_level}'")
        if config.update.dual_clip and config.update.dual_clip <= 1:
            raise BadInput(f"update.dual_clip must be above 1 (0: none), got {config.update.dual_clip:g}")

    @property
    def corrects(self) -> bool:
        """Whether tokens are weighed by who drew them."""
        return self.config.update.correction != "none" and self.config.update.tis_cap > 0

    def has_more_than_surrogate(self, experience: Experience) -> bool:
        """Say whether a rollout without advantages can have a gradient all the same."""
        return self.penalty_kind(experience) != "" or self.config.update.entropy_bonus != 0

    def penalty_kind(self, experience: Experience) -> str:
        """Name the kind of the KL penalty in the loss; "" where there is none."""
        is_there = experience.reference_logprobs is not None and self.config.kl.place == "loss"
        return self.config.kl.kind if is_there else ""

    def names(self, experience: Experience) -> list[str]:
        """List the metrics that a rank without rows must name too."""
        names = ["kl_old", "approximate_kl", "ratio"]
        if self.corrects:
            names += ["importance_weight", "importance_capped"]
        return [*names, "kl_reference"] if self.penalty_kind(experience) else names

    def tensors(self, experience: Experience, is_scored: bool) -> dict[str, torch.Tensor]:
        """Name what a loss reads of the experience's response tokens [N, T]; `is_scored`: whether the log-probs of
        before are known."""
        assert experience.advantages is not None
        found = {"advantages": experience.advantages}
        if is_scored:
            found[OLD] = experience.old_logprobs
        if self.corrects:
            found["rollout_logprobs"] = experience.rollout_logprobs
        if self.penalty_kind(experience):
            assert experience.reference_logprobs is not None
            found["reference_logprobs"] = experience.reference_logprobs
        return found

    def __call__(
        self, experience: Experience, weights: torch.Tensor, cut: torch.Tensor, length: int, sums: RowSums
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return (the summed loss [] of a micro-batch, with its graph: rows `cut` [R], their first `length` tokens, in
        which a token counts by `weights` [R, length]; where the experience has no log-probs of before, those of this
        pass, which are that, and its entropies: [R, length] on the CPU)."""
        take = taker(cut, length, self.engine.device)
        config, kind = self.config, self.penalty_kind(experience)
        ids, attention_mask = take(experience.ids), take(experience.attention_mask).long()
        mask, weights = take(experience.response_mask), weights.to(self.engine.device)
        is_scored = experience.old_logprobs.numel() > 0
        logits, logprobs, entropies = self._forward(kind, ids, attention_mask, mask)
        old = take(experience.old_logprobs) if is_scored else logprobs.detach()
        scored = () if is_scored else (old.cpu(), entropies.detach().cpu())
        assert experience.advantages is not None
        advantages, surrogate_weights = take(experience.advantages), weights
        if self.corrects:
            bounds = (config.update.tis_cap, config.update.tis_floor, config.update.correction)
            drawn_by = take(experience.rollout_logprobs)
            found, is_outside = importance_weights(old, drawn_by, mask, *bounds, config.update.tis_level)
            if config.update.correction == "divergence":
                limit = config.update.divergence_limit
                is_outside = is_driven_off(logprobs.detach(), drawn_by, advantages, limit) & mask
                found = found.where(~is_outside, 0.0)
            surrogate_weights = weights * found
            sums.add({"importance_weight": (float(found[mask].sum()), int(mask.sum()))})
            sums.add({"importance_capped": (float(is_outside[mask].sum()), int(mask.sum()))})
        clip = (mask, config.update.clip_low, config.update.clip_high)
        total, _ = clipped_surrogate(logprobs, old, advantages, *clip, config.update.dual_clip, surrogate_weights)
        terms = self._count(logprobs.detach(), old, advantages, clip, total, sums)
        sums.add_rises(terms * (logprobs.detach() > old), mask)
        if kind:
            assert experience.reference_logprobs is not None
            terms = self._penalty(kind, logits, logprobs, take(experience.reference_logprobs), ids, attention_mask)
            terms = bounded(terms, config.kl)
            sums.add({"kl_reference": (float(terms.detach()[mask].sum()), int(mask.sum()))})
            total = total + self.kl.coefficient * (terms[mask] * weights[mask]).sum()
        if config.update.entropy_bonus:
            bonus = config.update.entropy_bonus * (entropies[mask] * weights[mask]).sum()
            sums.add({"entropy_bonus": (float(bonus.detach()), 0)})
            total = total - bonus
        return total, scored

    def empty(self) -> torch.Tensor:
        """Compute a loss [] of 0 by the passes that a micro-batch takes: that of a rank that has no rows left."""
        loss = empty_loss(self.engine.model, self.config.precision)
        if self.reference is not None and self.config.kl.place == "loss" and self.config.kl.kind == "full":
            with torch.no_grad(), autocast(self.engine.device, self.config.precision):
                policy_logits(self.reference, *filler_row(self.engine.device)[:2])
        return loss

    def _forward(
        self, kind: str, ids: torch.Tensor, attention_mask: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return (logits [B, T, V] where the penalty reads them, log-probs [B, T], entropies [B, T])."""
        model = self.engine.model
        with autocast(self.engine.device, self.config.precision):
            if kind == "full":  # whole distributions, of padded rows
                logits = policy_logits(model, ids, attention_mask)
                return logits, *_scores_of(logits, ids, self.temperature)
            return None, *policy_logprobs(model, ids, attention_mask, mask, self.temperature)

    def _penalty(
        self,
        kind: str,
        logits: torch.Tensor | None,
        logprobs: torch.Tensor,
        reference_logprobs: torch.Tensor,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return the KL term of every token [B, T]."""
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
        sums: RowSums,
    ) -> torch.Tensor:
        """Add a micro-batch's metrics; the k3 of every token [B, T] of it, 0 outside the response."""
        mask = clip[0]
        tokens = int(mask.sum())
        terms = divergence(old, logprobs, "k3").where(mask, 0.0)
        ratio = torch.exp(logprobs[mask] - old[mask])
        sums.ratio_sum += float(ratio.double().sum())
        sums.num_counted += tokens
        if tokens:
            sums.largest_ratio = max(sums.largest_ratio, float(ratio.max()))
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
