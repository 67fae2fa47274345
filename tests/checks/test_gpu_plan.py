"""The memory plan of a GPU that learner and engine share: a network of Qwen2.5-0.5B's shape, every number by hand."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from espalier.checks.check import CheckFailed, Skipped
from espalier.checks.checked_config import CheckedConfig
from espalier.checks.gpu_plan import GpuPlan, Sharing, gpu_plan, lines_of, remedies
from espalier.checks.plan_gpu import PlanGpu, check_plan, sharing_of
from espalier.checks.recipe import Node
from espalier.checks.resources import num_parameters
from espalier.data.records import BadInput
from espalier.models.load import load_config
from espalier.models.tiny import build_tiny
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig
from espalier.training.memory_of_run import MicroBatch, shape_of
from espalier.training.memory_plan import GIB, Network, Setup, Shape, Work, activation_bytes

P = 494_032_768
QWEN = Shape(P, layers=24, hidden=896, heads=14, kv_heads=2, head_size=64, mlp=4864, vocabulary=151_936)
WORK = Work(tokens=8 * 1024, reads=8 * 512, pairs=8 * 1024 * 1024)
ONE_GPU = Sharing(
    Setup((Network(QWEN, P),), WORK, recomputes="full", buffers=8),
    micro_batch=MicroBatch(8),
    row=1024,
    utilization=0.5,
)
# an engine's: two buckets of 32 MiB, the embedding in bf16 twice, and the digest's 4 x 8 bytes of 2^20 words
ARRIVING = {"weights that arrive": 67_108_864 + 2 * 272_269_312 + 33_554_432}
KEPT = {"buckets of deliveries": 2 * 67_108_864}
ONE_GPU_CONFIG = "exp/ppo/grpo_gsm8k_one_gpu"


def phase(plan: GpuPlan, name: str) -> dict[str, int]:
    (found,) = [phase for phase in plan.phases if phase.name == name]
    assert found.bytes == sum(found.parts.values())
    return found.parts


def test_the_shape_and_the_number_of_parameters_are_those_of_the_network() -> None:
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    counted = sum(value.numel() for value in network.parameters())
    # embeddings 151,936 x 896; a layer: queries 896 x 896 + 896, keys and values 2 (896 x 128 + 128), output 896 x 896,
    # MLP 3 x 896 x 4,864, norms 2 x 896; the last norm
    layer = 803_712 + 2 * 114_816 + 802_816 + 13_074_432 + 1_792
    assert counted == P == 136_134_656 + 24 * layer + 896
    assert shape_of(config, counted) == QWEN  # tied: no parameter is looked up alone


def test_a_run_fits_24_gib_with_an_engine_that_sleeps_and_not_with_one_that_is_awake() -> None:
    plan = gpu_plan(ONE_GPU, 24 * GIB)
    rest = {"weights": 1_976_131_072, "moments": 3_952_262_144, "contexts": 1_073_741_824}
    assert phase(plan, "rollouts") == rest | KEPT | {"engines": 12_884_901_888}  # half of the GPU
    assert phase(plan, "start-up proof") == {
        **rest, **ARRIVING, "weight with noise": 544_538_624, "delivery buffers": 8, "engines": 12_884_901_888,
        "scores": 3_111_649_280,  # 20 bytes of each of 1,024 x 151,936 logits of one canary
        "kept passes": 268_435_456,  # 24 x 896 numbers of 8 x 1,024 tokens would be more
    }  # fmt: skip
    update = phase(plan, "update")
    assert update == rest | KEPT | {
        # 8,192 tokens: 24 inputs of 4 x 896; a layer of 13 x 896 x 2 - see tests/training/test_memory_plan.py
        "activations": activation_bytes(QWEN, ONE_GPU.setup),
        "scores": 1_073_741_824,  # 4 x 2^28, a chunk of 4,096 x 151,936
        "copies to compute with": 988_065_536,
        "gradients": 1_976_131_072 + 6 * 151_936 * 896,
    }
    assert phase(plan, "delivery") == rest | ARRIVING | {"engines' weights": 988_065_536, "delivery buffers": 8}
    assert plan.peak.name == "start-up proof"
    assert plan.peak.certain_bytes == 12_884_901_888 + 3 * 1_976_131_072 + 544_538_624 + 8 + 645_201_920
    # the share less 2 P of weights and 1 GiB of work; a token: 2 x 24 layers x 2 heads x 64 numbers of 2 bytes
    assert plan.cache == 12_884_901_888 - 988_065_536 - GIB == 10_823_094_528
    assert plan.cache_tokens == 10_823_094_528 // 12_288 == 880_785
    assert plan.largest_share == 0.55  # (24 GiB - 11,571,960,328) / 24 GiB
    awake = gpu_plan(replace(ONE_GPU, sleeps=False), 24 * GIB)
    assert phase(awake, "update") == update | {"engines": 12_884_901_888}
    assert awake.peak.name == "update"
    assert awake.peak.bytes > 24 * GIB > plan.peak.bytes


def test_several_engines_on_a_gpu_and_engines_that_are_cut() -> None:
    two = gpu_plan(replace(ONE_GPU, num_engines=2, utilization=0.3), 24 * GIB)
    assert phase(two, "rollouts")["engines"] == 2 * int(0.3 * 24 * GIB)
    assert phase(two, "rollouts")["contexts"] == 3 * GIB // 2
    halves = gpu_plan(replace(ONE_GPU, cut=2), 24 * GIB)
    assert phase(halves, "delivery")["engines' weights"] == P
    assert not {*ARRIVING, *KEPT} & {
        name for one in halves.phases for name in one.parts
    }  # through the machine's memory
    assert phase(two, "rollouts")["buckets of deliveries"] == 3 * 67_108_864
    padded = replace(ONE_GPU, setup=replace(ONE_GPU.setup, networks=(Network(replace(QWEN, vocabulary=151_937), P),)))
    assert phase(gpu_plan(padded, 24 * GIB), "delivery")["weights that arrive"] == 100_663_296 + 6 * 151_937 * 896


def test_engines_of_a_reward_take_their_share_in_every_phase(tiny_policy: Path) -> None:
    alone = gpu_plan(ONE_GPU, 24 * GIB)
    beside = gpu_plan(replace(ONE_GPU, beside=(0.2, 0.2)), 24 * GIB)
    for one, other in zip(alone.phases, beside.phases, strict=True):
        more = {"engines of the reward": int(0.4 * 24 * GIB), "contexts": one.parts["contexts"] + GIB}
        assert other.parts == one.parts | more
    assert beside.largest_share == pytest.approx(alone.largest_share - 0.4 - 1 / 24, abs=0.011)
    words = [f"model.path={tiny_policy}", "output_dir=o", "reward=verifier_rationales",
             f"reward.terms.verifier.form.path={tiny_policy}", "advantage=grpo"]  # fmt: skip
    client = "reward.terms.verifier.asking.client"
    for given, wanted in (
        ([], (0.92,)),
        ([f"+{client}.options.gpu_memory_utilization=0.3"], (0.3,)),
        ([f"+{client}.options.gpu_memory_utilization=0.3", f"{client}.num_engines=2"], (0.3,)),  # the other has its own
        (
            [f"+{client}.options.gpu_memory_utilization=0.3", f"{client}.num_engines=2", f"{client}.gpus_each=0"],
            (0.3, 0.3),
        ),
    ):
        assert sharing_of(compose_config(RLConfig, ONE_GPU_CONFIG, [*words, *given])).beside == wanted
    assert sharing_of(compose_config(RLConfig, ONE_GPU_CONFIG, words[:2])).beside == ()
    assert sharing_of(compose_config(RLConfig, ONE_GPU_CONFIG, [*words, f"{client}.gpus=[1]"])).beside == ()


def shared(*words: str) -> Sharing:
    return sharing_of(compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", ["output_dir=o", *words]))


def test_an_engine_on_another_gpu_takes_nothing_of_the_learner_s(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [f"model.path={tiny_policy}", "server=none", "client=data_parallel_engines", "client.num_engines=1"]
    server = f"model.path={tiny_policy}"
    assert [shared(*words).num_engines for words in (
        engines, [*engines, "client.gpus=[0]"], [*engines, "client.gpus=[1]"],
        [server], [server, '+server.devices="0,1"'], [server, '+server.devices="1"'],
        [server, "server=none", "client.base_url=http://h:1"],
    )] == [1, 1, 0, 1, 1, 0, 0]  # fmt: skip
    assert shared(server, "layout=ray").num_engines == 0  # Ray gives each engine a GPU of its own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")  # as `server.devices` names them
    assert [shared(server, f'+server.devices="{one}"').num_engines for one in ("4", "5")] == [1, 0]
    alone = replace(ONE_GPU, num_engines=0, sleeps=False)
    plan = gpu_plan(alone, 24 * GIB)
    assert phase(plan, "rollouts") == {
        "weights": 1_976_131_072, "moments": 3_952_262_144, "contexts": 536_870_912
    }  # fmt: skip
    assert not any("engine" in name for one in plan.phases for name in one.parts)
    assert (plan.cache, plan.cache_tokens) == (0, 0)
    assert "of 24.00 GiB" in check_plan(plan, alone)
    assert not any(line.startswith("caches") for line in lines_of(plan))
    assert "engine" not in remedies(gpu_plan(alone, 8 * GIB), alone)


def test_remedies_are_settings_that_the_run_takes(tiny_policy: Path) -> None:
    """Of a server, which does not sleep, and of engines whose options name no share yet, or one."""
    model = f"model.path={tiny_policy}"
    engines = [model, "server=none", "client=data_parallel_engines", "client.num_engines=1"]
    for words, setting in (
        ([model], "+server.options.gpu_memory_utilization"),
        (engines, "+client.options.gpu_memory_utilization"),
        ([*engines, "+client.options.gpu_memory_utilization=0.9"], "client.options.gpu_memory_utilization"),
    ):
        sharing = replace(shared(*words), setup=ONE_GPU.setup, sleeps=False)
        plan = gpu_plan(sharing, 16 * GIB)
        said = remedies(plan, sharing)
        assert said.startswith(f"{setting}={plan.largest_share:g} at most")
        assert ("engine.sleeps=true" in said) == ("server" not in setting)
        assert shared(*words, f"{setting}=0.25").utilization == 0.25


def test_a_rate_ten_times_that_of_the_preset_is_warned_of(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("espalier.checks.checked_config.node_here", lambda: Node(gpu_gib=80, host_gib=200))
    for parameters, rate, warned in (
        (1.5e9, 1e-4, "is 100 times that of the preset, 1e-06"),
        (1.5e9, 1e-5, "is 10 times"),
        (1.5e9, 1e-8, "is 0.01 times"),
        (1.5e9, 2e-6, ""),
        (1e6, 1e-4, ""),  # a tiny policy has a rate of its own
    ):
        monkeypatch.setattr("espalier.checks.checked_config.parameters_of", lambda _, size=parameters: int(size))
        words = [f"model.path={tiny_policy}", "output_dir=o", f"update.learning_rate={rate}"]
        caplog.clear()
        CheckedConfig(compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", words)).size()
        assert [warned in line for line in caplog.messages] == ([True] if warned else [])


def test_what_cannot_fit_is_refused_and_what_may_not_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def check(gib: float, setup: dict[str, Any] | None = None, **changes: Any) -> str:
        sharing = replace(ONE_GPU, setup=replace(ONE_GPU.setup, **{} if setup is None else setup), **changes)
        return check_plan(gpu_plan(sharing, int(gib * GIB)), sharing)

    assert "the most is taken in the start-up proof: 22.78 GiB, 18.63 of it certain, of 24.00 GiB" in check(24)
    with pytest.raises(
        CheckFailed,
        match=r"set client\.options\.gpu_memory_utilization=0\.1 at most, an update.micro_batch_size below 8",
    ):
        check(12, utilization=0.5)
    with pytest.raises(CheckFailed, match=r"of 8\.00 GiB: set an update.micro_batch_size below 8"):  # no share would do
        check(8, utilization=0.5)
    with pytest.raises(CheckFailed, match=r"leaves a cache of \d+ tokens, and a row has up to 1024"):
        check(24, utilization=0.0801)
    assert not caplog.messages
    check(24, {"recomputes": "", "work": replace(WORK, tokens=16 * 1024)})
    assert "by estimate it does not fit: set model.gradient_checkpointing=selective, or true" in caplog.messages[0]
    with pytest.raises(CheckFailed, match=r"engine\.sleeps=true"):
        check(18, sleeps=False, utilization=0.6)
    assert "no GPU is here to compare with" in check(0)


def test_readers_of_texts_may_have_tokenizers_of_their_own(tiny_policy: Path, tmp_path: Path) -> None:
    """The doctor's check of tokenizers, and what is in its memory."""
    other = build_tiny(tmp_path / "other", ["abc"] * 4, hidden_size=32, num_layers=1, num_heads=2, vocab_size=300,
                       max_length=64, seed=0)  # fmt: skip
    given = [f"model.path={tiny_policy}", "output_dir=D", "task.path=P", f"reward.forecasts.extractor.path={other}",
             f"reward.forecasts.forecaster.path={tiny_policy}", f"critic.model.path={tiny_policy}"]  # fmt: skip
    for reward, held in (("linguistic_calibration_models", 2), ("linguistic_calibration_engines", 1)):
        found = compose_config(RLConfig, "exp/ppo/linguistic_calibration", [f"reward={reward}", *given])
        with pytest.raises(Skipped):
            CheckedConfig(found).agreeing_tokenizers()
        assert [need.what for need in CheckedConfig(found).needs()].count("a reward model") == held
    sizes = {}
    for deepspeed in ("zero2", "zero3"):  # what ZeRO-3 divides is not certain; the extractor, which writes, is whole
        given[4:] = [f"reward.forecasts.forecaster.path={tiny_policy}", f"critic.model.path={tiny_policy}"]
        found = compose_config(RLConfig, "exp/ppo/linguistic_calibration",
                               ["reward=linguistic_calibration_models", f"deepspeed={deepspeed}", *given])  # fmt: skip
        sizes[deepspeed] = [need.bytes for need in CheckedConfig(found).needs() if need.what == "a reward model"]
    assert [size > 0 for size in sizes["zero2"]] == [True, True]
    assert sorted(size > 0 for size in sizes["zero3"]) == [False, True]


def test_the_experiment_on_one_gpu_is_planned_as_it_is_configured(
    tiny_policy: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counts:
        def __init__(self) -> None:
            self.counts: dict[str, Any] = {}

    config = compose_config(RLConfig, ONE_GPU_CONFIG, [f"model.path={tiny_policy}", "output_dir=o"])
    sharing = sharing_of(config)
    assert (sharing.micro_batch.size, sharing.row, sharing.sleeps, sharing.utilization) == (8, 1024, True, 0.5)
    assert sharing.setup.recomputes == "full"
    assert sharing.setup.work.tokens == 8 * 1024
    caplog.set_level(logging.INFO)
    found = PlanGpu(ONE_GPU_CONFIG, f"model.path={tiny_policy}", gpu_gib=24).run("", Counts())
    number = num_parameters(str(tiny_policy))
    assert found["phases"]["update"]["parts"]["moments"] == 8 * number
    assert found["fits"] is True
    assert any(line.startswith("caches: at most 11.00 GiB") for line in caplog.messages)
    shape = shape_of(load_config(str(tiny_policy)), number)
    assert found["cache_tokens"] == math.floor((12 * GIB - 2 * number - GIB) / 4 / shape.layers / shape.kv_heads
                                               / shape.head_size)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert PlanGpu(ONE_GPU_CONFIG, f"model.path={tiny_policy}").run("", Counts())["fits"] is None
    with pytest.raises(BadInput, match=r"stage\.gpu_gib must be at least 0"):
        PlanGpu(ONE_GPU_CONFIG, gpu_gib=-1)
    assert "no GPU is here to compare with" in CheckedConfig(config).memory()
    words = [f"model.path={tiny_policy}", "output_dir=o", "kl.kind=full", "kl.coefficient=0.05"]
    with pytest.raises(Skipped, match=r"no memory plan of kl\.kind=full"):
        CheckedConfig(compose_config(RLConfig, ONE_GPU_CONFIG, words)).memory()
    monkeypatch.setattr("espalier.checks.checked_config.node_here", lambda: Node(gpu_gib=1e-5, host_gib=1e-5))
    assert "the preset is none: a model of" in CheckedConfig(config).size()  # it asks for the GPU that is here
