"""GPUs on which both a rank of the learner and an engine of the run's own compute, named before either starts.

A server, and engines that nobody gave other GPUs, begin at the first visible GPU, which is rank 0's.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_arguments import num_devices
from espalier.sampling.placement import visible_gpus

if TYPE_CHECKING:
    from espalier.sampling.server import VLLMServer

log = logging.getLogger("rl")


def warn_of_shared_gpus(client: Any, server: "VLLMServer | None") -> None:
    """Warn where an engine that does not sleep is on the GPU of a rank of this machine, with settings under which none
    is. Nothing is known of engines on Ray, nor of servers that others started."""
    gpus, num_ranks = visible_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = gpus[:num_ranks]
    shared = [gpu for gpu in own if gpu in engine_gpus(client, server, gpus)]
    if shared:
        each = num_devices(_options(client, server))
        log.warning("policy and engine are both on GPU %s, and the engine, which does not sleep, keeps its share of it "
                    "(gpu_memory_utilization, 0.9 as vLLM has it) while the policy is trained: set %s "
                    "(docs/scaling.md)", ", ".join(shared), _remedy(len(gpus), len(own), each))  # fmt: skip


def engine_gpus(client: Any, server: "VLLMServer | None", gpus: Sequence[str]) -> list[str]:
    """Return on which of the visible GPUs engines of the run's own compute: of those that one sees it takes the first,
    as many as its options say."""
    if isinstance(client, DataParallelEngines):
        seen = client.devices
    else:
        seen = [] if server is None else [server.devices]
    each = num_devices(_options(client, server))
    return [gpu for devices in seen for gpu in (devices.split(",") if devices else gpus)[:each]]


def _options(client: Any, server: "VLLMServer | None") -> dict[str, Any]:
    if isinstance(client, DataParallelEngines):
        return dict(client.options)
    return {} if server is None else server.options


def _remedy(num_gpus: int, num_ranks: int, each: int) -> str:
    """Return settings that give engines of `each` GPUs those that no rank has, else settings by which both take
    turns. Other options of a server's engine are the client's then (`server.options.X` is `client.options.X`)."""
    engines = (num_gpus - num_ranks) // each
    parts = f" +client.options.tensor_parallel_size={each}" if each > 1 else ""
    if not engines:
        return f"layout=one_gpu client.num_engines={max(1, num_ranks // each)}{parts}: they then take turns"
    free = ",".join(map(str, range(num_ranks, num_ranks + engines * each)))
    return f"client=data_parallel_engines server=none client.num_engines={engines} client.gpus=[{free}]{parts}"
