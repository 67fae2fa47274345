"""A tiny policy and its tokenizer, built on the spot from a text: for the quick start and the tests.

Nothing is downloaded: the tokenizer is a byte-level BPE trained on the text (digits stand alone, a newline
is a token of its own), the weights are random. The folder is a standard Hugging Face one. Input and output
embeddings are not tied: engines that take new weights while they run can miss a tied head.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from espalier.data.records import BadInput

FAMILIES = ("llama", "qwen2", "qwen3")  # architectures, by the names of their configurations
END, PAD = "<|end|>", "<|pad|>"


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return byte-level BPE of at most `vocab_size` tokens; any text round-trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n| ?[^\s\d]+| ?\d|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def build_tiny(
    output_dir: str | Path,
    texts: Iterable[str],
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int,
    max_length: int,
    seed: int,
    family: str = "llama",
) -> Path:
    """Write a network of a `family` with random weights and its tokenizer to `output_dir` (complete or absent).

    `max_length` in tokens. Deterministic in its arguments. A folder that exists is kept as it is. Raises BadInput on a
    family that is not one of `FAMILIES`.
    """
    if family not in FAMILIES:
        raise BadInput(f"a tiny policy's family must be one of {', '.join(FAMILIES)}, got '{family}'")
    output_dir = Path(output_dir)
    if output_dir.exists():
        return output_dir
    tokenizer = build_tokenizer(texts, vocab_size)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    partial = output_dir.with_name(f"{output_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.replace(output_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return output_dir
