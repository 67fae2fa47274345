"""Which fault makes the engine's log-probs differ from the trainer's: every hypothesis is tried.

Each says what the engine would have to have computed; the trainer computes that for a few rollouts, and the hypothesis
under which the difference vanishes is the diagnosis. Only where a limit is crossed: it costs some twenty forward
passes of at most `MAX_ROWS` rollouts.

What no hypothesis explains may be what the engine keeps of old weights: asked for the log-probs of the same tokens in
one piece, which bypasses its prefix cache, it then agrees with the trainer. Where it does not, and its receipts say
that it read every tensor as it was sent, the weights are not what is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from espalier.rl.probes.checks import BOS, CACHE, SHIFT, TEMPERATURE, TOP_P, UNKNOWN, WEIGHTS, Fault

MAX_ROWS = 16
_EXPLAINED = 0.35  # of the difference may be left
_NEARER = 0.6  # of it, where no more is left than rounding may leave
_TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
_TOP_PS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99)

# (ids, attention_mask) [n, T], temperature, top_p → log-probs [n, T] by the trainer
Rescore = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
# prompts → of every engine that serves: its log-probs of all their tokens but the first, at temperature 1
AskEngine = Callable[[list[list[int]]], list[list[list[float]]]]


@dataclass(frozen=True)
class LogprobMismatch:
    """The rollouts whose log-probs differ, at the `temperature` and without the top-p the trainer believes in.

    `ids`, `attention_mask`, `response_mask`, `engine` and `trainer` (log-probs) [n, T], padded on the right.
    `first_ids`: tokens that may stand once too often before a prompt.
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    engine: torch.Tensor
    trainer: torch.Tensor
    temperature: float
    first_ids: Sequence[int]

    def cut(self) -> "LogprobMismatch":
        """At most `MAX_ROWS` rollouts, spread over all, and no more columns than they fill."""
        step = max(1, len(self.ids) // MAX_ROWS)
        rows = slice(None, step * MAX_ROWS, step)
        width = int(self.attention_mask[rows].sum(-1).max())
        parts = (self.ids, self.attention_mask, self.response_mask, self.engine, self.trainer)
        ids, attention_mask, response_mask, engine, trainer = (part[rows, :width] for part in parts)
        return LogprobMismatch(ids, attention_mask, response_mask, engine, trainer, self.temperature, self.first_ids)


def truncated_logprobs(logits: torch.Tensor, ids: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return log-probs of `ids` [..., T] under the smallest set of likeliest tokens that holds `top_p` of
    softmax(logits) [..., T, V]; a token outside it, which rounding may let through, is taken as inside."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, ids[..., None]).squeeze(-1)
    if top_p >= 1:
        return chosen
    ordered = logprobs.exp().sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    kept = (ordered * (before < top_p)).sum(-1)
    return chosen - kept.log()


def diagnose(
    case: LogprobMismatch,
    rescore: Rescore,
    ask: AskEngine | None,
    max_gap: float,
    evidence: str,
    is_received: bool = False,
) -> Fault:
    """Return the fault that explains the difference. `max_gap`: what rounding may leave of it (mean, absolute).
    `is_received`: receipts say that the engine read the policy's weights as they were sent."""
    case = case.cut()
    gap = _distance(case.engine, case.trainer, case.response_mask)
    found = min(_hypotheses(case, rescore), key=lambda row: row[0], default=(gap, UNKNOWN, ""))
    left, kind, reason = found
    if left <= max(min(max_gap, _NEARER * gap), _EXPLAINED * gap) and left < gap:
        return Fault(kind, f"{reason}: then {left:.3g} of the mean gap of {gap:.3g} is left; {evidence}")
    if ask is None:
        return Fault(UNKNOWN, evidence)
    again = _asked_again(case, rescore, ask)
    if again <= max(min(max_gap, _NEARER * gap), _EXPLAINED * gap):
        return Fault(CACHE, f"asked again without its cache the engine is {again:.3g} from the trainer, "
                     f"with it {gap:.3g}; {evidence}")  # fmt: skip
    reason = f"asked again without its cache the engine is still {again:.3g} from the trainer"
    if is_received:
        return Fault(UNKNOWN, f"{reason}, though it read every tensor as it was sent; {evidence}")
    return Fault(WEIGHTS, f"{reason}; {evidence}")


def _distance(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    found = (one - other)[mask].abs()
    found = found[torch.isfinite(found)]
    return float(found.mean()) if len(found) else float("inf")


def _hypotheses(case: LogprobMismatch, rescore: Rescore) -> Iterator[tuple[float, str, str]]:
    """Yield (what is left of the difference, fault, the reason in words)."""
    yield from _shifts(case)
    believed = case.temperature
    yield from _temperatures(case, rescore)
    for top_p in _TOP_PS:
        scored = rescore(case.ids, case.attention_mask, believed, top_p)
        left = _distance(case.engine, scored, case.response_mask)
        yield left, TOP_P, f"the engine's log-probs are those at top-p {top_p:g}, the trainer's of all tokens"
    for token in case.first_ids:
        begun = torch.cat([torch.full_like(case.ids[:, :1], token), case.ids], dim=1)
        mask = torch.cat([torch.ones_like(case.attention_mask[:, :1]), case.attention_mask], dim=1)
        scored = rescore(begun, mask, believed, 1.0)[:, 1:]
        left = _distance(case.engine, scored, case.response_mask)
        yield left, BOS, f"the engine read token {token} once more before the prompt"
        if bool((case.ids[:, 0] == token).all()):
            scored = torch.nn.functional.pad(
                rescore(case.ids[:, 1:], case.attention_mask[:, 1:], believed, 1.0), (1, 0)
            )
            left = _distance(case.engine, scored, case.response_mask)
            yield left, BOS, f"the trainer reads token {token} once more before the prompt than the engine did"


def _shifts(case: LogprobMismatch) -> Iterator[tuple[float, str, str]]:
    for shift, side in ((1, "behind"), (-1, "before")):
        moved, mask = torch.roll(case.trainer, shift, dims=1), torch.roll(case.response_mask, shift, dims=1)
        mask = mask & case.response_mask
        reason = f"the engine's log-probs stand one token {side} the trainer's"
        yield _distance(case.engine, moved, mask), SHIFT, reason


def _temperatures(case: LogprobMismatch, rescore: Rescore) -> Iterator[tuple[float, str, str]]:
    def left(temperature: float) -> float:
        scored = rescore(case.ids, case.attention_mask, temperature, 1.0)
        return _distance(case.engine, scored, case.response_mask)

    found = {temperature: left(temperature) for temperature in _TEMPERATURES}
    best = min(found, key=found.__getitem__)
    for near in (0.95 * best, 1.05 * best):
        found[near] = left(near)
    best = min(found, key=found.__getitem__)
    if abs(best / case.temperature - 1) > 0.03:
        reason = f"the engine's log-probs are those at temperature {best:.2g}, the trainer's at {case.temperature:g}"
        yield found[best], TEMPERATURE, reason


def _asked_again(case: LogprobMismatch, rescore: Rescore, ask: AskEngine) -> float:
    """Return how far the engine's log-probs of the same tokens in one piece are from the trainer's, both at temperature
    1, as far as its window goes; of several engines the farthest."""
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(case.ids, case.attention_mask, strict=True)]
    scored = rescore(case.ids, case.attention_mask, 1.0, 1.0)
    distances = []
    for answer in ask(rows):
        engine, is_read = torch.zeros_like(case.engine), torch.zeros_like(case.response_mask)
        for number, row in enumerate(answer):
            engine[number, 1 : 1 + len(row)], is_read[number, 1 : 1 + len(row)] = torch.tensor(row), True
        distances.append(_distance(engine, scored, case.response_mask & is_read))
    return max(distances)
