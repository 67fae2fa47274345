"""Completion → StepValues: the Monte-Carlo value after every step of every trajectory."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from data.jsonl import read_records
from data.records import Completion, State, StepValues, Trajectory
from pipeline.stage import StageContext
from rewards.monte_carlo import count_completions, step_values

log = logging.getLogger("stage")


@dataclass(frozen=True)
class EstimateValues:
    """`trajectories` and the `states` cut from them; the input is the states' completions."""

    trajectories: str
    states: str

    def inputs(self) -> list[str]:
        """Both files."""
        return [self.trajectories, self.states]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepValues]:
        """One record a trajectory."""
        answered = read_records(Completion, input_path)
        counts = count_completions(read_records(State, self.states), answered)
        rows = [step_values(t, counts) for t in read_records(Trajectory, self.trajectories)]
        values = [count.value for count in counts.values()]
        completions = sum(count.num_completions for count in counts.values())
        context.counts.update(states=len(values), completions=completions)
        if answered:
            missing = sum(completion.answer is None for completion in answered)
            context.counts["unparseable"] = round(missing / len(answered), 5)
        if values:
            mean = sum(values) / len(values)
            context.counts["mean_value"] = round(mean, 4)
            if mean in (0.0, 1.0):
                log.warning(
                    "every state has the value %g: there is nothing for a process reward model to learn; "
                    "is the policy strong enough for this task, and the answer format right?",
                    mean,
                )
        return rows
