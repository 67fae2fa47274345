"""Engines on one machine: each gets GPUs that the program itself may use, and its share of such cores."""

import os

import pytest

from espalier.data.records import BadInput
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_arguments import num_devices
from espalier.sampling.placement import core_list, deal_gpus, share_of_cores, visible_gpus

GPUS = "CUDA_VISIBLE_DEVICES"


def seen_by_engines(**settings: object) -> list[str | None]:
    client = DataParallelEngines("m", "l", **settings)  # type: ignore[arg-type]
    return [client.environment(number).get(GPUS) for number in range(client.num_engines)]


@pytest.mark.parametrize(
    ("visible", "first", "second"),
    [("4,5", "4", "5"), ("GPU-8932f937,GPU-1c2d", "GPU-8932f937", "GPU-1c2d"), ("7, 3 ,1", "7", "3")],
)
def test_engines_get_the_gpus_that_the_program_was_given(
    visible: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, visible)
    assert seen_by_engines() == [first, second]
    assert seen_by_engines(gpus=[1, 0]) == seen_by_engines(gpus=["1", 0]) == [second, first]
    assert seen_by_engines(gpus=[1, 1]) == [second, second]  # shared because it was asked for
    assert seen_by_engines(gpus_each=0) == [visible, visible]


def test_an_engine_of_several_devices_gets_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4,5,6,7")
    assert seen_by_engines(options={"tensor_parallel_size": 2}) == ["4,5", "6,7"]
    assert seen_by_engines(gpus_each=2) == ["4,5", "6,7"]
    assert num_devices({"tensor-parallel-size": 2, "pipeline_parallel_size": 3, "data_parallel_size": None}) == 6


def test_without_the_variable_all_gpus_of_the_machine_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GPUS, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert seen_by_engines() == ["0", "1"]
    assert seen_by_engines(gpus=[1, 2]) == ["1", "2"]
    assert seen_by_engines(gpus=["GPU-1", "MIG-2"]) == ["GPU-1", "MIG-2"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert seen_by_engines() == [None, None]


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
def test_a_program_without_gpus_deals_none_out(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, visible)
    assert visible_gpus() == []
    assert seen_by_engines() == [visible, visible]


def test_more_gpus_than_there_are_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4,5")
    with pytest.raises(BadInput) as raised:
        seen_by_engines(num_engines=3)
    assert str(raised.value) == (
        "3 engines of 1 GPU each need 3, and 2 are visible (CUDA_VISIBLE_DEVICES=4,5): start fewer, or set "
        "client.gpus_each=0 for engines that all see all GPUs"
    )
    with pytest.raises(BadInput, match=r"2 engines of 2 GPUs each need 4, and 2 are visible .* client\.gpus_each=0"):
        seen_by_engines(gpus_each=2)
    for gpus in ([4, 5], ["GPU-1", 0]):
        with pytest.raises(
            BadInput, match=r"client\.gpus: there is no GPU \S+: 2 are visible .*=4,5\), counted from 0"
        ):
            seen_by_engines(gpus=gpus)


def test_cores_are_those_that_the_program_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 6, 7, 9})
    assert share_of_cores(2) == 2
    assert share_of_cores(9) == 1
    assert [core_list(0, 2), core_list(2, 2)] == ["4,6", "7,9"]
    assert core_list(2, 3) == "2-4"  # fewer than that: as they were counted
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [core_list(0, 4), core_list(4, 4)] == ["0-3", "4-7"]


def test_gpus_that_no_engine_would_be_held_to_are_refused() -> None:
    with pytest.raises(BadInput, match="lets every engine see all GPUs, and client"):
        deal_gpus(2, 0, [2, 3], {})
