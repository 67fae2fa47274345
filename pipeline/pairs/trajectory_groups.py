"""Trajectories by problem: each distinct one once, in the order they were sampled, whatever the order of the rows.

One problem's are in memory at a time (`data.row_index`).

Everything that chooses among the samples of a problem (preference pairs, demonstrations) reads them through here,
so that "distinct", "cut" and "which part of the problems" mean the same everywhere, and what is left out is counted.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.examples.token_examples import is_in_part
from espalier.data.records import BadInput, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.data.splits import split_key
from espalier.data.steps import check_ends

PARTS = ("all", "train", "held_out")


def sample_order(identity: str) -> bytes:
    """Return what sorts ids as they were given out: `p/2` before `p/10`, on disk too.

    Texts and numbers take turns, and the id itself decides between equal ones. A text ends with a zero byte, behind
    which stands 1 for a number, 0 for the end, and 255 where the zero byte is the text's: so bytes compare as the
    parts do.
    """
    parts = re.split(r"([0-9]{1,18})", identity)
    keys = [b"\1" + int(part).to_bytes(8, "big") if place % 2 else part.encode("utf-8", "surrogatepass")
            .replace(b"\0", b"\0\xff") + b"\0" for place, part in enumerate(parts)]  # fmt: skip
    return b"".join([*keys, b"\0", identity.encode("utf-8", "surrogatepass")])


def capped(items: Sequence[Any], limit: int) -> list[Any]:
    """Return the first `limit` items; 0 is no limit."""
    return list(items[:limit] if limit else items)


def check_counts(**numbers: int) -> None:
    """Raise BadInput for a count below 0; 0 says "no cap" everywhere."""
    for name, number in numbers.items():
        if number < 0:
            raise BadInput(f"stage.{name} must be 0 (no cap) or more, got {number}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise BadInput unless the setting is one of its choices."""
    if value not in choices:
        raise BadInput(f"stage.{name} must be one of {', '.join(choices)}, got '{value}'")


@dataclass(frozen=True, kw_only=True)
class ProblemPart:
    """Which problems are read: all, or `train` or `held_out` by the hash of their passage, or their id without one.

    The split is the one the reward model's training uses (`data.examples.token_examples.is_held_out`): the same
    `held_out_share` gives the same problems in every file and every round.
    """

    part: str = "all"
    held_out_share: float = 0.0

    def check_part(self) -> None:
        """Raise BadInput on another part, or a share outside [0, 1]."""
        check_choice("part", self.part, PARTS)
        if not 0 <= self.held_out_share <= 1:
            raise BadInput(f"stage.held_out_share must be a share from 0 to 1, got {self.held_out_share}")

    def holds(self, record: Any) -> bool:
        """Say whether the problem of a record belongs to the part."""
        return is_in_part(split_key(record), self.part, self.held_out_share)


def group_distinct(
    trajectories: Iterable[Trajectory], keeps_cut: bool = False, counts: Counter[str] | None = None
) -> dict[str, list[Trajectory]]:
    """Problem id → its trajectories, each distinct token sequence once (the one sampled first).

    Problems and trajectories stand in the order of their ids. Trajectories without steps are left out, and cut
    ones (no end) unless `keeps_cut`; `counts` gets how many: `empty`, `cut`, `repeated`.
    Raises BadInput for a trajectory without token ids, and where one problem was asked in two ways.
    """
    counts = Counter() if counts is None else counts
    groups: dict[str, dict[tuple[int, ...], Trajectory]] = defaultdict(dict)
    for trajectory in sorted(trajectories, key=lambda t: (sample_order(t.problem_id), sample_order(t.id))):
        is_cut = trajectory.finish_reason != "stop"
        if not trajectory.steps or (is_cut and not keeps_cut):
            counts["empty" if not trajectory.steps else "cut"] += 1
            continue
        check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
        group = groups[trajectory.problem_id]
        first = group.setdefault(tuple(trajectory.response_ids), trajectory)
        counts["repeated"] += first is not trajectory
        asked = next(iter(group.values()))
        if asked.prompt_ids != trajectory.prompt_ids:
            raise BadInput(
                f"trajectories '{asked.id}' and '{trajectory.id}' answer problem '{trajectory.problem_id}' after "
                "different prompts: build from samples of one prompt"
            )
    return {problem: list(group.values()) for problem, group in groups.items()}


@dataclass
class GroupCounts:
    """What was read of trajectories and left out; `by_reason`: `read`, `other_part`, `unknown`, and as of
    `group_distinct`. Problems all of whose trajectories are right (or wrong) make no pair by outcome."""

    by_reason: Counter[str] = field(default_factory=Counter)
    problems: int = 0
    all_right: int = 0
    all_wrong: int = 0

    def add(self, group: Sequence[Trajectory]) -> None:
        """Take in the trajectories of a problem that are left."""
        self.problems += 1
        self.all_right += all(t.is_correct for t in group)
        self.all_wrong += not any(t.is_correct for t in group)

    def figures(self) -> dict[str, int]:
        """Return what a stage puts into its counts."""
        return {**+self.by_reason, "problems": self.problems, "problems_all_right": self.all_right,
                "problems_all_wrong": self.all_wrong}  # fmt: skip


def iter_groups(
    rows: ProblemRows,
    part: ProblemPart,
    counts: GroupCounts,
    *,
    keeps_cut: bool = False,
    known: Callable[[int], Collection[str]] | None = None,
) -> Iterator[tuple[int, str, list[Trajectory]]]:
    """Yield (the problem in `rows`, its id, its group as of `group_distinct`) of every problem that has one, by the
    order of their ids; the trajectories are the first file of `rows`.

    `known` is asked for every problem of any file which ids of trajectories are known there: others are left out and
    counted as `unknown`.
    """
    for problem in rows.problems_by_id(sample_order):
        names = None if known is None else known(problem)
        trajectories: list[Trajectory] = rows.rows(0, problem)
        counts.by_reason["read"] += len(trajectories)
        if not trajectories or not part.holds(trajectories[0]):
            counts.by_reason["other_part"] += len(trajectories)
            continue
        here = [row for row in trajectories if names is None or row.id in names]
        counts.by_reason["unknown"] += len(trajectories) - len(here)
        for name, group in group_distinct(here, keeps_cut, counts.by_reason).items():
            counts.add(group)
            yield problem, name, group
