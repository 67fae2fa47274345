"""Whether a tokenizer fits its model, whether two agree, and whether everything agrees on what ends a response: guards
that load no model.

`tokenizer_differences` and `stop_token_faults` return what they found in lines for a reader, none where all is well;
whoever calls them decides what becomes of them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import Decoder
from espalier.data.token_text import PROBE_TEXTS, read_response
from espalier.models.load import (
    BadModel,
    config_end_ids,
    generation_end_ids,
    load_config,
    load_end_ids,
    load_tokenizer,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a model can read: ids below `vocabulary`, `positions` tokens (None: no limit known). `ends` are the ids
    that end a response."""

    path: str
    vocabulary: int
    positions: int | None
    ends: frozenset[int]


def model_limits(path: str, tokenizer: Any) -> Limits:
    """Of a model folder (or hub name) and its tokenizer, from configurations alone."""
    config = load_config(path).get_text_config()
    ends = {*load_end_ids(path), tokenizer.eos_token_id} - {None}
    return Limits(path, int(config.vocab_size), getattr(config, "max_position_embeddings", None), frozenset(ends))


def check_tokenizer(tokenizer: Any, limits: Limits) -> None:
    """Raise BadInput on a tokenizer with more tokens than the model has embeddings, or one that pads or ends with an
    id outside of them."""
    if len(tokenizer) > limits.vocabulary:
        raise BadInput(
            f"{limits.path}: its tokenizer has {len(tokenizer)} tokens, its model {limits.vocabulary} embeddings: "
            f"the last {len(tokenizer) - limits.vocabulary} cannot be read: resize the model, or take its own tokenizer"
        )
    for name in ("pad", "eos"):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is None or not 0 <= token < limits.vocabulary:
            what = "is not set" if token is None else f"is id {token}, the model has {limits.vocabulary} embeddings"
            raise BadInput(f"{limits.path}: the tokenizer's {name} token {what}: set {name}_token in its "
                           "tokenizer_config.json to a token of the vocabulary")  # fmt: skip


def check_stop_tokens(tokenizer: Any, path: str) -> None:
    """Warn where tokenizer, configurations and chat template of a model folder name different ends of a response."""
    for line in stop_token_faults(tokenizer, config_end_ids(path), generation_end_ids(path) or []):
        log.warning("%s: %s", path, line)


def tokenizer_differences(
    one: Any, other: Any, names: tuple[str, str], texts: Sequence[str] = PROBE_TEXTS
) -> list[str]:
    """Say where two tokenizers differ, `names` saying whose they are: in the ids of a text, in the text of its ids, in
    the id of a token that both know. Ids of `one` can be given to the model of `other` where there is nothing."""
    differences = []
    for text in texts:
        mine, theirs = (list(each(text, add_special_tokens=False).input_ids) for each in (one, other))
        if mine != theirs:
            at = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            differences.append(f"of {text[:30]!r} {names[0]} makes {len(mine)} tokens, from token {at} on "
                               f"{mine[at : at + 4]}, {names[1]} {len(theirs)}, {theirs[at : at + 4]}")  # fmt: skip
            continue
        read, written = (_decode(each, mine) for each in (one, other))
        if read != written:
            differences.append(f"{names[0]} reads the same tokens as {read[:40]!r}, {names[1]} as {written[:40]!r}")
    known = other.get_vocab()
    moved = sorted((token, id_) for token, id_ in one.get_vocab().items() if known.get(token, id_) != id_)
    if moved:
        token, id_ = moved[0]
        differences.append(f"{len(moved)} tokens have other ids: {token!r} is {id_} of {names[0]}, {known[token]} of "
                           f"{names[1]}")  # fmt: skip
    return differences


def check_same_tokenizer(tokenizer: Any, path: str, name: str) -> None:
    """Raise BadInput where the tokenizer beside another network's weights is not the policy's; a folder without one is
    taken on trust, which the log says."""
    try:
        other = load_tokenizer(path)
    except BadModel as error:
        log.warning("that the %s has the policy's tokenizer is taken on trust: %s", name, error)
        return
    differences = tokenizer_differences(tokenizer, other, ("the policy", f"the {name}"))
    if differences:
        raise BadInput(f"{path}: the {name} has another tokenizer than the policy: {differences[0]}: it would read "
                        "other texts than were sampled: train it on this policy's tokens")  # fmt: skip


def check_reads_ids(
    tokenizer: Any, folder: str, prompt_ids: Sequence[int], response_ids: Sequence[int], response: str, name: str
) -> None:
    """Raise BadInput where the sampled ids of the solution `name` are not its text by the tokenizer of a model that is
    to read them: a policy with another one sampled them."""
    read_response(prompt_ids, response_ids, Decoder(tokenizer), response, f"{folder} reads the sampled ids of {name}")


def stop_token_faults(tokenizer: Any, config_ends: Sequence[int], generation_ends: Sequence[int]) -> list[str]:
    """Say where the ends of a response differ: the tokenizer's end token (training writes it, and looks for it), the
    ids of the model's config.json and of its generation_config.json (engines stop at them; empty where a file names
    none), and the token with which the chat template ends a turn."""
    end, faults = tokenizer.eos_token_id, []
    if end is None:
        return ["the tokenizer has no end token: set eos_token in tokenizer_config.json"]
    named = {"config.json": set(config_ends), "generation_config.json": set(generation_ends)}
    for name, ends in named.items():
        if ends and end not in ends:
            faults.append(f"the tokenizer's end token {tokenizer.eos_token!r} is id {end}, {name} ends at "
                          f"{_ids(ends)}: set its eos_token_id to all ids that end a response")  # fmt: skip
    if all(named.values()) and not named["config.json"] <= named["generation_config.json"]:
        faults.append(f"config.json ends at {_ids(named['config.json'])}, generation_config.json, which engines read, "
                      f"at {_ids(named['generation_config.json'])}: set eos_token_id of both alike")  # fmt: skip
    turn = turn_end(tokenizer)
    ends = {end, *config_ends, *generation_ends}
    if turn is not None and turn not in ends:
        what = f"with {tokenizer.convert_ids_to_tokens(turn)!r} (id {turn})" if turn >= 0 else "without a token"
        faults.append(f"the chat template ends a turn {what}, a response ends at {_ids(ends)}: a chat goes on behind "
                      "its answer: add the id to eos_token_id in generation_config.json")  # fmt: skip
    return faults


def turn_end(tokenizer: Any) -> int | None:
    """Return the first token that the chat template writes behind an answer, -1 where it writes none; None without a
    template, or where it does not write a lone question and its answer."""
    from jinja2.exceptions import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        return None
    answer = "Seventeen apples"
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": answer}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, TypeError):
        return None
    behind = text.rpartition(answer)[2].strip() if answer in text else None
    if behind is None:
        return None
    ids = list(tokenizer(behind, add_special_tokens=False).input_ids)
    return ids[0] if ids else -1


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _ids(ids: set[int]) -> str:
    return ", ".join(map(str, sorted(ids)))
