"""Paragraphs, and what was read of them → Demonstration or JudgedResponse: what the two models that read for linguistic
calibration (Band et al. 2024, arXiv 2404.00474) learn on questions of one's own.

`source` says who read the paragraphs. "chat": a chat model, by `api/openai/extract_answers` and
`api/openai/forecast_probabilities`. "stated": a rule, which takes the text at its word (`data.answers.stated_answers`);
that is for paragraphs in a form it can read, such as those of `task=qa_world`.

The prompts are those that `reward=linguistic_calibration_models` asks (`data.reader_prompts`, `data.reader_questions`).
The extracting model learns the list; the forecaster each listed answer and the gold (the first of its names), with
their probabilities. Responses that were cut, or that nobody could read, are left out, and so are single answers without
a probability: all are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from espalier.data.answers.short_answers import golds
from espalier.data.answers.stated_answers import stated_forecast
from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.left_out import leave_out
from espalier.data.reader_answers import answers_of, probabilities_of
from espalier.data.reader_prompts import extraction_prompt, forecast_prompt, listed, write_answers
from espalier.data.reader_questions import Questions, question_files
from espalier.data.records import BadInput, Demonstration, Trajectory
from espalier.data.row_index import stream_records
from espalier.pipeline.readings import check_readings
from espalier.pipeline.stage import StageContext

TARGETS = ("extraction", "forecasting")
SOURCES = ("chat", "stated")
COUNTED = ("cut", "not_read", "without_probability")


@dataclass(frozen=True)
class Reading:
    """What was read of a paragraph: the `answers` it offers, in order, the probability of each, None where there is
    none to be had, and that of the `gold`."""

    answers: list[str]
    probabilities: list[float | None]
    gold: float | None


@dataclass(frozen=True)
class MakeReaderData:
    """Input: the paragraphs, as trajectories. `target` is one of `TARGETS`, `source` of `SOURCES`; `problems`: the file
    or folder of `Problem` with their questions, as the reward reads it. Of a chat model `extractions` are the lists,
    and for `forecasting` `probabilities` are those of the answers."""

    target: str
    problems: str
    source: str = "chat"
    extractions: str = ""
    probabilities: str = ""

    def __post_init__(self) -> None:
        for name, value, known in (("target", self.target, TARGETS), ("source", self.source, SOURCES)):
            if value not in known:
                raise BadInput(f"stage.{name} must be {' or '.join(known)}, got '{value}'")
        number = 0 if self.source == "stated" else 1 + TARGETS.index(self.target)
        wanted = dict(list(self._read().items())[:number])
        if {name for name, path in self._read().items() if path} != set(wanted):
            files = " and ".join(f"stage.{name}" for name in wanted) or "neither extractions nor probabilities"
            raise BadInput(f"stage.source={self.source} stage.target={self.target} reads {files}: name just that")

    def _read(self) -> dict[str, str]:
        return {"extractions": self.extractions, "probabilities": self.probabilities}

    def inputs(self) -> list[str]:
        """Return the files of problems, and what the chat model said."""
        return [*map(str, question_files(self.problems)), *filter(None, self._read().values())]

    def run(self, input_path: str, context: StageContext) -> Iterator[Demonstration | JudgedResponse]:
        """Yield examples in file order. Raises BadInput on a paragraph of no known problem, where a forecast's gold is
        missing, where the chat model read other paragraphs, and where no example is left."""
        check_readings(input_path, [*filter(None, self._read().values())])
        questions, read = Questions(self.problems), self._reader()
        counts = Counter(dict.fromkeys(COUNTED, 0))
        num_rows = num_made = 0
        for row in stream_records(Trajectory, input_path, context.output):
            num_rows += 1
            question = questions.of(row.problem_id)
            reading = read(row) if row.finish_reason == "stop" else None
            if reading is None:
                counts["not_read" if row.finish_reason == "stop" else "cut"] += 1
                continue
            if self.target == "extraction":
                num_made += 1
                yield Demonstration(row.id, extraction_prompt(question, row.response), write_answers(reading.answers))
                continue
            for example in _forecasts(row, question, reading, input_path, counts):
                num_made += 1
                yield example
        context.counts.update(counts)
        if not num_made:
            raise BadInput(f"{input_path}: none of {num_rows} paragraphs gives '{self.target}' examples "
                           f"({dict(counts)}): {self._remedy()}")  # fmt: skip
        leave_out(input_path, counts["cut"] + counts["not_read"], num_rows, "paragraphs", "were cut or not read")

    def _remedy(self) -> str:
        if self.source == "stated":
            return "no probabilities are stated in them that a rule can read; stage.source=chat takes a chat model's"
        return f"are {' and '.join(filter(None, self._read().values()))} of these paragraphs?"

    def _reader(self) -> Callable[[Trajectory], Reading | None]:
        """Return what reads a whole paragraph, None where it cannot be read."""
        if self.source == "stated":
            return _stated
        lists = answers_of(self.extractions)
        known = probabilities_of(self.probabilities) if self.probabilities else {}

        def read(row: Trajectory) -> Reading | None:
            if row.id not in lists:
                return None
            answers, names = lists[row.id], golds(row.gold)
            gold = known.get((row.id, names[0], True)) if names else None
            return Reading(answers, [known.get((row.id, answer, False)) for answer in answers], gold)

        return read


def _stated(row: Trajectory) -> Reading | None:
    """Return what the text states; None where that cannot be read."""
    forecast = stated_forecast(row.response, row.gold)
    return Reading(list(forecast.answers), list(forecast.probabilities), forecast.gold) if forecast.answers else None


def _forecasts(
    row: Trajectory, question: str, reading: Reading, path: str, counts: Counter[str]
) -> Iterator[JudgedResponse]:
    """Yield an example an offered answer, and one of the gold, whether or not it is offered."""
    names = golds(row.gold)
    if not names:
        raise BadInput(f"{path}: '{row.id}' has no gold answer: the forecaster learns how probable it is")
    prompt = forecast_prompt(question, row.response)
    offered = [(str(place), listed(answer), probability) for place, (answer, probability)
               in enumerate(zip(reading.answers, reading.probabilities, strict=True))]  # fmt: skip
    for place, answer, probability in [*offered, ("gold", names[0], reading.gold)]:
        if probability is None:
            counts["without_probability"] += 1
            continue
        yield JudgedResponse(f"{row.id}~{place}", row.problem_id, prompt, answer, probability)
