"""New weights on their way from a trainer to engines: tensors in buckets, along a chain of processes.

The trainer is rank 0, every worker of every engine is one rank more, and each end sends on to the next rank what it
reads, as it comes: the trainer sends all once, however many engines there are. Engines may be on other machines,
which must reach the trainer and one another. First goes the plan, names and shapes and dtypes; then the bytes,
`BUCKET_BYTES` at a time. While a bucket is filled or read the one before is on its way, in the buffers of the
connections: the trainer holds one, an engine two, that which is read and the last one. A tensor that is larger than a
bucket is cut on its way; the end that reads it holds it whole beside them.

Buckets of a few megabytes stay in the processor's caches from the network to the digest and the engine. A collective
call of `torch.distributed` for each would cost more than the connection itself.
"""

import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

from espalier.sampling.weight_buckets import BUCKET_BYTES, HeldBuckets, Kinds, Packing, Unpacking, buckets_of
from espalier.sampling.weight_chain import GIVEN_UP, GLANCE, ChainEnd, Invitation, StreamBroken, line_of, open_door

dist = cast(Any, torch.distributed)  # parts of it have no types
_SENT, _BROKEN_OFF = 1, 0  # last byte of a bucket
_LENGTH = 8  # bytes that say how long the plan is
_PIECE = 2**20  # bytes that are sent on at once


class WeightSender(ChainEnd):
    """The trainer's end. `address`: where this machine is found; `num_receivers`: workers of all engines."""

    def __init__(self, address: str, num_receivers: int, seconds: float = 120.0, bucket_bytes: int = BUCKET_BYTES):
        door = open_door(address)
        port, key = door.getsockname()[1], secrets.token_hex(8)
        super().__init__(Invitation(address, port, num_receivers + 1, seconds, key), 0)
        self.bucket_bytes = bucket_bytes
        self._door: socket.socket | None = door
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def join(self) -> None:
        """Return when all have joined. Raises StreamBroken."""
        assert self._door is not None
        invitation, door = self.invitation, self._door
        store = dist.TCPStore(
            invitation.address, invitation.port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=invitation.seconds), master_listen_fd=door.detach(),
        )  # fmt: skip
        self._door = None
        self._join(store)

    def send(self, kinds: Kinds, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """Send the weights, in the order of `kinds` and rounded to its dtypes, and return when all ends have read them;
        name → digest of what was sent.

        A tensor is asked for when its turn comes. Where that fails the receivers learn of it, and the error rises.
        Raises StreamBroken where one of them is gone.
        """
        self._num_deliveries += 1
        rows = [[name, list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in kinds.items()]
        plan = json.dumps({"bucket_bytes": self.bucket_bytes, "kinds": rows}).encode()
        self._write(memoryview(len(plan).to_bytes(_LENGTH, "big") + plan))
        buckets = buckets_of(kinds, self.bucket_bytes)
        size = max((bucket.size for bucket in buckets), default=0)
        if size > len(self._buffer):
            self._buffer = torch.empty(size, dtype=torch.uint8)
        packing = Packing(iter(weights))
        for bucket in buckets:
            buffer = self._buffer[: bucket.size]
            buffer[-1] = _SENT
            try:
                for piece in packing.pieces(buffer, bucket):
                    self._write(piece)
            except StreamBroken:
                raise
            except Exception:
                buffer[-1] = _BROKEN_OFF
                self._write(buffer[packing.num_given :].numpy().data)
                raise
        self._wait_for_all()
        return packing.digests

    def _wait_for_all(self) -> None:
        ends = range(1, self.invitation.world_size)
        sent = time.monotonic()
        while True:
            try:
                self._store.wait([f"read/{self._num_deliveries}/{rank}" for rank in ends], GLANCE)
                return
            except (RuntimeError, AttributeError):
                self._check_neighbour()
                self._check_others(sent)

    def _check_neighbour(self) -> None:
        """Raise StreamBroken where the next rank has closed its connection: nothing ever comes from there."""
        if self._behind is None:
            raise StreamBroken("this end was closed")
        self._behind.setblocking(False)
        try:
            self._behind.recv(1)
        except BlockingIOError:
            self._behind.settimeout(GLANCE.total_seconds())
            return
        except OSError:
            pass
        raise StreamBroken("rank 1 is gone")

    def give_up(self) -> None:
        """Have all who wait for the rest of a delivery end with StreamBroken, a `send` in another thread too; the group
        is of no more use."""
        if self._store is not None:
            self._store.set(GIVEN_UP, "")

    def close(self) -> None:
        """Leave the chain, or do not wait for it any more."""
        super().close()
        if self._door is not None:
            self._door.close()


class WeightReceiver(ChainEnd):
    """A worker's end, which joins at once. Raises StreamBroken."""

    def __init__(self, invitation: Invitation, rank: int):
        super().__init__(invitation, rank)
        self._held = HeldBuckets()
        try:
            store = dist.TCPStore(
                invitation.address, invitation.port, is_master=False, timeout=timedelta(seconds=invitation.seconds)
            )
        except RuntimeError as error:
            raise StreamBroken(f"the trainer at {invitation.address}:{invitation.port} cannot be reached from here "
                               f"({line_of(error)})") from None  # fmt: skip
        self._join(store)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of one delivery; a tensor may be kept. Raises StreamBroken, and leaves the chain
        then."""
        try:
            yield from self._receive()
        except StreamBroken:
            self.close()  # its neighbours learn of it
            raise

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._num_deliveries += 1
        length, plan_bytes = bytearray(_LENGTH), bytearray()
        self._read(memoryview(length))
        plan_bytes = bytearray(int.from_bytes(length, "big"))
        self._read(memoryview(plan_bytes))
        plan = json.loads(plan_bytes)
        kinds = {name: (torch.Size(shape), getattr(torch, dtype)) for name, shape, dtype in plan["kinds"]}
        buckets = buckets_of(kinds, plan["bucket_bytes"])
        self._held.reserve(max((bucket.size for bucket in buckets), default=0))
        unpacking = Unpacking()
        for number, bucket in enumerate(buckets, start=1):
            buffer = self._held.free(bucket.size)
            self._read(buffer.numpy().data)
            if int(buffer[-1]) != _SENT:
                raise StreamBroken("the trainer broke off in the middle of a delivery")
            if number == len(buckets):
                self._say_read()
            found = unpacking.tensors(buffer, bucket)
            del buffer
            yield from found
        if not buckets:
            self._say_read()

    def _say_read(self) -> None:
        try:
            self._store.set(f"read/{self._num_deliveries}/{self.rank}", "")
        except RuntimeError:
            raise StreamBroken("the trainer is gone") from None

    def _read(self, bytes_: memoryview) -> None:
        """Fill it from the rank before, and send it on as it comes. Raises StreamBroken as `_write`."""
        if self._before is None:
            raise StreamBroken("this end has left its group")
        moved = time.monotonic()
        while bytes_:
            try:
                num = self._before.recv_into(bytes_[:_PIECE])
            except TimeoutError:
                self._check_others(moved)
                continue
            except OSError as error:
                raise StreamBroken(f"rank {self.rank - 1} is gone ({line_of(error)})") from None
            if num == 0:
                raise StreamBroken(f"rank {self.rank - 1} is gone")
            self._write(bytes_[:num])
            bytes_, moved = bytes_[num:], time.monotonic()
