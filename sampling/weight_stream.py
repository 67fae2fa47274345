"""New weights on their way from a trainer to engines: tensors in buckets, over a group of processes of their own.

The trainer is rank 0 of a `torch.distributed` group that nothing else uses (gloo; NCCL where every end has a GPU of its
own), every worker of every engine is one rank more: engines may be on other machines, which must reach the trainer and
one another. First goes the plan, names and shapes and dtypes; then the bytes, `BUCKET_BYTES` at a time. One bucket is
filled while the one before is under way, and read while the next one comes: no end holds more than two (and, where a
tensor is larger than a bucket, two of those).

Who listens trusts who can reach it: like NCCL and gloo themselves, it is for networks of one's own.
"""

import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed
import xxhash

dist = cast(Any, torch.distributed)  # parts of it have no types
BUCKET_BYTES = 64 * 2**20
_ALIGNED = 16  # bytes: any dtype may begin there
_GLANCE = timedelta(seconds=0.5)  # between two looks whether it was given up
_GIVEN_UP = "given up"  # where the group meets
_SENT, _BROKEN_OFF = 1, 0  # last byte of a bucket

Kinds = Mapping[str, tuple[torch.Size, torch.dtype]]


class StreamBroken(RuntimeError):
    """Weights do not get through."""


@dataclass(frozen=True)
class Invitation:
    """Where the group meets; what every rank of it must know. `seconds`: the longest wait for the others, to join or
    for a bucket."""

    address: str
    port: int
    world_size: int
    backend: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return what an engine can be sent."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """One tensor in a bucket, from byte `start`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the buffer [bytes]."""
        size = self.shape.numel() * self.dtype.itemsize
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """`size`: bytes, the last one of which says whether the rest is good."""

    entries: list[Entry]
    size: int


def buckets_of(kinds: Kinds, limit: int) -> list[Bucket]:
    """Return the buckets that hold these tensors in their order: at most `limit` bytes of tensors in each, or one."""
    found: list[Bucket] = []
    entries: list[Entry] = []
    end = 0
    for name, (shape, dtype) in kinds.items():
        size = shape.numel() * dtype.itemsize
        start = -(-end // _ALIGNED) * _ALIGNED
        if entries and start + size > limit:
            found.append(Bucket(entries, end + 1))
            entries, start = [], 0
        entries.append(Entry(name, shape, dtype, start))
        end = start + size
    return [*found, Bucket(entries, end + 1)] if entries else found


def kinds_of(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Kinds:
    """Return the shapes and dtypes that weights are sent in: floating-point ones in `dtype`, as an engine of that dtype
    rounds what it reads (None: as they are); the few that some networks keep in float32 there (routers' biases) too."""
    return {
        name: (value.shape, dtype if dtype is not None and value.is_floating_point() else value.dtype)
        for name, value in weights.items()
    }


def digest(tensor: torch.Tensor) -> str:
    """Return 32 hex digits of XXH3 of the bytes of a tensor [...]: as fast as memory is read (SHA-256 of a large
    policy takes longer than all the rest of a delivery)."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def own_address(host: str) -> str:
    """Return the address by which this machine is seen from `host`; that of the loopback where `host` is this machine
    by such a name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting one sends nothing
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def device_of(device: torch.device) -> str:
    """Return what tells a worker's device from every other: "cpu", or a GPU's own number."""
    return "cpu" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def backend_for(devices: Iterable[str]) -> str:
    """Return "nccl" where every end has a GPU of its own, else "gloo"."""
    found = list(devices)
    return "nccl" if "cpu" not in found and len(set(found)) == len(found) else "gloo"


class _End:
    """One rank of the group."""

    def __init__(self, invitation: Invitation, rank: int, device: torch.device):
        self.invitation, self.rank = invitation, rank
        self.device = device if invitation.backend == "nccl" else torch.device("cpu")
        self._store: Any = None
        self._group: Any = None

    def _join(self, store: Any) -> None:
        """Return when all have joined. Raises StreamBroken."""
        invitation, deadline = self.invitation, timedelta(seconds=self.invitation.seconds)
        self._store = store
        prefixed = dist.PrefixStore("weights", store)
        try:
            if invitation.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = deadline
                self._group = dist.ProcessGroupNCCL(prefixed, self.rank, invitation.world_size, options)
                return
            options = dist.ProcessGroupGloo._Options()
            options._timeout = deadline
            own = own_address(invitation.address)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
            self._group = dist.ProcessGroupGloo(prefixed, self.rank, invitation.world_size, options)
        except RuntimeError as error:
            self.close()
            raise StreamBroken(f"the group for weights at {invitation.address}:{invitation.port} did not come together "
                               f"within {invitation.seconds:g} s ({_line(error)})") from None  # fmt: skip

    def _start(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise StreamBroken(_line(error)) from None

    def _wait(self, work: Any) -> None:
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
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
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
        self._group = self._store = None


class WeightSender(_End):
    """The trainer's end. `address`: where this machine is found; `num_receivers`: workers of all engines."""

    def __init__(
        self,
        address: str,
        num_receivers: int,
        device: torch.device,
        backend: str = "gloo",
        seconds: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        door = socket.create_server((address, 0))
        invitation = Invitation(address, door.getsockname()[1], num_receivers + 1, backend, seconds)
        super().__init__(invitation, 0, device)
        self.bucket_bytes = bucket_bytes
        self._door: socket.socket | None = door
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

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

        A tensor is asked for when its turn comes. Where that fails the receivers are told, and the error rises. Raises
        StreamBroken where one of them is gone.
        """
        rows = [[name, list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in kinds.items()]
        plan = json.dumps({"bucket_bytes": self.bucket_bytes, "kinds": rows}).encode()
        self._wait(self._start(torch.tensor([len(plan)], device=self.device)))
        self._wait(self._start(torch.frombuffer(bytearray(plan), dtype=torch.uint8).to(self.device)))
        digests: dict[str, str] = {}
        source, under_way = iter(weights), None
        for number, bucket in enumerate(buckets_of(kinds, self.bucket_bytes)):
            buffer = self._buffer(number % 2, bucket.size)
            try:
                self._fill(buffer, bucket, source, digests)
            except Exception:
                buffer[-1] = _BROKEN_OFF
                for work in filter(None, [under_way, self._start(buffer)]):
                    self._wait(work)
                raise
            started = self._start(buffer)
            if under_way is not None:
                self._wait(under_way)
            under_way = started
        if under_way is not None:
            self._wait(under_way)
        return digests

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

    def _buffer(self, number: int, size: int) -> torch.Tensor:
        if len(self._buffers[number]) < size:
            self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffers[number][:size]

    @staticmethod
    def _fill(
        buffer: torch.Tensor, bucket: Bucket, source: Iterator[tuple[str, torch.Tensor]], digests: dict[str, str]
    ) -> None:
        for entry in bucket.entries:
            name, value = next(source)
            if name != entry.name or value.shape != entry.shape:
                raise ValueError(f"{name} {list(value.shape)} comes where {entry.name} {list(entry.shape)} is planned")
            slot = entry.view(buffer)
            slot.copy_(value.detach())
            digests[name] = digest(slot)
        buffer[-1] = _SENT


class WeightReceiver(_End):
    """A worker's end, which joins at once. Raises StreamBroken."""

    def __init__(self, invitation: Invitation, rank: int, device: torch.device):
        super().__init__(invitation, rank, device)
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
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._wait(self._start(size))
        packed = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        self._wait(self._start(packed))
        plan = json.loads(bytes(packed.tolist()))
        kinds = {name: (torch.Size(shape), getattr(torch, dtype)) for name, shape, dtype in plan["kinds"]}
        buckets = buckets_of(kinds, plan["bucket_bytes"])
        coming = [self._expect(bucket) for bucket in buckets[:1]]
        for number, bucket in enumerate(buckets):
            buffer, work = coming.pop()
            self._wait(work)
            if number + 1 < len(buckets):
                coming.append(self._expect(buckets[number + 1]))
            if int(buffer[-1]) != _SENT:
                raise StreamBroken("the trainer broke off in the middle of a delivery")
            for entry in bucket.entries:
                yield entry.name, entry.view(buffer)
            del buffer

    def _expect(self, bucket: Bucket) -> tuple[torch.Tensor, Any]:
        buffer = torch.empty(bucket.size, dtype=torch.uint8, device=self.device)
        return buffer, self._start(buffer)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
