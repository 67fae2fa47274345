"""Checkpoints of DeepSpeed, read on another number of ranks, or whole.

A checkpoint holds what each rank had of the weights and of the optimizer's moments. DeepSpeed's universal checkpoint
(Lian et al. 2024, arXiv 2406.18820) has them apart by parameter, from which any number of ranks takes its parts; it is
made of the former, on rank 0, one rank's file at a time, when a run goes on on other ranks, and removed again.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from espalier.runtime.distributed import barrier, from_main_rank
from espalier.runtime.manifest import PARTIAL
from espalier.training.deepspeed_library import library, make_universal, quiet
from espalier.training.engine import BadCheckpoint

TAG = "deepspeed"
_REARRANGED = f"-rearranged{PARTIAL}"


def num_ranks_of(folder: Path) -> int:
    """Return how many ranks left their parts of the optimizer in a checkpoint; 0 where it is not cut."""
    return len(list((folder / TAG).glob("*zero_pp_rank_*optim_states.pt")))


def _rearranged(folder: Path) -> Path:
    """Say where a checkpoint, or the part of one that is another network's (a critic's), lies rearranged: beside the
    whole one, which a file that is not its own would make a damaged one. The next one that is saved removes it."""
    whole = folder.parent if folder.parent.name.startswith("step-") else folder
    part = "" if whole == folder else f"-{folder.name}"
    return whole.with_name(f"{whole.name}{part}{_REARRANGED}")


@contextmanager
def for_any_ranks(folder: Path) -> Iterator[Path]:
    """Give a folder with the checkpoint as a universal one, as long as it is read; on every rank. Raises
    BadCheckpoint where DeepSpeed cannot make one."""
    made = _rearranged(folder)

    def make() -> None:
        shutil.rmtree(made, ignore_errors=True)
        (made / TAG).mkdir(parents=True)
        try:
            make_universal(folder / TAG, made / TAG)
        except (AssertionError, KeyError, IndexError, NotImplementedError, RuntimeError) as error:
            raise BadCheckpoint(f"{folder} cannot be rearranged for other ranks ({type(error).__name__}: {error}): "
                                f"start {num_ranks_of(folder)} again") from error  # fmt: skip

    from_main_rank(make)
    yield made
    barrier()  # others may be reading still
    from_main_rank(lambda: shutil.rmtree(made))


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Say whether `DeepSpeedEngine.save_state` wrote it."""
    return (folder / TAG).is_dir()


def full_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the float32 weights of a checkpoint of any ZeRO stage and any number of ranks, put together on the CPU.

    `shapes` are those of the whole model's weights. DeepSpeed's files are pickles: check the folder's manifest before.
    """
    parts = sorted((folder / TAG).glob("mp_rank_*_model_states.pt"))
    is_sharded = bool(list((folder / TAG).glob("*zero_pp_rank_*optim_states.pt")))
    if len(parts) > 1 or not is_sharded:  # every data rank holds all of its part: tensor parallelism, or stage 0
        stored = [_stored_module(path, is_sharded) for path in parts]
        return {name: _joined([part[name] for part in stored], shapes.get(name)) for name in stored[0]}
    reader = library().utils.zero_to_fp32
    with quiet():
        return dict(reader.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG))


def _stored_module(path: Path, is_sharded: bool) -> dict[str, torch.Tensor]:
    """Return the weights in one of DeepSpeed's files; with ZeRO it also holds objects of DeepSpeed's own."""
    return dict(torch.load(path, map_location="cpu", weights_only=not is_sharded)["module"])


def _joined(parts: list[torch.Tensor], shape: torch.Size | None) -> torch.Tensor:
    """Return a weight from the parts of the tensor-parallel ranks: the one dimension that is shorter than in
    `shape`."""
    if shape is None or parts[0].shape == shape:
        return parts[0]
    short = [place for place, (mine, whole) in enumerate(zip(parts[0].shape, shape, strict=True)) if mine != whole]
    return torch.cat(parts, dim=short[0])
