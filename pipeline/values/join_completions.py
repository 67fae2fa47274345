"""Completion → Trajectory: the state's prefix and the completion as one solution, with its steps.

    python run_stage.py -cn values/join_completions task=TASK input=completions.jsonl \\
      output=solutions.jsonl stage.states=states.jsonl stage.policy=MODEL

What was paid for as completions is read like any sampled solution then: scored, inspected, paired, or labelled step by
step (`values/label_by_contrast`). Ids are those of the completions, `{trajectory}#{step}/{k}`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.data.steps import Decoder, check_join
from espalier.data.tasks.task import Task
from espalier.data.token_text import read_response, steps_on_tokens
from espalier.pipeline.stage import StageContext
from espalier.values.monte_carlo import finished


@dataclass(frozen=True)
class JoinCompletions:
    """Steps are split as the task splits a whole response."""

    states: str
    """the file that the completions continue"""
    policy: str
    """the model folder whose tokenizer wrote the tokens"""

    def inputs(self) -> list[str]:
        """Return the states, and the tokenizer where the policy is a folder."""
        path = Path(self.policy) / "tokenizer.json"
        return [self.states, *([str(path)] if path.is_file() else [])]

    def run(self, input_path: str, context: StageContext) -> Iterable[Trajectory]:
        """Return one solution per completion. Raises BadInput without a task, for a completion of no state, and
        where the task's steps are not those of the states."""
        from espalier.models.load import load_tokenizer

        if context.task is None:
            raise BadInput("steps are split as the task splits them: set task=NAME")
        decode = Decoder(load_tokenizer(self.policy))
        states = {state.id: state for state in read_records(State, self.states)}
        solutions, num_inside = [], 0
        for completion in read_records(Completion, input_path):
            if completion.state_id not in states:
                raise BadInput(f"{input_path}: completion '{completion.id}': {self.states} has no state "
                               f"'{completion.state_id}'")  # fmt: skip
            whole = finished(states[completion.state_id], completion)
            solutions.append(with_steps(whole, context.task, decode))
            start = len(states[completion.state_id].prefix_ids)
            num_inside += start > 0 and start not in solutions[-1].step_ends
        if 2 * num_inside > len(solutions):
            raise BadInput(f"{self.states}: {num_inside} of {len(solutions)} completions begin within a step of task "
                           f"{context.task.name}: set task=NAME to the task that split the states' steps")  # fmt: skip
        context.counts["solutions"] = len(solutions)
        context.counts["right"] = sum(solution.is_correct for solution in solutions)
        return solutions


def with_steps(solution: Trajectory, task: Task, decode: Decoder) -> Trajectory:
    """Return the solution with the task's steps, whose borders are token ends."""
    steps = task.split_steps(solution.response)
    check_join(steps, solution.response, solution.id)
    tokens = read_response(solution.prompt_ids, solution.response_ids, decode, solution.response, solution.id)
    steps, ends = steps_on_tokens(steps, tokens)
    return replace(solution, steps=steps, step_ends=ends)
