"""Preference pairs as others publish them → PreferencePair, tokenised once by the model that will learn from them.

    python run_stage.py -cn pairs/import_preferences input=pairs.jsonl output=tokens.jsonl stage.tokenizer=MODEL
    python run_stage.py -cn pairs/import_preferences output=tokens.jsonl stage.tokenizer=MODEL \\
        stage.hub=HuggingFaceH4/ultrafeedback_binarized stage.split=train_prefs

    python run_stage.py -cn pairs/import_preferences input=pairs.json output=tokens.jsonl stage.tokenizer=MODEL \\
        stage.prompts=samples.json

The layouts of columns are those of `data.conversations`, and that of `data.pairs_without_prompt`. Pairs of one prompt
are of one problem.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from espalier.data.conversations import PairTokens, pair_tokens
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

    def read(self, row: Row, tokenizer: Any) -> PreferencePair:
        """Return the pair of a row; scores are 1 and 0 where it has none. Raises BadRow."""
        tokens = self._tokens(row, tokenizer)
        scores = next(((row.fields[a], row.fields[b]) for a, b in _SCORES if row.has(a) and row.has(b)), (1.0, 0.0))
        if not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
            raise BadRow(f"scores must be numbers, got {scores[0]!r} and {scores[1]!r}")
        return PreferencePair(
            row_name(row), problem_key(tokens.prompt), "published", tokens.prompt, tokens.chosen, tokens.rejected,
            tokens.prompt_ids, tokens.chosen_ids, tokens.rejected_ids, float(scores[0]), float(scores[1]),
        )  # fmt: skip
