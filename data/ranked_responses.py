"""Rows that reward models are evaluated on: right and wrong responses to a prompt, from the layouts of published sets.

- reward_bench: RewardBench (Lambert et al. 2024) and its prior sets: `prompt`, `chosen`, `rejected`, `subset`, `id`;
- reward_bench_2: RewardBench 2 (Malik et al. 2025): the same with lists of responses; ids of its subset Ties begin with
  `ref:` or `tied:`;
- rm_bench: RM-Bench (Liu et al. 2024): lists of three styles each, concise, detailed, detailed with Markdown; `domain`;
- llmbar: LLMBar (Zeng et al. 2023): `input`, `output_1`, `output_2` and `label`, **1 or 2**, the number of the better
  output;
- pairs: preferences of one's own: `prompt`, `chosen`, `rejected`; `subset` and `id` where there are any.

A `prompt`, `chosen` or `rejected` that is a list of messages (`role`, `content`) is read too: the prompt is the
messages before the last (a `prompt` that is a text must then be the last of these), the response is the last one's
text. Without a prompt, texts must begin alike: what they share is the prompt (TRL's implicit prompt). Texts of pairs
stay as they are written, white space around them too: training reads them so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.conversations import split_prompt
from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row

PRIOR_SETS = ("anthropic_helpful", "anthropic_hhh", "shp", "summarize")


@dataclass(frozen=True)
class RankedResponses:
    """Responses to one prompt, of which some are right (or preferred) and the others are not."""

    id: str
    """unique in the file: `{subset}/{published id}`"""
    subset: str
    """the part of the set that it is counted in"""
    prompt: str
    """what the responses answer, as text"""
    chosen: list[str]
    """the right or preferred ones, at least one"""
    rejected: list[str]
    """the others, at least one"""
    has_implicit_prompt: bool = False
    """whether the prompt is what two texts begin with: each is tokenised in one piece, as in training, since they may
    part within a word"""
    turns: list[dict[str, str]] = field(default_factory=list)
    """the prompt's messages (`role`, `content`) where they are more than a question; else empty"""

    def __post_init__(self) -> None:
        if not self.chosen or not self.rejected:
            raise BadInput(f"'{self.id}' needs a chosen and a rejected response at least")


@dataclass(frozen=True)
class ResponseScores:
    """What a scorer says of the responses of a `RankedResponses`, in their order."""

    id: str
    """that row's id"""
    subset: str
    """its subset"""
    chosen: list[float]
    """one score per chosen response; empty where the scorer said nothing that can be read"""
    rejected: list[float]
    """one score per rejected response; empty with `chosen`"""


class SameResponses(BadRow):
    """A response stands on both sides: nobody can tell the right one."""


def read_pair(row: Row) -> RankedResponses:
    """Read a row with one chosen and one rejected response."""
    asked, chosen = _turns(row, "chosen")
    other, rejected = _turns(row, "rejected")
    if asked and other and asked != other:
        raise BadRow("chosen and rejected part before their last turn: they answer other prompts")
    _check_differ([chosen], [rejected])
    subset = row.text("subset", "")
    are_texts = all(isinstance(row.fields.get(name), str) for name in ("chosen", "rejected"))
    if row.has("prompt") or not are_texts:
        prompt, turns = _prompt(row, asked)
        return RankedResponses(_identity(row, subset), subset, prompt, [chosen], [rejected], turns=turns)
    prompt, chosen, rejected = split_prompt(chosen, rejected)
    if not prompt.strip():
        raise BadRow("there is no prompt: give a prompt, or a chosen and a rejected text that begin alike")
    if not chosen.strip() or not rejected.strip():
        raise BadRow("what chosen and rejected begin with is their prompt, and behind it one of them has no "
                     "response: give a prompt")  # fmt: skip
    return RankedResponses(_identity(row, subset), subset, prompt, [chosen], [rejected], has_implicit_prompt=True)


def read_lists(row: Row) -> RankedResponses:
    """Read a row with lists of chosen and rejected responses (RewardBench 2)."""
    subset = row.text("subset")
    return RankedResponses(
        _identity(row, subset), subset, row.text("prompt"), row.texts("chosen"), row.texts("rejected")
    )


def read_styles(row: Row) -> RankedResponses:
    """Read a row of RM-Bench; its subset is its domain. Raises BadRow unless there are three styles on each side."""
    chosen, rejected = row.texts("chosen"), row.texts("rejected")
    if [len(chosen), len(rejected)] != [3, 3]:
        raise BadRow(f"chosen and rejected must hold three styles each, got {len(chosen)} and {len(rejected)}")
    domain = row.text("domain")
    return RankedResponses(_identity(row, domain), domain, row.text("prompt"), chosen, rejected)


def read_labelled_outputs(row: Row) -> RankedResponses:
    """Read a row of LLMBar. Raises BadRow on a label other than 1 and 2: 0 and 1 would name the wrong outputs."""
    label = row.integer("label")
    if label not in (1, 2):
        raise BadRow(f"label must be 1 or 2, the number of the better output, got {label}")
    better, worse = row.text(f"output_{label}"), row.text(f"output_{3 - label}")
    subset = row.text("subset", "llmbar")
    return RankedResponses(_identity(row, subset), subset, row.text("input"), [better], [worse])


LAYOUTS: Mapping[str, Callable[[Row], RankedResponses]] = {
    "reward_bench": read_pair,
    "reward_bench_2": read_lists,
    "rm_bench": read_styles,
    "llmbar": read_labelled_outputs,
    "pairs": read_pair,
}


def read_ranked(row: Row, layout: str) -> RankedResponses:
    """Return the record of a published file's row. Raises SameResponses where a response stands on both sides, and
    BadInput, with file and line, on an unknown layout and on a row that does not fit."""
    if layout not in LAYOUTS:
        raise BadInput(f"stage.layout must be one of {', '.join(LAYOUTS)}, got '{layout}'")
    try:
        if row.error:
            raise BadRow(row.error)
        record = LAYOUTS[layout](row)
        _check_differ(record.chosen, record.rejected)
    except SameResponses:
        raise
    except (BadRow, BadInput) as error:
        raise BadInput(f"{row.place}: {error}: is it a file of the layout {layout}?") from None
    return record


def _check_differ(chosen: Sequence[str], rejected: Sequence[str]) -> None:
    """Raises SameResponses where a text, but for white space around it, is on both sides."""
    if {text.strip() for text in chosen} & {text.strip() for text in rejected}:
        raise SameResponses("a response is both chosen and rejected")


def _identity(row: Row, subset: str) -> str:
    """Return `{subset}/{published id}`; the row's line stands for a missing id."""
    published = row.fields.get("id")
    name = f"line-{row.line}" if published is None else str(published)
    return f"{subset}/{name}" if subset else name


def _turns(row: Row, name: str) -> tuple[list[Mapping[str, Any]], str]:
    """Return (the messages before the last one, the response's text); no messages where the field is a text."""
    value = row.fields.get(name)
    if not isinstance(value, list):
        return [], _written(row, name)
    try:
        texts = [_content(turn) for turn in value]
        roles = [turn["role"] for turn in value]
    except (TypeError, KeyError):
        raise BadRow(f"{name} must be a text or a list of messages with role and content") from None
    if not texts or roles[-1] != "assistant" or not texts[-1].strip():
        raise BadRow(f"{name} must end with a message of the assistant")
    return value[:-1], texts[-1]


def _content(turn: Mapping[str, Any]) -> str:
    """Return the text of a message. Raises BadRow where it is none: null, or a list of parts."""
    if not isinstance(turn["content"], str):
        raise BadRow("a message has no text as content: tools and pictures are not read")
    return turn["content"]


def _written(row: Row, name: str) -> str:
    """Read a text that is not blank, as it is written. Raises BadRow."""
    row.text(name)
    return str(row.fields[name])


def _prompt(row: Row, turns: list[Mapping[str, Any]]) -> tuple[str, list[dict[str, str]]]:
    """Return (the text of `prompt`, or of the messages before the response; the messages, where they are more than a
    question)."""
    value = row.fields.get("prompt")
    messages = value if isinstance(value, list) else turns
    if value is not None and not messages:
        return _written(row, "prompt"), []
    texts = [_content(turn) if isinstance(turn, Mapping) and "content" in turn else "" for turn in messages]
    if not messages or not all(text.strip() for text in texts):
        raise BadRow("there is no prompt: give a prompt, or messages before the response")
    if isinstance(value, str) and value.strip() != texts[-1].strip():
        raise BadRow("prompt is not the last message before the responses")
    roles = [str(turn["role"]) for turn in messages]
    if roles == ["user"]:
        return texts[0], []
    both = list(zip(roles, texts, strict=True))
    text = "\n\n".join(f"{role}: {text.strip()}" for role, text in both) if len(both) > 1 else texts[0]
    return text, [{"role": role, "content": content} for role, content in both]
