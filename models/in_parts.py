"""Loading a network whose weights no process holds whole: each one is cut over the ranks as soon as it is read; and
networks that are only read, of which linear layers are held in bf16.

transformers builds a network without weights, reads safetensors weight by weight and registers each with its module;
torch calls a hook there. Fused experts, renamed and tied weights, sharded folders and buffers (rotary tables) are
transformers' own business, and stay so. What a folder lacks (a fresh head) is drawn whole, as ever, and cut when an
engine takes the network.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PretrainedConfig, PreTrainedModel


@dataclass
class Parts:
    """`cut` leaves a parameter with this rank's part, in place; every rank calls it for the same ones in turn; None:
    weights stay whole. `is_half`: the matrices of linear layers are held in bf16, in which autocast multiplies them
    anyway; not their biases, which DeepSpeed's linear layers add as they are."""

    cut: Callable[[torch.nn.Parameter], None] | None
    is_half: bool = False
    hashes: dict[tuple[int, str], int] = field(default_factory=dict)


_parts: ContextVar[Parts | None] = ContextVar("parts", default=None)


@contextmanager
def loaded_in_parts(cut: Callable[[torch.nn.Parameter], None] | None, is_half: bool = False) -> Iterator[None]:
    """Have networks that are loaded within cut, and held in bf16, as they are read (`Parts`)."""
    token = _parts.set(Parts(cut, is_half))
    try:
        yield
    finally:
        _parts.reset(token)


@contextmanager
def cutting(config_of: Callable[[], PretrainedConfig]) -> Iterator[None]:
    """Cut what transformers reads within, for a network of this configuration; nothing outside `loaded_in_parts`."""
    parts = _parts.get()
    if parts is None:
        yield
        return
    parts.hashes.clear()  # of networks that may be gone, and their places taken by others
    head = _tied_head(config_of())
    # A thread pool would read ahead without a limit.
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

    def register(module: torch.nn.Module, name: str, value: torch.nn.Parameter) -> None:
        # Only what came from a file has this mark; a tied weight comes again, cut already.
        if not getattr(value, "_is_hf_initialized", False) or value.device.type == "meta" or is_part(value):
            return
        if parts.cut is not None:
            # torch.hash_tensor is a XOR of the values: the same in any order, and where all signs are turned
            bytes_ = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            parts.hashes[id(module), name] = xxhash.xxh3_64_intdigest(bytes_)
        if parts.is_half and name == "weight":
            _round_matrix(module, value, head)
        if parts.cut is not None:
            parts.cut(value)

    hook = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()
        os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD")
        if before is not None:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def hold_in_halves(model: PreTrainedModel) -> None:
    """Hold the matrices of linear layers in bf16, of a network that was loaded whole: in autocast it says the same, to
    the last bit."""
    head = _tied_head(model.config)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            _round_matrix(layer, layer.weight, head)


def _tied_head(config: PretrainedConfig) -> int | None:
    """Return the outputs of a head that shares its numbers with the embedding, which is looked up in float32: where the
    text's configuration or the outer one says so."""
    text = config.get_text_config()
    is_tied = any(getattr(one, "tie_word_embeddings", False) for one in (config, text))
    return int(text.vocab_size) if is_tied else None


def _round_matrix(module: torch.nn.Module, weight: torch.Tensor, head: int | None) -> None:
    if isinstance(module, torch.nn.Linear) and module.out_features != head:
        weight.data = weight.data.to(torch.bfloat16)


@contextmanager
def halves_in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Have linear layers that are held in bf16 beside float32 ones compute in float32 within, without autocast."""
    kinds = {value.dtype for value in model.parameters()}
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    halves = [layer for layer in layers if layer.weight.dtype == torch.bfloat16 and torch.float32 in kinds]
    for layer in halves:
        layer.forward = partial(_linear_in_float32, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in halves:
            del layer.forward


def _linear_in_float32(layer: torch.nn.Linear, given: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return torch.nn.functional.linear(given, layer.weight.float(), bias)


def is_part(tensor: torch.Tensor) -> bool:
    """Say whether ZeRO-3 has cut it, so that a rank holds no more than its part."""
    return hasattr(tensor, "ds_id")


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of the whole."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def differing_tied(model: PreTrainedModel) -> tuple[str, str] | None:
    """Return two names that the configuration ties and the folder has different values of: transformers, which leaves
    such weights apart, cannot see that of weights that are cut."""
    parts = _parts.get()
    for target, source in getattr(model, "all_tied_weights_keys", {}).items() if parts is not None else ():
        one, other = (_hash_of(model, name, parts) for name in (target, source))
        if one is not None and other is not None and one != other:
            return source, target
    return None


def _hash_of(model: Any, name: str, parts: Parts | None) -> int | None:
    owner, _, leaf = name.rpartition(".")
    return parts.hashes.get((id(model.get_submodule(owner)), leaf)) if parts is not None else None
