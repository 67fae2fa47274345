"""Rollout groups → tensors: padded ids, masks, log-probs by the engine, the trainer and the reference.

The "old" log-probs of the surrogate are the trainer's own, not the engine's: the two differ by bf16 noise,
and a ratio of one must mean an unchanged policy. The difference is measured (`logprob_gap`), not corrected.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from data.collate import pad_rows
from models.logprobs import response_logprobs
from rl.types import Experience, RolloutGroup
from training.engine import autocast


def micro_batches(attention_mask: torch.Tensor, rows: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, int]]:
    """(row numbers, tokens of the longest): `rows` in cuts of at most `size` rows, of similar length."""
    lengths = attention_mask.sum(-1)
    ordered = rows[torch.argsort(lengths[rows], stable=True)]
    for start in range(0, len(ordered), size):
        cut = ordered[start : start + size]
        yield cut, int(lengths[cut].max())


def policy_logprobs(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) [B, T] aligned with `ids`: position t is about token t; column 0 is 0."""
    logprobs, entropies = response_logprobs(model, ids, attention_mask, temperature)
    return pad(logprobs, (1, 0)), pad(entropies, (1, 0))


@torch.no_grad()
def _score_rows(
    model: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    micro_batch_size: int,
    precision: str,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [N, T] on the CPU, 0 outside the response."""
    ids, attention_mask, response_mask = tensors
    device = next(model.parameters()).device
    logprobs, entropies = torch.zeros(ids.shape), torch.zeros(ids.shape)
    model.eval()
    for rows, length in micro_batches(attention_mask, torch.arange(len(ids)), micro_batch_size):
        with autocast(device, precision):
            found = policy_logprobs(
                model, ids[rows, :length].to(device), attention_mask[rows, :length].to(device), temperature
            )
        for whole, part in zip((logprobs, entropies), found, strict=True):
            whole[rows, :length] = part.float().cpu() * response_mask[rows, :length]
    return logprobs, entropies


def make_experience(
    groups: Sequence[RolloutGroup],
    policy: Any,
    reference: Any | None,
    *,
    pad_id: int,
    micro_batch_size: int,
    precision: str,
    temperature: float,
) -> Experience:
    """The tensors of all rollouts, in order. `reference` is None without a KL penalty."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [[*rollout.trajectory.prompt_ids, *rollout.trajectory.response_ids] for rollout in rollouts]
    starts = [len(rollout.trajectory.prompt_ids) for rollout in rollouts]
    ids, attention_mask, response_mask = pad_rows(rows, starts, pad_id)
    engine_logprobs = torch.zeros(ids.shape)
    sampled = [value for rollout in rollouts for value in rollout.logprobs]
    engine_logprobs[response_mask] = torch.tensor(sampled)
    how = ((ids, attention_mask, response_mask), micro_batch_size, precision, temperature)
    old_logprobs, entropies = _score_rows(policy, *how)
    reference_logprobs = _score_rows(reference, *how)[0] if reference is not None else None
    return Experience(ids, attention_mask, response_mask, engine_logprobs, old_logprobs, entropies, reference_logprobs)


def logprob_gap(experience: Experience) -> tuple[float, float]:
    """(mean, max) over response tokens of |log-prob by the engine - log-prob by the trainer|."""
    gap = (experience.engine_logprobs - experience.old_logprobs)[experience.response_mask].abs()
    return float(gap.mean()), float(gap.max())
