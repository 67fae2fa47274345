"""The losses of policy optimisation: pure functions on log-probs, each a sum and a count, never a mean.

Log-probs are [B, T] (or any one shape); only positions where `mask` is true are read. `weights`, where given,
multiply every token's loss: see `token_weights`.
"""

import math

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from espalier.data.records import BadInput

NORMALISERS = ("token", "sequence", "constant")
# What a critic can say, by its form: what is not within it cannot be learnt.
VALUE_RANGES = {"linear": (-math.inf, math.inf), "probability": (0.0, 1.0)}
CORRECTIONS = ("clamp", "mask", "divergence", "none")
LEVELS = ("token", "sequence")
VALUE_LOSSES = ("squared", "cross_entropy")


def token_weights(mask: torch.Tensor, normaliser: str, max_tokens: int) -> tuple[torch.Tensor, float]:
    """Return (weight of every token [B, T], what the sum over all of them is divided by), for the whole minibatch [B,
    T].

    - "token": every token alike (DAPO): 1, and the number of tokens;
    - "sequence": every response alike (GRPO, Shao et al. 2024): 1 / its tokens, and the number of responses;
    - "constant": tokens alike, whatever lengths there are (Dr. GRPO, Liu et al. 2025): 1, and B * `max_tokens`.
    """
    weights = mask.float()
    if normaliser == "token":
        return weights, float(mask.sum())
    if normaliser == "sequence":
        return weights / mask.sum(-1, keepdim=True).clamp(min=1), float(len(mask))
    if normaliser == "constant":
        return weights, float(len(mask) * max_tokens)
    raise ValueError(f"update.loss_aggregation must be one of {', '.join(NORMALISERS)}, got '{normaliser}'")


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """Sum PPO's loss (Schulman et al. 2017, eq. 7) with two clip widths (DAPO, Yu et al. 2025): (loss [], tokens).

    All tensors are [B, T]. With r = pi(token) / pi_old(token) the loss of a token is
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). With `dual_clip` c above 0 and A < 0 it is at most
    -c A (Ye et al. 2020, eq. 5): a ratio that exploded does not make the step.
    """
    ratio = torch.exp(logprobs[mask] - old_logprobs[mask])
    chosen = advantages[mask]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * chosen, clipped * chosen)
    if dual_clip > 0:
        gain = torch.where(chosen < 0, torch.maximum(gain, dual_clip * chosen), gain)
    if weights is not None:
        gain = gain * weights[mask]
    return -gain.sum(), int(mask.sum())


def clipped_tokens(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[int, int]:
    """Count (tokens whose gradient the clip cuts off, tokens); all tensors are [B, T].

    The first have r > 1 + clip_high and A > 0, or r < 1 - clip_low and A < 0.
    """
    ratio = torch.exp(logprobs[mask] - old_logprobs[mask])
    chosen = advantages[mask]
    is_cut = ((ratio > 1 + clip_high) & (chosen > 0)) | ((ratio < 1 - clip_low) & (chosen < 0))
    return int(is_cut.sum()), int(mask.sum())


def importance_weights(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    cap: float,
    floor: float = 0.0,
    correction: str = "clamp",
    level: str = "token",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what every token [B, T] counts for having been drawn by another policy, the engine's or an older one's;
    (weights, whether the bounds decide) [B, T]; all tensors are [B, T].

    The ratio is r = pi_old / pi_engine of the token, or with `level` "sequence" the geometric mean of those of its
    response. "clamp": r within [`floor`, `cap`]: truncated importance sampling (Yao et al. 2025) where `floor` is 0.
    "mask": r where it is within, else 0 (IcePop, Ling team 2025). "divergence" is "clamp" here (`is_driven_off`).
    """
    ratios = (old_logprobs - rollout_logprobs).where(mask, 0.0)
    if level == "sequence":
        ratios = (ratios.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(ratios)
    ratios = torch.exp(ratios)
    is_outside = (ratios >= cap) | (ratios < floor)
    kept = ratios.where(~is_outside, 0.0) if correction == "mask" else ratios.clamp(floor, cap)
    return kept, is_outside


def is_driven_off(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor, limit: float
) -> torch.Tensor:
    """Say which tokens [B, T] the loss would drive further from the policy that drew them, of those whose probability
    is more than `limit` away from that one's: DPPO's mask by the binary total variation |pi(a) - mu(a)| (Qi et al.
    2026, arXiv 2602.04879, equations 12 and 13). All tensors are [B, T]."""
    is_far = (torch.exp(logprobs) - torch.exp(rollout_logprobs)).abs() > limit
    return is_far & ((logprobs > rollout_logprobs) == (advantages > 0)) & (advantages != 0)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip_range: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float, int]:
    """Sum 1/2 max((V - R)^2, (V_clipped - R)^2) over tokens: (loss [], tokens the clip decides, tokens).

    All tensors are [B, T]. V_clipped is V kept within `clip_range` of the value before the update (PPO's published
    code); 0 clips nothing. `weights`, where given, multiply every token's loss, and its count where the clip decides.
    """
    found, before, targets = values[mask], old_values[mask], returns[mask]
    error = (found - targets).square()
    num_clipped = 0.0
    if clip_range > 0:
        clipped = (before + (found - before).clamp(-clip_range, clip_range) - targets).square()
        is_decided = clipped > error
        num_clipped = float(is_decided.sum() if weights is None else weights[mask][is_decided].sum())
        error = torch.maximum(error, clipped)
    if weights is not None:
        error = error * weights[mask]
    return 0.5 * error.sum(), num_clipped, int(mask.sum())


def check_value_loss(loss: str, form: str, clip_range: float) -> None:
    """Raise BadInput on a loss that does not exist, or that a critic of this form and clip cannot have."""
    if loss not in VALUE_LOSSES:
        raise BadInput(f"critic.loss must be one of {', '.join(VALUE_LOSSES)}, got '{loss}'")
    if loss == "cross_entropy" and form != "probability":
        raise BadInput(f"critic.loss=cross_entropy fits shares from 0 to 1, and critic.form={form}: set "
                       "critic.form=probability, or critic.loss=squared")  # fmt: skip
    if loss == "cross_entropy" and clip_range:
        raise BadInput(f"critic.loss=cross_entropy has no clip, and critic.clip_range={clip_range:g}: set "
                       "critic.clip_range=0")  # fmt: skip


def cross_entropy_loss(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum w (-R log p - (1 - R) log(1 - p)), p = sigmoid(logit), over the tokens of `mask`: []; all tensors are [B, T].

    For targets R in [0, 1]. With R the mean of w outcomes of 0 or 1 it is the negative log-likelihood of all of them.
    """
    losses = binary_cross_entropy_with_logits(logits[mask], targets[mask], reduction="none")
    return losses.sum() if weights is None else (losses * weights[mask]).sum()


def whiten_around_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute (values - mean) / std + mean [N, T] over the masked tokens of the whole iteration, 0 outside `mask`: the
    whitening of rewards in PPO's published code (Ziegler et al. 2019), over all ranks as `whiten`."""
    chosen = values[mask].double()
    if chosen.numel() < 2:
        return values
    mean = chosen.mean()
    centred = (values.double() - mean) * torch.rsqrt(chosen.var() + 1e-8)
    return ((centred + mean) * mask).to(values.dtype)


def whiten(values: torch.Tensor, mask: torch.Tensor, shifts_mean: bool = True) -> torch.Tensor:
    """Compute (values - mean) / std [N, T] over the masked tokens of the whole iteration.

    With `shifts_mean` false the values [N, T] are only scaled.

    Rank 0 holds all rollouts of the iteration, so these are the mean and variance over all ranks. Variance
    is that of a sample (n - 1); 1e-8 is added to it.
    """
    chosen = values[mask].double()
    if chosen.numel() < 2:
        return values
    scale = torch.rsqrt(chosen.var() + 1e-8)
    centred = values.double() - chosen.mean() if shifts_mean else values.double()
    return (centred * scale * mask).to(values.dtype)
