"""Half a billion parameters beside TRL: figures by hand, equal losses as a condition, and the same code on a tiny
network; TRL itself only if installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.sides import Side
from benchmarks.sizes.memory_runs import CASES
from benchmarks.sizes.peer_iterations import check_lengths, check_taught
from benchmarks.sizes.peer_plan import Plan
from benchmarks.sizes.peers import (
    METHODS,
    OWN,
    check_losses,
    figures_of,
    kind_of,
    parse,
    run_side,
    seconds_per_step,
    section,
)
from benchmarks.sizes.qwen_shape import HALF_BILLION, TINY, large_tokenizer, write_qwen
from benchmarks.sizes.sizes import chosen_of
from benchmarks.training.clock import StepClock

ROOT = Path(__file__).resolve().parent.parent.parent
PLAN = Plan(TINY, batch=4, steps=2, rounds=1, threads=1)


def answer(seconds: float, gib: float, losses: list[float] | None = None, prepare: float = 0.0) -> dict[str, Any]:
    """Of a side, whose first step took 100 s; the wall has twice the seconds of CPU."""
    steps = [100.0, seconds, seconds]
    return {"step_cpu_seconds": steps, "step_seconds": [2 * one for one in steps], "losses": losses or [12.0, 11.9],
            "prepare_cpu_seconds": prepare, "prepare_seconds": 2 * prepare, "peak_bytes": gib * 2**30, "tokens": 100,
            "computed_tokens": 150}  # fmt: skip


def test_the_shape_is_that_of_half_a_billion_parameters() -> None:
    shape = HALF_BILLION
    head = shape.hidden_size // shape.num_heads
    attention = 2 * shape.hidden_size * shape.hidden_size + 2 * shape.hidden_size * shape.num_key_value_heads * head
    biases = shape.hidden_size + 2 * shape.num_key_value_heads * head
    layer = attention + biases + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    embeddings = shape.vocab_size * shape.hidden_size
    assert embeddings + shape.num_layers * layer + shape.hidden_size == 494_032_768  # Qwen2.5-0.5B's model card: 0.49B


def test_what_a_method_trains_and_which_of_them_compute_nothing_again() -> None:
    assert [kind_of(method) for method in METHODS] == ["sft", "dpo", "prm", "grpo", "sft", "dpo", "prm"]
    recomputed, kept = set(OWN["sft_in_backward"]), set(OWN["prm_in_backward"])
    assert recomputed == set(OWN["dpo_in_backward"]) == kept | {"model.gradient_checkpointing=true"}


def test_a_large_tokenizer_has_a_token_for_every_word_and_as_many_as_are_asked_for() -> None:
    tokenizer = large_tokenizer([" kabo milu"] * 4, 3000)
    assert len(tokenizer) == 3000
    ids = tokenizer(" kabo milu kabo").input_ids
    assert len(ids) == 3
    assert ids[0] == ids[2]
    assert tokenizer.decode([2999]) == " w2999"


def test_the_first_step_is_left_out_and_one_thread_is_timed_by_its_own_cpu() -> None:
    found = answer(3.0, 8, prepare=6.0)
    assert seconds_per_step(found, threads=1) == 3.0
    assert seconds_per_step(found, threads=2) == 6.0
    assert seconds_per_step(found, threads=1, is_prepared=False) == 5.0  # 6 s before three steps


def test_losses_that_differ_by_more_than_a_thousandth_are_no_figure() -> None:
    near = {"product": answer(1, 8, [12.0, 11.9]), "default": answer(1, 8, [12.006, 11.9])}
    assert check_losses("sft", near) == pytest.approx(0.0005)
    with pytest.raises(SystemExit, match=r"error: sft: .* no figure at equal loss"):
        check_losses("sft", {**near, "best": answer(1, 8, [12.0, 11.88])})
    assert check_losses("sft", {**near, "best": answer(1, 8, [12.02, 11.9])}, "bf16") == pytest.approx(0.02 / 12)
    with pytest.raises(SystemExit, match="equal loss"):
        check_losses("sft", {**near, "best": answer(1, 8, [12.0, float("nan")])})
    with pytest.raises(SystemExit, match="equal work"):
        check_lengths({"product": {"response_lengths": [64, 64]}, "default": {"response_lengths": [64, 50]}})


def test_figures_are_of_seconds_and_peaks_and_dpo_as_it_comes_is_met_with_the_reference_counted() -> None:
    rounds = [{"product": answer(2, 8, prepare=3.0), "default": answer(6, 16), "best": answer(2, 8)}]
    sft = figures_of("sft", rounds, threads=1)
    assert {name: (one["value"], one["met"]) for name, one in sft.items()} == {
        "half_billion_sft_vs_trl_default": (3.0, True),
        "half_billion_sft_memory_vs_trl_default": (0.5, True),
        "half_billion_sft_vs_trl_best": (1.0, True),
        "half_billion_sft_memory_vs_trl_best": (1.0, False),
    }
    dpo = figures_of("dpo", rounds, threads=1)
    assert dpo["half_billion_dpo_vs_trl_default"]["value"] == 2.0
    assert dpo["half_billion_dpo_vs_trl_best"]["value"] == 1.0
    grpo = figures_of("grpo", rounds, threads=2)
    assert [(one["goal"], one["met"]) for one in grpo.values()] == [(2.0, True), (2.0, False)]
    names = [*figures_of("grpo", rounds, 2, "bf16")]
    assert names == ["half_billion_grpo_bf16_vs_trl_default", "half_billion_grpo_bf16_vs_trl_best"]


def test_the_table_says_of_every_side_when_it_was_made() -> None:
    rounds = [{"product": answer(2, 8), "default": answer(6, 16), "best": answer(2, 12)}]
    part = {"made": "Then.", "plan": {"threads": 1}, "rounds": rounds, "figures": figures_of("sft", rounds, 1)}
    made = section({"sft": part})
    assert made["tables"][0]["rows"][1] == ["sft", "TRL as it comes", 6.0, 1.5, 16.0, "12.00000, 11.90000", "Then."]
    assert made["methods"] == {"sft": part}


def test_a_step_is_timed_from_the_end_of_the_one_before_it() -> None:
    clock = StepClock()
    clock.start()
    clock.end()
    kept = bytearray(2**26)
    clock.end()
    found = clock.result()
    assert len(found["step_seconds"]) == 2
    assert sum(found["step_seconds"]) == pytest.approx(found["seconds"])
    assert found["peak_bytes"] >= len(kept)


def test_what_a_side_uses_counts_its_children_in_sessions_of_their_own_too(tmp_path: Path) -> None:
    child, side_code = tmp_path / "child.py", tmp_path / "side.py"
    child.write_text("import time\nkept = bytearray(2**26)\nend = time.process_time() + 0.2\n"
                     "while time.process_time() < end: pass\nprint(1, flush=True)\ntime.sleep(60)\n")  # fmt: skip
    side_code.write_text("import subprocess, sys\nfrom benchmarks.processes.sides import serve\n"
                         "def answer(row):\n"
                         "    made = subprocess.Popen([sys.executable, row['child']], start_new_session=True,\n"
                         "                            stdout=subprocess.PIPE)\n"
                         "    made.stdout.readline()\n"
                         "    return {'pid': made.pid}\n"
                         "serve(answer)\n")  # fmt: skip
    side = Side([sys.executable, str(side_code)], {"PYTHONPATH": str(ROOT)})
    try:
        before = side.cpu_seconds()
        child_pid = side.ask({"child": str(child)})["pid"]
        assert side.cpu_seconds() - before >= 0.2
        assert side.peak_bytes() >= 2**26
    finally:
        subprocess.run(["kill", str(child_pid)], check=True)
        side.stop()


def test_bad_arguments_are_refused_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--steps", "1"], ["--batch", "1"], ["--trl-python", "nowhere/python"]):
        with pytest.raises(SystemExit):
            parse(words)
    assert "nowhere/python: no such file" in capsys.readouterr().err


def test_a_tiny_network_is_written_as_its_shape_says_and_read_back(tmp_path: Path) -> None:
    write_qwen(tmp_path / "policy", [" kabo milu"], TINY)
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"], config["vocab_size"]) == ("qwen2", True, 2048)


@pytest.mark.slow
def test_the_product_and_a_bare_loop_have_the_same_losses_on_a_tiny_network(tmp_path: Path) -> None:
    folder = PLAN.data(tmp_path)
    assert PLAN.data(tmp_path) == folder
    own = [sys.executable, "-m", "benchmarks.training.product", str(folder), "sft", *OWN["sft"]]
    found = run_side(own, str(ROOT), 1, {"max_steps": 2})
    bare = [sys.executable, "-m", "benchmarks.training.plain_loop", str(folder)]
    other = run_side(bare, str(ROOT), 1, {"step_ids": found["step_ids"]})
    assert check_losses("sft", {"product": found, "bare": other}) < 1e-5
    assert len(found["step_cpu_seconds"]) == 2
    assert 0 < seconds_per_step(found, 1) < found["seconds"]


@pytest.mark.slow
def test_all_sides_run_on_a_tiny_network_at_equal_losses(tmp_path: Path) -> None:
    if not (ROOT / ".venv-bench" / "installed").is_file():
        pytest.skip("no TRL: bash scripts/install_bench.sh")
    words = ["peers", "--quick", "--rounds", "1", "--steps", "2", "--batch", "4", "--threads", "1", "--work"]
    command = [sys.executable, "-m", "benchmarks.sizes.sizes", *words, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert [row[0] for row in found["tables"][0]["rows"]] == [
        m for m in ("sft", "dpo", "prm", "grpo") for _ in range(3)
    ]


def test_cases_of_memory_are_chosen_by_their_name_or_a_part_of_several() -> None:
    assert chosen_of([]) == [*CASES]
    assert [case.name for case in chosen_of(["DPO", "ZeRO-3"])] == [
        "SFT, ZeRO-3, 4 ranks", "SFT, ZeRO-3, bf16, 4 ranks", "DPO"]  # fmt: skip
    with pytest.raises(SystemExit, match="no case is called KTO: choose of SFT, fp32; "):
        chosen_of(["DPO", "KTO"])


def test_an_iteration_that_leaves_rollouts_out_is_no_figure() -> None:
    check_taught({"estimate/advantage_zero": 0.0})
    with pytest.raises(SystemExit, match="some rollouts have no advantage"):
        check_taught({"estimate/advantage_zero": 0.25})
