"""Record classes → docs/formats.md: every kind of JSONL line with its fields, their types and what they mean.

    python run_stage.py -cn pages/document_formats output=formats.md      bash scripts/pages.sh writes the page of docs/

The classes are read from the source as text, so nothing is imported: name and docstring of a class, and of each field
its name, type, default and the string under it. A field without such a string means what the field of that name means
in a class above. `PAGE` lists the classes in the order of the page; a test looks for kinds that are missing in it.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from espalier.data.records import BadInput
from espalier.pipeline.pages.tabulate_benchmarks import markdown_table
from espalier.pipeline.stage import StageContext
from espalier.runtime.field_texts import field_texts, type_in_words

# (heading, what stands under it, ((file, its classes), ...))
PAGE = (
    (
        "What stages and samplers pass on",
        "Text and token ids travel together; nothing is tokenised again.",
        (
            ("data/records.py", ("Problem", "Demonstration", "Trajectory", "State", "Completion", "StepValues",
                                 "StepScores")),
            ("data/search_tree.py", ("SearchTree",)),
            ("pipeline/evaluation/evaluation_inputs.py", ("OutcomeScore",)),
            ("data/records.py", ("PreferencePair",)),
        ),
    ),
    (
        "What is read beside these",
        "Files of your own, published ones and those of judges.",
        (
            ("data/records.py", ("AnnotatedSolution",)),
            ("data/examples/token_examples.py", ("WeightedResponse",)),
            ("data/examples/outcome_examples.py", ("JudgedResponse",)),
            ("data/judgements.py", ("PairJudgement", "ResponseRating", "StepJudgement", "Verification")),
            ("data/reader_answers.py", ("WrittenText", "ExtractedAnswers", "AnswerProbability", "AnswerEquivalence")),
            ("data/claims.py", ("ListedClaims", "SourceDocument", "ClaimCheck")),
            ("data/forecasts.py", ("AnswerForecast", "CheckedClaim")),
            ("pipeline/evaluation/grade_answers.py", ("AnswerToGrade",)),
            ("data/ranked_responses.py", ("RankedResponses", "ResponseScores")),
        ),
    ),
    (
        "What is written to be looked at",
        "Of the stages in evaluation/ and problems/, reinforcement learning and `mode=predict`.",
        (
            ("pipeline/evaluation/grade_answers.py", ("GradedAnswer",)),
            ("pipeline/evaluation/evaluate.py", ("Prediction",)),
            ("data/sources.py", ("RejectedRow",)),
            ("data/records.py", ("SampledRollout",)),
            ("data/timeline.py", ("TimelineEvent",)),
            ("data/predictions.py", ("ResponseLogprobs", "PairLogprobs", "StepPredictions", "RewardPrediction",
                                     "PairRewards")),
        ),
    ),
)  # fmt: skip
_INTRODUCTION = """# File formats

Written by `bash scripts/pages.sh` from the record classes. A `.jsonl` file holds one JSON object a line, all of one
kind. Reading checks each line and names file, line and field of what is wrong. A field with a default may be left out.
How ids are made and how files are written: [architecture](architecture.md#files).
"""
_DEFAULTS = {"None": "null", "''": '""', "False": "false", "True": "true"}
_DEFAULTS |= {"field(default_factory=list)": "[]", "field(default_factory=dict)": "{}"}


@dataclass(frozen=True)
class Field:
    """A field of a kind: `default` is "" where the field must be there."""

    name: str
    type: str
    default: str
    meaning: str


def fields_of(kind: ast.ClassDef) -> Iterator[Field]:
    """Return the fields of a dataclass in order; the meaning is the string under a field, "" without one."""
    for field in field_texts(kind):
        default = "" if field.default is None else ast.unparse(field.default).removeprefix("dataclasses.")
        yield Field(field.name, type_in_words(field.annotation), _DEFAULTS.get(default, default), field.meaning)


@dataclass(frozen=True)
class DocumentFormats:
    """`root`: the folder that holds data/ and pipeline/."""

    root: str

    def inputs(self) -> list[str]:
        """Return the sources of the kinds."""
        return sorted({str(Path(self.root) / path) for _, _, parts in PAGE for path, _ in parts})

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page. Raises BadInput where a class is gone, or a field has no meaning."""
        known: dict[str, str] = {}
        parts = [_INTRODUCTION]
        for heading, text, sources in PAGE:
            parts.append(f"## {heading}\n\n{text}\n")
            for path, names in sources:
                kinds = {node.name: node for node in ast.parse((Path(self.root) / path).read_text()).body
                         if isinstance(node, ast.ClassDef)}  # fmt: skip
                for name in names:
                    if name not in kinds:
                        raise BadInput(f"{path} has no class {name}: put its new place into {__name__}.PAGE")
                    parts.append(record_section(kinds[name], path, known))
                    context.counts["kinds"] = context.counts.get("kinds", 0) + 1
        return "\n".join(parts)


def record_section(kind: ast.ClassDef, path: str, known: dict[str, str]) -> str:
    """Write the part of the page on one kind; `known` are the meanings of the fields so far, added to.

    Raises BadInput where a field has no meaning.
    """
    rows = []
    for field in fields_of(kind):
        meaning = field.meaning or known.get(field.name, "")
        if not meaning:
            raise BadInput(f"{path}: {kind.name}.{field.name} has no text under it: say what it means")
        known.setdefault(field.name, meaning)
        default = f"`{field.default}`" if field.default else "must be there"
        rows.append((f"`{field.name}`", field.type, default, meaning))
    text = inspect.cleandoc(ast.get_docstring(kind) or "")
    return f"### {kind.name}\n\n{text} (`{path}`)\n\n{markdown_table(('field', 'type', 'default', 'meaning'), rows)}"
