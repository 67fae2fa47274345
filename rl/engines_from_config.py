"""The engines that a run samples from, from its config: the server or the client's own, what is asked of them before
they run, and how new weights reach them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from espalier.models.inputs import network
from espalier.models.load import max_length_of
from espalier.models.row_limits import longest_row
from espalier.rl.delivery.live_engine import LiveEngine
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.delivery.weight_update_engine import OwnEngine, VLLMEngine
from espalier.rl.shared_gpus import warn_of_shared_gpus
from espalier.runtime.distributed import device, is_main_rank
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import HasEngines
from espalier.sampling.vllm_client import VLLMClient

if TYPE_CHECKING:  # loaded only where the config has it
    from espalier.sampling.server import VLLMServer

log = logging.getLogger("rl")
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


RLClient = VLLMClient | HasEngines


def make_client(config: RLConfig) -> "tuple[VLLMServer | None, RLClient]":
    """Return (the server that the run starts, None where it has none of its own; who is asked). Raises BadConfig where
    the two are no pair that takes new weights."""
    # server=none is a node without a component
    server: VLLMServer | None = (
        build(config.server, seed=config.seed) if config.server and "_target_" in config.server else None
    )
    client: RLClient = build(config.client, seed=config.seed)
    check_client(client, server)
    if config.engine.sleeps:
        check_sleep(client)
    elif is_main_rank() and device().type == "cuda":
        warn_of_shared_gpus(client, server)
    if not isinstance(client, VLLMClient):
        client.sleeps = config.engine.sleeps
        client.model = client.model or config.model["path"]
        client.log = client.log or str(Path(config.output_dir) / "engine.log")
    return server, client


@contextmanager
def serving(server: "VLLMServer | None", client: RLClient) -> Iterator[None]:
    """Rank 0 has the server run, where the run has one of its own; the other ranks wait for its first rollouts."""
    if not is_main_rank() or server is None or not isinstance(client, VLLMClient):
        yield
        return
    log.info("starting vLLM")
    with server:
        client.base_url = server.base_url  # its port is known only now
        yield


def check_client(client: Any, server: "VLLMServer | None") -> None:
    """Raise BadConfig where the client and the server are no pair that new weights can be delivered to."""
    if not isinstance(client, HasEngines | VLLMClient):
        raise BadConfig("new weights cannot reach its engines: set client=vllm, data_parallel_engines or ray_engines")
    if isinstance(client, HasEngines):
        if server is not None:
            raise BadConfig("this client has its engines itself: set server=none")
    elif server is not None and server.options.get("data_parallel_size") not in (None, 1):
        raise BadConfig("server.options.data_parallel_size: set client=data_parallel_engines server=none, for weights")
    elif len(set(client.urls)) < len(client.urls):
        raise BadConfig(f"client.base_url names a server twice: {', '.join(client.urls)}")
    elif server is None and not client.urls:
        raise BadConfig("server=none: name a running server with controls by client.base_url=http://HOST:PORT, or "
                        "choose client=data_parallel_engines")  # fmt: skip


def check_sleep(client: RLClient) -> None:
    """Raise BadConfig where the engines cannot be put to sleep."""
    if isinstance(client, VLLMClient):
        raise BadConfig("engine.sleeps=true puts engines of the run's own to sleep, and client=vllm asks a server: set "
                        "client=data_parallel_engines server=none, or engine.sleeps=false")  # fmt: skip
    if not client.can_sleep():
        raise BadConfig("engine.sleeps=true lets go of a GPU's memory, and there is no GPU here (vLLM does not sleep "
                        "on CPUs): set engine.sleeps=false")  # fmt: skip


def engines_of(client: RLClient, server: "VLLMServer | None") -> list[LiveEngine]:
    """Return every engine behind the client, as those that take new weights. They need not run yet. From now on
    requests go to those alone that have them; of servers that others started none may be missing."""
    if isinstance(client, HasEngines):
        client.follows_policy = True
        return [OwnEngine(client.engine(number)) for number in range(client.num_engines)]
    client.needs_all = True
    check_server = server.check if server is not None else lambda: None
    return [VLLMEngine(client, check_server, number) for number in range(len(client.urls) if server is None else 1)]


def window_of(client: RLClient, server: "VLLMServer | None", model: str) -> int | None:
    """Return the tokens that every engine takes, before ours run: as they are configured, or as servers that run say
    (ServerGone where one does not answer), or as the model's positions say; None where nobody does."""
    if server is not None:
        return server.max_model_len
    if not isinstance(client, VLLMClient):
        return client.max_model_length

    async def ask() -> None:
        await client.open()
        await client.close()

    asyncio.run(ask())
    return client.max_model_length or max_length_of(model)


def check_window(model: Any, window: int | None) -> None:
    """Raise BadConfig where the engine's window (None: unknown) lets rollouts grow beyond what the policy can score."""
    longest = longest_row(network(model).config)
    if longest is not None and (window is None or window > longest):
        raise BadConfig(
            f"the engine takes {window or 'any number of'} tokens and the policy, whose rotary frequencies ('dynamic') "
            f"change beyond its positions, {longest}: set server.max_model_len={longest}"
        )


def make_weight_sync(
    config: RLConfig, engines: list[LiveEngine], client: RLClient, server: "VLLMServer | None", learner: torch.device
) -> WeightSync:
    """Return what delivers new weights to the engines. They are compared in the precision that the engines have; as the
    trainer has them where that is "auto", or a server is not ours."""
    dtype = _DTYPES.get(served_dtype(server, client))
    is_fatal = config.probes.on_fault == "stop"
    return WeightSync(engines, config.probes.max_gap, config.precision, _max_step(config), dtype, is_fatal, learner)


def served_dtype(server: "VLLMServer | None", client: RLClient) -> str:
    """Return what the engine computes in, as its config says; empty where another program started it."""
    if not isinstance(client, VLLMClient):
        return client.dtype
    return server.dtype if server is not None else ""


def _max_step(config: RLConfig) -> float:
    """Return how far one version may lie from the one before; 0 (any) where a fault is only warned of."""
    return config.probes.max_step if config.probes.on_fault == "stop" else 0.0
