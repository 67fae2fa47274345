"""The questions that paragraphs answer, for those who read paragraphs: the models of linguistic calibration, and what
makes their training data."""

from collections.abc import Sequence
from pathlib import Path

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Problem
from espalier.data.tasks.problem_file import ProblemFile


def question_files(path: str) -> list[Path]:
    """Return the file of `Problem` that `path` is, or those of the folder. Raises BadInput on a folder without any."""
    if not Path(path).is_dir():
        return [Path(path)]
    names = [name for places in ProblemFile.files.values() for name in places if name.endswith(".jsonl")]
    if files := [file for file in (Path(path, name) for name in names) if file.is_file()]:
        return files
    raise BadInput(f"{path}: has none of {', '.join(names)}: name the file or folder that the task reads")


class Questions:
    """Problem id → the question that a paragraph should answer, from a file of `Problem`, or from those of a folder
    (`info["question"]` where the policy is asked something else: `problems/use_requests`)."""

    def __init__(self, path: str):
        self.path = path
        rows = [row for file in question_files(path) for row in read_records(Problem, file)]
        self.by_id = {row.id: str(row.info.get("question", row.question)) for row in rows}

    def of(self, problem_id: str) -> str:
        """Return it. Raises BadInput where the file lacks the problem."""
        if problem_id not in self.by_id:
            raise BadInput(f"{self.path}: has no problem '{problem_id}': name the file that the task reads")
        return self.by_id[problem_id]

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem that the file lacks, and where another one of its files has that id."""
        for problem in problems:
            if self.of(problem.id) != str(problem.info.get("question", problem.question)):
                raise BadInput(f"{self.path}: problem '{problem.id}' asks another question there: ids have to differ "
                               "from file to file")  # fmt: skip
