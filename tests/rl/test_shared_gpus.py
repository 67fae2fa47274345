"""A GPU that a rank of the learner and an engine share is named before either starts, with settings that part them."""

import logging
from typing import Any

import pytest
import torch

from espalier.rl.engines_from_config import make_client
from espalier.rl.shared_gpus import engine_gpus, warn_of_shared_gpus
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.server import VLLMServer

ENGINES = ("client=data_parallel_engines", "server=none")


def lines(caplog: pytest.LogCaptureFixture, *settings: str) -> list[str]:
    """What is said of a run with these settings, up to its client."""
    caplog.clear()
    config = compose_config(RLConfig, "exp/ppo/grpo_problem_file", [
        "task.path=F", "task.kind=number", "model.path=m", "output_dir=o", *settings])  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="rl"):
        make_client(config)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two GPUs, numbers 4 and 5, and one rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("espalier.models.precision.has_fast_bf16", lambda device: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


def test_engines_that_begin_at_the_learners_gpu_are_named_with_settings_under_which_they_do_not(
    gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remedy = "client=data_parallel_engines server=none client.num_engines=1 client.gpus=[1]"
    for shared in ([], [*ENGINES], [*ENGINES, "client.num_engines=1"], [*ENGINES, "client.gpus_each=0"]):
        (line,) = lines(caplog, *shared)
        assert "are both on GPU 4, and" in line
        assert f"set {remedy} (" in line
    for parted in (remedy.split(), ['+server.devices="5"'], [*ENGINES, "client.num_engines=1", "engine.sleeps=true"],
                   ["layout=one_gpu"], ["server=none", "client.base_url=http://h:1"]):  # fmt: skip
        assert lines(caplog, *parted) == []
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lines(caplog) == []


def test_ranks_on_all_gpus_take_turns_with_as_many_engines(
    gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.setenv("LOCAL_WORLD_SIZE", "2")
    (line,) = lines(caplog, *ENGINES)
    assert "are both on GPU 4, 5, and" in line
    assert "set layout=one_gpu client.num_engines=2: they then take turns (" in line
    assert lines(caplog, "layout=one_gpu", "client.num_engines=2") == []
    gpus.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    (line,) = lines(caplog, "+server.options.tensor_parallel_size=2")
    assert "client.num_engines=1 client.gpus=[2,3] +client.options.tensor_parallel_size=2 (" in line
    gpus.setenv("RANK", "1")
    assert lines(caplog, *ENGINES) == []  # rank 0 has the engines


def test_an_engine_computes_on_the_first_gpus_that_it_sees(gpus: pytest.MonkeyPatch) -> None:
    all_four = ["4", "5", "6", "7"]
    gpus.setenv("CUDA_VISIBLE_DEVICES", ",".join(all_four))
    assert engine_gpus(None, VLLMServer("m", "l"), all_four) == ["4"]
    assert engine_gpus(None, VLLMServer("m", "l", options={"tensor-parallel-size": 2}), all_four) == ["4", "5"]
    assert engine_gpus(None, VLLMServer("m", "l", devices="6,7"), all_four) == ["6"]
    assert engine_gpus(DataParallelEngines("m", "l", num_engines=2, gpus=[2, 3]), None, all_four) == ["6", "7"]
    assert engine_gpus(DataParallelEngines("m", "l", num_engines=2, gpus_each=0), None, all_four) == ["4", "4"]


def test_nothing_is_said_of_servers_of_others(gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_shared_gpus(None, None)
    assert caplog.records == []
