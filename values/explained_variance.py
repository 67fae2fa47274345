"""How much of what happens values explain: one measure for critics and for any other estimate of states."""

import torch


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """Return 1 - Var(R - V) / Var(R) of [N] each: 1 is perfect but for a constant, 0 as good as one number for all
    states, below 0 worse; None where R is constant."""
    variance = float(returns.double().var(correction=0))
    return 1 - float((returns - values).double().var(correction=0)) / variance if variance > 1e-12 else None
