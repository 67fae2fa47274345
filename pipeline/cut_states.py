"""Trajectory → State: the distinct intermediate states of every trajectory."""

from collections.abc import Iterable
from dataclasses import dataclass

from data.jsonl import read_records
from data.records import State, Trajectory
from pipeline.stage import StageContext
from rewards.monte_carlo import distinct_states


@dataclass(frozen=True)
class CutStates:
    """`first_step` 1 leaves out the prompt state (its value is the mean of the samples that exist).

    The terminal state is never cut: its value is the outcome. States that several trajectories share are
    written once.
    """

    first_step: int = 1

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[State]:
        """States in the order of their trajectories."""
        trajectories = read_records(Trajectory, input_path)
        states = distinct_states(trajectories, self.first_step)
        context.counts["trajectories"] = len(trajectories)
        context.counts["states"] = sum(max(0, len(t.steps) - self.first_step) for t in trajectories)
        context.counts["distinct_states"] = len(states)
        return states
