"""Buckets of weights that go by collective calls from the trainer's device to those of all engines: by NCCL between
GPUs, over NVLink or InfiniBand where there are such, without a copy in a machine's memory.

The group is made as the ends join (`sampling.weight_stream`), and tried at once: where one of them cannot come in,
weights take another way. NCCL wants a GPU for each end. Every wait is this side's own, with a deadline, and torch's
watchdog of NCCL is not there. On CPUs gloo can do the same, which costs more than connections (`sampling.weight_chain`)
and is chosen by tests and rehearsals alone.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

from espalier.sampling.shared_buckets import NUM_SHARED

log = logging.getLogger(__name__)
dist = cast(Any, torch.distributed)  # parts of it have no types
CHOSEN_ON = {"cuda"}
"""Kinds of the trainer's device on which weights go by a group where nothing nearer is shared."""
_GLANCE = 0.5  # seconds between two looks whether the delivery was given up
_TURN = 5e-5  # seconds between two looks whether a bucket has come
_AFTER = 12  # times the seconds in which it has to come together, in which gloo gives up: the ends give up before
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

Place = dict[str, str]
"""By what a process finds others for such a group: the `backend`, and the `unit` that it computes on."""


def group_place(device: torch.device | None) -> Place | None:
    """Return this process' place in a group of its device; None where there is none."""
    if device is None:
        return None
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return {"backend": "nccl", "unit": uuid} if dist.is_nccl_available() else None
    return {"backend": "gloo", "unit": secrets.token_hex(8)} if dist.is_gloo_available() else None


def is_group(places: list[Place | None]) -> bool:
    """Say whether processes of these places can make a group: by one backend, and no two on the same unit."""
    found = [place for place in places if place is not None]
    is_alike = len({place["backend"] for place in found}) == 1
    return len(found) == len(places) and is_alike and len({place["unit"] for place in found}) == len(found)


class GroupBuckets:
    """One end of the group. `address`: of this machine, for gloo; `check`: raises where a delivery is over, given the
    moment since which nothing has moved (`time.monotonic`); `seconds`: in which all come in."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, address: str,
                 check: Callable[[float], None], seconds: float):  # fmt: skip
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._check = check
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._works: deque[Any] = deque()
        self._options = dist.BroadcastOptions()
        self._options.timeout = timedelta(seconds=seconds)
        # a connection of its own: one that waits in it would keep all others waiting
        store = dist.PrefixStore("buckets", store.clone())
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds)  # that leaving may take
            with _without_watchdog():
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=_AFTER * seconds)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)

    @classmethod
    def joined(cls, store: Any, rank: int, size: int, device: torch.device, address: str,
               check: Callable[[float], None], mark: str, seconds: float) -> "GroupBuckets":  # fmt: skip
        """Return this end of a group in which a `mark` of the trainer's came to all. Raises RuntimeError where it does
        not within `seconds`, and what `check` raises: what still waits for the others is left to itself."""
        began, made, errors = time.monotonic(), list[GroupBuckets](), list[Exception]()
        is_good, is_over = threading.Event(), threading.Event()

        def join() -> None:
            try:
                end = cls(store, rank, size, device, address, check, seconds)
                made.append(end)
                if is_over.is_set():  # too late for whoever waited: nobody else leaves it
                    end.close()
                    return
                with _own_stream(device):  # on the one of all others they would wait for what never comes
                    want = torch.tensor(list(bytes.fromhex(mark)), dtype=torch.uint8, device=device)
                    got = want.clone() if rank == 0 else torch.zeros_like(want)
                    work = end._begin(got)
                    while not work.is_completed():
                        if is_over.wait(_TURN):
                            return
                    work.wait()
                    if not torch.equal(got, want):
                        raise RuntimeError("what came is not what the trainer sent")
                    end._options.timeout = timedelta(seconds=_AFTER * seconds)
                is_good.set()
            except Exception as error:  # of NCCL, CUDA or gloo
                errors.append(error)

        thread = threading.Thread(target=join, name="weights", daemon=True)
        thread.start()
        try:
            while thread.is_alive() and time.monotonic() - began < seconds:
                thread.join(min(_GLANCE, seconds))
                check(began)
            if errors:
                raise RuntimeError(f"{type(errors[0]).__name__}: {errors[0]}") from errors[0]
            if not is_good.is_set():
                raise RuntimeError(f"the others did not come within {seconds:g} s")
        except BaseException:
            is_over.set()
            for late in made:  # which may wait for what hangs
                threading.Thread(target=late.close, name="weights", daemon=True).start()
            raise
        return made[0]

    def _begin(self, part: torch.Tensor) -> Any:
        return self._group.broadcast([part], self._options)

    def _settle(self, work: Any) -> None:
        """Return when it is done. Raises RuntimeError of the group's, and what `check` raises."""
        began = looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_TURN)
            if time.monotonic() - looked > _GLANCE:
                looked = time.monotonic()
                self._check(began)
        work.wait()

    def bucket(self, number: int, size: int, most: int) -> torch.Tensor:
        """Return memory of the trainer's for a bucket of that number [size], of `most` bytes at most, once nobody reads
        it any more."""
        most = -(-most // 16) * 16  # any dtype may begin there
        if len(self._memory) < NUM_SHARED * most:
            self._memory = torch.empty(NUM_SHARED * most, dtype=torch.uint8, device=self.device)
        while len(self._works) >= NUM_SHARED:
            self._settle(self._works.popleft())
        start = number % NUM_SHARED * (len(self._memory) // NUM_SHARED)
        return self._memory[start : start + size]

    def send(self, bucket: torch.Tensor) -> None:
        """Let a bucket go [size], which stays as it is until `bucket` gives it again."""
        self._works.append(self._begin(bucket))

    def finish(self) -> None:
        """Return when all have gone."""
        while self._works:
            self._settle(self._works.popleft())

    def take(self, buffer: torch.Tensor) -> None:
        """Have the next bucket in `buffer` [size]."""
        self._settle(self._begin(buffer))

    def close(self) -> None:
        """Leave, whatever is under way."""
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("a group of weights was not left in order: %s", str(error).strip().split("\n")[0])
        self._works.clear()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Have a GPU do what is asked for within beside all else."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Have NCCL's group made within watched by nobody (torch reads it as the group is made): where an end dies the
    watchdog of torch would end the whole process a minute later, though the delivery was made again by then. Who waits
    looks after each collective here."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BLOCKING_WAIT)
        if before is not None:
            os.environ[_BLOCKING_WAIT] = before
