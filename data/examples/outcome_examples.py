"""Judged responses → `OutcomeExample`: sampled trajectories with their outcome, and texts with a label.

For outcome reward models (pointwise) and for preferences without pairs (KTO).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.data.examples.step_examples import class_weights
from espalier.data.examples.token_examples import (
    OutcomeExample,
    TokenExample,
    encode_demonstrations,
    keep_short,
    leave_out_repeated,
    of_part,
)
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Demonstration, Trajectory


@dataclass(frozen=True)
class JudgedResponse:
    """A response somebody called good or bad (TRL's unpaired-preference layout with ids)."""

    id: str
    """unique in the file"""
    problem_id: str
    prompt: str
    completion: str
    label: bool | float
    """true or false, or a probability in [0, 1] that the completion is good"""
    prompt_ids: list[int] = field(default_factory=list)
    """token ids of the prompt where it is tokenised already (with `completion_ids`); else empty"""
    completion_ids: list[int] = field(default_factory=list)
    """token ids of the completion and its end token where it is tokenised already; else empty"""


def with_mismatched(examples: list[OutcomeExample], max_length: int, path: str) -> list[OutcomeExample]:
    """Return each example with a response to another problem, cut where it would pass `max_length` tokens.

    Sorted by problem and shifted by the size of the largest problem, so that every response is lent once and never
    within its problem. Raises BadInput where one problem has more than half of the examples.
    """
    sizes = Counter(example.problem_id for example in examples)
    problem, size = max(sizes.items(), key=lambda item: item[1])
    if 2 * size > len(examples):
        raise BadInput(f"{path}: {size} of {len(examples)} responses are to problem '{problem}': at most half may be, "
                       "else there is no response to another one to compare with")  # fmt: skip
    order = sorted(range(len(examples)), key=lambda index: (examples[index].problem_id, index))
    mismatched = list(examples)
    for place, index in enumerate(order):
        lender = examples[order[(place + size) % len(order)]]
        room = max_length - examples[index].prompt_length
        mismatched[index] = replace(examples[index], mismatched_ids=lender.ids[lender.prompt_length :][:room])
    return mismatched


def finish_outcomes(
    examples: list[OutcomeExample], path: str, max_length: int, balanced_classes: int, has_mismatched: bool
) -> list[OutcomeExample]:
    """Do what both sources share, in this order: leave out the long, weigh the classes, lend responses.

    Raises BadInput where `balanced_classes` is 1 or negative, a label is not in [0, 1], or a prompt or a response is
    empty.
    """
    if balanced_classes < 0 or balanced_classes == 1:
        raise BadInput(f"examples.balanced_classes must be 0 (off) or at least 2, got {balanced_classes}")
    for example in examples:
        if not 0 <= example.value <= 1:
            raise BadInput(f"{path}: the label of '{example.id}' must be in [0, 1], got {example.value}")
        if example.prompt_length < 1 or example.prompt_length >= len(example.ids):
            raise BadInput(f"{path}: '{example.id}' has no prompt or no response tokens")
    examples = keep_short(examples, max_length, path)
    if balanced_classes:
        weights = class_weights([example.value for example in examples], balanced_classes)
        examples = [replace(example, weight=weight) for example, weight in zip(examples, weights, strict=True)]
    if has_mismatched:
        examples = with_mismatched(examples, max_length, path)
    return examples


@dataclass(frozen=True)
class TrajectoryOutcomeExamples:
    """Examples of a file of `Trajectory`: the value is 1 where the answer is right, else 0.

    `is_distinct` keeps the first of equal responses to a problem. `balanced_classes` 2 gives right and wrong
    responses the same weight. `has_mismatched` is for KTO.
    """

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    is_distinct: bool = True
    balanced_classes: int = 0
    has_mismatched: bool = False

    def load(self, tokenizer: Any) -> list[OutcomeExample]:
        """Return the examples in file order; `tokenizer` is not used: ids come from the sampler.

        Raises BadInput where a row is malformed, or `finish_outcomes` does.
        """
        examples = []
        seen: set[tuple[str, tuple[int, ...]]] = set()
        records = of_part(read_records(Trajectory, self.path), self)
        num_repeated = 0
        for record in records:
            key = (record.problem_id, tuple(record.response_ids))
            if self.is_distinct and key in seen:
                num_repeated += 1
                continue
            seen.add(key)
            ids = record.prompt_ids + record.response_ids
            value, problem = float(record.is_correct), record.problem_id
            examples.append(OutcomeExample(record.id, ids, len(record.prompt_ids), value, problem_id=problem))
        leave_out_repeated(self.path, num_repeated, len(records), "trajectories")
        return finish_outcomes(examples, self.path, self.max_length, self.balanced_classes, self.has_mismatched)


@dataclass(frozen=True)
class JudgedResponseExamples:
    """Examples of a file of `JudgedResponse`, by their ids where they have some, else tokenised as demonstrations are.
    The settings are those of `TrajectoryOutcomeExamples`."""

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    balanced_classes: int = 0
    has_mismatched: bool = False

    def load(self, tokenizer: Any) -> list[OutcomeExample]:
        """Return the examples in file order. Raises BadInput where a row is malformed, or `finish_outcomes` does."""
        records = of_part(read_records(JudgedResponse, self.path), self)
        encoded = self._encoded(tokenizer, records)
        examples = [
            OutcomeExample(
                record.id, tokens.ids, tokens.prompt_length, float(record.label), problem_id=record.problem_id
            )
            for record, tokens in zip(records, encoded, strict=True)
        ]
        return finish_outcomes(examples, self.path, self.max_length, self.balanced_classes, self.has_mismatched)

    def _encoded(self, tokenizer: Any, records: Sequence[JudgedResponse]) -> list[TokenExample]:
        """Return the tokens of each record. Raises BadInput where ids of a prompt or of a completion are missing."""
        for record in records:
            if bool(record.prompt_ids) != bool(record.completion_ids):
                raise BadInput(f"{self.path}: '{record.id}' has ids of its prompt or of its completion alone: give "
                               "both, or none")  # fmt: skip
        texts = [
            Demonstration(record.id, record.prompt, record.completion) for record in records if not record.prompt_ids
        ]
        encoded = iter(encode_demonstrations(tokenizer, texts, self.path))
        return [
            TokenExample(record.id, [*record.prompt_ids, *record.completion_ids], len(record.prompt_ids))
            if record.prompt_ids
            else next(encoded)
            for record in records
        ]
