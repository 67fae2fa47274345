"""How noisy the policy gradient is under different credit: outcomes alone, or the change in value over each step.

Of a batch of rollouts the gradient is mean over rollouts of sum over tokens of A grad log pi, which is PPO's before its
first step. `outcome` gives every token R - b, with b the mean outcome of the problem's other rollouts; an estimator of
state values gives a step V(after) - V(before), with V = b before the first and V = R after the last (VinePPO,
Kazemnejad et al. 2024). A rollout's advantages have the same sum either way, and the expected gradient is the same
where V is the true value: what differs is the variance.

The problems are dealt into batches of one size; of the batches' gradients g_1 .. g_B
    variance         trace of their covariance, sum |g - mean|^2 / (B - 1)
    squared_norm     of the expected gradient, without bias: |mean|^2 - variance / B (below 0 where noise hides it)
    noise_scale      variance x rollouts per batch / squared_norm: rollouts at which noise and signal are equal
                     (McCandlish et al. 2018); None where squared_norm is not above 0
    cosine           mean over pairs of batches
    cosine_to_outcome    of the mean gradients: wrong values can make a gradient quiet and turn it away
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from espalier.analysis.analyzers.estimated_states import Estimates, estimate_files, named_estimates, read_estimates
from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.analysis.analyzers.model_folders import check_sampler, check_tokens, weight_files
from espalier.data.batches.packing import pad_rows
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, StepValues
from espalier.data.steps import check_ends
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.logprobs import response_logprobs
from espalier.pipeline.stage import StageContext
from espalier.runtime.distributed import device
from espalier.runtime.stored_provenance import stage_settings

OUTCOME = "outcome"


@dataclass(frozen=True)
class CreditedRollout:
    """Token ids of a rollout, and for each kind of credit the advantage of every step."""

    prompt_ids: list[int]
    response_ids: list[int]
    step_ends: list[int]
    advantages: Mapping[str, list[float]]


def value_changes(inner: Sequence[float], baseline: float, outcome: float) -> list[float]:
    """Return the advantages of the steps: values of the S - 1 inner states → S changes from `baseline` to `outcome`."""
    values = [baseline, *inner, outcome]
    return [after - before for before, after in pairwise(values)]


def credit(rows: Sequence[StepValues], estimates: Mapping[str, Estimates]) -> dict[str, list[CreditedRollout]]:
    """Return problem → its rollouts with their credit; left out are problems with one rollout (they have no baseline)
    and rollouts that an estimator does not value.

    Raises BadInput where an estimate has other steps than its trajectory.
    """
    outcomes: dict[str, list[float]] = {}
    for row in rows:
        outcomes.setdefault(row.problem_id, []).append(float(row.is_correct))
    problems: dict[str, list[CreditedRollout]] = {}
    for row in rows:
        check_ends(row.steps, row.step_ends, row.id)
        others, outcome = outcomes[row.problem_id], float(row.is_correct)
        given = {name: values.get(row.id) for name, values in estimates.items()}
        inner = {name: [one for one in values[:-1] if one is not None] for name, values in given.items() if values}
        for name, values in given.items():
            if values is not None and len(values) != len(row.steps):
                raise BadInput(f"stage.estimates.{name}: trajectory '{row.id}' has {len(values)} values and "
                               f"{len(row.steps)} steps: estimate these trajectories")  # fmt: skip
        is_known = len(inner) == len(estimates) and all(len(one) == len(row.steps) - 1 for one in inner.values())
        if row.steps and is_known and len(others) > 1:
            baseline = (sum(others) - outcome) / (len(others) - 1)
            advantages = {OUTCOME: [outcome - baseline] * len(row.steps)}
            advantages |= {name: value_changes(values, baseline, outcome) for name, values in inner.items()}
            rollout = CreditedRollout(row.prompt_ids, row.response_ids, row.step_ends, advantages)
            problems.setdefault(row.problem_id, []).append(rollout)
    return problems


def deal(problems: Mapping[str, Sequence[CreditedRollout]], num_batches: int, seed: int) -> list[list[CreditedRollout]]:
    """Deal whole problems into batches of equally many, at random; what is left over is in none. Raises BadInput where
    there are fewer problems than batches."""
    names = sorted(problems)
    random.Random(seed).shuffle(names)
    each = len(names) // num_batches
    if not each:
        raise BadInput(f"stage.num_batches={num_batches}: only {len(names)} problems have two valued rollouts or more: "
                       "sample more, or set fewer batches")  # fmt: skip
    cuts = [names[number * each : (number + 1) * each] for number in range(num_batches)]
    return [[rollout for name in cut for rollout in problems[name]] for cut in cuts]


def token_advantages(rollout: CreditedRollout, kind: str) -> list[float]:
    """Return the advantage of every response token: its step's; of tokens behind the last step 0."""
    found: list[float] = []
    for end, advantage in zip(rollout.step_ends, rollout.advantages[kind], strict=True):
        found += [advantage] * (end - len(found))
    return found + [0.0] * (len(rollout.response_ids) - len(found))


def batch_gradient(
    model: Any, batch: Sequence[CreditedRollout], kind: str, temperature: float, micro_batch_size: int, pad_id: int
) -> torch.Tensor:
    """Return the gradient [P] of a batch, over all parameters in their order."""
    model.zero_grad(set_to_none=True)
    for start in range(0, len(batch), micro_batch_size):
        cut = batch[start : start + micro_batch_size]
        rows = [[*rollout.prompt_ids, *rollout.response_ids] for rollout in cut]
        starts = [len(rollout.prompt_ids) for rollout in cut]
        ids, attention_mask, response_mask = (tensor.to(device()) for tensor in pad_rows(rows, starts, pad_id))
        weights = torch.zeros(ids.shape)
        for number, (begin, rollout) in enumerate(zip(starts, cut, strict=True)):
            weights[number, begin : begin + len(rollout.response_ids)] = torch.tensor(token_advantages(rollout, kind))
        logprobs, _ = response_logprobs(model, ids, attention_mask, temperature, response_mask)
        ((logprobs * weights[:, 1:].to(device())).sum() / len(batch)).backward()  # type: ignore[no-untyped-call]
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    return torch.cat([grad.flatten().float() for grad in grads])


@dataclass
class GradientMoments:
    """What is kept of a row of gradients [P]: sums of them, of their unit vectors and of their squared norms."""

    count: int = 0
    squares: float = 0.0
    norms: list[float] = field(default_factory=list)
    total: torch.Tensor | float = 0.0
    directions: torch.Tensor | float = 0.0

    def add(self, gradient: torch.Tensor) -> None:
        """Count one more. Raises BadInput where it is not finite."""
        square = float(gradient.double().square().sum())
        if not math.isfinite(square):
            raise BadInput(
                f"the gradient of batch {self.count + 1} is not finite: is stage.policy the one that sampled?"
            )
        self.count += 1
        self.squares += square
        self.norms.append(math.sqrt(square))
        self.total = self.total + gradient
        self.directions = self.directions + (gradient / math.sqrt(square) if square else gradient)

    def figures(self, num_rollouts: float) -> dict[str, Any]:
        """Return the figures of two gradients or more, each of `num_rollouts` rollouts on average."""
        mean_square = _square(self.total) / self.count**2
        variance = max(0.0, (self.squares - self.count * mean_square) / (self.count - 1))
        norm = mean_square - variance / self.count
        num_moving = sum(one > 0 for one in self.norms)
        pairs = num_moving * (num_moving - 1)
        return {
            "variance": variance,
            "squared_norm": norm,
            "noise_scale": variance * num_rollouts / norm if norm > 0 else None,
            "cosine": (_square(self.directions) - num_moving) / pairs if pairs else None,
            "norms": self.norms,
        }

    def cosine_to(self, other: "GradientMoments") -> float | None:
        """Return the cosine of the two mean gradients; None where one is 0."""
        one, two = (torch.as_tensor(moments.total).double() for moments in (self, other))
        norms = float(one.norm() * two.norm())
        return float((one * two).sum()) / norms if norms else None


def _square(total: torch.Tensor | float) -> float:
    return float(torch.as_tensor(total).double().square().sum())


@dataclass(frozen=True)
class MeasureGradientVariance:
    """The input: StepValues of rollouts of `policy`. The figure stands beside the output, as SVG."""

    policy: str
    """the model folder that sampled the rollouts"""
    estimates: Any
    """StepValues (the input itself too) or StepScores of the same trajectories, or a critic's folder: a list, or a
    mapping of names"""
    num_batches: int
    """two or more"""
    temperature: float
    """of the sampler"""
    micro_batch_size: int
    """rollouts of one pass"""
    seed: int
    """of the order in which problems are dealt"""

    def inputs(self) -> list[str]:
        """Return the policy's weights and the estimators' files."""
        return [*weight_files(self.policy), *estimate_files(named_estimates(self.estimates, ""))]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the figures of each kind of credit, on the same rollouts and batches. Raises BadInput where files do
        not belong together, the policy is not the one that sampled, or at another temperature, and where there are too
        few problems."""
        if self.num_batches < 2:
            raise BadInput(f"stage.num_batches must be at least 2, got {self.num_batches}")
        paths = named_estimates(self.estimates, "")
        if OUTCOME in paths:
            raise BadInput(f"stage.estimates: '{OUTCOME}' is what credit without values is called: choose another name")
        rows = read_records(StepValues, input_path)
        check_tokens(self.policy, rows)
        if trajectories := stage_settings(Path(input_path)).get("trajectories"):
            check_sampler(trajectories, self.policy, self.temperature)
        problems = credit(rows, {name: read_estimates(path, rows, context, name) for name, path in paths.items()})
        num_kept = sum(map(len, problems.values()))
        leave_out(input_path, len(rows) - num_kept, len(rows), "rollouts", "have no other one, or not all values")
        batches = deal(problems, self.num_batches, self.seed)
        model = load_policy(self.policy).to(device()).eval()  # type: ignore[arg-type]
        pad_id = int(load_tokenizer(self.policy).pad_token_id)
        moments = {name: GradientMoments() for name in (OUTCOME, *paths)}
        with context.progress("measure", len(batches), "gradient") as progress:
            for done, batch in enumerate(batches, 1):
                for name, one in moments.items():
                    one.add(batch_gradient(model, batch, name, self.temperature, self.micro_batch_size, pad_id))
                progress.update(done)
        each = sum(map(len, batches)) / len(batches)
        figures = {name: {**one.figures(each), "cosine_to_outcome": one.cosine_to(moments[OUTCOME])}
                   for name, one in moments.items()}  # fmt: skip
        lines = {name: list(enumerate(row["norms"], 1)) for name, row in figures.items()}
        write_figure(context.output, f"Gradients of {len(batches)} batches", [Panel("batch", "norm", lines)])
        context.counts["rollouts"] = num_kept
        context.counts.update({f"variance_{name}": f"{row['variance']:.4g}" for name, row in figures.items()})
        return {"batches": len(batches), "rollouts_per_batch": round(each, 2), "credit": figures}
