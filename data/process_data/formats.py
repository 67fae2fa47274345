"""What the published formats share, by name; and what a judged solution gives to a trainer or a scorer.

A format turns one published row into one or several `AnnotatedSolution` and back: reading and writing back gives
the same JSON value. In `info` every format keeps

    format      its name
    row         the key of the published row: all records of one row have it in common
    separator   what stands between two steps where the format publishes a list of steps; absent where it
                publishes a text, to which the steps then join exactly
    group       what results are broken down by, where the format has classes
    extra       columns this program does not know, written back as they are

| format           | separator | one record is |
|------------------|-----------|---------------|
| prm800k          | "\\n"      | the path the labeller followed; with `alternatives`, also each other completion |
| math_shepherd    | a text    | a solution |
| math_aps         | a text (flat), "\\n\\n" (tree) | a path of the tree from the question to a leaf |
| processbench     | "\\n\\n"    | a solution |
| prmbench         | "\\n"      | a modified process, and the original one it was made from |
| bigbench_mistake | "\\n"      | a chain of thought |
| trl              | "\\n"      | a solution |
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from espalier.data.process_data.bigbench_mistake import BigBenchMistake
from espalier.data.process_data.math_aps import MathAps
from espalier.data.process_data.math_shepherd import MathShepherd
from espalier.data.process_data.prm800k import PRM800K
from espalier.data.process_data.prmbench import PRMBench
from espalier.data.process_data.processbench import ProcessBench
from espalier.data.process_data.published import JsonRow, content_key, iter_published
from espalier.data.process_data.trl import TRLStepwise
from espalier.data.prompts import PromptTemplate
from espalier.data.records import AnnotatedSolution, BadInput, Problem

log = logging.getLogger(__name__)


class StepFormat(Protocol):
    """One published format. `is_array`: published as one JSON array rather than as JSON lines."""

    name: str
    is_array: bool

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Return the records of a published row, at least one, under ids that begin with the format and `key`. Raises
        BadInput naming `place`."""

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Return the published row of its records; or of one record of another format, where this one can hold it.
        Raises BadInput naming `place`."""


def step_format(name: str, *, alternatives: bool = False, neutral_label: float = 1.0) -> StepFormat:
    """Return the format of a name; the settings are PRM800K's. Raises BadInput on an unknown name."""
    formats: dict[str, StepFormat] = {
        "prm800k": PRM800K(alternatives, neutral_label),
        "math_shepherd": MathShepherd(),
        "math_aps": MathAps(),
        "processbench": ProcessBench(),
        "prmbench": PRMBench(),
        "bigbench_mistake": BigBenchMistake(),
        "trl": TRLStepwise(),
    }
    if name not in formats:
        raise BadInput(f"there is no step format '{name}': there are {', '.join(formats)}")
    return formats[name]


def read_labelled(path: str | Path, form: StepFormat, **hub: str) -> Iterator[AnnotatedSolution]:
    """Return all rows of a published file, or of a data set of the hub (`iter_published`), in its order, one after the
    other.

    Keys of rows are hashes of their content, so the same row has the same ids in every file. A row that
    stands twice in one file is kept, under a key with `~2`; so is a row whose published id another row has that
    differs, in file order: published files hold such, and a warning counts them. Raises BadInput naming file and line.
    """
    copies: Counter[str] = Counter()  # of the first record of a row
    repeated = 0
    for place, row in iter_published(path, **hub):
        key = content_key(row)
        records = form.read(row, key, place)
        first = records[0].id
        copies[first] += 1
        if copies[first] > 1:
            repeated += 1
            records = form.read(row, f"{key}~{copies[first]}", place)
        yield from records
    if repeated:
        log.warning(
            "%s: %d rows have the id of an earlier row: they are kept, under ids with ~2, ~3, ...",
            path or hub["hub"],
            repeated,
        )


def published_rows(records: Iterable[AnnotatedSolution], form: StepFormat, path: str) -> list[JsonRow]:
    """Make the published rows of a file of records, in the order of their first record.

    Raises BadInput where the format cannot hold a row's records, or their `info` does not fit.
    """
    groups: dict[str, list[AnnotatedSolution]] = {}
    for record in records:
        is_own = record.info.get("format") == form.name
        groups.setdefault(f"row {record.info.get('row')}" if is_own else f"id {record.id}", []).append(record)
    return [_written(form, group, f"{path}: '{group[0].id}'") for group in groups.values()]


def _written(form: StepFormat, group: Sequence[AnnotatedSolution], place: str) -> JsonRow:
    try:
        return form.write(group, place)
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # what `info` holds was changed by hand
        reason = f"its info lacks {error}" if isinstance(error, KeyError) else f"its info does not fit: {error}"
        raise BadInput(f"{place}: {reason}: import it again") from None


def to_step_texts(
    record: AnnotatedSolution, template: PromptTemplate | None = None
) -> tuple[str, list[str], list[float | None]]:
    """Return (prompt, S steps, S labels) as a model reads them.

    The steps join to the response exactly: each but the last ends with the format's separator. `labels` in
    [0, 1] belong to the ends of the steps; None: nothing is learnt there. Without a template the prompt is
    the question and a newline.
    """
    prompt = (template or PromptTemplate()).render(Problem(record.id, record.question, record.gold))
    separator = record.info.get("separator", "")
    steps = [step + separator for step in record.steps[:-1]] + record.steps[-1:]
    return prompt, steps, list(record.labels)
