"""Which problems a policy ever solves: once hit and never hit so far, over the iterations of a run or over files.

`solved_once` is of one round alone: the share of its problems that one attempt or more solves, pass@n of n attempts.
`once_hit` counts every attempt so far: the share of the problems seen until then that were solved at least once.
Attempts that a run did not write down are no attempts here: of such a run it is warned.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from espalier.analysis.analyzers.figure import Panel, write_figure
from espalier.analysis.analyzers.run_history import RunHistory
from espalier.data.jsonl import iter_rows, read_records
from espalier.data.records import BadInput, SampledRollout, Trajectory
from espalier.pipeline.evaluation.evaluation_inputs import named_paths
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

Attempt = tuple[str, bool]  # (problem, whether it was solved)


@dataclass
class HitCounter:
    """`attempts` and `hits` of every problem so far; `rounds`: the figures after each round."""

    attempts: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, attempts: Iterable[Attempt]) -> None:
        """Count one round, which has an attempt or more."""
        rows = list(attempts)
        solved = {problem for problem, is_right in rows if is_right}
        new = len(solved - self.hits.keys())
        for problem, is_right in rows:
            self.attempts[problem] = self.attempts.get(problem, 0) + 1
            if is_right:
                self.hits[problem] = self.hits.get(problem, 0) + 1
        self.rounds.append({
            "round": name,
            "attempts": len(rows),
            "accuracy": round(sum(is_right for _, is_right in rows) / len(rows), 6),
            "solved_once": round(len(solved) / len({problem for problem, _ in rows}), 6),
            "problems_so_far": len(self.attempts),
            "new_hits": new,
            "once_hit": round(len(self.hits) / len(self.attempts), 6),
        })  # fmt: skip

    def never_hit(self) -> dict[str, int]:
        """Return problem → attempts of those that no attempt solved, the most tried first."""
        missed = [(number, problem) for problem, number in self.attempts.items() if problem not in self.hits]
        return {problem: number for number, problem in sorted(missed, key=lambda row: (-row[0], row[1]))}


def read_attempts(path: str) -> list[Attempt]:
    """Read Trajectory or SampledRollout lines. Raises BadInput on an empty file."""
    first = next(iter_rows(path), None)
    if first is None:
        raise BadInput(f"{path}: empty: leave it out, or sample again")
    rows: Sequence[Trajectory | SampledRollout] = (
        read_records(SampledRollout, path) if "iteration" in first[1] else read_records(Trajectory, path)
    )
    return [(row.problem_id, row.is_correct) for row in rows]


@dataclass(frozen=True)
class CountHits:
    """The figure stands beside the output, as SVG."""

    samples: Any
    """a run directory of main.py, whose sampled rollouts are read by iteration; or files of Trajectory or
    SampledRollout in the order of training: a list, or a mapping of names to files"""

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return the files."""
        return list(self._paths().values())

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the figures after each round, and the problems that were never solved with their attempts."""
        counter = HitCounter()
        if self._is_run() and (left_out := RunHistory(Path(self.samples)).left_out_of_groups()):
            log.warning("%s: %d rollouts of every group were not written down, so that what they solved counts as "
                        "never hit: run with samples.rollouts_per_problem=0", self.samples, left_out)  # fmt: skip
        for name, path in self._paths().items():
            counter.add(name, read_attempts(path))
        lines = {key: [(number, row[key]) for number, row in enumerate(counter.rounds, 1)]
                 for key in ("once_hit", "solved_once")}  # fmt: skip
        write_figure(context.output, f"Problems solved, of {len(counter.attempts):,}", [Panel("round", "share", lines)])
        never = counter.never_hit()
        context.counts.update(problems=len(counter.attempts), never_hit=len(never))
        return {"problems": len(counter.attempts), "rounds": counter.rounds, "never_hit": never}

    def _is_run(self) -> bool:
        return isinstance(self.samples, str) and Path(self.samples).is_dir()

    def _paths(self) -> dict[str, str]:
        if self._is_run():
            return {path.stem: str(path) for path in RunHistory(Path(self.samples)).samples()}
        paths = named_paths(self.samples, "stage.samples")
        if not paths:
            raise BadInput("stage.samples names no file: give a run directory, or files of sampled solutions")
        return paths
