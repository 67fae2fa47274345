"""Rollout groups → tensors: padded ids, masks, rewards, log-probs by the engine, the trainer and the reference.

The "old" log-probs of the surrogate are the trainer's own, not the engine's: the two differ by bf16 noise,
and a ratio of one must mean an unchanged policy. The difference is measured (`logprob_gap`), and corrected where
`tis_cap` asks for it.

All of it is rank 0's. Each rank scores its share of the rows, which comes to it for that pass (`rl.row_parts`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.batches.packing import pad_rows
from espalier.models.logits import all_logits
from espalier.models.logprobs import response_logprobs
from espalier.models.packing_check import packs_rows
from espalier.models.precision import autocast
from espalier.rl.iteration_metrics import Clock
from espalier.rl.kl import divergence, full_divergence
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.row_parts import Masks, RowPart, joined, on_ranks
from espalier.rl.row_shares import cuts_of_ranks, taker
from espalier.rl.types import Experience, RolloutGroup


def filler_row(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, attention mask and response mask [1, 2] of two tokens that mean nothing: what a rank that has no rows
    left computes, for the other ranks' sake. It has to make the very passes that a rank with rows makes."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    return ids, torch.ones_like(ids), torch.tensor([[False, True]], device=device)


def empty_loss(model: Any, precision: str) -> torch.Tensor:
    """Compute a loss [] of 0 with a graph through all of the model: the pass of a rank that has no rows left."""
    ids, attention_mask, _ = filler_row(device_of(model))
    with autocast(ids.device, precision):
        logits = model(input_ids=ids, attention_mask=attention_mask).logits
    loss: torch.Tensor = 0.0 * logits.float().sum()
    return loss


def policy_logprobs(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob, entropy) [B, T] aligned with `ids`: position t is about token t; 0 outside the response."""
    logprobs, entropies = response_logprobs(model, ids, attention_mask, temperature, response_mask)
    return pad(logprobs, (1, 0)), pad(entropies, (1, 0))


def policy_logits(model: Any, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return [B, T, V] aligned with `ids`: position t is the distribution that token t was drawn from; column 0 is
    0."""
    logits = all_logits(model, {"input_ids": ids, "attention_mask": attention_mask})
    return pad(logits[:, :-1], (0, 0, 1, 0))


# (ids, attention mask, response mask), [B, T] each → tensors [B, T]; picklable, but for networks that ranks hold.
Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


class RowScorer:
    """Forward passes without gradients over all rollouts, `micro_batch_size` rows at a time, or where
    `micro_batch_tokens` is above 0 so many tokens; each rank its share."""

    def __init__(self, tensors: Masks, micro_batch_size: int, precision: str, micro_batch_tokens: int = 0):
        self.ids, self.attention_mask, self.response_mask = tensors
        self.micro_batch_size, self.micro_batch_tokens = micro_batch_size, micro_batch_tokens
        self.precision = precision

    def __call__(
        self, model: Any, num_outputs: int, call: Score, is_packed: bool, rows: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return `num_outputs` tensors [N, T] on the CPU, 0 outside the response and outside `rows` (None: all): what
        `call`, about `model`, gives; `is_packed` says whether it packs rows."""
        found = [torch.zeros(self.ids.shape) for _ in range(num_outputs)]
        every = torch.arange(len(self.ids)) if rows is None else rows
        sizes = (is_packed, self.micro_batch_size, self.micro_batch_tokens)
        cuts = cuts_of_ranks(self.ids, self.attention_mask, every, *sizes)
        masks = (self.ids, self.attention_mask, self.response_mask)
        score = partial(score_part, model, num_outputs, call, self.precision)
        for part, outputs in on_ranks(score, masks, {}, cuts):
            for whole, values in zip(found, outputs, strict=True):
                part.fill(whole, values)
        return found

    def logprobs(self, model: Any, temperature: float, rows: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return [log-probs, entropies] [N, T] under `model`, 0 outside `rows` (None: all)."""
        return self(model, 2, partial(policy_logprobs, model, temperature=temperature), packs_rows(model), rows)


@torch.no_grad()
def score_part(model: Any, num_outputs: int, call: Score, precision: str, part: RowPart) -> list[torch.Tensor]:
    """Return the `num_outputs` that `call`, about `model`, gives of the response tokens [tokens], on the CPU."""
    model.eval()
    device, rows = device_of(model), part.experience()
    found: list[list[torch.Tensor]] = [[] for _ in range(num_outputs)]
    for cut, length in part.cuts:
        take = taker(cut, length, device)
        with autocast(device, precision):
            outputs = call(take(rows.ids), take(rows.attention_mask).long(), take(rows.response_mask))
        mask = rows.response_mask[cut, :length]
        for parts, output in zip(found, outputs, strict=True):
            parts.append(output.cpu()[mask])
    for _ in range(part.num_empty):
        with autocast(device, precision):
            call(*filler_row(device))
    return [joined(parts) for parts in found]


def device_of(model: Any) -> torch.device:
    """Say where its weights are."""
    found: torch.device = next(model.parameters()).device
    return found


def token_rewards(groups: Sequence[RolloutGroup], response_mask: torch.Tensor) -> torch.Tensor:
    """Return [N, T]: every outcome at the last token of its response, every process reward at the last token of its
    step.

    A response without tokens has no place for a reward. Raises ValueError where a trajectory has other steps than
    its score.
    """
    rewards = torch.zeros(response_mask.shape)
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
    for row, (rollout, score) in enumerate(pairs):
        trajectory = rollout.trajectory
        if score.steps and len(score.steps) != len(trajectory.step_ends):
            numbers = f"{len(score.steps)} process rewards for {len(trajectory.step_ends)} steps"
            raise ValueError(f"trajectory '{trajectory.id}' has {numbers}")
        if not trajectory.response_ids:
            continue
        start = len(trajectory.prompt_ids)
        rewards[row, start + len(trajectory.response_ids) - 1] += score.outcome
        for end, value in zip(trajectory.step_ends, score.steps, strict=False):
            rewards[row, start + end - 1] += value
    return rewards


def add_implicit_rewards(experience: Experience, weight: float) -> Experience:
    """Return the experience whose rewards [N, T] have `weight` times its implicit rewards in them."""
    assert experience.rewards is not None
    assert experience.implicit_rewards is not None
    return replace(experience, rewards=experience.rewards + weight * experience.implicit_rewards)


def reference_terms(
    scorer: RowScorer, experience: Experience, policy: Any, reference: Any, kind: str, temperature: float
) -> torch.Tensor:
    """Return the KL term of every response token [N, T], by the policy before the update."""
    assert experience.reference_logprobs is not None
    if kind != "full":
        return divergence(experience.old_logprobs, experience.reference_logprobs, kind) * experience.response_mask

    return scorer(policy, 1, partial(_full_terms, policy, reference, temperature), is_packed=False)[0]


def _full_terms(
    policy: Any, reference: Any, temperature: float, ids: torch.Tensor, mask: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor]:
    return (full_divergence(policy_logits(policy, ids, mask), policy_logits(reference, ids, mask), temperature),)


def make_experience(
    groups: Sequence[RolloutGroup],
    policy: Any,
    *,
    pad_id: int,
    micro_batch_size: int,
    precision: str,
    temperature: float,
    clock: Clock | None = None,
    micro_batch_tokens: int = 0,
) -> tuple[Experience, RowScorer]:
    """Return the tensors of all rollouts, in order, and what scores them; `policy`, the network before the update,
    scores them where its log-probs are read first."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [[*rollout.context_ids, *rollout.drawn_ids] for rollout in rollouts]
    starts = [len(rollout.context_ids) for rollout in rollouts]
    ids, attention_mask, response_mask = pad_rows(rows, starts, pad_id)
    ids, attention_mask = ids.int(), attention_mask.bool()
    rollout_logprobs = torch.zeros(ids.shape)
    for number, (start, rollout) in enumerate(zip(starts, rollouts, strict=True)):
        # not by the mask, which `rl.probes.checks.check_layout` compares with the rollouts
        drawn = rollout.logprobs[rollout.num_shared :]
        rollout_logprobs[number, start : start + len(drawn)] = torch.tensor(drawn, dtype=torch.float32)
    scorer = RowScorer((ids, attention_mask, response_mask), micro_batch_size, precision, micro_batch_tokens)
    old = OldLogprobs.to_score(ids.shape, partial(scorer.logprobs, policy, temperature), clock or Clock())
    return Experience(ids, attention_mask, response_mask, rollout_logprobs, old), scorer


def logprob_gap(experience: Experience) -> tuple[float, float]:
    """Return (mean, max) over response tokens of |log-prob by the engine - log-prob by the trainer|."""
    gap = (experience.rollout_logprobs - experience.old_logprobs)[experience.response_mask].abs()
    return float(gap.mean()), float(gap.max())
