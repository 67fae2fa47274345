"""Ranks and engines of reinforcement learning: two gloo ranks of a PPO run with a critic equal one process, with plain
gradient sums and with ZeRO 0 to 3, also resumed; what cannot be had together is refused in one line."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.processes.forked import run_ranks
from espalier.rl.training_engines import check_engines
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig
from tests.support.rl_cases import read_metrics
from tests.support.root_config import root_config

CUT = "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0"  # the smallest weights too


def run(policy: Path, run_dir: Path, num_ranks: int, *settings: str) -> str:
    """What all ranks printed."""
    log = run_dir.with_suffix(".log")
    before = log.stat().st_size if log.exists() else 0
    codes = run_ranks("tests/support/rl_ranks.py", [str(policy), str(run_dir), *settings], log, num_ranks)
    printed = log.read_text()[before:]
    assert codes == [0] * num_ranks, printed[-3000:]
    return printed


def assert_same_weights(
    one: Path, other: Path, tolerance: float, folders: tuple[str, ...] = ("model", "critic")
) -> None:
    for folder in folders:
        first, second = (load_file(run_dir / folder / "model.safetensors") for run_dir in (one, other))
        assert first.keys() == second.keys()
        apart = {name: float((first[name] - second[name]).abs().max()) for name in first}
        assert max(apart.values()) <= tolerance, apart


def assert_same_metrics(one: Path, other: Path, tolerance: float) -> None:
    first, second = read_metrics(one), read_metrics(other)
    assert len(first) == len(second) == 3
    for alone, together in zip(first, second, strict=True):
        assert alone == pytest.approx(together, abs=tolerance, rel=tolerance)


@pytest.fixture(scope="module")
def one_process(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that all others are compared with."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(tiny_policy, folder, 1)
    rows = read_metrics(folder)
    assert all(row["engine/policy_moved"] > 0 for row in rows)
    assert rows[0]["update/skipped"] == 0.5  # also what is left out is left out by every engine
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [f"zero3 {CUT}", "none", "zero0", "zero1", "zero2", "zero1_offload", "zero2_offload", f"zero3_offload {CUT}"],
)
def test_two_ranks_of_ppo_equal_one_also_when_resumed(
    engine: str, tiny_policy: Path, one_process: Path, tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", f"deepspeed={engine}".split()
    run(tiny_policy, folder, 2, *settings)
    assert_same_metrics(one_process, folder, 1e-4)
    assert_same_weights(one_process, folder, 1e-4)
    rows = read_metrics(folder)

    # stopped after the checkpoint of iteration 2, as far as the folder knows
    (tmp_path / "straight").mkdir()
    for name in ("model", "critic"):
        shutil.move(folder / name, tmp_path / "straight" / name)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    run(tiny_policy, folder, 2, *settings)
    assert read_metrics(folder) == rows
    assert_same_weights(tmp_path / "straight", folder, 0.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, f"zero3 {CUT} ema.decay=0.5"), (1, "none ema.decay=0.5")),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in
       (((1, "none"), (2, "none")), ((3, "zero2 ema.decay=0.5 lora=lora"), (2, "zero2 ema.decay=0.5 lora=lora")),
        ((1, f"zero3 {CUT}"), (3, f"zero3 {CUT}")), ((2, f"zero3 {CUT}"), (1, f"zero3 {CUT}")),
        ((1, "none"), (2, f"zero3 {CUT}")), ((2, "zero2"), (1, "zero1_offload"))))],
)  # fmt: skip
def test_a_checkpoint_goes_on_on_another_number_of_ranks_and_with_another_engine(
    before: tuple[int, str], after: tuple[int, str], tiny_policy: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (first, *own), (then, *settings) = ([number, *f"deepspeed={engine}".split()] for number, engine in (before, after))
    run(tiny_policy, folder, first, *own)
    rows = read_metrics(folder)
    (tmp_path / "straight").mkdir()
    for name in ("model", "critic"):
        shutil.move(folder / name, tmp_path / "straight" / name)
    for name in ("adapter", "model_ema"):
        shutil.rmtree(folder / name, ignore_errors=True)
    written = [path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*/state.json")]
    run(tiny_policy, folder, then, *settings)
    assert [path.stat().st_mtime_ns for path in (folder / "checkpoints").glob("*/state.json")] == written
    assert read_metrics(folder)[:2] == rows[:2]
    assert read_metrics(folder)[2] == pytest.approx(rows[2], abs=1e-4, rel=1e-4)
    assert_same_weights(tmp_path / "straight", folder, 1e-4)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    "engine",
    [
        "none update.micro_batch_tokens=60",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "zero2", f"zero3 {CUT}")),
    ],
)
def test_an_update_of_one_pass_on_two_ranks_equals_that_of_one(engine: str, tiny_policy: Path, tmp_path: Path) -> None:
    run(tiny_policy, tmp_path / "one", 1, "one_pass")
    run(tiny_policy, tmp_path / "two", 2, "one_pass", *f"deepspeed={engine}".split())
    rows = read_metrics(tmp_path / "one")
    assert all(row["engine/policy_moved"] > 0 for row in rows)
    assert rows[0]["forward/tokens"] > 0  # a group that agrees is scored apart
    assert_same_metrics(tmp_path / "one", tmp_path / "two", 1e-4)
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-4, ("model",))


def test_what_rank_0_alone_moves_reaches_the_others(tiny_policy: Path, tmp_path: Path) -> None:
    """An adaptive KL coefficient, two epochs whose luckiest token is that of a sum, a minibatch that is left out."""
    settings = ["epochs", "kl=loss", "kl.coefficient=0.05", "kl.target=1e-4", "kl.horizon=100"]
    run(tiny_policy, tmp_path / "one", 1, *settings)
    run(tiny_policy, tmp_path / "two", 2, *settings)
    rows = read_metrics(tmp_path / "one")
    assert len({row["kl/coefficient"] for row in rows}) == 3
    assert all(row["update/kl_luckiest"] > 0 for row in rows)
    assert any(row["update/skipped"] > 0 for row in rows)
    assert_same_metrics(tmp_path / "one", tmp_path / "two", 1e-4)
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-4)


SHORT_LIVED = (f"zero3 lora=lora {CUT} +deepspeed.zero_optimization.stage3_max_live_parameters=0 "
               "+deepspeed.zero_optimization.stage3_max_reuse_distance=0 "
               "+deepspeed.zero_optimization.stage3_prefetch_bucket_size=0")  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        "none precision=bf16 kl=loss",  # the reference has weights in bfloat16
        *(pytest.param(f"{engine} precision={precision} {kl}", marks=pytest.mark.slow) for engine, precision, kl in (
            ("zero2", "bf16", "kl=reward"),
            ("none lora=lora", "bf16", "kl=loss"),
            (SHORT_LIVED, "fp32", "kl=reward kl.kind=full"),  # every pass gathers both networks' weights
            (SHORT_LIVED, "fp32", "kl=loss kl.kind=full"),
        )),
    ],
)  # fmt: skip
def test_a_rank_without_rows_makes_the_passes_of_one_that_has_some(
    settings: str, tiny_policy: Path, tmp_path: Path
) -> None:
    run(tiny_policy, tmp_path / "one", 1, "odd", *f"deepspeed={settings}".split())
    run(tiny_policy, tmp_path / "two", 2, "odd", *f"deepspeed={settings}".split())
    first, second = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    is_exact = "fp32" in settings
    for alone, together in zip(first, second, strict=True):
        kl = "update/kl_reference" if "loss" in settings else "kl/per_token"
        assert alone[kl] == pytest.approx(together[kl], rel=1e-3 if is_exact else 0.1, abs=1e-6 if is_exact else 0.01)
        assert alone["update/loss"] == pytest.approx(together["update/loss"], abs=1e-4 if is_exact else 0.02)
        assert alone["update/grad_norm"] == pytest.approx(together["update/grad_norm"], rel=1e-3 if is_exact else 0.1)


@pytest.mark.slow
def test_completions_of_states_on_two_ranks_train_as_those_of_one(tiny_policy: Path, tmp_path: Path) -> None:
    run(tiny_policy, tmp_path / "one", 1, "vineppo")
    run(tiny_policy, tmp_path / "two", 2, "vineppo")
    rows = read_metrics(tmp_path / "one")
    assert all(row["engine/policy_moved"] > 0 and row["estimate/num_completions"] > 0 for row in rows)
    assert_same_metrics(tmp_path / "one", tmp_path / "two", 1e-4)
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-4, ("model",))


@pytest.mark.slow
def test_a_process_reward_model_trained_along_on_two_ranks_equals_that_of_one(
    tiny_policy: Path, tmp_path: Path
) -> None:
    run(tiny_policy, tmp_path / "one", 1, "prm_value")
    run(tiny_policy, tmp_path / "two", 2, "prm_value")
    rows = read_metrics(tmp_path / "one")
    assert all(row["update/value_grad_norm"] > 0 and row["estimate/num_completions"] == 6 for row in rows)
    assert_same_metrics(tmp_path / "one", tmp_path / "two", 1e-4)
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["none", "zero2", f"zero3 {CUT}"])
def test_an_implicit_reward_trained_along_on_two_ranks_equals_that_of_one_also_when_resumed(
    engine: str, tiny_policy: Path, tmp_path: Path
) -> None:
    folders = ("model", "implicit_reward")
    run(tiny_policy, tmp_path / "one", 1, "prime")
    run(tiny_policy, tmp_path / "two", 2, "prime", *f"deepspeed={engine}".split())
    rows = read_metrics(tmp_path / "one")
    assert all(row["implicit_reward/grad_norm"] > 0 and row["estimate/process_part"] > 0 for row in rows)
    assert_same_metrics(tmp_path / "one", tmp_path / "two", 1e-4)
    assert_same_weights(tmp_path / "one", tmp_path / "two", 1e-4, folders)
    rows = read_metrics(tmp_path / "two")
    (tmp_path / "straight").mkdir()
    for name in folders:
        shutil.move(tmp_path / "two" / name, tmp_path / "straight" / name)
    run(tiny_policy, tmp_path / "two", 2, "prime", *f"deepspeed={engine}".split())
    assert read_metrics(tmp_path / "two") == rows
    assert_same_weights(tmp_path / "straight", tmp_path / "two", 0.0, folders)


ADAPTERS = ("lora=lora", "lora.rank=4", "ema.decay=0.75")
MERGED = ("model", "model_ema", "critic")


@pytest.fixture(scope="module")
def one_with_adapters(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters, merged for the sampler and in the moving average; the reference is the policy without them."""
    folder = tmp_path_factory.mktemp("adapters") / "run"
    run(tiny_policy, folder, 1, *ADAPTERS)
    assert all(row["update/grad_norm"] > 0 for row in read_metrics(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["none", "zero2", f"zero3 {CUT}"])
def test_adapters_and_a_moving_average_on_two_ranks_equal_those_of_one(
    engine: str, tiny_policy: Path, one_with_adapters: Path, tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", [*ADAPTERS, *f"deepspeed={engine}".split()]
    run(tiny_policy, folder, 2, *settings)
    assert_same_metrics(one_with_adapters, folder, 1e-4)
    assert_same_weights(one_with_adapters, folder, 1e-4, MERGED)
    average, policy = (load_file(folder / name / "model.safetensors") for name in ("model_ema", "model"))
    assert any(not torch.equal(value, policy[name]) for name, value in average.items())
    for name in MERGED:
        shutil.move(folder / name, tmp_path / name)
    run(tiny_policy, folder, 2, *settings)  # goes on from the checkpoint of iteration 2
    assert_same_weights(tmp_path, folder, 0.0, MERGED)


@pytest.mark.slow
def test_deepspeed_needs_no_launcher_for_one_process(tiny_policy: Path, one_process: Path, tmp_path: Path) -> None:
    run(tiny_policy, tmp_path / "run", 1, "deepspeed=zero2")
    assert_same_metrics(one_process, tmp_path / "run", 1e-4)
    assert_same_weights(one_process, tmp_path / "run", 1e-4)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}},
         "deals rollouts to all ranks, tensor parallelism wants the same on some: set deepspeed=zero3"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_together_is_refused_in_one_line(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadConfig, match=told):
        check_engines(root_config(RLConfig, output_dir="", model={}, **settings))
