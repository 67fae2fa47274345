"""A reward that language models elsewhere write about solutions: K verdicts each, by engines of its own, a server that
runs, or a chat API (`sampling.asking`).

How they are asked and read is a `Form`: `rewards.verifier_rationales` (a generative verifier) or `rewards.judge_scores`
(an LLM as judge). The reward of a solution is the mean over its verdicts, in [0, 1].

**A verdict that cannot be read is missing**: neither 0 nor anything else. A solution without any gets the mean of the
other solutions of its problem (a completion that of its state's), which say nothing for or against it in a group, or
1/2 where none has a verdict; how many do is in the metrics. A verifier that stays without verdicts ends the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from espalier.data.asked_texts import Asks
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.models.verdict_probs import warn_of_mass
from espalier.rewards.score import VERIFIER, ChecksProblems, Score, ScoreRange

UNKNOWN = 0.5
_SILENT = 64  # solutions in a row


@dataclass(frozen=True)
class Votes:
    """The verdicts of one solution that could be read, in [0, 1] each, of `num_asked` (0: one was given unasked);
    `mass`: of each, how likely the model was to give any verdict there, where that is known; `is_refused`: it could not
    be asked; `has_own_verdict`: the solution itself speaks of one; `steps`: the score in [0, 1] after each step, where
    verdicts are per step and one of `known` is there."""

    known: list[float]
    num_asked: int
    mass: list[float]
    is_refused: bool = False
    has_own_verdict: bool = False
    steps: list[float] = field(default_factory=list)


class Form(Protocol):
    """How a model is asked about solutions."""

    def votes(self, trajectories: Sequence[Trajectory], asks: Asks) -> list[Votes]:
        """Open `asks` where it is not, and return the verdicts of each solution in order."""


class WrittenVerdictReward:
    """Args: the `form`, and who is asked (`asking`), opened by the first call.

    Parts of a score: `verifier` (the mean verdict, where there is one), `verdict_mass`, and shares: `without_verdict`
    (of the verdicts asked for), `without_score` (solutions), `refused` (solutions that could not be asked about),
    `verdict_in_answer` (solutions that speak of a verdict themselves).
    """

    def __init__(self, form: Form, asking: Asks):
        self.form, self.asking = form, asking
        self._num_silent = 0
        self._masses: list[float] = []  # of the first verdicts, as far as they are known

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return a share."""
        return ScoreRange((0.0, 1.0))

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Ask the form."""
        if isinstance(self.form, ChecksProblems):
            self.form.check_problems(problems)

    @property
    def has_engines(self) -> bool:
        """Whoever writes verdicts is asked."""
        return True

    def close(self) -> None:
        """End what was started."""
        self.asking.close()

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score a trajectory. Warns once where the model gives few of its first verdicts any probability.
        Raises what is asked raises, and BadInput where no verdict can be read of many solutions in a row."""
        votes = self.form.votes(trajectories, self.asking)
        self._watch(votes)
        return self._scores(trajectories, votes)

    def _scores(self, trajectories: Sequence[Trajectory], votes: Sequence[Votes]) -> list[Score]:
        means = [mean_verdict(one) for one in votes]
        filled = filled_in(means, [_asked_together(row) for row in trajectories])
        return [Score(value, parts=verdict_parts(one)) for value, one in zip(filled, votes, strict=True)]

    def _watch(self, votes: Sequence[Votes]) -> None:
        if len(self._masses) < _SILENT:
            self._masses += [mass for one in votes for mass in one.mass]
            if len(self._masses) >= _SILENT:
                warn_of_mass(self._masses, "the verifier of the reward")
        for one in (row for row in votes if row.num_asked):
            self._num_silent = 0 if one.known else self._num_silent + 1
            if self._num_silent >= _SILENT:
                raise BadInput(f"none of the last {_SILENT} solutions got a verdict that can be read: ask the model as "
                               "it was trained to be asked, give it more asking.params.max_tokens, or take another "
                               "one")  # fmt: skip


def _asked_together(row: Trajectory) -> str:
    """Name those that a missing score is filled in from: solutions of one problem, or completions of one state
    (`values.monte_carlo.OfState`), whose mean is that state's value."""
    return str(getattr(row, "state_id", row.problem_id))


def filled_in(values: Sequence[float | None], groups: Sequence[str]) -> list[float]:
    """Return the values, each that is missing as the mean of those of its group, exactly theirs where they are equal;
    UNKNOWN where it has none."""
    known: dict[str, list[float]] = {name: [] for name in groups}
    for value, name in zip(values, groups, strict=True):
        if value is not None:
            known[name].append(value)
    means = {name: mean_or_unknown(own) for name, own in known.items()}
    return [means[name] if value is None else value for value, name in zip(values, groups, strict=True)]


def mean_or_unknown(values: Sequence[float]) -> float:
    """Return the mean, exactly the value that all have where they agree; UNKNOWN of none."""
    return min(max(fmean(values), min(values)), max(values)) if values else UNKNOWN


def mean_verdict(votes: Votes) -> float | None:
    """Return the mean over the verdicts of a solution; None where none could be read."""
    return fmean(votes.known) if votes.known else None


def verdict_parts(votes: Votes) -> dict[str, float]:
    """Return the parts of a solution's score (`WrittenVerdictReward`)."""
    mean = mean_verdict(votes)
    asked = {"without_verdict": 1 - len(votes.known) / votes.num_asked} if votes.num_asked else {}
    shares = {
        "without_score": float(mean is None),
        "refused": float(votes.is_refused),
        "verdict_in_answer": float(votes.has_own_verdict),
    }
    known = {} if mean is None else {VERIFIER: mean}
    return {**known, **({"verdict_mass": fmean(votes.mass)} if votes.mass else {}), **asked, **shares}
