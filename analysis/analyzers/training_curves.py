"""Runs of reinforcement learning side by side: accuracy over generated tokens and seconds, what it cost to reach an
accuracy, and KL, entropy, explained variance, lengths, truncation and distinct responses along the training.

A policy is named by the number of updates behind it. Line s of metrics.jsonl was measured on rollouts of the policy
after s - 1 updates, an evaluation in line s on the one after s. What a policy has cost are the iterations before it:
tokens are all generated ones, rollouts and completions, seconds those of whole iterations. What was sampled before the
run, to train a reward model that its credit is made by, is in none of them; such a run is warned of.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.analysis.analyzers.run_history import RunHistory, Values, named_folders
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

Curve = list[tuple[int, float]]  # (updates behind the policy, value)

MEASURES = {
    "kl": ("kl/per_response", "KL to the reference, nats per response"),
    "entropy": ("update/entropy", "entropy, nats per token"),
    "explained_variance": ("estimate/explained_variance", "explained variance of the critic"),
    "response_length": ("rollout/response_length", "tokens per response"),
    "truncated": ("rollout/truncated", "share truncated"),
    "distinct": ("rollout/distinct", "distinct responses per rollout"),
    "solved_once": ("rollout/solved_once", "problems that one of the group solves"),
}
ACCURACIES = ("rollout/accuracy", "eval/accuracy")


@dataclass(frozen=True)
class Cost:
    """What was generated, and how long it took, before a policy was there."""

    tokens: float
    seconds: float


def costs(iterations: Mapping[int, Values], place: str) -> list[Cost]:
    """Return the cost of the policy after 0, 1, 2, ... updates. Raises BadInput where an iteration does not say its
    tokens and seconds."""
    rows = [iterations[step] for step in sorted(iterations)]
    for step, row in enumerate(rows, 1):
        for name in ("rollout/drawn_tokens", "seconds/iteration"):
            if name not in row:
                raise BadInput(f"{place}: iteration {step} has no {name}: the run was made by an older version")
    # runs of older versions have no sampling/tokens, in which greedy baselines count too
    tokens = [
        row.get("sampling/tokens", row["rollout/drawn_tokens"] + row.get("estimate/completion_tokens", 0.0))
        for row in rows
    ]
    seconds = [row["seconds/iteration"] for row in rows]
    return [Cost(*pair) for pair in zip(accumulate(tokens, initial=0.0), accumulate(seconds, initial=0.0), strict=True)]


def first_reached(curve: Sequence[tuple[int, float]], target: float, window: int) -> int | None:
    """Return the first policy at which the mean of the last `window` measurements is at least `target`; None where it
    never is."""
    for last in range(window, len(curve) + 1):
        if sum(value for _, value in curve[last - window : last]) / window >= target:
            return curve[last - 1][0]
    return None


def curve_of(name: str, iterations: Mapping[int, Values], evaluations: Mapping[int, Values]) -> Curve:
    """Return a metric by policy; empty where the run does not measure it."""
    if name.startswith("eval/"):
        return [(step, row[name]) for step, row in sorted(evaluations.items()) if name in row]
    return [(step - 1, row[name]) for step, row in sorted(iterations.items()) if name in row]


@dataclass(frozen=True)
class DrawTrainingCurves:
    """The figure stands beside the output, as SVG."""

    runs: Any
    """run directories of main.py: a list, a pattern, or a mapping of names to folders"""
    accuracy: str
    """what counts as accuracy: rollout/accuracy (of every iteration, on training problems) or eval/accuracy"""
    targets: list[float]
    """accuracies whose cost is asked for"""
    window: int
    """number of measurements whose mean must reach a target: single ones reach it by luck"""

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return every run's metrics."""
        return [str(RunHistory(Path(folder)).metrics) for folder in named_folders(self.runs, "stage.runs").values()]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"accuracy", "window", "runs"}`: for each run its `costs` after 0, 1, 2, ... updates, its `curves`
        (None where not measured) and what it had cost where each target was `reached` (None: never).

        Raises BadInput on unknown settings and on a run without iterations or without that accuracy.
        """
        if self.accuracy not in ACCURACIES:
            raise BadInput(f"stage.accuracy must be {' or '.join(ACCURACIES)}, got '{self.accuracy}'")
        if self.window < 1:
            raise BadInput(f"stage.window must be at least 1, got {self.window}")
        folders = named_folders(self.runs, "stage.runs")
        runs = {name: self._describe(RunHistory(Path(folder))) for name, folder in folders.items()}
        write_figure(context.output, f"Runs side by side, by {self.accuracy}", _panels(runs))
        context.counts.update(runs=len(runs), iterations=sum(len(run["costs"]) - 1 for run in runs.values()))
        return {"accuracy": self.accuracy, "window": self.window, "runs": runs}

    def _describe(self, run: RunHistory) -> dict[str, Any]:
        iterations, evaluations = run.read_metrics()
        if models := run.reward_models():
            log.warning("%s: its credit is made by %s: the samples and the training of that before the run are in none "
                        "of these costs", run.root, ", ".join(models))  # fmt: skip
        spent = costs(iterations, str(run.metrics))
        measured = curve_of(self.accuracy, iterations, evaluations)
        accuracy = [(at, value) for at, value in measured if at < len(spent)]  # a kill can leave an evaluation alone
        if not accuracy:
            raise BadInput(f"{run.metrics}: no {self.accuracy} in it: set stage.accuracy=rollout/accuracy, or run with "
                           "evaluation.every above 0")  # fmt: skip
        reached = {}
        for target in self.targets:
            at = first_reached(accuracy, target, self.window)
            reached[f"{target:g}"] = None if at is None else {"updates": at, **_rounded(spent[at])}
        curves = {key: curve_of(name, iterations, evaluations) or None for key, (name, _) in MEASURES.items()}
        return {"costs": [_rounded(cost) for cost in spent], "reached": reached,
                "curves": {"accuracy": accuracy, **curves}}  # fmt: skip


def _rounded(cost: Cost) -> dict[str, float]:
    return {"tokens": round(cost.tokens), "seconds": round(cost.seconds, 3)}


def _panels(runs: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """Return accuracy over tokens and over seconds, then every measure over updates."""
    by_cost = [
        Panel(label, "accuracy",
              {name: [(run["costs"][at][unit] / scale, value) for at, value in run["curves"]["accuracy"]]
               for name, run in runs.items()})
        for unit, scale, label in (("tokens", 1000, "thousands of generated tokens"), ("seconds", 1, "seconds"))
    ]  # fmt: skip
    rest = [
        Panel("updates", label, {name: run["curves"][key] or [] for name, run in runs.items()})
        for key, (_, label) in MEASURES.items()
    ]
    return [*by_cost, *rest]
