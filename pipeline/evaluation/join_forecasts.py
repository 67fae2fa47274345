"""What a chat model read → AnswerForecast: extracted answers, their probabilities, and whether the best one is right.

Without `equivalences` the most probable answer is compared with the gold as short answers are. A response that was
cut, or from which the reader extracts nothing, offers no answer. One that the reader did not judge whole (no list, or
a probability or verdict that is missing) is left out, and counted: it is no evidence of anything.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from espalier.data.answers.short_answers import golds, grade_short_answer
from espalier.data.forecasts import AnswerForecast
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.reader_answers import (
    AnswerEquivalence,
    Probabilities,
    answers_of,
    most_probable,
    most_say_yes,
    probabilities_of,
)
from espalier.data.records import BadInput, Trajectory
from espalier.pipeline.readings import check_readings
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class JoinForecasts:
    """Input: the trajectories that were read. `equivalences` "" compares short answers."""

    extractions: str
    probabilities: str
    equivalences: str = ""

    def inputs(self) -> list[str]:
        """Return what the reader said."""
        return [path for path in (self.extractions, self.probabilities, self.equivalences) if path]

    def run(self, input_path: str, context: StageContext) -> Iterator[AnswerForecast]:
        """Yield a forecast a trajectory that was judged whole. Raises BadInput where none was, and where the
        reader read others."""
        check_readings(input_path, self.inputs())
        lists, known = answers_of(self.extractions), probabilities_of(self.probabilities)
        verdicts = _verdicts(self.equivalences) if self.equivalences else None
        rows = read_records(Trajectory, input_path)
        num_left_out = 0
        for row in rows:
            forecast = _joined(row, lists, known, verdicts)
            num_left_out += forecast is None
            if forecast is not None:
                yield forecast
        if num_left_out == len(rows):
            raise BadInput(
                f"{input_path}: no response was read whole: are {', '.join(self.inputs())} of these responses?"
            )
        context.counts["not_read"] = num_left_out
        leave_out(input_path, num_left_out, len(rows), "responses", "were not read whole")


def _verdicts(path: str) -> dict[tuple[str, str], bool]:
    """Return (trajectory, answer) → what most votes say; a tie is no."""
    votes: dict[tuple[str, str], list[bool]] = {}
    for row in read_records(AnswerEquivalence, path):
        if row.is_equivalent is not None:
            votes.setdefault((row.trajectory_id, row.answer), []).append(row.is_equivalent)
    return {key: most_say_yes(said) for key, said in votes.items()}


def _joined(
    row: Trajectory,
    lists: Mapping[str, list[str]],
    known: Probabilities,
    verdicts: Mapping[tuple[str, str], bool] | None,
) -> AnswerForecast | None:
    if row.finish_reason != "stop":
        return AnswerForecast(row.id, row.problem_id, [], [], 0.0, False)
    names = golds(row.gold)
    gold = known.get((row.id, names[0], True)) if names else None
    if row.id not in lists or gold is None:
        return None
    answers = lists[row.id]
    if any((row.id, answer, False) not in known for answer in answers):
        return None
    best = most_probable(row.id, answers, known)
    is_correct: bool | None = False
    if best is not None:
        is_correct = grade_short_answer(best, row.gold).is_correct if verdicts is None else verdicts.get((row.id, best))
    if is_correct is None:
        return None
    probabilities = [known[row.id, answer, False] for answer in answers]
    return AnswerForecast(row.id, row.problem_id, answers, probabilities, gold, is_correct)
