"""Completion → Trajectory: the state's prefix and the completion as one solution, with its steps.

    python run_stage.py -cn values/join_completions task=TASK input=completions.jsonl \\
      output=solutions.jsonl stage.states=states.jsonl stage.policy=MODEL

What was paid for as completions is read like any sampled solution then: scored, inspected, paired, or labelled step by
step (`values/label_by_contrast`). Ids are those of the completions, `{trajectory}#{step}/{k}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.data.row_index import ProblemRows
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

    def run(self, input_path: str, context: StageContext) -> Iterator[Trajectory]:
        """Yield one solution per completion, in their order. Raises BadInput without a task, for a completion of no
        state, and where the task's steps are not those of the states."""
        from espalier.models.load import load_tokenizer

        if context.task is None:
            raise BadInput("steps are split as the task splits them: set task=NAME")
        decode = Decoder(load_tokenizer(self.policy))
        with ProblemRows(context.output) as rows:
            rows.add(Completion, input_path)
            rows.add(State, self.states)
            yield from rows.in_file_order(self._placed(rows, input_path, context, decode))

    def _placed(
        self, rows: ProblemRows, input_path: str, context: StageContext, decode: Decoder
    ) -> Iterator[tuple[int, Trajectory]]:
        """Yield (place of the completion, solution), problem by problem; then check what they were joined to."""
        num_solutions = num_right = num_inside = 0
        for problem in rows.problems():
            states = {state.id: state for state in rows.rows(1, problem)}
            for place, completion in zip(rows.places(0, problem), rows.rows(0, problem), strict=True):
                state = states.get(completion.state_id)
                if state is None:
                    raise BadInput(f"{input_path}: completion '{completion.id}': {self.states} has no state "
                                   f"'{completion.state_id}'")  # fmt: skip
                solution = with_steps(finished(state, completion), context.task, decode)
                start = len(state.prefix_ids)
                num_inside += start > 0 and start not in solution.step_ends
                num_solutions, num_right = num_solutions + 1, num_right + solution.is_correct
                yield place, solution
        if 2 * num_inside > num_solutions:
            raise BadInput(f"{self.states}: {num_inside} of {num_solutions} completions begin within a step of task "
                           f"{context.task.name}: set task=NAME to the task that split the states' steps")  # fmt: skip
        context.counts.update(solutions=num_solutions, right=num_right)


def with_steps(solution: Trajectory, task: Task, decode: Decoder) -> Trajectory:
    """Return the solution with the task's steps, whose borders are token ends."""
    steps = task.split_steps(solution.response)
    check_join(steps, solution.response, solution.id)
    tokens = read_response(solution.prompt_ids, solution.response_ids, decode, solution.response, solution.id)
    steps, ends = steps_on_tokens(steps, tokens)
    return replace(solution, steps=steps, step_ends=ends)
