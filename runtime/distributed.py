"""Ranks: init and teardown, sums over ranks. Everything is a no-op on one process.

A launcher (`torchrun`, `deepspeed`) sets RANK, WORLD_SIZE and LOCAL_RANK; gloo serves CPUs, nccl GPUs.
"""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from runtime.ranks import is_main_rank as is_main_rank
from runtime.ranks import rank as rank
from runtime.ranks import world_size as world_size

T = TypeVar("T")


def device() -> torch.device:
    """This rank's device: its GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def process_group(timeout_seconds: float = 1800.0, is_needed_alone: bool = False) -> Iterator[None]:
    """The process group of all ranks, for the length of the block.

    One process without a launcher has none, unless `is_needed_alone` (DeepSpeed wants one).
    """
    if world_size() == 1 and not is_needed_alone:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(values: list[float]) -> list[float]:
    """Element-wise float64 sum of a list that has the same length on every rank."""
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def gather_over_ranks(value: T) -> list[T]:
    """The (picklable) value of every rank, in their order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_main_rank(call: Callable[[], T]) -> T:
    """What `call` returns on rank 0, which alone makes the call, on every rank; or what it raises, on every rank."""
    answer: tuple[Any, Exception | None] = (None, None)
    if is_main_rank():
        try:
            answer = (call(), None)
        except Exception as error:  # raised again below, on every rank
            answer = (None, error)
    value, raised = gather_over_ranks(answer)[0]
    if raised is not None:
        raise raised
    return value


def send_from_main_rank(value: T | None) -> T:
    """The (picklable) value of rank 0 on every rank; what the others give is not looked at."""
    if world_size() > 1:
        values: list[Any] = [value if is_main_rank() else None]
        dist.broadcast_object_list(values, src=0, device=device())
        value = values[0]
    return value  # type: ignore[return-value]


def sum_tensor_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a CPU tensor that has the same shape on every rank."""
    if world_size() == 1:
        return tensor
    moved = tensor.to(device())
    dist.all_reduce(moved)
    return moved.cpu()


def sum_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sum `.grad` over ranks in place (losses are already divided by the global count)."""
    if world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
