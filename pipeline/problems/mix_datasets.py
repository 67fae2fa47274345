"""Rows of several data sets → one file: problems with their verifiers, demonstrations, or preference pairs.

    python run_stage.py -cn problems/mix_datasets output=mixed.jsonl \\
        'stage.sources=[{name: ours, path: ours.jsonl, amount: 0.5}, {name: gsm, path: gsm.parquet, amount: 200,
        verifier: gsm8k}]'

Amounts, repeats and draws are those of `data.mixture`. Rows are read as `task=verifiable` reads them; demonstrations
(`stage.kind=demonstration`) need an answer to imitate: a last turn of the assistant, `completion`, `response` or
`solution`. Pairs (`stage.kind=pair`) are files of PreferencePair, made with one tokenizer: `pairs/import_preferences`
makes one of what others publish. A row's id is `{source}-{its id}`, `~2` behind it where it stands in the mixture
again. Everything about a row is in the row, so that the shuffle cannot part a question from its ground truth.
`X.statistics.json` counts each source.
"""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.data.jsonl import read_records, write_json
from espalier.data.mixture import Source, amount_warning, draw_rows, read_source
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, Demonstration, PreferencePair, Problem
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.verifiable import VerifiableProblems, read_question
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
KINDS = ("problem", "demonstration", "pair")
_ANSWERS = ("completion", "response", "solution")
Record = Problem | Demonstration | PreferencePair


@dataclass(frozen=True)
class AnsweredRows(VerifiableProblems):
    """Reads rows with an answer to imitate; as problems, the answer in `info["solution"]`."""

    def problem(self, row: Row) -> Problem:
        """Read question and answer. Raises BadRow where either is missing."""
        identity = row.fields.get("id")
        return Problem(
            str(identity) if identity is not None else "", read_question(row), "", {"solution": read_answer(row)}
        )


def read_answer(row: Row) -> str:
    """Return the answer to imitate. Raises BadRow where there is none."""
    turns = row.fields.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant":
        answer = turns[-1].get("content")
        if isinstance(answer, str) and answer.strip():
            return answer.strip()
    name = next((name for name in _ANSWERS if row.has(name)), "")
    if not name:
        raise BadRow(f"the row has no answer to imitate: it needs messages with one, or {', '.join(_ANSWERS)}")
    return row.text(name)


@dataclass(frozen=True)
class MixDatasets:
    """`sources`: see `data.mixture.Source`; `kind` of rows to write; `template` writes the prompts of demonstrations;
    `seed` draws and shuffles."""

    sources: Sequence[Any]
    kind: str = "problem"
    template: PromptTemplate = field(default_factory=PromptTemplate)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"stage.kind must be one of {', '.join(KINDS)}, got '{self.kind}'")
        if self.kind == "demonstration" and self.template.is_chat:
            raise BadInput(
                "stage.template writes turns, and a demonstration holds text: choose a prompt with is_chat: false"
            )
        names = Counter(source.name for source in self._sources())
        if not names or max(names.values()) > 1:
            what = f"the name '{names.most_common(1)[0][0]}' stands twice" if names else "there is none"
            raise BadInput(f"stage.sources: {what}: give [{{name: ..., path: ..., amount: 1.0}}, ...]")
        for one, other in itertools.permutations(names, 2):
            if other.startswith(f"{one}-"):
                raise BadInput(f"stage.sources: ids of '{one}' could be those of '{other}', which begins with '{one}-'"
                               ": rename one of them")  # fmt: skip
        for source in self._sources() if self.kind == "pair" else ():
            if source != Source(source.name, source.amount, source.path) or not source.path:
                raise BadInput(f"stage.sources, '{source.name}': pairs come from a file of PreferencePair alone (name, "
                               "path, amount): pairs/import_preferences makes one of what others publish")  # fmt: skip

    def _sources(self) -> list[Source]:
        return [read_source(node) for node in self.sources]

    def inputs(self) -> list[str]:
        """Return the local files."""
        return [source.path for source in self._sources() if source.path]

    def run(self, input_path: str, context: StageContext) -> list[Record]:
        """Return the mixture. Raises BadInput on a row that cannot be read, or a source of which nothing is taken."""
        rows: list[Record] = []
        statistics = {}
        for source in self._sources():
            known = self._read(source)
            indices = draw_rows(source, len(known), self.seed)
            if warning := amount_warning(source, len(known)):
                log.warning("%s", warning)
            if source.hub and not source.revision:
                log.warning("source '%s': no revision is pinned: the file holds what the hub gave today", source.name)
            taken = self._records(source, known, indices)
            statistics[source.name] = describe_source(source, len(known), indices, taken)
            rows += taken
        random.Random(f"mixture/{self.seed}").shuffle(rows)
        texts = Counter(_question(row) for row in rows)
        shared = {"rows": len(rows), "distinct_questions": len(texts)}
        context.counts |= {**shared, "sources": len(statistics)}
        write_json(
            context.output.with_name(f"{context.output.stem}.statistics.json"), {**shared, "sources": statistics}
        )
        return rows

    def _read(self, source: Source) -> Sequence[Problem | PreferencePair]:
        """Return all rows of a source; demonstrations as problems with their answer."""
        if self.kind == "pair":
            return read_records(PreferencePair, source.path)
        return self._task(source).problems(source.split)

    def _task(self, source: Source) -> VerifiableProblems:
        kind = AnsweredRows if self.kind == "demonstration" else VerifiableProblems
        return kind(
            path=source.path,
            hub=source.hub,
            hub_config=source.config,
            revision=source.revision,
            verifier=source.verifier,
            rename=source.rename,
        )

    def _records(
        self, source: Source, known: Sequence[Problem | PreferencePair], indices: Sequence[int]
    ) -> list[Record]:
        """Return the rows of a source with ids that are theirs alone."""
        seen: Counter[int] = Counter()
        records: list[Record] = []
        for index in indices:
            seen[index] += 1
            row = known[index]
            name = f"{source.name}-{row.id}" + (f"~{seen[index]}" if seen[index] > 1 else "")
            if isinstance(row, PreferencePair):
                records.append(replace(row, id=name))
                continue
            problem = replace(row, id=name, info={**row.info, "subject": source.name, "index": index})
            records.append(problem if self.kind == "problem" else self._demonstration(problem))
        return records

    def _demonstration(self, problem: Problem) -> Demonstration:
        completion = self.template.completion(problem.info["solution"])
        return Demonstration(problem.id, self.template.render(problem), completion)


def _question(row: Record) -> str:
    return row.question if isinstance(row, Problem) else row.prompt


def describe_source(source: Source, num_rows: int, indices: Sequence[int], taken: Sequence[Record]) -> dict[str, Any]:
    """Return counts of a source of so many rows: what is taken of them, and lengths of the questions in characters."""
    lengths = sorted(len(_question(row)) for row in taken)
    return {
        "from": source.path or source.hub,
        "split": source.split,
        "revision": source.revision,
        "rows": num_rows,
        "taken": len(indices),
        "distinct": len(set(indices)),
        "distinct_questions": len({_question(row) for row in taken}),
        "question_characters": {"lowest": lengths[0], "median": lengths[len(lengths) // 2], "highest": lengths[-1]},
    }
