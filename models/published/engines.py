"""Which published models vLLM's engines serve, how they are started for it, and how their numbers are read.

Engines give the numbers of a head at every token. A causal LM that is read by two tokens is loaded as a classifier
whose head is the rows of its output head for these tokens: two numbers in place of a vocabulary, with the
same softmax. (vLLM's `prompt_logprob_token_ids` needs a model runner that it has on GPUs alone.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from espalier.models.load import BadModel, load_config
from espalier.models.log_ratio_reward import is_log_ratio_reward
from espalier.models.published.layouts import only_id
from espalier.models.published.load import is_plain
from espalier.models.published.reads import ClassShares, Read, TokenShare
from espalier.models.published.table import CAUSAL, CLASSES, PublishedPRM

NATIVE = "Qwen2ForProcessRewardModel"
"""The one head of several layers that vLLM has; its own pooling picks step tags, which a cached prefix would shift."""


@dataclass(frozen=True)
class EngineForm:
    """`options` of the engine beside its own; `read`: how scores are read off its numbers."""

    read: Read
    options: Mapping[str, Any] = field(default_factory=dict)


def engine_form(path: str, row: PublishedPRM, tokenizer: Any) -> EngineForm:
    """Return how engines serve a model of the table. Raises BadModel, with the remedy, where they do not."""
    if is_log_ratio_reward(path):
        raise BadModel(f"{path} scores by the log-ratio of two policies and has no head that an engine reads: leave "
                       "client out, transformers scores it")  # fmt: skip
    if isinstance(row.read, TokenShare) and row.read.of_all:
        raise BadModel("engines give the numbers of two tokens, and stage.deviations.of_all reads the whole "
                       "vocabulary: leave client out, transformers scores it")  # fmt: skip
    if row.network == CAUSAL and isinstance(row.read, TokenShare):
        tokens = tokenizer.convert_ids_to_tokens([only_id(tokenizer, one) for one in (row.read.bad, row.read.good)])
        head = {"classifier_from_token": tokens, "method": "no_post_processing"}
        return EngineForm(ClassShares(), {"convert": "classify", "hf_overrides": head})
    architectures = load_config(path).architectures or []
    if NATIVE in architectures and row.head == "score.":
        return EngineForm(row.read, {"pooler_config": {"task": "token_classify", "tok_pooling_type": "ALL"}})
    if row.network == CLASSES and not row.head and is_plain(path):
        return EngineForm(row.read)
    what = ", ".join(architectures) or "no architecture named"
    if row.head == "score.":
        raise BadModel(f"{path} ({what}) has a head of several layers, which vLLM serves as {NATIVE} alone: leave "
                       "client out, transformers scores it")  # fmt: skip
    raise BadModel(f"{path} ({what}) has a head that vLLM does not serve: write it as a plain classifier by "
                   "prm/export_classifier and score that folder with the same stage.layout, or leave client "
                   "out")  # fmt: skip
