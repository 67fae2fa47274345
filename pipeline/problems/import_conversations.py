"""Conversations, prompts with completions, or texts, as others publish them → WeightedResponse: ids, and which are
learnt.

    python run_stage.py -cn problems/import_conversations input=chats.jsonl output=tokens.jsonl stage.tokenizer=MODEL
    python trainer_base_ds_mul.py -cn exp/sft/word_arithmetic examples=weighted_responses examples.path=tokens.jsonl ...

Columns: `messages` or `conversation` (turns), `prompt` and `completion` (texts, or turns), as TRL names them. Tokens
of the assistant have weight 1 (`stage.learns=last`: those of its last turn alone), all others 0. Of `text` alone all
tokens are learnt, the end token too, but for the first one, which nothing predicts. Rows whose `label` is true or
false, and rows of `completion` with any `label`, are refused: a wrong response would be learnt.
"""

from dataclasses import dataclass
from typing import Any

from espalier.data.conversations import LearntTokens, is_conversational, learnt_tokens, read_turns, response_tokens
from espalier.data.examples.token_examples import WeightedResponse
from espalier.data.process_data.published import problem_key
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row
from espalier.pipeline.published_rows import PublishedRows, row_name

LEARNS = ("all", "last")
_COLUMNS = ("messages", "conversation")


@dataclass(frozen=True)
class ImportConversations(PublishedRows):
    """`learns`: all turns of the assistant, or its last one; see `PublishedRows`."""

    learns: str = "all"

    def __post_init__(self) -> None:
        if self.learns not in LEARNS:
            raise BadInput(f"stage.learns must be one of {', '.join(LEARNS)}, got '{self.learns}'")

    def read(self, row: Row, tokenizer: Any) -> WeightedResponse:
        """Return the record of a row. Raises BadRow."""
        tokens, asked = _read(row, tokenizer, self.learns == "last")
        start = tokens.is_learnt.index(True)
        if not start:
            raise BadRow("nothing stands before what is learnt: a prompt is needed")
        weights = [float(one) for one in tokens.is_learnt[start:]]
        return WeightedResponse(row_name(row), problem_key(asked), tokens.ids[:start], tokens.ids[start:], weights)


def _read(row: Row, tokenizer: Any, learns_last: bool) -> tuple[LearntTokens, str]:
    """Return a row's tokens, and what its first turn of the user asks. `learns_last`: of the turns of the assistant the
    last alone is learnt."""
    if isinstance(row.fields.get("label"), bool) or (row.has("completion") and row.has("label")):
        raise BadRow("its label judges the response, and wrong ones would be learnt: read it by "
                     "pairs/import_preferences (for KTO), or leave the column out")  # fmt: skip
    column = next((name for name in _COLUMNS if row.has(name)), "")
    if column or is_conversational(row, "prompt"):
        prompt = [] if column else read_turns(row, "prompt")
        turns = read_turns(row, column) if column else [*prompt, *read_turns(row, "completion")]
        asked = next((turn["content"] for turn in turns if turn["role"] == "user"), "")
        last = max((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
        return learnt_tokens(turns, tokenizer, max(len(prompt), last) if learns_last else len(prompt)), asked
    if row.has("text") and not row.has("prompt") and not row.has("completion"):
        ids = _whole_text(row, tokenizer)
        return LearntTokens(ids, [False] + [True] * (len(ids) - 1)), str(row.fields["text"])
    if not row.has("prompt") or not row.has("completion"):
        has = ", ".join(row.fields)
        raise BadRow(f"the row needs {' or '.join(_COLUMNS)}, prompt and completion, or text alone; it has {has}")
    tokens = response_tokens(row, tokenizer)
    prompt_ids, ids = tokens.prompt_ids, tokens.response_ids
    return LearntTokens([*prompt_ids, *ids], [False] * len(prompt_ids) + [True] * len(ids)), tokens.prompt


def _whole_text(row: Row, tokenizer: Any) -> list[int]:
    """Return the tokens of `text` with one end token, which the text or the tokenizer may have written already."""
    text = row.fields["text"]
    if not isinstance(text, str) or not text:
        raise BadRow("text must be a text that is not empty")
    ids = encode_text(tokenizer, text, row.place)
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    ids.append(tokenizer.eos_token_id)
    if len(ids) == 1:
        raise BadRow("text is nothing but an end token: there is nothing to learn")
    return ids
