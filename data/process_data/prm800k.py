"""PRM800K (Lightman et al. 2023), both phases: JSON lines of `question`, `label` and facts of the labelling.

`label.steps` holds, for each step, `completions` (each with `rating` -1, 0 or 1, or null where nobody rated it),
`human_completion` (written by the labeller, phase 1) and `chosen_completion` (the index of the one the solution
goes on with). The path takes the chosen completion, else the human one; it ends where there is neither, and
where the labelling stopped for an error (`finish_reason` "found_error") it ends with the wrong step itself:
the completion of the pre-generated solution if that is rated -1, else the first rated -1.

A label is 1 for the rating 1, 0 for -1, `neutral_label` for 0 (1 by default: the paper's scores count
neutral as positive), None for null. A human completion has the label None (or that of its `corrected_rating`),
and counts as right when the first error is sought. The first error is the first step rated -1; None where a
step of the model before it, or without it, was not rated; else -1. `is_correct` is True where a solution ends in
the published answer, word for word, and None everywhere else.

With `alternatives`, every completion that the path does not take is a record of its own: the path before it and
the completion as last step, `info["is_alternative"]` true. Steps are published as a list; a text is made of them
with newlines between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from espalier.data.process_data.published import JsonRow, problem_key, take_known
from espalier.data.records import AnnotatedSolution, BadInput

ANSWER_MARK = "# Answer\n\n"


@dataclass(frozen=True)
class PRM800KRow:
    """The columns that are read; the labeller, the time and others are only kept."""

    question: dict[str, Any]
    label: dict[str, Any]


@dataclass(frozen=True)
class Question:
    """The field of `question` that every row has."""

    problem: str


@dataclass(frozen=True)
class Known:
    """Fields of `question` that some rows lack; they are kept as they are."""

    ground_truth_answer: str | None = None
    pre_generated_steps: list[str] | None = None


@dataclass(frozen=True)
class Label:
    """The fields of `label` that are read."""

    steps: list[dict[str, Any]]
    finish_reason: str


@dataclass(frozen=True)
class Step:
    """The fields of a step that are read."""

    completions: list[dict[str, Any]] | None
    human_completion: dict[str, Any] | None
    chosen_completion: int | None


@dataclass(frozen=True)
class Completion:
    """One completion of a step."""

    text: str
    rating: int | None


@dataclass(frozen=True)
class HumanCompletion:
    """A step the labeller wrote."""

    text: str
    rating: int | None = None
    corrected_rating: int | None = None


@dataclass(frozen=True)
class Judged:
    """A step of a path. `number` is that of the completion, None for the human one."""

    text: str
    rating: int | None
    number: int | None


def _rating(rating: int | None, place: str) -> int | None:
    if rating not in (-1, 0, 1, None):
        raise BadInput(f"{place}: rating must be -1, 0, 1 or null, got {rating}")
    return rating


def _judged(step: Step, place: str) -> tuple[list[Judged], Judged | None]:
    """Return (all completions of a step, the one the path takes or None)."""
    options: list[Judged] = []
    for number, value in enumerate(step.completions or []):
        where = f"{place}: completion {number}"
        completion, _ = take_known(Completion, value, where)
        options.append(Judged(completion.text, _rating(completion.rating, where), number))
    if step.chosen_completion is not None:
        if not 0 <= step.chosen_completion < len(options):
            raise BadInput(f"{place}: chosen_completion must be null or 0..{len(options) - 1}, "
                           f"got {step.chosen_completion}")  # fmt: skip
        return options, options[step.chosen_completion]
    if step.human_completion is not None:
        where = f"{place}: human_completion"
        human, _ = take_known(HumanCompletion, step.human_completion, where)
        rating = human.rating if human.corrected_rating is None else human.corrected_rating
        return options, Judged(human.text, _rating(rating, where), None)
    return options, None


def _found_error(options: Sequence[Judged], planned: Sequence[str], index: int) -> Judged | None:
    """Return the wrong step that ended the labelling."""
    wrong = [option for option in options if option.rating == -1]
    from_plan = [option for option in wrong if index < len(planned) and option.text == planned[index]]
    return next(iter([*from_plan, *wrong]), None)


@dataclass(frozen=True)
class PRM800K:
    """The path first, then its alternatives in published order."""

    alternatives: bool = False
    neutral_label: float = 1.0

    name = "prm800k"
    is_array = False

    def __post_init__(self) -> None:
        if not 0 <= self.neutral_label <= 1:
            raise BadInput(f"neutral_label must lie in [0, 1], got {self.neutral_label}")

    def _value(self, rating: int | None) -> float | None:
        return None if rating is None else {-1: 0.0, 0: self.neutral_label, 1: 1.0}[rating]

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput on an unknown rating or a choice of a completion that is not there."""
        known, extra = take_known(PRM800KRow, row, place)
        question, other_of_question = take_known(Question, known.question, f"{place}: question")
        optional, _ = take_known(Known, other_of_question, f"{place}: question")
        label, other_of_label = take_known(Label, known.label, f"{place}: label")
        path: list[Judged] = []
        branches: list[tuple[int, Judged]] = []
        for index, value in enumerate(label.steps):
            where = f"{place}: step {index}"
            options, taken = _judged(take_known(Step, value, where)[0], where)
            is_end = taken is None
            if is_end and label.finish_reason == "found_error":
                taken = _found_error(options, optional.pre_generated_steps or [], index)
            branches += [(index, option) for option in options if taken is None or option.number != taken.number]
            if taken is not None:
                path.append(taken)
            if is_end:
                break
        answer = path[-1].text.rpartition(ANSWER_MARK)[2].strip() if path else ""
        is_solved = label.finish_reason == "solution" and len(path) == len(label.steps)
        gold = optional.ground_truth_answer or ""
        new = partial(self._record, question.problem, gold)
        main = new(f"prm800k-{key}", path, {"row": key})
        main.info.update(
            is_alternative=False,
            question=other_of_question,
            step_records=label.steps,
            finish_reason=label.finish_reason,
            label=other_of_label,
            extra=extra,
        )
        is_right = True if is_solved and gold and answer == gold.strip() else None
        records = [AnnotatedSolution(**{**vars(main), "is_correct": is_right})]
        for index, option in branches if self.alternatives else []:
            info = {"row": key, "is_alternative": True, "step": index, "completion": option.number}
            identity = f"prm800k-{key}/{index}.{option.number}"
            records.append(new(identity, [*path[:index], option], info))
        return records

    def _record(
        self, problem: str, gold: str, identity: str, path: Sequence[Judged], info: dict[str, Any]
    ) -> AnnotatedSolution:
        return AnnotatedSolution(
            id=identity,
            problem_id=problem_key(problem),
            question=problem,
            steps=[step.text for step in path],
            labels=[self._value(step.rating) for step in path],
            first_error=_first_error(path),
            is_correct=None,
            gold=gold,
            info={"format": self.name, "separator": "\n", **info},
        )

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Make a row of this format from the record of its path.

        Raises BadInput where that record is missing, is of another format, or was changed since it was read.
        """
        mains = [record for record in records if not record.info.get("is_alternative", True)]
        if not mains or mains[0].info.get("format") != self.name:
            raise BadInput(f"{place}: prm800k holds only rows it was read from, with the record of the chosen path: "
                           "export it as trl")  # fmt: skip
        main, info = mains[0], mains[0].info
        label = Label(info["step_records"], info["finish_reason"])
        row = {
            **info["extra"],
            "question": {"problem": main.question, **info["question"]},
            "label": {**vars(label), **info["label"]},
        }
        again = self.read(row, info["row"], place)[0]
        if (again.steps, again.labels, again.first_error) != (main.steps, main.labels, main.first_error):
            raise BadInput(f"{place}: its steps or labels were changed since it was read (or read with another "
                           "neutral_label): export it as trl")  # fmt: skip
        return row


def _first_error(path: Sequence[Judged]) -> int | None:
    for index, step in enumerate(path):
        if step.rating == -1:
            return index
        if step.rating is None and step.number is not None:
            return None
    return -1
