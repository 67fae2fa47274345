"""Guards over a data set and the model it is for: before anything is trained, in one line each, with numbers.

What cannot be trained stops the run: ids outside the model's vocabulary, examples longer than the model's positions,
two examples of one id (and a tokenizer that does not fit: `models.tokenizer_checks`). What can, but is rarely meant,
is said: examples of which the loss reads nothing (they are left out), responses that do not end, evaluation
examples that are trained on.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import tee
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from espalier.data.examples.example_facts import num_loss_tokens, token_rows
from espalier.data.examples.label_balance import check_balance
from espalier.data.examples.stored_examples import column_of, facts_of
from espalier.data.examples.token_examples import OutcomeExample, PairExample, TokenExample
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput
from espalier.models.tokenizer_checks import Limits

log = logging.getLogger("train")
E = TypeVar("E")


def without_unread(examples: Sequence[E], path: str) -> list[E]:
    """Return the examples the loss reads something of, in order. Raises BadInput where two have one id, and where none
    is left. `path` names their file."""
    _check_ids(examples, path)
    return _without_masked(examples, path)


def check_limits(examples: Sequence[Any], path: str, limits: Limits, max_length: int | None = None) -> None:
    """Raise BadInput on examples that the model cannot read; warn of what is odd. `max_length` is the file's
    setting."""
    _check_vocabulary(examples, path, limits)
    _check_positions(examples, path, limits, max_length)
    for line in unended(examples, limits.ends):
        log.warning("%s: %s", path, line)


def check_rate(learning_rate: float) -> None:
    """Raise BadInput on a rate that trains nothing, as experiments for models of any size have before one is chosen."""
    if not learning_rate > 0:
        raise BadInput(f"update.learning_rate is {learning_rate:g}: choose the size of the model, as size=dpo/7b (sft, "
                       "reward, outcome or dpo; docs/training.md), or set update.learning_rate")  # fmt: skip


def check_targets(examples: Sequence[Any], hard_above: float | None, path: str) -> None:
    """Raise BadInput where hard targets of inner states are all alike while the values they are made of are not of that
    kind; warn where they are alike. `hard_above` is the objective's; soft targets (None) are their values."""
    if hard_above is None:
        return
    both = zip(column_of(examples, "values", []), column_of(examples, "has_outcome", False), strict=True)
    labels, values = tee(one for row, has_outcome in both for one in (row[:-1] if has_outcome else row))
    place = f"{path} with objective.hard_above={hard_above:g}"
    check_balance((float(value > hard_above) for value in labels), values, place,
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
    if is_made and not any(column_of(examples, "margin")):
        raise BadInput(f"{path}: chosen and rejected have one score in all of {len(examples)} pairs: without scores "
                       "set objective.margin_scale=0 examples.has_score_margin=false")  # fmt: skip


def check_held_out(examples: Sequence[Any], eval_examples: Sequence[Any], path: str) -> None:
    """Warn where evaluation examples are trained on, ids and values alike."""
    is_seen = np.isin(facts_of(eval_examples)["content"], facts_of(examples)["content"])
    if is_seen.any():
        log.warning("%s: %d of %d evaluation examples are trained on too: %s", path, is_seen.sum(),
                    len(eval_examples), _some_of(eval_examples, is_seen))  # fmt: skip


def check_amount(examples: Sequence[Any], batch_size: int) -> None:
    """Warn of a step that holds more examples than there are."""
    if len(examples) < batch_size:
        log.warning("update.batch_size %d is more than the %d examples: a step reads some of them more than once",
                    batch_size, len(examples))  # fmt: skip


def check_evaluations(every: int, eval_examples: Sequence[Any]) -> None:
    """Warn of evaluations that are asked for without examples for them: none takes place."""
    if every > 0 and not eval_examples:
        log.warning("evaluation.every=%d evaluates nothing, as there are no eval_examples: name some, as "
                    "+examples@eval_examples=demonstrations eval_examples.path=FILE", every)  # fmt: skip


def unended(examples: Sequence[Any], ends: frozenset[int]) -> Iterator[str]:
    """Return a line for every kind of response that does not end with an end token: it was cut while it was sampled, or
    its file holds no ends, and a policy learns from it not to stop. Of pairs those are odd of which one side ends."""
    names = ", ".join(map(str, sorted(ends)))
    facts = facts_of(examples)
    ids = np.array(sorted(ends))
    ends_well, other_ends_well = np.isin(facts["last_id"], ids), np.isin(facts["other_last_id"], ids)
    cut, one = ~ends_well, ends_well != other_ends_well
    kind = type(examples[0]) if len(examples) else None
    if kind in (TokenExample, OutcomeExample) and cut.any():
        yield f"{cut.sum()} of {len(examples)} responses do not end with an end token (id {names}): they were cut at " \
              f"a token limit, or hold no end: {_some_of(examples, cut)}"  # fmt: skip
    if kind is PairExample and one.any():
        yield f"of {one.sum()} of {len(examples)} pairs only one side ends with an end token (id {names}): the other " \
              f"was cut at a token limit, or goes on after its step: {_some_of(examples, one)}"  # fmt: skip


def _check_ids(examples: Sequence[Any], path: str) -> None:
    doubled = [name for name, number in Counter(example.id for example in examples).items() if number > 1]
    if doubled:
        raise BadInput(f"{path}: {len(doubled)} ids stand at several of {len(examples)} examples: {_some(doubled)}: "
                       "ids must be unique")  # fmt: skip


def _check_vocabulary(examples: Sequence[Any], path: str, limits: Limits) -> None:
    facts = facts_of(examples)
    is_bad = (facts["least_id"] < 0) | (facts["greatest_id"] >= limits.vocabulary)
    if not is_bad.any():
        return
    first = examples[int(is_bad.argmax())]
    place, token = next(
        (place, token)
        for row in token_rows(first)
        for place, token in enumerate(row)
        if not 0 <= token < limits.vocabulary
    )
    raise BadInput(
        f"{path}: {is_bad.sum()} of {len(examples)} examples hold ids that {limits.path} has no embedding for (it has "
        f"{limits.vocabulary}): id {token} is token {place} of '{first.id}': sample and train with one tokenizer"
    )


def _check_positions(examples: Sequence[Any], path: str, limits: Limits, max_length: int | None) -> None:
    if limits.positions is None:
        return
    lengths = facts_of(examples)["length"]
    longest = int(lengths.max())
    if longest > limits.positions:
        raise BadInput(
            f"{path}: {(lengths > limits.positions).sum()} of {len(examples)} examples are longer than the "
            f"{limits.positions} positions of {limits.path}: '{examples[int(lengths.argmax())].id}' has {longest} "
            f"tokens: set examples.max_length={limits.positions}"
        )
    if max_length is not None and max_length > limits.positions:
        log.warning("%s: max_length %d is above the %d positions of %s; the longest example has %d tokens", path,
                    max_length, limits.positions, limits.path, longest)  # fmt: skip


def _without_masked(examples: Sequence[E], path: str) -> list[E]:
    kept = [example for example in examples if num_loss_tokens(example)]
    masked = [example.id for example in examples if not num_loss_tokens(example)]  # type: ignore[attr-defined]
    reason = "have no token that the loss reads (all are masked)"
    leave_out(path, len(masked), len(examples), "examples", reason, details=f": {_some(masked)}")
    if not kept:
        raise BadInput(f"{path}: all tokens of all {len(examples)} examples are masked: check prompts and weights")
    return kept


def _some_of(examples: Sequence[Any], is_meant: npt.NDArray[np.bool_]) -> str:
    """Return the ids of the first few of the examples that are meant."""
    return _some([examples[int(place)].id for place in np.flatnonzero(is_meant)[:4]])


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
