"""The policy gradient of a problem, computed instead of sampled: from the dynamic program of its exact values.

The gradient of V(s_0) is the sum, over the states s that the prompt leads to and the lines l that may follow each, of

    rho(s) p(l | s) (V(s') - V(s)) grad log p(l | s)

with rho(s) the probability of the state (Sutton et al. 2000, the policy gradient theorem): the mean of the gradients of
rollouts with exact credit, without the noise of rollouts. As the values themselves it takes prefixes of equal
position for one state, and lines and states that are given up are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.batches.packing import pad_rows
from espalier.data.prompts import encode_prompt
from espalier.data.records import Problem
from espalier.data.steps import Decoder
from espalier.data.tasks.enumerable import EnumerableTask
from espalier.models.logprobs import response_logprobs
from espalier.values.exact.decision_values import evaluate_policy
from espalier.values.exact.line_decisions import LineDecisions
from espalier.values.exact.line_search import Line, LineSearch, LineStart
from espalier.values.exact.state_values import ExactSettings, end_ids_of

_LEFT_OUT = 0.002
"""Share of a problem's summed absolute weights whose lines are not gone through."""
_ROWS = 64


@dataclass(frozen=True)
class WeightedLine:
    """A line behind a prefix (prompt and response so far), and its factor before the gradient of its log-prob."""

    prefix: tuple[int, ...]
    ids: tuple[int, ...]
    weight: float


class KeptLines(LineSearch):
    """A search that keeps what it finds, by the tokens of the state."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.lines: dict[tuple[int, ...], list[Line]] = {}

    def __call__(self, starts: Sequence[LineStart]) -> list[list[Line]]:
        """Return the lines that may follow each state."""
        found = super().__call__(starts)
        self.lines |= {start.ids: lines for start, lines in zip(starts, found, strict=True)}
        return found


def weighted_lines(
    network: Any, tokenizer: Any, task: EnumerableTask, problem: Problem, settings: ExactSettings
) -> list[WeightedLine]:
    """Return the lines that the gradient of a problem's value is the sum of, those of most weight first."""
    decode = Decoder(tokenizer)
    limits = (settings.temperature, settings.line_mass, settings.max_width)
    search = KeptLines(network, decode, end_ids_of(network, tokenizer), *limits)
    prompt = tuple(encode_prompt(task, tokenizer, problem).ids)
    decisions = LineDecisions(task, [(problem, prompt)], decode, search, settings.max_tokens, settings.merges)
    nodes = evaluate_policy([decisions.state((0, ()), is_asked=True)], decisions, settings.state_mass)
    found = []
    for node in nodes.values():
        if node.transitions is None:
            continue
        before: tuple[int, ...] = node.representative[1]  # type: ignore[index]
        for line in search.lines[(*prompt, *before)]:
            after = (*before, *line.ids)
            if line.ending == "line":
                reached = nodes[decisions.state((0, after)).node]
                if reached.transitions is None:
                    continue
                value = reached.value.mid
            else:
                value = float(line.ending == "end" and decisions.is_right(0, after[:-1]))
            weight = node.weight * line.probability * (value - node.value.mid)
            found.append(WeightedLine((*prompt, *before), line.ids, weight))
    return sorted(found, key=lambda line: -abs(line.weight))


def without_tail(lines: Sequence[WeightedLine], share: float = _LEFT_OUT) -> list[WeightedLine]:
    """Return the lines, given by falling weight, but for the last ones that have `share` of it together."""
    left = sum(abs(line.weight) for line in lines) * (1 - share)
    kept = []
    for line in lines:
        if left <= 0:
            break
        kept.append(line)
        left -= abs(line.weight)
    return kept


def _batches(lines: Sequence[WeightedLine]) -> Iterator[Sequence[WeightedLine]]:
    ordered = sorted(lines, key=lambda line: len(line.prefix) + len(line.ids))
    for start in range(0, len(ordered), _ROWS):
        yield ordered[start : start + _ROWS]


def policy_gradient(network: Any, lines: Sequence[WeightedLine], pad_id: int, temperature: float) -> torch.Tensor:
    """Return [P], the sum of weight x gradient of log-prob over the lines, in float32."""
    parameters = [weight for weight in network.parameters() if weight.requires_grad]
    total = torch.zeros(sum(weight.numel() for weight in parameters))
    for batch in _batches(lines):
        rows, starts = [[*line.prefix, *line.ids] for line in batch], [len(line.prefix) for line in batch]
        ids, attention_mask, mask = pad_rows(rows, starts, pad_id)
        logprobs = pad(response_logprobs(network, ids, attention_mask, temperature, mask)[0], (1, 0))
        weights = torch.tensor([line.weight for line in batch])
        parts = torch.autograd.grad((weights * (logprobs * mask).sum(1)).sum(), parameters, allow_unused=True)
        pairs = zip(parts, parameters, strict=True)
        total += torch.cat([(torch.zeros_like(at) if part is None else part).flatten() for part, at in pairs])
    return total
