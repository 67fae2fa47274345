"""Settings of DeepSpeed: which ranks share examples, what is refused in one line, parts that become wholes."""

from typing import Any

import pytest
import torch

from espalier.runtime.schemas import TrainConfig
from espalier.training.deepspeed_engine import BadSettings, tensor_parallel_size
from espalier.training.deepspeed_pieces import check_pieces
from espalier.training.loop_from_config import data_ranks, make_engine
from tests.support.root_config import root_config


def config(**settings: Any) -> TrainConfig:
    fixed: dict[str, Any] = {"output_dir": "", "model": {}, "objective": {}, "examples": {}}
    return root_config(TrainConfig, **{**fixed, "optimizer": {"_target_": "torch.optim.AdamW"}, **settings})


def zero(stage: int, size: int = 1) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": size, "preset_model": "llama"}}


def test_neighbouring_ranks_of_tensor_parallelism_read_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        found.append(data_ranks(config(deepspeed=zero(1, 2))))
        assert data_ranks(config()) == (rank, 4)
        assert data_ranks(config(deepspeed={"zero_optimization": {"stage": 3}})) == (rank, 4)
    assert found == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_tensor_parallelism_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(BadSettings, match="autotp_size 2 does not divide the 3 ranks: start a multiple of 2"):
        tensor_parallel_size(zero(1, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for stage in (0, 3):
        with pytest.raises(BadSettings, match=f"autotp_size 2 needs ZeRO stage 1 or 2, not {stage}: set deepspeed"):
            tensor_parallel_size(zero(stage, 2))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BadSettings, match="adapters cannot be had with tensor parallelism: set lora=none"):
        make_engine(config(deepspeed=zero(1, 2), lora={"bits": 0}), model)
    with pytest.raises(BadSettings, match=r"lora\.bits cannot be had with ZeRO stage 3"):
        make_engine(config(deepspeed=zero(3), lora={"bits": 4}), model)


def test_what_no_checkpoint_could_hold_is_refused_before_the_first_step() -> None:
    """DeepSpeed says by the kind of its optimizer where it keeps weights."""
    plain = torch.optim.AdamW([torch.zeros(1)])
    names = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_UnfusedOptimizer")
    kinds = {name: type(name, (), {})() for name in names}
    check_pieces(plain, 0, {})
    check_pieces(kinds["DeepSpeedZeroOptimizer"], 2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    check_pieces(kinds["DeepSpeedZeroOptimizer_Stage3"], 3, {})
    for name, stage in (("FP16_UnfusedOptimizer", 0), ("BF16_Optimizer", 1), ("DeepSpeedZeroOptimizer", 3)):
        with pytest.raises(BadSettings, match=f"DeepSpeed steps with {name}, of which no checkpoint could be written"):
            check_pieces(kinds[name], stage, {})
    for offload in ({"device": "nvme"}, {"device": "cpu", "ratio": 0.5}):
        with pytest.raises(BadSettings, match="offload_optimizer has weights or moments on a disk, or in two places"):
            check_pieces(
                kinds["DeepSpeedZeroOptimizer_Stage3"], 3, {"zero_optimization": {"offload_optimizer": offload}}
            )
