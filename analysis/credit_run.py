"""The step credit of a reinforcement-learning run, read from its `samples/`: what each estimator says of every step.

The estimator that the run trains with comes first, under the key `OWN`; the further ones (`samples.estimators`) follow
by their names. Files that are older than these have the run's own alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import yaml

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.records import BadInput, SampledRollout

OWN = ""
COSTS = ("samples/completions", "samples/completion_tokens", "seconds/samples")


@dataclass(frozen=True)
class CreditRun:
    """`rollouts` in the order of iterations; `estimators`: key → name to show; `costs`: what the further estimators had
    sampled over the run, by the names of metrics, empty where nothing is known."""

    rollouts: Sequence[SampledRollout]
    estimators: dict[str, str]
    costs: dict[str, float]

    def advantages(self, row: SampledRollout, key: str) -> Sequence[float]:
        """List every step's advantage, empty where this estimator was not asked about the rollout."""
        return row.step_advantages if key == OWN else row.estimator_advantages.get(key, [])

    def values(self, row: SampledRollout, key: str) -> Sequence[float]:
        """List the value of the state before every step, empty where this estimator values none."""
        return row.step_values if key == OWN else row.estimator_values.get(key, [])


@dataclass(frozen=True)
class Disagreement:
    """Two estimators whose advantages of a step differ in sign. `rollout` is a place in the run's list, `step` counts
    from 1; `size` is the smaller of the two absolute advantages."""

    rollout: int
    step: int
    estimators: tuple[str, str]
    advantages: tuple[float, float]

    @property
    def size(self) -> float:
        """How far both are from agreeing."""
        return min(map(abs, self.advantages))


@dataclass(frozen=True)
class PairCount:
    """Steps of which two estimators both say something: `num_sure` where both advantages are above the limit,
    `num_opposite` of these with opposite signs."""

    estimators: tuple[str, str]
    num_steps: int
    num_sure: int
    num_opposite: int


def sample_files(run_dir: Path) -> list[Path]:
    """List the files of samples in the order of iterations. Raises BadInput where there is none."""
    files = sorted((run_dir / "samples").glob("iteration-*.jsonl"))
    if not files:
        raise BadInput(f"{run_dir}: has no samples/iteration-*.jsonl: set stage.run_dir to a run of main.py with "
                       "samples.every above 0")  # fmt: skip
    return files


def read_credit_run(run_dir: Path) -> CreditRun:
    """Read the samples of a run, the name of its estimator (config.yaml) and what the further ones cost
    (metrics.jsonl); the last two may be missing. Raises BadInput where a file is broken or speaks of other steps."""
    rollouts: list[SampledRollout] = []
    for path in sample_files(run_dir):
        rows = read_records(SampledRollout, path)
        for row in rows:
            _check(row, path)
        rollouts += rows
    names = dict.fromkeys(name for row in rollouts for name in row.estimator_advantages)
    return CreditRun(rollouts, {OWN: own_name(run_dir), **{name: name for name in names}}, _costs(run_dir))


def _check(row: SampledRollout, path: Path) -> None:
    """Every list has one number per step; values may be missing altogether."""
    lists = [("step_values", row.step_values), ("step_advantages", row.step_advantages)]
    lists += [(f"estimator_values of {name}", numbers) for name, numbers in row.estimator_values.items()]
    lists += [(f"estimator_advantages of {name}", numbers) for name, numbers in row.estimator_advantages.items()]
    for name, numbers in lists:
        is_list = isinstance(numbers, list) and all(isinstance(number, int | float) for number in numbers)
        if not is_list or (len(numbers) != len(row.steps) and numbers):
            raise BadInput(f"{path}: '{row.id}' has {len(row.steps)} steps, and its {name} are not {len(row.steps)} "
                           "numbers: remove this file, or train again")  # fmt: skip


def own_name(run_dir: Path) -> str:
    """Return the module of the estimator that the run trains with, as of its config.yaml."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return "trained with"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    target = config.get("advantage", {}).get("_target_", "") if isinstance(config, dict) else ""
    return f"{target.split('.')[-2]} (trained with)" if target.count(".") else "trained with"


def _costs(run_dir: Path) -> dict[str, float]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return {}
    rows = [row for _, row in iter_rows(path)]
    return {name: sum(row[name] for row in rows if name in row) for name in COSTS if any(name in row for row in rows)}


def _is_opposite(pair: tuple[float, float], limit: float) -> bool:
    return pair[0] * pair[1] < 0 and min(map(abs, pair)) >= limit


def find_disagreements(run: CreditRun, limit: float) -> list[Disagreement]:
    """List every step and pair of estimators with opposite signs, both at least `limit` from 0: the largest first."""
    found = []
    for place, row in enumerate(run.rollouts):
        for first, second in combinations(run.estimators, 2):
            both = zip(run.advantages(row, first), run.advantages(row, second), strict=False)
            for step, pair in enumerate(both, 1):
                if _is_opposite(pair, limit):
                    found.append(Disagreement(place, step, (first, second), pair))
    return sorted(found, key=lambda one: -one.size)


def count_opposite_signs(run: CreditRun, limit: float) -> list[PairCount]:
    """Count for every pair of estimators the steps, those of which both are sure, and those with opposite signs."""
    counts = []
    for first, second in combinations(run.estimators, 2):
        pairs = [
            pair
            for row in run.rollouts
            for pair in zip(run.advantages(row, first), run.advantages(row, second), strict=False)
        ]
        sure = [pair for pair in pairs if min(map(abs, pair)) >= limit]
        counts.append(PairCount((first, second), len(pairs), len(sure), sum(_is_opposite(p, limit) for p in sure)))
    return counts


def scale_of(advantages: Sequence[float]) -> float:
    """Return the advantage from which on a colour is full: 95 % of the absolute ones are no larger; 1 where all are
    0."""
    sizes = sorted(map(abs, advantages))
    return (sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0) if sizes else 1.0
