"""Trajectory → StepValues: steps labelled by contrast with the other next steps of the same state (`values.contrast`).

    python run_stage.py -cn values/label_by_contrast input=solutions.jsonl output=step_values.jsonl \\
      stage.trajectories=trajectories.jsonl stage.states=states.jsonl

The input are the completions of `states` as whole solutions (`values/join_completions`); the states are those of right
trajectories (`values/cut_states stage.solutions=right`).
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, State, StepValues, Trajectory
from espalier.data.steps import check_ends
from espalier.pipeline.stage import StageContext
from espalier.values.contrast import Branch, Contrast, contrast_labels, count_behind, prior_of
from espalier.values.first_error import states_on_right_ways
from espalier.values.monte_carlo import Count, StateKey
from espalier.values.step_values import UNKNOWN, counted, step_values

log = logging.getLogger("stage")


@dataclass(frozen=True)
class LabelByContrast:
    """Values are shares of right samples behind a state, where there are any; labels are 1, 0 or none."""

    trajectories: str
    """the trajectories whose states were completed"""
    states: str
    """the states that were completed"""
    drop: float = 0.5
    """a step is wrong that leaves less than this share of the best sibling's value"""
    confidence: float = 0.9
    """how sure a label must be: the posterior probability of that"""
    max_per_step: int = 2
    """solutions kept per next step of a state behind the prompt, the first sampled (0: all): siblings share most of
    their tokens"""
    fewest_labels: int = 50
    """labels of each kind behind the branches below which the stage refuses: there is nothing to learn"""

    def inputs(self) -> list[str]:
        """Return both files."""
        return [self.trajectories, self.states]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepValues]:
        """Return one record per solution that is kept, the trajectories' own first. Raises BadInput where files do not
        belong together, and where there are too few labels of a kind."""
        branches = self._branches(input_path)
        counts = count_behind(branches)
        right = states_on_right_ways([branch.solution for branch in branches])
        rule = Contrast(prior_of(counts.values()), self.drop, self.confidence)
        labels = contrast_labels(branches, counts, right, rule)
        num_right = sum(row.is_correct for row in read_records(Trajectory, self.trajectories))
        self._count(branches, labels, num_right, context)
        kept = _first_of_each_step(branches, self.max_per_step)
        context.counts["kept"] = len(kept)
        return [_record(branches[place], labels[place], counts) for place in kept]

    def _branches(self, input_path: str) -> list[Branch]:
        trajectories, solutions = read_records(Trajectory, self.trajectories), read_records(Trajectory, input_path)
        starts = {state.id: state for state in read_records(State, self.states)}
        branches = [Branch(trajectory, 0) for trajectory in trajectories]
        for solution in solutions:
            state = solution.id.rpartition("/")[0]
            start = starts.get(state, starts.get(state.rpartition("@")[0]))
            if start is None or solution.response_ids[: len(start.prefix_ids)] != start.prefix_ids:
                raise BadInput(f"{input_path}: solution '{solution.id}' continues no state of {self.states}: join the "
                               "completions of these states (values/join_completions)")  # fmt: skip
            branches.append(Branch(solution, len(start.prefix_ids)))
        for branch in branches:
            check_ends(branch.solution.steps, branch.solution.step_ends, branch.solution.id)
        return branches

    def _count(
        self,
        branches: Sequence[Branch],
        labels: Sequence[Sequence[float | None]],
        num_right: int,
        context: StageContext,
    ) -> None:
        """Put into the counts what the labels are of, and refuse too few of them."""
        numbers: dict[float | None, int] = defaultdict(int)
        for branch, row in zip(branches, labels, strict=True):
            for end, label in zip(branch.solution.step_ends[:-1], row, strict=False):
                if end > branch.start:
                    numbers[label] += 1
        context.counts.update(
            solutions=len(branches), right_trajectories=num_right, steps_wrong=numbers[0.0], steps_right=numbers[1.0],
            steps_unlabelled=numbers[None],
        )  # fmt: skip
        log.info(
            "%d right trajectories; steps behind the branches: %d right, %d wrong, %d without a label",
            num_right, numbers[1.0], numbers[0.0], numbers[None],
        )  # fmt: skip
        if min(numbers[0.0], numbers[1.0]) < self.fewest_labels:
            raise BadInput(f"{self.trajectories}: {num_right} right trajectories gave labels of {numbers[1.0]} right "
                           f"and {numbers[0.0]} wrong steps, below stage.fewest_labels={self.fewest_labels}: sample "
                           "more problems or more completions per state, or train the policy first")  # fmt: skip


def _first_of_each_step(branches: Sequence[Branch], limit: int) -> list[int]:
    """Return the places of the first `limit` solutions (0: all) of every next step of every state."""
    taken: dict[StateKey, int] = defaultdict(int)
    kept = []
    for place, branch in enumerate(branches):
        end = branch.first_end
        if end is None:
            continue
        taken[branch.key(end)] += 1
        if not limit or taken[branch.key(end)] <= limit or not branch.start:
            kept.append(place)
    return kept


def _record(branch: Branch, labels: list[float | None], counts: dict[StateKey, Count]) -> StepValues:
    """Return the values that samples behind the branch's state give, and the labels."""
    solution = branch.solution
    inner = [
        counted(counts[branch.key(end)]) if branch.key(end) in counts else UNKNOWN for end in solution.step_ends[:-1]
    ]
    weights = [float(label is not None) for label in labels]
    return replace(step_values(solution, inner), labels=labels, weights=weights)
