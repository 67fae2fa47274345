"""Guards over a data set and the model it is for: before anything is trained, in one line each, with numbers.

What cannot be trained stops the run: ids outside the model's vocabulary, examples longer than the model's positions,
two examples of one id (and a tokenizer that does not fit: `models.tokenizer_checks`). What can, but is rarely meant,
is said: examples of which the loss reads nothing (they are left out), responses that do not end, evaluation
examples that are trained on.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from espalier.data.examples.label_balance import check_balance
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample, example_length
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput
from espalier.models.tokenizer_checks import Limits

log = logging.getLogger("train")
E = TypeVar("E")


def check_examples(examples: Sequence[E], path: str, limits: Limits, max_length: int | None = None) -> list[E]:
    """Return the examples the loss reads something of, in order. Warns of what is odd; raises BadInput on what cannot
    be trained on. `path` names their file, `max_length` is its setting."""
    _check_ids(examples, path)
    _check_vocabulary(examples, path, limits)
    _check_positions(examples, path, limits, max_length)
    kept = _without_masked(examples, path)
    for line in unended(kept, limits.ends):
        log.warning("%s: %s", path, line)
    return kept


def check_rate(learning_rate: float) -> None:
    """Raise BadInput on a rate that trains nothing, as experiments for models of any size have before one is chosen."""
    if not learning_rate > 0:
        raise BadInput(f"update.learning_rate is {learning_rate:g}: choose the size of the model, as size=dpo/7b (sft, "
                       "reward or dpo; docs/training.md), or set update.learning_rate")  # fmt: skip


def check_targets(examples: Sequence[Any], hard_above: float | None, path: str) -> None:
    """Raise BadInput where hard targets of inner states are all alike while the values they are made of are not of that
    kind; warn where they are alike. `hard_above` is the objective's; soft targets (None) are their values."""
    if hard_above is None:
        return
    values = [value for example in examples if isinstance(example, StepExample) for value in example.inner_values]
    place = f"{path} with objective.hard_above={hard_above:g}"
    check_balance([float(value > hard_above) for value in values], values, place,
                  "take another objective.hard_above (smoothed values are never 0: 0.5), or null")  # fmt: skip


def check_margins(examples: Sequence[Any], objective: Mapping[str, Any], source: Mapping[str, Any], path: str) -> None:
    """Raise BadInput where margins of pairs would do nothing: scaled by the `objective` and not made by the `source` of
    the examples, made and not scaled, or all 0."""
    scale, is_made = objective.get("margin_scale") or 0, bool(source.get("has_score_margin"))
    if scale and not is_made:
        raise BadInput(f"objective.margin_scale={scale:g} has no margins to scale: set examples.has_score_margin=true")
    if is_made and not scale:
        raise BadInput(
            "no objective reads the margins of examples.has_score_margin=true: set "
            "objective=bradley_terry and objective.margin_scale=1, or examples.has_score_margin=false"
        )
    if is_made and not any(example.margin for example in examples):
        raise BadInput(f"{path}: chosen and rejected have one score in all of {len(examples)} pairs: without scores "
                       "set objective.margin_scale=0 examples.has_score_margin=false")  # fmt: skip


def check_held_out(examples: Iterable[Any], eval_examples: Sequence[Any], path: str) -> None:
    """Warn where evaluation examples are trained on, ids and values alike."""
    trained = {_content(example) for example in examples}
    seen = [example.id for example in eval_examples if _content(example) in trained]
    if seen:
        log.warning("%s: %d of %d evaluation examples are trained on too: %s", path, len(seen), len(eval_examples),
                    _some(seen))  # fmt: skip


def check_amount(examples: Sequence[Any], batch_size: int) -> None:
    """Warn of a step that holds more examples than there are."""
    if len(examples) < batch_size:
        log.warning("update.batch_size %d is more than the %d examples: a step reads some of them more than once",
                    batch_size, len(examples))  # fmt: skip


def token_rows(example: Any) -> list[list[int]]:
    """Return the token rows a model reads of an example: one, or for a pair chosen and rejected, each with its
    prompt."""
    if isinstance(example, PairExample):
        return [[*example.prompt_ids, *side] for side in (example.chosen_ids, example.rejected_ids)]
    return [example.ids]


def num_loss_tokens(example: Any) -> int:
    """Return how many tokens of an example its loss reads: response tokens of a weight that is not 0, of both sides of
    a pair; for process and outcome rewards the places where the head is read."""
    if isinstance(example, PairExample):
        return len(example.chosen_ids) + len(example.rejected_ids)
    if isinstance(example, StepExample):
        return sum(weight != 0 for weight in example.weights or [1.0] * len(example.positions))
    if isinstance(example, OutcomeExample):
        return len(example.ids) - example.prompt_length if example.weight else 0
    first = max(1, example.prompt_length)  # nothing predicts the first token
    weights = example.weights or [1.0] * (len(example.ids) - example.prompt_length)
    return sum(weight != 0 for weight in weights[first - example.prompt_length :])


def unended(examples: Sequence[Any], ends: frozenset[int]) -> Iterator[str]:
    """Return a line for every kind of response that does not end with an end token: it was cut while it was sampled, or
    its file holds no ends, and a policy learns from it not to stop. Of pairs those are odd of which one side ends."""
    names = ", ".join(map(str, sorted(ends)))
    cut = [e.id for e in examples if isinstance(e, TokenExample | OutcomeExample) and e.ids[-1] not in ends]
    if cut:
        yield f"{len(cut)} of {len(examples)} responses do not end with an end token (id {names}): they were cut at " \
              f"a token limit, or hold no end: {_some(cut)}"  # fmt: skip
    one = [e.id for e in examples if isinstance(e, PairExample)
           and (e.chosen_ids[-1] in ends) != (e.rejected_ids[-1] in ends)]  # fmt: skip
    if one:
        yield f"of {len(one)} of {len(examples)} pairs only one side ends with an end token (id {names}): the other " \
              f"was cut at a token limit, or goes on after its step: {_some(one)}"  # fmt: skip


def _check_ids(examples: Sequence[Any], path: str) -> None:
    doubled = [name for name, number in Counter(example.id for example in examples).items() if number > 1]
    if doubled:
        raise BadInput(f"{path}: {len(doubled)} ids stand at several of {len(examples)} examples: {_some(doubled)}: "
                       "ids must be unique")  # fmt: skip


def _check_vocabulary(examples: Sequence[Any], path: str, limits: Limits) -> None:
    bad = []
    for example in examples:
        for row in token_rows(example):
            if row and not (min(row) >= 0 and max(row) < limits.vocabulary):
                place = next(place for place, token in enumerate(row) if not 0 <= token < limits.vocabulary)
                bad.append((example.id, place, row[place]))
                break
    if bad:
        name, place, token = bad[0]
        raise BadInput(
            f"{path}: {len(bad)} of {len(examples)} examples hold ids that {limits.path} has no embedding for (it has "
            f"{limits.vocabulary}): id {token} is token {place} of '{name}': sample and train with one tokenizer"
        )


def _check_positions(examples: Sequence[Any], path: str, limits: Limits, max_length: int | None) -> None:
    if limits.positions is None:
        return
    long = [example for example in examples if example_length(example) > limits.positions]
    if long:
        longest = max(long, key=example_length)
        raise BadInput(
            f"{path}: {len(long)} of {len(examples)} examples are longer than the {limits.positions} positions of "
            f"{limits.path}: '{longest.id}' has {example_length(longest)} tokens: set examples.max_length="
            f"{limits.positions}"
        )
    if max_length is not None and max_length > limits.positions:
        log.warning("%s: max_length %d is above the %d positions of %s; the longest example has %d tokens", path,
                    max_length, limits.positions, limits.path, max(map(example_length, examples)))  # fmt: skip


def _without_masked(examples: Sequence[E], path: str) -> list[E]:
    kept = [example for example in examples if num_loss_tokens(example)]
    masked = [example.id for example in examples if not num_loss_tokens(example)]  # type: ignore[attr-defined]
    reason = "have no token that the loss reads (all are masked)"
    leave_out(path, len(masked), len(examples), "examples", reason, details=f": {_some(masked)}")
    if not kept:
        raise BadInput(f"{path}: all tokens of all {len(examples)} examples are masked: check prompts and weights")
    return kept


def _content(example: Any) -> tuple[Any, ...]:
    return tuple(tuple(row) for row in token_rows(example))


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
