"""Two gloo ranks equal one process: plain gradient sums, and DeepSpeed's ZeRO 0 to 3, also with offload.

Real programs on real ranks: in forked children that are given what a launcher gives, and behind launch.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets  # noqa: F401, loaded before the fork
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from benchmarks.processes.forked import run_ranks
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.precision import has_fast_bf16
from espalier.runtime.manifest import find_damage
from espalier.training.checkpoint import checkpoints
from espalier.training.export_model import ExportModel
from tests.support.slow import slow_unless

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 240
STEPS = 4
# 4 steps of 8 examples, 2 a micro-batch, with one held-out example: fewer than there are ranks.
SETTINGS = f"""-cn train +examples@eval_examples=demonstrations model.attention=eager precision=fp32
    max_steps={STEPS} update.batch_size=8 update.micro_batch_size=2 update.learning_rate=0.01 update.warmup_steps=1
    update.max_grad_norm=0.5
    optimizer.eps=1e-4 log_every=1 evaluation.every=1 checkpoints.save_every=2""".split()
# Engines whose ranks hold parts of the weights.
GATHERED = ["zero3", "tensor_parallel"]
ROUND_ROBIN = "deepspeed.zero_optimization.round_robin_gradients=true"
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def train(run: Path, files: list[str], num_ranks: int, *settings: str) -> subprocess.CompletedProcess[str]:
    """Train the tiny policy on CPUs, behind a launcher."""
    launcher = [str(ROOT / "launch.py"), "--standalone", f"--nproc_per_node={num_ranks}"]
    program = [str(ROOT / "trainer_base_ds_mul.py"), *SETTINGS, f"output_dir={run}", *files, *settings]
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, *program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def train_forked(run: Path, files: list[str], num_ranks: int, *settings: str) -> str:
    """The same without the seconds that a launcher and the imports cost; what all ranks printed."""
    log = run.with_suffix(".log")
    before = log.stat().st_size if log.exists() else 0
    mine = [*SETTINGS, f"output_dir={run}", *files, *settings]
    codes = run_ranks("trainer_base_ds_mul.py", mine, log, num_ranks)
    printed = log.read_text()[before:]
    assert codes == [0] * num_ranks, printed[-3000:]
    return printed


def curve(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def assert_same_weights(one: Path, other: Path, tolerance: float) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    apart = {name: float((first[name] - second[name]).abs().max()) for name in first}
    assert max(apart.values()) <= tolerance, apart


def assert_same_run(one: Path, other: Path, tolerance: float) -> None:
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        assert len(curve(one, name)) == STEPS
        assert curve(other, name) == pytest.approx(curve(one, name), abs=tolerance), name


def assert_quiet(printed: str) -> None:
    """Only our own lines: no progress bars, no remarks of DeepSpeed or transformers."""
    strange = [row for row in printed.splitlines() if not re.match(r"\d\d:\d\d:\d\d |train: ", row)]
    assert strange == []


@pytest.fixture(scope="module")
def files(tiny_policy: Path, demonstration_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings that name the files of every run here."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = [
        json.dumps({"id": f"d{i}", "prompt": text[:20], "completion": text[20 : 30 + i % 20]}) + "\n"
        for i, text in enumerate(demonstration_texts[:21])
    ]
    (folder / "train.jsonl").write_text("".join(rows[:20]))
    (folder / "held_out.jsonl").write_text(rows[20])
    return [
        f"model.path={tiny_policy}",
        f"examples.path={folder}/train.jsonl",
        f"eval_examples.path={folder}/held_out.jsonl",
    ]


@pytest.fixture(scope="module")
def one_process(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run all others are compared with."""
    run = tmp_path_factory.mktemp("one") / "run"
    train_forked(run, files, 1)
    losses = curve(run, "train/loss")
    assert losses[-1] < losses[0] - 0.1
    return run


def test_a_run_is_quiet_and_writes_down_what_it_computes_in(files: list[str], tmp_path: Path) -> None:
    printed = train_forked(tmp_path / "run", files, 1, "precision=auto", "max_steps=1")
    assert_quiet(printed)
    settled = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["precision"]
    assert settled == ("bf16" if has_fast_bf16("cpu") else "fp32")
    assert f"computing in {settled}" in printed


def test_two_processes_equal_one(one_process: Path, files: list[str], tmp_path: Path) -> None:
    assert_quiet(train_forked(tmp_path / "run", files, 2))
    assert_same_run(one_process, tmp_path / "run", tolerance=1e-5)
    assert_same_weights(one_process, tmp_path / "run", tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_of_four_ranks_goes_on_on_fewer_with_the_same_losses(
    num_ranks: int, one_process: Path, files: list[str], tmp_path: Path
) -> None:
    train_forked(tmp_path / "run", files, 4)
    shutil.rmtree(tmp_path / "run" / "model")
    printed = train_forked(tmp_path / "run", files, num_ranks)
    assert "at step 2 of 4" in printed
    assert_same_run(one_process, tmp_path / "run", tolerance=1e-5)
    assert_same_weights(one_process, tmp_path / "run", tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "num_ranks"),
    [("zero3", 2), ("zero3", 1), ("zero2", 2), ("zero2", 1), ("zero1", 2), ("zero3_offload", 2), ("zero0", 2),
     ("zero3 lora=lora lora.rank=2", 2)],
)  # fmt: skip
def test_a_zero_checkpoint_of_four_ranks_goes_on_on_fewer_with_the_same_losses(
    engine: str, num_ranks: int, files: list[str], tmp_path: Path
) -> None:
    run, straight, settings = tmp_path / "run", tmp_path / "straight", f"deepspeed={engine}".split()
    train_forked(run, files, 4, *settings)
    straight.mkdir()
    shutil.move(run / "model", straight / "model")
    shutil.rmtree(run / "adapter", ignore_errors=True)
    rows = {name: curve(run, name) for name in ("train/loss", "train/grad_norm", "eval/loss")}
    printed = train_forked(run, files, num_ranks, *settings)
    assert "at step 2 of 4" in printed
    for name, values in rows.items():
        assert curve(run, name) == pytest.approx(values, abs=1e-5), name
    assert_same_weights(straight, run, tolerance=1e-5)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("before", "after"),
    slow_unless(
        lambda case: case[0].startswith("zero2"),
        [(f"zero2 +{ROUND_ROBIN} on 2", "none on 1"), ("none on 1", "zero3 on 2"), ("zero3 on 4", "zero1 on 2"),
         (f"zero1 +{ROUND_ROBIN} on 4", "zero2 on 2"), ("zero0 on 2", "zero3_offload on 2")],
    ),
)  # fmt: skip
def test_a_run_goes_on_with_another_engine(
    before: str, after: str, one_process: Path, files: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for words in (before, after):
        engine, _, number = words.partition(" on ")
        printed = train_forked(run, files, int(number), *f"deepspeed={engine}".split())
        if words == before:
            shutil.rmtree(run / "model")
    assert "at step 2 of 4" in printed
    assert_same_run(one_process, run, tolerance=1e-4)
    assert_same_weights(one_process, run, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["none", "zero3"])
def test_a_rank_without_an_example_left_takes_part_and_adds_nothing(
    engine: str, files: list[str], tmp_path: Path
) -> None:
    """Steps of 3 examples, of which no two fit into 28 tokens: 4 micro-batches on 2 ranks, one of them empty."""
    settings = ["update.batch_size=3", "update.micro_batch_tokens=28"]
    lines = [line for line in train_forked(tmp_path / "one", files, 1, *settings).splitlines() if "error" in line]
    assert lines == []
    train_forked(tmp_path / "run", files, 2, *settings, f"deepspeed={engine}")
    assert_same_run(tmp_path / "one", tmp_path / "run", tolerance=1e-4)
    assert_same_weights(tmp_path / "one", tmp_path / "run", tolerance=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("main.py", "-cn rl model.path=M output_dir={1}/D num_iteration=3", "config: there is no key 'num_iteration'"),
        ("trainer_base_ds_mul.py", "-cn train model.path={0} examples.path=F.jsonl output_dir={1}/D", "F.jsonl"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_config_or_a_file_is_one_line_on_two_ranks(
    name: str, settings: str, words: str, tiny_policy: Path, tmp_path: Path
) -> None:
    codes = run_ranks(name, settings.format(tiny_policy, tmp_path).split(), tmp_path / "log", 2)
    lines = (tmp_path / "log").read_text().splitlines()
    assert codes == [2, 2], lines
    assert len(lines) == 1
    assert re.match(rf"error: .*{words}", lines[0])
    assert not (tmp_path / "D").exists()


def assert_same_export(one: Path, other: Path, tolerance: float) -> None:
    """What the checkpoint of step 2 becomes, put together from the parts of all ranks."""
    found = []
    for run in (one, other):
        output = other.with_name(f"export-{len(found)}")
        ExportModel(str(run), "step-2").run("", SimpleNamespace(output=output, counts={}))
        found.append(load_file(output / "model.safetensors"))
        AutoModelForCausalLM.from_pretrained(output)
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=tolerance)


def assert_equals_one_process_also_when_resumed(
    one_process: Path, run: Path, start: Callable[[], str], tolerance: float = 1e-4
) -> None:
    """`start` trains in `run` and returns what it printed: once, and again from the checkpoint of step 2."""
    start()
    assert_same_run(one_process, run, tolerance)
    assert_same_weights(one_process, run, tolerance)
    assert load_policy(str(run / "model")).num_parameters() > 0
    assert load_tokenizer(str(run / "model")).pad_token_id is not None

    # Stopped after the checkpoint of step 2, as far as the folder knows.
    straight = run.with_name("straight")
    straight.mkdir()
    shutil.move(run / "model", straight / "model")
    rows = curve(run, "train/loss")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert_same_export(one_process, run, tolerance)
    printed = start()
    assert "resuming" in printed
    assert "at step 2 of 4" in printed
    assert curve(run, "train/loss") == pytest.approx(rows, abs=1e-6)
    assert_same_weights(straight, run, tolerance=1e-6)


@pytest.mark.parametrize(
    "engine",
    slow_unless(
        lambda engine: engine == "zero3",
        ["zero1 update.micro_batch_tokens=150", "zero3", "tensor_parallel", "zero0", "zero2", "zero1_offload",
         "zero2_offload", "zero3_offload"],
    ),
)  # fmt: skip
def test_zero_on_two_ranks_equals_one_process_also_when_resumed(
    engine: str, one_process: Path, files: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert_equals_one_process_also_when_resumed(
        one_process, run, lambda: train_forked(run, files, 2, *f"deepspeed={engine}".split())
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["none", "zero2"])
def test_ranks_behind_a_launcher_are_quiet_and_equal_one_process(
    engine: str, one_process: Path, files: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def start() -> str:
        done = train(run, files, 2, f"deepspeed={engine}")
        assert done.stdout == ""
        assert_quiet(done.stderr)
        return done.stderr

    assert_equals_one_process_also_when_resumed(one_process, run, start)


@pytest.mark.slow
def test_a_launcher_that_is_stopped_has_its_ranks_save_and_ends_with_143(files: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = [str(ROOT / "trainer_base_ds_mul.py"), *SETTINGS, f"output_dir={run}", *files, "max_steps=100000"]
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), "--standalone", "--nproc_per_node=2", *program],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    _, printed = started.communicate(timeout=SECONDS)
    assert started.returncode == 143, printed
    assert "Traceback" not in printed
    assert "stopped by a signal after step" in printed
    (folder,) = checkpoints(run)[-1:]
    assert find_damage(folder) == ""


@pytest.mark.slow
def test_deepspeed_needs_no_launcher_for_one_process(one_process: Path, files: list[str], tmp_path: Path) -> None:
    train_forked(tmp_path / "run", files, 1, "deepspeed=zero2")
    assert_same_run(one_process, tmp_path / "run", tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", GATHERED)
def test_tied_weights_are_gathered_and_stay_tied(
    engine: str, files: list[str], tiny_policy: Path, tmp_path: Path
) -> None:
    tied = load_policy(str(tiny_policy))
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "tied")
    load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path / "tied")
    mine = [f"model.path={tmp_path}/tied", "eval_examples=null", "evaluation.every=0"]
    for name, num_ranks, settings in (("one", 1, []), ("two", 2, [f"deepspeed={engine}"])):
        train_forked(tmp_path / name, files, num_ranks, *mine, *settings)
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=1e-4)
    assert "lm_head.weight" not in load_file(tmp_path / "two" / "model" / "model.safetensors")
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model", output_loading_info=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", GATHERED)
def test_a_scalar_head_is_gathered_with_its_config(
    engine: str, files: list[str], tiny_policy: Path, tmp_path: Path
) -> None:
    row = {"prompt": "Tom has 3.\n", "steps": ["He buys 2.\n", "#### 5"], "prompt_ids": [5, 9, 11],
           "step_ends": [2, 4], "num_correct": [1, 2], "num_completions": [4, 3]}  # fmt: skip
    rows = [
        {**row, "id": f"t{i}", "problem_id": f"t{i}", "response_ids": [20 + i, 30, 40, 50],
         "values": [0.25, float(i % 2)], "is_correct": i % 2 == 1} for i in range(16)
    ]  # fmt: skip
    (tmp_path / "values.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows))
    mine = [f"model.path={tiny_policy}", "model=process_reward", "model.num_labels=4", "objective=process_reward",
            "examples=step_values", f"examples.path={tmp_path}/values.jsonl", "~eval_examples",
            "evaluation.every=0"]  # fmt: skip
    for name, num_ranks, settings in (("one", 1, []), ("two", 2, [f"deepspeed={engine}"])):
        train_forked(tmp_path / name, [], num_ranks, *mine, *settings)
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=1e-4)
    folder = tmp_path / "two" / "model"
    model, found = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert model.config.num_labels == 4
    assert float(model.score.weight.detach().abs().max()) > 0
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
