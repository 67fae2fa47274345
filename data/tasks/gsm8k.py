"""GSM8K (Cobbe et al. 2021) in its published form: `{split}.jsonl` with `question` and `answer`.

The answer is one step a line and `#### N` last; N may have thousands commas. Calculator notes (`<<48/2=24>>`)
stand inside most answers and are taken out of demonstrations unless `keep_notes`. In the socratic variant
(`{split}_socratic.jsonl`) each line is `sub-question ** step`. The set has no dev split: see data/splits.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from espalier.data.answers.numbers import extract_marked_number
from espalier.data.records import BadInput, Problem
from espalier.data.sources import BadRow, Row
from espalier.data.tasks.published import PublishedTask

_NOTE = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class GSM8K(PublishedTask):
    """`variant`: "main" or "socratic"; on the hub that is `hub_config`. Sub-questions are steps with
    `steps="sub_questions"`."""

    kind: str = "marked_number"
    variant: str = "main"
    keep_notes: bool = False

    name = "gsm8k"
    has_solutions: ClassVar[bool] = True
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        split: (f"{split}.jsonl", f"gsm8k/{split}.jsonl", f"grade_school_math/data/{split}.jsonl")
        for split in ("train", "test")
    }
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("main", "socratic"):
            raise BadInput(f"gsm8k: task.variant must be main or socratic, got '{self.variant}'")

    def places(self, split: str) -> tuple[str, ...]:
        """Return `train.jsonl`, in the socratic variant `train_socratic.jsonl`."""
        places = super().places(split)
        if self.variant == "main":
            return places
        return tuple(str(Path(place).with_stem(f"{Path(place).stem}_socratic")) for place in places)

    def problem(self, row: Row) -> Problem:
        """Read a row; `info["solution"]` is the worked answer.

        Raises BadRow where no number follows the last `####`.
        """
        question, answer = row.text("question"), row.text("answer")
        gold = extract_marked_number(answer)
        if gold is None:
            raise BadRow("the answer has no '#### N' with a number")
        solution = answer if self.keep_notes else _NOTE.sub("", answer)
        return Problem("", question, gold, {"solution": solution.strip()})
