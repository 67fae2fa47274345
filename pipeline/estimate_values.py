"""Completion → StepValues: the Monte-Carlo value after every step of every trajectory."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.pipeline.stage import StageContext
from espalier.values.monte_carlo import Count, StateKey, count_completions, passes_through, state_key, step_values

log = logging.getLogger("stage")


@dataclass(frozen=True)
class EstimateValues:
    """`trajectories` and the `states` cut from them; the input is the states' completions.

    A state whose completions failed (`data.failed_rows` beside the input) has no value, which is not 0: the
    trajectories that pass through it are left out and counted.
    """

    trajectories: str
    states: str

    def inputs(self) -> list[str]:
        """Both files."""
        return [self.trajectories, self.states]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepValues]:
        """One record a trajectory."""
        answered = read_records(Completion, input_path)
        states, failed = read_records(State, self.states), read_failed(input_path)
        counts = count_completions(states, answered, failed)
        trajectories = read_records(Trajectory, self.trajectories)
        kept = self._kept(trajectories, states, counts, context)
        rows = [step_values(trajectory, counts) for trajectory in kept]
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

    def _kept(
        self,
        trajectories: list[Trajectory],
        states: list[State],
        counts: dict[StateKey, Count],
        context: StageContext,
    ) -> list[Trajectory]:
        """The trajectories but those through a state that was cut and has no completions. Raises BadInput where none
        is left."""
        keys = {state_key(state.problem_id, state.prefix_ids) for state in states}
        unvalued = keys - counts.keys()
        if not unvalued:
            return trajectories
        kept = [trajectory for trajectory in trajectories if not passes_through(trajectory, unvalued)]
        num_left_out = len(trajectories) - len(kept)
        if not kept:
            raise BadInput(f"{self.trajectories}: every trajectory has a state whose completions failed")
        context.counts.update(states_failed=len(unvalued), trajectories_left_out=num_left_out)
        reason = "pass through a state whose completions failed"
        leave_out(self.trajectories, num_left_out, len(trajectories), "trajectories", reason)
        return kept
