"""Training runs and their records: where they lie, how one is started on a core, what is kept of a finished one.

A run directory that is finished is never begun again, and a cut one goes on from its last checkpoint. Its record, one
small JSON file in benchmarks/results/credit/CELL/, is all that figures are made of, so that several sessions can add
theirs.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.credit.curves import Point, points_of
from benchmarks.credit.plan import PROCESS_REWARDS, Cell, Plan, Run, agree, recorded_settings, settings_of
from benchmarks.processes.forked import ROOT
from benchmarks.result import machine
from benchmarks.rl.policy import make_policy
from espalier.data.jsonl import iter_rows, open_atomic, write_json
from espalier.data.records import BadInput
from espalier.runtime.process_lifetime import die_with_parent
from espalier.runtime.run_dir import code_commit

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
"""Of every program: one thread each, so that a policy that is made anew is the same bits."""


@dataclass(frozen=True)
class Record:
    """What is kept of a finished run. `settings` are `recorded_settings`; `policy` is a digest of the weights that
    it began from; `load` is the machine's when it ended (of two runs side by side it is about 2)."""

    cell: str
    method: str
    seed: int
    learning_rate: float
    is_tuning: bool
    settings: list[str]
    policy: str
    points: list[Point]
    tokens_before: float
    seconds_before: float
    load: float
    machine: str
    commit: str
    date: str


def planned_policy(plan: Plan, name: str, folder: Path) -> Path:
    """Return the policy of this name in plan.yaml, made below `folder` where it is not there yet."""
    row = plan.policies[name]
    start = planned_policy(plan, row.start, folder) if row.start else None
    return make_policy(folder / name, row.steps, row.config, row.task, row.settings, start)


@dataclass(frozen=True)
class Places:
    """`folder` holds policies and runs, `results` the records. `policies` and `process_rewards` are, by cell, what was
    made elsewhere: a model folder, and a run directory of scripts/process_rewards.sh."""

    plan: Plan
    folder: Path
    results: Path
    policies: Mapping[str, Path]
    process_rewards: Mapping[str, Path]

    def run_dir(self, run: Run) -> Path:
        """Return where a run writes."""
        return self.folder / run.cell.name / run.name

    def record_path(self, run: Run, policy: str) -> Path:
        """Return where its record is kept; of tuning, by the digest of the policy that it began from."""
        path = self.results / "credit" / run.cell.name / f"{run.name}.json"
        return path.parent / policy / path.name if run.is_tuning else path

    def policy(self, cell: Cell) -> Path:
        """Return the policy that every run of the cell starts from; it is made once."""
        if cell.name in self.policies:
            return self.policies[cell.name]
        return planned_policy(self.plan, cell.policy, self.folder)

    def process_rewards_of(self, cell: Cell) -> Path:
        """Return the run directory with the cell's process reward model; it is made once. Raises SystemExit where it
        does not say that it was made with the plan's settings, which records name."""
        run = self.process_rewards.get(cell.name, self.folder / cell.name / "process_rewards")
        made_by, wanted = run / "made_by.json", list(cell.process_rewards)
        if run.is_dir() and (json.loads(made_by.read_text()) if made_by.is_file() else None) != wanted:
            raise SystemExit(f"{made_by}: made with other settings than the plan's {json.dumps(wanted)}, or it is not "
                             f"there: move the folder away, and the runs of {cell.name} that read it")  # fmt: skip
        if not (run / "prm" / "model").is_dir():
            run.mkdir(parents=True, exist_ok=True)
            write_json(made_by, wanted)
            limits = [row.removeprefix("params.") for row in cell.settings if row.startswith("params.max_tokens=")]
            command = ["bash", "scripts/process_rewards.sh", "folds=1", f"run={run}", f"policy={self.policy(cell)}",
                       *limits, *cell.task, *cell.process_rewards]  # fmt: skip
            log = run / "programs.log"
            with log.open("ab") as file:
                code = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, check=False).returncode
            if code:
                raise SystemExit(f"the process rewards of cell {cell.name} ended with exit code {code}: see {log}")
        return run


class ProgramJob:
    """`main.py` in a session of its own, on one core."""

    def __init__(self, settings: Iterable[str], core: int, log: Path):
        def prepare() -> None:
            die_with_parent()
            os.sched_setaffinity(0, {core})

        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "main.py", *settings], stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT,
                start_new_session=True, preexec_fn=prepare,
            )  # fmt: skip

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """End its process group: politely, then for good."""
        for kind, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
            try:
                os.killpg(self.process.pid, kind)
                self.process.wait(seconds)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def start(places: Places, run: Run, core: int) -> ProgramJob:
    """Start a run, or let a cut one go on."""
    settings = settings_of(places.plan, run)
    if run.method.needs_process_rewards:
        prm = str(places.process_rewards_of(run.cell))
        settings = [setting.replace(PROCESS_REWARDS, prm) for setting in settings]
    folder = places.run_dir(run)
    own = [f"output_dir={folder}", f"model.path={places.policy(run.cell)}"]
    return ProgramJob([*settings, *own], core, folder.parent / f"{folder.name}.log")


def record(places: Places, run: Run) -> Record:
    """Write and return the record of a finished run; its checkpoints are of no use any more. Raises BadInput where it
    says nothing of its method."""
    folder = places.run_dir(run)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    num_states = [row["estimate/num_states"] for row in rows if "estimate/num_states" in row]
    if num_states and not any(num_states):
        raise BadInput(f"{folder}: {run.method.name} valued no state in any iteration, so that this is a run without "
                       "step credit, and no record is kept: give the method other settings in plan.yaml")  # fmt: skip
    tokens, seconds = 0.0, 0.0
    if run.method.needs_process_rewards:
        tokens, seconds = cost_of_process_rewards(places.process_rewards_of(run.cell))
    kept = Record(
        cell=run.cell.name, method=run.method.name, seed=run.seed, learning_rate=run.learning_rate,
        is_tuning=run.is_tuning, settings=recorded_settings(places.plan, run), policy=digest(places.policy(run.cell)),
        points=points_of(rows, tokens, seconds), tokens_before=tokens, seconds_before=seconds,
        load=round(os.getloadavg()[0], 2), machine=machine(), commit=code_commit(), date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip
    path = places.record_path(run, kept.policy)
    path.parent.mkdir(parents=True, exist_ok=True)
    row = asdict(kept) | {"points": [[*asdict(point).values()] for point in kept.points]}
    with open_atomic(path) as file:
        file.write(json.dumps(row) + "\n")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return kept


def digest(model: Path) -> str:
    """Return 16 hexadecimal digits of a model folder's weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:16]


def tokens_of(*paths: Path) -> int:
    """Count the generated tokens in files of trajectories or completions."""
    return sum(len(row["response_ids"]) for path in paths for _, row in iter_rows(path))


def cost_of_process_rewards(run: Path) -> tuple[float, float]:
    """Return (generated tokens, seconds) that a run of scripts/process_rewards.sh took until its model was trained."""
    # not by the counts of a stage's last run, which may have gone on with a cut one
    tokens = tokens_of(*(run / "process_rewards" / f"{name}.jsonl" for name in ("trajectories", "completions")))
    stages = [json.loads(line) for line in (run / "seconds.jsonl").read_text().splitlines()]
    counted = ("sample_trajectories", "choose_labels", "cut_states", "complete_states", "estimate_values",
               "join_completions", "label_by_contrast", "label_signal", "build_pairs_of_prm", "train_prm_policy",
               "make_prm", "train_prm")  # fmt: skip
    return float(tokens), float(sum(row["seconds"] for row in stages if row["stage"] in counted))


def read_record(path: Path) -> Record:
    """Return a stored record. Raises BadInput on a file that is none."""
    try:
        row: dict[str, Any] = json.loads(path.read_text())
        return Record(**{**row, "points": [Point(*point) for point in row["points"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: not the record of a run ({error!r}): move it away and run it again") from None


def read_records(plan: Plan, results: Path) -> tuple[list[Record], list[str]]:
    """Return (the records of runs as the plan has them now, a line for each of other settings)."""
    kept, stale = [], []
    for path in sorted((results / "credit").glob("*/**/*.json")):
        row = read_record(path)
        if row.cell not in plan.cells or row.method not in plan.methods:
            stale.append(f"{path.relative_to(results)}: the plan has no such cell or method")
            continue
        run = Run(plan.cells[row.cell], plan.methods[row.method], row.seed, row.learning_rate, row.is_tuning)
        if not agree(row.settings, recorded_settings(plan, run)):
            stale.append(f"{path.relative_to(results)}: was run with other settings than the plan's")
        else:
            kept.append(row)
    return kept, stale


def check_policies(records: Iterable[Record], runs: Iterable[Run], policy: Callable[[Cell], Path]) -> None:
    """Raise BadInput where a stored run of one of these seeds began from another policy: methods are compared seed by
    seed. Other seeds may have another one, for the same recipe ends in other bits on another machine; so may tuning
    runs, whose learning rates hold for the policy that they began from."""
    began = {(row.cell, row.seed): row.policy for row in records if not row.is_tuning}
    for run in runs:
        if run.is_tuning:
            continue
        folder = policy(run.cell)
        own = digest(folder)
        other = began.get((run.cell.name, run.seed), own)
        if other != own:
            raise BadInput(f"{folder}: stored runs of cell {run.cell.name} with seed {run.seed} began from other "
                           f"weights ({other}, these are {own}): take other seeds (--seeds), give that policy by "
                           f"--policy {run.cell.name}=FOLDER, or move the records away")  # fmt: skip
