"""Labelled steps of our own trajectories: what a process reward model is trained on, with what it rests on."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from espalier.data.examples.label_balance import check_balance
from espalier.data.examples.step_examples import finish_steps
from espalier.data.examples.token_examples import StepExample, leave_out_repeated, of_part
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput


@dataclasses.dataclass(frozen=True)
class StepLabels:
    """One trajectory with labels and weights of its steps, and the counts they were made of; the lists have one entry
    per step, `prompt_ids` and `response_ids` one per token.

    The last state is terminal: its value is the outcome, counted once."""

    id: str
    """the trajectory's id"""
    problem_id: str
    prompt: str
    steps: list[str]
    prompt_ids: list[int]
    response_ids: list[int]
    step_ends: list[int]
    labels: list[float | None]
    """the target of each step in [0, 1]; null where it is left out"""
    weights: list[float]
    """how much each label counts, in [0, 1]"""
    values: list[float | None]
    """estimated value of the state after each step; null where it is not known"""
    low: list[float]
    """lower end of its 95 % interval"""
    high: list[float]
    """upper end of its 95 % interval"""
    num_correct: list[int]
    """right completions of that very state"""
    num_completions: list[int]
    """completions of that very state"""
    prompt_value: float
    """share of the problem's trajectories that are right"""
    is_correct: bool


def inner_steps(records: Iterable[StepLabels]) -> tuple[list[float | None], list[float | None]]:
    """(labels, values) of all steps but the last one of every record, whose state is terminal."""
    rows = list(records)
    labels = [label for row in rows for label in row.labels[:-1]]
    return labels, [value for row in rows for value in row.values[:-1]]


@dataclass(frozen=True)
class StepLabelExamples:
    """PRM examples of a file of `StepLabels`: the problems of one `part` ("all", "train", "held_out"), each distinct
    text once. A read carries the weight of its label, and the loss is a weighted mean; steps without a label, of the
    weight 0 or below `min_weight` are not read. `is_weighted` false: all that is read counts in full.

    Trajectories with the same ids can carry different labels where a judge saw each of them: the first one with any
    stays. `one_example_per` and `balanced_classes` as in `data.examples.step_examples.StepValueExamples`; class weights
    multiply the labels' own.
    """

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    min_weight: float = 0.0
    is_weighted: bool = True
    one_example_per: str = "trajectory"
    balanced_classes: int = 0

    def load(self, tokenizer: Any) -> list[StepExample]:
        """Examples in file order; `tokenizer` is not used. Raises BadInput where nothing is left to train on, and where
        all labels of inner steps are alike though the states' values say otherwise (`data.examples.label_balance`)."""
        examples: list[StepExample] = []
        seen: set[tuple[str, tuple[int, ...]]] = set()
        records = of_part(read_records(StepLabels, self.path), self)
        num_repeated, num_unread = 0, 0
        for record in records:
            key = (record.problem_id, tuple(record.response_ids))
            if key in seen:
                num_repeated += 1
                continue
            example = self._example(record)
            num_unread += not example.values
            if example.values:
                seen.add(key)
                examples.append(example)
        leave_out_repeated(self.path, num_repeated, len(records), "trajectories")
        leave_out(self.path, num_unread, len(records), "trajectories", "have no labelled step")
        if not examples:
            raise BadInput(f"{self.path}: no labelled step to train on (of {len(records)} trajectories)")
        check_balance(*inner_steps(records), self.path, "make them by another stage.threshold, or soft")
        return finish_steps(examples, self.path, self.max_length, self.one_example_per, self.balanced_classes)

    def _example(self, record: StepLabels) -> StepExample:
        start = len(record.prompt_ids)
        rows = zip(record.step_ends, record.labels, record.weights, strict=True)
        kept = [(start + end - 1, label, weight) for end, label, weight in rows
                if label is not None and weight > 0 and weight >= self.min_weight]  # fmt: skip
        return StepExample(
            record.id,
            record.prompt_ids + record.response_ids,
            [place for place, _, _ in kept],
            [label for _, label, _ in kept],
            [weight for _, _, weight in kept] if self.is_weighted else [],
            has_outcome=bool(kept) and kept[-1][0] == start + record.step_ends[-1] - 1,
            problem_id=record.problem_id,
        )
