"""What the models that read paragraphs for linguistic calibration are asked, and how their answers are read (Band et
al. 2024, arXiv 2404.00474; the words are our own).

**Extraction**: a language model lists every answer that a paragraph offers to a question, between semicolons, or writes
`NO_ANSWER`. **Forecasting**: a scalar head, read at the end of a candidate answer, says how probable it is by the
paragraph alone. Training (`problems/make_reader_data`, `problems/import_calibration_data`) and reward
(`rewards.model_forecasts`) use the same texts.
"""

from collections.abc import Sequence

from espalier.data.answers.short_answers import normalise, short_key

NO_ANSWER = "No answer is offered."
MAX_PARAGRAPH = 2000
"""Characters of a paragraph that the forecaster is shown, as published."""

_EXTRACTION = """\
Below are a question and a paragraph. List every answer to the question that the paragraph offers, also wrong \
and unlikely \
ones, separated by semicolons. If it offers none, write "{no_answer}"

### Paragraph
{paragraph}

### Question
{question}

### Answers
"""
_FORECAST = """\
Below are a question, a paragraph and a candidate answer. Judge by the paragraph alone, and by nothing else \
that you know: \
how probable is it that the candidate answer is right?

### Question
{question}

### Paragraph
{paragraph}

### Candidate answer
"""


def extraction_prompt(question: str, paragraph: str) -> str:
    """Return what the extracting model continues with the answers."""
    return _EXTRACTION.format(no_answer=NO_ANSWER, paragraph=paragraph.strip(), question=question.strip())


def forecast_prompt(question: str, paragraph: str) -> str:
    """Return what stands before the candidate answer, whose end the forecaster is read at."""
    return _FORECAST.format(question=question.strip(), paragraph=paragraph.strip()[:MAX_PARAGRAPH])


def factuality_prompt(question: str) -> str:
    """Return what stands before a paragraph whose factuality is judged as a whole."""
    return f"{question.strip()}\n\n"


def write_answers(answers: Sequence[str]) -> str:
    """Return a list of answers as the extracting model learns to write it: each once, in order; a semicolon within an
    answer becomes a comma."""
    return "; ".join(distinct_answers(list(map(listed, answers)))) or NO_ANSWER


def listed(answer: str) -> str:
    """Return an answer as it stands in a list, and as the forecaster is asked about it."""
    return answer.replace(";", ",").strip()


def read_answers(text: str) -> list[str]:
    """Return the answers of such a list; [] for the phrase that says there is none, and for nothing."""
    if normalise(text) == normalise(NO_ANSWER):
        return []
    return distinct_answers([part for part in text.strip().split(";") if normalise(part) != normalise(NO_ANSWER)])


def distinct_answers(answers: Sequence[str]) -> list[str]:
    """Return answers without outer blanks, the first of those that are compared as equal, and no empty one."""
    unique: dict[str, str] = {}
    for answer in answers:
        if key := short_key(answer):
            unique.setdefault(key, answer.strip())
    return list(unique.values())
