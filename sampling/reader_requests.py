"""A chat model as the reader of paragraphs, for linguistic calibration (Band et al. 2024, arXiv 2404.00474; the
prompts are our own): which answers a response offers, how probable each is by it, and whether an answer means the same
as the gold.

What the reader does not say in the form that was asked for is missing, and never guessed.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from espalier.data.answers.short_answers import golds
from espalier.data.jsonl import read_records
from espalier.data.judge_texts import check_template, fill, last_line_agrees, last_line_says
from espalier.data.reader_answers import (
    AnswerEquivalence,
    AnswerProbability,
    ExtractedAnswers,
    answers_of,
    most_probable,
    probabilities_of,
)
from espalier.data.reader_prompts import read_answers
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.task import Task
from espalier.sampling.client import Sample, SampleRequest
from espalier.sampling.llm_judge import chat_request, read_whole

EXTRACT_PROMPT = """\
Here are a question and a paragraph. Which answers to the question does the paragraph offer? Count also those \
that it calls \
unlikely and those that you know to be wrong; add none of your own.

<question>
{question}
</question>

<paragraph>
{paragraph}
</paragraph>

Think in a few sentences. Then end with one line that begins with "Answers: " and lists them, separated by \
semicolons, or \
that is exactly "Answers: none"."""

FORECAST_PROMPT = """\
Here are a question, a paragraph and a candidate answer. Forget what you know of the subject: how probable is \
it, by the \
paragraph alone, that the candidate answer is right? Where the paragraph states a confidence, take it. Other \
spellings of \
an answer are the same answer. A candidate that the paragraph does not mention has the probability 0.

<question>
{question}
</question>

<paragraph>
{paragraph}
</paragraph>

<candidate_answer>
{answer}
</candidate_answer>

Think in a few sentences. Then end with one line that is exactly "Probability: P", where P is a number from 0 to 1."""

EQUIVALENCE_PROMPT = """\
Here are a question, its right answer and another answer. Is the other answer right too? It is where it means \
the same, in \
other words or spelling, and where it is more specific; it is not where it is less specific.

<question>
{question}
</question>

<right_answer>
{gold}
</right_answer>

<other_answer>
{answer}
</other_answer>

End with one line that is exactly "Same: yes" or "Same: no"."""

_ANSWERS = re.compile(r"Answers: (\S.*)")
_PROBABILITY = re.compile(r"Probability: ([01](?:\.[0-9]+)?|\.[0-9]+)")


def parse_answers(response: str) -> list[str] | None:
    """Return the answers that the last line lists, [] for none; None where it lists nothing."""
    said = last_line_says(_ANSWERS, response)
    if said is None:
        return None
    return [] if said.strip(" .").lower() == "none" else read_answers(said)


def parse_probability(response: str) -> float | None:
    """Return the number of the last line; None where there is none from 0 to 1."""
    said = last_line_says(_PROBABILITY, response)
    return float(said) if said is not None and float(said) <= 1 else None


def parse_same(response: str) -> bool | None:
    """Return what the last line says; None where it says nothing."""
    return last_line_agrees("Same", response)


@dataclass
class ReaderRequests:
    """What all three share: the `trajectories` that are read, and the file of `problems` with their questions
    (`info["question"]` where the policy was asked something else). `template` "" is the built-in one."""

    trajectories: str
    problems: str
    template: str = ""
    _rows: dict[str, tuple[Trajectory, str, bool]] = field(default_factory=dict, init=False, repr=False)
    """request id → (trajectory, answer, whether it is the gold)"""

    def whole(self) -> list[tuple[Trajectory, str]]:
        """Return the trajectories that ended by themselves, each with its question. Raises BadInput where a problem is
        missing, or none is left."""
        asked = {row.id: str(row.info.get("question", row.question)) for row in read_records(Problem, self.problems)}
        rows = [row for row in read_records(Trajectory, self.trajectories) if row.finish_reason == "stop"]
        if lost := [row.problem_id for row in rows if row.problem_id not in asked]:
            raise BadInput(f"{self.problems}: has no problem '{lost[0]}' of {self.trajectories}: name the file that "
                           "the task read")  # fmt: skip
        if not rows:
            raise BadInput(f"{self.trajectories}: no response that ended by itself: nothing to read")
        return [(row, asked[row.problem_id]) for row in rows]

    def inputs(self) -> list[str]:
        """Return both files."""
        return [self.trajectories, self.problems]


@dataclass
class ExtractionRequests(ReaderRequests):
    """Which answers every response offers."""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a response."""
        template = self.template or EXTRACT_PROMPT
        check_template(template, ("question", "paragraph"))
        requests = []
        for row, question in self.whole():
            self._rows[row.id] = (row, "", False)
            parts = {"question": question.strip(), "paragraph": row.response.strip()}
            requests.append(chat_request(row.id, fill(template, parts)))
        return requests

    def records(
        self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]
    ) -> list[ExtractedAnswers]:
        """Return one list a vote."""
        row, _, _ = self._rows[request.id]
        return [
            ExtractedAnswers(
                f"{request.id}/{k}", row.id, row.problem_id,
                read_whole(parse_answers, sample), sample.text, sample.finish_reason,
            )
            for k, sample in enumerate(samples)
        ]  # fmt: skip


@dataclass
class ForecastRequests(ReaderRequests):
    """How probable each extracted answer is, and the gold (the first of its names), by the response alone."""

    extractions: str = ""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request an answer of the responses whose answers are known."""
        template = self.template or FORECAST_PROMPT
        check_template(template, ("question", "paragraph", "answer"))
        lists = answers_of(self.extractions)
        requests = []
        for row, question in self.whole():
            if row.id not in lists:
                continue
            names = golds(row.gold)
            if not names:
                raise BadInput(f"{self.trajectories}: '{row.id}' has no gold answer: a forecast of it is asked for")
            places = [*map(str, range(len(lists[row.id]))), "gold"]
            for place, answer in zip(places, [*lists[row.id], names[0]], strict=True):
                name = f"{row.id}~{place}"
                self._rows[name] = (row, answer, place == "gold")
                parts = {"question": question.strip(), "paragraph": row.response.strip(), "answer": answer}
                requests.append(chat_request(name, fill(template, parts)))
        return requests

    def records(
        self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]
    ) -> list[AnswerProbability]:
        """Return one probability a vote."""
        row, answer, is_gold = self._rows[request.id]
        return [
            AnswerProbability(
                f"{request.id}/{k}", row.id, row.problem_id, answer, is_gold,
                read_whole(parse_probability, sample), sample.text, sample.finish_reason,
            )
            for k, sample in enumerate(samples)
        ]  # fmt: skip

    def inputs(self) -> list[str]:
        """Return all files."""
        return [*super().inputs(), self.extractions]


@dataclass
class EquivalenceRequests(ReaderRequests):
    """Whether the most probable extracted answer means the same as the gold."""

    extractions: str = ""
    probabilities: str = ""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a response that offers an answer."""
        template = self.template or EQUIVALENCE_PROMPT
        check_template(template, ("question", "gold", "answer"))
        lists, known = answers_of(self.extractions), probabilities_of(self.probabilities)
        requests = []
        for row, question in self.whole():
            best = most_probable(row.id, lists.get(row.id, []), known)
            if best is None:
                continue
            self._rows[row.id] = (row, best, False)
            parts = {"question": question.strip(), "gold": " / ".join(golds(row.gold)), "answer": best}
            requests.append(chat_request(row.id, fill(template, parts)))
        return requests

    def records(
        self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]
    ) -> list[AnswerEquivalence]:
        """Return one verdict a vote."""
        row, answer, _ = self._rows[request.id]
        return [
            AnswerEquivalence(
                f"{request.id}/{k}", row.id, row.problem_id, answer,
                read_whole(parse_same, sample), sample.text, sample.finish_reason,
            )
            for k, sample in enumerate(samples)
        ]  # fmt: skip

    def inputs(self) -> list[str]:
        """Return all files."""
        return [*super().inputs(), self.extractions, self.probabilities]
