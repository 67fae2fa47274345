"""The GPU check: rehearsals of its parts on a CPU, its table and its deadline, and FLOPs as torch counts them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu import attention, gpu_check, head, large, rl_smoke
from benchmarks.gpu.gpu_check import PARTS, run_part, table_of
from benchmarks.gpu.rows import Row
from benchmarks.gpu.training import SHAPES, Shape, flops_per_token, rows_of
from benchmarks.result import RESULTS

ROOT = Path(__file__).resolve().parent.parent.parent


def test_attention_and_the_head_are_rehearsed_and_compared(tmp_path: Path) -> None:
    rows = {row.figure: row for row in attention.measure(True, tmp_path) + head.measure(True, tmp_path)}
    sdpa = "sdpa, segment by segment: error of the"
    for name in ("flex_attention: error of the output", f"{sdpa} output", f"{sdpa} gradients"):
        value = rows[name].value
        assert value is not None
        assert 0 < value < 0.03
    loss = rows["chunked: error of the loss"].value
    assert loss is not None
    assert loss < 0.01
    for name in ("varlen_attention", "flash_attention_2", "liger-kernel"):
        assert (rows[name].value, rows[name].note) == (None, "no GPU")
    flex = rows["flex_attention: error of the gradients"]
    assert (flex.value, flex.note) == (None, "no backward pass on a CPU")


def test_large_shapes_are_what_their_names_say() -> None:
    for is_rehearsal in (False, True):
        (wide, _), (long, _), (same, settings) = large.shapes(is_rehearsal).values()
        names = [*large.shapes(is_rehearsal)]
        assert names[0] == f"vocabulary of {wide.vocab_size:,}"
        assert names[1] == f"rows of {long.length:,} tokens"
        assert (same, settings, long.micro) == (long, large.CHECKPOINTED, 1)
    assert (wide.vocab_size, long.length) == (1519, 512)


def test_where_engine_and_learner_compute_is_read_while_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner alone, both, the engine asleep."""
    looks = [([9000], [7]), ([20_000], [7, 8]), ([12_000], [7, 8])]
    watched = rl_smoke.Watched()
    for used, processes in looks:
        answers = {"--query-gpu=memory.used": used, "--query-compute-apps=pid": processes}
        monkeypatch.setattr(rl_smoke, "asked", answers.__getitem__)
        watched.look()
    assert watched == rl_smoke.Watched(20_000 * 2**20, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    row, most = rl_smoke.placement(watched)
    assert (row.value, row.note) == (2, "the engine is dealt GPU 3, learner and engine compute there")
    assert most.value == 19.531
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [(one.value, one.note) for one in rl_smoke.placement(rl_smoke.Watched())] == [(None, "no GPU")] * 2


def test_what_an_engine_frees_and_keeps_in_its_sleep_is_what_vllm_says() -> None:
    line = "INFO Sleep mode freed {} GiB memory, {} GiB memory is still in use.\n"
    rows = rl_smoke.asleep("".join(line.format(freed, freed / 10) for freed in (90.0, 66.5, 70.0, 60.0)))
    assert [row.value for row in rows] == [66.5, 6.65], "the first is left out"
    assert [(row.value, row.note) for row in rl_smoke.asleep("")] == [(None, "no sleep in the engine's log")] * 2


def test_a_kernel_that_is_wrong_ends_its_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = attention.by_flex
    monkeypatch.setattr(attention, "by_flex", lambda *given: 1.1 * right(*given))
    with pytest.raises(SystemExit, match=r"error: flex_attention differs from the CPU's attention by 0\.1"):
        attention.measure(True, tmp_path)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(3600)  # 10 minutes a part at most
def test_without_a_gpu_the_command_rehearses_every_part_to_the_end_and_says_what_is_not_there(tmp_path: Path) -> None:
    command = ["bash", "scripts/gpu_check.sh", "--rehearse", "--output", str(tmp_path)]
    result = RESULTS / "gpu_check.json"
    before = result.read_bytes() if result.is_file() else b""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    logs = "".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert (result.read_bytes() if result.is_file() else b"") == before  # a rehearsal is no result
    cells = [line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PARTS}
    assert [row[0] for row in cells if row[0] in PARTS] == [*PARTS]
    assert len(cells) == len(PARTS) + sum(len(part["rows"]) for part in found.values())
    for part in found.values():
        assert (part["error"], part["rehearsal"], len(part["rows"]) > 1) == ("", True, True), part
        assert f"gpu_check: {part['part']}: done" in done.stderr
    skipped = {row["figure"]: row["note"] for part in found.values() for row in part["rows"] if row["value"] is None}
    kernels = ("varlen_attention", "flash_attention_2", "liger-kernel", "engine placement", "GPU memory at most")
    assert {skipped[name] for name in kernels} == {"no GPU"}
    assert skipped["sft: FLOP utilisation"] == "the peak of CPU is not known"
    assert skipped["seconds/engine_sleep"] == "no such phase in this run"
    for kind in ("sft", "dpo"):  # TRL is installed, or is named
        speed = next(row for row in found["training"]["rows"] if row["figure"] == f"{kind}, TRL: speed")
        assert speed["value"] or speed["note"] == "not installed: bash scripts/install_bench.sh"
    table = (tmp_path / "table.md").read_text()
    assert table.count("rehearsed on a CPU: no figures") == len(PARTS)
    assert "|  | dpo: speed |  | tokens/s | ran |" in table


def test_a_part_beyond_its_deadline_is_ended_and_named(tmp_path: Path) -> None:
    found = run_part("training", "", tmp_path, seconds=0.2)
    assert found["error"] == "it was not done after 0.2 seconds and was ended"
    assert json.loads((tmp_path / "training.json").read_text())["rows"] == []


def test_a_command_that_is_ended_ends_its_part_and_leaves_what_was_measured(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.gpu_check",
        "--rehearse",
        "--output",
        str(tmp_path),
        "large",
        "head",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "gpu_check: large" not in process.stderr.readline():
            pass
        time.sleep(0.5)
        process.terminate()
        said = process.stderr.read()
    assert process.returncode == 1
    assert "gpu_check: large: it was ended by a signal" in said
    assert json.loads((tmp_path / "large.json").read_text())["error"] == "it was ended by a signal"
    assert not (tmp_path / "head.json").exists()
    assert "it was ended by a signal" in (tmp_path / "table.md").read_text()


def test_parts_measured_before_stay_where_the_gpu_is_of_the_same_kind(tmp_path: Path) -> None:
    parts = [{"part": "head", "gpu": "H200", "rows": []}, {"part": "large", "gpu": "H100", "rows": []}]
    path = tmp_path / "gpu_check.json"
    assert gpu_check.measured_before("H200", path) == {}
    path.write_text(json.dumps({"detail": {"parts": parts}}))
    assert gpu_check.measured_before("H200", path) == {"head": parts[0]}
    assert gpu_check.measured_before("H100", path) == {"large": parts[1]}
    assert gpu_check.measured_before("", path) == {}


def test_a_part_that_fails_keeps_what_was_measured_before_and_leaves_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = {"part": "head", "error": "", "rows": [], "rehearsal": False, "date": "2026-01-01", "seconds": 3}
    before |= {"versions": {"torch": "2"}}
    failed = before | {"error": "out of memory", "date": "2026-02-02"}
    _, rows = table_of([gpu_check.newest(before, failed)])
    assert rows[0][-1] == "measured 2026-01-01, torch 2, 3 s; FAILED 2026-02-02: out of memory"
    assert gpu_check.newest(failed, failed | {"rows": [2]})["rows"] == [2]
    assert gpu_check.newest(None, failed) is failed
    assert gpu_check.newest(before, before | {"rows": [2]})["rows"] == [2]

    def measure(is_rehearsal: bool, folder: Path) -> Iterator[Row]:
        yield Row("sft: speed", 1.0)
        raise SystemExit("error: dpo")

    monkeypatch.setattr(gpu_check.importlib, "import_module", lambda name: SimpleNamespace(measure=measure))
    with pytest.raises(SystemExit):
        gpu_check.run_one("training", True, tmp_path)
    assert [row["figure"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["sft: speed"]


def test_the_table_shows_no_number_of_a_rehearsal() -> None:
    row: dict[str, Any] = {"figure": "speed", "value": 7.0, "unit": "tokens/s", "note": ""}
    lacks = {"figure": "TRL", "value": None, "unit": "", "note": "not installed"}
    part: dict[str, Any] = {"part": "head", "rows": [row, lacks], "error": "", "seconds": 1.5, "rehearsal": True,
                            "date": "2026-01-02", "versions": {"torch": "9"}}  # fmt: skip
    what = PARTS["head"]
    assert table_of([part])[1] == [
        ["head", what, "", "", "rehearsed on a CPU: no figures, 1.5 s"],
        ["", "speed", "", "tokens/s", "ran"],
        ["", "TRL", "", "", "not installed"],
    ]
    measured = table_of([part | {"rehearsal": False}, part | {"error": "out of memory"}])[1]
    assert measured[0][4] == "measured 2026-01-02, torch 9, 1.5 s"
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
