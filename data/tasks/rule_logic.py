"""`rule_logic`: generated deduction problems with four options, solved in ReAct form, embedded so that nothing is
downloaded.

A problem says of two names what they are and lists rules of two kinds, "All red is wet" and "Only red is wet"; asked
is what one of the names must be. A solution labels its steps as ReAct does (Yao et al. 2023): the prompt ends with
`Thought 1:`, the response begins with that thought, each rule taken is one Action, Observation and Thought, one a
line, and the last line is `Action k: Finish[B]`. The lines are as terse as they are so that a model of a million
parameters learns to look a word up in the context within minutes.

A wrong way tempts at one or two words: taking "Only red is wet" as if it said "All red is wet". It leads to an option
of its own. **The teacher is imperfect on purpose**: where the wrong way is open, it goes it with probability
`wrong_way_rate`, and goes on from there to the wrong option; grading is by the truth. So the states before the
choice, after the right one and after the wrong one differ in value.

Problems are the same where their structure is (the order and kind of the lines, what is linked to what, the order of
the options), whatever the words and names put on it, and the splits share no structure.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from espalier.data.answers.grade import Gold, Grade
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.splitters import splitter
from espalier.data.tasks.enumerable import Position

NAMES = ("Rex", "Tom", "Ana", "Eva", "Kim", "Max")
WORDS = ("red", "wet", "old", "shy", "big", "odd", "sad", "raw", "fat", "dim", "hot", "lax")
SPLITS = ("train", "dev", "test")
LETTERS = "ABCD"

# Also in the longer published wording, `Finish[The answer is B.]`.
_FINISH = re.compile(r"Finish\[(?:The answer is )?([^\[\]\n]*)\]")

# A solution's lines. `turn` is the number that the label bears.
_SOLUTION_LINES = {
    "start": re.compile(r" (?P<name>[A-Z][a-z]*) (?P<word>[a-z]+)\n+"),
    "use": re.compile(r"Action (?P<turn>[0-9]{1,4}): Use (?P<word>[a-z]+)\n+"),
    "finish": re.compile(r"Action (?P<turn>[0-9]{1,4}): Finish\[(?:The answer is )?(?P<letter>[A-Z])\.?\]\n*"),
    "observation": re.compile(r"Observation (?P<turn>[0-9]{1,4}): [a-z]+ (?P<word>[a-z]+)\n+"),
    "thought": re.compile(r"Thought (?P<turn>[0-9]{1,4}): (?P<word>[a-z]+)(?: (?P<letter>[A-Z]))?\n+"),
}

# ("is", name, word), ("all", word, word) or ("only", word, word); names and words by number while a structure is
# drawn: name 0 is the one asked for.
Line = tuple[str, Any, Any]


@dataclass(frozen=True)
class Structure:
    """A problem without names. Words are numbered as the text meets them; `options[gold]` is the right one."""

    lines: tuple[Line, ...]
    options: tuple[int, ...]
    gold: int
    num_rules: int
    num_choices: int


def draw_structure(rng: random.Random) -> Structure:
    """Return a chain of two or three rules to the right option, wrong ways off one or two of its words, and one rule
    that concerns the other name."""
    word = count()
    chain = [next(word) for _ in range(rng.randint(3, 4))]
    lines: list[Line] = [("all", one, next_one) for one, next_one in pairwise(chain)]
    ends = [chain[-1]]
    turnings = rng.sample(range(len(chain) - 1), rng.randint(1, 2))
    for place in turnings:
        there = next(word)
        lines.append(("only", chain[place], there))
        if place < len(chain) - 2:
            before, there = there, next(word)
            lines.append(("all", before, there))
        ends.append(there)
    start, end = next(word), next(word)
    lines += [(rng.choice(("all", "only")), start, end), ("is", 0, chain[0]), ("is", 1, start)]
    options = [*ends, end, next(word)][: len(LETTERS)]
    rng.shuffle(lines)
    rng.shuffle(options)
    gold = options.index(chain[-1])

    numbers: dict[int, int] = {}
    for kind, one, other in lines:
        for number in (other,) if kind == "is" else (one, other):
            numbers.setdefault(number, len(numbers))
    for number in options:
        numbers.setdefault(number, len(numbers))
    renumbered = tuple((kind, one if kind == "is" else numbers[one], numbers[other]) for kind, one, other in lines)
    return Structure(renumbered, tuple(numbers[number] for number in options), gold, len(chain) - 1, len(turnings))


def split_of(structure: Structure) -> str:
    """Return the split a structure belongs to, by hash: 1 in 10 dev, 2 in 10 test."""
    digest = hashlib.sha256(f"{structure.lines}|{structure.options}".encode()).digest()
    bucket = digest[0] % 10
    return "dev" if bucket == 0 else "test" if bucket <= 2 else "train"


def tell(line: Line) -> str:
    """Return a line of the context in words."""
    kind, one, other = line
    return f"{one} is {other}" if kind == "is" else f"{kind.capitalize()} {one} is {other}"


def solve(name: str, lines: list[Line], options: list[str], rng: random.Random | None, wrong_way_rate: float) -> str:
    """Return a response, one step a line, from the content of Thought 1 on. With an rng it is the teacher's: wrong ways
    at `wrong_way_rate`."""
    word = next(other for kind, one, other in lines if kind == "is" and one == name)
    steps = [f" {name} {word}"]
    turn = 1
    while word not in options:
        leads = {kind: other for kind, one, other in lines if one == word}
        is_wrong = rng is not None and "only" in leads and rng.random() < wrong_way_rate
        after = leads["only" if is_wrong else "all"]
        steps += [f"Action {turn}: Use {word}", f"Observation {turn}: {word} {after}"]
        word = after
        turn += 1
        ending = f" {LETTERS[options.index(word)]}" if word in options else ""
        steps.append(f"Thought {turn}: {word}{ending}")
    return "\n".join([*steps, f"Action {turn}: Finish[{LETTERS[options.index(word)]}]"])


@dataclass(frozen=True)
class RuleLogic:
    """Args: problems a split, demonstrations of the training problems, the teacher's rate of wrong ways."""

    num_train: int = 24000
    num_dev: int = 200
    num_test: int = 1000
    num_demonstrations: int = 24000
    wrong_way_rate: float = 0.5
    seed: int = 0

    name = "rule_logic"

    def __post_init__(self) -> None:
        if not 0 <= self.wrong_way_rate <= 1:
            raise BadInput(f"task.wrong_way_rate must be from 0 to 1, got {self.wrong_way_rate}")
        for key in ("num_train", "num_dev", "num_test", "num_demonstrations"):
            if getattr(self, key) < 1:
                raise BadInput(f"task.{key} must be at least 1, got {getattr(self, key)}")

    def problems(self, split: str) -> list[Problem]:
        """Draw problems of distinct structure from a stream seeded by the seed and the split's name.

        The gold is a letter; accuracy is broken down by the length of the chain (`subject`) and the number of wrong
        ways (`level`). Raises BadInput where there is no such split.
        """
        if split not in SPLITS:
            raise BadInput(f"rule_logic has no split '{split}': it has {', '.join(SPLITS)}")
        number = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}[split]
        rng = random.Random(f"rule_logic/{self.seed}/{split}")
        problems: list[Problem] = []
        seen: set[Structure] = set()
        while len(problems) < number:
            structure = draw_structure(rng)
            names, words = rng.sample(NAMES, 2), rng.sample(WORDS, len(WORDS))
            if split_of(structure) != split or structure in seen:
                continue
            seen.add(structure)
            problems.append(_name_problem(f"rl-{split}-{len(problems)}", structure, names, words))
        return problems

    def demonstrations(self, split: str) -> list[Demonstration]:
        """Return `num_demonstrations` of the imperfect teacher for "train" (problems in turn); true ones else."""
        problems = self.problems(split)
        number = self.num_demonstrations if split == "train" else len(problems)
        rng = random.Random(f"rule_logic/{self.seed}/teacher") if split == "train" else None
        demonstrations = []
        for index in range(number):
            problem = problems[index % len(problems)]
            lines = [(kind, one, other) for kind, one, other in problem.info["lines"]]
            completion = solve(problem.info["name"], lines, problem.options, rng, self.wrong_way_rate)
            identity = f"{problem.id}/teacher-{index // len(problems)}"
            demonstrations.append(Demonstration(identity, self.prompt(problem), completion))
        return demonstrations

    def prompt(self, problem: Problem) -> str:
        """Return context, question and options, a line each, and `Thought 1:`, which the response goes on from."""
        options = [f"{option} is {letter}" for letter, option in zip(LETTERS, problem.options, strict=True)]
        return "\n".join([problem.context, problem.question, *options, "Thought 1:"])

    def split_steps(self, response: str) -> list[str]:
        """Return one step a labelled line."""
        return splitter("react")(response)

    def position(self, problem: Problem, steps: Sequence[str]) -> Position | None:
        """Return the kind of the next line, its turn, the current word and the letter of the last thought ("" without).

        What a line writes counts, whether or not the context says so: the word used, the word observed, the word and
        the letter thought. A position is right where the rules with "All" lead from the current word to the gold option
        or, once a thought has given a letter, where that is the gold one. It is finished after `Finish[X]`, which may
        come in place of any `Use`. None where a line is cut off or of another form, is not the next kind of line, bears
        another number or names the other name, or comes after `Finish`.
        """
        lines, name = problem.info["lines"], problem.info["name"]
        state = _State("start", 1, next(other for kind, one, other in lines if kind == "is" and one == name))
        for line in steps:
            if state.kind == "end" or (after := _read_line(line, state, name)) is None:
                return None
            state = after
        key = (state.kind, state.turn, state.word, state.letter)
        if state.kind == "end":
            return Position(key, self.grade(problem.gold, steps[-1], len(problem.options)).is_correct, is_finished=True)
        if state.letter:
            return Position(key, is_right=state.letter == problem.gold)
        rules = {one: other for kind, one, other in lines if kind == "all"}
        word = rules.get(state.word, "") if state.kind == "observation" else state.word
        while word in rules and word not in problem.options:
            word = rules[word]
        options = dict(zip(problem.options, LETTERS, strict=False))
        return Position(key, is_right=options.get(word) == problem.gold)

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        """By the letter in `Finish[X]`; `num_options` 0 means four.

        Unparseable is a response without `Finish[...]`, or with something else than letters in it. Two different
        letters, or a letter that is no option, are a wrong answer.
        """
        given = [letter for text in _FINISH.findall(response) for letter in re.split(r"[\s,.]+", text) if letter]
        if not given:
            return Grade(None, False, "no Finish[X] with a letter in the response")
        if not all(re.fullmatch(r"[A-Z]", letter) for letter in given):
            return Grade(None, False, "Finish[...] holds something else than an option's letter")
        letters = sorted(set(given))
        answer = ",".join(letters)
        if len(letters) > 1:
            return Grade(answer, False, f"{len(letters)} different answers")
        last = chr(ord("A") + (num_options or len(LETTERS)) - 1)
        if answer > last:
            return Grade(answer, False, f"there is no option {answer}: the last is {last}")
        return Grade(answer, answer == gold)


@dataclass(frozen=True)
class _State:
    kind: str
    """Of the next line: "start", "action", "observation" or "thought"; "end" after the last."""
    turn: int
    word: str
    letter: str = ""


def _read_line(line: str, state: _State, name: str) -> _State | None:
    """Return what holds after a solution's line; None where it is not one that may come next."""
    for form in ("use", "finish") if state.kind == "action" else (state.kind,):
        match = _SOLUTION_LINES[form].fullmatch(line)
        given = match.groupdict() if match else {}
        if not given or given.get("name", name) != name or int(given.get("turn", state.turn)) != state.turn:
            continue
        if form == "observation":
            return _State("thought", state.turn + 1, given["word"])
        if form == "finish":
            return _State("end", state.turn, state.word, given["letter"])
        after = "observation" if form == "use" else "action"
        return _State(after, state.turn, given["word"], given.get("letter") or "")
    return None


def _name_problem(identity: str, structure: Structure, names: list[str], words: list[str]) -> Problem:
    lines = [[kind, names[one] if kind == "is" else words[one], words[other]] for kind, one, other in structure.lines]
    info: dict[str, Any] = {
        "name": names[0],
        "lines": lines,
        "subject": f"{structure.num_rules} rules",
        "level": f"{structure.num_choices} wrong way{'s' if structure.num_choices > 1 else ''}",
    }
    return Problem(
        identity,
        f"What must {names[0]} be?",
        LETTERS[structure.gold],
        info,
        context="\n".join(tell((kind, one, other)) for kind, one, other in lines),
        options=[words[number] for number in structure.options],
    )
