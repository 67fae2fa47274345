"""`model.attention=auto`: the kernel of packed rows by device, precision and layer."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from espalier.checks.machine import check_device
from espalier.data.batches.packing import pack_rows
from espalier.models import gpu_attention, packed_attention
from espalier.models.attention_kernels import How, eager_batch, eager_kernel
from espalier.models.gpu_attention import best_kernel, has_varlen, kernel_of
from espalier.models.load import load_policy
from espalier.models.packed_attention import attention_name, by_best, by_segments
from espalier.models.packing_check import packing_of
from tests.models.test_packing import sequences

BF16, FP32 = torch.bfloat16, torch.float32
PLAIN, ROWS = How(0.25), [[1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 8, 9]]


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that says it has a GPU, whose tensors stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", sequences)
    real = gpu_attention.best_kernel
    monkeypatch.setattr(packed_attention, "best_kernel", lambda device, *rest: real("cuda", *rest))
    for cached in (has_varlen, packed_attention._say_kernel):
        cached.cache_clear()
    yield
    for cached in (has_varlen, packed_attention._say_kernel):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("device", "kind", "head_size", "how", "name"),
    [
        ("cpu", BF16, 64, PLAIN, "sdpa"),
        ("cuda", BF16, 64, PLAIN, "varlen_attention"),
        ("cuda", torch.float16, 256, How(0.25, window=7), "varlen_attention"),
        ("cuda", BF16, 512, PLAIN, "flex_attention"),
        ("cuda", BF16, 20, PLAIN, "flex_attention"),
        ("cuda", BF16, 64, How(0.25, softcap=50.0), "flex_attention"),
        ("cuda", BF16, 64, How(0.25, sinks=torch.zeros(4)), "sdpa"),
        ("cuda", BF16, 64, How(0.25, dropout=0.1), "sdpa"),
        ("cuda", FP32, 64, PLAIN, "sdpa"),
    ],
)
def test_the_kernel_is_the_fastest_that_computes_the_layer_exactly(
    device: str, kind: torch.dtype, head_size: int, how: How, name: str, ampere: None
) -> None:
    assert best_kernel(device, kind, head_size, how) == name


def test_a_gpu_before_ampere_takes_flex_attention(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert best_kernel("cuda", BF16, 64, PLAIN) == "flex_attention"


def test_a_plan_names_the_kernel_of_a_gpu_that_is_not_here() -> None:
    assert kernel_of("auto", "cuda", is_bf16=True) == "varlen_attention"
    assert kernel_of("auto", "cuda", is_bf16=False) == "sdpa"
    assert kernel_of("auto", "cpu", is_bf16=True) == "sdpa"
    assert kernel_of("flex_attention", "cuda", is_bf16=True) == "flex_attention"


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_packed_rows_of_a_gpu_are_those_of_the_loop_over_segments(
    softcap: float | None, ampere: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flex attention itself, and by a function in place of torch's kernel for GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # flex attention on the CPU asks it too
    caplog.set_level(logging.INFO)
    packed, how = pack_rows(ROWS), How(0.25, softcap=softcap)
    draws = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 4, len(packed.ids), 16, generator=draws).bfloat16() for _ in range(3)]
    found = by_best(*tensors, packed.segments, how)
    by_best(*tensors, packed.segments, how)
    wanted = by_segments((eager_kernel, eager_batch), *tensors, packed.segments, how)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)
    words = "bfloat16 are computed by varlen_attention" if softcap is None else (
        "bfloat16 with soft caps are computed by flex_attention")  # fmt: skip
    assert [record.message for record in caplog.records] == [f"model.attention=auto: packed rows of {words}"]


def test_without_a_gpu_a_network_is_loaded_as_by_sdpa(tiny_policy: Path) -> None:
    assert attention_name("auto") == attention_name("sdpa")
    assert load_policy(str(tiny_policy)).config._attn_implementation == "packed_sdpa"


def tiny_llama(attention: str) -> Any:
    """A Llama of 2 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    config._attn_implementation = attention_name(attention)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["auto", "varlen_attention"])
def test_rows_are_packed_for_a_network_on_a_gpu(attention: str, ampere: None) -> None:
    """A kernel that rounds to bfloat16 is no leak between rows."""
    check = packing_of(tiny_llama(attention))
    assert (check.choice, check.reason) == ("packed", "")


@pytest.mark.parametrize("is_wrong", [True, False])
def test_the_kernel_that_auto_takes_is_held_against_rows_alone_when_a_network_is_loaded(
    is_wrong: bool, ampere: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check's own float32 pass goes by sdpa, and would not see it."""
    if is_wrong:
        monkeypatch.setitem(packed_attention._CHOSEN, "varlen_attention", lambda query, *rest: torch.zeros_like(query))
    net = tiny_llama("auto")
    assert packing_of(net).choice == "packed"
    assert net.config._attn_implementation == ("packed_sdpa" if is_wrong else "packed_auto")
    assert ("packed rows are computed by sdpa, as in bfloat16 they change one another" in caplog.text) is is_wrong


def test_the_machine_says_which_kernel_it_takes(ampere: None) -> None:
    assert check_device("bf16", "auto", needs_vllm=False) == "1 x NVIDIA A100, packed rows by varlen_attention"
    assert check_device("fp32", "auto", needs_vllm=False) == "1 x NVIDIA A100, packed rows by sdpa"
    assert check_device("bf16", "sdpa", needs_vllm=False) == "1 x NVIDIA A100"


def test_a_machine_without_a_gpu_takes_auto() -> None:
    assert check_device("fp32", "auto", needs_vllm=False).startswith("no GPU: ")
