"""Where a record is from, and what may stand beside it: searches are compared seed by seed, on the same problems and of
the same policy, and seconds are those of one machine."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.credit.runs import digest
from benchmarks.result import machine
from espalier.data.records import BadInput
from espalier.runtime.run_dir import code_commit

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Origin:
    """`policy` and `reward_model` (of the scorer; "": it has none) are digests of weights, `load` is the machine's when
    the run ended. A `policy` of "": the record is older than these fields, and none of them is known."""

    policy: str = ""
    reward_model: str = ""
    machine: str = ""
    commit: str = ""
    date: str = ""
    load: float | None = None


UNKNOWN = Origin()


def origin(policy: str, reward_model: str = "") -> Origin:
    """Return the origin of a run that ends now, of these digests."""
    load = round(os.getloadavg()[0], 2)
    return Origin(policy, reward_model, machine(), code_commit(), time.strftime("%Y-%m-%d"), load)


def weights(folder: str) -> str:
    """Return a digest of a model folder's weights; of a log-ratio reward those of both policies, joined by "+". Raises
    BadInput where there are none."""
    found = [digest(path.parent) for path in sorted(Path(folder).rglob("model.safetensors"))]
    if not found:
        raise BadInput(f"{folder}: no model.safetensors in it: name a folder of a model that is kept whole in one file")
    return "+".join(found)


class HasOrigin(Protocol):
    """A record of a cell and a seed."""

    @property
    def cell(self) -> str:
        """The cell's name."""

    @property
    def seed(self) -> int:
        """Which block of problems."""

    @property
    def origin(self) -> Origin:
        """Where it is from."""


def check_policy(records: Iterable[HasOrigin], cell: str, seeds: Iterable[int], policy: str) -> None:
    """Raise BadInput where a stored record of one of these seeds is of another policy. Other seeds may have another
    one: the same recipe ends in other bits on another machine."""
    for row in records:
        if row.cell == cell and row.seed in set(seeds) and row.origin.policy not in ("", policy):
            raise BadInput(f"stored records of cell {cell} with seed {row.seed} are of another policy "
                           f"({row.origin.policy}, this is {policy}): take other seeds (--seeds), give that policy by "
                           f"--policy {cell}=FOLDER, or move the records away")  # fmt: skip


def check_reward_model(
    records: Iterable[HasOrigin], cell: str, seeds: Iterable[int], scorer: str, reward_model: str
) -> None:
    """Raise BadInput where a stored record of one of these seeds, all of this scorer, has another reward model."""
    for row in records:
        if row.cell == cell and row.seed in set(seeds) and row.origin.reward_model not in ("", reward_model):
            raise BadInput(f"stored records of cell {cell} with seed {row.seed} have another reward model for {scorer} "
                           f"({row.origin.reward_model}, this is {reward_model}): take other seeds (--seeds), give "
                           f"that one by --prm {cell}=FOLDER, or move the records away")  # fmt: skip


def check_number(found: Iterable[tuple[str, int]], cell: str, problems: int) -> None:
    """Raise BadInput where a stored record of the cell, (cell, number of problems; 0: not recorded), is of another
    number: its seeds are other blocks of problems."""
    for name, number in found:
        if name == cell and number not in (0, problems):
            raise BadInput(f"stored records of cell {cell} are of {number} problems per seed, these would be of "
                           f"{problems}: ask for --problems {number}, or move the records away")  # fmt: skip


def machine_of(origins: Iterable[Origin]) -> str:
    """Return the one machine of several records, or that there are several or that none is known."""
    names = sorted({one.machine or NOT_RECORDED for one in origins})
    return names[0] if len(names) == 1 else "several: " + "; ".join(names)
