"""Trajectory → AnswerForecast: the answers and probabilities that responses state, in words that a rule can read.

For responses in free words the same file is written from a chat API's answers (`evaluation/join_forecasts`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.answers.short_answers import normalise
from espalier.data.answers.stated_answers import Forecast, stated_forecast
from espalier.data.forecasts import AnswerForecast
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.pipeline.stage import StageContext


def true_probability(problem: Problem, answer: str | None) -> float | None:
    """Return how probable an answer truly is, where the problem knows (`info["probabilities"]`): 0 for another answer
    and for none; None where it does not."""
    known = problem.info.get("probabilities")
    if known is None:
        return None
    by_answer = {normalise(one): float(share) for one, share in known.items()}
    return by_answer.get(normalise(answer or ""), 0.0)


@dataclass(frozen=True)
class ReadForecasts:
    """Input: trajectories of the task's `split`, which gives levels and true probabilities where it knows them."""

    split: str

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[AnswerForecast]:
        """Yield a forecast a trajectory; one that was cut by its length offers nothing, and is counted.

        Raises BadInput on a trajectory of another problem.
        """
        problems = {problem.id: problem for problem in context.task.problems(self.split)}
        counts = {"cut": 0, "without_answer": 0}
        for row in read_records(Trajectory, input_path):
            if row.problem_id not in problems:
                raise BadInput(f"{input_path}: '{row.id}' is of no problem of the split '{self.split}': set "
                               "stage.split and the task as when it was sampled")  # fmt: skip
            is_whole = row.finish_reason == "stop"
            forecast = stated_forecast(row.response, row.gold) if is_whole else Forecast()
            counts["cut"] += not is_whole
            counts["without_answer"] += is_whole and not forecast.answers
            problem, answer = problems[row.problem_id], forecast.most_confident[0]
            yield AnswerForecast(
                row.id, row.problem_id, list(forecast.answers), list(forecast.probabilities), forecast.gold,
                row.is_correct and answer is not None, str(problem.info.get("level", "")),
                true_probability(problem, answer),
            )  # fmt: skip
        context.counts.update(counts)
