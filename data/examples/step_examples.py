"""Trajectories with a value at every step end → `StepExample`: Monte-Carlo values, and published judgements.

Steps that nobody judged carry no read. Two forms, with equal losses under a causal model: one example a
trajectory, read at every step end in one pass; or one example a prefix, read at its last token (Jiao et al.
2024), which costs a pass a step.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from espalier.data.examples.label_balance import check_balance, inner_steps
from espalier.data.examples.token_examples import StepExample, keep_short, leave_out_repeated, of_part
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.process_data.formats import read_labelled, step_format, to_step_texts
from espalier.data.prompts import PromptTemplate
from espalier.data.records import AnnotatedSolution, BadInput, Problem, StepValues
from espalier.data.token_text import tokenise_steps

log = logging.getLogger(__name__)


def check_step_example(example: StepExample, path: str) -> StepExample:
    """Return the example itself. Raises BadInput unless every position has a value in [0, 1] and lies in the text."""
    if len(example.positions) != len(example.values):
        numbers = f"{len(example.positions)} step ends and {len(example.values)} values"
        raise BadInput(f"{path}: '{example.id}' has {numbers}: give one value per step")
    if example.weights and (len(example.weights) != len(example.values) or min(example.weights) < 0):
        raise BadInput(f"{path}: '{example.id}': weights must be at least 0, one per step end, got {example.weights}")
    for step, (position, value) in enumerate(zip(example.positions, example.values, strict=True), 1):
        if not 0 <= value <= 1:
            place = f"label {step} (nulls are not counted)"
            raise BadInput(f"{path}: '{example.id}': {place} must be in [0, 1], got {value}")
        if not 0 <= position < len(example.ids):
            raise BadInput(f"{path}: '{example.id}': read {step} is at token {position} of {len(example.ids)}")
    return example


def prefix_examples(example: StepExample) -> list[StepExample]:
    """Return one example for each read: the ids up to it, read at their last token."""
    weights = example.weights or [1.0] * len(example.values)
    outcome = len(example.values) if example.has_outcome else 0
    return [
        StepExample(
            f"{example.id}#{step}",
            example.ids[: position + 1],
            [position],
            [value],
            [weight],
            step == outcome,
            example.problem_id,
        )
        for step, (position, value, weight) in enumerate(
            zip(example.positions, example.values, weights, strict=True), 1
        )
    ]


def class_weights(values: Sequence[float], num_classes: int) -> list[float]:
    """Return weights with mean 1 that give all classes that occur the same sum; class of v = round(v * (n - 1)).

    `num_classes` n = 2 balances good against bad at 1/2 (a value of exactly 1/2 is good), n = K + 1 the numbers
    of correct completions.
    """
    classes = [int(value * (num_classes - 1) + 0.5) for value in values]
    sizes = Counter(classes)
    return [len(values) / (len(sizes) * sizes[index]) for index in classes]


def finish_steps(
    examples: list[StepExample], path: str, max_length: int, one_example_per: str, balanced_classes: int
) -> list[StepExample]:
    """Apply the settings that both sources share, in this order: cut into prefixes, leave out the long, weigh classes.

    Raises BadInput where `one_example_per` or `balanced_classes` has another value than those allowed.
    """
    if one_example_per not in ("trajectory", "prefix"):
        raise BadInput(f"examples.one_example_per must be trajectory or prefix, got '{one_example_per}'")
    if balanced_classes < 0 or balanced_classes == 1:
        raise BadInput(f"examples.balanced_classes must be 0 (off) or at least 2, got {balanced_classes}")
    examples = [check_step_example(example, path) for example in examples]
    if one_example_per == "prefix":
        examples = [part for example in examples for part in prefix_examples(example)]
    examples = keep_short(examples, max_length, path)
    if not balanced_classes:
        return examples
    weights = iter(class_weights([value for example in examples for value in example.values], balanced_classes))
    return [
        replace(example, weights=[own * next(weights) for own in example.weights or [1.0] * len(example.values)])
        for example in examples
    ]


@dataclass(frozen=True)
class StepValueExamples:
    """PRM examples of a file of `StepValues`: the problems of one `part` ("all", "train", "held_out").

    A step is read for its label, weighed by the label's weight, and the loss is a weighted mean; steps without a label
    or of the weight 0 are not read.
    """

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    is_distinct: bool = True
    """each distinct text once, the first one with any label: a tiny policy repeats itself"""
    min_weight: float = 0.0
    """steps of less weight are not read"""
    is_weighted: bool = True
    """false: all that is read counts in full"""
    one_example_per: str = "trajectory"
    balanced_classes: int = 0
    """n > 0: n classes of labels get equal weight (`class_weights`), times the labels' own weights"""

    def load(self, tokenizer: Any) -> list[StepExample]:
        """Return examples in file order; `tokenizer` is not used: ids come from the sampler. Raises BadInput where
        nothing is left to train on, and where all labels of inner steps are alike though the states' values say
        otherwise (`data.examples.label_balance`)."""
        examples: list[StepExample] = []
        seen: set[tuple[str, tuple[int, ...]]] = set()
        records = of_part(read_records(StepValues, self.path), self)
        num_repeated, num_unread = 0, 0
        for record in records:
            key = (record.problem_id, tuple(record.response_ids))
            if self.is_distinct and key in seen:
                num_repeated += 1
                continue
            example = self._example(record)
            num_unread += not example.values
            if example.values:
                seen.add(key)
                examples.append(example)
        leave_out_repeated(self.path, num_repeated, len(records), "trajectories")
        leave_out(self.path, num_unread, len(records), "trajectories", "have no labelled step")
        num_steps = sum(len(record.labels) for record in records)
        num_unlabelled = sum(record.labels.count(None) for record in records)
        leave_out(self.path, num_unlabelled, num_steps, "steps", "have no label", is_asked_for=True)
        if records and not examples:
            raise BadInput(f"{self.path}: no labelled step to train on (of {len(records)} trajectories)")
        check_balance(*inner_steps(records), self.path, "make them by another stage.threshold, or soft")
        return finish_steps(examples, self.path, self.max_length, self.one_example_per, self.balanced_classes)

    def _example(self, record: StepValues) -> StepExample:
        if len(record.step_ends) != len(record.steps):
            numbers = f"{len(record.steps)} steps and {len(record.step_ends)} step ends"
            raise BadInput(f"{self.path}: '{record.id}' has {numbers}: give one per step")
        start = len(record.prompt_ids)
        rows = zip(record.step_ends, record.labels, record.weights, strict=True)
        kept = [(start + end - 1, label, weight) for end, label, weight in rows
                if label is not None and weight > 0 and weight >= self.min_weight]  # fmt: skip
        weights = [weight for _, _, weight in kept] if self.is_weighted else []
        return StepExample(
            record.id,
            record.prompt_ids + record.response_ids,
            [place for place, _, _ in kept],
            [label for _, label, _ in kept],
            [] if set(weights) <= {1.0} else weights,
            has_outcome=bool(kept) and kept[-1][0] == start + record.step_ends[-1] - 1,
            problem_id=record.problem_id,
        )


def without_seen(example: StepExample, seen: set[tuple[bytes, float]]) -> StepExample:
    """Return the example without the reads whose (prefix of ids, value) is in `seen`, which takes in the others."""
    digest = hashlib.blake2b(digest_size=16)
    start, kept = 0, []
    for position, value in sorted(zip(example.positions, example.values, strict=True)):
        digest.update(b"".join(token.to_bytes(4, "little") for token in example.ids[start : position + 1]))
        start, key = position + 1, (digest.digest(), value)
        if key not in seen:
            seen.add(key)
            kept.append((position, value))
    return replace(example, positions=[place for place, _ in kept], values=[value for _, value in kept])


def encode_labelled(
    tokenizer: Any, record: AnnotatedSolution, template: PromptTemplate, path: str
) -> StepExample | None:
    """Encode a judged solution as ids, read at the end of every step that somebody judged; None where its text does
    not come back from its ids, so that no step end could be trusted.

    A step is read at the token that holds its last character (`tokenise_steps`), and of judged steps that end in one
    token (one of them is blank, say) the last is: what is learnt there has one target. A solution that reached an
    answer (`is_correct` is known) ends with the end token, which its last step takes in. Raises BadInput where steps
    and labels differ in number.
    """
    problem = Problem(record.id, record.question, record.gold)
    prompt_ids = template.encode(tokenizer, problem).ids
    _, steps, labels = to_step_texts(record, template)
    if len(steps) != len(labels):
        raise BadInput(f"{path}: '{record.id}' has {len(steps)} steps and {len(labels)} labels: give one per step")
    steps = [template.before_response + steps[0], *steps[1:]] if steps else []
    tokens = tokenise_steps(tokenizer, prompt_ids, steps, is_finished=record.is_correct is not None)
    if tokens is None:
        return None
    reads = {
        len(prompt_ids) + end - 1: float(label)
        for end, label in zip(tokens.step_ends, labels, strict=True)
        if label is not None
    }
    ids = prompt_ids + tokens.response_ids
    return StepExample(record.id, ids, list(reads), list(reads.values()), problem_id=record.problem_id)


def warn_of_steps_run_together(records: Sequence[AnnotatedSolution], path: str) -> None:
    """Warn where most solutions of several steps have no white space between any two of them: "2 pens.6 and 7"."""
    joined = [to_step_texts(record)[1] for record in records]
    several = [steps for steps in joined if len(steps) > 1]
    together = [steps for steps in several if not any(a[-1:].isspace() or b[:1].isspace() for a, b in pairwise(steps))]
    if 2 * len(together) > len(several):
        first, second = together[0][:2]
        log.warning(
            "%s: %d of %d solutions have no white space between steps, and are read as '%s': end each step but the "
            'last with a newline, or give {"separator": "\\n"} as info',
            path, len(together), len(several), first[-12:] + second[:12],
        )  # fmt: skip


@dataclass(frozen=True)
class AnnotatedSolutionExamples:
    """PRM examples of judged solutions: a file of `AnnotatedSolution`, or with `format` a published file as it is
    (math_shepherd, prm800k and the others of `data.process_data.formats`).

    `template` (conf/prompt/) asks the question, null: the question and a newline. `alternatives` and
    `neutral_label` are PRM800K's. `is_distinct`: the same prefix with the same label is read once, whichever
    solutions share it (the paths of a tree, the alternatives of a step); a solution with no read left goes.
    """

    path: str
    max_length: int
    format: str = ""
    template: Any = None
    alternatives: bool = False
    neutral_label: float = 1.0
    part: str = "all"
    held_out_share: float = 0.0
    is_distinct: bool = True
    one_example_per: str = "trajectory"
    balanced_classes: int = 0

    def load(self, tokenizer: Any) -> list[StepExample]:
        """Return the examples in file order; warn of what is left out, with numbers.

        Raises BadInput where a row is malformed, or `finish_steps` does.
        """
        template = self.template or PromptTemplate()
        examples: list[StepExample] = []
        seen: set[tuple[bytes, float]] = set()
        num_unjudged, num_lost, num_repeated = 0, 0, 0
        records = of_part(self._records(), self)
        warn_of_steps_run_together(records, self.path)
        for record in records:
            example = encode_labelled(tokenizer, record, template, self.path)
            if example is None:
                num_lost += 1
            elif not example.values:
                num_unjudged += 1
            else:
                fresh = without_seen(example, seen) if self.is_distinct else example
                examples += [fresh] if fresh.values else []
                num_repeated += not fresh.values
        for number, why in ((num_unjudged, "have no judged step"), (num_lost, "change when they are tokenised")):
            leave_out(self.path, number, len(records), "solutions", why)
        leave_out_repeated(self.path, num_repeated, len(records), "solutions")
        return finish_steps(examples, self.path, self.max_length, self.one_example_per, self.balanced_classes)

    def _records(self) -> Sequence[AnnotatedSolution]:
        if not self.format:
            return read_records(AnnotatedSolution, self.path)
        form = step_format(self.format, alternatives=self.alternatives, neutral_label=self.neutral_label)
        return list(read_labelled(self.path, form))
