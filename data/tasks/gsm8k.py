"""GSM8K (Cobbe et al. 2021) in its published form: `{split}.jsonl` with `question` and `answer`.

The answer is one step a line and `#### N` last; N may have thousands commas. Calculator notes (`<<48/2=24>>`)
stand inside most answers and are taken out of demonstrations.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from data.answers.grade import Gold, Grade
from data.answers.numbers import extract_marked_number, grade_marked_number
from data.jsonl import iter_rows
from data.records import BadInput, Demonstration, Problem
from data.steps import split_lines

_NOTE = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class GSM8K:
    """`path`: the folder that holds train.jsonl and test.jsonl, or the one above it (`gsm8k/` in it)."""

    path: str

    name = "gsm8k"

    def _file(self, split: str) -> Path:
        if not self.path:
            raise BadInput("gsm8k needs its folder: set ESPALIER_DATA or task.path=FOLDER (with train.jsonl in it)")
        options = [Path(self.path) / f"{split}.jsonl", Path(self.path) / "gsm8k" / f"{split}.jsonl"]
        for option in options:
            if option.is_file():
                return option
        raise BadInput(f"gsm8k: no {split}.jsonl in {self.path} (nor in {self.path}/gsm8k): set task.path=FOLDER")

    def _rows(self, split: str) -> list[tuple[str, str, str]]:
        """(place, question, answer) of every row."""
        rows = []
        for place, row in iter_rows(self._file(split)):
            question, answer = row.get("question"), row.get("answer")
            if not isinstance(question, str) or not isinstance(answer, str):
                raise BadInput(f"{place}: a GSM8K row needs the strings question and answer")
            rows.append((place, question.strip(), answer))
        return rows

    def problems(self, split: str) -> list[Problem]:
        """All rows of the split, in file order; ids by row number from 0."""
        problems = []
        for index, (place, question, answer) in enumerate(self._rows(split)):
            gold = extract_marked_number(answer)
            if gold is None:
                raise BadInput(f"{place}: the answer has no '#### N' with a number")
            problems.append(Problem(f"gsm8k-{split}-{index}", question, gold))
        return problems

    def demonstrations(self, split: str) -> list[Demonstration]:
        """The published solutions without their calculator notes."""
        problems = self.problems(split)
        return [
            Demonstration(f"{problem.id}/gold", self.prompt(problem), _NOTE.sub("", answer).strip())
            for problem, (_, _, answer) in zip(problems, self._rows(split), strict=True)
        ]

    def prompt(self, problem: Problem) -> str:
        """The question and a newline."""
        return problem.question + "\n"

    def split_steps(self, response: str) -> list[str]:
        """One step a line."""
        return split_lines(response)

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        """By the number after the last `####`."""
        return grade_marked_number(str(gold), response)
