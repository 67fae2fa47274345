"""Conversations and preference pairs in the published layouts of columns, and the tokens of them that are learnt.

A conversation is a list of turns `{"role": ..., "content": ...}`, written by the tokenizer's chat template. What the
assistant writes, up to and with the end token of each of its turns, is tokenised apart from what it answers, as it will
be sampled. Where a template marks it (`{% generation %}`) its marks are taken.

| layout of a pair | columns |
|---|---|
| explicit prompt | `prompt`, `chosen`, `rejected`: texts, or lists of turns |
| implicit prompt | `chosen`, `rejected` that begin alike: texts, or whole conversations |
| UltraFeedback | `prompt` a text, `chosen` and `rejected` whole conversations; `score_chosen`, `score_rejected` |

A response alone has the columns `prompt` and `completion`: texts, or lists of turns. Texts are read behind their
prompt, and an end token is written behind them, as TRL does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from espalier.data.prompts import encode_text, write_chat
from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row
from espalier.data.steps import Decoder
from espalier.data.token_text import encode_response, read_tokens

Turn = dict[str, str]
_KEYS = ("role", "content", "name")
_NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class LearntTokens:
    """`ids` [T] of a conversation; `is_learnt` [T]: whether the assistant writes the token."""

    ids: list[int]
    is_learnt: list[bool]


@dataclass(frozen=True)
class PairTokens:
    """A prompt and its two continuations, as text and as ids."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


@dataclass(frozen=True)
class ResponseTokens:
    """A prompt and one response, as text and as ids."""

    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]


def read_turns(row: Row, name: str) -> list[Turn]:
    """Return the turns of a column. Raises BadRow where it holds none, or something else."""
    value = row.fields.get(name)
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name} must be a list of turns")
    turns = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise BadRow(f"turn {number} of {name} has no role: a turn is {{'role': ..., 'content': ...}}")
        if not isinstance(turn.get("content"), str):
            raise BadRow(f"turn {number} of {name} has no text as content: tools and pictures are not read")
        strange = [key for key, value in turn.items() if key not in _KEYS and value not in _NOTHING]
        if strange:
            raise BadRow(f"turn {number} of {name} has {strange[0]}, which is not read: a call of a tool or a thought "
                         "would be lost")  # fmt: skip
        turns.append({"role": turn["role"], "content": turn["content"]})
    return turns


def is_conversational(row: Row, name: str) -> bool:
    """Say whether a column holds turns."""
    return isinstance(row.fields.get(name), list)


def split_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return (prompt, chosen, rejected) of two texts that begin alike: what they share is the prompt, less a space at
    its end (TRL's rule)."""
    end = _shared(chosen, rejected)
    if end and chosen[end - 1] == " ":
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def split_turns(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return (prompt, chosen, rejected) of two conversations that begin alike."""
    end = _shared(chosen, rejected)
    return list(chosen[:end]), list(chosen[end:]), list(rejected[end:])


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many things two sequences begin alike with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def pair_tokens(row: Row, tokenizer: Any) -> PairTokens:
    """Return the pair of a row in any of the layouts. Raises BadRow on a row that holds none or whose sides the chat
    template does not write, BadInput where the template cannot be used."""
    if is_conversational(row, "chosen"):
        return _pair_of_turns(row, tokenizer)
    if not row.has("prompt"):
        return _pair_of_wholes(row, tokenizer)
    prompt, chosen, rejected = (_text(row, name) for name in ("prompt", "chosen", "rejected"))
    _check_parts(prompt, chosen, rejected)
    if chosen.startswith(prompt) and rejected.startswith(prompt):
        raise BadRow("chosen and rejected repeat the prompt: leave prompt out, and it is what both begin with")
    prompt_ids = encode_text(tokenizer, prompt, row.place)
    sides = [ended_response(tokenizer, prompt_ids, text) for text in (chosen, rejected)]
    return PairTokens(prompt, chosen, rejected, prompt_ids, *sides)


def _pair_of_wholes(row: Row, tokenizer: Any) -> PairTokens:
    """Return the pair of two texts that begin alike, each tokenised in one piece: nothing is sampled from where they
    part, which may lie within a word. The prompt ends with the last token that it and both texts begin with."""
    prompt, chosen, rejected = split_prompt(*(_text(row, name) for name in ("chosen", "rejected")))
    _check_parts(prompt, chosen, rejected)
    pair = pair_of_wholes(tokenizer, prompt, chosen, rejected, row.place)
    if pair.chosen_ids == pair.rejected_ids:
        raise BadRow("chosen and rejected are the same tokens")
    return pair


def pair_of_wholes(tokenizer: Any, prompt: str, chosen: str, rejected: str, place: str) -> PairTokens:
    """Return the pair of two texts that begin with `prompt` and go on otherwise, each tokenised in one piece. Raises
    BadRow where they do not begin with the same token."""
    wholes = [prompt + chosen, prompt + rejected]
    prompt_ids, *sides = (encode_text(tokenizer, text, place) for text in (prompt, *wholes))
    tokens = read_tokens([], sides[0], Decoder(tokenizer))
    end = min(_shared(prompt_ids, ids) for ids in sides)
    while end and not tokens.is_border[end]:
        end -= 1
    if not tokens.ends[end]:
        raise BadRow("the pair has no prompt: chosen and rejected do not begin with the same token")
    if tokens.text == wholes[0]:
        prompt = tokens.text[: tokens.ends[end]]
    chosen, rejected = (text[len(prompt) :] for text in wholes)
    chosen_ids, rejected_ids = (_ended(tokenizer, ids[end:]) for ids in sides)
    return PairTokens(prompt, chosen, rejected, sides[0][:end], chosen_ids, rejected_ids)


def ended_response(tokenizer: Any, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a response and one end token, which its text may have written already."""
    return _ended(tokenizer, encode_response(tokenizer, prompt_ids, text)[0])


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name)
    if not isinstance(value, str):
        raise BadRow(f"{name} must be a text, or a list of turns as the others are")
    return value


def _check_parts(prompt: Any, chosen: Any, rejected: Any) -> None:
    for name, value in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not value:
            why = ": chosen and rejected do not begin alike" if name == "prompt" else ""
            raise BadRow(f"the pair has no {name}{why}")
    if chosen == rejected:
        raise BadRow("chosen and rejected are the same")


def _pair_of_turns(row: Row, tokenizer: Any) -> PairTokens:
    chosen, rejected = read_turns(row, "chosen"), read_turns(row, "rejected")
    if is_conversational(row, "prompt"):
        prompt = read_turns(row, "prompt")
    else:
        prompt, chosen, rejected = split_turns(chosen, rejected)
        asked = [turn["content"] for turn in prompt if turn["role"] == "user"]
        if row.has("prompt") and asked[-1:] != [_text(row, "prompt")]:
            raise BadRow("prompt is not what chosen and rejected begin with")
    _check_parts(prompt, chosen, rejected)
    if any(turn["role"] != "assistant" for turn in (*chosen, *rejected)):
        raise BadRow("chosen and rejected part before their last turn: what others say in them would be learnt")
    one, other = responses_of_turns(tokenizer, prompt, [chosen, rejected], row.place)
    for side, found in ((chosen, one), (rejected, other)):
        _check_is_written(tokenizer, prompt, side, found.prompt, found.response)
    if one.response_ids == other.response_ids:
        raise BadRow("chosen and rejected are the same tokens")
    return PairTokens(one.prompt, one.response, other.response, one.prompt_ids, one.response_ids, other.response_ids)


def response_tokens(row: Row, tokenizer: Any) -> ResponseTokens:
    """Return the prompt and the completion of a row. Raises BadRow on a row that holds none, or whose completion the
    chat template does not write, BadInput where the template cannot be used."""
    if is_conversational(row, "prompt") or is_conversational(row, "completion"):
        asked, answer = read_turns(row, "prompt"), read_turns(row, "completion")
        if any(turn["role"] != "assistant" for turn in answer):
            raise BadRow("completion holds a turn that is not the assistant's: move it into prompt")
        (found,) = responses_of_turns(tokenizer, asked, [answer], row.place)
        _check_is_written(tokenizer, asked, answer, found.prompt, found.response)
        return found
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    if not completion:
        raise BadRow("completion is empty: nothing is judged or learnt of it")
    prompt_ids = encode_text(tokenizer, prompt, row.place)
    return ResponseTokens(prompt, completion, prompt_ids, ended_response(tokenizer, prompt_ids, completion))


def responses_of_turns(
    tokenizer: Any, prompt: Sequence[Turn], answers: Sequence[Sequence[Turn]], place: str
) -> list[ResponseTokens]:
    """Return each answer behind the prompt, as the chat template writes them. Raises BadInput where it cannot be
    used."""
    asked = write_chat(tokenizer, list(prompt))
    prompt_ids = encode_text(tokenizer, asked, place, is_complete=True)
    texts = [_answer(tokenizer, prompt, answer, asked) for answer in answers]
    return [ResponseTokens(asked, text, prompt_ids, _encode_behind(tokenizer, prompt_ids, text)) for text in texts]


def _answer(tokenizer: Any, prompt: Sequence[Turn], answer: Sequence[Turn], asked: str) -> str:
    """Return what the template writes of the answer behind the prompt, up to its last end token."""
    whole = write_chat(tokenizer, [*prompt, *answer], asks=False)
    if not whole.startswith(asked):
        raise BadInput("the chat template writes a prompt otherwise once it is answered, so that another one would be "
                       "learnt than is asked: use a template that does not change what came before")  # fmt: skip
    text = whole[len(asked) :]
    end = tokenizer.eos_token or ""
    if end and end in text:
        return text[: text.rindex(end) + len(end)]
    return text.rstrip("\n") + end


def _check_is_written(tokenizer: Any, prompt: Sequence[Turn], learnt: Sequence[Turn], asked: str, text: str) -> None:
    """Raise BadRow where the text that is learnt of some turns, behind the prompt's text `asked`, lacks a part of them,
    white space aside. What a template writes only to ask (`<think>`) may be their beginning."""
    if _holds(text, learnt):
        return
    if prompt and _holds(asked.removeprefix(write_chat(tokenizer, list(prompt), asks=False)) + text, learnt):
        return
    raise BadRow("the chat template does not write all that the assistant says (some leave out thoughts), and the "
                 "model would learn to do without: use a template that keeps it, or give prompt and completion (of a "
                 "pair prompt, chosen and rejected) as texts")  # fmt: skip


def _holds(text: str, turns: Sequence[Turn]) -> bool:
    """Say whether a text has the contents of the turns in it, one behind the other, white space aside."""
    place, written = 0, "".join(text.split())
    for turn in turns:
        content = "".join(turn["content"].split())
        place = written.find(content, place)
        if place < 0:
            return False
        place += len(content)
    return True


def learnt_tokens(turns: Sequence[Turn], tokenizer: Any, num_asked: int = 0) -> LearntTokens:
    """Return a conversation's tokens and which of them the assistant writes behind the first `num_asked` turns, its end
    tokens included. Raises BadRow where it writes none, or not all of what they say, BadInput where the template cannot
    be used."""
    if "{% generation" in (tokenizer.chat_template or "") or "{%- generation" in (tokenizer.chat_template or ""):
        found = tokenizer.apply_chat_template(
            list(turns), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        own = [turn for turn in turns[num_asked:] if turn["role"] == "assistant"]
        _check_is_written(tokenizer, [], own, "", write_chat(tokenizer, list(turns), asks=False))
        mask = [bool(one) for one in found["assistant_masks"]]
        num_before = _num_marked(turns[:num_asked], tokenizer)
        learnt = [one and number > num_before for one, number in zip(mask, accumulate(mask), strict=True)]
        tokens = LearntTokens(list(found["input_ids"]), learnt)
    else:
        tokens = _by_turns(turns, tokenizer, num_asked)
    if not any(tokens.is_learnt):
        raise BadRow("no turn of the assistant: there is nothing to learn")
    return tokens


def _num_marked(turns: Sequence[Turn], tokenizer: Any) -> int:
    """Count the tokens that the template marks in the beginning of a conversation."""
    if not any(turn["role"] == "assistant" for turn in turns):
        return 0
    found = tokenizer.apply_chat_template(
        list(turns), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return sum(map(bool, found["assistant_masks"]))


def _by_turns(turns: Sequence[Turn], tokenizer: Any, num_asked: int) -> LearntTokens:
    """Return the tokens by the template's texts of the conversation before and behind each turn of the assistant."""
    whole = write_chat(tokenizer, list(turns), asks=False)
    spans = []
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant" or number < num_asked:
            continue
        before = write_chat(tokenizer, list(turns[:number]), asks=True)
        behind = write_chat(tokenizer, list(turns[: number + 1]), asks=False)
        if not behind.startswith(before) or not whole.startswith(behind):
            raise BadInput(f"the chat template writes turn {number + 1} otherwise once the conversation goes on (it "
                           "leaves out earlier thoughts, say): what the assistant wrote cannot be found in it; learn "
                           "the last turn alone (stage.learns=last), make a conversation end with it, or mark it in "
                           "the template by {% generation %}")  # fmt: skip
        end = tokenizer.eos_token or ""
        place = whole.find(end, len(before), len(behind)) if end else -1
        if place < 0:
            raise BadInput(f"the chat template writes no end token ({end!r}) behind the assistant's turn, and a model "
                           "would learn never to stop: use a template that does")  # fmt: skip
        spans.append((len(before), place + len(end)))
        _check_is_written(tokenizer, turns[:number], [turn], before, whole[len(before) : place + len(end)])
    ids: list[int] = []
    is_learnt: list[bool] = []
    place = 0
    for start, stop in [*spans, (len(whole), len(whole))]:
        for text, is_own in ((whole[place:start], False), (whole[start:stop], True)):
            part = _encode_behind(tokenizer, ids, text)
            ids += part
            is_learnt += [is_own] * len(part)
        place = stop
    return LearntTokens(ids, is_learnt)


def _encode_behind(tokenizer: Any, before: Sequence[int], text: str) -> list[int]:
    """Return the tokens of a text behind others: a prompt and what answers it are tokenised apart, as in sampling."""
    if not before:
        return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []
    return encode_response(tokenizer, before, text)[0] if text else []
