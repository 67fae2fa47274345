"""Memory that a trainer and engines share: who cannot open it gets the weights otherwise, and nothing is left over."""

import errno
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.sampling import shared_buckets, weight_stream
from espalier.sampling.client import LOOPBACK
from espalier.sampling.shared_buckets import NUM_SHARED, SharedBuckets, places_of
from espalier.sampling.weight_buckets import kinds_of
from espalier.sampling.weight_chain import Invitation, StreamBroken
from espalier.sampling.weight_stream import WeightReceiver, WeightSender
from tests.sampling.test_weight_stream import CPU, SHARED, streamed

WEIGHTS = {"a": torch.arange(300.0), "b": torch.arange(100.0).bfloat16()}


def left_over() -> set[Path]:
    """Return files of shared weights."""
    return set(Path("/dev/shm").glob("weights-*"))


def delivered(num: int = 2, join: Any = None) -> tuple[bool, list[dict[str, torch.Tensor]]]:
    """Return (whether the weights were shared, what every receiver got)."""

    def send(end: WeightSender) -> bool:
        end.send(kinds_of(WEIGHTS), WEIGHTS.items())
        return end.way == SHARED

    return streamed(num, lambda end, _: dict(end.receive()), send, bucket_bytes=400, join=join, way=SHARED)


def check(found: list[dict[str, torch.Tensor]]) -> None:
    """All of it, everywhere."""
    for one in found:
        assert list(one) == list(WEIGHTS), one
        assert all(torch.equal(one[name], value) for name, value in WEIGHTS.items())


def test_memory_is_shared_by_two_processes_views_and_has_no_name_any_more() -> None:
    before = left_over()
    made = SharedBuckets.make(CPU, 1000)
    handle = made.handle()
    opened = SharedBuckets.open(handle, CPU)
    made.hide()
    assert left_over() == before
    made.bucket(3, 7).copy_(torch.arange(7))
    assert opened.bucket(1, 7).tolist() == list(range(7))  # two buckets, used in turn
    assert len(made.memory) == NUM_SHARED * 1008
    with pytest.raises(FileNotFoundError):
        SharedBuckets.open(handle, CPU)
    assert left_over() == before  # none was made for it


def test_another_file_of_that_name_is_not_taken_for_it() -> None:
    made = SharedBuckets.make(CPU, 1000)
    path = made.handle()["path"]
    try:
        with pytest.raises(OSError, match="not what the trainer made"):
            SharedBuckets.open({**made.handle(), "mark": [0] * 16}, CPU)
        os.truncate(path, 10)
        with pytest.raises(OSError, match="is another file here"):
            SharedBuckets.open({"path": path, "size": 2016, "mark": []}, CPU)
    finally:
        made.hide()


def test_where_one_engine_cannot_open_it_all_get_the_weights_over_connections(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SharedBuckets.open
    before = left_over()

    def first_alone(handle: Any, device: torch.device) -> SharedBuckets:
        if len(found) == 1:
            raise PermissionError("not yours")
        found.append(handle)
        return opened(handle, device)

    found: list[Any] = []
    monkeypatch.setattr(SharedBuckets, "open", first_alone)
    with caplog.at_level(logging.WARNING):
        is_shared, rows = delivered()
    assert not is_shared
    check(rows)
    assert "weights do not go by shared memory: an engine cannot open it (not yours)" in caplog.text
    assert left_over() == before


def test_where_there_is_no_room_for_it_weights_go_over_connections(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = left_over()
    monkeypatch.setattr(shared_buckets.os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        is_shared, rows = delivered()
    assert not is_shared
    check(rows)
    assert "No space left on device" in caplog.text
    assert left_over() == before


def test_where_its_memory_has_no_handle_weights_go_over_connections(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(_: SharedBuckets) -> Any:
        raise RuntimeError("cudaMallocAsync does not yet support shareIpcHandle")

    before = left_over()
    monkeypatch.setattr(SharedBuckets, "handle", handle)
    with caplog.at_level(logging.WARNING):
        is_shared, rows = delivered()
    assert not is_shared
    check(rows)
    assert "does not yet support shareIpcHandle" in caplog.text
    assert left_over() == before


def test_an_engine_that_is_lost_while_it_opens_it_ends_the_wait_at_once_and_leaves_no_file() -> None:
    before, started = left_over(), time.monotonic()

    class Lost(WeightReceiver):
        def _answer(self, store: Any, device: torch.device | None) -> None:
            places = {"shared": [*shared_buckets.places_of(device)], "group": None}
            store.set(f"places/{self.rank}", json.dumps(places))
            self._learn(f"offer/0/{self.rank}")
            self.close()
            raise StreamBroken("lost")

    sender = WeightSender(LOOPBACK, 1, device=CPU)

    def join() -> None:
        with pytest.raises(StreamBroken):
            Lost(sender.invitation, 1, CPU)

    joining = threading.Thread(target=join)
    joining.start()
    with pytest.raises(StreamBroken, match="another end is gone"):
        sender.join()
    joining.join()
    sender.close()
    assert time.monotonic() - started < 10  # of 120
    assert left_over() == before


def test_an_end_that_takes_its_time_to_open_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SharedBuckets.open

    def slowly(handle: Any, device: torch.device) -> SharedBuckets:
        time.sleep(1.3)  # more than two glances of all the others
        return opened(handle, device)

    monkeypatch.setattr(SharedBuckets, "open", slowly)
    is_shared, rows = delivered(2)
    assert is_shared
    check(rows)


def test_engines_elsewhere_or_that_share_nothing_get_them_over_connections_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def join(invitation: Invitation, rank: int) -> WeightReceiver:
        return WeightReceiver(invitation, rank, CPU if rank == 1 else None)

    with caplog.at_level(logging.WARNING):
        is_shared, rows = delivered(join=join)
    assert not is_shared
    assert not caplog.text
    check(rows)
    assert places_of(None) == {}


def test_ends_on_several_gpus_of_a_machine_share_its_memory_and_on_one_gpu_that_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU by its name alone: its memory is the CPU's here."""
    gpus = {0: "GPU a", 1: "GPU b"}
    other = torch.device("meta")
    asked: list[torch.device] = []
    made = SharedBuckets.make

    def places(device: torch.device | None) -> dict[str, torch.device]:
        assert device is not None
        return {gpus[device.index or 0]: other, "machine": CPU}

    def make(device: torch.device, size: int) -> SharedBuckets:
        asked.append(device)
        return made(CPU, size)

    monkeypatch.setattr(weight_stream, "places_of", places)
    monkeypatch.setattr(SharedBuckets, "make", make)

    def join(invitation: Invitation, rank: int) -> WeightReceiver:
        return WeightReceiver(invitation, rank, torch.device("cpu", rank - 1))

    is_shared, rows = delivered(join=join)
    check(rows)
    one_gpu, alone = delivered(1, join=join)
    check(alone)
    assert (is_shared, one_gpu, asked) == (True, True, [CPU, other])


def test_they_are_shared_again_and_again_and_nothing_is_left_over() -> None:
    before = left_over()
    for _ in range(3):
        is_shared, rows = delivered(3)
        assert is_shared
        check(rows)
    assert left_over() == before
