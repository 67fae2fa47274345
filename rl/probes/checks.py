"""What can silently spoil reinforcement learning with a live engine, and how it is seen: pure functions.

The engine says of every token it drew what log-prob it had; the trainer computes it again. Nothing but rounding may lie
between the two. `measure_gap` sums the difference up, `crossed` holds it against what rounding makes of this very
policy (`rl.probes.rounding`), `check_layout` looks at the tensors themselves, `surprise` asks whether tokens were drawn
from the distribution whose log-probs they have. Which fault it is, `rl.probes.diagnosis` finds out.

Why several measures (tiny Llama, bf16, 18,000 tokens): a wrong temperature, a shift or a doubled BOS make the mean
0.11 where rounding makes 0.002; top-p of 0.9 shows in the bias (0.10) and in no ratio outside [0.8, 1.2]; a policy one
small step old shows in none of them, so that versions and digests of weights are compared besides
(`rl.delivery.weight_sync`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from espalier.rl.probes.rounding import FACTOR, FLOOR
from espalier.sampling.client import ServerGone

WEIGHTS = "weights not delivered"
UNUSED = "weights read and not used"
CACHE = "stale prefix cache"
TEMPERATURE = "temperature on one side only"
TOP_P = "top-p on one side only"
SHIFT = "off by one token"
BOS = "double BOS"
PAD = "wrong pad side"
STOP = "stop token missing from the mask"
REWARD = "reward is not a number"
CRASH = "engine crash"
KL = "KL explosion"
VERSION = "wrong policy version"
UNKNOWN = "engine and trainer disagree"

REMEDIES = {
    WEIGHTS: "the engine must take every tensor: look into the server's log for weights that were not loaded",
    UNUSED: "the engine was sent every tensor and computes with an old one: look for a tied or converted copy of it",
    CACHE: "the engine must empty its prefix cache when it takes new weights: nothing may ask it during a delivery",
    TEMPERATURE: "the server needs logprobs_mode=processed_logprobs, and both sides the same params.temperature",
    TOP_P: "set params.top_p=1 and let no generation_config.json of the server fill in top_p, top_k or min_p",
    SHIFT: "the log-prob of token t is read at token t - 1, and the response begins behind the prompt",
    BOS: "the prompt's ids must go to the engine as they are: no add_special_tokens on ids that have them",
    PAD: "rows are padded on the right here",
    STOP: "the end token is part of the response: the policy learns to stop from it",
    REWARD: "look at the reward's parts for this response",
    CRASH: "the same command goes on from the last checkpoint",
    KL: "lower update.learning_rate, or raise kl.coefficient; the last checkpoint is from before",
    VERSION: "one engine serves one run: another program delivered weights, or the engine was restarted",
    UNKNOWN: "the same dtype and kernels on both sides; a quantised engine needs a limit of its own: probes.max_gap",
}


_CHANCE = 4.0  # standard errors


@dataclass(frozen=True)
class Fault:
    """What is wrong (`kind`, one of the names above) and what was seen."""

    kind: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.evidence} ({REMEDIES[self.kind]})"


class ProbeFailed(RuntimeError):
    """The run stops before it learns from what is wrong; what it has saved is from before."""

    exit_code = 1

    def __init__(self, fault: Fault):
        super().__init__(str(fault))
        self.fault = fault


def crashed(error: ServerGone, check_server: Callable[[], None], has_answered: bool = False) -> ServerGone:
    """Return the error as what it is to a run: a crash, with the end of the server's log where its process has ended; a
    server that lives and `has_answered` is none."""
    if str(error).startswith(CRASH):
        return error
    try:
        check_server()
    except ServerGone as death:
        error = death
    else:
        if has_answered:
            return error
    return ServerGone(f"{CRASH}: {error}\n{REMEDIES[CRASH]}")


@dataclass(frozen=True)
class Gap:
    """Over response tokens, with d = trainer's - engine's log-prob: mean and 99th percentile of |d| and its largest;
    `bias`, the mean of d; `k3`, the mean of exp(d) - d - 1 (KL of the engine's policy from the trainer's); `outside`,
    the share with exp(d) not in [0.8, 1.2]; the largest |sum of d| of a response; `effective`, (sum w)^2 / (n sum w^2)
    of the weights w = exp(d). An `_error` is the standard error of a mean."""

    mean: float
    p99: float
    largest: float
    bias: float
    bias_error: float
    k3: float
    outside: float
    largest_sequence: float
    effective: float
    tokens: int
    mean_error: float
    k3_error: float

    def metrics(self) -> dict[str, float]:
        """For the metrics file, beside `gap_mean` and `gap_max`."""
        names = {"p99": "gap_p99", "bias": "gap_bias", "k3": "gap_k3", "outside": "ratios_outside",
                 "largest_sequence": "gap_max_response", "effective": "effective_share"}  # fmt: skip
        found = asdict(self)
        return {names[name]: float(found[name]) for name in names}


def measure_gap(engine: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> Gap:
    """Of log-probs [N, T] where `mask`; without tokens there is no gap. A value that is no number makes all
    measures nan."""
    difference = trainer.double() - engine.double()
    found = difference[mask]
    if not len(found):
        return Gap(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0, 0.0, 0.0)
    if not bool(torch.isfinite(found).all()):
        nan = float("nan")
        return Gap(nan, nan, nan, nan, nan, nan, nan, nan, nan, len(found), nan, nan)
    size, ratio = found.abs(), torch.exp(found.clamp(-20, 20))
    ordered, divergences = size.sort().values, ratio - found - 1

    def error(values: torch.Tensor) -> float:
        return float(values.std(correction=0)) / math.sqrt(len(values))

    return Gap(
        mean=float(size.mean()),
        p99=float(ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]),
        largest=float(ordered[-1]),
        bias=float(found.mean()),
        bias_error=error(found),
        k3=float(divergences.mean()),
        outside=float(((ratio < 0.8) | (ratio > 1.2)).double().mean()),
        largest_sequence=float(difference.masked_fill(~mask, 0.0).sum(-1).abs().max()),
        effective=float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
        tokens=len(found),
        mean_error=error(size),
        k3_error=error(divergences),
    )


def allowed(rounding: Gap) -> float:
    """Return the mean |d| up to which the engine may differ where rounding makes this much, in nats per token."""
    return FACTOR * max(FLOOR, rounding.mean + _CHANCE * rounding.mean_error)


def crossed(gap: Gap, rounding: Gap, max_gap: float = 0.0) -> list[str]:
    """Return what of the engine's difference cannot be rounding, in words. `rounding`: what the trainer's own log-probs
    differ by when they are rounded as the engine's (`rl.probes.rounding`).

    The mean may be `FACTOR` times as large, k3 (a square) the square of that, and a bias, which rounding hardly has, as
    large as rounding's mean; each beyond what chance makes of so many tokens (four standard errors). Above 0 `max_gap`
    limits the mean instead, and nothing else does.
    """
    if max_gap > 0:
        return [] if gap.mean <= max_gap else [f"mean gap {gap.mean:.3g} (probes.max_gap is {max_gap:g})"]
    mean, k3 = allowed(rounding), FACTOR**2 * max(FLOOR**2, rounding.k3 + _CHANCE * rounding.k3_error)
    rows = (
        ("mean gap", gap.mean, gap.mean_error, mean),
        ("bias", abs(gap.bias), gap.bias_error, mean / FACTOR),
        ("k3", gap.k3, gap.k3_error, k3),
    )
    reason = f"rounding makes a mean of {rounding.mean:.2g}"
    return [f"{name} {value:.3g} (at most {limit:.2g} here: {reason})" for name, value, error, limit in rows
            if not value - _CHANCE * error <= limit]  # fmt: skip


def surprise(
    logprobs: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor, variances: torch.Tensor | None = None
) -> tuple[float, float]:
    """Measure (the mean of -log-prob - entropy over response tokens, the same in standard errors) of tensors [N, T].

    Its expectation is 0 at every token for samples of the very distribution: below 0 what was drawn is too likely
    (top-p, a lower temperature, greedy), above 0 too unlikely. Only for rollouts that nobody selected. `variances`
    of -log-prob under the distributions tell what chance can do where the policy is nearly sure: rare tokens that
    were not drawn leave no trace in the sample's own scatter. The larger of the two counts.
    """
    found = (-logprobs - entropies)[mask].double()
    if not len(found):
        return 0.0, 0.0
    scatter = float(found.square().sum())
    if variances is not None:
        scatter = max(scatter, float(variances[mask].double().sum()))
    error = math.sqrt(scatter) / len(found)
    return float(found.mean()), float(found.mean()) / error if error > 0 else 0.0


@dataclass(frozen=True)
class ExpectedRow:
    """What a row of the tensors has to hold: the rollout's own ids."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    finish_reason: str


def check_layout(
    rows: Sequence[ExpectedRow],
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    end_ids: Sequence[int],
    bos_id: int | None,
    has_stop_strings: bool,
) -> Fault | None:
    """Name the first row of the tensors [N, T] that is not prompt, response, padding, its mask on all the response."""
    for number, row in enumerate(rows):
        start, length = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
        if bos_id is not None and list(row.prompt_ids[:2]) == [bos_id, bos_id]:
            return Fault(BOS, f"the prompt of rollout {number} begins with token {bos_id} twice")
        if length and not int(attention_mask[number, 0]):
            return Fault(PAD, f"row {number} begins with padding")
        expected = [*row.prompt_ids, *row.response_ids]
        if ids[number, 1 : length + 1].tolist() == expected and ids[number, :length].tolist() != expected:
            return Fault(BOS, f"row {number} has token {int(ids[number, 0])} before the prompt that was sampled from")
        kept = response_mask[number].nonzero().flatten().tolist()
        if kept != list(range(start, length)):
            return _mask_fault(number, kept, start, length)
        if ids[number, :length].tolist() != expected:
            return Fault(SHIFT, f"row {number} does not hold the rollout's ids in its first {length} columns")
        if int(attention_mask[number].sum()) != length:
            total = int(attention_mask[number].sum())
            return Fault(PAD, f"the attention mask of row {number} keeps {total} tokens of {length}")
        is_ended = row.finish_reason != "stop" or (row.response_ids and row.response_ids[-1] in end_ids)
        if not is_ended and not has_stop_strings and end_ids:
            return Fault(STOP, f"rollout {number} ended by itself, and its last token is no end token")
    return None


def _mask_fault(number: int, kept: list[int], start: int, length: int) -> Fault:
    """Of a mask that is not start .. length - 1."""
    if kept == list(range(start, length - 1)):
        return Fault(STOP, f"the response of row {number} ends at token {length - 1}, its mask one before")
    message = f"the response of row {number} is tokens {start} to {length - 1}, its mask keeps "
    return Fault(SHIFT, message + (f"{len(kept)} tokens from {kept[0]} to {kept[-1]}" if kept else "none"))


def check_policy_moves(values: Sequence[tuple[str, float, float]]) -> Fault | None:
    """Return (what, how far, its limit; 0: none) of the policy's moves, in nats per token: the first that is beyond."""
    for name, value, limit in values:
        if limit > 0 and not value <= limit:
            return Fault(KL, f"{name} is {value:.3g} nats per token, the limit {limit:g}")
    return None
