"""Trajectories by problem: each distinct one once, in the order they were sampled, whatever the order of the rows.

Everything that chooses among the samples of a problem (preference pairs, demonstrations) reads them through here,
so that "distinct", "cut" and "which part of the problems" mean the same everywhere, and what is left out is counted.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Trajectory
from espalier.data.steps import check_ends

PARTS = ("all", "train", "held_out")


def sample_order(identity: str) -> tuple[Any, ...]:
    """Sorts ids as they were given out: `p/2` before `p/10`."""
    parts = re.split(r"([0-9]{1,18})", identity)
    return (*(int(part) if place % 2 else part for place, part in enumerate(parts)), identity)


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
    """Which problems are read: all, or `train` or `held_out` by the hash of the problem's id.

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

    def holds(self, problem_id: str) -> bool:
        """Say whether the problem belongs to the part."""
        return self.part == "all" or is_held_out(problem_id, self.held_out_share) == (self.part == "held_out")


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


@dataclass(frozen=True)
class Groups:
    """`by_problem` as of `group_distinct`; `counts`: `read`, and what was left out and why."""

    by_problem: dict[str, list[Trajectory]]
    counts: Counter[str]

    def num_of(self, *, right: bool) -> int:
        """Return problems whose trajectories are all right (or all wrong): they make no pair by outcome."""
        return sum(all(t.is_correct == right for t in group) for group in self.by_problem.values())


def read_groups(
    path: str, part: ProblemPart, *, keeps_cut: bool = False, known: Container[str] | None = None
) -> Groups:
    """Return the groups of a file of trajectories. With `known`, trajectories whose id is not there are left out and
    counted as `unknown`."""
    rows = read_records(Trajectory, path)
    counts = Counter({"read": len(rows)})
    mine = [row for row in rows if part.holds(row.problem_id)]
    counts["other_part"] = len(rows) - len(mine)
    if known is not None:
        here = [row for row in mine if row.id in known]
        counts["unknown"] = len(mine) - len(here)
        mine = here
    groups = group_distinct(mine, keeps_cut, counts)
    return Groups(groups, +counts)
