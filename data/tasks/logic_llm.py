"""Logic-LLM's one layout for several logic sets (Pan et al. 2023; teacherpeterpan/Logic-LLM): ProofWriter, ProntoQA,
LogicalDeduction; FOLIO and AR-LSAT, which the tasks of those names read.

One JSON array in `<Set>/{train,dev,test,mini_test}.json`: `id`, `context`, `question`, `options` ["A) …"], `answer` (a
letter). The letter is part of the option's string; it goes where it is the option's own (`B) True` in the first place
keeps its). ProofWriter is of the open world: "Unknown" is an answer of its own. LogicalDeduction has 3, 5 or 7 options
and is made of BIG-bench items: evaluate with it, never train.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from espalier.data.records import BadInput, Problem
from espalier.data.sources import LETTERS, Row
from espalier.data.tasks.published import PublishedTask

SUBSETS = ("ProofWriter", "ProntoQA", "LogicalDeduction")
_TASKS = {"FOLIO": "folio", "AR-LSAT": "ar_lsat"}


def strip_own_letter(option: str, index: int) -> str:
    """`A) True` at place 0 → `True`; any other text as it is."""
    rest = option.removeprefix(f"{LETTERS[index]})")
    return rest.strip() if rest.strip() else option


def is_logic_llm(row: Row) -> bool:
    """Say whether the row has this layout's fields."""
    return all(row.has(name) for name in ("context", "question", "options"))


def logic_llm_places(subset: str, split: str) -> tuple[str, ...]:
    """Say where the file of a split of a set stands."""
    return (f"{split}.json", f"{subset}/{split}.json", f"data/{subset}/{split}.json",
            f"{subset}_{split}.json", f"logic_llm/{subset}_{split}.json")  # fmt: skip


def logic_llm_problem(row: Row) -> Problem:
    """Read a row of the layout; the gold is a letter. Raises BadRow where a field is missing or of another type."""
    options = row.texts("options")
    options = [strip_own_letter(option, index) for index, option in enumerate(options[: len(LETTERS)])]
    published, gold = row.text("id", default=""), row.text("answer", default="")
    return Problem(published, row.text("question"), gold, {}, row.text("context"), options)


@dataclass(frozen=True)
class LogicLLM(PublishedTask):
    """`subset`: which of the sets; the published ids tell the sets apart."""

    subset: str = "ProofWriter"

    name = "logic_llm"

    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: logic_llm_places("SUBSET", split) for split in ("train", "dev", "test")
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset not in SUBSETS:
            other = f": choose task={_TASKS[self.subset]}, which reads this layout" if self.subset in _TASKS else ""
            raise BadInput(f"logic_llm: task.subset must be one of {', '.join(SUBSETS)}, got '{self.subset}'{other}")

    def places(self, split: str) -> tuple[str, ...]:
        """Return the published names of the subset."""
        return tuple(place.replace("SUBSET", self.subset) for place in super().places(split))

    def problem(self, row: Row) -> Problem:
        """`info["level"]`: ProofWriter's depth of proof (`-D5-` in the id), else the number of options."""
        problem = logic_llm_problem(row)
        depth = re.search(r"-D(\d+)-", problem.id)
        problem.info.update(subject=self.subset, level=int(depth[1]) if depth else len(problem.options))
        return problem
