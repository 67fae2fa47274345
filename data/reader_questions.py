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
    (`info["question"]` where the policy is asked something else: `problems/use_requests`). Raises BadInput on an id
    that has another question in another file of the folder."""

    def __init__(self, path: str):
        self.path = path
        self.by_id: dict[str, str] = {}
        for file in question_files(path):
            for row in read_records(Problem, file):
                question = _question(row)
                if self.by_id.setdefault(row.id, question) != question:
                    raise _asks_another(str(file), row)

    def of(self, problem_id: str) -> str:
        """Return it. Raises BadInput where the file lacks the problem."""
        if problem_id not in self.by_id:
            raise BadInput(f"{self.path}: has no problem '{problem_id}': name the file that the task reads")
        return self.by_id[problem_id]

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem that the file lacks, and on one that asks another question there."""
        for problem in problems:
            if self.of(problem.id) != _question(problem):
                raise _asks_another(self.path, problem)


def _question(problem: Problem) -> str:
    return str(problem.info.get("question", problem.question))


def _asks_another(path: str, problem: Problem) -> BadInput:
    return BadInput(f"{path}: problem '{problem.id}' asks another question there: ids have to differ from file to file")
