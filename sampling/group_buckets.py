"""Buckets of weights that go by collective calls from the trainer's device to those of all engines: by NCCL between
GPUs, over NVLink or InfiniBand where there are such, without a copy in a machine's memory.

The group is made as the ends join (`sampling.weight_stream`), and tried at once: where one of them cannot come in,
weights take another way. NCCL wants a GPU for each end. Every wait is this side's own, with a deadline: NCCL's watchdog
would end the whole process. On CPUs gloo can do the same, which costs more than connections (`sampling.weight_chain`)
and is chosen by tests and rehearsals alone.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

from espalier.sampling.shared_buckets import NUM_SHARED

dist = cast(Any, torch.distributed)  # parts of it have no types
CHOSEN_ON = {"cuda"}
"""Kinds of the trainer's device on which weights go by a group where nothing nearer is shared."""
_GLANCE = 0.5  # seconds between two looks whether the delivery was given up
_TURN = 5e-5  # seconds between two looks whether a bucket has come
_WATCHDOG = timedelta(days=1)  # of NCCL's own, which never has to bite

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
    moment since which nothing has moved (`time.monotonic`); `seconds`: that gloo waits."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, address: str,
                 check: Callable[[float], None], seconds: float):  # fmt: skip
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._check = check
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._works: deque[Any] = deque()
        store = dist.PrefixStore("buckets", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _WATCHDOG
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=4 * seconds)  # torch waits for what is under way where a group is left
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(store, rank, size, options)

    @classmethod
    def joined(cls, store: Any, rank: int, size: int, device: torch.device, address: str,
               check: Callable[[float], None], mark: str, seconds: float) -> "GroupBuckets":  # fmt: skip
        """Return this end of a group in which a `mark` of the trainer's came to all. Raises RuntimeError where it does
        not within `seconds`: what still waits for the others is left to itself."""
        found: list[GroupBuckets] = []
        errors: list[Exception] = []

        def join() -> None:
            try:
                end = cls(store, rank, size, device, address, check, seconds)
                want = torch.tensor(list(bytes.fromhex(mark)), dtype=torch.uint8, device=device)
                got = want.clone() if rank == 0 else torch.zeros_like(want)
                end._begin(got).wait()
                if not torch.equal(got, want):
                    raise RuntimeError("what came is not what the trainer sent")
                found.append(end)
            except Exception as error:  # of NCCL, CUDA or gloo
                errors.append(error)

        thread = threading.Thread(target=join, name="weights", daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise RuntimeError(f"{type(errors[0]).__name__}: {errors[0]}") from errors[0]
        if not found:
            raise RuntimeError(f"the others did not come within {seconds:g} s")
        return found[0]

    def _begin(self, part: torch.Tensor) -> Any:
        return self._group.broadcast([part], dist.BroadcastOptions())

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
        self._group.abort()
        self._works.clear()
