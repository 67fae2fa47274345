"""Judged solutions and their scores as numbers: what an evaluation of step scores holds in place of rows.

A score, a label and nothing else of a step: 16 bytes; some 50 bytes per solution. Problems, and pairs that solutions
belong to, are known by the 64 bits of `data.row_index.hash_of`; groups by their number.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from espalier.data.examples.token_examples import is_held_out
from espalier.data.records import AnnotatedSolution
from espalier.data.row_index import hash_of

ORIGINAL = "original"
"""The group of the solutions that others were made from."""
_NOT_KNOWN = -2  # in place of a first error


class Judged(Protocol):
    """What somebody said of a solution's steps: an `AnnotatedSolution`, or what is kept of it."""

    @property
    def labels(self) -> Sequence[float | None]:
        """As `AnnotatedSolution.labels`, one per step."""

    @property
    def first_error(self) -> int | None:
        """As `AnnotatedSolution.first_error`."""


@dataclass(frozen=True)
class ScoredSolution:
    """A judged solution and the score of each of its steps."""

    labels: list[float | None]
    first_error: int | None
    scores: list[float]

    def share_passed(self, threshold: float) -> float:
        """Return the share of its steps called right."""
        return sum(score >= threshold for score in self.scores) / len(self.scores)


@dataclass(frozen=True)
class JudgedScores:
    """N solutions of S steps in all, in file order; made by `Taken`."""

    places: np.ndarray
    """of the solution in its file, from 0 [N]"""
    problems: np.ndarray
    """the hash of its problem [N]"""
    is_tuning: np.ndarray
    """whether its problem is one that thresholds are chosen on [N]"""
    groups: np.ndarray
    """place in `group_names` of what figures are broken down by [N]"""
    group_names: list[str]
    first_errors: np.ndarray
    """of each solution, from 0; -1 where there is none, -2 where it is not known [N]"""
    pairs: np.ndarray
    """the hash of the pair that it belongs to [N]"""
    sides: np.ndarray
    """of that pair: 1 the chosen one, 0 the other, -1 where it belongs to none [N]"""
    starts: np.ndarray
    """where the steps of each begin, and S [N + 1]"""
    scores: np.ndarray
    """in [0, 1] [S]"""
    labels: np.ndarray
    """NaN where nobody judged the step [S]"""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def is_original(self) -> np.ndarray:
        """Whether other solutions were made from it [N]."""
        return self.groups == self.group_names.index(ORIGINAL) if ORIGINAL in self.group_names else self.groups < 0

    @property
    def is_first_error_known(self) -> np.ndarray:
        """[N]."""
        return self.first_errors != _NOT_KNOWN

    @property
    def is_judged(self) -> np.ndarray:
        """Whether a step of it has a label [N]."""
        num = np.concatenate([[0], np.cumsum(~np.isnan(self.labels))])
        found: np.ndarray = np.diff(num[self.starts]) > 0
        return found

    @property
    def indices(self) -> np.ndarray:
        """The index of every step in its solution, from 0 [S]."""
        sizes = np.diff(self.starts)
        return np.arange(len(self.scores)) - np.repeat(self.starts[:-1], sizes)

    def part(self, kept: np.ndarray) -> "JudgedScores":
        """Return the solutions where `kept` [N] is true."""
        sizes = np.diff(self.starts)
        steps = np.repeat(kept, sizes)
        own = {name: getattr(self, name)[kept]
               for name in ("places", "problems", "is_tuning", "groups", "first_errors", "pairs", "sides")}  # fmt: skip
        starts = np.concatenate([[0], np.cumsum(sizes[kept])])
        return replace(self, **own, starts=starts, scores=self.scores[steps], labels=self.labels[steps])

    def __iter__(self) -> Iterator[ScoredSolution]:
        for number, first in enumerate(self.first_errors.tolist()):
            own = slice(self.starts[number], self.starts[number + 1])
            labels = [None if label != label else label for label in self.labels[own].tolist()]
            yield ScoredSolution(labels, None if first == _NOT_KNOWN else first, self.scores[own].tolist())


@dataclass
class Taken:
    """Takes in solutions in file order. `tune_share`: of the problems, by hash, those that thresholds are chosen on."""

    tune_share: float
    _groups: dict[str, int] = field(default_factory=dict)
    _columns: dict[str, "array[Any]"] = field(default_factory=lambda: {
        "places": array("q"), "problems": array("q"), "is_tuning": array("b"), "groups": array("i"),
        "first_errors": array("i"), "pairs": array("q"), "sides": array("b")})  # fmt: skip
    _starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    _scores: "array[float]" = field(default_factory=lambda: array("d"))
    _labels: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, place: int, row: AnnotatedSolution, scores: Sequence[float]) -> None:
        """Take in a solution that stands at this place of its file, and the score of each of its steps."""
        group = self._groups.setdefault(str(row.info.get("group", "")), len(self._groups))
        has_pair = "pair" in row.info
        values = {
            "places": place,
            "problems": hash_of(row.problem_id),
            "is_tuning": is_held_out(row.problem_id, self.tune_share),
            "groups": group,
            "first_errors": _NOT_KNOWN if row.first_error is None else row.first_error,
            "pairs": hash_of(str(row.info["pair"])) if has_pair else 0,
            "sides": bool(row.info.get("is_chosen", False)) if has_pair else -1,
        }
        for name, value in values.items():
            self._columns[name].append(value)
        self._scores.extend(scores)
        self._labels.extend(float("nan") if label is None else label for label in row.labels)
        self._starts.append(len(self._scores))

    def all(self) -> JudgedScores:
        """Return what was taken in."""
        columns = {name: np.asarray(column) for name, column in self._columns.items()}
        columns["is_tuning"] = columns["is_tuning"].astype(bool)
        return JudgedScores(
            **columns, group_names=list(self._groups), starts=np.asarray(self._starts), scores=np.asarray(self._scores),
            labels=np.asarray(self._labels),
        )  # fmt: skip


def gaps_to_originals(scored: JudgedScores, shares: np.ndarray) -> np.ndarray:
    """Return how far the `shares` [N] of solutions and of the originals that they were made from lie apart, and 1; 0
    and 0 for originals and where there is none [N, 2]."""
    originals = np.flatnonzero(scored.is_original & (scored.sides >= 0))
    originals = originals[np.argsort(scored.pairs[originals], kind="stable")]
    found = np.searchsorted(scored.pairs[originals], scored.pairs, side="right") - 1
    gaps = np.zeros((len(scored), 2))
    for row in np.flatnonzero(~scored.is_original & (scored.sides >= 0) & (found >= 0)):
        original = originals[found[row]]
        if scored.pairs[original] == scored.pairs[row]:
            gaps[row] = abs(shares[row] - shares[original]), 1.0
    return gaps
