"""The table of cells and methods (plan.yaml), and the runs that follow from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from espalier.data.records import BadInput

FAMILIES = ("outcome", "critic", "monte_carlo", "process_model", "group_prefixes", "exact")
PROCESS_REWARDS = "{process_rewards}"


@dataclass(frozen=True)
class Method:
    """A config of `main.py` with settings of its own; its learning rate is tuned. `against`: a method that it is
    compared with at equal updates, in a figure of its own. `baseline`: what it is set against at equal tokens and
    seconds, "" for the plan's: small updates are worth more per token whatever the credit."""

    name: str
    family: str
    config: str
    settings: tuple[str, ...] = ()
    against: str = ""
    baseline: str = ""

    @property
    def needs_process_rewards(self) -> bool:
        """Whether it reads the cell's process reward model."""
        return any(PROCESS_REWARDS in setting for setting in self.settings)


@dataclass(frozen=True)
class Policy:
    """`steps` of the SFT config on demonstrations of the task, from the policy `start` or from a fresh network."""

    name: str
    task: tuple[str, ...]
    config: str
    steps: int
    settings: tuple[str, ...] = ()
    start: str = ""


@dataclass(frozen=True)
class Cell:
    """A task and the policy that runs start from; `tokens` and `seconds` are what every run gets at least, or, in
    place of both and of `tuning_tokens`, `updates` are what every run has, tuning ones too. `process_rewards` are
    settings of scripts/process_rewards.sh. `rates_of`: the cell whose tuned learning rates hold here, "" for its own.
    `methods`: those that it is for, () for all. `every`: updates from one look at accuracy to the next of methods whose
    updates are dear or cheap here."""

    name: str
    task: tuple[str, ...]
    policy: str
    settings: tuple[str, ...]
    tokens: int = 0
    seconds: float = 0.0
    tuning_tokens: int = 0
    target: float = 1.0
    process_rewards: tuple[str, ...] = ()
    rates_of: str = ""
    updates: int = 0
    methods: tuple[str, ...] = ()
    every: Mapping[str, int] = field(default_factory=dict)

    @property
    def tuning_budget(self) -> tuple[str, float]:
        """The cost by which learning rates are chosen here, and how much of it."""
        return ("updates", self.updates) if self.updates else ("tokens", self.tuning_tokens)

    def takes(self, method: "Method") -> bool:
        """Whether a method is run here."""
        return not self.methods or method.name in self.methods


@dataclass(frozen=True)
class Plan:
    """All of plan.yaml."""

    baseline: str
    learning_rates: tuple[float, ...]
    lower_rates: tuple[float, ...]
    tuning_seed: int
    settings: tuple[str, ...]
    policies: Mapping[str, Policy]
    cells: Mapping[str, Cell]
    methods: Mapping[str, Method]


@dataclass(frozen=True)
class Run:
    """One training run: of the benchmark, or of tuning."""

    cell: Cell
    method: Method
    seed: int
    learning_rate: float
    is_tuning: bool = False

    @property
    def name(self) -> str:
        """Of its directory and of its record, below those of the cell."""
        return f"{'tuning/' if self.is_tuning else ''}{self.method.name}-{self.learning_rate:g}-{self.seed}"

    @property
    def tokens(self) -> int:
        """Generated tokens that it gets at least."""
        return self.cell.tuning_tokens if self.is_tuning else self.cell.tokens

    @property
    def seconds(self) -> float:
        """Seconds of iterations that it gets at least."""
        return 0.0 if self.is_tuning else self.cell.seconds


def read_plan(path: Path) -> Plan:
    """Return the plan of a YAML file. Raises BadInput where a row has an unknown field, lacks one, or names what does
    not exist."""
    raw = yaml.safe_load(path.read_text())
    policies = {name: _row(path, Policy, "policies", name, row) for name, row in raw.pop("policies").items()}
    cells = {name: _row(path, Cell, "cells", name, row) for name, row in raw.pop("cells").items()}
    methods = {name: _row(path, Method, "methods", name, row) for name, row in raw.pop("methods").items()}
    for method in methods.values():
        if method.family not in FAMILIES:
            raise BadInput(f"{path}: methods.{method.name}.family must be one of {', '.join(FAMILIES)}, got "
                           f"'{method.family}'")  # fmt: skip
    for place, name in [(f"policies.{row.name}.start", row.start) for row in policies.values() if row.start] + [
        (f"cells.{cell.name}.policy", cell.policy) for cell in cells.values()
    ]:
        if name not in policies:
            raise BadInput(f"{path}: {place} must be one of the policies, got '{name}'")
    for cell in cells.values():
        if bool(cell.updates) == bool(cell.tokens) or bool(cell.tokens) != bool(cell.tuning_tokens):
            raise BadInput(f"{path}: cells.{cell.name} needs updates, or tokens and tuning_tokens, and not both")
        if cell.rates_of and (cell.rates_of not in cells or cells[cell.rates_of].rates_of):
            raise BadInput(f"{path}: cells.{cell.name}.rates_of must be a cell that is tuned itself, got "
                           f"'{cell.rates_of}'")  # fmt: skip
    others = [("baseline", raw["baseline"])]
    others += [(f"methods.{row.name}.against", row.against) for row in methods.values() if row.against]
    others += [(f"methods.{row.name}.baseline", row.baseline) for row in methods.values() if row.baseline]
    others += [(f"cells.{cell.name}.methods", name) for cell in cells.values() for name in cell.methods]
    others += [(f"cells.{cell.name}.every", name) for cell in cells.values() for name in cell.every]
    for place, name in others:
        if name not in methods:
            raise BadInput(f"{path}: {place} must be one of the methods, got '{name}'")
    rates, lower = (tuple(float(rate) for rate in raw[key]) for key in ("learning_rates", "lower_rates"))
    if any(lower >= upper for upper, lower in pairwise([min(rates), *lower])):
        raise BadInput(f"{path}: lower_rates must fall, from below all of learning_rates, got {list(lower)}")
    return Plan(
        raw["baseline"], rates, lower, int(raw["tuning_seed"]), tuple(raw["settings"]), policies, cells, methods
    )


def _row(path: Path, kind: Any, table: str, name: str, row: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    unknown = sorted(row.keys() - known)
    if unknown:
        raise BadInput(f"{path}: {table}.{name} has no field '{unknown[0]}': choose from {', '.join(sorted(known))}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    try:
        return kind(name=name, **values)
    except TypeError as error:
        raise BadInput(f"{path}: {table}.{name}: {error}") from None


def settings_of(plan: Plan, run: Run) -> list[str]:
    """Return what the run is started with, but for where its files lie."""
    budget = [f"stop_after_tokens={run.tokens}", f"stop_after_seconds={run.seconds:g}"]
    if run.cell.updates:
        budget = [f"num_iterations={run.cell.updates}"]
    every = [f"evaluation.every={run.cell.every[run.method.name]}"] if run.method.name in run.cell.every else []
    return [
        *("-cn", run.method.config, *plan.settings, *run.cell.task, *run.cell.settings, *run.method.settings, *every),
        *(f"seed={run.seed}", f"update.learning_rate={run.learning_rate:g}"),
        *budget,
    ]


def recorded_settings(plan: Plan, run: Run) -> list[str]:
    """Return what a stored record must agree with: `settings_of`, and how the reward model was made where one is
    read."""
    made = run.cell.process_rewards if run.method.needs_process_rewards else ()
    return [*settings_of(plan, run), *(f"process_rewards.{setting}" for setting in made)]


EVERY, TOKENS, SECONDS, STALENESS = (
    "evaluation.every=", "stop_after_tokens=", "stop_after_seconds=", "rollout.max_staleness="
)  # fmt: skip


def agree(stored: Sequence[str], wanted: Sequence[str]) -> bool:
    """Say whether a run with these settings stands for one as the plan has it. One that went on for longer does, and
    one whose accuracy was looked at more often, which changes nothing in it; unless it draws ahead, where a version
    that is looked at is not drawn ahead of."""
    own, planned = (
        {name: [float(row.removeprefix(name)) for row in settings if row.startswith(name)]
         for name in (EVERY, TOKENS, SECONDS, STALENESS)}
        for settings in (stored, wanted)
    )  # fmt: skip
    may_differ = (EVERY, TOKENS, SECONDS) if not any(planned[STALENESS]) else (TOKENS, SECONDS)
    rest = [[row for row in settings if not row.startswith(may_differ)] for settings in (stored, wanted)]
    if rest[0] != rest[1] or any(bool(own[name]) != bool(planned[name]) for name in may_differ):
        return False
    is_long = all(own[name][-1] >= planned[name][-1] for name in (TOKENS, SECONDS) if planned[name])
    return is_long and (not planned[EVERY] or 0 < own[EVERY][-1] <= planned[EVERY][-1])


def benchmark_runs(
    cells: Sequence[Cell], methods: Sequence[Method], seeds: Sequence[int], rates: Mapping[tuple[str, str], float]
) -> list[Run]:
    """Return the runs in the order in which time is spent on them: every method on every cell has a seed before any has
    the next one. Those without a tuned rate, by (cell, method), are left out."""
    return [
        Run(cell, method, seed, rates[cell.name, method.name])
        for seed in seeds
        for cell in cells
        for method in methods
        if cell.takes(method) and (cell.name, method.name) in rates
    ]


def tuning_runs(
    plan: Plan, cells: Sequence[Cell], methods: Sequence[Method], areas: Mapping[tuple[str, str], Mapping[float, float]]
) -> list[Run]:
    """Return one run per wanted learning rate, all rates of a method on a cell one behind the other; none of a cell
    that has another one's. `areas` is what is known, by (cell, method)."""
    return [
        Run(cell, method, plan.tuning_seed, rate, is_tuning=True)
        for cell in cells
        if not cell.rates_of
        for method in methods
        if cell.takes(method)
        for rate in wanted_rates(plan, areas.get((cell.name, method.name), {}))
    ]


def wanted_rates(plan: Plan, areas: Mapping[float, float]) -> list[float]:
    """Return the learning rates to be tried where these mean accuracies are known: those of the plan, then lower ones
    as long as the lowest is the best."""
    rates = list(plan.learning_rates)
    for lower in plan.lower_rates:
        if any(rate not in areas for rate in rates) or best_rate({rate: areas[rate] for rate in rates}) != min(rates):
            break
        rates.append(lower)
    return rates


def best_rate(areas: Mapping[float, float]) -> float:
    """Return the learning rate with the highest mean accuracy up to the tuning budget; of equal ones the smallest."""
    return min(areas, key=lambda rate: (-areas[rate], rate))


def chosen(names: Iterable[str] | None, known: Mapping[str, Any], option: str) -> list[Any]:
    """Return the rows of these names, all where none is named. Raises BadInput on a name that is not there."""
    asked = list(names or known)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise BadInput(f"{option}: there is no '{unknown[0]}' in plan.yaml: choose from {json.dumps(list(known))}")
    return [known[name] for name in asked]
