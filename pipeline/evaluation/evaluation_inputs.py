"""What an evaluation reads: samples and greedy solutions of the same problems, scores, problems; all checked.

Scores are joined by trajectory id, problems by problem id. A scorer's file holds either StepScores (one score a
step) or OutcomeScore rows (one score a trajectory).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.answers.grade import Gold
from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import iter_rows, read_records
from espalier.data.records import BadInput, Problem, StepScores, Trajectory
from espalier.rewards.aggregate import aggregate, logistic
from espalier.rewards.votes import by_problem

log = logging.getLogger("stage")


@dataclass(frozen=True)
class OutcomeScore:
    """A reward model's one score of a trajectory."""

    id: str
    """the trajectory's id"""
    problem_id: str
    score: float | None
    """a share in [0, 1], or log-odds; null where the scorer gave none that can be read"""


@dataclass(frozen=True)
class Ranking:
    """One scorer with one aggregation: `scores` rank trajectories (best of n), `weights` (at least 0) vote. One that
    the scorer gave no score ranks behind all others and does not vote."""

    name: str
    scores: dict[str, float]
    weights: dict[str, float]

    def scores_of(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """For best of n."""
        return [self.scores[t.id] for t in trajectories]

    def weights_of(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """For the weighted vote."""
        return [self.weights[t.id] for t in trajectories]


@dataclass(frozen=True)
class Samples:
    """The trajectories of one evaluation by problem, in one order; `greedy` is {} where there is none. `num_refused`
    problems have no trajectory because they were refused (`data.failed_rows`)."""

    path: str
    groups: dict[str, list[Trajectory]]
    greedy: dict[str, Trajectory]
    num_refused: int = 0

    @property
    def num_samples(self) -> int:
        """Samples a problem."""
        return len(next(iter(self.groups.values())))

    @property
    def labelled(self) -> list[str]:
        """The problems that are published with their answer."""
        return [problem for problem, group in self.groups.items() if has_gold(group[0].gold)]

    def trajectories(self) -> list[Trajectory]:
        """Return every sample."""
        return [t for group in self.groups.values() for t in group]


def has_gold(gold: Gold) -> bool:
    """False where the problem is published without its answer."""
    return any(gold) if isinstance(gold, list) else gold != ""


def _check_gold(group: Sequence[Trajectory], path: str) -> None:
    for trajectory in group:
        if trajectory.gold != group[0].gold:
            numbers = f"{group[0].gold!r} in '{group[0].id}' and {trajectory.gold!r} in '{trajectory.id}'"
            raise BadInput(f"{path}: problem '{trajectory.problem_id}' has gold {numbers}: they are not of one run")


def read_samples(path: str, greedy_path: str = "") -> Samples:
    """Return n samples per problem and, if a path is given, one greedy solution of each; in the greedy file's order. A
    problem that one of the files lists as refused is in neither.

    Raises BadInput on an empty file, unequal numbers of samples, other problems or other golds.
    """
    groups = by_problem(read_records(Trajectory, path))
    if not groups:
        raise BadInput(f"{path}: no trajectory to evaluate")
    greedy = by_problem(read_records(Trajectory, greedy_path)) if greedy_path else {}
    refused = read_failed(path).keys() - groups.keys()
    if greedy:
        refused |= read_failed(greedy_path).keys() - greedy.keys()
        groups = {problem: group for problem, group in groups.items() if problem not in refused}
        greedy = {problem: group for problem, group in greedy.items() if problem not in refused}
        if groups.keys() != greedy.keys():
            raise BadInput(f"{path} and {greedy_path} do not hold the same problems{_first_gap(groups, greedy)}")
        several = next((problem for problem, group in greedy.items() if len(group) > 1), None)
        if several is not None:
            raise BadInput(f"{greedy_path}: problem '{several}' stands {len(greedy[several])} times: one greedy "
                           "solution a problem is needed")  # fmt: skip
        groups = {problem: groups[problem] for problem in greedy}
    elif greedy_path:
        raise BadInput(f"{greedy_path}: no greedy trajectory: finish sampling first, or leave stage.greedy empty")
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1:
        raise BadInput(f"{path}: problems have {min(sizes)} to {max(sizes)} samples: finish sampling first")
    for problem, group in groups.items():
        _check_gold([*group, *greedy.get(problem, [])], path)
    return Samples(path, groups, {problem: group[0] for problem, group in greedy.items()}, len(refused))


def _first_gap(groups: Mapping[str, Any], greedy: Mapping[str, Any]) -> str:
    problem = min(groups.keys() ^ greedy.keys())
    return f" ('{problem}' is only in one): sample both on the same split"


def read_scores(path: str) -> tuple[dict[str, list[float]], bool]:
    """(trajectory id → its scores, [] where it was given none, whether these are outcome scores). Raises BadInput on a
    bad or empty file."""
    row = next((row for _, row in iter_rows(path)), None)
    if row is None:
        raise BadInput(f"{path}: no scores: score the trajectories first")
    if "score" in row:
        rows = read_records(OutcomeScore, path)
        return {scored.id: [] if scored.score is None else [scored.score] for scored in rows}, True
    return {scored.id: scored.scores for scored in read_records(StepScores, path)}, False


def read_rankings(path: str, name: str, aggregates: Sequence[str], trajectories: Sequence[Trajectory]) -> list[Ranking]:
    """Return a scorer's rankings, one an aggregate and named `name_aggregate`; one in all, `name`, for outcome scores.

    Raises BadInput where a trajectory has no scores, or not one for each of its steps.
    """
    scores, is_outcome = read_scores(path)
    for t in trajectories:
        if t.id not in scores:
            raise BadInput(f"{path}: no scores for trajectory '{t.id}': score these first")
    unscored = [t for t in trajectories if not scores[t.id] and (is_outcome or t.steps)]
    if unscored:
        log.warning("%s: %d of %d trajectories were given no score: they rank behind all others and do not vote", path,
                    len(unscored), len(trajectories))  # fmt: skip
    left = {t.id for t in unscored}
    trajectories = [t for t in trajectories if t.id not in left]
    is_outcome |= any(len(t.steps) > 1 for t in trajectories) and all(len(scores[t.id]) == 1 for t in trajectories)
    if is_outcome:
        found = {t.id: scores[t.id][0] for t in trajectories}
        return [_ranking(name or "outcome", found, unscored, is_log_odds=None)]
    for t in trajectories:
        if len(scores[t.id]) != len(t.steps):
            numbers = f"{len(scores[t.id])} scores and {len(t.steps)} steps"
            raise BadInput(f"{path}: trajectory '{t.id}' has {numbers}: score these trajectories again")
    return [
        _ranking(
            f"{name}_{how}".lstrip("_"),
            {t.id: aggregate(scores[t.id], how) for t in trajectories},
            unscored,
            is_log_odds=how == "log_odds",
        )
        for how in aggregates
    ]


def _ranking(name: str, scores: dict[str, float], unscored: Sequence[Trajectory], is_log_odds: bool | None) -> Ranking:
    """Weigh log-odds as shares, as a vote's weights cannot be negative; None: log-odds where a score is negative."""
    if is_log_odds is None:
        is_log_odds = any(score < 0 for score in scores.values())
    weights = {key: logistic(score) for key, score in scores.items()} if is_log_odds else scores
    last, no_vote = dict.fromkeys((t.id for t in unscored), -math.inf), dict.fromkeys((t.id for t in unscored), 0.0)
    return Ranking(name, scores | last, weights | no_vote)


def named_paths(value: Any, setting: str) -> dict[str, str]:
    """Name → path of a setting that is one path (named ""), a list (named by their stems) or a mapping.

    Raises BadInput where two stems are the same, or the setting is something else.
    """
    if not value:
        return {}
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, Mapping) and all(isinstance(path, str) for path in value.values()):
        return {str(name): path for name, path in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(path, str) for path in value):
        paths = {Path(path).stem: path for path in value}
        if len(paths) == len(value):
            return paths
        raise BadInput(f"{setting}: two files have the same name: give names, {setting}={{prm: FILE, orm: FILE}}")
    raise BadInput(f"{setting} must be a path, a list of paths or a mapping of names to paths, got {value!r}")


def read_problems(path: str) -> dict[str, Problem]:
    """Problem id → problem."""
    return {problem.id: problem for problem in read_records(Problem, path)}


def check_known(samples: Samples, problems: Mapping[str, Problem], path: str) -> None:
    """Raise BadInput where a problem that was sampled is not in the file of problems."""
    unknown = next((problem for problem in samples.groups if problem not in problems), None)
    if unknown is not None:
        raise BadInput(f"{path}: no problem '{unknown}', which {samples.path} holds: give the file of its split")
