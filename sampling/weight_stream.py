"""New weights on their way from a trainer to engines: tensors in buckets, along a chain of processes.

The trainer is rank 0, every worker of every engine is one rank more, and each end sends on to the next rank the
buckets that it reads: the trainer sends all once, however many engines there are. Engines may be on other machines,
which must reach the trainer and one another. First goes the plan, names and shapes and dtypes; then the bytes,
`BUCKET_BYTES` at a time. While a bucket is filled or read the one before is on its way, in the buffers of the
connections: the trainer holds one, an engine two, that which is read and the last one. A tensor that is larger than a
bucket is cut on its way; the end that reads it holds it whole beside them.

Where all ends are on one GPU, or on one machine, buckets lie in memory that they share (`sampling.shared_buckets`);
where each has a GPU of its own they go by NCCL (`sampling.group_buckets`). One byte for each then takes this way.

Buckets of a few megabytes stay in the processor's caches from the network to the digest and the engine. A collective
call of `torch.distributed` for each would cost more than the connection itself.
"""

import json
import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed

from espalier.sampling.group_buckets import CHOSEN_ON, GroupBuckets, group_place, is_group
from espalier.sampling.shared_buckets import NUM_SHARED, SharedBuckets, bucket_bytes_on, places_of
from espalier.sampling.weight_buckets import (
    BUCKET_BYTES,
    Bucket,
    HeldBuckets,
    Kinds,
    Packing,
    Sliced,
    Unpacking,
    buckets_of,
)
from espalier.sampling.weight_chain import GIVEN_UP, ChainEnd, Invitation, StreamBroken, line_of, open_door

log = logging.getLogger(__name__)
dist = cast(Any, torch.distributed)  # parts of it have no types
_SENT, _BROKEN_OFF = 1, 0  # last byte of a bucket
_TAKEN = "taken"  # the last offer
_LENGTH = 8  # bytes that say how long the plan is


class WeightSender(ChainEnd):
    """The trainer's end. `address`: where this machine is found; `num_receivers`: workers of all engines; `device`: of
    the weights, which are shared there where all workers are on the same one, else go by a group where each has a GPU
    of its own, else are shared on the CPU where all are on one machine (None: they go by connections).
    `bucket_bytes`: 0 for what suits the way. `may_group`: whether a group is tried; False behind one that failed."""

    def __init__(
        self,
        address: str,
        num_receivers: int,
        seconds: float = 120.0,
        bucket_bytes: int = 0,
        device: torch.device | None = None,
        may_group: bool = True,
    ):
        door = open_door(address)
        port, key = door.getsockname()[1], secrets.token_hex(8)
        super().__init__(Invitation(address, port, num_receivers + 1, seconds, key), 0)
        self.bucket_bytes = bucket_bytes
        self.device = device
        self.may_group = may_group
        self._door: socket.socket | None = door
        self._num_offers = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def way(self) -> str:
        """By what weights go, in words."""
        if self._group is not None:
            return f"a group by {self._group.backend}"
        return "connections" if self._shared is None else "memory that they share"

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
            self._agree(store)

    def _agree(self, store: Any) -> None:
        """Take the best way that all ends can: an offer is answered by every one, with what went wrong there."""
        for offer in self._offers([json.loads(self._learn(f"places/{rank}")) for rank in self._ends]):
            if not (failed := offer(store)):
                break
            self._let_go()
            log.warning("weights do not go by %s", failed)
        self.bucket_bytes = self.bucket_bytes or BUCKET_BYTES
        is_taken = self._group is not None or self._shared is not None
        self._tell(store, [_TAKEN if is_taken else None for _ in self._ends])
        self._answers()  # that they know

    @property
    def _ends(self) -> range:
        return range(1, self.invitation.world_size)

    def _offers(self, theirs: Sequence[Mapping[str, Any]]) -> Iterator[Callable[[Any], str]]:
        """Yield what all ends of these places could do, the best first."""
        places = places_of(self.device)
        shared = [device for place, device in places.items() if all(place in one["shared"] for one in theirs)]
        device = self.device if not any(one.type == "cuda" for one in shared) else None
        can_group = self.may_group and device is not None and device.type in CHOSEN_ON
        own = group_place(device) if can_group else None
        if device is not None and is_group([own, *(one["group"] for one in theirs)]):
            yield partial(self._offer_group, device=device)
        if shared:
            yield partial(self._offer_shared, device=shared[0])

    def _offer_group(self, store: Any, device: torch.device) -> str:
        mark, self.may_group = secrets.token_hex(16), False
        self._tell(store, [{"group": mark} for _ in self._ends])
        try:
            self._group = self._join_group(store, device, mark)
        except StreamBroken:
            raise
        except RuntimeError as error:
            self._answers()
            return f"a group: {line_of(error)}"
        if failed := self._answers():
            return f"a group: of an engine {failed[0]}"
        self.bucket_bytes, self.may_group = self.bucket_bytes or bucket_bytes_on(device), True
        return ""

    def _offer_shared(self, store: Any, device: torch.device) -> str:
        size, shared = self.bucket_bytes or bucket_bytes_on(device), None
        try:
            shared = SharedBuckets.make(device, size + 1)
            self._tell(store, [shared.handle() for _ in self._ends])
            failed = self._answers()
        except StreamBroken:
            raise
        except (OSError, RuntimeError) as error:  # no room, or an allocator whose memory nobody else can open
            return f"shared memory: {line_of(error)}"
        finally:
            if shared is not None:
                shared.hide()
        if failed:
            return f"shared memory: an engine cannot open it ({failed[0]})"
        self._shared, self.bucket_bytes = shared, size
        return ""

    def _tell(self, store: Any, offers: Sequence[Any]) -> None:
        """Make every end an offer, or say that the last one is taken, or that there is none."""
        for rank, offer in zip(self._ends, offers, strict=True):
            store.set(f"offer/{self._num_offers}/{rank}", json.dumps(offer))
        self._num_offers += 1

    def _answers(self) -> list[str]:
        """Return what went wrong at the ends with the last offer. Raises StreamBroken."""
        return [line for rank in self._ends if (line := self._learn(f"answer/{self._num_offers - 1}/{rank}"))]

    def send(self, kinds: Kinds, weights: Iterable[tuple[str, torch.Tensor | Sliced]]) -> dict[str, str]:
        """Send the weights, in the order of `kinds` and rounded to its dtypes, and return when all ends have read them;
        name → digest of what was sent.

        A tensor is asked for when its turn comes. Where that fails the receivers learn of it, and the error rises.
        Raises StreamBroken where one of them is gone.
        """
        rows = [[name, list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in kinds.items()]
        plan = {"bucket_bytes": self.bucket_bytes, "kinds": rows}
        line = json.dumps(plan).encode()
        self._write(memoryview(len(line).to_bytes(_LENGTH, "big") + line))
        buckets = buckets_of(kinds, self.bucket_bytes)
        if self._group is not None:
            return self._send_by_group(self._group, Packing(iter(weights), self._group.device), buckets)
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

    def _send_by_group(self, group: GroupBuckets, packing: Packing, buckets: Sequence[Bucket]) -> dict[str, str]:
        most = max((bucket.size for bucket in buckets), default=0)
        for number, bucket in enumerate(buckets):
            with self._in_group():
                memory = group.bucket(number, bucket.size, most)
            try:
                packing.fill(memory, bucket)
            except Exception:
                self._write(memoryview(bytes([_BROKEN_OFF])))
                raise
            self._write(memoryview(bytes([_SENT])))
            with self._in_group():
                group.send(memory)
        with self._in_group():
            group.finish()
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
            self._answer(store, device)

    def _answer(self, store: Any, device: torch.device | None) -> None:
        """Try what the trainer offers until it says what all can."""
        places = {"shared": [*places_of(device)], "group": group_place(device)}
        store.set(f"places/{self.rank}", json.dumps(places))
        number = 0
        while (offer := json.loads(self._learn(f"offer/{number}/{self.rank}"))) not in (None, _TAKEN):
            assert device is not None
            self._let_go()
            line = ""
            try:
                self._open(store, offer, device)
            except Exception as error:  # of CUDA, or of what a sandbox forbids
                line = line_of(error) or type(error).__name__
            store.set(f"answer/{number}/{self.rank}", line)
            number += 1
        if offer is None:
            self._let_go()
            self._held = HeldBuckets()
        store.set(f"answer/{number}/{self.rank}", "")

    def _open(self, store: Any, offer: dict[str, Any], device: torch.device) -> None:
        if "group" in offer:
            self._group = self._join_group(store, device, offer["group"])
        else:
            self._shared = SharedBuckets.open(offer, device)
        self._held = HeldBuckets(device if self._shared is None else self._shared.memory.device)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of one delivery; a tensor may be kept. Raises StreamBroken, and leaves the chain
        then."""
        try:
            yield from self._receive()
        except StreamBroken:
            self.close()  # its neighbours learn of it
            raise

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        length = bytearray(_LENGTH)
        self._read(memoryview(length))
        plan_bytes = bytearray(int.from_bytes(length, "big"))
        self._read(memoryview(plan_bytes))
        plan = json.loads(plan_bytes)
        kinds = {name: (torch.Size(shape), getattr(torch, dtype)) for name, shape, dtype in plan["kinds"]}
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
        if self._shared is None and self._group is None:
            self._read(buffer.numpy().data)
            last = int(buffer[-1])
        else:
            said = bytearray(1)
            self._read(memoryview(said))
            last = said[0]
        if last != _SENT:
            raise StreamBroken("the trainer broke off in the middle of a delivery")
        if self._group is not None:
            with self._in_group():
                self._group.take(buffer)
        elif self._shared is not None:
            buffer.copy_(self._shared.bucket(number, len(buffer)))
            self._shared.settle()

    def _read(self, bytes_: memoryview) -> None:
        """Fill it from the rank before, and send it on: all at once, as nearly always comes. Raises StreamBroken as
        `_write`."""
        while bytes_:
            num = self._read_into(self._before, bytes_, self.rank - 1)
            self._write(bytes_[:num])
            bytes_ = bytes_[num:]
