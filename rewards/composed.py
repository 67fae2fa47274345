"""Several rewards as one. The order is fixed, and each step sees the result of the one before:

1. every term scores every trajectory;
2. the score is the sum over terms of weight times the term's outcome, and at every step end of weight times the
   term's process reward;
3. the outcome is clipped to at most `limit` away from 0, where `limit` is above 0;
4. `non_stop_reward`, where there is one, *replaces* the score of a response that did not end by itself, or with fewer
   than `min_tokens` tokens: its outcome is exactly that number and its process rewards are 0, whatever the terms said.
   The part `stopped` is 1 for all others.

The KL penalty of `kl.place=reward` comes last and is the trainer's (`rl.experience.token_rewards`): it is no part
of a score.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.rewards.score import (
    ChecksProblems,
    HoldsEngines,
    HoldsModels,
    Interval,
    ReadsTexts,
    Reward,
    Score,
    ScoreRange,
    asks_engines,
    clipped,
    hull,
    one_for_each,
)


def compose(scores: Mapping[str, Score], weights: Mapping[str, float], limit: float = 0.0) -> Score:
    """Return steps 2 and 3 for one trajectory; a part, or an answer, that several terms have keeps its name for the
    first of them, and has the term's before it for the others. Raises ValueError where two terms have step rewards for
    other steps."""
    outcome = sum(weights[name] * score.outcome for name, score in scores.items())
    numbers = {len(score.steps) for score in scores.values()} - {0}
    if len(numbers) > 1:
        raise ValueError(f"process rewards of {' and '.join(map(str, sorted(numbers)))} steps for one trajectory")
    steps = [0.0] * (numbers.pop() if numbers else 0)
    for name, score in scores.items():
        for index, value in enumerate(score.steps):
            steps[index] += weights[name] * value
    if limit > 0:
        outcome = min(max(outcome, -limit), limit)
    parts = _named({name: score.parts for name, score in scores.items()})
    return Score(outcome, steps, parts, _named({name: score.answers for name, score in scores.items()}))


def _named(columns: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of all terms, the first of a name under it and later ones behind their term's."""
    found: dict[str, float] = {}
    for term, numbers in columns.items():
        for name, value in numbers.items():
            found[f"{term}_{name}" if name in found else name] = value
    return found


def compose_ranges(
    ranges: Mapping[str, ScoreRange], weights: Mapping[str, float], limit: float, non_stop_reward: float | None
) -> ScoreRange:
    """Return the range of scores that are put together as the module says."""
    outcome = clipped(_weighted({name: bounds.outcome for name, bounds in ranges.items()}, weights), limit)
    steps = {name: bounds.to_come for name, bounds in ranges.items() if bounds.to_come is not None}
    to_come = _weighted(steps, weights) if steps else None
    if non_stop_reward is not None:
        outcome = hull(outcome, (non_stop_reward, non_stop_reward))
        to_come = None if to_come is None else hull(to_come, (0.0, 0.0))
    return ScoreRange(outcome, to_come)


def _weighted(intervals: Mapping[str, Interval], weights: Mapping[str, float]) -> Interval:
    """Of the sum of weight times number; a weight of 0 leaves nothing of any number."""
    scaled = [
        sorted(weights[name] * bound if weights[name] else 0.0 for bound in pair) for name, pair in intervals.items()
    ]
    return sum(low for low, _ in scaled), sum(high for _, high in scaled)


def _whole_weights(terms: Iterable[str], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return a weight of every term: 1 where none is given."""
    return {name: float((weights or {}).get(name, 1.0)) for name in terms}


class ComposedReward:
    """`terms` by name; `weights` by the same names, 1 where a name has none. `non_stop_reward` null replaces nothing;
    `min_tokens` counts the end token.

    Raises BadInput where there is no term, or a weight of no term, or a `min_tokens` that nothing reads.
    """

    def __init__(
        self,
        terms: Mapping[str, Reward],
        weights: Mapping[str, float] | None = None,
        limit: float = 0.0,
        non_stop_reward: float | None = None,
        min_tokens: int = 0,
    ):
        strange = [name for name in weights or {} if name not in terms]
        if not terms or strange:
            what = f"reward.weights.{strange[0]} has no term" if strange else "a composed reward has no terms"
            raise BadInput(f"{what}: name it under reward.terms")
        if min_tokens and non_stop_reward is None:
            raise BadInput(f"reward.min_tokens={min_tokens} is read beside reward.non_stop_reward alone: set one")
        self.terms = dict(terms)
        self.weights = _whole_weights(self.terms, weights)
        self.limit, self.non_stop_reward, self.min_tokens = limit, non_stop_reward, min_tokens

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange | None:
        """From those of its terms, where each is known."""
        ranges: Mapping[str, ScoreRange | None] = settings["terms"]
        known = {name: bounds for name, bounds in ranges.items() if bounds is not None}
        if len(known) < len(ranges):
            return None
        weights = _whole_weights(known, settings["weights"])
        return compose_ranges(known, weights, settings["limit"], settings["non_stop_reward"])

    @property
    def has_readers(self) -> bool:
        """Whether a term has."""
        return any(isinstance(term, ReadsTexts) and term.has_readers for term in self.terms.values())

    def to(self, device: torch.device) -> None:
        """Move the terms' networks."""
        for term in self._with_models():
            term.to(device)

    def networks(self) -> dict[str, Any]:
        """Return all of them; a second one of a name is named by its term too."""
        found: dict[str, Any] = {}
        for term_name, term in self.terms.items():
            for name, model in term.networks().items() if isinstance(term, HoldsModels) else ():
                found[f"{name} ({term_name})" if name in found else name] = model
        return found

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Ask the terms."""
        for term in self.terms.values():
            if isinstance(term, ChecksProblems):
                term.check_problems(problems)

    @property
    def has_engines(self) -> bool:
        """Whether a term asks some."""
        return any(map(asks_engines, self.terms.values()))

    def close(self) -> None:
        """End the terms' engines."""
        for term in self.terms.values():
            if isinstance(term, HoldsEngines):
                term.close()

    def _with_models(self) -> list[Any]:
        return [term for term in self.terms.values() if isinstance(term, HoldsModels)]

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """See the module."""
        columns = {name: one_for_each(term, trajectories) for name, term in self.terms.items()}
        scores = []
        for index, trajectory in enumerate(trajectories):
            score = compose({name: column[index] for name, column in columns.items()}, self.weights, self.limit)
            if self.non_stop_reward is not None:
                has_stopped = trajectory.finish_reason == "stop" and len(trajectory.response_ids) >= self.min_tokens
                score = replace(score, parts={**score.parts, "stopped": float(has_stopped)})
                if not has_stopped:
                    score = replace(score, outcome=self.non_stop_reward, steps=[0.0] * len(score.steps))
            scores.append(score)
        return scores
