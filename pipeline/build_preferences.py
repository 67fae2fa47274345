"""Scored trajectories → PreferencePair, three ways: by outcome, by process rewards, from a state.

- **outcome**: correct over incorrect, nothing else known; pairs are drawn by a seeded shuffle.
- **process** (Jiao et al. 2024): trajectories ranked by their aggregated step scores. The best correct ones
  over the highest-scored incorrect ones, and over correct ones whose score is lower by more than `margin`
  (a right answer reached by wrong steps).
- **step**: two next steps from one shared state whose values differ by more than `margin`; the prompt ends
  mid-solution, chosen and rejected are one step each (Lai et al. 2024).

Scores and values are joined by trajectory id, never by text. Trajectories with the same tokens are one.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from data.jsonl import read_records
from data.records import BadInput, PreferencePair, StepScores, StepValues, Trajectory
from data.steps import check_ends
from pipeline.stage import StageContext
from rewards.aggregate import aggregate

log = logging.getLogger("stage")

Scored = tuple[Trajectory, float]


def group_distinct(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Problem id → its trajectories, each distinct token sequence once; cut ones (no end) are left out.

    Raises BadInput for a trajectory without token ids.
    """
    groups: dict[str, dict[tuple[int, ...], Trajectory]] = defaultdict(dict)
    for trajectory in trajectories:
        if trajectory.finish_reason == "stop" and trajectory.steps:
            check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
            groups[trajectory.problem_id].setdefault(tuple(trajectory.response_ids), trajectory)
    return {problem: list(group.values()) for problem, group in groups.items()}


def make_pair(kind: str, chosen: Scored, rejected: Scored) -> PreferencePair:
    """Two whole solutions of one problem."""
    (good, good_score), (bad, bad_score) = chosen, rejected
    return PreferencePair(
        id=f"{good.id}>{bad.id}",
        problem_id=good.problem_id,
        kind=kind,
        prompt=good.prompt,
        chosen=good.response,
        rejected=bad.response,
        prompt_ids=good.prompt_ids,
        chosen_ids=good.response_ids,
        rejected_ids=bad.response_ids,
        chosen_score=good_score,
        rejected_score=bad_score,
    )


def is_clear(gap: float, margin: float) -> bool:
    """Whether a gap is above the margin by more than rounding: 0.9 - 0.6 does not exceed 0.3."""
    return gap > margin + 1e-9


def outcome_pairs(group: list[Trajectory], max_pairs: int, rng: random.Random) -> list[PreferencePair]:
    """Up to `max_pairs` of all correct x incorrect pairs of a problem, drawn without replacement."""
    correct = [t for t in group if t.is_correct]
    wrong = [t for t in group if not t.is_correct]
    everything = [(good, bad) for good in correct for bad in wrong]
    rng.shuffle(everything)
    return [make_pair("outcome", (good, 1.0), (bad, 0.0)) for good, bad in everything[:max_pairs]]


def process_pairs(
    scored: list[Scored], max_chosen: int, max_rejected: int, margin: float, max_pairs: int
) -> list[PreferencePair]:
    """The `max_chosen` best correct over the `max_rejected` hardest incorrect and over worse correct ones."""
    correct = sorted((s for s in scored if s[0].is_correct), key=lambda s: (-s[1], s[0].id))
    wrong = sorted((s for s in scored if not s[0].is_correct), key=lambda s: (-s[1], s[0].id))
    pairs: list[PreferencePair] = []
    for chosen in correct[:max_chosen]:
        pairs += [make_pair("process", chosen, rejected) for rejected in wrong[:max_rejected]]
        worse = [other for other in correct if is_clear(chosen[1] - other[1], margin)]
        pairs += [make_pair("process", chosen, other) for other in worse[:max_rejected]]
    return pairs[:max_pairs] if max_pairs else pairs


def step_pairs(group: list[Trajectory], values: dict[str, list[float]], margin: float) -> list[PreferencePair]:
    """Best against worst next step of every state that two trajectories share and then leave differently."""
    children: dict[tuple[int, ...], dict[tuple[int, ...], tuple[Trajectory, int, float]]] = defaultdict(dict)
    for trajectory in group:
        starts = [0, *trajectory.step_ends[:-1]]
        rows = zip(starts, trajectory.step_ends, values[trajectory.id], strict=True)
        for step, (start, end, value) in enumerate(rows):
            prefix = tuple(trajectory.response_ids[:start])
            children[prefix].setdefault(tuple(trajectory.response_ids[start:end]), (trajectory, step, value))
    pairs = []
    for prefix, options in children.items():
        best = max(options.values(), key=lambda option: (option[2], option[0].id))
        worst = min(options.values(), key=lambda option: (option[2], option[0].id))
        if is_clear(best[2] - worst[2], margin):
            pairs.append(_step_pair(list(prefix), best, worst))
    return pairs


def _step_pair(
    prefix: list[int], best: tuple[Trajectory, int, float], worst: tuple[Trajectory, int, float]
) -> PreferencePair:
    (good, step, good_value), (bad, bad_step, bad_value) = best, worst
    return PreferencePair(
        id=f"{good.id}#{step}>{bad.id}#{bad_step}",
        problem_id=good.problem_id,
        kind="step",
        prompt=good.prompt + "".join(good.steps[:step]),
        chosen=good.steps[step],
        rejected=bad.steps[bad_step],
        prompt_ids=good.prompt_ids + prefix,
        chosen_ids=good.response_ids[len(prefix) : good.step_ends[step]],
        rejected_ids=bad.response_ids[len(prefix) : bad.step_ends[bad_step]],
        chosen_score=good_value,
        rejected_score=bad_value,
    )


def _report(pairs: list[PreferencePair], num_problems: int, context: StageContext) -> list[PreferencePair]:
    used = {pair.problem_id for pair in pairs}
    mean_margin = sum(pair.chosen_score - pair.rejected_score for pair in pairs) / max(len(pairs), 1)
    context.counts.update(problems=num_problems, problems_with_pairs=len(used), mean_margin=round(mean_margin, 4))
    if not pairs:
        log.warning("no pair: no problem has trajectories that differ enough (all right, or all wrong?)")
    return pairs


@dataclass(frozen=True)
class OutcomePreferences:
    """Correct over incorrect; at most `max_pairs` a problem."""

    max_pairs: int
    seed: int = 0

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Pairs in the order of their problems."""
        groups = group_distinct(read_records(Trajectory, input_path))
        pairs: list[PreferencePair] = []
        for problem, group in groups.items():
            pairs += outcome_pairs(group, self.max_pairs, random.Random(f"{self.seed}/{problem}"))
        return _report(pairs, len(groups), context)


@dataclass(frozen=True)
class ProcessPreferences:
    """By aggregated step scores; `max_pairs` a problem, 0 for no cap."""

    scores: str
    how: str
    max_chosen: int
    max_rejected: int
    margin: float
    max_pairs: int = 0

    def inputs(self) -> list[str]:
        """The step scores."""
        return [self.scores]

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Pairs in the order of their problems. Raises BadInput for a trajectory without scores."""
        scores = {row.id: aggregate(row.scores, self.how) for row in read_records(StepScores, self.scores)}
        groups = group_distinct(read_records(Trajectory, input_path))
        pairs: list[PreferencePair] = []
        for group in groups.values():
            missing = [t.id for t in group if t.id not in scores]
            if missing:
                raise BadInput(f"{self.scores}: no scores for trajectory '{missing[0]}': score these trajectories")
            scored = [(t, scores[t.id]) for t in group]
            pairs += process_pairs(scored, self.max_chosen, self.max_rejected, self.margin, self.max_pairs)
        context.counts["over_correct"] = sum(_is_over_correct(pair, groups) for pair in pairs)
        return _report(pairs, len(groups), context)


def _is_over_correct(pair: PreferencePair, groups: dict[str, list[Trajectory]]) -> bool:
    correct = {t.id for t in groups[pair.problem_id] if t.is_correct}
    return pair.id.split(">")[1] in correct


@dataclass(frozen=True)
class StepPreferences:
    """From a shared state, by Monte-Carlo values (`values`, a StepValues file)."""

    values: str
    margin: float

    def inputs(self) -> list[str]:
        """The step values."""
        return [self.values]

    def run(self, input_path: str, context: StageContext) -> list[PreferencePair]:
        """Pairs in the order of their problems."""
        values = {row.id: row.values for row in read_records(StepValues, self.values)}
        groups = group_distinct(read_records(Trajectory, input_path))
        pairs: list[PreferencePair] = []
        for group in groups.values():
            pairs += step_pairs([t for t in group if t.id in values], values, self.margin)
        return _report(pairs, len(groups), context)
