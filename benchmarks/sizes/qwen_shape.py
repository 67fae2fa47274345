"""A network of Qwen2.5-0.5B's shape with random weights, in float32, and a tokenizer as large as its vocabulary."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from espalier.models.tiny import build_tokenizer


@dataclass(frozen=True)
class QwenShape:
    """Of a Qwen2 network with tied embeddings."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int


HALF_BILLION = QwenShape(151_936, 896, 24, 14, 2, 4864)
TINY = QwenShape(2048, 64, 2, 2, 1, 128)
LEARNT = 1900  # tokens at most of words that the texts have; the others stand for themselves
SPARE = 16  # embeddings without a token, as Qwen has some


def large_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` tokens, for which every word of `texts` is one; the tokens that no
    text has are words too, which no other tokens are merged into."""
    small = build_tokenizer(texts, min(LEARNT, vocab_size))
    parts = json.loads(small.backend_tokenizer.to_str())
    words = parts["model"]["vocab"]
    for number in range(len(words), vocab_size):
        words[f"Ġw{number}"] = number
    made = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=small.eos_token, pad_token=small.pad_token,
                                   clean_up_tokenization_spaces=False)  # fmt: skip


def write_qwen(folder: Path, texts: Sequence[str], shape: QwenShape) -> None:
    """Write random weights of one seed in float32, and the tokenizer."""
    tokenizer = large_tokenizer(texts, shape.vocab_size - SPARE)
    config = Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads, max_position_embeddings=2048, rope_theta=1e6,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
