"""Logical reading with options: LogiQA 2.0 and 1, ReClor, AR-LSAT.

`Problem.context` is the passage, `Problem.options` the options without letters, the gold a letter.

**LogiQA 2.0** (Liu et al. 2023; csitfun/LogiQA2.0): JSON lines in `{train,dev,test}.txt`: `id`, `answer` (0-based),
`text`, `question`, `options` [4], `type` {name: true}. Ids repeat in the published splits. The out-of-domain file
(`ood_test.jsonl`) has no `type`, and its options begin `A.`: the letters go only where every option of a row has
its own, so that an option `B. t. toxins` stays whole.

**LogiQA 1** (Liu et al. 2020; lgw863/LogiQA-dataset): text in `{Train,Eval,Test}.txt`, eight lines per problem: a blank
one, the answer `a`-`d`, the passage, the question, four options. An option line begins with its letter and `.`,
`?` or a blank (`A.A.` is the option `A.`).

**ReClor** (Yu et al. 2020): one JSON array in `{train,val,test}.json`: `context`, `question`, `answers` [4],
`label` (0-based; absent from the test file, whose problems have no gold), `id_string`, `question_type`.

**AR-LSAT** (Zhong et al. 2022; zhongwanjun/AR-LSAT): a JSON array of passages with `questions` [`id`, `question`,
`options` (5, in 45 questions 4), `answer` "A".."E", `tags`], or ReClor's layout with five `answers`, or
Logic-LLM's (`data.tasks.logic_llm`). A file is read as what it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from espalier.data.records import BadInput, Problem
from espalier.data.sources import LETTERS, BadRow, Row, read_text
from espalier.data.tasks.logic_llm import is_logic_llm, logic_llm_places, logic_llm_problem
from espalier.data.tasks.published import PublishedTask, letter_of

_MISSPELT = {"Necessry Condtional Reasoning": "Necessary Conditional Reasoning"}
_LETTER_STOP = re.compile(r"([A-Z])[.．、):：]\s*(?=\S)")
_LETTER_BLANK = re.compile(r"([A-Z])(?:\s?[.．、?？):：]|\s)\s*(?=\S)")


def strip_letters(options: list[str], pattern: re.Pattern[str] = _LETTER_STOP) -> list[str]:
    """Return the options without `A.`, `B.`, … where every one begins with its own letter; else as they are."""
    matches = [pattern.match(option) for option in options]
    own = [match for match, letter in zip(matches, LETTERS, strict=False) if match and match[1] == letter]
    if len(own) < len(options):
        return options
    return [option[match.end() :] for option, match in zip(options, own, strict=True)]


def kinds_of_reasoning(row: Row) -> list[str]:
    """List the names that LogiQA 2.0 marks in `type`, sorted; [] where the row has none.

    Raises BadRow where `type` is not an object.
    """
    types = row.fields.get("type") or {}
    if not isinstance(types, dict):
        raise BadRow(f"type must be an object, got {types!r}")
    return sorted(_MISSPELT.get(str(name), str(name)) for name, is_of in types.items() if is_of)


@dataclass(frozen=True)
class LogiQA2(PublishedTask):
    """LogiQA 2.0, reading comprehension; the split "ood" is the out-of-domain test."""

    name = "logiqa2"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{
            split: (f"{split}.txt", f"logiqa2/{split}.txt", f"logiqa/DATA/LOGIQA/{split}.txt")
            for split in ("train", "dev", "test")
        },
        "ood": ("ood_test.jsonl", "logiqa2/ood_test.jsonl", "logiqa/DATA/LOGIQA/ood_test.jsonl"),
    }

    def problem(self, row: Row) -> Problem:
        """Return `info["subject"]` joins the names of the kinds of reasoning."""
        options = strip_letters(row.texts("options"))
        names = kinds_of_reasoning(row)
        gold = letter_of(row.integer("answer"), len(options)) if row.has("answer") else ""
        info = {"subject": names} if names else {}
        published = str(row.integer("id")) if row.has("id") else ""
        return Problem(published, row.text("question"), gold, info, row.text("text"), options)


@dataclass(frozen=True)
class LogiQA1(PublishedTask):
    """LogiQA 1."""

    name = "logiqa1"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{title}.txt", f"logiqa1/{title}.txt", f"LogiQA-dataset/{title}.txt")
        for split, title in (("train", "Train"), ("dev", "Eval"), ("test", "Test"))
    }

    def read_file(self, path: Path) -> list[Row]:
        """Return one row for each run of lines between blank ones; one that is not of seven lines is an error."""
        rows: list[Row] = []
        block: list[str] = []
        for number, line in enumerate([*read_text(path).split("\n"), ""], 1):
            if line.strip():
                block.append(line.strip())
            elif block:
                names = ("answer", "context", "question")
                fields = {**dict(zip(names, block, strict=False)), "options": block[3:]}
                error = "" if len(block) == 7 else f"{len(block)} lines between blank ones where 7 are expected"
                rows.append(Row(str(path), number - len(block), fields, error))
                block = []
        return rows

    def problem(self, row: Row) -> Problem:
        """Read a block of lines; the letter becomes upper case. Raises BadRow where the answer is not a, b, c or d."""
        answer = row.text("answer")
        if answer not in ("a", "b", "c", "d"):
            raise BadRow(f"the answer line must be a, b, c or d, got {answer!r}")
        options = strip_letters(row.texts("options"), _LETTER_BLANK)
        return Problem("", row.text("question"), answer.upper(), {}, row.text("context"), options)


def reclor_problem(row: Row) -> Problem:
    """Return a row of ReClor's layout, with any number of answers."""
    options = row.texts("answers")
    gold = letter_of(row.integer("label"), len(options)) if row.has("label") else ""
    kind = row.fields.get("question_type")
    info = {} if kind is None else {"subject": str(kind)}
    return Problem(row.text("id_string", default=""), row.text("question"), gold, info, row.text("context"), options)


@dataclass(frozen=True)
class ReClor(PublishedTask):
    """ReClor. The test split is published without answers: predict it, there is nothing to score."""

    name = "reclor"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{title}.json", f"reclor/{title}.json", f"reclor_data/{title}.json")
        for split, title in (("train", "train"), ("dev", "val"), ("test", "test"))
    }

    def problem(self, row: Row) -> Problem:
        """Set `info["subject"]` to the question type, where the row has one."""
        return reclor_problem(row)


@dataclass(frozen=True)
class ARLSAT(PublishedTask):
    """AR-LSAT; `layout` "passages" (AR_TrainingData.json, …) or "reclor" (complete_lsat_data/train_ar.json, …)
    says which files are looked for first; a file is read as what it is."""

    layout: str = "passages"

    name = "ar_lsat"
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"AR_{title}Data.json", f"ar_lsat/AR_{title}Data.json", f"data/AR_{title}Data.json",
                *logic_llm_places("AR-LSAT", split))
        for split, title in (("train", "Training"), ("dev", "Development"), ("test", "Test"))
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout not in ("passages", "reclor"):
            raise BadInput(f"ar_lsat: task.layout must be passages or reclor, got '{self.layout}'")

    def places(self, split: str) -> tuple[str, ...]:
        """Return the published names of the layout."""
        places = super().places(split)
        if self.layout == "passages":
            return places
        name = {"train": "train_ar", "dev": "val_ar", "test": "test_ar"}.get(split, split)
        return tuple(f"{folder}{name}.json" for folder in ("", "complete_lsat_data/", "ar_lsat/complete_lsat_data/"))

    def expand(self, row: Row) -> list[Row]:
        """Return one row for each question of a passage."""
        if row.has("answers") or is_logic_llm(row):
            return [row]
        questions = row.fields.get("questions")
        if not row.has("passage") or not isinstance(questions, list) or not questions:
            return [replace(row, error="a passage needs 'passage' and a list 'questions'")]
        return [
            replace(row, fields={**question, "passage": row.fields["passage"]}, key=str(question.get("id") or name))
            if isinstance(question, dict)
            else replace(row, error=f"a question must be an object, got {question!r}", key=name)
            for name, question in ((f"question {number}", question) for number, question in enumerate(questions, 1))
        ]

    def problem(self, row: Row) -> Problem:
        """Return `info["subject"]` lists the tags that are not empty."""
        if row.has("answers"):
            return reclor_problem(row)
        if is_logic_llm(row):
            return logic_llm_problem(row)
        tags = row.fields.get("tags")
        names = [tag for tag in tags if isinstance(tag, str) and tag] if isinstance(tags, list) else []
        info = {"subject": names} if names else {}
        gold, options = row.text("answer", default=""), row.texts("options")
        return Problem(row.text("id", default=""), row.text("question"), gold, info, row.text("passage"), options)
