"""Which task would take a file: its first rows, tried with the layout of every published set.

The names are those of conf/task/. Sets of one layout stand together; a set that reads any text is not tried.
"""

from pathlib import Path

from espalier.data.records import BadInput
from espalier.data.sources import BadRow
from espalier.data.tasks.entailment import LogiQANLI
from espalier.data.tasks.folio import FOLIO
from espalier.data.tasks.gsm8k import GSM8K
from espalier.data.tasks.logic_llm import LogicLLM
from espalier.data.tasks.logical_reading import ARLSAT, LogiQA1, LogiQA2, ReClor
from espalier.data.tasks.math import MATH
from espalier.data.tasks.problem_file import ProblemFile
from espalier.data.tasks.published import PublishedTask
from espalier.data.tasks.quiz_questions import BioASQ, Jeopardy, SciQ
from espalier.data.tasks.short_answers import NQOpen, TriviaQA, TruthfulQA
from espalier.data.tasks.word_problems import SVAMP, ASDiv

TASKS: dict[str, type[PublishedTask]] = {
    "gsm8k": GSM8K,
    "math": MATH,
    "svamp": SVAMP,
    "asdiv": ASDiv,
    "logiqa": LogiQA2,
    "logiqa_nli": LogiQANLI,
    "logiqa_first": LogiQA1,
    "reclor": ReClor,
    "ar_lsat": ARLSAT,
    "folio": FOLIO,
    "proofwriter": LogicLLM,
    "prontoqa": LogicLLM,
    "logical_deduction": LogicLLM,
    "nq_open": NQOpen,
    "triviaqa": TriviaQA,
    "truthfulqa": TruthfulQA,
    "sciq": SciQ,
    "bioasq": BioASQ,
    "jeopardy": Jeopardy,
}
_NUM_TRIED = 20


def tasks_that_take(path: Path) -> list[str]:
    """Return the tasks that read each of the file's first rows, by name; `problem_file` only where no published set
    does, as it reads the columns of several of them."""
    names = [name for name, kind in TASKS.items() if _takes(kind(str(path)), path)]
    return names or ["problem_file"] * _takes(ProblemFile(str(path)), path)


def _takes(task: PublishedTask, path: Path) -> bool:
    """Say whether the task reads each of the first rows. A question alone, as TriviaQA's test set has it, is that of
    any set: it says nothing."""
    try:
        rows = [question for row in task.read_file(path)[:_NUM_TRIED] for question in task.expand(row)]
        if any(row.error for row in rows):
            return False
        problems = [task.problem(row) for row in rows]
    except (BadInput, BadRow):
        return False
    return any(problem.gold or problem.context or problem.options for problem in problems)
