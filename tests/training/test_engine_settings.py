"""Settings of DeepSpeed: which ranks share examples, what is refused in one line, parts that become wholes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.models.load import load_policy
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import TrainConfig
from espalier.training.deepspeed_engine import BadSettings, check_heads, loading, tensor_parallel_size
from espalier.training.deepspeed_pieces import check_optimizer, check_settings
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


def test_more_ranks_to_a_layer_than_it_has_heads_of_keys_are_refused(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = load_policy(str(tiny_policy))
    heads = model.config.num_key_value_heads
    check_heads(model, heads)
    line = f"autotp_size 8 leaves a rank without a head of keys, .* has {heads}: set .*autotp_size={heads}"
    with pytest.raises(BadSettings, match=line):
        make_engine(config(deepspeed=zero(1, 8)), model)


def test_an_optimizer_that_no_checkpoint_could_hold_is_refused() -> None:
    """DeepSpeed says by its kind where it keeps weights."""
    names = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_UnfusedOptimizer")
    kinds = {name: type(name, (), {})() for name in names}
    check_optimizer(torch.optim.AdamW([torch.zeros(1)]), 0)
    check_optimizer(kinds["DeepSpeedZeroOptimizer"], 2)
    check_optimizer(kinds["DeepSpeedZeroOptimizer_Stage3"], 3)
    for name, stage in (("FP16_UnfusedOptimizer", 0), ("BF16_Optimizer", 1), ("DeepSpeedZeroOptimizer", 3)):
        with pytest.raises(BadSettings, match=f"DeepSpeed steps with {name}, of which no checkpoint could be written"):
            check_optimizer(kinds[name], stage)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device=nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": "0.5"}}}, "offload_optimizer.ratio"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler"),
    ],
)
def test_settings_that_no_checkpoint_could_hold_are_refused_before_deepspeed_reads_them(
    settings: dict[str, Any], name: str
) -> None:
    for start in (lambda: loading(settings), lambda: make_engine(config(deepspeed=settings), torch.nn.Linear(2, 2))):
        with pytest.raises(BadSettings, match=rf"deepspeed\.\S*{name} cannot be had, because no checkpoint could be"):
            start()


def test_the_engines_of_conf_are_none_of_these() -> None:
    paths = sorted((Path(__file__).parents[2] / "conf" / "deepspeed").glob("*.yaml"))
    assert len(paths) > 8
    for path in paths:
        words = [f"deepspeed={path.stem}", "model.path=M", "examples.path=F", "output_dir=O"]
        check_settings(compose_config(TrainConfig, "train", words).deepspeed or {})
