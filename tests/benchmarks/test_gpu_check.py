"""The GPU check: rehearsals of its parts on a CPU, its table and its deadline, and FLOPs as torch counts them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu import attention, gpu_check, head
from benchmarks.gpu.gpu_check import PARTS, run_part, table_of
from benchmarks.gpu.training import SHAPES, Shape, flops_per_token, rows_of

torch.set_num_threads(1)


def test_attention_and_the_head_are_rehearsed_and_compared(tmp_path: Path) -> None:
    rows = {row.figure: row for row in attention.measure(True, tmp_path) + head.measure(True, tmp_path)}
    for name in ("flex_attention: error", "sdpa, segment by segment: error"):
        value = rows[name].value
        assert value is not None
        assert 0 < value < 0.03
    loss = rows["chunked: error of the loss"].value
    assert loss is not None
    assert loss < 0.01
    for name in ("varlen_attention", "flash_attention_2", "liger-kernel"):
        assert (rows[name].value, rows[name].note) == (None, "no GPU")


def test_a_kernel_that_is_wrong_ends_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = attention.by_flex
    monkeypatch.setattr(attention, "by_flex", lambda *given: 1.1 * right(*given))
    with pytest.raises(SystemExit, match=r"error: flex_attention differs from the CPU's attention by 0\.1"):
        attention.measure(True, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training", pytest.param("scoring", marks=pytest.mark.server),
                                  pytest.param("rl_smoke", marks=pytest.mark.server)])  # fmt: skip
def test_the_other_parts_are_rehearsed_by_real_programs(name: str, tmp_path: Path) -> None:
    found = run_part(name, True, tmp_path)
    assert found["error"] == "", (tmp_path / f"{name}.log").read_text()[-2000:]
    assert len(found["rows"]) > 1
    assert json.loads((tmp_path / f"{name}.json").read_text()) == found


def test_a_part_beyond_its_deadline_is_ended_and_named(tmp_path: Path) -> None:
    found = run_part("training", True, tmp_path, seconds=0.2)
    assert found["error"] == "it was not done after 0.2 seconds and was ended"
    assert json.loads((tmp_path / "training.json").read_text())["rows"] == []


def test_the_table_shows_no_number_of_a_rehearsal() -> None:
    row: dict[str, Any] = {"figure": "speed", "value": 7.0, "unit": "tokens/s", "note": ""}
    lacks = {"figure": "TRL", "value": None, "unit": "", "note": "not installed"}
    part: dict[str, Any] = {"part": "head", "rows": [row, lacks], "error": "", "seconds": 1.5, "rehearsal": True}
    what = PARTS["head"]
    assert table_of([part])[1] == [
        ["head", what, "", "", "rehearsed on a CPU: no figures, 1.5 s"],
        ["", "speed", "", "tokens/s", "ran"],
        ["", "TRL", "", "", "not installed"],
    ]
    measured = table_of([part | {"rehearsal": False}, part | {"error": "out of memory"}])[1]
    assert measured[0][4] == "measured, 1.5 s"
    assert measured[1] == ["", "speed", 7.0, "tokens/s", ""]
    assert measured[3][4] == "out of memory"


def test_a_part_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", "atention"])
    with pytest.raises(SystemExit) as stop:
        gpu_check.main()
    assert stop.value.code == 2
    assert "error: there is no part 'atention': choose of attention, head" in capsys.readouterr().err


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


def test_utilisation_is_flops_over_the_peak_of_the_device() -> None:
    shape = SHAPES["1b"]
    flops = flops_per_token(shape, True)
    assert flops == pytest.approx(6 * 1.034e9 + 6 * 22 * 2048 * 2048, rel=0.01)
    speed = 0.5 * 989e12 / flops
    run = {"speeds": [speed, speed, 0.9 * speed], "peak_gib": 40.0, "losses": [2.0, 1.0], "device": "NVIDIA H100 80GB"}
    rows = {row.figure: row.value for row in rows_of("sft", run, shape)}
    assert rows["sft: FLOP utilisation"] == pytest.approx(0.5, abs=1e-3)
    assert rows["sft: peak memory"] == 40.0
    unknown = {row.figure: row for row in rows_of("sft", run | {"device": "Something new"}, shape)}
    assert unknown["sft: FLOP utilisation"].value is None
    assert "the peak of Something new is not known" in unknown["sft: FLOP utilisation"].note
