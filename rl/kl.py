"""How far the policy is from its reference: estimators a token, and the coefficient that holds them at a target.

With d = log pi(token) - log reference(token) of a token drawn from pi (Schulman 2020, "Approximating KL
divergence"; the names are those of Ziegler et al. 2019 and their successors):

| kind | a token's term | as an estimate of KL(pi, reference) | its gradient as a loss, on policy |
|---|---|---|---|
| k1 | d | unbiased | has mean zero: no pull at all, refused in the loss |
| abs | abs(d) | not one | |
| mse | d^2 / 2 | biased, small variance | that of the KL, unbiased |
| k3 | exp(-d) + d - 1 | unbiased, never negative | that of KL(reference, pi), unbiased |
| full | sum over the vocabulary of pi (log pi - log reference) | exact | exact |

`full` holds the logits of the whole vocabulary for both policies: for small vocabularies.
"""

from dataclasses import dataclass

import torch

from espalier.data.records import BadInput
from espalier.runtime.schemas import KLConfig

KINDS = ("k1", "abs", "mse", "k3", "full")
PLACES = ("loss", "reward")


def divergence(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute the term of every token [...] from two log-probs [...] of one shape; `kind` is any but "full"."""
    difference = reference_logprobs - logprobs  # -d
    if kind == "k1":
        return -difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        return 0.5 * difference.square()
    if kind == "k3":
        return torch.exp(difference) - difference - 1
    raise ValueError(f"there is no per-token KL estimator '{kind}'")


def full_divergence(logits: torch.Tensor, reference_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return KL(pi, reference) of the next token's whole distribution: logits [..., V] → [...]."""
    policy = torch.log_softmax(logits.float() / temperature, dim=-1)
    reference = torch.log_softmax(reference_logits.float() / temperature, dim=-1)
    return (policy.exp() * (policy - reference)).sum(-1)


def bounded(terms: torch.Tensor, config: KLConfig) -> torch.Tensor:
    """Keep the terms [...] of tokens within `max_token` nats of 0, and at 0 or above with `cuts_negative`."""
    if config.max_token > 0:
        terms = terms.clamp(-config.max_token, config.max_token)
    return terms.clamp(min=0.0) if config.cuts_negative else terms


def check_kl(config: KLConfig) -> None:
    """Raise BadInput on settings that do not exist, or that would be without effect."""
    for is_good, need in (
        (config.coefficient >= 0, f"kl.coefficient must be at least 0, got {config.coefficient:g}"),
        (config.kind in KINDS, f"kl.kind must be one of {', '.join(KINDS)}, got '{config.kind}'"),
        (config.place in PLACES, f"kl.place must be loss or reward, got '{config.place}'"),
        (
            config.place != "loss" or config.kind != "k1" or config.coefficient == 0,
            "kl.kind=k1 in the loss pulls nowhere (its gradient has mean zero): set kl.kind=k3 or mse, or place=reward",
        ),
        (config.target >= 0, f"kl.target must be at least 0 (0: a fixed coefficient), got {config.target:g}"),
        (config.horizon > 0, f"kl.horizon must be above 0, got {config.horizon}"),
        (
            config.target == 0 or config.coefficient > 0,
            "kl.target adapts kl.coefficient, which must begin above 0",
        ),
        (
            config.kind == "k1" or not config.cuts_negative,
            f"kl.cuts_negative=true cuts terms below 0, and those of kl.kind={config.kind} never are: set it to false, "
            "or kl.kind=k1 with kl.place=reward",
        ),
        (
            config.coefficient > 0 or not config.cuts_negative,
            "kl.cuts_negative=true cuts terms of a KL penalty, and kl.coefficient=0 has none: set one of them",
        ),
        (config.max_token >= 0, f"kl.max_token must be at least 0 (0: no bound), got {config.max_token:g}"),
    ):
        if not is_good:
            raise BadInput(need)


@dataclass
class KLController:
    """The coefficient: fixed where `target` is 0, else adaptive (Ziegler et al. 2019, section 2.2).

    `target` is KL in nats per response, `horizon` in rollouts.
    """

    coefficient: float
    target: float
    horizon: int

    def update(self, kl_per_response: float, num_rollouts: int) -> None:
        """coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_rollouts / horizon."""
        if self.target > 0:
            error = min(max(kl_per_response / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * num_rollouts / self.horizon
