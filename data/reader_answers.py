"""What a chat model wrote or read for linguistic calibration: one record an answer, with what was read from it.

written text         `{problem}/{vote}`
extracted answers    `{trajectory}/{vote}`
answer probability   `{trajectory}~{place}/{vote}`    place `gold`, or that of the answer in the extracted list
answer equivalence   `{trajectory}/{vote}`
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from espalier.data.jsonl import read_records

Probabilities = Mapping[tuple[str, str, bool], float]
"""(trajectory, answer, whether it was asked about as the gold) → its probability."""


@dataclass(frozen=True)
class WrittenText:
    """A text that was asked for: an open-ended request made from a question, or a summary of sampled paragraphs."""

    id: str
    """`{problem}/{vote}`"""
    problem_id: str
    prompt: str
    """what the text belongs to: the question, or the request that the paragraphs answer"""
    text: str | None
    """null where the response ends without it, or was cut"""
    response: str
    """the model's whole answer"""
    finish_reason: str


@dataclass(frozen=True)
class ExtractedAnswers:
    """The answers that a response offers, as a reader lists them."""

    id: str
    """`{trajectory}/{vote}`"""
    trajectory_id: str
    """the response that was read"""
    problem_id: str
    answers: list[str] | None
    """each once, in their order; empty where it offers none; null where the reader gave no list"""
    response: str
    """the reader's answer"""
    finish_reason: str


@dataclass(frozen=True)
class AnswerProbability:
    """How probable a reader takes an answer to be, by a response alone."""

    id: str
    """`{trajectory}~{place}/{vote}`"""
    trajectory_id: str
    problem_id: str
    answer: str
    """the answer that was asked about"""
    is_gold: bool
    """whether it is the gold answer (asked about whether or not the response offers it)"""
    probability: float | None
    """in [0, 1]; null where the reader gave none"""
    response: str
    finish_reason: str


@dataclass(frozen=True)
class AnswerEquivalence:
    """Whether a judge takes an answer and the gold to mean the same."""

    id: str
    """`{trajectory}/{vote}`"""
    trajectory_id: str
    problem_id: str
    answer: str
    """the answer that was compared"""
    is_equivalent: bool | None
    """null where the judge did not say"""
    response: str
    finish_reason: str


def answers_of(path: str) -> dict[str, list[str]]:
    """Return trajectory → the answers of its first vote with a list, from a file of ExtractedAnswers."""
    found: dict[str, list[str]] = {}
    for row in read_records(ExtractedAnswers, path):
        if row.answers is not None:
            found.setdefault(row.trajectory_id, row.answers)
    return found


def probabilities_of(path: str) -> Probabilities:
    """Return the mean over votes of every probability in a file of AnswerProbability."""
    votes: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for row in read_records(AnswerProbability, path):
        if row.probability is not None:
            votes[row.trajectory_id, row.answer, row.is_gold].append(row.probability)
    return {key: fmean(values) for key, values in votes.items()}


def most_say_yes(votes: Sequence[bool]) -> bool:
    """Return what most votes say; a tie is no."""
    return 2 * sum(votes) > len(votes)


def most_probable(trajectory_id: str, answers: Sequence[str], probabilities: Probabilities) -> str | None:
    """Return the answer with the highest probability, the first of equals; None where none has one."""
    known = [answer for answer in answers if (trajectory_id, answer, False) in probabilities]
    return max(known, key=lambda answer: probabilities[trajectory_id, answer, False], default=None)
