"""New weights on their way from a trainer to engines: tensors in buckets, along a chain of processes.

The trainer is rank 0, every worker of every engine is one rank more, and each end sends on to the next rank the
buckets that it reads: the trainer sends all once, however many engines there are. Engines may be on other machines,
which must reach the trainer and one another. First goes the plan, names and shapes and dtypes; then the bytes,
`BUCKET_BYTES` at a time. While a bucket is filled or read the one before is on its way, in the buffers of the
connections: the trainer holds one, an engine two, that which is read and the last one. A tensor that is larger than a
bucket is cut on its way; the end that reads it holds it whole beside them.

Where all ends are on one GPU, or on one machine, buckets lie in memory that they share (`sampling.shared_buckets`), and
one byte for each takes that way.

Buckets of a few megabytes stay in the processor's caches from the network to the digest and the engine. A collective
call of `torch.distributed` for each would cost more than the connection itself.
"""

import json
import logging
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

from espalier.sampling.shared_buckets import NUM_SHARED, Handle, SharedBuckets, bucket_bytes_on, places_of
from espalier.sampling.weight_buckets import (
    BUCKET_BYTES,
    Bucket,
    HeldBuckets,
    Kinds,
    Packing,
    Unpacking,
    buckets_of,
)
from espalier.sampling.weight_chain import GIVEN_UP, ChainEnd, Invitation, StreamBroken, line_of, open_door

log = logging.getLogger(__name__)
dist = cast(Any, torch.distributed)  # parts of it have no types
_SENT, _BROKEN_OFF = 1, 0  # last byte of a bucket
_LENGTH = 8  # bytes that say how long the plan is


class WeightSender(ChainEnd):
    """The trainer's end. `address`: where this machine is found; `num_receivers`: workers of all engines; `device`: of
    the weights, which are shared there where all workers are on the same one, else on the CPU where they are on one
    machine (None: they are not). `bucket_bytes`: 0 for what suits it."""

    def __init__(
        self,
        address: str,
        num_receivers: int,
        seconds: float = 120.0,
        bucket_bytes: int = 0,
        device: torch.device | None = None,
    ):
        door = open_door(address)
        port, key = door.getsockname()[1], secrets.token_hex(8)
        super().__init__(Invitation(address, port, num_receivers + 1, seconds, key), 0)
        self.bucket_bytes = bucket_bytes
        self.device = device
        self._door: socket.socket | None = door
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def is_shared(self) -> bool:
        """Whether weights stay on the device that all ends share."""
        return self._shared is not None

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
        with self._joining():
            self._share(store)

    def _share(self, store: Any) -> None:
        """Have all ends open the same buckets, where they are on one device and can."""
        ends = range(1, self.invitation.world_size)
        theirs = [json.loads(self._learn(f"places/{rank}")) for rank in ends]
        common = [device for place, device in places_of(self.device).items() if all(place in one for one in theirs)]
        shared: SharedBuckets | None = None
        handles: list[Handle | None] = [None for _ in ends]
        try:
            if common:
                size = self.bucket_bytes or bucket_bytes_on(common[0])
                shared = SharedBuckets.make(common[0], size + 1)
                handles = [shared.handle() for _ in ends]
        except (OSError, RuntimeError) as error:  # no room, or an allocator whose memory nobody else can open
            log.warning("weights take the way over connections: %s", line_of(error))
            handles = [None for _ in ends]
        try:
            for rank, handle in zip(ends, handles, strict=True):
                store.set(f"shared/{rank}", json.dumps(handle))
            failed = [line for rank in ends if (line := self._learn(f"opened/{rank}"))]
        finally:
            if shared is not None:
                shared.hide()
        if failed:
            log.warning("weights take the way over connections: an engine cannot share memory (%s)", failed[0])
        if shared is not None and all(handles) and not failed:
            self._shared, self.bucket_bytes = shared, size
        else:
            self.bucket_bytes = self.bucket_bytes or BUCKET_BYTES

    def send(self, kinds: Kinds, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """Send the weights, in the order of `kinds` and rounded to its dtypes, and return when all ends have read them;
        name → digest of what was sent.

        A tensor is asked for when its turn comes. Where that fails the receivers learn of it, and the error rises.
        Raises StreamBroken where one of them is gone.
        """
        rows = [[name, list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in kinds.items()]
        plan = {"bucket_bytes": self.bucket_bytes, "is_shared": self.is_shared, "kinds": rows}
        line = json.dumps(plan).encode()
        self._write(memoryview(len(line).to_bytes(_LENGTH, "big") + line))
        buckets = buckets_of(kinds, self.bucket_bytes)
        if self._shared is None:
            return self._send_bytes(Packing(iter(weights)), buckets)
        return self._fill_shared(self._shared, Packing(iter(weights), self._shared.memory.device), buckets)

    def _send_bytes(self, packing: Packing, buckets: Sequence[Bucket]) -> dict[str, str]:
        size = max((bucket.size for bucket in buckets), default=0)
        if size > len(self._buffer):
            self._buffer = torch.empty(size, dtype=torch.uint8)
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
        self._await_taken()
        return packing.digests

    def _fill_shared(self, shared: SharedBuckets, packing: Packing, buckets: Sequence[Bucket]) -> dict[str, str]:
        for number, bucket in enumerate(buckets):
            if number >= NUM_SHARED:
                self._await_taken()  # what is in this one now
            try:
                packing.fill(shared.bucket(number, bucket.size), bucket)
                shared.settle()
            except Exception:
                self._write(memoryview(bytes([_BROKEN_OFF])))
                raise
            self._write(memoryview(bytes([_SENT])))
        for _ in range(min(len(buckets), NUM_SHARED) or 1):
            self._await_taken()
        return packing.digests

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
    """A worker's end, which joins at once. `device`: the worker's, as the sender's. Raises StreamBroken."""

    def __init__(self, invitation: Invitation, rank: int, device: torch.device | None = None):
        super().__init__(invitation, rank)
        try:
            store = dist.TCPStore(
                invitation.address, invitation.port, is_master=False, timeout=timedelta(seconds=invitation.seconds)
            )
        except RuntimeError as error:
            raise StreamBroken(f"the trainer at {invitation.address}:{invitation.port} cannot be reached from here "
                               f"({line_of(error)})") from None  # fmt: skip
        self._held = HeldBuckets()
        self._join(store)
        with self._joining():
            self._open_shared(store, device)

    def _open_shared(self, store: Any, device: torch.device | None) -> None:
        store.set(f"places/{self.rank}", json.dumps([*places_of(device)]))
        handle, line = json.loads(self._learn(f"shared/{self.rank}")), ""
        try:
            if handle is not None:
                assert device is not None
                self._shared = SharedBuckets.open(handle, device)
                self._held = HeldBuckets(self._shared.memory.device)
        except Exception as error:  # of CUDA, or of what a sandbox forbids
            line = line_of(error) or type(error).__name__
        store.set(f"opened/{self.rank}", line)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of one delivery; a tensor may be kept. Raises StreamBroken, and leaves the chain
        then."""
        try:
            yield from self._receive()
        except StreamBroken:
            self.close()  # its neighbours learn of it
            raise

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        length, plan_bytes = bytearray(_LENGTH), bytearray()
        self._read(memoryview(length))
        plan_bytes = bytearray(int.from_bytes(length, "big"))
        self._read(memoryview(plan_bytes))
        plan = json.loads(plan_bytes)
        kinds = {name: (torch.Size(shape), getattr(torch, dtype)) for name, shape, dtype in plan["kinds"]}
        if self._shared is not None and not plan["is_shared"]:  # another end could not open it
            self._shared, self._held = None, HeldBuckets()
        buckets = buckets_of(kinds, plan["bucket_bytes"])
        self._held.reserve(max((bucket.size for bucket in buckets), default=0))
        unpacking = Unpacking()
        for number, bucket in enumerate(buckets):
            buffer = self._held.free(bucket.size)
            self._take(number, buffer)
            if self._shared is not None or number + 1 == len(buckets):
                self._say_taken()
            found = unpacking.tensors(buffer, bucket)
            del buffer
            yield from found
        if not buckets:
            self._say_taken()

    def _take(self, number: int, buffer: torch.Tensor) -> None:
        """Have a bucket in `buffer` [bytes]. Raises StreamBroken."""
        if self._shared is None:
            self._read(buffer.numpy().data)
            last = int(buffer[-1])
        else:
            said = bytearray(1)
            self._read(memoryview(said))
            last = said[0]
        if last != _SENT:
            raise StreamBroken("the trainer broke off in the middle of a delivery")
        if self._shared is not None:
            buffer.copy_(self._shared.bucket(number, len(buffer)))
            self._shared.settle()

    def _read(self, bytes_: memoryview) -> None:
        """Fill it from the rank before, and send it on: all at once, as nearly always comes. Raises StreamBroken as
        `_write`."""
        while bytes_:
            num = self._read_into(self._before, bytes_, self.rank - 1)
            self._write(bytes_[:num])
            bytes_ = bytes_[num:]
