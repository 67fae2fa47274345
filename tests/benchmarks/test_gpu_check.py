"""The GPU benchmark of training: refuses a machine without a GPU, runs in small, and counts FLOPs as torch does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training import training_gpu
from benchmarks.training.training_gpu import SHAPES, Shape, figures, flops_per_token, main, peak_teraflops

torch.set_num_threads(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: training_gpu needs a CUDA GPU and this machine has none")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_all_objectives_run_in_small_and_write_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Path:
        raise AssertionError("a trial run writes no result")

    monkeypatch.setattr(training_gpu, "write_result", refuse)
    made = main(["--shape", "tiny"])
    assert set(made) == {f"{name}_{kind}" for name in ("sft", "dpo", "prm")
                         for kind in ("tokens_per_second", "flop_utilisation", "peak_memory")}  # fmt: skip
    assert all(made[f"{name}_tokens_per_second"]["value"] > 0 for name in ("sft", "dpo", "prm"))


def test_flops_are_those_that_torch_counts() -> None:
    shape = Shape(64, 160, 3, 4, 2, 500, length=32, batch=1, micro=1, num_steps=1, num_warm=0)
    config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    config._attn_implementation = "eager"  # the counter sees its products, also those that the mask leaves out
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(3, 500, (1, 32))).logits.sum().backward()
    full_attention = 12 * 3 * 64 * 32 * 32
    # Rotary tables and the first layer's missing gradient of its input weigh little.
    expected = flops_per_token(shape, True) * 32 + full_attention / 2
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_utilisation_is_flops_over_the_peak() -> None:
    shape = SHAPES["1b"]
    flops = flops_per_token(shape, True)
    assert flops == pytest.approx(6 * 1.034e9 + 6 * 22 * 2048 * 2048, rel=0.01)
    speed = 0.5 * 989e12 / flops
    made = figures({"sft": {"speeds": [speed, speed, 0.9 * speed], "peak_gib": 40.0}}, shape, 989.0)
    assert made["sft_flop_utilisation"]["value"] == pytest.approx(0.5, abs=1e-3)
    assert made["sft_flop_utilisation"]["low"] == pytest.approx(0.45, abs=1e-3)
    assert made["sft_peak_memory"]["value"] == 40.0


def test_the_peak_is_that_of_the_device_or_asked_for() -> None:
    assert peak_teraflops("NVIDIA H200", 0.0) == 989.0
    assert peak_teraflops("NVIDIA H100 PCIe", 0.0) == 756.0
    assert peak_teraflops("Something new", 400.0) == 400.0
    with pytest.raises(SystemExit, match="the peak of Something new is not known: give --peak-teraflops"):
        peak_teraflops("Something new", 0.0)
