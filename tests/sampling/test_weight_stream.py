"""Weights over a group of processes: all of them, bit for bit, and what happens where one end fails."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from espalier.rl.delivery.receipts import StaleWeights, check_receipt
from espalier.sampling import weight_stream
from espalier.sampling.client import LOOPBACK
from espalier.sampling.weight_buckets import HeldBuckets, buckets_of, kinds_of
from espalier.sampling.weight_chain import Invitation, StreamBroken, _admit, own_address
from espalier.sampling.weight_digest import digest
from espalier.sampling.weight_stream import WeightReceiver, WeightSender

ROOT = Path(__file__).resolve().parent.parent.parent
STRANGE = {
    "flags": torch.tensor([True, False, True]), "none": torch.zeros(0, 3), "one": torch.tensor(7),
    "double": torch.tensor([1e-300], dtype=torch.float64), "half": torch.tensor([0.5], dtype=torch.float16),
    "odd": torch.arange(3, dtype=torch.uint8), "part": torch.arange(12.0).view(3, 4)[:, 1:3],
    "large": torch.arange(5000.0),
}  # fmt: skip

CPU = torch.device("cpu")
CONNECTIONS, SHARED, GROUP = "connections", "memory that they share", "a group by gloo"
ways = pytest.mark.parametrize("way", [CONNECTIONS, SHARED, GROUP])


def streamed(num_receivers: int, receive: Callable[[WeightReceiver, int], Any], send: Callable[[WeightSender], Any],
             bucket_bytes: int = 1000, seconds: float = 20.0,
             join: Callable[[Invitation, int], WeightReceiver] | None = None,
             num_others: int = 0, way: str = CONNECTIONS) -> tuple[Any, list[Any]]:  # fmt: skip
    """Return what `send` gives, and `receive` of every receiver; an error is given too. `num_others`: that join by
    themselves. `way`: by which weights go."""
    sender = WeightSender(
        LOOPBACK, num_receivers + num_others, seconds, bucket_bytes, None if way == CONNECTIONS else CPU
    )
    join = join or partial(WeightReceiver, device=sender.device)
    found: list[Any] = [None] * num_receivers

    def one(number: int) -> None:
        end = None
        try:
            end = join(Invitation(**sender.invitation.as_dict()), number + 1)
            found[number] = receive(end, number)
        except Exception as error:
            found[number] = error
        finally:
            if end is not None:
                end.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num_receivers)]
    for thread in threads:
        thread.start()
    with patch.object(weight_stream, "CHOSEN_ON", {"cpu"} if way == GROUP else set()):
        sender.join()
    try:
        sent: Any = send(sender)
    except Exception as error:
        sent = error
    sender.close()
    for thread in threads:
        thread.join()
    return sent, found


@ways
def test_every_receiver_gets_every_tensor_bit_for_bit_again_and_again(way: str) -> None:
    kinds = kinds_of(STRANGE)
    later = {name: value + value if value.is_floating_point() else value for name, value in STRANGE.items()}

    def receive(end: WeightReceiver, number: int) -> list[dict[str, torch.Tensor]]:
        return [dict(end.receive()), dict(end.receive())]  # what was kept of the first is not written over

    def send(end: WeightSender) -> list[dict[str, str]]:
        assert end.way == way
        return [end.send(kinds, STRANGE.items()), end.send(kinds, later.items())]

    sent, found = streamed(2, receive, send, way=way)
    for rows in found:
        for one, want, digests in zip(rows, (STRANGE, later), sent, strict=True):
            assert list(one) == list(want)
            for name, value in want.items():
                assert one[name].dtype == value.dtype
                assert torch.equal(one[name], value)
                assert digest(one[name]) == digests[name] == digest(value)


@ways
def test_what_is_sent_is_rounded_to_the_engines_dtype_and_names_of_one_tensor_go_each(way: str) -> None:
    head = torch.tensor([[1.0, 1.0 + 2**-12], [3.0, -4.0]])
    weights = {"embed.weight": head, "head.weight": head, "counts": torch.tensor([70_000])}
    kinds = kinds_of(weights, torch.bfloat16)
    _, (found,) = streamed(1, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, weights.items()), way=way)
    assert found["head.weight"].tolist() == found["embed.weight"].tolist() == [[1.0, 1.0], [3.0, -4.0]]
    assert found["embed.weight"].dtype == torch.bfloat16
    assert found["counts"].tolist() == [70_000]


def test_buckets_hold_no_more_than_their_limit_and_every_byte_of_every_tensor_once() -> None:
    kinds = kinds_of(STRANGE)
    buckets = buckets_of(kinds, 70)  # 64: a multiple of what any dtype may begin at
    assert all(bucket.size <= 65 for bucket in buckets)
    assert list(dict.fromkeys(part.name for bucket in buckets for part in bucket.parts)) == list(STRANGE)
    for name, (shape, dtype) in kinds.items():
        parts = [part for bucket in buckets for part in bucket.parts if part.name == name]
        assert [part.offset for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == shape.numel() * dtype.itemsize
        assert all(place % dtype.itemsize == 0 for part in parts for place in (part.start, part.offset))
    assert [len([p for b in buckets for p in b.parts if p.name == name]) for name in ("large", "part")] == [313, 1]
    assert buckets_of({}, 64) == []


@ways
def test_a_tensor_that_is_larger_than_a_bucket_is_cut_and_comes_whole_in_the_dtype_that_is_read(
    way: str,
) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(3), "wide": torch.randn(50, 70).t(), "b": torch.randn(40), "c": torch.randn(1, 900)}
    kinds = kinds_of(weights, torch.bfloat16)
    digests, (found,) = streamed(
        1, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, weights.items()), way=way
    )
    assert list(found) == list(weights)
    for name, value in weights.items():
        assert torch.equal(found[name], value.to(torch.bfloat16))
        assert digest(found[name]) == digests[name]


def test_of_tensors_that_are_made_one_by_one_the_trainer_holds_a_bucket_and_an_engine_two() -> None:
    num, made, alive = 40, [], []
    kinds = {str(k): (torch.Size([100]), torch.float32) for k in range(num)}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for k in range(num):
            alive.append(sum(one() is not None for one in made))
            value = torch.full((100,), float(k))
            made.append(weakref.ref(value))
            yield str(k), value
            del value

    def receive(end: WeightReceiver, number: int) -> list[int]:
        for name, value in end.receive():
            assert value[0] == float(name)
        return [len(block) for block in end._held._blocks]

    sent, (found,) = streamed(
        1, receive, lambda end: (end.send(kinds, weights()), len(end._buffer))[1], bucket_bytes=400
    )
    assert sent == 401
    assert found == [401, 401]
    assert len(alive) == num
    assert max(alive) == 0


@ways
def test_receivers_are_told_where_the_trainer_breaks_off(way: str) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(300)
        raise ValueError("no gradient")

    kinds = {name: (torch.Size([300]), torch.float32) for name in "abc"}
    sent, found = streamed(2, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, weights()), way=way)
    assert str(sent) == "no gradient"
    for error in found:
        assert isinstance(error, StreamBroken)
        assert "broke off" in str(error)


class Tampering(WeightReceiver):
    """One to which buckets come otherwise than they were sent: `tamper` gets a bucket's number, what was in its memory
    before, and it."""

    def __init__(
        self,
        invitation: Invitation,
        rank: int,
        tamper: Callable[[int, torch.Tensor, torch.Tensor], None],
        device: torch.device | None,
    ):
        super().__init__(invitation, rank, device)
        self.tamper = tamper

    def _take(self, number: int, buffer: torch.Tensor) -> None:
        before = buffer.clone()
        super()._take(number, buffer)
        self.tamper(number, before, buffer)


FOUR = {name: torch.full((100,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))}


def tampered(
    tamper: Callable[[int, torch.Tensor, torch.Tensor], None], way: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digests of what was sent, a bucket for each tensor, and the receipt of the second of two engines, to
    which buckets come otherwise; that of the first one is good."""

    def receive(end: WeightReceiver, number: int) -> dict[str, str]:
        return {name: digest(value) for name, value in end.receive()}

    def join(invitation: Invitation, rank: int) -> WeightReceiver:
        device = None if way == CONNECTIONS else CPU
        if rank == 1:
            return WeightReceiver(invitation, rank, device)
        return Tampering(invitation, rank, tamper, device)

    send = partial(WeightSender.send, kinds=kinds_of(FOUR), weights=FOUR.items())
    sent, (clean, altered) = streamed(2, receive, send, bucket_bytes=400, join=join, way=way)
    check_receipt(sent, clean, [])
    return sent, altered


@ways
def test_a_bit_that_was_altered_on_its_way_is_on_the_receipt_of_that_engine_under_its_tensor(way: str) -> None:
    def flip(number: int, before: torch.Tensor, bucket: torch.Tensor) -> None:
        bucket[7] ^= number == 2

    sent, altered = tampered(flip, way)
    with pytest.raises(StaleWeights, match=r"engine 2 read 3 of 4 tensors as they were sent; not c \(the engine must"):
        check_receipt(sent, altered, [], "engine 2")


@ways
def test_buckets_that_came_in_each_others_place_are_on_the_receipt(way: str) -> None:
    def swap(number: int, before: torch.Tensor, bucket: torch.Tensor) -> None:
        if number < 2:
            bucket[:400].view(torch.float32).copy_(FOUR["ba"[number]])

    sent, altered = tampered(swap, way)
    assert (altered["a"], altered["b"]) == (sent["b"], sent["a"])
    with pytest.raises(StaleWeights, match=r"read 2 of 4 tensors as they were sent; not a, b \(the engine must"):
        check_receipt(sent, altered, [])


@ways
def test_a_transfer_that_says_it_is_done_and_moved_nothing_is_on_the_receipt_though_memory_is_used_again(
    way: str,
) -> None:
    def move_nothing(number: int, before: torch.Tensor, bucket: torch.Tensor) -> None:
        if number == 3:
            bucket.copy_(before)

    sent, altered = tampered(move_nothing, way)
    assert altered["d"] in (sent["a"], sent["b"])  # what came before it looks as good
    with pytest.raises(StaleWeights, match=r"not d \(the engine must"):
        check_receipt(sent, altered, [])


@ways
def test_a_worker_that_misses_a_tensor_has_none_on_its_receipt(way: str) -> None:
    def receive(end: WeightReceiver, number: int) -> dict[str, str]:
        return {name: digest(value) for name, value in end.receive() if number == 0 or name != "b"}

    sent, (whole, part) = streamed(
        2, receive, lambda end: end.send(kinds_of(FOUR), FOUR.items()), bucket_bytes=400, way=way
    )
    check_receipt(sent, whole, [])
    with pytest.raises(StaleWeights, match=r"read 3 of 4 tensors as they were sent; not b \(the engine must"):
        check_receipt(sent, part, [])


def test_memory_of_buckets_is_used_again_and_that_of_tensors_that_an_engine_keeps_is_not() -> None:
    held = HeldBuckets()
    held.reserve(64)
    first = held.free(64)
    address, view = first.data_ptr(), first[:8].view(torch.float32)
    del first
    assert held.free(64).data_ptr() != address  # a view is left
    view += 1
    del view
    assert held.free(64).data_ptr() == address
    held.reserve(128)
    assert len(held.free(100)) == 100


@ways
def test_other_tensors_than_planned_are_not_sent(way: str) -> None:
    kinds = {"a": (torch.Size([3]), torch.float32)}
    sent, _ = streamed(
        1,
        lambda end, _: dict(end.receive()),
        lambda end: end.send(kinds, {"b": torch.ones(3)}.items()),
        way=way,
    )
    assert str(sent) == "b [3] comes where a [3] is planned"


@pytest.mark.parametrize("way", [CONNECTIONS, GROUP])
def test_a_worker_that_dies_in_the_middle_of_a_delivery_ends_it_for_all(way: str) -> None:
    """The trainer learns of it at once; the other engine when the trainer gives the delivery up, as it does then."""
    weights = {str(k): torch.full((500_000,), float(k)) for k in range(60)}  # more than connections hold
    program = """
import json, os, sys, torch
from espalier.sampling.weight_chain import Invitation
from espalier.sampling.weight_stream import WeightReceiver
end = WeightReceiver(Invitation(**json.loads(sys.argv[1])), 2, torch.device("cpu"))
for number, _ in enumerate(end.receive()):
    if number == 5:
        os._exit(7)
"""

    def send(end: WeightSender) -> Any:
        try:
            return end.send(kinds_of(weights), weights.items())
        except StreamBroken:
            end.give_up()
            raise

    dying: list[subprocess.Popen[bytes]] = []

    def receive(end: WeightReceiver, number: int) -> Any:
        return dict(end.receive())

    def join(invitation: Invitation, rank: int) -> WeightReceiver:
        asked = json.dumps(invitation.as_dict())
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        dying.append(subprocess.Popen([sys.executable, "-c", program, asked], env=environment))
        return WeightReceiver(invitation, rank, CPU)

    started = time.monotonic()
    sent, (found,) = streamed(1, receive, send, bucket_bytes=2_000_000, seconds=90.0, join=join, num_others=1, way=way)
    assert dying[0].wait(60) == 7
    assert isinstance(sent, StreamBroken)
    assert isinstance(found, StreamBroken)
    assert time.monotonic() - started < 80  # no wait ran to its end


@ways
def test_a_delivery_that_an_engine_did_not_take_is_given_up(way: str) -> None:
    weights = {"a": torch.ones(1_000_000)}
    done = threading.Event()

    def send(end: WeightSender) -> Any:
        threading.Timer(0.2, end.give_up).start()
        started = time.monotonic()
        try:
            return end.send(kinds_of(weights), weights.items())
        finally:
            done.set()
            assert time.monotonic() - started < 5

    sent, _ = streamed(1, lambda end, _: done.wait(10), send, way=way)
    assert str(sent) == "another engine did not take it"


@ways
def test_every_wait_has_a_deadline(way: str) -> None:
    weights, done = {"a": torch.ones(1_000_000)}, threading.Event()

    def send(end: WeightSender) -> Any:
        try:
            return end.send(kinds_of(weights), weights.items())
        finally:
            done.set()

    sent, _ = streamed(1, lambda end, _: done.wait(30), send, seconds=1.0, way=way)
    assert "nothing moved for 1 s" in str(sent)
    lonely = WeightSender(LOOPBACK, 1, seconds=0.2)
    with pytest.raises(StreamBroken, match=r"did not come together within 0\.2 s"):
        lonely.join()
    with pytest.raises(StreamBroken, match=r"the trainer at 127.0.0.1:\d+ cannot be reached from here"):
        WeightReceiver(lonely.invitation, 1)


def test_who_does_not_know_the_key_of_the_group_is_turned_away() -> None:
    with socket.create_server((LOOPBACK, 0)) as door:
        place = door.getsockname()
        with socket.create_connection(place) as stranger, socket.create_connection(place) as silent:
            stranger.sendall(b"0" * 16)
            silent.shutdown(socket.SHUT_WR)
            with socket.create_connection(place) as known:
                known.sendall(b"k" * 16)
                with _admit(door, b"k" * 16, time.monotonic() + 20) as admitted:
                    assert admitted.getpeername() == known.getsockname()
            assert stranger.recv(1) == b""


def test_where_the_trainer_is_found_depends_on_where_the_engines_are() -> None:
    assert own_address("127.0.0.1") == LOOPBACK
    with pytest.raises(OSError):
        own_address("no.such.host.invalid")


@pytest.mark.slow
def test_a_program_may_end_while_a_bucket_is_under_way() -> None:
    program = f"""
import threading, time, torch
from espalier.sampling.weight_buckets import kinds_of
from espalier.sampling.weight_chain import StreamBroken
from espalier.sampling.weight_stream import WeightReceiver, WeightSender
sender = WeightSender("{LOOPBACK}", 1, seconds=30.0)
kept = []
threading.Thread(target=lambda: kept.append(WeightReceiver(sender.invitation, 1)), daemon=True).start()
sender.join()
weights = {{"a": torch.zeros(10_000_000)}}  # nobody takes it
def send():
    try:
        sender.send(kinds_of(weights), weights.items())
    except StreamBroken:
        print("broken")
threading.Thread(target=send).start()
time.sleep(0.5)
sender.close()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, timeout=60, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    assert (found.returncode, found.stdout) == (0, "broken\n")


@pytest.mark.slow
def test_a_program_may_end_at_once_behind_a_delivery() -> None:
    """A group that is let go in another thread while the program ends would abort it."""
    program = f"""
import sys, threading, torch
from espalier.sampling import weight_stream as stream
from espalier.sampling.weight_buckets import kinds_of
sender = stream.WeightSender("{LOOPBACK}", 1, seconds=20.0)
def take():
    receiver = stream.WeightReceiver(sender.invitation, 1)
    list(receiver.receive())
    receiver.close()
taking = threading.Thread(target=take)
taking.start()
sender.join()
weights = {{"a": torch.ones(3)}}
sender.send(kinds_of(weights), weights.items())
taking.join()
sender.close()
sys.exit(143)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(4)]
    assert [process.wait(120) for process in started] == [143] * 4


@ways
def test_large_tensors_are_sent_from_where_they_are_and_what_follows_them_in_a_bucket_stays_in_its_place(
    way: str,
) -> None:
    """64 KiB is large; a bucket begins with a small one, and ends with one that has to be rounded."""
    torch.manual_seed(0)
    weights = {
        "small": torch.randn(5).bfloat16(),
        "large": torch.randn(300, 200).bfloat16(),
        "odd": torch.randn(3).bfloat16(),
        "rounded": torch.randn(70_000),
        "turned": torch.randn(300, 200).bfloat16().t(),
        "cut": torch.randn(500_001).bfloat16(),
        "last": torch.randn(1).bfloat16(),
    }
    kinds = kinds_of(weights, torch.bfloat16)
    send = partial(WeightSender.send, kinds=kinds, weights=weights.items())
    digests, found = streamed(2, lambda end, _: dict(end.receive()), send, bucket_bytes=400_000, way=way)
    for one in found:
        assert list(one) == list(weights)
        for name, value in weights.items():
            assert torch.equal(one[name], value.to(torch.bfloat16)), name
            assert digest(one[name]) == digests[name]


def test_receivers_are_told_where_the_trainer_breaks_off_behind_a_large_tensor_of_the_bucket() -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(50_000)
        raise ValueError("no gradient")

    kinds = {name: (torch.Size([50_000]), torch.float32) for name in "abc"}
    sent, found = streamed(
        2, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, weights()), bucket_bytes=500_000
    )
    assert str(sent) == "no gradient"
    assert all("broke off" in str(error) for error in found)
