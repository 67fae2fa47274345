"""A chain of processes: a trainer, and one end for each worker of its engines, each connected to the next.

What the trainer sends every end sends on to the next one as it comes: the trainer sends all once, however many engines
there are. The ends find one another by a store of the trainer's, which also says whether a delivery was given up.

Who listens trusts who can reach it: like NCCL and gloo, it is for networks of one's own.
"""

import ipaddress
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from espalier.sampling.client import LOOPBACK
from espalier.sampling.group_buckets import GroupBuckets
from espalier.sampling.shared_buckets import SharedBuckets

GLANCE = timedelta(seconds=0.5)  # between two looks whether it was given up
GIVEN_UP = "given up"  # in the store
_TAKEN = b"\1"
_KEY_SECONDS = 5.0  # in which who comes in has to show the key


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


class ChainEnd:
    """One rank of the chain."""

    def __init__(self, invitation: Invitation, rank: int):
        self.invitation, self.rank = invitation, rank
        self._store: Any = None
        self._before: socket.socket | None = None
        self._behind: socket.socket | None = None
        self._shared: SharedBuckets | None = None  # where weights stay on a device that all ends share
        self._group: GroupBuckets | None = None  # where they go from device to device

    def _join(self, store: Any) -> None:
        """Return when this end has its neighbours, rank 0 when all ends have theirs. Raises StreamBroken."""
        invitation, rank = self.invitation, self.rank
        self._store = store
        deadline = time.monotonic() + invitation.seconds
        with self._joining():
            if rank > 0:
                door = open_door(own_address(invitation.address))
                store.set(f"door/{rank}", json.dumps(door.getsockname()[:2]))
            if rank + 1 < invitation.world_size:
                self._behind = _reach(json.loads(store.get(f"door/{rank + 1}")), invitation)
            if rank > 0:
                with door:
                    self._before = _admit(door, invitation.key.encode(), deadline)
                store.set(f"joined/{rank}", "")
            else:
                store.wait([f"joined/{other}" for other in range(1, invitation.world_size)])

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Raise StreamBroken where the others do not come."""
        invitation = self.invitation
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.close()
            raise StreamBroken(f"the group for weights at {invitation.address}:{invitation.port} did not come together "
                               f"within {invitation.seconds:g} s ({line_of(error)})") from None  # fmt: skip

    def _write(self, bytes_: memoryview) -> None:
        """Send to the next rank, if there is one. Raises StreamBroken where it is gone, the delivery was given up, or
        nothing moves."""
        behind, moved = self._behind, time.monotonic()
        while bytes_ and behind is not None:
            try:
                bytes_ = bytes_[behind.send(bytes_) :]
                moved = time.monotonic()
            except BlockingIOError:
                self._check_others(moved)
            except OSError as error:
                raise StreamBroken(f"rank {self.rank + 1} is gone ({line_of(error)})") from None

    def _learn(self, key: str) -> str:
        """Return what another end says in the store. Raises StreamBroken as `_write`, and where a neighbour is gone."""
        began = time.monotonic()
        while True:
            try:
                self._store.wait([key], GLANCE)
                return str(self._store.get(key).decode())
            except (RuntimeError, AttributeError):
                self._check_others(began)
                for connection in filter(None, (self._before, self._behind)):
                    if _is_closed(connection):
                        raise StreamBroken("another end is gone") from None

    def _read_into(self, connection: socket.socket | None, bytes_: memoryview, whose: int) -> int:
        """Return how many bytes came of rank `whose`: all of them, or those of a glance, one at least. Raises
        StreamBroken as `_write`."""
        moved = time.monotonic()
        while connection is not None:
            try:
                num = connection.recv_into(bytes_, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self._check_others(moved)
                continue
            except OSError as error:
                raise StreamBroken(f"rank {whose} is gone ({line_of(error)})") from None
            if num == 0:
                raise StreamBroken(f"rank {whose} is gone")
            return num
        raise StreamBroken("this end has left its group")

    def _await_taken(self) -> None:
        """Return when all behind have taken what was sent to them. Raises StreamBroken as `_write`."""
        if self.rank + 1 < self.invitation.world_size:
            self._read_into(self._behind, memoryview(bytearray(1)), self.rank + 1)

    def _say_taken(self) -> None:
        """Let the rank before know that this one and all behind it have taken what was sent. Raises StreamBroken."""
        self._await_taken()
        try:
            if self._before is not None:
                self._before.sendall(_TAKEN)
        except OSError as error:
            raise StreamBroken(f"rank {self.rank - 1} is gone ({line_of(error)})") from None

    def _check_others(self, moved: float) -> None:
        """Raise StreamBroken where somebody gave this delivery up, or nothing has moved since then for too long."""
        try:
            is_given_up = self._store.check([GIVEN_UP])
        except (RuntimeError, AttributeError):
            raise StreamBroken("the trainer is gone") from None
        if is_given_up:
            raise StreamBroken("another engine did not take it")
        if time.monotonic() - moved > self.invitation.seconds:
            raise StreamBroken(f"nothing moved for {self.invitation.seconds:g} s")

    def close(self) -> None:
        """Leave the chain, which breaks it."""
        for connection in filter(None, (self._before, self._behind)):
            connection.close()
        self._let_go()
        self._before, self._behind, self._store = None, None, None

    def _join_group(self, store: Any, device: torch.device, mark: str) -> GroupBuckets:
        """Return this end of a group of devices. Raises RuntimeError where the others do not come."""
        invitation = self.invitation
        return GroupBuckets.joined(store, self.rank, invitation.world_size, device, own_address(invitation.address),
                                   self._check_others, mark, invitation.seconds / 3)  # fmt: skip

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """Raise StreamBroken where the group breaks."""
        try:
            yield
        except StreamBroken:
            raise
        except RuntimeError as error:
            raise StreamBroken(f"the group that weights go by broke ({line_of(error)})") from None

    def _let_go(self) -> None:
        """Have no other way for weights than the connections."""
        group, self._shared, self._group = self._group, None, None
        if group is not None:
            group.close()


def _is_closed(connection: socket.socket) -> bool:
    """Say whether nothing will come of the other side any more."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def open_door(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _reach(place: Sequence[Any], invitation: Invitation) -> socket.socket:
    """Return a connection to the door of the next rank, which knows this group by its key."""
    connection = socket.create_connection((place[0], place[1]), timeout=invitation.seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(invitation.key.encode())
    _wait_in_kernel(connection)
    return connection


def _admit(door: socket.socket, key: bytes, deadline: float) -> socket.socket:
    """Return the connection of the rank before, by the key of the group: others are turned away. Raises OSError."""
    while True:
        door.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = door.accept()
        connection.settimeout(_KEY_SECONDS)
        shown = b""
        with suppress(OSError):
            while len(shown) < len(key) and (more := connection.recv(len(key) - len(shown))):
                shown += more
        if secrets.compare_digest(shown, key):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is taken is said in a byte
            _wait_in_kernel(connection)
            return connection
        connection.close()


def _wait_in_kernel(connection: socket.socket) -> None:
    """Have each call wait there, a glance at most (BlockingIOError): for a timeout of its own Python asks the kernel
    before every call, and comes back for every little that moves."""
    connection.settimeout(None)
    glance = struct.pack("ll", 0, int(GLANCE.total_seconds() * 1e6))  # a struct timeval
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, way, glance)


def line_of(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
