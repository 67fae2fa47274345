"""`word_arithmetic`: generated multi-step word problems, embedded so that nothing is downloaded.

A problem starts with a small number of things and changes it by `min_operations` to `max_operations` (two to five)
operations: buys, gives away, doubles, halves; every intermediate total is between 1 and `max_total`. A solution has one
step a line and `#### N` last. Problems are the same where their numbers and operations are, whatever the names. The
splits share no such structure, so a test problem is never a renamed training problem.

**The teacher is imperfect on purpose.** On "doubles" it writes `v + 2` and on "halves" `v - 2` with
probability `wrong_way_rate`, and goes on from its wrong value; grading is by the truth. A policy that
imitates it knows both ways, and which one pays must be found out step by step. Clean demonstrations leave
only arithmetic slips to correct, which preference learning at this size does not do.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.answers.grade import Gold, Grade
from espalier.data.answers.numbers import grade_marked_number
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.splitters import split_lines
from espalier.data.tasks.enumerable import Position

NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Max", "Eva", "Leo")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "beads")
SPLITS = ("train", "dev", "test")

Operation = tuple[str, int]
_LINE = re.compile(r"(\w+): (\d+) ([-+*/]) (\d+) = (\d+)\s*")
_ANSWER = re.compile(r"#### (\d+)\s*")


def apply_operation(value: int, operation: Operation) -> int:
    """Return the true value after an operation."""
    verb, amount = operation
    return {"buys": value + amount, "gives": value - amount, "doubles": value * 2, "halves": value // 2}[verb]


def draw_operations(
    rng: random.Random, max_total: int, min_operations: int = 2, max_operations: int = 5
) -> tuple[int, list[Operation]]:
    """Return a start and `min_operations` to `max_operations` operations whose totals all stay within 1..max_total."""
    start = value = rng.randint(2, max_total // 2)
    operations: list[Operation] = []
    for _ in range(rng.randint(min_operations, max_operations)):
        options: list[Operation] = []
        if value < max_total:
            options.append(("buys", rng.randint(1, min(9, max_total - value))))
        if value > 1:
            options.append(("gives", rng.randint(1, min(9, value - 1))))
        if value * 2 <= max_total:
            options += [("doubles", 0)] * 2
        if value % 2 == 0 and value > 2:
            options += [("halves", 0)] * 2
        operations.append(rng.choice(options))
        value = apply_operation(value, operations[-1])
    return start, operations


def split_of(start: int, operations: list[Operation]) -> str:
    """Return the split a structure belongs to, by hash: 1 in 10 dev, 2 in 10 test."""
    digest = hashlib.sha256(f"{start}|{operations}".encode()).digest()
    bucket = digest[0] % 10
    return "dev" if bucket == 0 else "test" if bucket <= 2 else "train"


def tell(name: str, thing: str, start: int, operations: list[Operation]) -> str:
    """Return the problem in words."""
    phrases = {
        "buys": "{name} buys {n} more.",
        "gives": "{name} gives away {n}.",
        "doubles": "{name} doubles the {thing}.",
        "halves": "{name} halves the {thing}.",
    }
    sentences = [phrases[verb].format(name=name, thing=thing, n=n) for verb, n in operations]
    return f"{name} has {start} {thing}. {' '.join(sentences)} How many {thing} now?"


def solve(start: int, operations: list[Operation], rng: random.Random | None, wrong_way_rate: float) -> str:
    """Return a solution, one step a line. With an rng, the teacher's: wrong ways at `wrong_way_rate`."""
    value = start
    lines = []
    for operation in operations:
        verb, amount = operation
        wrong = rng is not None and verb in ("doubles", "halves") and rng.random() < wrong_way_rate
        if verb == "buys" or (wrong and verb == "doubles"):
            amount = 2 if wrong else amount
            text, after = f"{value} + {amount}", value + amount
        elif verb == "gives" or wrong:
            amount = 2 if wrong else amount
            text, after = f"{value} - {amount}", value - amount
        elif verb == "doubles":
            text, after = f"{value} * 2", value * 2
        else:
            text, after = f"{value} / 2", value // 2
        lines.append(f"{verb}: {text} = {after}")
        value = after
    return "\n".join([*lines, f"#### {value}"])


@dataclass(frozen=True)
class WordArithmetic:
    """Args: problems a split, demonstrations a training problem set, the teacher's rate of wrong ways, and how many
    operations a problem has."""

    num_train: int = 4000
    num_dev: int = 200
    num_test: int = 1000
    num_demonstrations: int = 20000
    wrong_way_rate: float = 0.6
    max_total: int = 30
    min_operations: int = 2
    max_operations: int = 5
    seed: int = 0

    name = "word_arithmetic"

    def __post_init__(self) -> None:
        if self.max_total < 4:
            raise BadInput(f"task.max_total must be at least 4, got {self.max_total}")
        if not 1 <= self.min_operations <= self.max_operations:
            raise BadInput(f"task.min_operations must be from 1 to task.max_operations ({self.max_operations}), got "
                           f"{self.min_operations}")  # fmt: skip

    def problems(self, split: str) -> list[Problem]:
        """Draw distinct problems of the split from a stream seeded by the seed and the split's name.

        Raises BadInput where there is no such split, or fewer distinct problems than asked for.
        """
        if split not in SPLITS:
            raise BadInput(f"word_arithmetic has no split '{split}': it has {', '.join(SPLITS)}")
        count = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}[split]
        rng = random.Random(f"{self.seed}/{split}")
        problems: list[Problem] = []
        seen: set[str] = set()
        draws_in_vain = 0
        while len(problems) < count:
            draws_in_vain += 1
            if draws_in_vain > 20_000:
                raise BadInput(
                    f"word_arithmetic: {count} {split} problems are asked, {len(problems)} distinct ones "
                    f"found: lower num_{split} or raise max_total"
                )
            start, operations = draw_operations(rng, self.max_total, self.min_operations, self.max_operations)
            key = f"{start}|{operations}"
            name, thing = rng.choice(NAMES), rng.choice(THINGS)
            if split_of(start, operations) != split or key in seen:
                continue
            seen.add(key)
            draws_in_vain = 0
            value = start
            for operation in operations:
                value = apply_operation(value, operation)
            info: dict[str, Any] = {"start": start, "operations": [list(op) for op in operations]}
            question = tell(name, thing, start, operations)
            problems.append(Problem(f"wa-{split}-{len(problems)}", question, str(value), info))
        return problems

    def demonstrations(self, split: str) -> list[Demonstration]:
        """Return `num_demonstrations` of the imperfect teacher for "train" (problems in turn); true ones else."""
        problems = self.problems(split)
        count = self.num_demonstrations if split == "train" else len(problems)
        rng = random.Random(f"{self.seed}/teacher") if split == "train" else None
        demonstrations = []
        for index in range(count):
            problem = problems[index % len(problems)]
            operations = [(verb, amount) for verb, amount in problem.info["operations"]]
            completion = solve(problem.info["start"], operations, rng, self.wrong_way_rate)
            identity = f"{problem.id}/teacher-{index // len(problems)}"
            demonstrations.append(Demonstration(identity, self.prompt(problem), completion))
        return demonstrations

    def prompt(self, problem: Problem) -> str:
        """Return the question and a newline; the response begins with the first step."""
        return problem.question + "\n"

    def split_steps(self, response: str) -> list[str]:
        """Return one step a line."""
        return split_lines(response)

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        """By the number after the last `####`."""
        return grade_marked_number(str(gold), response)

    def position(self, problem: Problem, steps: Sequence[str]) -> Position | None:
        """Return (operations done, total as written); a line must name the verb of its operation, `#### N` is last."""
        operations = [(verb, amount) for verb, amount in problem.info["operations"]]
        truth = written = int(problem.info["start"])
        for number, step in enumerate(steps):
            if number == len(operations):
                answer = _ANSWER.fullmatch(step)
                if answer is None or len(steps) > number + 1:
                    return None
                written = int(answer[1])
                return Position((number + 1, written), written == truth, is_finished=True)
            line = _LINE.fullmatch(step)
            if line is None or line[1] != operations[number][0]:
                return None
            truth, written = apply_operation(truth, operations[number]), int(line[5])
        return Position((len(steps), written), written == truth)
