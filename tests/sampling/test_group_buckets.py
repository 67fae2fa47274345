"""A group of devices that weights go by: who can be in one, and what happens where one end cannot come in."""

import logging
import os
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from espalier.sampling import group_buckets, weight_stream
from espalier.sampling.client import LOOPBACK
from espalier.sampling.group_buckets import GroupBuckets, group_place, is_group
from espalier.sampling.weight_buckets import kinds_of
from espalier.sampling.weight_stream import WeightReceiver, WeightSender
from tests.sampling.test_weight_stream import CPU, GROUP, SHARED, streamed

WEIGHTS = {"a": torch.arange(300.0), "b": torch.arange(100.0).bfloat16()}


def one_on(unit: str, backend: str = "nccl") -> dict[str, str]:
    """A place."""
    return {"backend": backend, "unit": unit}


def test_a_group_has_one_backend_and_a_unit_for_each_end() -> None:
    assert is_group([one_on("0"), one_on("1"), one_on("2")])
    assert not is_group([one_on("0"), one_on("1"), one_on("1")])  # NCCL refuses two ends on one GPU
    assert not is_group([one_on("0"), one_on("1", "gloo")])
    assert not is_group([one_on("0"), None])  # an engine without a device, or a torch without NCCL
    assert not is_group([None, None])


def test_processes_on_cpus_are_units_of_their_own_and_who_has_no_device_is_in_no_group() -> None:
    places = [group_place(CPU), group_place(CPU)]
    assert is_group(places)
    assert group_place(None) is None


def delivered(seconds: float = 20.0) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """Return the way that weights went, and what both receivers got."""

    def send(end: WeightSender) -> str:
        end.send(kinds_of(WEIGHTS), WEIGHTS.items())
        return end.way

    return streamed(2, lambda end, _: dict(end.receive()), send, bucket_bytes=400, seconds=seconds, way=GROUP)


def check(found: list[dict[str, torch.Tensor]]) -> None:
    """All of it, everywhere."""
    for one in found:
        assert list(one) == list(WEIGHTS), one
        assert all(torch.equal(one[name], value) for name, value in WEIGHTS.items())


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_where_one_end_cannot_come_in_all_take_the_next_way(
    missing: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = GroupBuckets.joined.__func__  # type: ignore[attr-defined]

    def all_but_one(cls: type, store: Any, rank: int, *rest: Any) -> GroupBuckets:
        if rank == missing:
            raise RuntimeError("no NVLink, no network")
        found: GroupBuckets = joined(cls, store, rank, *rest)
        return found

    monkeypatch.setattr(GroupBuckets, "joined", classmethod(all_but_one))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        way, found = delivered(seconds=3.0)
    assert way == SHARED
    check(found)
    assert "weights do not go by a group: " in caplog.text
    assert time.monotonic() - started < 4


def test_a_group_that_brings_something_else_is_not_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            """Nothing came."""

    monkeypatch.setattr(GroupBuckets, "_begin", lambda self, part: Nothing())
    with caplog.at_level(logging.WARNING):
        way, found = delivered()
    assert way == SHARED
    check(found)
    assert "what came is not what the trainer sent" in caplog.text


def test_an_end_that_shares_nothing_gets_weights_over_connections_with_all_others() -> None:
    def join(invitation: Any, rank: int) -> WeightReceiver:
        return WeightReceiver(invitation, rank, CPU if rank == 1 else None)

    def send(end: WeightSender) -> str:
        end.send(kinds_of(WEIGHTS), WEIGHTS.items())
        return end.way

    way, found = streamed(2, lambda end, _: dict(end.receive()), send, bucket_bytes=400, way=GROUP, join=join)
    assert way == "connections"
    check(found)


def test_a_group_whose_first_bucket_never_comes_is_left_before_the_next_way_is_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        def is_completed(self) -> bool:
            return False

        def wait(self) -> None:
            pytest.fail("waited for")

    left: list[GroupBuckets] = []
    close = GroupBuckets.close

    def noted(end: GroupBuckets) -> None:
        left.append(end)
        close(end)

    monkeypatch.setattr(GroupBuckets, "_begin", lambda self, part: Hanging())
    monkeypatch.setattr(GroupBuckets, "close", noted)
    with caplog.at_level(logging.WARNING):
        way, found = delivered(seconds=3.0)
    assert way == SHARED
    check(found)
    assert len({id(end) for end in left}) == 3
    assert "did not come within 1 s" in caplog.text


def test_an_end_that_is_made_too_late_is_left_all_the_same() -> None:
    left = threading.Event()

    class Slow(GroupBuckets):
        def __init__(self, *_: Any) -> None:
            time.sleep(0.5)

        def close(self) -> None:
            left.set()

        def _begin(self, part: torch.Tensor) -> Any:
            pytest.fail("nobody waits for it any more")

    with pytest.raises(RuntimeError, match=r"did not come within 0\.1 s"):
        Slow.joined(None, 0, 1, CPU, LOOPBACK, lambda _: None, "00", 0.1)
    assert left.wait(5)


def test_a_group_that_failed_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = WeightSender(LOOPBACK, 0, device=CPU, may_group=False)
    try:
        with patch.object(weight_stream, "CHOSEN_ON", {"cpu"}):
            offers = [offer.func.__name__ for offer in sender._offers([])]  # type: ignore[attr-defined]
            sender.may_group = True
            again = [offer.func.__name__ for offer in sender._offers([])]  # type: ignore[attr-defined]
    finally:
        sender.close()
    assert (offers, again) == (["_offer_shared"], ["_offer_group", "_offer_shared"])


def test_nccl_has_no_watchdog_that_would_end_the_process_and_the_variable_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    class Store:
        def clone(self) -> "Store":
            return self

    class NCCL:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

        def abort(self) -> None:
            raise RuntimeError("an error of before")

    monkeypatch.setattr(group_buckets.dist, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(group_buckets.dist, "PrefixStore", lambda _, store: store)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        end = GroupBuckets(Store(), 0, 2, torch.device("cuda", 0), LOOPBACK, lambda _: None, 1.0)
        end.close()  # says it, and goes on
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert seen == ["1", "1"]
