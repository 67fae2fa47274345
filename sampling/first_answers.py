"""What the first problems of a run say of its prompt, its limits and its grader, before the rest is paid for.

`FirstAnswers` reads the trajectories of the first problems as they come and says once, when all are there, how many are
right, cannot be read, or were cut, and warns of what would spoil the rest: an answer in a form that the grader does not
read, solutions that are all cut, all alike, all one step, or all wrong.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from espalier.data.answers.grading import grade_answer
from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput, Trajectory, parse_record
from espalier.data.tasks.task import Task
from espalier.sampling.client import SampleRequest
from espalier.sampling.requests import TrajectoryRequests
from espalier.sampling.searches import Searches
from espalier.values.labels import wilson_interval

log = logging.getLogger("sample")

PROBLEMS = 20
"""of every run that is not a pilot: the first ones are looked at"""
MOST_UNREADABLE = MOST_CUT = 0.2
MOST_ONE_STEP = 0.9
BETTER_BY = 0.2  # share of answers that another kind must find right beyond the task's own to be named
MOST_REGRADED = 40  # answers that other kinds are tried on
_READ_RESPONSES = ("response_math", "response_number", "choice", "boolean3", "short_answer")


class FirstAnswers:
    """The trajectories of some problems, of `num_problems` in the whole run; those of others are passed over.
    `searches`: what found them, where more was generated than stands in them."""

    def __init__(
        self, task: Task, requests: Sequence[SampleRequest], num_problems: int, searches: Searches | None = None
    ):
        self._task, self._num_problems, self._searches = task, num_problems, searches
        self._missing = {request.id for request in requests}
        self._rows: list[Trajectory] = []

    def see(self, rows: Sequence[Trajectory]) -> None:
        """Take the trajectories of one problem; the report is written when the last problem has come."""
        problem = rows[0].problem_id if rows else ""
        if problem not in self._missing:
            return
        self._missing.remove(problem)
        self._rows += rows
        if not self._missing:
            self.report()

    def see_file(self, path: Path, problem_ids: Collection[str]) -> None:
        """Take what a file holds of these problems already."""
        rows: dict[str, list[Trajectory]] = {}
        if not problem_ids:
            return
        for place, row in iter_rows(path):
            if row.get("problem_id") in problem_ids:
                rows.setdefault(row["problem_id"], []).append(parse_record(Trajectory, row, place))
        for trajectories in rows.values():
            self.see(trajectories)

    def report(self) -> None:
        """Write the figures of what has come in one line and each warning in one; nothing the second time."""
        if not self._rows:
            return
        per_problem = None if self._searches is None else self._searches.tokens_per_problem
        log.info("%s", summary(self._rows, self._num_problems, per_problem))
        for warning in warnings(self._rows, self._task, self._searches is not None):
            log.warning("%s", warning)
        self._rows, self._missing = [], set()


def pilot_of(requests: Sequence[SampleRequest], number: int, source: Any) -> list[SampleRequest]:
    """Return that many of the requests, evenly spread. Raises BadInput where no solutions are asked for."""
    if not isinstance(source, TrajectoryRequests):
        raise BadInput("pilot counts problems to be solved: set requests=trajectories, or leave pilot out")
    number = min(number, len(requests))
    return [requests[k * len(requests) // number] for k in range(number)]


def summary(rows: Sequence[Trajectory], num_problems: int, tokens_per_problem: float | None = None) -> str:
    """Return one line: accuracy with its 95 % interval over problems (Wilson's, as if a problem were one draw: rather
    too wide than too narrow), shares of answers that cannot be read and of cut ones, lengths, and what the whole run
    would generate at this rate: that of the rows, or, of a search, `tokens_per_problem` (0: not known)."""
    by_problem: dict[str, list[bool]] = {}
    for row in rows:
        by_problem.setdefault(row.problem_id, []).append(row.is_correct)
    right = fmean(fmean(outcomes) for outcomes in by_problem.values())
    low, high = wilson_interval(right * len(by_problem), len(by_problem))
    tokens = sum(len(row.response_ids) for row in rows)
    lengths = "per solution"
    if tokens:  # chat APIs return none
        each = tokens / len(by_problem) if tokens_per_problem is None else tokens_per_problem
        whole = f", about {each * num_problems:,.0f} tokens for all {num_problems}" if each else ""
        lengths = f"and {tokens / len(rows):.0f} tokens per solution{whole}"
    limit = "params.max_tokens" if tokens_per_problem is None else "params.max_tokens or by search.budget"
    return (
        f"first {len(by_problem)} problems: {100 * right:.1f} % right [{100 * low:.0f}, {100 * high:.0f}], "
        f"{_percent(row.answer is None for row in rows)} without an answer that can be read, "
        f"{_percent(row.finish_reason == 'length' for row in rows)} cut at {limit}, "
        f"{fmean(len(row.steps) for row in rows):.1f} steps {lengths}"
    )


def warnings(rows: Sequence[Trajectory], task: Task, is_search: bool = False) -> list[str]:
    """Return what would spoil a run of which these are the first trajectories, a line each with its remedy."""
    causes = [warning for warning in (_cut(rows, is_search), _form(rows, task)) if warning]
    found = [*causes, "" if causes else _all_wrong(rows), _alike(rows), _one_step(rows, task)]
    return [warning for warning in found if warning]


def _percent(flags: Any) -> str:
    return f"{100 * fmean(map(bool, flags)):.1f} %"


def _cut(rows: Sequence[Trajectory], is_search: bool) -> str:
    cut = [row.finish_reason == "length" for row in rows]
    if fmean(cut) <= MOST_CUT:
        return ""
    longest = max(len(row.response_ids) for row in rows)
    after = f" after {longest} tokens" if longest else ""
    limit = "params.max_tokens or search.budget" if is_search else "params.max_tokens"
    return (
        f"{_percent(cut)} of the solutions were cut{after} and are wrong: raise {limit}; "
        "where they go on behind their answer, give a stop string (params.stop) or the policy's own prompt"
    )


def _form(rows: Sequence[Trajectory], task: Task) -> str:
    """Say that ended solutions have no answer that the task's kind reads, or that another kind finds more right."""
    ended = [row for row in rows if row.finish_reason == "stop" and row.gold]
    if not ended:
        return ""
    kind = getattr(task, "kind", "")
    unread = fmean(row.answer is None for row in ended)
    tried = ended[:: max(1, len(ended) // MOST_REGRADED)]
    other, right = _best_kind(tried, kind)
    is_better = bool(other) and right > fmean(row.is_correct for row in tried) + BETTER_BY
    if unread <= MOST_UNREADABLE and not is_better:
        return ""
    said = [f"{100 * unread:.1f} % of the solutions that ended have no answer that {_reader(kind)} reads"]
    if kind == "marked_number" and not any("####" in row.response for row in ended):
        said.append("answers are never marked by ####: choose a prompt that asks for it")
    if is_better:
        said.append(f"task.kind={other} would find {100 * right:.1f} % right")
    if len(said) == 1:
        said.append(f"one of them ends so: {_end(next(row for row in ended if row.answer is None))!r}")
    return "; ".join(said)


def _reader(kind: str) -> str:
    return f"task.kind={kind}" if kind else "the task"


def _end(row: Trajectory) -> str:
    return row.response.rstrip()[-60:]


def _best_kind(rows: Sequence[Trajectory], kind: str) -> tuple[str, float]:
    """Return the kind of answers, other than the task's, that finds most rows right, with their share; ("", 0) where
    the task has a grader of its own, or no other kind finds any."""
    if not kind or kind in ("verifiers", "think_format"):
        return "", 0.0
    shares = Counter[str]()
    for other in _READ_RESPONSES:
        if other == kind or (other == "choice" and not rows[0].num_options):
            continue
        shares[other] = sum(
            grade_answer(prediction=row.response, gold=row.gold, kind=other, num_options=row.num_options).is_correct
            for row in rows
        )
    return next(((other, right / len(rows)) for other, right in shares.most_common(1) if right), ("", 0.0))


def _by_problem(rows: Sequence[Trajectory]) -> Mapping[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.problem_id, []).append(row)
    return groups


def _alike(rows: Sequence[Trajectory]) -> str:
    groups = [group for group in _by_problem(rows).values() if len(group) > 1]
    if not groups or not all(len({row.response for row in group}) == 1 for group in groups):
        return ""
    return "all samples of a problem are the same text: raise params.temperature, or ask for one (params.n=1)"


def _one_step(rows: Sequence[Trajectory], task: Task) -> str:
    long = [row for row in rows if row.response.strip()]
    if not long or fmean(len(row.steps) == 1 for row in long) <= MOST_ONE_STEP:
        return ""
    return (
        f"{_percent(len(row.steps) == 1 for row in long)} of the solutions are a single step, without a state inside: "
        f"choose how task {task.name} cuts them (task.steps), or cut points (values/split_steps)"
    )


def _all_wrong(rows: Sequence[Trajectory]) -> str:
    if any(row.is_correct or not row.gold for row in rows):
        return ""
    return (
        f"none of {len(rows)} solutions is right: nothing can be learned from their outcomes; look at some of them "
        "(pages/inspect_steps) before the rest is sampled"
    )
