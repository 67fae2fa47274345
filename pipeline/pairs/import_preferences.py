"""Preferences as others publish them → PreferencePair, or JudgedResponse of responses that are judged alone; tokenised
once by the model that will learn from them.

    python run_stage.py -cn pairs/import_preferences input=pairs.jsonl output=tokens.jsonl stage.tokenizer=MODEL
    python run_stage.py -cn pairs/import_preferences output=tokens.jsonl stage.tokenizer=MODEL \\
        stage.hub=HuggingFaceH4/ultrafeedback_binarized stage.split=train_prefs

    python run_stage.py -cn pairs/import_preferences input=pairs.json output=tokens.jsonl stage.tokenizer=MODEL \\
        stage.prompts=samples.json

The layouts of columns are those of `data.conversations`, and that of `data.pairs_without_prompt`. Rows of `prompt`,
`completion` and `label` become `JudgedResponse` (for KTO, outcome rewards). Rows of one prompt are of one problem.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from espalier.data.conversations import PairTokens, pair_tokens, response_tokens
from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.pairs_without_prompt import is_without_prompt, read_prompts, tokens_without_prompt
from espalier.data.process_data.published import problem_key
from espalier.data.records import BadInput, PreferencePair
from espalier.data.sources import BadRow, Row
from espalier.pipeline.published_rows import PublishedRows, row_name

_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen_reward", "reject_reward"),
)


@dataclass(frozen=True)
class ImportPreferences(PublishedRows):
    """See `PublishedRows`. `prompts`: the file that holds the prompts of pairs whose columns are `chosen`, `reject` and
    `id`."""

    prompts: str = ""

    def inputs(self) -> list[str]:
        """Return the file of prompts, if one is named."""
        return [self.prompts] if self.prompts else []

    @cached_property
    def _prompts(self) -> dict[str, str]:
        return read_prompts(self.prompts)

    def _tokens(self, row: Row, tokenizer: Any) -> PairTokens:
        if not is_without_prompt(row):
            if self.prompts:
                raise BadRow("no column reject: stage.prompts is for pairs of the columns chosen, reject and id")
            return pair_tokens(row, tokenizer)
        if not self.prompts:
            raise BadInput(f"{row.place}: pairs of the columns chosen, reject and id do not hold their prompts: name "
                           "the file that does (rows with id and text) as stage.prompts")  # fmt: skip
        return tokens_without_prompt(row, tokenizer, self._prompts)

    def read(self, row: Row, tokenizer: Any) -> PreferencePair | JudgedResponse:
        """Return the pair of a row (scores are 1 and 0 where it has none), or its judged response. Raises BadRow."""
        if row.has("completion") and not row.has("chosen") and not self.prompts:
            return _judged(row, tokenizer)
        tokens = self._tokens(row, tokenizer)
        scores = next(((row.fields[a], row.fields[b]) for a, b in _SCORES if row.has(a) and row.has(b)), (1.0, 0.0))
        if not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
            raise BadRow(f"scores must be numbers, got {scores[0]!r} and {scores[1]!r}")
        return PreferencePair(
            row_name(row), problem_key(tokens.prompt), "published", tokens.prompt, tokens.chosen, tokens.rejected,
            tokens.prompt_ids, tokens.chosen_ids, tokens.rejected_ids, float(scores[0]), float(scores[1]),
        )  # fmt: skip


def _judged(row: Row, tokenizer: Any) -> JudgedResponse:
    """Return the judged response of a row. Raises BadRow where its label is no judgement: -100, say, is none."""
    label = row.fields.get("label")
    if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
        raise BadRow(f"label must be true, false or a probability in [0, 1], got {label!r} (prompts and completions "
                     "without a label are read by problems/import_conversations)")  # fmt: skip
    tokens = response_tokens(row, tokenizer)
    return JudgedResponse(
        row_name(row), problem_key(tokens.prompt), tokens.prompt, tokens.response,
        label if isinstance(label, bool) else float(label), tokens.prompt_ids, tokens.response_ids,
    )  # fmt: skip
