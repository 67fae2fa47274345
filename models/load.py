"""Policy, reference and tokenizer from a Hugging Face folder (or hub name); one line for what is wrong."""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from espalier.data.records import BadInput
from espalier.models.fused_norm import fuse_norms
from espalier.models.generation_settings import make_savable
from espalier.models.gpu_attention import AUTO
from espalier.models.in_parts import cutting, differing_files, differing_tied
from espalier.models.last_layer import read_last_layer
from espalier.models.packed_attention import attention_name
from espalier.models.recompute import checkpoint_settings, recomputes

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
# `from_pretrained` below checks what the report lists.
logging.getLogger("transformers.modeling_utils").addFilter(lambda row: "LOAD REPORT" not in row.getMessage())

if not torch.cuda.is_available():
    # transformers' loading threads race for torch's pool where its number of threads was set ("Invalid thread pool").
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

_TOKENIZERS = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


class BadModel(BadInput):
    """A model folder that is missing, incomplete or of another kind than asked."""


def check_model_folder(path: str) -> None:
    """Raise BadModel unless `path` is a complete model folder, or a hub name (no local folder meant)."""
    folder = Path(path)
    if not folder.exists():
        is_local = path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path.partition("/")[0]).is_dir()
        if is_local:
            raise BadModel(f"{path}: no such model folder: check the path, or run the stage that writes it")
        return
    if not (folder / "config.json").is_file():
        raise BadModel(f"{path}: no config.json there: a model folder in Hugging Face format is needed")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise BadModel(f"{path}: no weights there (*.safetensors): the folder is incomplete, make it again")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with a pad token (the end token where it has none of its own). Raises BadModel where it has
    neither: nothing could be padded."""
    check_model_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        if Path(path).is_dir() and not any(next(Path(path).glob(pattern), None) for pattern in _TOKENIZERS):
            raise BadModel(f"{path} has no tokenizer (tokenizer.json): copy its files from the base model") from None
        raise BadModel(f"{path}: cannot load a tokenizer: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise BadModel(f"{path}: its tokenizer ({len(tokenizer)} tokens) has neither a pad token nor an end token: "
                           "set pad_token and eos_token in its tokenizer_config.json")  # fmt: skip
        tokenizer.pad_token = tokenizer.eos_token
        log.info("%s: the tokenizer has no pad token: its end token %s (id %d) pads, always masked", path,
                 tokenizer.eos_token, tokenizer.eos_token_id)  # fmt: skip
    return tokenizer


def load_end_ids(path: str) -> list[int]:
    """Return the end-of-sequence ids of a model's generation settings (or of its configuration); there can be
    several."""
    ids = generation_end_ids(path)
    return config_end_ids(path) if ids is None else ids


def generation_end_ids(path: str) -> list[int] | None:
    """Return those of generation_config.json, which engines stop at; None where there is no such file."""
    try:
        return _as_ids(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        return None


def config_end_ids(path: str) -> list[int]:
    """Return those of config.json."""
    return _as_ids(getattr(load_config(path).get_text_config(), "eos_token_id", None))


def _as_ids(ids: Any) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def load_config(path: str) -> PretrainedConfig:
    """Read the configuration of a model folder. Raises BadModel where there is none that can be read."""
    check_model_folder(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise BadModel(f"{path}: cannot read config.json: {_first_line(error)}") from error
    return config


def is_reward_model(path: str) -> bool:
    """Say whether the folder (or hub name) says that its model classifies tokens or texts; False where there is
    none."""
    try:
        kinds = load_config(path).architectures or []
    except BadModel:
        return False
    return any(kind.endswith(("ForTokenClassification", "ForSequenceClassification")) for kind in kinds)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def on_kernel(load: Callable[[str], Any], attention: str) -> Any:
    """Return what `load` makes of the name of an attention kernel; by matrix products where the network has no use for
    torch's fused one (attention sinks: GPT-OSS), with the same numbers; by transformers' own name where the network
    knows no others (GPT-J, Falcon), whose rows are then padded."""
    name = attention_name(attention)
    attention = "sdpa" if attention == AUTO else attention  # from here on what transformers knows
    try:
        return load(name)
    except KeyError as error:
        if error.args != (name,):
            raise
        log.info("this network has a table of its own for attention: rows are padded, model.attention=%s is its own",
                 attention)  # fmt: skip
        return load(attention)
    except ValueError as error:
        if attention != "sdpa" or "does not support an attention implementation" not in str(error):
            raise
        log.info("%s: attention by matrix products (eager) in place of sdpa, which it cannot", str(error).split()[0])
        return on_kernel(load, "eager")


def from_pretrained(
    auto_class: Any,
    path: str,
    may_lack: Sequence[str] = (),
    may_add: Sequence[str] = (),
    attention: str = "",
    **options: Any,
) -> PreTrainedModel:
    """Load `auto_class.from_pretrained` in float32 master weights; `attention` as of `load_policy`.

    Every weight of the model must stand in the folder in its shape, and no other; `may_lack` (those that get fresh
    values) and `may_add` are the prefixes of the names that are exempt. Raises BadModel where that is not so, and on a
    folder that cannot be loaded.
    """
    check_model_folder(path)
    if other := differing_files(path):
        raise BadModel(f"{path}: {other}: have the same model on every node")

    def load(**chosen: Any) -> Any:
        named = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
        return auto_class.from_pretrained(path, **named, **options, **chosen)

    model: PreTrainedModel
    try:
        with cutting(lambda: options.get("config") or load_config(path)):
            model, report = on_kernel(lambda name: load(attn_implementation=name), attention) if attention else load()
    except Exception as error:  # safetensors and transformers raise many kinds; each is one bad folder
        raise BadModel(f"{path}: cannot load the model: {_first_line(error)}") from error
    wrong = {
        "lacks": [name for name in report["missing_keys"] if not name.startswith(tuple(may_lack))],
        "has other shapes of": [row[0] for row in report["mismatched_keys"] if not row[0].startswith(tuple(may_lack))],
        "holds more than such a model:": [
            name for name in report["unexpected_keys"] if not name.startswith(tuple(may_add))
        ],
    }
    for what, names in wrong.items():
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise BadModel(f"{path} is not a {type(model).__name__}: it {what} {shown} ({len(names)} weights)")
    if apart := differing_tied(model):
        raise BadModel(f"{path}: its config.json ties {' and '.join(apart)}, of which the folder has different values: "
                       "set tie_word_embeddings there to false")  # fmt: skip
    return make_savable(read_last_layer(fuse_norms(model)), path)


def load_policy(path: str, attention: str = "auto", gradient_checkpointing: bool | str = False) -> PreTrainedModel:
    """Return a causal language model. `attention`: one of `packed_attention.KERNELS`; all but
    auto, eager and sdpa need a CUDA GPU. `gradient_checkpointing`: false, true or selective (`models.recompute`)."""
    recomputes(gradient_checkpointing)  # another setting is refused before anything is read
    model = from_pretrained(AutoModelForCausalLM, path, attention=attention)
    model.config.use_cache = False
    checkpoint_gradients(model, gradient_checkpointing)
    return model


def checkpoint_gradients(model: PreTrainedModel, setting: bool | str) -> None:
    """Have the backward pass compute again what `setting` says (`models.recompute`): less memory, same gradient.

    Raises BadModel where the network cannot, BadInput for another setting.
    """
    if not (kind := recomputes(setting)):
        return
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_settings(kind))
    except ValueError as error:
        message = f"{type(model).__name__}: {_first_line(error)}: set model.gradient_checkpointing=false"
        raise BadModel(message) from None


def load_reference(path: str, attention: str = "auto") -> PreTrainedModel:
    """Return a frozen copy of the policy, in evaluation mode."""
    model = load_policy(path, attention).requires_grad_(False)
    model.train(False)
    return model


def positions_of(config: PretrainedConfig) -> int:
    """Return how many tokens a network takes at most; a number that no row reaches where it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def max_length_of(path: str) -> int | None:
    """Return `max_position_embeddings` of a local model folder, None where it does not say."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    value = json.loads(config.read_text()).get("max_position_embeddings")
    return int(value) if value else None
