"""Ranks: init and teardown, sums over ranks. Everything is a no-op on one process, but for `scatter_from_main_rank` and
`gather_on_main_rank`, which `runtime.leading` calls where there are several.

A launcher (`launch.py`, `torchrun`, `deepspeed`) sets RANK, WORLD_SIZE and LOCAL_RANK; gloo serves CPUs, nccl GPUs.

Ranks that do the same work meet in collectives, which have the limit of the process group. Where one may take longer
than another (rank 0 samples, scores, reads and writes for all) they wait for one another first, by `runtime.peers`,
without a limit but with signs of life: before `barrier`, `gather_over_ranks`, `from_main_rank` and the two by which
rank 0 asks. Who asks for it (`waits_heard_by`) hears of each of these waits, and of those before the few collectives in
which a slow rank would else hold up the others unseen (`wait_visibly`).
"""

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from espalier.runtime.answers import packed, unpacked
from espalier.runtime.company import company, peers, sharing_errors, store
from espalier.runtime.errors import Stopped
from espalier.runtime.ranks import is_main_rank as is_main_rank
from espalier.runtime.ranks import rank as rank
from espalier.runtime.ranks import world_size as world_size

T = TypeVar("T")
HearWait = Callable[[int, float, float], None]
"""(the rank that came last, begin and end of this rank's wait, of `time.monotonic()`)"""

_hear: HearWait | None = None
_is_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Have rank 0 act without the others within the block, who wait for what it asks (`runtime.leading`):
    `from_main_rank` makes the call, and a collective raises RuntimeError."""
    with _being(is_alone=True):
        yield


@contextmanager
def together() -> Iterator[None]:
    """Within `alone`: all ranks are at work again."""
    with _being(is_alone=False):
        yield


@contextmanager
def _being(is_alone: bool) -> Iterator[None]:
    global _is_alone
    before, _is_alone = _is_alone, is_alone
    try:
        yield
    finally:
        _is_alone = before


def _check_together() -> None:
    if _is_alone:
        raise RuntimeError("a collective within what rank 0 does alone: the other ranks never come to it; have all "
                           "make it by `ask` (espalier/runtime/leading.py)")  # fmt: skip


def device() -> torch.device:
    """Return this rank's device: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class BadTimeout(ValueError):
    """A limit that no collective could keep."""

    exit_code = 2


@contextmanager
def process_group(timeout_seconds: float = 600.0, is_needed_alone: bool = False) -> Iterator[None]:
    """Give the process group of all ranks, for the length of the block, in which an error of one ends all.

    `timeout_seconds`: for a collective, and for a rank to give a sign of life (`rank_timeout_seconds` of a config).
    One process without a launcher has no group, unless `is_needed_alone` (DeepSpeed wants one). Raises RankFailed
    where another rank failed, BadTimeout.
    """
    if not timeout_seconds >= 1:
        raise BadTimeout(f"rank_timeout_seconds must be at least 1, got {timeout_seconds:g}")
    if world_size() == 1 and not is_needed_alone:
        yield
        return
    with company(), sharing_errors():
        _wait("the process group")
        _open_group(datetime.timedelta(seconds=timeout_seconds))
        _wait("the process group, open")  # one that fails at once must not fail while others connect to it
        try:
            with sharing_errors():  # before the group is gone, so that the others know why
                yield
        finally:
            dist.destroy_process_group()


def _open_group(timeout: datetime.timedelta) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    others = peers()
    if others is None:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
        return
    others.limit = timeout.total_seconds()
    common = PrefixStore("espalier/group", store())
    dist.init_process_group(backend, timeout=timeout, store=common, rank=rank(), world_size=world_size())


def limit_all_groups() -> None:
    """Give every group there is the limit of the process group: those that DeepSpeed makes have torch's own."""
    others = peers()
    if others is not None:
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=others.limit), group)


def _wait(place: str, is_limited: bool = False) -> None:
    """Until all ranks are here, however long that takes, as long as they give signs of life, or within the limit."""
    _check_together()
    others = peers()
    if others is not None:
        begun = time.monotonic()
        last = others.meet(place, is_limited)
        if _hear is not None:
            _hear(last, begun, time.monotonic())


@contextmanager
def waits_heard_by(hear: HearWait) -> Iterator[None]:
    """Have `hear` called for every wait of this rank for others within the block. All ranks enter and leave it at the
    same place, because within it they wait at more places."""
    global _hear
    _hear = hear
    try:
        yield
    finally:
        _hear = None


def wait_visibly(place: str) -> None:
    """Wait for all ranks, this one's GPU too, ahead of a collective in which they would wait for one another anyway,
    and as long as in it; nothing where no waits are heard of."""
    if _hear is None or world_size() == 1:
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _wait(place, is_limited=True)


def barrier() -> None:
    """Wait for all ranks."""
    _wait("a barrier")


def sum_over_ranks(values: list[float]) -> list[float]:
    """Return element-wise float64 sum of a list that has the same length on every rank."""
    if world_size() == 1:
        return values
    _check_together()
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def gather_over_ranks(value: T) -> list[T]:
    """Return the (picklable) value of every rank, in their order, on every rank."""
    if world_size() == 1:
        return [value]
    _wait("what every rank has")
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_main_rank(call: Callable[[], T]) -> T:
    """Return what `call` returns (picklable) on rank 0, which alone makes the call, on every rank, however long that
    takes. On the others it is equal, and lists of numbers are smaller (`runtime.answers`).

    What it raises rises on rank 0; the others then raise RankFailed with its line and its exit code. Stopped is an
    answer like another: all ranks raise it, and go on together.
    """
    if world_size() == 1 or _is_alone:
        return call()
    answer = _answer_or_stopped(call) if is_main_rank() else None
    sent: list[Any] = [packed(answer) if is_main_rank() else None]
    _wait("the answer of rank 0")
    dist.broadcast_object_list(sent, src=0, device=device())
    found: Any = answer if is_main_rank() else unpacked(sent[0])
    if isinstance(found, Stopped):
        raise found
    return found


def _answer_or_stopped(call: Callable[[], T]) -> T | Stopped:
    try:
        return call()
    except Stopped as stopped:
        return stopped


def scatter_from_main_rank(contents: Sequence[bytes] | None) -> bytes:
    """Return this rank's own of `contents`, which rank 0 has; a collective call."""
    _wait("what rank 0 asks")
    found: list[Any] = [None]
    dist.scatter_object_list(found, None if contents is None else list(contents), src=0)
    return bytes(found[0])


def gather_on_main_rank(content: bytes) -> list[bytes]:
    """Return the content of every rank, in their order, on rank 0, none on the others; a collective call."""
    _wait("what rank 0 asked for")
    found: list[Any] | None = [None] * world_size() if is_main_rank() else None
    dist.gather_object(content, found, dst=0)
    return [] if found is None else found


def send_from(source: int, tensor: torch.Tensor) -> None:
    """Have on every rank, in place, what rank `source` has of a tensor of the same shape; a collective call."""
    _check_together()
    if world_size() > 1:
        dist.broadcast(tensor, src=source)


def sum_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sum `.grad` over ranks in place (losses are already divided by the global count)."""
    if world_size() == 1:
        return
    _check_together()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
