"""Checkpoints: written under another name, fsynced and renamed, so a folder that exists is complete.

`<run>/checkpoints/step-00000100/` holds the engine's state, the random states and `state.json`; the trained
model stands apart in `<run>/model/`, a standard Hugging Face folder, written last.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime.distributed import barrier, is_main_rank, rank, world_size
from training.engine import Engine


class BadCheckpoint(ValueError):
    """A checkpoint that does not belong to this run."""

    exit_code = 2


@dataclass(frozen=True)
class TrainState:
    """`step`: optimizer steps done. `data`: the fingerprint of the examples."""

    step: int
    data: str


def _fsync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write(partial)` on every rank, then fsync and rename on rank 0: complete or absent.

    An older folder of that name is removed only once its successor is complete.
    """
    partial = folder.with_name(folder.name + ".partial")
    if is_main_rank():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    write(partial)
    barrier()
    if is_main_rank():
        _fsync_tree(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    barrier()


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if not path.name.endswith(".partial"))


def save(run: Path, engine: Engine, state: TrainState, keep: int) -> None:
    """Write a checkpoint, then drop all but the newest `keep`."""

    def write(partial: Path) -> None:
        engine.save_state(partial)
        random_state = {"torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            random_state["cuda"] = torch.cuda.get_rng_state()
        torch.save(random_state, partial / f"random-{rank()}.pt")
        if is_main_rank():
            (partial / "state.json").write_text(json.dumps(asdict(state)))

    write_folder(run / "checkpoints" / f"step-{state.step:08d}", write)
    if is_main_rank():
        for old in checkpoints(run)[: -max(keep, 1)]:
            shutil.rmtree(old)


def resume(run: Path, engine: Engine, data: str) -> int:
    """Load the newest checkpoint of the run, if there is one; the number of steps done.

    Raises BadCheckpoint where the examples or the number of ranks are not those of the checkpoint.
    """
    found = checkpoints(run)
    if not found:
        return 0
    folder = found[-1]
    state = TrainState(**json.loads((folder / "state.json").read_text()))
    if state.data != data:
        raise BadCheckpoint(f"{folder} was trained on other examples: choose another output_dir, or remove it")
    num_ranks = len(list(folder.glob("random-*.pt")))
    if num_ranks != world_size():
        raise BadCheckpoint(f"{folder} was written by {num_ranks} ranks, not {world_size()}: start as many again")
    engine.load_state(folder)
    random_state = torch.load(folder / f"random-{rank()}.pt", weights_only=True)
    torch.set_rng_state(random_state["torch"])
    if "cuda" in random_state and torch.cuda.is_available():
        torch.cuda.set_rng_state(random_state["cuda"])
    return state.step
