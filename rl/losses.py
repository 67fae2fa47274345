"""The losses of policy optimisation: pure functions on log-probs, each a sum and a count, never a mean.

Log-probs are [B, T] (or any one shape); only positions where `mask` is true are read.
"""

import torch


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, int]:
    """(summed loss, tokens): PPO (Schulman et al. 2017, eq. 7), two clip widths (DAPO, Yu et al. 2025).

    With r = pi(token) / pi_old(token) the loss of a token is
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    """
    ratio = torch.exp(logprobs[mask] - old_logprobs[mask])
    chosen = advantages[mask]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * chosen, clipped * chosen).sum(), int(mask.sum())


def clipped_tokens(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[int, int]:
    """(tokens whose gradient the clip cuts off, tokens).

    These have r > 1 + clip_high and A > 0, or r < 1 - clip_low and A < 0.
    """
    ratio = torch.exp(logprobs[mask] - old_logprobs[mask])
    chosen = advantages[mask]
    is_cut = ((ratio > 1 + clip_high) & (chosen > 0)) | ((ratio < 1 - clip_low) & (chosen < 0))
    return int(is_cut.sum()), int(mask.sum())


def k3_divergence(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """(summed estimate of KL(pi || reference), tokens): k3 of Schulman 2020, "Approximating KL divergence".

    With d = log reference(token) - log pi(token), a token drawn from pi gives exp(d) - d - 1 >= 0.
    """
    difference = reference_logprobs[mask] - logprobs[mask]
    return (torch.exp(difference) - difference - 1).sum(), int(mask.sum())
