"""Checkpoints under attack: kill -9, faults at every call of a save, damaged files, signals, losses that are not
numbers. What is left is whole, and what a run goes on to is, bit for bit, what it would have been."""

import errno
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.processes.forked import exit_code, start
from espalier.data.batches.batch import Batch
from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import TokenExample
from espalier.data.records import BadInput
from espalier.models.load import load_policy
from espalier.runtime import manifest
from espalier.runtime import process_lifetime as life
from espalier.runtime.distributed import process_group
from espalier.runtime.manifest import find_damage, write_folder
from espalier.runtime.schemas import TrainConfig
from espalier.training import checkpoint
from espalier.training.checkpoint import BadCheckpoint, Best, TrainState, checkpoints, select
from espalier.training.engine import TorchEngine
from espalier.training.loop import Loop
from espalier.training.objectives.objective import Loss
from espalier.training.objectives.sft import SupervisedFineTuning
from espalier.training.sums import NotFinite
from tests.support.root_config import root_config
from tests.support.slow import slow_unless

EXAMPLES = [TokenExample(f"d{i}", [2 + (i + 3 * k) % 200 for k in range(6 + i % 5)], 2 + i % 3) for i in range(24)]
SPEED = "train/tokens_per_second"
PIECES = "pieces/shard-00001-model-00001-of-00001.safetensors"


class Watched(SupervisedFineTuning):
    """SFT that calls `before(call, batch)` before, and spoils with `spoil(call, total)`, its n-th loss (from 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.before: Callable[[int], None] = lambda call: None
        self.spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda call, total: total

    def loss(self, model: Any, batch: Batch) -> Loss:
        self.calls += 1
        self.before(self.calls)
        found = super().loss(model, batch)
        return Loss(self.spoil(self.calls, found.total), found.metrics)


def make_loop(policy: Path, run_dir: Path, **changes: Any) -> Loop:
    """6 steps of 8 examples in 2 micro-batches; dropout makes the random state matter."""
    settings: dict[str, Any] = {
        "output_dir": "", "model": {}, "objective": {}, "examples": {}, "optimizer": {},
        "precision": "fp32", "batch_size": 8, "micro_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2,
        "warmup_steps": 2, "log_every": 1, "save_every": 1, "checkpoints_keep": 3,
    }  # fmt: skip
    config = root_config(TrainConfig, **{**settings, **changes})
    torch.manual_seed(0)
    model = load_policy(str(policy))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.update.learning_rate, betas=(0.9, 0.95))
    engine = TorchEngine(model, optimizer, torch.device("cpu"), config.update.max_grad_norm)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loaders = [Loader(rows, 8, config.update.micro_batch_size, 0, rank, ranks) for rows in (EXAMPLES, EXAMPLES[:10])]
    held_out = loaders[1] if config.evaluation.every else None
    run_dir.mkdir(exist_ok=True)
    return Loop(config, engine, Watched(), loaders[0], held_out, Layout(), run_dir)


def final(loop: Loop) -> list[torch.Tensor]:
    """Weights and moments."""
    moments = loop.engine.optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    kept = [row[key] for row in moments.values() for key in sorted(row)]
    rows = [*loop.engine.model.state_dict().values(), *kept]
    return [value.clone() for value in rows]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first, second)


def log_rows(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != SPEED} for row in rows]


@pytest.fixture(scope="module")
def straight(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], Path]:
    """What an uninterrupted run ends with, and its directory; it evaluates every second step."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    loop = make_loop(tiny_policy, run_dir, evaluation_every=2)
    loop.run()
    return final(loop), run_dir


def test_dropout_makes_the_random_state_matter(tiny_policy: Path, tmp_path: Path, straight: Any) -> None:
    loop = make_loop(tiny_policy, tmp_path / "run")
    torch.manual_seed(1)
    loop.run()
    assert not all(torch.equal(one, other) for one, other in zip(final(loop), straight[0], strict=True))


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(
    tiny_policy: Path, tmp_path: Path, straight: Any
) -> None:
    run_dir, rng = tmp_path / "run", random.Random(0)

    def train() -> None:
        make_loop(tiny_policy, run_dir, evaluation_every=2).run()

    kills = 0
    while kills < 6:
        pid = start(train)
        time.sleep(rng.uniform(0.02, 0.4))
        os.kill(pid, signal.SIGKILL)
        code = exit_code(pid)
        assert code in (0, -signal.SIGKILL)
        if code == 0:  # too late: it had ended
            shutil.rmtree(run_dir)
            continue
        kills += 1
        assert all(find_damage(folder) == "" for folder in checkpoints(run_dir))
    last = make_loop(tiny_policy, run_dir, evaluation_every=2)
    last.run()
    assert_same(final(last), straight[0])
    assert log_rows(run_dir) == log_rows(straight[1])


class Fault(BaseException):
    """The process is gone, as far as the folder knows."""


def test_a_fault_at_any_call_of_a_save_leaves_whole_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"left": 0}

    def failing(name: str, owner: Any) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Fault
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    def version(text: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            (folder / "parts").mkdir()
            for name in ("a", "parts/b"):
                (folder / name).write_text(f"{text} {name}")

        return write

    for name, owner in (("fsync", os), ("replace", Path), ("rmtree", shutil), ("write_text", Path), ("mkdir", Path)):
        failing(name, owner)
    folder, seen = tmp_path / "model", set()
    for point in range(1, 60):
        calls["left"] = 10**9
        shutil.rmtree(tmp_path)
        write_folder(folder, version("old"))
        calls["left"] = point
        try:
            write_folder(folder, version("new"))
        except Fault:
            calls["left"] = 10**9
            seen.add((folder / "a").read_text() if folder.exists() else "absent")
            assert not folder.exists() or find_damage(folder) == ""
            write_folder(folder, version("newer"))  # the next attempt finds nothing in its way
            assert find_damage(folder) == ""
            assert [path.name for path in tmp_path.iterdir()] == ["model"]
            continue
        break
    assert 15 < point < 59
    assert seen == {"old a", "new a", "absent"}


def test_a_full_disk_is_an_error_of_storage_and_leaves_the_older_checkpoint(tiny_policy: Path, tmp_path: Path) -> None:
    def train() -> None:
        engine = make_loop(tiny_policy, tmp_path).engine
        checkpoint.save(tmp_path, engine, TrainState(1, "data"), keep=1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoint.save(tmp_path, engine, TrainState(2, "data"), keep=1)
        except OSError as error:
            raise SystemExit(
                7 if error.errno == errno.EFBIG and "step-00000002.partial" in error.filename else 8
            ) from None

    assert exit_code(start(train)) == 7
    assert select(tmp_path, "latest") == tmp_path / "checkpoints" / "step-00000001"


def attack(kind: str, path: Path) -> None:
    content = bytearray(path.read_bytes())
    if kind == "flipped bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif kind == "truncated":
        path.write_bytes(content[:-1])
    elif kind == "longer":
        path.write_bytes(content + b" ")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "missing":
        path.unlink()
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("kind", ["flipped bit", "truncated", "longer", "empty", "missing", "folder"])
def test_any_damaged_file_is_found_and_the_next_older_checkpoint_used(
    kind: str, straight: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight[1], run_dir)
    whole = checkpoints(run_dir)
    assert [folder.name[-1] for folder in whole] == ["3", "4", "5"]
    for name in sorted(str(path.relative_to(whole[-1])) for path in whole[-1].rglob("*") if path.is_file()):
        if name == "manifest.json" and kind in ("flipped bit", "truncated", "longer"):
            continue  # it is no file of the checkpoint; what it says is held against them
        attack(kind, whole[-1] / name)
        caplog.clear()
        assert select(run_dir, "latest") == whole[1]
        assert name in caplog.text
        with pytest.raises(BadCheckpoint, match=r"step-00000005 is damaged: .*: choose another step"):
            select(run_dir, "step-5")
        shutil.rmtree(whole[-1])
        shutil.copytree(straight[1] / "checkpoints" / whole[-1].name, whole[-1])
        assert select(run_dir, "latest") == whole[2]


def test_a_run_goes_on_from_an_older_checkpoint_to_the_same_bits(
    tiny_policy: Path, straight: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight[1], run_dir)
    attack("flipped bit", checkpoints(run_dir)[-1] / PIECES)
    loop = make_loop(tiny_policy, run_dir, evaluation_every=2, checkpoints_keep=1)
    loop.run()
    assert_same(final(loop), straight[0])
    assert log_rows(run_dir) == log_rows(straight[1])
    # The damaged one stands aside, so that it is not taken for the newest one that is kept.
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["aside", "step-00000005"]
    assert [path.name for path in (run_dir / "checkpoints" / "aside").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("wanted", slow_unless(lambda wanted: wanted == "step-3", ["step-3", "3", "step-00000003"]))
def test_the_step_asked_for_is_the_step_gone_on_from(
    wanted: str, tiny_policy: Path, straight: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight[1], run_dir)
    loop = make_loop(tiny_policy, run_dir, evaluation_every=2, resume=wanted)
    done, train_step = [], loop.train_step
    loop.train_step = lambda step: (done.append(step), train_step(step))[1]  # type: ignore[method-assign]
    loop.run()
    assert done == [3, 4, 5]
    assert_same(final(loop), straight[0])


def test_nothing_to_load_is_an_error_where_something_was_asked_for(tmp_path: Path, straight: Any) -> None:
    assert select(tmp_path, "auto") is None
    for wanted, text in [
        ("latest", "has no whole checkpoint: checkpoints.resume=none begins again"),
        ("best", "has no whole checkpoint with a metric"),
        ("step-40", "has no checkpoint step-40: there are none"),
        ("newest", "resume must be auto, latest, best, none or step-N, got 'newest'"),
    ]:
        with pytest.raises(BadCheckpoint, match=text):
            select(tmp_path, wanted)
    shutil.copytree(straight[1], tmp_path / "run")
    for folder in checkpoints(tmp_path / "run"):
        attack("truncated", folder / PIECES)
    for wanted in ("auto", "latest"):  # to begin again in silence would cost the whole run
        with pytest.raises(BadCheckpoint, match=rf"has no whole checkpoint \(step-00000005: {PIECES} has"):
            select(tmp_path / "run", wanted)
    assert select(tmp_path / "run", "none") is None


def test_a_checkpoint_of_another_model_is_refused(tiny_policy: Path, straight: Any, tmp_path: Path) -> None:
    shutil.copytree(straight[1], tmp_path / "run")
    loop = make_loop(tiny_policy, tmp_path / "run")
    loop.engine.model.lm_head = torch.nn.Linear(64, 7, bias=False)
    with pytest.raises(BadCheckpoint, match=r"is of another model: lm_head.weight does not fit"):
        loop.run()


def test_the_newest_and_the_best_are_kept(tiny_policy: Path, tmp_path: Path) -> None:
    engine, best = make_loop(tiny_policy, tmp_path).engine, Best("eval/loss", is_lowest=True, keep=1)
    losses = {1: 3.0, 2: 1.5, 3: 2.0, 4: math.nan, 5: 1.5, 6: None}
    for step, loss in losses.items():
        state = TrainState(step, "data", {} if loss is None else {"eval/loss": loss})
        checkpoint.save(tmp_path, engine, state, keep=1, best=best)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["2", "6"]  # of two equal ones the earlier
    assert select(tmp_path, "best", best) == tmp_path / "checkpoints" / "step-00000002"
    assert select(tmp_path, "latest") == tmp_path / "checkpoints" / "step-00000006"


def test_an_evaluation_that_is_among_the_best_is_saved(tiny_policy: Path, tmp_path: Path) -> None:
    scores = iter([0.1, 0.7, 0.3, 0.5, 0.2, 0.9])
    loop = make_loop(tiny_policy, tmp_path, evaluation_every=1, save_every=0, keep_best=2, best_metric="eval/accuracy",
                     best_is="highest", checkpoints_keep=1)  # fmt: skip
    loop.evaluate = lambda loader: {"accuracy": next(scores)}  # type: ignore[method-assign]
    loop.run()
    kept = {path.name[-1]: json.loads((path / "state.json").read_text())["metrics"] for path in checkpoints(tmp_path)}
    assert kept == {"2": {"eval/accuracy": 0.7}, "6": {"eval/accuracy": 0.9}}


def test_a_rule_for_the_best_that_cannot_work_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="best_is must be lowest or highest, got 'least'"):
        make_loop(tiny_policy, tmp_path, best_is="least")
    with pytest.raises(
        BadInput, match=r"checkpoints.keep_best=1 needs evaluations: set eval_examples and evaluation\.every"
    ):
        make_loop(tiny_policy, tmp_path, keep_best=1)
    with pytest.raises(BadInput, match="best_metric eval/accuracy is none of eval/"):
        make_loop(tiny_policy, tmp_path, keep_best=1, evaluation_every=1, best_metric="eval/accuracy").run()


# A step has 2 losses; the evaluation after steps 2, 4 and 6 has 3.
@pytest.mark.parametrize(
    ("call", "number", "code", "step", "is_due"),
    [
        pytest.param(3, signal.SIGTERM, 143, 2, True, marks=pytest.mark.slow),  # in step 2: its evaluation is put off
        (6, signal.SIGTERM, 143, 2, True),  # in the evaluation after step 2
        (8, signal.SIGINT, 130, 3, False),
        pytest.param(17, signal.SIGTERM, 143, 6, True, marks=pytest.mark.slow),  # in the last step
        (20, signal.SIGTERM, 143, 6, True),  # in the last evaluation
    ],
)
def test_a_signal_saves_at_the_steps_end_and_the_run_goes_on_to_the_same_bits(
    call: int, number: int, code: int, step: int, is_due: bool, tiny_policy: Path, tmp_path: Path, straight: Any
) -> None:
    run_dir = tmp_path / "run"
    loop = make_loop(tiny_policy, run_dir, evaluation_every=2, save_every=0)
    assert isinstance(loop.objective, Watched)
    loop.objective.before = lambda found: os.kill(os.getpid(), number) if found == call else None
    old = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        loop.run()
    assert stopped.value.code == code
    assert signal.getsignal(number) is old
    assert [path.name for path in checkpoints(run_dir)] == [f"step-{step:08d}"]
    assert checkpoint.read_state(checkpoints(run_dir)[0]).is_evaluation_due is is_due
    again = make_loop(tiny_policy, run_dir, evaluation_every=2, save_every=0)
    again.run()
    assert_same(final(again), straight[0])
    assert log_rows(run_dir) == log_rows(straight[1])


def test_a_second_signal_ends_the_process_at_once(tiny_policy: Path, tmp_path: Path) -> None:
    def train() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        life.REPEAT_SECONDS = 0.0
        loop = make_loop(tiny_policy, tmp_path / "run", save_every=0)
        loop.objective.before = lambda call: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[attr-defined]
        loop.run()

    assert exit_code(start(train)) == -signal.SIGTERM
    assert checkpoints(tmp_path / "run") == []


def test_a_signal_to_one_rank_stops_both_with_one_checkpoint_also_when_a_launcher_repeats_it(
    tiny_policy: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def train(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with process_group(timeout_seconds=60):
            loop = make_loop(tiny_policy, tmp_path / "run", save_every=0, max_steps=50)
            if rank == 1:
                loop.objective.before = lambda call: call == 3 and [os.kill(os.getpid(), signal.SIGTERM) for _ in "12"]  # type: ignore[attr-defined]
            loop.run()

    pids = [start(lambda rank=rank: train(rank)) for rank in (0, 1)]  # type: ignore[misc]
    assert [exit_code(pid) for pid in pids] == [143, 143]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000003"]
    assert find_damage(checkpoints(tmp_path / "run")[0]) == ""


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_where_that_is_asked_for(
    where: str, tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(call: int, total: torch.Tensor) -> torch.Tensor:
        if call != 4:
            return total
        return total * math.nan if where == "loss" else total + torch.sqrt(total * 0)

    loop = make_loop(tiny_policy, tmp_path, on_nonfinite="skip")
    loop.objective.spoil = spoil  # type: ignore[attr-defined]
    loop.train_step(0)
    before = final(loop)
    values = loop.train_step(1)
    assert_same(final(loop), before)
    assert all(parameter.grad is None for parameter in loop.engine.model.parameters())
    assert values["skipped_steps"] == 1
    assert f"skipped step 2: the {'loss' if where == 'loss' else 'gradient norm'} is nan: examples d" in caplog.text
    loop.train_step(2)
    assert all(bool(value.isfinite().all()) for value in final(loop))
    assert not all(torch.equal(one, other) for one, other in zip(final(loop), before, strict=True))


def test_skipped_steps_are_counted_over_a_resume_and_capped(tiny_policy: Path, tmp_path: Path) -> None:
    first = make_loop(tiny_policy, tmp_path, on_nonfinite="skip", max_skipped=2, max_steps=4)
    first.objective.spoil = lambda call, total: total * math.nan if call == 3 else total  # type: ignore[attr-defined]
    first.run()
    rows = log_rows(tmp_path)
    assert "train/loss" not in rows[1]  # JSON has no NaN
    assert rows[1]["train/skipped_steps"] == rows[3]["train/skipped_steps"] == 1
    again = make_loop(tiny_policy, tmp_path, on_nonfinite="skip", max_skipped=2)
    again.objective.spoil = lambda call, total: total * math.nan  # type: ignore[attr-defined]
    with pytest.raises(NotFinite, match=r"step 5: the loss is nan: examples d.*: 2 steps were skipped before it"):
        again.run()


def test_a_choice_that_does_not_exist_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="on_nonfinite must be stop or skip, got 'ignore'"):
        make_loop(tiny_policy, tmp_path, on_nonfinite="ignore")
    with pytest.raises(BadInput, match=r"update\.on_nonfinite=skip cannot be had with DeepSpeed"):
        make_loop(tiny_policy, tmp_path, on_nonfinite="skip", deepspeed={"zero_optimization": {"stage": 2}})


def test_python_numpy_and_torch_go_on_drawing_where_they_stood(tiny_policy: Path, tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(()))]

    engine = make_loop(tiny_policy, tmp_path).engine
    draw()  # one normal number is left over in each: it belongs to the state
    checkpoint.save(tmp_path, engine, TrainState(1, "data"), keep=1)
    want = draw()
    draw()
    assert checkpoint.resume(tmp_path, engine, "data") == 1
    assert draw() == want


def test_what_is_written_needs_no_pickle(straight: Any) -> None:
    paths = [path for folder in checkpoints(straight[1]) for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in paths} == {".json", ".safetensors"}
    kinds = {name.rpartition("/")[0] for name in load_file(checkpoints(straight[1])[0] / PIECES)}
    assert kinds == {"weights", "moments/exp_avg", "moments/exp_avg_sq", "numbers/step"}


def test_a_manifest_names_every_file_with_its_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    manifest.write_manifest(tmp_path)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"files": {"a": {"size": 3, "sha256": digest}}}
    (tmp_path / "b").touch()
    assert find_damage(tmp_path) == "b does not belong to it"
