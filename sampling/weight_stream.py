"""New weights on their way from a trainer to engines: tensors in buckets, over a group of processes of their own.

The trainer is rank 0 of a `torch.distributed` group that nothing else uses (gloo, also on GPUs), every worker of
every engine is one rank more: engines may be on other machines, which must reach the trainer and
one another. First goes the plan, names and shapes and dtypes; then the bytes, `BUCKET_BYTES` at a time. One bucket is
filled while those before are under way, and read while the next two come, so that the way is never empty: no end holds
more than `NUM_HELD` of them. A tensor that is larger than a bucket is cut on its way; the end that reads it holds
it whole beside them, and no other end does.

Who listens trusts who can reach it: like NCCL and gloo themselves, it is for networks of one's own.
"""

import ctypes
import ipaddress
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed

from espalier.sampling.client import LOOPBACK
from espalier.sampling.weight_buckets import BUCKET_BYTES, NUM_HELD, HeldBuckets, Kinds, Packing, Unpacking, buckets_of

dist = cast(Any, torch.distributed)  # parts of it have no types
_GLANCE = timedelta(seconds=0.5)  # between two looks whether it was given up
_GIVEN_UP = "given up"  # where the group meets
_SENT, _BROKEN_OFF = 1, 0  # last byte of a bucket


class StreamBroken(RuntimeError):
    """Weights do not get through."""


@dataclass(frozen=True)
class Invitation:
    """Where the group meets; what every rank of it must know. `seconds`: the longest wait for the others, to join or
    for a bucket. `key` is of this group alone."""

    address: str
    port: int
    world_size: int
    seconds: float
    key: str

    def as_dict(self) -> dict[str, Any]:
        """Return what an engine can be sent."""
        return asdict(self)


def own_address(host: str) -> str:
    """Return the address by which this machine is seen from `host`; that of the loopback where `host` is this machine
    by such a name. Raises OSError where there is no way to it."""
    family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting one sends nothing
        probe.connect(place)
        found = str(probe.getsockname()[0])
    return LOOPBACK if ipaddress.ip_address(found.partition("%")[0]).is_loopback else found


class _End:
    """One rank of the group."""

    def __init__(self, invitation: Invitation, rank: int):
        self.invitation, self.rank = invitation, rank
        self._store: Any = None
        self._group: Any = None
        self._under_way: list[Any] = []

    def _join(self, store: Any) -> None:
        """Return when all have joined. Raises StreamBroken."""
        invitation = self.invitation
        self._store = store
        try:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=invitation.seconds)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(invitation.address))]
            prefixed = dist.PrefixStore("weights", store)
            self._group = dist.ProcessGroupGloo(prefixed, self.rank, invitation.world_size, options)
        except (RuntimeError, OSError) as error:
            self.close()
            raise StreamBroken(f"the group for weights at {invitation.address}:{invitation.port} did not come together "
                               f"within {invitation.seconds:g} s ({_line(error)})") from None  # fmt: skip

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to send a tensor from rank 0 to all others, into theirs; return what `wait` waits for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        try:
            work = self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise StreamBroken(_line(error)) from None
        self._under_way = [*(one for one in self._under_way if not one.is_completed()), work]
        return work

    def wait(self, work: Any) -> None:
        """Return when it is done. Raises StreamBroken where another end is gone or given up, or the time is over."""
        deadline = time.monotonic() + self.invitation.seconds
        while True:
            try:
                work.wait(_GLANCE)
            except RuntimeError as error:
                if work.is_completed() and "timed out" not in str(error).lower():
                    raise StreamBroken(_line(error)) from None
                self._check_others()
                if time.monotonic() > deadline:
                    raise StreamBroken(f"nothing moved for {self.invitation.seconds:g} s") from None
                continue
            self._under_way = [one for one in self._under_way if one is not work]  # it holds its tensor
            return

    def _check_others(self) -> None:
        """Raise StreamBroken where somebody gave this delivery up: an operation under way cannot be taken back, and the
        others wait for it."""
        try:
            is_given_up = self._store.check([_GIVEN_UP])
        except RuntimeError:
            raise StreamBroken("the trainer is gone") from None
        if is_given_up:
            raise StreamBroken("another engine did not take it")

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and not all(work.is_completed() for work in self._under_way):
            # Its end would wait for them in C++, and a program that ends meanwhile be aborted: it is kept instead.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group, self._store, self._under_way = None, None, []


class WeightSender(_End):
    """The trainer's end. `address`: where this machine is found; `num_receivers`: workers of all engines."""

    def __init__(self, address: str, num_receivers: int, seconds: float = 120.0, bucket_bytes: int = BUCKET_BYTES):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        door = socket.create_server((address, 0), family=family)
        port, key = door.getsockname()[1], secrets.token_hex(8)
        super().__init__(Invitation(address, port, num_receivers + 1, seconds, key), 0)
        self.bucket_bytes = bucket_bytes
        self._door: socket.socket | None = door
        self._held = [torch.empty(0, dtype=torch.uint8)] * NUM_HELD

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
        """Send the weights, in the order of `kinds` and rounded to its dtypes; name → digest of what was sent.

        A tensor is asked for when its turn comes. Where that fails the receivers learn of it, and the error rises.
        Raises StreamBroken where one of them is gone.
        """
        rows = [[name, list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in kinds.items()]
        plan = json.dumps({"bucket_bytes": self.bucket_bytes, "kinds": rows}).encode()
        self.wait(self.broadcast(torch.tensor([len(plan)])))
        self.wait(self.broadcast(torch.frombuffer(bytearray(plan), dtype=torch.uint8)))
        buckets = buckets_of(kinds, self.bucket_bytes)
        size = max((bucket.size for bucket in buckets), default=0)
        if size > len(self._held[0]):
            self._held = [torch.empty(size, dtype=torch.uint8) for _ in range(NUM_HELD)]
        packing, under_way = Packing(iter(weights)), deque[Any]()
        for number, bucket in enumerate(buckets):
            buffer = self._held[number % NUM_HELD][: bucket.size]
            try:
                packing.pack(buffer, bucket)
            except Exception:
                buffer[-1] = _BROKEN_OFF
                self._wait_all([*under_way, self.broadcast(buffer)])
                raise
            buffer[-1] = _SENT
            under_way.append(self.broadcast(buffer))
            if len(under_way) == NUM_HELD:
                self.wait(under_way.popleft())
        self._wait_all(under_way)
        return packing.digests

    def _wait_all(self, under_way: Iterable[Any]) -> None:
        for work in under_way:
            self.wait(work)

    def give_up(self) -> None:
        """Have all who wait for the rest of a delivery end with StreamBroken, a `send` in another thread too; the group
        is of no more use."""
        if self._store is not None:
            self._store.set(_GIVEN_UP, "")

    def close(self) -> None:
        """Leave the group, or do not wait for it any more."""
        super().close()
        if self._door is not None:
            self._door.close()


class WeightReceiver(_End):
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
                               f"({_line(error)})") from None  # fmt: skip
        self._join(store)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of one delivery; a tensor may be kept. Raises StreamBroken."""
        size = torch.zeros(1, dtype=torch.int64)
        self.wait(self.broadcast(size))
        packed = torch.zeros(int(size), dtype=torch.uint8)
        self.wait(self.broadcast(packed))
        plan = json.loads(bytes(packed.tolist()))
        kinds = {name: (torch.Size(shape), getattr(torch, dtype)) for name, shape, dtype in plan["kinds"]}
        buckets = buckets_of(kinds, plan["bucket_bytes"])
        self._held.reserve(max((bucket.size for bucket in buckets), default=0))
        following, coming = iter(buckets), deque[tuple[torch.Tensor, Any]]()

        def expect(number: int) -> None:
            for bucket in islice(following, number):
                buffer = self._held.free(bucket.size)
                coming.append((buffer, self.broadcast(buffer)))

        expect(NUM_HELD - 1)
        unpacking = Unpacking()
        for bucket in buckets:
            buffer, work = coming.popleft()
            self.wait(work)
            if int(buffer[-1]) != _SENT:
                raise StreamBroken("the trainer broke off in the middle of a delivery")
            found = unpacking.tensors(buffer, bucket)
            del buffer, work
            yield from islice(found, 1)
            expect(1)  # who reads has let go of the bucket before only now
            yield from found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
