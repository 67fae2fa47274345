"""What the tasks that read published questions share: finding files, ids, splits, shards, options, grading.

A task of a set says where its files stand (`files`), what they are called on the hub (`hub_splits`) and what a row
means (`problem`); everything else is here. Rows come from `path` or, with the same meaning, from the Hugging Face
hub through `datasets` (`hub="openai/gsm8k"`, or a folder that `save_to_disk` wrote).

Ids are `<task>-<published split>-<published id>`, or the row's number from 0 where the set has no ids. An id that
the set uses again gets `.2`, `.3`, … in file order; such a problem keeps the set's own id in
`info["published_id"]`. Ids do not depend on `limit`, shards, a split plan or the order of options, and a rejected
row keeps its number. Rows that stand twice are kept: `problems/list_problems` counts them.
"""

import logging
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from espalier.data.answers.grade import Gold, Grade
from espalier.data.answers.grading import KINDS, grade_answer
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.sources import LETTERS, BadRow, RejectedRow, Row, read_json_rows
from espalier.data.splits import SplitPlan, check_shard, passage_key, shard_of, split_key
from espalier.data.splitters import SPLITTERS, splitter
from espalier.data.tables import read_hub_rows, read_parquet_rows

log = logging.getLogger(__name__)

# A gold to read an answer by where the problem has none, for the kinds that do not take any text.
_MOST_SHARE, _MOST_ROWS = 0.25, 20  # of the problems of a split, that have one context and count as of one passage
_STAND_INS = {"choice": "A", "boolean3": "True"}
_SPLIT = re.compile(r"[A-Za-z0-9][\w-]*")
Rows = tuple[list[Problem], list[RejectedRow]]


def without_common_passages(read: Sequence[Problem | str], place: str) -> list[Problem | str]:
    """Return problems, of which those whose passage more than `_MOST_SHARE` of them have stand for themselves: an
    instruction or a table that all share would leave nothing to split."""
    counts = Counter(one.passage_id for one in read if isinstance(one, Problem) and one.passage_id)
    common = {name for name, number in counts.items() if number > max(_MOST_ROWS, _MOST_SHARE * len(read))}
    if not common:
        return list(read)
    log.warning("%s: %d problems have one context, more than a quarter of them: it is taken for an instruction, and "
                "splits part them (give rows a passage_id to keep them together)", place,
                max(counts[name] for name in common))  # fmt: skip
    return [replace(one, passage_id="") if isinstance(one, Problem) and one.passage_id in common
            and one.passage_id == passage_key(one.context) else one for one in read]  # fmt: skip


@dataclass(frozen=True)
class PublishedTask:
    """Problems of one published set.

    `path`: a file, or a folder that holds the files in their published place (the set's own folder, or one above).
    `hub`, `hub_config`, `revision`: read from the Hugging Face hub instead. `kind`: how answers are compared
    (`data.answers`; "marked_number" is the number after the last `####`). `steps`: how responses are cut
    (`data.splitters`). `option_order`: "" as published, letters such as "BCAD" (the first option shown is the
    published B), or "seeded" (drawn for each problem from `option_seed` and its id); the gold letter moves along,
    and `info["option_order"][i]` is the published index of option i. An option that speaks of others by their
    letters is not rewritten. `splits` divides the published splits anew; then `shard` of `num_shards` is taken,
    then the first `limit` problems (0: all). `skip_bad_rows`: leave malformed rows out, with a warning.
    """

    path: str = ""
    template: PromptTemplate = field(default_factory=PromptTemplate)
    kind: str = "choice"
    steps: str = "lines"
    hub: str = ""
    hub_config: str = ""
    revision: str = ""
    option_order: str = ""
    option_seed: int = 0
    splits: SplitPlan | None = None
    shard: int = 0
    num_shards: int = 1
    limit: int = 0
    skip_bad_rows: bool = False

    name = ""
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "dev": "validation", "test": "test"}
    has_solutions: ClassVar[bool] = False
    remedy: ClassVar[str] = "is it the published file?"
    """Of a file that no task takes."""

    def __post_init__(self) -> None:
        order = self.option_order
        check_shard(self.shard, self.num_shards, f"{self.name}: task")
        for is_good, need in (
            (self.kind in KINDS, f"task.kind must be one of {', '.join(KINDS)}, got '{self.kind}'"),
            (self.steps in SPLITTERS, f"task.steps must be one of {', '.join(SPLITTERS)}, got '{self.steps}'"),
            (order in ("", "seeded") or sorted(order) == list(LETTERS[: len(order)]),
             f"task.option_order must be '', 'seeded' or each of the first letters once (BCAD), got '{order}'"),
            (self.limit >= 0, f"task.limit must be 0 (all) or more, got {self.limit}"),
        ):  # fmt: skip
            if not is_good:
                raise BadInput(f"{self.name}: {need}")

    # What a set says itself.

    def problem(self, row: Row) -> Problem:
        """Read the problem of a row; its id is the published one, or "". Raises BadRow where there is none."""
        raise NotImplementedError

    def read_file(self, path: Path) -> list[Row]:
        """Return the rows of a published file: Parquet by its name, else JSON (or of a folder, where the set is
        published so)."""
        return read_parquet_rows(path) if path.suffix == ".parquet" else read_json_rows(path)

    def expand(self, row: Row) -> list[Row]:
        """Return one row for each question, where a published row holds several."""
        return [row]

    # What every set has.

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of a split. Raises BadInput at the first row that is malformed."""
        problems, rejected = self.read_rows(split)
        if rejected:
            first = f"{rejected[0].file}:{rejected[0].line}: {rejected[0].reason}"
            more = f" (and {len(rejected) - 1} more rows)" if len(rejected) > 1 else ""
            if not problems:
                raise BadInput(f"{first}{more}: {self.who_takes(rejected)}")
            if not self.skip_bad_rows:
                raise BadInput(f"{first}{more}: correct or remove it, or set task.skip_bad_rows=true")
            log.warning("%s/%s: %d rows left out: %s%s", self.name, split, len(rejected), first, more)
        return problems

    def read_rows(self, split: str) -> Rows:
        """Return (problems, rejected rows) of a split: together every row of its files. Raises BadInput only for what
        is wrong with a file as a whole."""
        problems, rejected = self.read_split(self._own_name(split))
        problems = [p for p in problems if shard_of(p.id, self.num_shards) == self.shard]
        problems = problems[: self.limit] if self.limit else problems
        return [self._reordered(problem) for problem in problems], rejected

    def who_takes(self, rejected: Sequence[RejectedRow]) -> str:
        """Of a file whose rows are all rejected: which tasks would take it, or that none does."""
        from espalier.data.tasks.layouts import tasks_that_take  # which imports every set, and they this module

        path = Path(rejected[0].file)
        names = tasks_that_take(path) if path.is_file() else []
        if names:
            return f"no row of this file is {self.name}'s: choose task={' or '.join(names)}"
        return f"no row of this file is {self.name}'s, nor another task's: {self.remedy}"

    def read_split(self, split: str) -> Rows:
        """Return the whole split, by the plan where one names it."""
        plan = self.plan()
        if plan is None or split not in plan.sizes:
            return self.read_published(split)
        problems, rejected = self.read_pool(plan)
        assigned = plan.assign({problem.id: split_key(problem) for problem in problems})
        note = plan.note(len(problems))
        if note:
            log.warning("%s: %s", self.name, note)
        return [problem for problem in problems if assigned[problem.id] == split], rejected

    def plan(self) -> SplitPlan | None:
        """Return the split plan, if there is one."""
        return self.splits

    def files_of(self, split: str) -> list[str]:
        """Return the files (of a set published so, the folder) here that the problems of a split are read from."""
        if self.hub:
            return []
        own, plan = self._own_name(split), self.plan()
        published = plan.pool if plan is not None and own in plan.sizes else [own]
        try:
            found = [self._find(name) for name in published]
        except BadInput:  # said to who asks for the problems
            return []
        return [str(path) for path in found if path is not None]

    def read_pool(self, plan: SplitPlan) -> Rows:
        """Return what the plan divides: those of its published splits that are there."""
        there = [split for split in plan.pool if self.hub or self._find(split) is not None]
        for split in sorted(set(plan.pool) - set(there)) if there else []:
            log.warning("%s: the plan also divides the split '%s', which is not in %s", self.name, split, self.path)
        parts = [self.read_published(split) for split in there or plan.pool]
        return [p for problems, _ in parts for p in problems], [r for _, rejected in parts for r in rejected]

    def read_published(self, split: str) -> Rows:
        """Return all rows of a published split, in file order."""
        rows = [question for row in self._rows(split) for question in ([row] if row.error else self.expand(row))]
        return self.read_problems(rows, split)

    def read_problems(self, rows: list[Row], split: str) -> Rows:
        """Make problems with their ids from rows, and list the rows that are none.

        A BadRow that a row raises becomes the reason there.
        """
        problems: list[Problem] = []
        rejected: list[RejectedRow] = []
        taken: set[str] = set()
        read = without_common_passages([self._read_problem(row) for row in rows], f"{self.name}/{split}")
        has_golds = any(isinstance(problem, Problem) and problem.gold for problem in read)
        for index, (row, problem) in enumerate(zip(rows, read, strict=True)):
            try:
                if isinstance(problem, str):
                    raise BadRow(problem)
                if has_golds and problem.options and not problem.gold:
                    raise BadRow("no gold answer, where other rows of the file have theirs")
                problems.append(self._named(problem, split, index, taken))
            except BadRow as error:
                rejected.append(row.rejected(str(error)))
        return problems, rejected

    def _read_problem(self, row: Row) -> Problem | str:
        """Return the problem of a row, or why there is none."""
        try:
            if row.error:
                raise BadRow(row.error)
            problem = self.problem(row)
            _check_choice(problem)
        except BadRow as error:
            return str(error)
        if problem.context and not problem.passage_id:
            return replace(problem, passage_id=passage_key(problem.context))
        return problem

    def demonstrations(self, split: str) -> list[Demonstration]:
        """Return the published worked solutions of the problems that have a gold. Raises BadInput where the set has
        none."""
        if not self.has_solutions:
            raise BadInput(f"{self.name} has no worked solutions: sample some and select the right ones")
        return [
            Demonstration(
                f"{problem.id}/gold", self.prompt(problem), self.template.completion(problem.info["solution"])
            )
            for problem in self.problems(split)
            if problem.gold and problem.info.get("solution")
        ]

    def prompt(self, problem: Problem) -> str:
        """Return the text the model continues, by the template."""
        return self.template.render(problem)

    def split_steps(self, response: str) -> list[str]:
        """Return steps that join to the response exactly, cut as `steps` says."""
        return splitter(self.steps)(response)

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        """Compare the response's final answer with the gold answer, as `kind_of` says.

        Without a gold ("") the answer is read all the same, and never right: a prediction to hand in.
        """
        kind = self.kind_of(gold)
        if gold:
            return grade_answer(prediction=response, gold=gold, kind=kind, num_options=num_options)
        stand_in = _STAND_INS.get(kind, "0")
        answer = grade_answer(prediction=response, gold=stand_in, kind=kind, num_options=num_options).answer
        return Grade(answer, False, "the problem is published without an answer")

    def kind_of(self, gold: Gold) -> str:
        """Return how answers to this gold are compared; a set whose answers differ in kind says so here."""
        return self.kind

    def places(self, split: str) -> tuple[str, ...]:
        """Say where the file of a split may stand in `path`: the published places; of a split that is not the set's own
        (`ood`, `mini_test`) a file of that name in the same folders. Raises BadInput on what is no name."""
        if split in self.files:
            return self.files[split]
        if not _SPLIT.fullmatch(split):
            raise BadInput(f"{self.name}: a split is a name of letters, digits, '_' and '-', got '{split}'")
        published = [Path(place) for places in self.files.values() for place in places]
        beside = dict.fromkeys((place.parent, place.suffix) for place in published)
        return tuple(str(folder / f"{split}{ending}") for folder, ending in beside)

    def _own_name(self, split: str) -> str:
        """Return what the set itself calls a split that is named as on the hub."""
        own = {published: name for name, published in self.hub_splits.items() if name in self.files}
        return split if split in self.files else own.get(split, split)

    def _rows(self, split: str) -> list[Row]:
        if self.hub:
            return read_hub_rows(self.hub, self.hub_config, self.hub_splits.get(split, split), self.revision)
        path = self._find(split)
        if path is None:
            places, own = ", ".join(self.places(split)), ", ".join(self.files)
            is_own = split in self.files
            what = "" if is_own else f"no published split '{split}': it has {own} (task.splits can draw others), and "
            raise BadInput(f"{self.name}: {what}none of {places} is in {self.path}: set task.path=FOLDER")
        return self.read_file(path)

    def _find(self, split: str) -> Path | None:
        """Return the split's file in `path`, None where it is not there."""
        if not self.path:
            raise BadInput(f"{self.name} needs its files: set ESPALIER_DATA, task.path=FOLDER or task.hub=NAME")
        base = Path(self.path)
        if not base.exists():
            raise BadInput(f"{self.name}: no such folder {self.path}: set task.path=FOLDER")
        if base.is_file():
            return self._given_file(base, split)
        for place in self.places(split):
            for path in (base / place, base / f"{place}.gz"):
                if path.exists():
                    return path
        return None

    def _given_file(self, path: Path, split: str) -> Path | None:
        """Read one file, `path`: it is any split the user calls it, unless its published name says which it is."""
        name = path.name.removesuffix(".gz")
        holds = [own for own in self.files if name in {Path(place).name for place in self.places(own)}]
        if holds and split not in holds:
            raise BadInput(f"{self.name}: {path} holds the split '{holds[0]}' and not '{split}': name its folder")
        self.places(split)  # raises on what is no name
        return path

    def _named(self, problem: Problem, split: str, index: int, taken: set[str]) -> Problem:
        """Return the problem with its id, unique in its file."""
        clean = re.sub(r"[^\w.-]+", "-", problem.id).strip("-")
        first = identity = f"{self.name}-{split}-{clean or index}"
        repeat = 1
        while identity in taken:
            repeat += 1
            identity = f"{first}.{repeat}"
        taken.add(identity)
        is_changed = clean != problem.id or identity != first
        info = {**problem.info, "published_id": problem.id} if is_changed else problem.info
        return replace(problem, id=identity, info=info)

    def _reordered(self, problem: Problem) -> Problem:
        """Return the problem with its options in the order asked for."""
        count = len(problem.options)
        if not count or not self.option_order:
            return problem
        order = list(range(count))
        if self.option_order == "seeded":
            random.Random(f"{self.option_seed}/{problem.id}").shuffle(order)
        elif len(self.option_order) < count:
            raise BadInput(f"{problem.id} has {count} options: task.option_order={self.option_order} is too short")
        else:
            order = [LETTERS.index(letter) for letter in self.option_order if LETTERS.index(letter) < count]
        gold = LETTERS[order.index(LETTERS.index(str(problem.gold)))] if problem.gold else ""
        published = problem.info.get("option_order", range(count))  # a file of problems can be reordered already
        info = {**problem.info, "option_order": [published[i] for i in order]}
        return replace(problem, options=[problem.options[i] for i in order], gold=gold, info=info)


def _check_choice(problem: Problem) -> None:
    """Raise BadRow unless there are at least two options and the gold is the letter of one, or unknown."""
    letters = LETTERS[: len(problem.options)]
    if len(problem.options) == 1 or len(problem.options) > len(LETTERS):
        raise BadRow(f"a choice has 2 to {len(LETTERS)} options, got {len(problem.options)}")
    if problem.options and problem.gold not in ("", *letters):
        raise BadRow(f"the gold answer must be one of the letters {', '.join(letters)}, got {problem.gold!r}")


def letter_of(index: int, num_options: int) -> str:
    """0 → "A". Raises BadRow outside the options."""
    if not 0 <= index < num_options:
        raise BadRow(f"the gold option must be 0 to {num_options - 1}, got {index}")
    return LETTERS[index]
