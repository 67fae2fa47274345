"""Which problem belongs to which split or shard: pure functions of ids, the same on every machine.

Problems of one passage (`passage_id`) stay together in every split; a problem without one is on its own.

A `SplitPlan` divides a pool of published problems anew. The sizes known from VinePPO (Kazemnejad et al. 2024) are
MATH 11,500 / 500 / 500 and GSM8K 7,100 / 373 / 1,319 (train, dev, test); which rows its authors drew was not
published, so the sizes are theirs and the draw is ours: versioned, seeded, and printed here.

    conf/task/gsm8k_with_dev.yaml   7,100 + 373 out of train (7,473); test is the published one
    conf/task/math_with_dev.yaml    11,500 + 500 out of train + test (12,500) less MATH-500; test is MATH-500

Version 1 orders the ids of the pool by sha256("1/<seed>/<id>") and deals them out in the order of `sizes`; of problems
with a passage the passage's id, and all of them go where the first one does. Where the pool does not have the size that
the plan was made for, it is divided in the same proportions, with a warning.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput, Problem

VERSIONS = (1,)
_COPY = re.compile(r"~[0-9]+\Z")


def _number(text: str) -> int:
    """Return a uniform number below 2**64 from a text."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")


def original_id(problem_id: str) -> str:
    """Return the id without the `~2`, `~3`, … that a problem has behind it where it stands in a mixture again."""
    return _COPY.sub("", problem_id)


def passage_key(text: str) -> str:
    """Return `passage-` and 16 hexadecimal digits of a passage's words, whatever the white space between them."""
    return f"passage-{hashlib.sha256(' '.join(text.split()).encode(errors='surrogatepass')).hexdigest()[:16]}"


def split_key(record: Any) -> str:
    """Return what decides on which side of a split a record stands: its `passage_id`, else the problem's id."""
    own: str = record.id if isinstance(record, Problem) else record.problem_id
    return getattr(record, "passage_id", "") or own


def shard_of(identity: str, num_shards: int) -> int:
    """Return the one shard (0 .. num_shards - 1) of a problem: by its id alone, so that all files agree on it."""
    return _number(f"shard/{identity}") % num_shards


def check_shard(shard: int, num_shards: int, where: str) -> None:
    """Raise BadInput unless the shard exists; `where` ("task") is the part of the config that asks for it."""
    if num_shards < 1:
        raise BadInput(f"{where}.num_shards must be at least 1, got {num_shards}")
    if not 0 <= shard < num_shards:
        raise BadInput(f"{where}.shard must be 0 to {num_shards - 1} (num_shards - 1), got {shard}")


def proportional_sizes(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Return `sizes` scaled so that they sum to `total`, by largest remainder; ties go to the split named first."""
    whole = sum(sizes.values())
    scaled = {name: size * total // whole for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: -(sizes[name] * total % whole))
    for name in by_remainder[: total - sum(scaled.values())]:
        scaled[name] += 1
    return scaled


@dataclass(frozen=True)
class SplitPlan:
    """`sizes`: split → problems when the data is whole; `pool`: the published splits that are divided.

    A split that `sizes` does not name is the published one. Raises BadInput on sizes that are not whole numbers
    above 0 and on an unknown version.
    """

    sizes: dict[str, int]
    pool: Sequence[str] = ("train",)
    version: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise BadInput(f"splits.version must be one of {VERSIONS}, got {self.version}")
        bad = [name for name, size in self.sizes.items() if not isinstance(size, int) or size < 1]
        if bad or not self.sizes or not self.pool:
            raise BadInput(f"splits.sizes must name splits with sizes above 0 and splits.pool what is divided: {self}")

    def assign(self, keys: Mapping[str, str]) -> dict[str, str]:
        """Return id → split of the problems whose `split_key` is given by id, whatever order they come in: every id has
        exactly one, and all of one key the same."""
        sizes = proportional_sizes(self.sizes, len(keys)) if self.note(len(keys)) else self.sizes
        ordered = sorted(keys, key=lambda one: (_number(f"{self.version}/{self.seed}/{keys[one]}"), keys[one], one))
        names = [name for name, size in sizes.items() for _ in range(size)]
        first: dict[str, str] = {}
        return {one: first.setdefault(keys[one], name) for one, name in zip(ordered, names, strict=True)}

    def note(self, num_ids: int) -> str:
        """Say why the splits do not have the sizes of the plan; "" where they do."""
        planned = sum(self.sizes.values())
        if num_ids == planned:
            return ""
        got = ", ".join(f"{name} {size}" for name, size in proportional_sizes(self.sizes, num_ids).items())
        return f"the plan is made for {planned} problems and there are {num_ids}: divided in proportion ({got})"
