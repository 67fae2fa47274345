"""Loading a network whose weights no process holds whole: of each one a rank reads what it keeps; and networks that
are only read, of which linear layers are held in bf16.

transformers builds a network without weights and registers those of safetensors with their modules one by one; torch
calls a hook there. Fused experts, renamed and tied weights, sharded folders and buffers (rotary tables) are
transformers' own business, and stay so. A weight that is one of a file as it stands is read there, in part
(`models.file_slices`); any other is whole then, and cut at once. What a folder lacks (a fresh head) is drawn whole, as
ever, and cut when an engine takes the network.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
import xxhash
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PretrainedConfig, PreTrainedModel

from espalier.models.file_slices import Unread, read_in_parts, sample_of_files, with_only

T = TypeVar("T")


class Cutter(Protocol):
    """How weights are cut over the ranks; every rank cuts the same ones in turn."""

    @property
    def reads_parts(self) -> bool:
        """Whether a rank keeps a stretch of each flattened weight; else all are read whole."""

    def stretch(self, size: int) -> tuple[int, int]:
        """Return (start, stop): which elements of a flattened weight of so many this rank keeps."""

    def cut(self, parameter: torch.nn.Parameter) -> None:
        """Leave a parameter, which is whole on every rank, with this rank's part, in place."""

    def cut_own(self, parameter: torch.nn.Parameter) -> None:
        """Do so where a parameter has the right numbers in this rank's stretch alone."""

    def of_all_ranks(self, value: T) -> list[T]:
        """Return the value of every rank, which all ask."""


@dataclass
class Parts:
    """`cutter` of weights; None: they stay whole. `is_half`: the matrices of linear layers are held in bf16, in which
    autocast multiplies them anyway; not their biases, which DeepSpeed's linear layers add as they are."""

    cutter: Cutter | None
    is_half: bool = False
    hashes: dict[tuple[int, str], int] = field(default_factory=dict)  # of this rank's stretches


_parts: ContextVar[Parts | None] = ContextVar("parts", default=None)


@contextmanager
def loaded_in_parts(cutter: Cutter | None, is_half: bool = False) -> Iterator[None]:
    """Have networks that are loaded within cut, and held in bf16, as they are read (`Parts`)."""
    token = _parts.set(Parts(cutter, is_half))
    try:
        yield
    finally:
        _parts.reset(token)


def differing_files(folder: str) -> str:
    """Return a line about the first rank whose folder holds other files than that of rank 0, where each reads a part of
    its own; "" where none does. It compares names, sizes and samples of what safetensors files hold."""
    parts = _parts.get()
    if parts is None or parts.cutter is None or not parts.cutter.reads_parts:
        return ""
    found = parts.cutter.of_all_ranks(sample_of_files(folder))
    others = [number for number, sample in enumerate(found) if sample != found[0]]
    return f"rank {others[0]} has other weights there than rank 0" if others else ""


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

    def register(module: torch.nn.Module, name: str, value: torch.nn.Parameter) -> torch.nn.Parameter | None:
        # Only what came from a file has this mark; a tied weight comes again, cut already.
        if not getattr(value, "_is_hf_initialized", False) or value.device.type == "meta" or is_part(value):
            return None
        dtype = torch.bfloat16 if parts.is_half and name == "weight" and _is_matrix(module, head) else value.dtype
        if parts.cutter is None:
            value.data = value.data.to(dtype)
            return None
        kept, parts.hashes[id(module), name] = _cut(value, dtype, parts.cutter)
        return kept

    try:
        with ExitStack() as opened:
            opened.enter_context(register_module_parameter_registration_hook(register))  # type: ignore[arg-type]
            if parts.cutter is not None and parts.cutter.reads_parts:
                opened.enter_context(register_module_buffer_registration_hook(_read_buffer))  # type: ignore[arg-type]
                opened.enter_context(read_in_parts())
            yield
    finally:
        os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD")
        if before is not None:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def _cut(value: torch.nn.Parameter, dtype: torch.dtype, cutter: Cutter) -> tuple[torch.nn.Parameter, int]:
    """Return the parameter with this rank's part of it, in `dtype`, and a hash of that part as it was read."""
    start, stop = cutter.stretch(value.numel())
    if not isinstance(value, Unread):
        hash_ = _hash(value.detach().cpu().reshape(-1)[start:stop])
        value.data = value.data.to(dtype)
        cutter.cut(value)
        return value, hash_
    numbers = value.numbers(start, stop)
    own = torch.nn.Parameter(with_only(numbers, start, value.shape, dtype), value.requires_grad)
    own._is_hf_initialized = True  # type: ignore[attr-defined]
    hash_ = _hash(numbers)
    del numbers
    cutter.cut_own(own)
    return own, hash_


def _hash(numbers: torch.Tensor) -> int:
    """Return one of a flat tensor; torch.hash_tensor is a XOR of the values: the same in any order, and where all signs
    are turned."""
    return int(xxhash.xxh3_64_intdigest(numbers.contiguous().view(torch.uint8).numpy().data))


def _read_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    return value.whole() if isinstance(value, Unread) else None


def hold_in_halves(model: PreTrainedModel) -> None:
    """Hold the matrices of linear layers in bf16, of a network that was loaded whole: in autocast it says the same, to
    the last bit."""
    head = _tied_head(model.config)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and _is_matrix(layer, head):
            layer.weight.data = layer.weight.data.to(torch.bfloat16)


def _tied_head(config: PretrainedConfig) -> int | None:
    """Return the outputs of a head that shares its numbers with the embedding, which is looked up in float32: where the
    text's configuration or the outer one says so."""
    text = config.get_text_config()
    is_tied = any(getattr(one, "tie_word_embeddings", False) for one in (config, text))
    return int(text.vocab_size) if is_tied else None


def _is_matrix(module: torch.nn.Module, head: int | None) -> bool:
    return isinstance(module, torch.nn.Linear) and module.out_features != head


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
    """Return two names that the configuration ties and the folder has different values of, on every rank: transformers,
    which leaves such weights apart, cannot see that of weights that are cut."""
    parts = _parts.get()
    if parts is None or parts.cutter is None:
        return None
    for target, source in sorted(getattr(model, "all_tied_weights_keys", {}).items()):
        one, other = (parts.hashes.get(_place(model, name)) for name in (target, source))
        # Weights of one shape are cut alike, so what differs does so in some rank's part.
        if one is not None and other is not None and any(parts.cutter.of_all_ranks(one != other)):
            return source, target
    return None


def _place(model: PreTrainedModel, name: str) -> tuple[int, str]:
    owner, _, leaf = name.rpartition(".")
    return id(model.get_submodule(owner)), leaf
