"""Weights over a group of processes: all of them, bit for bit, and what happens where one end fails."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.sampling.client import LOOPBACK
from espalier.sampling.weight_buckets import buckets_of, digest, kinds_of
from espalier.sampling.weight_stream import Invitation, StreamBroken, WeightReceiver, WeightSender, own_address

ROOT = Path(__file__).resolve().parent.parent.parent
STRANGE = {
    "flags": torch.tensor([True, False, True]), "none": torch.zeros(0, 3), "one": torch.tensor(7),
    "double": torch.tensor([1e-300], dtype=torch.float64), "half": torch.tensor([0.5], dtype=torch.float16),
    "odd": torch.arange(3, dtype=torch.uint8), "part": torch.arange(12.0).view(3, 4)[:, 1:3],
    "large": torch.arange(5000.0),
}  # fmt: skip


def streamed(num_receivers: int, receive: Callable[[WeightReceiver, int], Any], send: Callable[[WeightSender], Any],
             bucket_bytes: int = 1000, seconds: float = 20.0) -> tuple[Any, list[Any]]:  # fmt: skip
    """Return what `send` gives, and `receive` of every receiver; an error is given too."""
    sender = WeightSender(LOOPBACK, num_receivers, seconds=seconds, bucket_bytes=bucket_bytes)
    found: list[Any] = [None] * num_receivers

    def one(number: int) -> None:
        try:
            found[number] = receive(WeightReceiver(Invitation(**sender.invitation.as_dict()), number + 1), number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num_receivers)]
    for thread in threads:
        thread.start()
    sender.join()
    try:
        sent: Any = send(sender)
    except Exception as error:
        sent = error
    sender.close()
    for thread in threads:
        thread.join()
    return sent, found


def test_every_receiver_gets_every_tensor_bit_for_bit_again_and_again() -> None:
    kinds = kinds_of(STRANGE)
    later = {name: value + value if value.is_floating_point() else value for name, value in STRANGE.items()}

    def receive(end: WeightReceiver, number: int) -> list[dict[str, torch.Tensor]]:
        return [dict(end.receive()), dict(end.receive())]  # what was kept of the first is not written over

    sent, found = streamed(2, receive, lambda end: [end.send(kinds, STRANGE.items()), end.send(kinds, later.items())])
    for rows in found:
        for one, want, digests in zip(rows, (STRANGE, later), sent, strict=True):
            assert list(one) == list(want)
            for name, value in want.items():
                assert one[name].dtype == value.dtype
                assert torch.equal(one[name], value)
                assert digest(one[name]) == digests[name] == digest(value)


def test_what_is_sent_is_rounded_to_the_engines_dtype_and_names_of_one_tensor_go_each() -> None:
    head = torch.tensor([[1.0, 1.0 + 2**-12], [3.0, -4.0]])
    weights = {"embed.weight": head, "head.weight": head, "counts": torch.tensor([70_000])}
    kinds = kinds_of(weights, torch.bfloat16)
    _, (found,) = streamed(1, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, weights.items()))
    assert found["head.weight"].tolist() == found["embed.weight"].tolist() == [[1.0, 1.0], [3.0, -4.0]]
    assert found["embed.weight"].dtype == torch.bfloat16
    assert found["counts"].tolist() == [70_000]


def test_buckets_hold_no_more_than_their_limit_but_for_a_single_tensor() -> None:
    buckets = buckets_of(kinds_of(STRANGE), 64)
    assert [entry.name for bucket in buckets for entry in bucket.entries] == list(STRANGE)
    assert [[entry.name for entry in bucket.entries] for bucket in buckets][-1] == ["large"]
    assert buckets[-1].size == 4 * 5000 + 1
    assert all(bucket.size <= 65 for bucket in buckets[:-1])
    assert all(entry.start % entry.dtype.itemsize == 0 for bucket in buckets for entry in bucket.entries)
    assert buckets_of({}, 64) == []


def test_at_most_two_buckets_are_held_while_tensors_are_made_one_by_one() -> None:
    """The tensors are asked for no earlier than the receivers can have taken the bucket before the last."""
    num, received, ahead = 40, [0], []
    kinds = {str(k): (torch.Size([100]), torch.float32) for k in range(num)}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for k in range(num):
            ahead.append(k - received[0])
            yield str(k), torch.full((100,), float(k))

    def receive(end: WeightReceiver, number: int) -> None:
        for name, value in end.receive():
            assert value[0] == float(name)
            received[0] += 1
            time.sleep(0.002)

    _, (found,) = streamed(1, receive, lambda end: end.send(kinds, weights()), bucket_bytes=400)
    assert found is None
    assert received == [num]
    assert max(ahead) <= 4  # two on their way, one that is read, one that is filled


def test_receivers_are_told_where_the_trainer_breaks_off() -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(300)
        raise ValueError("no gradient")

    kinds = {name: (torch.Size([300]), torch.float32) for name in "abc"}
    sent, found = streamed(2, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, weights()))
    assert str(sent) == "no gradient"
    for error in found:
        assert isinstance(error, StreamBroken)
        assert "broke off" in str(error)


def test_other_tensors_than_planned_are_not_sent() -> None:
    kinds = {"a": (torch.Size([3]), torch.float32)}
    sent, _ = streamed(1, lambda end, _: dict(end.receive()), lambda end: end.send(kinds, {"b": torch.ones(3)}.items()))
    assert str(sent) == "b [3] comes where a [3] is planned"


def test_a_delivery_that_an_engine_did_not_take_is_given_up() -> None:
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

    sent, _ = streamed(1, lambda end, _: done.wait(10), send)
    assert str(sent) == "another engine did not take it"


def test_every_wait_has_a_deadline() -> None:
    weights, done = {"a": torch.ones(1_000_000)}, threading.Event()

    def send(end: WeightSender) -> Any:
        try:
            return end.send(kinds_of(weights), weights.items())
        finally:
            done.set()

    sent, _ = streamed(1, lambda end, _: done.wait(30), send, seconds=1.0)
    assert "nothing moved for 1 s" in str(sent)
    lonely = WeightSender(LOOPBACK, 1, seconds=1.0)
    with pytest.raises(StreamBroken, match="did not come together within 1 s"):
        lonely.join()
    with pytest.raises(StreamBroken, match=r"the trainer at 127.0.0.1:\d+ cannot be reached from here"):
        WeightReceiver(lonely.invitation, 1)


def test_where_the_trainer_is_found_depends_on_where_the_engines_are() -> None:
    assert own_address("127.0.0.1") == LOOPBACK
    with pytest.raises(OSError):
        own_address("no.such.host.invalid")


def test_a_program_may_end_while_a_bucket_is_under_way() -> None:
    program = f"""
import threading, time, torch
from espalier.sampling.weight_stream import WeightReceiver, WeightSender
sender = WeightSender("{LOOPBACK}", 1, seconds=3.0)
kept = []
threading.Thread(target=lambda: kept.append(WeightReceiver(sender.invitation, 1)), daemon=True).start()
sender.join()
sender.broadcast(torch.zeros(8))  # nobody takes it
sender.close()
time.sleep(0.5)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, env=environment, check=False).returncode == 0


def test_a_program_may_end_at_once_behind_a_delivery() -> None:
    """A group that is let go in another thread while the program ends would abort it."""
    program = f"""
import sys, threading, torch
from espalier.sampling import weight_stream as stream
sender = stream.WeightSender("{LOOPBACK}", 1, seconds=20.0)
def take():
    receiver = stream.WeightReceiver(sender.invitation, 1)
    list(receiver.receive())
    receiver.close()
taking = threading.Thread(target=take)
taking.start()
sender.join()
weights = {{"a": torch.ones(3)}}
sender.send(stream.kinds_of(weights), weights.items())
taking.join()
sender.close()
sys.exit(143)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(4)]
    assert [process.wait(120) for process in started] == [143] * 4
