"""Rollout groups → tensors: padded ids, masks, rewards, log-probs by the engine, the trainer and the reference.

The "old" log-probs of the surrogate are the trainer's own, not the engine's: the two differ by bf16 noise,
and a ratio of one must mean an unchanged policy. The difference is measured (`logprob_gap`), and corrected where
`tis_cap` asks for it.

Every rank holds all rollouts of the iteration and scores its share of them; sums over ranks put the shares together.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.batches.packing import pad_rows
from espalier.models.logits import all_logits
from espalier.models.logprobs import response_logprobs
from espalier.models.packing_check import packs_rows
from espalier.rl.iteration_metrics import Clock
from espalier.rl.kl import divergence, full_divergence
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.types import Experience, RolloutGroup
from espalier.runtime.distributed import gather_over_ranks, rank, sum_tensor_over_ranks, world_size
from espalier.training.engine import autocast


def micro_batches(
    attention_mask: torch.Tensor, rows: torch.Tensor, size: int, is_packed: bool
) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut `rows` [R] of `attention_mask` [N, T] into at most `size` each: (row numbers [r], tokens of the longest).

    Where the pass packs rows, they are taken by number: the rollouts of a problem are neighbours and share their
    prompt. Where it pads them, by length.
    """
    lengths = attention_mask.sum(-1)
    ordered = rows[torch.argsort(rows if is_packed else lengths[rows], stable=True)]
    for start in range(0, len(ordered), size):
        cut = ordered[start : start + size]
        yield cut, int(lengths[cut].max())


def own_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of `rows` [R]: neighbours by number; the ranks together have every row once."""
    return torch.tensor_split(rows.sort().values, world_size())[rank()]


def most_passes(num_own: int) -> int:
    """Return how many forward passes the rank with the most rows makes. ZeRO-3 gathers weights in every pass, and
    gradients are reduced in every backward pass: a rank with fewer has to make as many."""
    return max(gather_over_ranks(num_own))


def empty_loss(model: Any, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Compute a loss [] of 0 with a graph through all of the model: the pass of a rank that has no rows left.

    It reads two tokens of the first row of `ids` and `attention_mask` [N, T].
    """
    short = (ids[:1, :2], attention_mask[:1, :2])
    device = device_of(model)
    logits = model(input_ids=short[0].to(device), attention_mask=short[1].to(device)).logits
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


# (ids, attention mask, response mask), [B, T] each → tensors [B, T].
Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


class RowScorer:
    """Forward passes without gradients over all rollouts, `micro_batch_size` rows at a time."""

    def __init__(self, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], micro_batch_size: int, precision: str):
        self.ids, self.attention_mask, self.response_mask = tensors
        self.micro_batch_size = micro_batch_size
        self.precision = precision

    @torch.no_grad()
    def __call__(
        self, model: Any, num_outputs: int, call: Score, is_packed: bool, rows: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return `num_outputs` tensors [N, T] on the CPU, 0 outside the response and outside `rows` (None: all): what
        `call`, about `model`, gives; `is_packed` says whether it packs rows."""
        device = device_of(model)
        found = [torch.zeros(self.ids.shape) for _ in range(num_outputs)]
        mine = own_rows(torch.arange(len(self.ids)) if rows is None else rows)
        cuts = list(micro_batches(self.attention_mask, mine, self.micro_batch_size, is_packed))
        none = (torch.zeros(0, dtype=torch.long), 2)
        for cut, length in cuts + [none] * (most_passes(len(cuts)) - len(cuts)):
            read = cut if len(cut) else slice(0, 1)  # a pass for the other ranks' sake
            tensors = (self.ids, self.attention_mask, self.response_mask)
            with autocast(device, self.precision):
                parts = call(*(tensor[read, :length].to(device) for tensor in tensors))
            if not len(cut):
                continue
            for whole, part in zip(found, parts, strict=True):
                whole[cut, :length] = part.float().cpu() * self.response_mask[cut, :length]
        return [sum_tensor_over_ranks(whole) for whole in found]

    def logprobs(self, model: Any, temperature: float, rows: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return [log-probs, entropies] [N, T] under `model`, 0 outside `rows` (None: all)."""
        model.eval()
        return self(model, 2, partial(policy_logprobs, model, temperature=temperature), packs_rows(model), rows)


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


def reference_terms(
    scorer: RowScorer, experience: Experience, policy: Any, reference: Any, kind: str, temperature: float
) -> torch.Tensor:
    """Return the KL term of every response token [N, T], by the policy before the update."""
    assert experience.reference_logprobs is not None
    if kind != "full":
        return divergence(experience.old_logprobs, experience.reference_logprobs, kind) * experience.response_mask

    def both(ids: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor]:
        return (full_divergence(policy_logits(policy, ids, mask), policy_logits(reference, ids, mask), temperature),)

    policy.eval()
    return scorer(policy, 1, both, is_packed=False)[0]


def make_experience(
    groups: Sequence[RolloutGroup],
    policy: Any,
    *,
    pad_id: int,
    micro_batch_size: int,
    precision: str,
    temperature: float,
    clock: Clock | None = None,
) -> tuple[Experience, RowScorer]:
    """Return the tensors of all rollouts, in order, and what scores them; `policy`, the network before the update,
    scores them where its log-probs are read first."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [[*rollout.context_ids, *rollout.drawn_ids] for rollout in rollouts]
    starts = [len(rollout.context_ids) for rollout in rollouts]
    ids, attention_mask, response_mask = pad_rows(rows, starts, pad_id)
    rollout_logprobs = torch.zeros(ids.shape)
    for number, (start, rollout) in enumerate(zip(starts, rollouts, strict=True)):
        # not by the mask, which `rl.probes.checks.check_layout` compares with the rollouts
        drawn = rollout.logprobs[rollout.num_shared :]
        rollout_logprobs[number, start : start + len(drawn)] = torch.tensor(drawn)
    scorer = RowScorer((ids, attention_mask, response_mask), micro_batch_size, precision)
    old = OldLogprobs.to_score(ids.shape, partial(scorer.logprobs, policy, temperature), clock or Clock())
    return Experience(ids, attention_mask, response_mask, rollout_logprobs, old), scorer


def logprob_gap(experience: Experience) -> tuple[float, float]:
    """Return (mean, max) over response tokens of |log-prob by the engine - log-prob by the trainer|."""
    gap = (experience.rollout_logprobs - experience.old_logprobs)[experience.response_mask].abs()
    return float(gap.mean()), float(gap.max())
