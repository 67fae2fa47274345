"""Deliveries to vLLM itself: receipts, stamps, the prefix cache. The server serves the tiny policy again afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.models.load import load_policy
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.delivery.weight_update_engine import VLLMEngine
from espalier.rl.probes.canary import Canary
from espalier.rl.probes.checks import CACHE, WEIGHTS
from espalier.sampling.client import SampleRequest, SamplingParams, ServerGone
from espalier.sampling.vllm_client import VLLMClient
from espalier.training.engine import named_weights

pytestmark = pytest.mark.server


def with_engine(
    server: Any, model: Any, use: Callable[[WeightSync, VLLMEngine], Awaitable[Any]], engine: type[VLLMEngine]
) -> Any:
    """What `use` gives; afterwards the server has the weights of `model` as it was."""

    async def run() -> Any:
        client = VLLMClient(server.base_url)
        await client.open()
        sync = WeightSync(engine(client, server.check), precision="bf16", dtype=torch.bfloat16)
        sync.canaries = [Canary(list(range(5, 45)), start=8)]
        before = {name: value.clone() for name, value in named_weights(model).items()}
        try:
            return await use(sync, VLLMEngine(client, server.check))
        finally:
            await WeightSync(VLLMEngine(client), precision="fp32").deliver(before)
            await client.close()

    return asyncio.run(run())


def moved(model: Any) -> Any:
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_every_tensor_is_on_the_receipt_and_the_stamp_is_shown(real_server: Any, tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy), "eager")

    async def use(sync: WeightSync, engine: VLLMEngine) -> None:
        found = await sync.sync(moved(model), 3)
        assert found["canary_gap"] < 0.05
        assert await engine.served_version() == "3"
        await sync.check_version(3)
        with pytest.raises(StaleWeights, match="serves version '3', not 4"):
            await sync.check_version(4)

    with_engine(real_server, model, use, VLLMEngine)


def test_a_server_draws_the_same_again_once_its_random_state_is_put_back(real_server: Any, tiny_policy: Path) -> None:
    """One sample at a time, each behind an empty cache: one that arrives while a step runs takes its draws later."""

    async def use(sync: WeightSync, engine: VLLMEngine) -> None:
        request = SampleRequest("p", "", list(range(5, 30)))
        params = SamplingParams(n=1, temperature=1.0, max_tokens=16)

        async def draw() -> list[list[int]]:
            await engine.reset_cache()
            return [sample.token_ids for sample in await engine.client.sample(request, params)]

        await sync.keep_random_state()
        first, other = await draw(), await draw()
        assert first != other
        await sync.put_random_state_back()
        assert await draw() == first

    with_engine(real_server, load_policy(str(tiny_policy), "eager"), use, VLLMEngine)


def test_a_server_keeps_what_it_read_when_the_trainer_changes_it(real_server: Any, tiny_policy: Path) -> None:
    model = moved(load_policy(str(tiny_policy), "eager"))

    async def use(sync: WeightSync, engine: VLLMEngine) -> None:
        await sync.deliver(named_weights(model))
        ((_, before),) = await sync.canary_logprobs()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
        ((_, after),) = await sync.canary_logprobs()
        assert torch.allclose(after, before, atol=1e-3)

    with_engine(real_server, model, use, VLLMEngine)


def test_a_server_that_lacks_a_tensor_is_named(real_server: Any, tiny_policy: Path) -> None:
    class Lacking(VLLMEngine):
        async def load(self, key: str, number: int) -> list[dict[str, str]] | None:
            found = await super().load(key, number)
            return [{k: v for k, v in receipt.items() if k != "model.norm.weight"} for receipt in found or []]

    model = load_policy(str(tiny_policy), "eager")

    async def use(sync: WeightSync, engine: VLLMEngine) -> None:
        with pytest.raises(StaleWeights, match=r"as they were sent; not model.norm.weight \(") as caught:
            await sync.sync(model, 1)
        assert caught.value.fault.kind == WEIGHTS

    with_engine(real_server, model, use, Lacking)


def test_a_prefix_cache_that_outlives_a_delivery_is_named(real_server: Any, tiny_policy: Path) -> None:
    class Keeping(VLLMEngine):
        async def reset_cache(self) -> None: ...

    model = load_policy(str(tiny_policy), "eager")

    async def use(sync: WeightSync, engine: VLLMEngine) -> None:
        with pytest.raises(StaleWeights, match="cached tokens after it") as caught:
            await sync.sync(model, 1)
        assert caught.value.fault.kind == CACHE

    with_engine(real_server, model, use, Keeping)


def test_a_control_the_server_does_not_know_ends_in_one_line(real_server: Any, tiny_policy: Path) -> None:
    async def use(sync: WeightSync, engine: VLLMEngine) -> None:
        with pytest.raises(ServerGone, match=r"^http\S+/no_such_path answered 404"):
            await engine._post("/no_such_path", {})

    with_engine(real_server, load_policy(str(tiny_policy), "eager"), use, VLLMEngine)
