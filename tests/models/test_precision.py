"""What matrix products are computed in where nobody says it: bfloat16 where the device multiplies it fast."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from espalier.checks.check import CheckFailed
from espalier.checks.machine import check_device
from espalier.models import precision
from espalier.models.frozen_reward import is_held_in_halves, place
from espalier.models.in_parts import _tied_head
from espalier.models.load import load_policy
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.models.precision import BadPrecision, autocast, has_fast_bf16, is_bf16, warn_of_slow_bf16
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.outcome_model import last_logits
from espalier.rewards.process import ProcessReward
from espalier.rl.advantages.process_values import ProcessValueAdvantage
from espalier.rl.rollout_filters import ProcessConsistencyFilter
from espalier.rl.training_engines import load_frozen
from espalier.runtime.schemas import RLConfig, TrainConfig
from espalier.training.deepspeed_engine import _autocast
from espalier.training.loop_from_config import make_objective
from tests.support.rl_cases import root_config

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False])
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """A CPU that multiplies bfloat16 fast, and one that does not."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: request.param)
    precision._has_fast_cpu.cache_clear()
    yield request.param
    precision._has_fast_cpu.cache_clear()


@pytest.mark.parametrize("schema", [TrainConfig, RLConfig])
def test_a_run_computes_in_what_its_machine_multiplies_fast(schema: type, is_fast: bool) -> None:
    asked = root_config(schema).precision
    a = torch.eye(2)
    with autocast(CPU, asked):
        assert (a @ a).dtype is (torch.bfloat16 if is_fast else torch.float32)
    assert _autocast(asked)["enabled"] is is_fast


def test_what_is_asked_for_by_name_is_done(is_fast: bool) -> None:
    assert is_bf16("bf16", "cpu")
    assert not is_bf16("fp32", "cpu")
    for call in (lambda: is_bf16("fp16", "cpu"), lambda: autocast(CPU, "fp16").__enter__()):
        with pytest.raises(BadPrecision, match="precision must be auto, bf16 or fp32, got 'fp16'"):
            call()


def test_a_gpu_that_is_planned_for_multiplies_it_fast(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert is_bf16("auto", "cuda")


def test_slow_bfloat16_is_warned_of_on_stderr(is_fast: bool, program_log: Callable[[Callable[[], Any]], str]) -> None:
    said = program_log(lambda: warn_of_slow_bf16(CPU))
    assert ("precision=bf16, which this cpu multiplies far slower than float32" in said) is not is_fast


def test_emulated_bfloat16_of_a_gpu_is_no_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(CheckFailed, match="precision=bf16, and T4 has no bfloat16 in hardware"):
        check_device("bf16", "", needs_vllm=False)
    assert check_device("auto", "", needs_vllm=False) == "1 x T4"


def test_the_faster_one_is_taken_here() -> None:
    """Measured, five times: what torch says of the machine is what it does."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, times = torch.ones(192, 192, dtype=dtype), []
        for _ in range(6):
            began = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times[1:])
    assert has_fast_bf16("cpu") is (seconds[torch.bfloat16] < 8 * seconds[torch.float32])


def test_a_reward_model_is_held_in_what_it_is_computed_in(is_fast: bool, tiny_policy: Path, tmp_path: Path) -> None:
    """Half the memory where it is read in bf16, to the same bits; its scores are autocast's."""
    trained = load_process_reward(str(tiny_policy), 1)
    torch.nn.init.normal_(trained.get_parameter("score.weight"), std=1.0)
    trained.save_pretrained(tmp_path)
    rows = [list(range(3, 40)), list(range(50, 70))]
    whole, held = (load_process_reward(str(tmp_path)).requires_grad_(False) for _ in range(2))
    place(held, CPU)
    for name, value in held.named_parameters():
        is_half = is_fast and value.dim() == 2 and "embed_tokens" not in name
        assert value.dtype == (torch.bfloat16 if is_half else torch.float32), name
    for one, other in zip(last_logits(held, rows, 64), last_logits(whole, rows, 64), strict=True):
        assert torch.equal(one, other)


def test_two_policies_are_read_in_float32_and_held_so(tiny_policy: Path, tmp_path: Path) -> None:
    write_log_ratio_reward(tmp_path / "prm", str(tiny_policy), str(tiny_policy), Scale())
    model = load_process_reward(str(tmp_path / "prm"))
    place(model, CPU)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert not is_held_in_halves(str(tmp_path / "prm"), "cuda")


@pytest.mark.parametrize("place_of_the_tie", ["outer", "text"])
def test_a_head_that_is_the_embedding_stays_in_float32_wherever_the_configuration_says_it(
    place_of_the_tie: str, tiny_policy: Path
) -> None:
    model: Any = load_policy(str(tiny_policy))
    outer = PretrainedConfig(tie_word_embeddings=place_of_the_tie == "outer")
    model.config.tie_word_embeddings = place_of_the_tie == "text"
    outer.get_text_config = lambda: model.config
    assert _tied_head(outer) == 320
    model.config.tie_word_embeddings = outer.tie_word_embeddings = False
    assert _tied_head(outer) is None


def test_a_run_holds_its_reference_and_its_reward_models_so(is_fast: bool, tiny_policy: Path, tmp_path: Path) -> None:
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path)

    def kinds(model: Any) -> set[torch.dtype]:
        return {value.dtype for name, value in model.named_parameters() if "up_proj" in name}

    for precision_, is_half in (("bf16", True), ("fp32", False), ("auto", is_fast)):
        config = root_config(RLConfig, precision=precision_)
        assert kinds(load_frozen(config, str(tiny_policy), "eager")) == {torch.bfloat16 if is_half else torch.float32}
        node = {"_target_": "espalier.training.objectives.dpo.DirectPreference", "beta": 0.1,
                "reference": {"_target_": "espalier.models.load.load_reference", "path": str(tiny_policy)}}  # fmt: skip
        training = root_config(TrainConfig, precision=precision_, objective=node, model={"path": "another"})
        reference = make_objective(training, None).reference
        assert kinds(reference) == {torch.bfloat16 if is_half else torch.float32}
    for part in (
        ProcessReward(str(tmp_path)),
        ProcessValueAdvantage(str(tmp_path)),
        ProcessConsistencyFilter(str(tmp_path), 1),
    ):
        part.to(CPU)
        assert kinds(part.model) == {torch.bfloat16 if is_fast else torch.float32}
