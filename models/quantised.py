"""Linear layers of 4 bits (NF4, doubly quantised) or 8 bits under trained adapters: QLoRA (Dettmers et al. 2023).

Through bitsandbytes, on CUDA GPUs and on CPUs. The output head, embeddings and norms stay as they are. A trained
adapter belongs to the rounded weights it was trained on: `round_weights` makes those of a model in float32, to merge
the adapter with. The model is loaded in float32 first: it needs that much memory of the CPU for a moment.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from espalier.models.load import BadModel

KEPT = ("lm_head", "score", "classifier")


def check_bits(bits: int) -> None:
    """Raise BadModel where weights of `bits` bits are not to be had."""
    if bits not in (0, 4, 8):
        raise BadModel(f"lora.bits must be 0, 4 or 8, got {bits}")
    if bits and not importlib.util.find_spec("bitsandbytes"):
        raise BadModel(f"QLoRA (lora.bits={bits}) cannot run: the package bitsandbytes is not installed: pip install "
                       "bitsandbytes, or set lora.bits=0")  # fmt: skip


def _linear_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Return (parent, name in it, layer) of every linear layer but the heads."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear) and name not in KEPT:
                yield parent, name, layer


def _quantised(layer: torch.nn.Linear, bits: int) -> Any:
    """Return the layer with its weight waiting to be quantised: `.to(device)` does it."""
    import bitsandbytes as bnb

    shape = (layer.in_features, layer.out_features, layer.bias is not None)
    made: Any
    if bits == 4:
        made = bnb.nn.Linear4bit(*shape, compress_statistics=True, quant_type="nf4")
        made.compute_type_is_set = True  # see _compute_as_autocast
        made.support_avx512bf16_for_cpu = False  # would repack the weights in evaluation, and compute in bf16
        made.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=made
        )
    else:
        made = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0)
        made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.requires_grad_(False)


def _compute_as_autocast(layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """bitsandbytes computes in the precision of its first input ever, and autocast does not touch that by itself."""
    inputs = arguments[0]
    if torch.is_autocast_enabled(inputs.device.type):
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    layer.compute_dtype = inputs.dtype
    return (inputs, *arguments[1:])


def quantise(model: Any, bits: int) -> Any:
    """Return the model with every linear layer but the heads in `bits` bits, frozen. Changes it in place, and moves it
    to the GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for parent, name, layer in _linear_layers(model):
        made = _quantised(layer, bits).to(device)
        made.register_forward_pre_hook(_compute_as_autocast)
        setattr(parent, name, made)
    setattr(model, f"is_loaded_in_{bits}bit", True)  # peft looks here
    return model.to(device)


@torch.no_grad()
def round_weights(model: Any, bits: int) -> Any:
    """Return the model in float32 with the weights that `quantise` leaves of it. Changes it in place."""
    import bitsandbytes as bnb

    check_bits(bits)
    for _, _, layer in _linear_layers(model):
        made = _quantised(layer, bits).to(layer.weight.device)
        if bits == 4:
            rounded = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
        else:
            rounded = made.weight.data.float() * (made.weight.SCB.float() / 127).unsqueeze(1)
        layer.weight.copy_(rounded)
    return model
