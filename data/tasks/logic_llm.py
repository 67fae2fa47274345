"""Logic-LLM's one layout for several logic sets (Pan et al. 2023; teacherpeterpan/Logic-LLM): ProofWriter, ProntoQA,
LogicalDeduction, FOLIO, AR-LSAT.

One JSON array in `<Set>/{train,dev}.json`: `id`, `context`, `question`, `options` ["A) …"], `answer` (a letter). The
letter is part of the option's string; it goes where it is the option's own (`B) True` in the first place keeps
its). ProofWriter is of the open world: "Unknown" is an answer of its own. LogicalDeduction has 3, 5 or 7 options and
is made of BIG-bench items: evaluate with it, never train.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from data.records import BadInput, Problem
from data.sources import LETTERS, Row
from data.tasks.published import PublishedTask

SUBSETS = ("ProofWriter", "ProntoQA", "LogicalDeduction", "FOLIO", "AR-LSAT")


def strip_own_letter(option: str, index: int) -> str:
    """`A) True` at place 0 → `True`; any other text as it is."""
    rest = option.removeprefix(f"{LETTERS[index]})")
    return rest.strip() if rest.strip() else option


@dataclass(frozen=True)
class LogicLLM(PublishedTask):
    """`subset`: which of the sets; the published ids tell the sets apart."""

    subset: str = "ProofWriter"

    name = "logic_llm"

    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{split}.json", f"SUBSET/{split}.json", f"data/SUBSET/{split}.json",
                f"SUBSET_{split}.json", f"logic_llm/SUBSET_{split}.json")
        for split in ("train", "dev", "test")
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset not in SUBSETS:
            raise BadInput(f"logic_llm: task.subset must be one of {', '.join(SUBSETS)}, got '{self.subset}'")

    def places(self, split: str) -> tuple[str, ...]:
        """The published names of the subset."""
        return tuple(place.replace("SUBSET", self.subset) for place in super().places(split))

    def problem(self, row: Row) -> Problem:
        """`info["level"]`: ProofWriter's depth of proof (`-D5-` in the id), else the number of options."""
        options = row.texts("options")
        options = [strip_own_letter(option, index) for index, option in enumerate(options[: len(LETTERS)])]
        published = row.text("id", default="")
        depth = re.search(r"-D(\d+)-", published)
        info = {"subject": self.subset, "level": int(depth[1]) if depth else len(options)}
        question, context = row.text("question"), row.text("context")
        return Problem(published, question, row.text("answer", default=""), info, context, options)
