"""Preference pairs as others publish them → PreferencePair, tokenised once by the model that will learn from them.

    python run_stage.py -cn pairs/import_preferences input=pairs.jsonl output=tokens.jsonl stage.tokenizer=MODEL
    python run_stage.py -cn pairs/import_preferences output=tokens.jsonl stage.tokenizer=MODEL \\
        stage.hub=HuggingFaceH4/ultrafeedback_binarized stage.split=train_prefs

The layouts of columns are those of `data.conversations`. Pairs of one prompt are of one problem.
"""

from dataclasses import dataclass
from typing import Any

from espalier.data.conversations import pair_tokens
from espalier.data.process_data.published import problem_key
from espalier.data.records import PreferencePair
from espalier.data.sources import BadRow, Row
from espalier.pipeline.published_rows import PublishedRows, row_name

_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))


@dataclass(frozen=True)
class ImportPreferences(PublishedRows):
    """See `PublishedRows`."""

    def read(self, row: Row, tokenizer: Any) -> PreferencePair:
        """Return the pair of a row; scores are 1 and 0 where it has none. Raises BadRow."""
        tokens = pair_tokens(row, tokenizer)
        scores = next(((row.fields[a], row.fields[b]) for a, b in _SCORES if row.has(a) and row.has(b)), (1.0, 0.0))
        if not all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
            raise BadRow(f"scores must be numbers, got {scores[0]!r} and {scores[1]!r}")
        return PreferencePair(
            row_name(row), problem_key(tokens.prompt), "published", tokens.prompt, tokens.chosen, tokens.rejected,
            tokens.prompt_ids, tokens.chosen_ids, tokens.rejected_ids, float(scores[0]), float(scores[1]),
        )  # fmt: skip
