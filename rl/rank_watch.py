"""How often what scores rollouts ranks a right one above a wrong one of the same problem, and a line once that is no
better than chance: for rewards that claim to know what is right, where a grader knows it."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from espalier.rewards.score import PROCESS, VERIFIER
from espalier.rl.types import RolloutGroup

log = logging.getLogger(__name__)
_WATCHED = 5  # iterations
_FEWEST = 30  # problems with right and wrong rollouts


def _warning(who_ranked: str, remedy: str) -> str:
    return (
        who_ranked + " {share:.0f} % of pairs of a right and a wrong rollout of one problem rightly over {num} "
        "iterations, no better than chance: the policy is led away from right answers; " + remedy
    )


_OF_REWARDS = {
    VERIFIER: _warning("the verifier of the reward ranked", "train the verifier on rollouts of this policy, let it "
                       "give more verdicts per solution, or take another one"),
    PROCESS: _warning("the process reward model of the reward ranked", "train it again on rollouts of this policy, or "
                      "leave it out (reward=outcome)"),
}  # fmt: skip
_METRICS = {VERIFIER: "reward/verifier_pair_accuracy", PROCESS: "reward/process_pair_accuracy"}
_OF_STEPS = _warning("the process reward model, by the lowest score of a rollout's steps, ranked", "train it again on "
                     "rollouts of this policy, or leave it out (advantage=grpo)")  # fmt: skip


def pair_accuracy(scores: Sequence[float], outcomes: Sequence[bool], sizes: Sequence[int]) -> float:
    """Return how often a right rollout scores above a wrong one of the same problem (`sizes`: rollouts of each, in
    their order); a tie counts 1/2, and so does an iteration without such a pair."""
    total = count = 0.0
    for start, end in pairwise(accumulate(sizes, initial=0)):
        own = list(zip(scores[start:end], outcomes[start:end], strict=True))
        right = [score for score, outcome in own if outcome]
        wrong = [score for score, outcome in own if not outcome]
        total += sum((good > bad) + 0.5 * (good == bad) for good in right for bad in wrong)
        count += len(right) * len(wrong)
    return total / count if count else 0.5


class RankWatch:
    """Says once of a fall that, over the newest iterations with pairs to compare, five at least and as many as hold 30
    problems with both kinds, scores of rollouts that nothing was learnt from yet ranked them no better than chance: the
    policy then moves away from right answers, and every other metric may look well. `warning` is what it says, with
    {share} of pairs in percent over {num} iterations."""

    def __init__(self, warning: str) -> None:
        self._warning = warning
        self._seen: deque[tuple[float, int]] = deque()
        self._is_said = False

    def add(self, accuracy: float, outcomes: Sequence[bool], sizes: Sequence[int]) -> bool:
        """Take an iteration's pair accuracy, before its step; return whether something was said."""
        parts = [outcomes[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
        mixed = sum(any(own) and not all(own) for own in parts)
        if not mixed:
            return False
        self._seen.append((accuracy, mixed))
        while len(self._seen) > _WATCHED and sum(count for _, count in self._seen) - self._seen[0][1] >= _FEWEST:
            self._seen.popleft()
        total = sum(count for _, count in self._seen)
        mean = sum(share * count for share, count in self._seen) / total
        if len(self._seen) < _WATCHED or total < _FEWEST or mean > 0.5:
            self._is_said = self._is_said and mean <= 0.55
            return False
        if not self._is_said:
            log.warning(self._warning.format(share=100 * mean, num=len(self._seen)))
        is_new, self._is_said = not self._is_said, True
        return is_new


def _rank_pairs(pairs: Sequence[Sequence[tuple[float, bool]]], watch: RankWatch | None) -> float | None:
    """Return the pair accuracy of one iteration's (score, is it right) by problem, and show it to the watch; None where
    no problem has both kinds."""
    if not any(len({outcome for _, outcome in own}) == 2 for own in pairs):
        return None
    outcomes, sizes = [outcome for own in pairs for _, outcome in own], [len(own) for own in pairs]
    accuracy = pair_accuracy([score for own in pairs for score, _ in own], outcomes, sizes)
    if watch is not None:
        watch.add(accuracy, outcomes, sizes)
    return accuracy


@dataclass
class RewardPartsWatch:
    """Compares what a reward's models say of solutions with the grader: a verdict, the part `VERIFIER` of its scores,
    and where they have the part `PROCESS` what all steps together are paid. Rollouts without it, or whose score was
    replaced because they did not end, are left out; where all are paid alike there is nothing to compare."""

    watches: dict[str, RankWatch] = field(
        default_factory=lambda: {part: RankWatch(warning) for part, warning in _OF_REWARDS.items()}
    )

    def look(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return the metrics of an iteration, of parts with a pair to compare."""
        found = {}
        for part, watch in self.watches.items():
            pairs = [
                [
                    (sum(score.steps) if part == PROCESS else score.parts[part], rollout.trajectory.is_correct)
                    for rollout, score in zip(group.rollouts, group.scores, strict=True)
                    if part in score.parts and score.parts.get("stopped", 1.0) and (score.steps or part != PROCESS)
                ]
                for group in groups
            ]
            if part == PROCESS and len({value for own in pairs for value, _ in own}) < 2:
                continue  # weighted by 0, say
            accuracy = _rank_pairs(pairs, watch)
            if accuracy is not None:
                found[_METRICS[part]] = accuracy
        return found


@dataclass
class StepScoreWatch:
    """Compares the lowest score of a rollout's steps, by an estimator's process reward model, with the grader."""

    watch: RankWatch = field(default_factory=lambda: RankWatch(_OF_STEPS))

    def look(
        self, groups: Sequence[RolloutGroup], scores: Sequence[Sequence[float]], speaks: bool = True
    ) -> dict[str, float]:
        """Return the metric of an iteration, {} where there is no pair to compare; `scores[n]` are those of the steps
        of rollout n. One without steps is left out. `speaks`: whether the policy learns from this estimator."""
        rest = iter(scores)
        pairs = [
            [(min(row), rollout.trajectory.is_correct) for rollout in group.rollouts if (row := next(rest))]
            for group in groups
        ]
        accuracy = _rank_pairs(pairs, self.watch if speaks else None)
        return {} if accuracy is None else {"score_pair_accuracy": accuracy}
