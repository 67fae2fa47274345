"""Checkpoints: which are kept, which one a run goes on from, and what in them makes the resume exact.

`<run>/checkpoints/step-00000100/` holds the engine's state (`pieces/`), `random-<rank>.json`,
`state.json` and `manifest.json`; it is complete or absent (runtime.manifest). The schedule and the data's
position are functions of the step, so `state.json` restores them. A damaged checkpoint is skipped with its
reason and the next older one is used. What is newer than the one a run goes on from is moved to
`checkpoints/aside/`: a run has one past. The trained model stands apart in `<run>/model/`, written last.
"""

import json
import logging
import math
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from espalier.runtime.distributed import barrier, from_main_rank, is_main_rank, rank, world_size
from espalier.runtime.manifest import PARTIAL, REPLACED, find_damage, remove_folder, write_folder
from espalier.training.engine import BadCheckpoint
from espalier.training.random_state import load_random_state, save_random_state

__all__ = ["BadCheckpoint", "Best", "TrainState", "checkpoints", "load", "resume", "save", "select", "write_folder"]

log = logging.getLogger(__name__)

RESUME = "auto, latest, best, none or step-N"


class HasState(Protocol):
    """What is saved: an engine, or several that are trained together."""

    def save_state(self, folder: Path) -> None:
        """All that a resume needs; called on every rank."""

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote."""


@dataclass(frozen=True)
class TrainState:
    """What is true at a checkpoint.

    `step`: optimizer steps done. `data`: the fingerprint of the examples. `metrics`: of the evaluation after
    this step, empty without one. `num_skipped`: steps left out because they were not finite.
    `is_evaluation_due`: a signal cut the evaluation after this step short.
    """

    step: int
    data: str
    metrics: dict[str, float] = field(default_factory=dict)
    num_skipped: int = 0
    is_evaluation_due: bool = False


@dataclass(frozen=True)
class Best:
    """`keep` checkpoints with the best `metric` are kept beside the newest ones; 0 keeps none."""

    metric: str = ""
    is_lowest: bool = True
    keep: int = 0

    def rank(self, state: TrainState) -> float:
        """Return the smaller the better; infinite where the step was not evaluated."""
        value = state.metrics.get(self.metric, math.nan)
        return math.inf if not math.isfinite(value) else value if self.is_lowest else -value

    def among(self, states: list[TrainState]) -> list[TrainState]:
        """Return the best `keep`, the best first; of equal ones the earlier."""
        ranked = sorted((self.rank(state), state.step, state) for state in states if self.rank(state) < math.inf)
        return [state for _, _, state in ranked][: self.keep]


def folder_of(run: Path, step: int) -> Path:
    """Say where the checkpoint after `step` steps stands."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def read_state(folder: Path) -> TrainState:
    """Return what `state.json` says. Raises BadCheckpoint where it is not ours."""
    try:
        stored = json.loads((folder / "state.json").read_text())
        stored.pop("num_ranks", None)
        return TrainState(**stored)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{folder}/state.json cannot be read ({error}): remove the folder") from None


def _states(run: Path) -> list[TrainState]:
    """Return the states of all checkpoints that can be read."""
    states = []
    for folder in checkpoints(run):
        try:
            states.append(read_state(folder))
        except BadCheckpoint as error:
            log.warning("%s", error)
    return states


def is_among_best(run: Path, state: TrainState, best: Best) -> bool:
    """Say whether `state` would be one of the best that are kept: rank 0 looks, all ranks get its answer."""
    if best.keep <= 0:
        return False
    return from_main_rank(
        lambda: state in best.among([row for row in _states(run) if row.step != state.step] + [state])
    )


def save(run: Path, engine: HasState, state: TrainState, keep: int, best: Best | None = None) -> None:
    """Write a checkpoint, then drop all but the newest `keep` and the best of `best`."""

    def write(partial: Path) -> None:
        engine.save_state(partial)
        save_random_state(partial / f"random-{rank()}.json")
        if is_main_rank():
            stored = {**asdict(state), "num_ranks": world_size()}
            (partial / "state.json").write_text(json.dumps(stored, indent=1) + "\n")

    write_folder(folder_of(run, state.step), write)
    from_main_rank(lambda: _prune(run, keep, best or Best()))


def _prune(run: Path, keep: int, best: Best) -> None:
    kept = {row.step for row in best.among(_states(run))}
    for old in checkpoints(run)[: -max(keep, 1)]:
        if int(old.name.removeprefix("step-")) not in kept:
            remove_folder(old)
    for ending in (PARTIAL, REPLACED):  # what a killed save left behind
        for left in (run / "checkpoints").glob(f"step-*{ending}"):
            shutil.rmtree(left)


def select(run: Path, wanted: str, best: Best | None = None) -> Path | None:
    """Return the checkpoint that `wanted` means, read through and found whole; None to begin at step 0.

    `auto`: the newest whole one, or none where the run has none yet. `latest`: the newest whole one.
    `best`: the whole one with the best metric. `step-N`: that one. `none`: begin. Raises BadCheckpoint
    where what was asked for is not there or damaged.
    """
    folders = checkpoints(run)
    if wanted == "none" or (wanted == "auto" and not folders):
        return None
    number = re.fullmatch(r"(?:step-)?0*(\d+)", wanted)
    if number:
        folder = folder_of(run, int(number.group(1)))
        if folder not in folders:
            there = ", ".join(path.name for path in folders) or "none"
            raise BadCheckpoint(f"{run} has no checkpoint {wanted}: there are {there}")
        damage = find_damage(folder)
        if damage:
            raise BadCheckpoint(f"{folder} is damaged: {damage}: choose another step, or checkpoints.resume=latest")
        return folder
    if wanted not in ("auto", "latest", "best"):
        raise BadCheckpoint(f"checkpoints.resume must be {RESUME}, got '{wanted}'")
    candidates = folders[::-1]
    if wanted == "best":
        rule = Best(best.metric, best.is_lowest, len(folders)) if best else Best()
        candidates = [folder_of(run, state.step) for state in rule.among(_states(run))]
    reasons = []
    for folder in candidates:
        damage = find_damage(folder)
        if not damage:
            return folder
        reasons.append(f"{folder.name}: {damage}")
        log.warning("skipping %s: %s", folder, damage)
    why = f" ({'; '.join(reasons)})" if reasons else ""
    what = "whole checkpoint" if wanted != "best" else f"whole checkpoint with {best.metric if best else 'a metric'}"
    raise BadCheckpoint(f"{run}/checkpoints has no {what}{why}: checkpoints.resume=none begins again at step 0")


def load(run: Path, engine: HasState, data: str, wanted: str = "auto", best: Best | None = None) -> TrainState:
    """Restore what `select` finds; the state it was written in, that of step 0 where there is none.

    Other ranks than those that wrote it go on with random states of those, which dropout alone reads. Raises
    BadCheckpoint where there is nothing to load, or where the examples or the network are not those of the checkpoint.
    """
    folder = from_main_rank(lambda: select(run, wanted, best))
    state = TrainState(0, data)
    if folder is not None:
        state = read_state(folder)
        if state.data != data:
            raise BadCheckpoint(f"{folder} was trained on other examples: choose another output_dir, or remove it")
        num_ranks = json.loads((folder / "state.json").read_text())["num_ranks"]
        engine.load_state(folder)
        load_random_state(folder / f"random-{rank() % num_ranks}.json")
    barrier()
    from_main_rank(lambda: _set_aside(run, state.step))
    return state


def resume(run: Path, engine: HasState, data: str) -> int:
    """Go on from the newest whole checkpoint, if the run has any; the number of steps done."""
    return load(run, engine, data).step


def _set_aside(run: Path, step: int) -> None:
    """Move what is newer than `step` out of the way: the run will not come from there any more."""
    aside = run / "checkpoints" / "aside"
    for folder in checkpoints(run):
        if int(folder.name.removeprefix("step-")) > step:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / folder.name, ignore_errors=True)
            folder.replace(aside / folder.name)
            log.warning("moved %s to %s: the run goes on from step %d", folder, aside, step)
