"""New weights from a learner of about 1B parameters to a vLLM engine beside it, with receipts: in memory that both see
(of the GPU they share, by CUDA's handles; on a CPU a file in memory), over connections, and from another GPU by NCCL
(where there is one; a rehearsal has gloo), side by side.

Before each delivery all weights change, in the same way for both: an engine that served others than those that were
delivered last would not say the log-probs of a prompt that it says under the same weights by the other way. A group
is joined once, in a delivery before those that are timed.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.rows import Row
from benchmarks.gpu.training import SHAPES, digit_ids, write_model
from espalier.models.load import load_policy
from espalier.rl.delivery.following_engines import FollowingEngines
from espalier.rl.delivery.weight_update_engine import OwnEngine
from espalier.sampling import weight_stream
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.training.engine import named_weights

ROUNDS = 5
SHARED, CONNECTIONS, GROUP = "shared memory", "connections", "from device to device"
WAYS = {SHARED: "memory that they share", CONNECTIONS: "connections", GROUP: "a group by"}


def engines(model: Path, folder: Path, is_rehearsal: bool) -> DataParallelEngines:
    """Return one engine, not started, that leaves room for the learner."""
    options: dict[str, Any] = {"enforce_eager": True}
    if not is_rehearsal:
        options["gpu_memory_utilization"] = 0.3
    return DataParallelEngines(str(model), log=str(folder / "engine.log"), num_engines=1, max_model_len=64,
                               dtype="bfloat16", options=options)  # fmt: skip


async def deliveries(client: DataParallelEngines, policy: torch.nn.Module, device: torch.device) -> list[Row]:
    """Return seconds of a delivery by each way. Raises SystemExit where one is not what its name says, or the engine
    serves what was not delivered."""
    client.follows_policy = True
    engine = OwnEngine(client.engine(0))
    prompt = (digit_ids() * 3)[:24]
    base = [value.detach().clone() for value in policy.parameters()]
    before_all = taken(device)
    seconds: dict[str, list[float]] = {}
    heard: dict[str, list[list[float]]] = {}
    for name, place in places(device).items():
        policy.to(place or device)
        base = [value.to(place or device) for value in base]
        way = FollowingEngines(engine, torch.bfloat16, place)
        seconds[name], heard[name] = [], []
        for number in range(ROUNDS + 1):
            with torch.no_grad():
                for value, before in zip(policy.parameters(), base, strict=True):
                    torch.mul(before, 1.0 + 0.01 * number, out=value)
            settle(place or device)
            started = time.perf_counter()
            with patch.object(weight_stream, "CHOSEN_ON", {device.type} if name == GROUP else set()):
                await way.deliver(named_weights(policy), str(number))
            seconds[name].append(time.perf_counter() - started)
            heard[name].append(await engine.prompt_logprobs(prompt))
        assert way._group is not None
        if not way._group.stream.way.startswith(WAYS[name]) or not way.is_received:
            raise SystemExit(f"error: {name}: by {way._group.stream.way}, receipts: {way.is_received}")
        way.close()
    if any(one != heard[SHARED] for one in heard.values()) or len(set(map(tuple, heard[SHARED]))) != ROUNDS + 1:
        raise SystemExit("error: the engine's log-probs are not those of the weights that it was sent")
    size = sum(value.numel() for value in base) * 2 / 1e9
    rows, middle = [], {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, found in seconds.items():
        ends = f"{min(found[1:]):.3f} to {max(found[1:]):.3f}, {size / middle[name]:.2f} GB/s"
        rows.append(Row(f"{name}: a delivery", round(middle[name], 4), "s", f"{size:.2f} GB of bf16, {ends}"))
    if GROUP not in seconds:
        rows.append(Row(f"{GROUP}: a delivery", None, "s", "one GPU"))
    peak = round((taken(device, at_most=True) - before_all) / 2**20, 1) if device.type == "cuda" else None
    return [*rows, Row(f"times as fast by {SHARED}", round(middle[CONNECTIONS] / middle[SHARED], 2), "ratio"),
            Row("learner: peak of a delivery beside its weights", peak, "MiB", "" if peak else "no GPU")]  # fmt: skip


def places(device: torch.device) -> dict[str, torch.device | None]:
    """Return where the learner's weights are, by way; without a second GPU none goes from one to another."""
    found: dict[str, torch.device | None] = {SHARED: device, CONNECTIONS: None}
    if device.type != "cuda":
        found[GROUP] = device
    elif torch.cuda.device_count() > 1:
        found[GROUP] = torch.device("cuda", 1)
    return found


def settle(device: torch.device) -> None:
    """Return when the device has done what it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def taken(device: torch.device, at_most: bool = False) -> int:
    """Return bytes of a GPU that this process holds, or held `at_most` since it was asked what it holds."""
    if device.type != "cuda":
        return 0
    if at_most:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


async def run(model: Path, folder: Path, is_rehearsal: bool) -> list[Row]:
    """Return the rows."""
    device = torch.device("cpu" if is_rehearsal else "cuda")
    client = engines(model, folder, is_rehearsal)
    await client.open()
    try:
        return await deliveries(client, load_policy(str(model), "eager").to(device), device)
    finally:
        with suppress(Exception):
            await client.close()


def measure(is_rehearsal: bool, folder: Path) -> Iterator[Row]:
    """Deliver."""
    write_model(folder / "model", SHAPES["tiny" if is_rehearsal else "1b"])
    yield from asyncio.run(run(folder / "model", folder, is_rehearsal))
