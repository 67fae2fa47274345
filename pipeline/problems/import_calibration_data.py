"""Published rows of linguistic calibration → Demonstration, JudgedResponse or Problem: what its four models are trained
on, and the requests that the policy answers in reinforcement learning and evaluation.

The rows are those of `tatsu-lab/linguistic_calibration` (CC BY-NC 4.0: not for commercial use, and no part of this
project), exported as JSON lines, JSON or CSV: the configuration `sft_training` for the targets `summary` (linguistic
calibration), `distilled` (the same teacher without confidences) and `first_sample` (factuality);
`reward_model_training` for `extraction`, `forecasting` and `factuality`; for `requests` those that are called
`trivia_qa_`, `jeopardy_`, `sciq_` and `bioasq_paragraph_generation`. The questions of the last four targets come from
the task by `question_id` (`calibration_questions.py`); Jeopardy's rows hold their clue as a direct `question`.

Columns hold lists as the text of a Python list. They are parsed as literals and never evaluated; `nan` is no
probability. Rows with an empty cell, of no known question, with a list that cannot be read, or with unequal lists are
left out, and so are single probabilities outside [0, 1] and a question's requests behind its first: all are counted.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.data.answers.short_answers import golds
from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.reader_prompts import extraction_prompt, factuality_prompt, forecast_prompt, write_answers
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.sources import BadRow, Row, read_json_rows
from espalier.data.tables import read_csv_rows
from espalier.pipeline.problems.calibration_questions import questions_by_id
from espalier.pipeline.stage import StageContext

SFT_COLUMNS = {
    "summary": "claude_summary",
    "distilled": "claude_generated_paragraph",
    "first_sample": "icl_generated_paragraphs",
}
TARGETS = (*SFT_COLUMNS, "extraction", "forecasting", "factuality", "requests")
COUNTED = ("with_null", "malformed", "of_no_known_question", "without_probability")
_NULLS = ("", "none", "null", "nan")
_NAN = re.compile(r"\bnan\b", re.IGNORECASE)


def text_list(value: Any) -> list[str]:
    """Return a list of strings, or the one that a text writes as a Python or JSON literal. Raises BadRow on anything
    else."""
    parsed = _literal(value) if isinstance(value, str) else value
    if not isinstance(parsed, list | tuple) or not all(isinstance(part, str) for part in parsed):
        raise BadRow(f"a list of texts is wanted, got {str(value)[:60]!r}")
    return list(parsed)


def number_list(value: Any) -> list[float | None]:
    """Return a list of numbers, None for what is no probability. Raises BadRow where it is no list of numbers."""
    parsed = _literal(_NAN.sub("None", value)) if isinstance(value, str) else value
    if not isinstance(parsed, list | tuple):
        raise BadRow(f"a list of numbers is wanted, got {str(value)[:60]!r}")
    numbers: list[float | None] = []
    for part in parsed:
        if part is not None and (isinstance(part, bool) or not isinstance(part, int | float)):
            raise BadRow(f"a list of numbers is wanted, got {str(value)[:60]!r}")
        numbers.append(None if part is None or not math.isfinite(part) or not 0 <= part <= 1 else float(part))
    return numbers


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise BadRow(f"not the text of a list: {text[:60]!r}") from None


@dataclass
class ImportCalibrationData:
    """Input: the published rows; `target` is one of `TARGETS`. For the last four the task's `splits` hold the
    questions: TriviaQA's, for `requests` also those of another set."""

    target: str
    splits: Sequence[str] = ("train",)

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise BadInput(f"stage.target must be one of {', '.join(TARGETS)}, got '{self.target}'")

    def inputs(self) -> list[str]:
        """None beside the rows."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterator[Demonstration | JudgedResponse | Problem]:
        """Yield rows in file order. Raises BadInput where none is left."""
        rows = read_csv_rows(input_path) if Path(input_path).suffix == ".csv" else read_json_rows(input_path)
        counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        questions = {} if self.target in SFT_COLUMNS else questions_by_id(context, self.splits)
        num_made = 0
        for row in rows:
            try:
                made = list(self._of_row(row, questions, counts))
            except BadRow:
                counts["malformed"] += 1
                continue
            num_made += len(made)
            yield from made
        context.counts.update(counts)
        if not num_made:
            raise BadInput(f"{input_path}: none of {len(rows)} rows gives '{self.target}' examples ({dict(counts)}): "
                           "is it the configuration that the stage names, and do the task and stage.splits hold its "
                           "questions?")  # fmt: skip

    def _of_row(
        self, row: Row, questions: dict[str, Problem], counts: Counter[str]
    ) -> Iterator[Demonstration | JudgedResponse | Problem]:
        if row.error:
            raise BadRow(row.error)
        columns = self._columns()
        missing = [name for name in columns if name not in row.fields]
        if missing:
            raise BadRow(f"there is no column {missing[0]}")
        if any(str(row.fields[name]).strip().lower() in _NULLS for name in columns):
            counts["with_null"] += 1
            return
        identity = str(row.fields["question_id"])
        if self.target in SFT_COLUMNS:
            value = row.fields[SFT_COLUMNS[self.target]]
            texts = text_list(value) if self.target == "first_sample" else [row.text(SFT_COLUMNS[self.target])]
            if not texts or not (completion := texts[0]).strip():
                raise BadRow("there is no text to imitate")
            yield Demonstration(identity, row.text("paragraph_generation_prompt") + "\n", completion.strip())
            return
        if identity not in questions:
            counts["of_no_known_question"] += 1
            return
        if self.target == "requests":
            yield _request(row, questions.pop(identity))
            return
        yield from self._read_by(row, identity, questions[identity].question, counts)

    def _columns(self) -> tuple[str, ...]:
        if self.target in SFT_COLUMNS:
            return ("question_id", "paragraph_generation_prompt", SFT_COLUMNS[self.target])
        if self.target == "requests":
            return ("question_id", "paragraph_generation_prompt")
        if self.target == "factuality":
            return ("question_id", "factuality_sft_generated_paragraph", "factuality_sft_binary_correctness")
        lists = ("lc_sft_ground_truth_and_extracted_answers", "lc_sft_forecasted_probs")
        return ("question_id", "lc_sft_generated_paragraph", *lists[: 1 + (self.target == "forecasting")])

    def _read_by(
        self, row: Row, identity: str, question: str, counts: Counter[str]
    ) -> Iterator[Demonstration | JudgedResponse]:
        if self.target == "factuality":
            paragraph = row.text("factuality_sft_generated_paragraph")
            label = str(row.fields["factuality_sft_binary_correctness"]).strip().lower()
            if label not in ("0", "1", "0.0", "1.0", "true", "false"):
                raise BadRow(f"correctness must be 0 or 1, got '{label}'")
            is_right = label in ("1", "1.0", "true")
            yield JudgedResponse(identity, identity, factuality_prompt(question), paragraph, is_right)
            return
        paragraph = row.text("lc_sft_generated_paragraph")
        answers = text_list(row.fields["lc_sft_ground_truth_and_extracted_answers"])  # the first is the gold
        if not answers:
            raise BadRow("the list of answers lacks the gold")
        if self.target == "extraction":
            yield Demonstration(identity, extraction_prompt(question, paragraph), write_answers(answers[1:]))
            return
        probabilities = number_list(row.fields["lc_sft_forecasted_probs"])
        if len(probabilities) != len(answers):
            raise BadRow(f"{len(answers)} answers and {len(probabilities)} probabilities")
        prompt = forecast_prompt(question, paragraph)
        for place, (answer, probability) in enumerate(zip(answers, probabilities, strict=True)):
            if probability is None or not answer.strip():
                counts["without_probability"] += 1
                continue
            yield JudgedResponse(f"{identity}/{place}", identity, prompt, answer.strip(), probability)


def _request(row: Row, problem: Problem) -> Problem:
    """Return the problem with the published request as its question, as `problems/use_requests` does with written ones.
    Raises BadRow where it has no answer."""
    if not golds(problem.gold):
        raise BadRow(f"the problem '{problem.id}' has no answer")
    info: dict[str, Any] = {**problem.info, "question": row.text("question", default="") or problem.question}
    return replace(problem, question=row.text("paragraph_generation_prompt"), info=info)
