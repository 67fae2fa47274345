"""Reads a quick start's run directory: what the report needs of it, validated.

    RUN/{sft,prm,dpo,process_dpo,...}/metrics.jsonl        losses of the training runs
    RUN/evaluation/{policy}/evaluation.json                pipeline.evaluation.evaluate
    RUN/process_rewards/prm.json                           pipeline.prm.prm_calibration
    RUN/process_rewards/{trajectories,step_values,step_scores}.jsonl
    RUN/process_rewards/*.meta.json, RUN/pairs/*.meta.json   counts and provenance
    RUN/seconds.jsonl                                      {"stage", "seconds"}, one line a run of a stage
    RUN/{rl run}/samples/, RUN/{rl run}/credit.html        main.py, and analysis.credit

Evaluations of the three policies, prm.json and seconds.jsonl must be there; the rest may be missing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput, parse_record
from espalier.pipeline.prm.prm_calibration import TARGETS

POLICIES = ("sft", "dpo", "process_dpo")
TRAINING_RUNS = ("sft", "prm", "dpo", "process_dpo")


@dataclass(frozen=True)
class Interval:
    """A mean over `n` problems with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class PolicyEvaluation:
    """One policy's evaluation.json; `per_problem[metric][i]` is the accuracy on `problems[i]`."""

    path: str
    accuracy: dict[str, Interval]
    problems: list[str]
    per_problem: dict[str, list[float]]
    unparseable: float | None


@dataclass(frozen=True)
class Bin:
    """A calibration bin: mean score, mean of what it is set against, number of steps."""

    score: float
    value: float
    count: int


QUALITY = ("auc", "ece", "value_mae")


@dataclass(frozen=True)
class StepQuality:
    """Figures of one kind of steps; None where they are not defined: without a step, and `auc` where every step is on
    one side of 1/2."""

    auc: Interval | None
    ece: Interval | None
    value_mae: Interval | None
    num_steps: int
    num_problems: int


@dataclass(frozen=True)
class RewardModelQuality:
    """prm.json: inner steps, and last steps, whose value is the outcome; `bins` of the inner ones. `target`: what
    scores are set against, Monte-Carlo values or the labels that the model learned (those of contrast are no values).
    """

    inner: StepQuality
    terminal: StepQuality
    bins: list[Bin]
    target: str


@dataclass(frozen=True)
class LossCurves:
    """(step, loss) of one training run, in the order of the file; `evaluation` may be empty."""

    train: list[tuple[int, float]]
    evaluation: list[tuple[int, float]]


@dataclass(frozen=True)
class Meta:
    """What the report shows of an X.meta.json."""

    name: str
    counts: dict[str, Any]
    commit: str
    versions: dict[str, str]


@dataclass(frozen=True)
class RunFiles:
    """Where things are in a run directory."""

    root: Path

    @property
    def seconds(self) -> Path:
        """Seconds by stage."""
        return self.root / "seconds.jsonl"

    @property
    def prm(self) -> Path:
        """Quality of the process reward model."""
        return self.rewards("prm.json")

    def rewards(self, name: str) -> Path:
        """Return a file of the process-reward pipeline."""
        return self.root / "process_rewards" / name

    def evaluation(self, policy: str) -> Path:
        """Return accuracy of a policy."""
        return self.root / "evaluation" / policy / "evaluation.json"

    def metrics(self, run: str) -> Path:
        """Return losses of a training run."""
        return self.root / run / "metrics.jsonl"

    def policies(self) -> list[str]:
        """Return the three policies of every quick start, then others that are evaluated, by name."""
        names = {path.parent.name for path in self.root.glob("evaluation/*/evaluation.json")}
        return [*POLICIES, *sorted(names - set(POLICIES))]

    def training_runs(self) -> list[str]:
        """Return the four training runs of every quick start, then others that left metrics, by name; those of
        reinforcement learning have no such loss."""
        names = {path.parent.name for path in self.root.glob("*/metrics.jsonl")}
        names -= {path.name for path in self.rl_runs()}
        return [*TRAINING_RUNS, *sorted(names - set(TRAINING_RUNS))]

    def rl_runs(self) -> list[Path]:
        """List the folders of reinforcement learning, here and one below, that have samples."""
        return [
            folder
            for folder in [self.root, *sorted(self.root.glob("*"))]
            if any(folder.glob("samples/iteration-*.jsonl"))
        ]

    def check(self) -> None:
        """Raises BadInput, with the remedy, where a file is missing that the report cannot do without."""
        if not self.root.is_dir():
            raise BadInput(f"{self.root}: no such run directory: set stage.run_dir to a finished quick start")
        remedies = {
            self.evaluation(policy): f"evaluate {policy} (run_stage.py -cn evaluation/evaluate)" for policy in POLICIES
        }
        remedies[self.prm] = "evaluate the process reward model (run_stage.py -cn prm/prm_calibration)"
        remedies[self.seconds] = (
            "let the shell write one {'stage', 'seconds'} line for every stage (scripts/environment.sh)"
        )
        for path, remedy in remedies.items():
            if not path.is_file():
                raise BadInput(f"{path}: no such file: {remedy}, then make the report again")


def read_json(path: Path) -> dict[str, Any]:
    """Return one JSON object. Raises BadInput where the file holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON ({error}): remove it and run its stage again") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold a JSON object, got {type(value).__name__}: run its stage again")
    return value


def _need(row: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    if not isinstance(row.get(name), kind):
        raise BadInput(f"{place}: '{name}' must be a {kind.__name__}: remove the file and run its stage again")
    return row[name]


def _interval(row: Any, place: str) -> Interval:
    interval = parse_record(Interval, row if isinstance(row, dict) else {}, place)
    if not all(math.isfinite(value) for value in (interval.mean, interval.low, interval.high)):
        raise BadInput(f"{place}: mean, low and high must be finite: run the evaluation again")
    return interval


def read_evaluation(path: Path) -> PolicyEvaluation:
    """Read an evaluation.json; every metric has one value per problem.

    Raises BadInput where a key, a finite interval, a value per problem or the greedy accuracy is missing.
    """
    row = read_json(path)
    problems = _need(row, "problems", list, str(path))
    per_problem = _need(row, "per_problem", dict, str(path))
    accuracy = _need(row, "accuracy", dict, str(path))
    for name in accuracy:
        values = _need(per_problem, name, list, f"{path}: per_problem")
        if len(values) != len(problems) or not all(isinstance(value, int | float) for value in values):
            raise BadInput(f"{path}: per_problem.{name} must be {len(problems)} numbers: run the evaluation again")
    if not problems or "greedy" not in accuracy:
        raise BadInput(f"{path}: holds no greedy accuracy: remove it and run the evaluation again")
    return PolicyEvaluation(
        path=str(path),
        accuracy={name: _interval(value, f"{path}: accuracy.{name}") for name, value in accuracy.items()},
        problems=problems,
        per_problem={name: per_problem[name] for name in accuracy},
        unparseable=row.get("unparseable"),
    )


def read_prm(path: Path) -> RewardModelQuality:
    """Return a prm.json. Raises BadInput on another layout and on an unknown target."""
    row = read_json(path)
    bins = [parse_record(Bin, item, f"{path}: bins") for item in _need(row, "bins", list, str(path))]
    parts = {}
    for name in ("inner", "terminal"):
        part, place = _need(row, name, dict, str(path)), f"{path}: {name}"
        figures = {key: None if part.get(key) is None else _interval(part[key], f"{place}.{key}") for key in QUALITY}
        numbers = {key: _need(part, key, int, place) for key in ("num_steps", "num_problems")}
        parts[name] = StepQuality(
            figures["auc"], figures["ece"], figures["value_mae"], numbers["num_steps"], numbers["num_problems"]
        )
    target = row.get("target", "values")
    if target not in TARGETS:
        raise BadInput(f"{path}: 'target' must be {' or '.join(TARGETS)}: remove the file and run its stage again")
    return RewardModelQuality(**parts, bins=bins, target=target)


def read_seconds(path: Path) -> dict[str, float]:
    """Return stage → seconds, summed over its runs, in the order of first appearance.

    Raises BadInput on a line without a stage, or whose seconds are not a finite number from 0 up.
    """
    totals: dict[str, float] = {}
    for place, row in iter_rows(path):
        stage, seconds = row.get("stage"), row.get("seconds")
        is_number = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0
        if not isinstance(stage, str) or not is_number:
            raise BadInput(f"{place}: must hold a stage (str) and its seconds (a number): correct or remove this line")
        totals[stage] = totals.get(stage, 0.0) + float(seconds)  # type: ignore[arg-type]
    return {stage: round(seconds, 3) for stage, seconds in totals.items()}


def read_losses(path: Path) -> LossCurves:
    """Return the losses of a metrics.jsonl; values that are not finite are left out of the curve."""
    curves: dict[str, list[tuple[int, float]]] = {"train/loss": [], "eval/loss": []}
    for place, row in iter_rows(path):
        step = _need(row, "step", int, place)
        for name, points in curves.items():
            if isinstance(row.get(name), int | float) and math.isfinite(row[name]):
                points.append((step, float(row[name])))
    return LossCurves(curves["train/loss"], curves["eval/loss"])


def read_meta(path: Path) -> Meta:
    """Read the counts and provenance of the file X from X.meta.json; empty where it has none."""
    row = read_json(path)
    counts, versions = row.get("counts"), row.get("versions")
    return Meta(
        name=path.name.removesuffix(".meta.json"),
        counts=counts if isinstance(counts, dict) else {},
        commit=str(row.get("commit", "unknown")),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
    )
