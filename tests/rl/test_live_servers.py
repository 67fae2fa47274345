"""Several servers that follow one policy: each gets every delivery and has to prove it. The servers are small ones of
this process over HTTP."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.models.load import load_policy
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.engines_from_config import check_client, engines_of
from espalier.rl.probes.canary import Canary
from espalier.rl.probes.checks import CACHE, UNUSED, VERSION, WEIGHTS
from espalier.runtime.entrypoint import BadConfig
from espalier.sampling.client import SampleRequest, SamplingParams, ServerGone
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient

ONE = SamplingParams(n=1, temperature=1.0, max_tokens=4)


class FollowingServer(RepeatableServer):
    """Over HTTP, in a thread. What is wrong with it is in `fault`."""

    def __init__(self, path: str, fault: str = ""):
        super().__init__(path, max_model_len=128)
        self.fault = fault
        self.num_answered = self.num_loads = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> dict[str, str]:
        self.num_loads += 1
        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        receipt = super().load_weights(weights)
        if self.fault in ("drops all", "says that it took what it dropped"):
            self.model.load_state_dict(kept)
        return {} if self.fault == "drops all" else receipt

    async def _load(self, request: web.Request) -> web.Response:
        if self.fault == "refuses controls":
            return web.Response(status=404)
        if self.fault == "no receipt":
            return web.json_response({"results": [None]})
        return await super()._load(request)

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": self.fault != "keeps its cache"})

    async def _stamp(self, request: web.Request) -> web.Response:
        return web.json_response({}) if self.fault == "keeps its stamp" else await super()._stamp(request)

    async def _completions(self, request: web.Request) -> web.Response:
        self.num_answered += 1
        return await super()._completions(request)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self.app(), handle_signals=False, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def __enter__(self) -> "FollowingServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)


Use = Callable[[WeightSync, VLLMClient, list[FollowingServer]], Awaitable[None]]


def with_two(tiny_policy: Path, use: Use, fault: str = "", **settings: Any) -> None:
    """Two servers, the second with a fault; they serve the tiny policy before."""

    async def run(servers: list[FollowingServer]) -> None:
        client = VLLMClient([server.url for server in servers], patience_seconds=0.3, **settings)
        sync = WeightSync(engines_of(client, None), max_logprob_gap=0.1, precision="fp32")
        sync.canaries = [Canary(list(range(5, 25)), start=8)]
        await client.open()
        try:
            await use(sync, client, servers)
        finally:
            await client.close()

    with ExitStack() as stack:
        faults = ["", fault]
        asyncio.run(run([stack.enter_context(FollowingServer(str(tiny_policy), name)) for name in faults]))


def moved(tiny_policy: Path) -> Any:
    model: Any = load_policy(str(tiny_policy), "eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return model


def test_every_server_gets_every_delivery_shows_its_receipt_and_its_stamp(tiny_policy: Path) -> None:
    async def use(sync: WeightSync, client: VLLMClient, servers: list[FollowingServer]) -> None:
        assert (await sync.sync(moved(tiny_policy), 3))["canary_gap"] < 1e-3
        await sync.check_version(3)
        assert [server.num_loads for server in servers] == [1, 1]
        assert [server.version for server in servers] == ["3", "3"]
        assert servers[0].digest == servers[1].digest != ""
        assert len(await sync.logprobs_of([[5, 6, 7]])) == 2
        asked = [client.sample(SampleRequest(f"p{k}", "", [5, 6, k], problem_id=f"p{k}"), ONE) for k in range(20)]
        before = [server.num_answered for server in servers]
        await asyncio.gather(*asked)
        assert all(server.num_answered > number for server, number in zip(servers, before, strict=True))

    with_two(tiny_policy, use)


@pytest.mark.parametrize(("fault", "told", "kind"), [
    ("drops all", "{url} read 0 of", WEIGHTS),
    ("no receipt", "{url} took a delivery and gave no receipt", WEIGHTS),
    ("says that it took what it dropped", "{url} computes as the version before", UNUSED),
    ("keeps its cache", "{url} did not empty its prefix cache", CACHE),
    ("keeps its stamp", "{url} says that it serves version 'default', not 1", VERSION),
])  # fmt: skip
def test_one_server_that_does_not_follow_ends_the_run_under_its_address(
    fault: str, told: str, kind: str, tiny_policy: Path
) -> None:
    async def follow(sync: WeightSync) -> None:
        await sync.sync(load_policy(str(tiny_policy)), 0)
        await sync.sync(moved(tiny_policy), 1)
        await sync.check_version(1)

    async def use(sync: WeightSync, client: VLLMClient, servers: list[FollowingServer]) -> None:
        with pytest.raises(StaleWeights, match=told.format(url=servers[1].url)) as caught:
            await follow(sync)
        assert caught.value.fault.kind == kind

    with_two(tiny_policy, use, fault)


def test_one_server_without_controls_ends_the_run_under_its_address(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.rl.delivery.weight_update_engine._DYING_SECONDS", 0.0)

    async def use(sync: WeightSync, client: VLLMClient, servers: list[FollowingServer]) -> None:
        with pytest.raises(ServerGone, match=f"{servers[1].url}/collective_rpc answered 404"):
            await sync.sync(moved(tiny_policy), 1)

    with_two(tiny_policy, use, "refuses controls")


def test_one_server_that_dies_ends_the_run_though_the_other_lives(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.rl.delivery.weight_update_engine._DYING_SECONDS", 0.0)

    async def use(sync: WeightSync, client: VLLMClient, servers: list[FollowingServer]) -> None:
        await sync.sync(moved(tiny_policy), 1)
        servers[1].__exit__()
        asked = [client.sample(SampleRequest(f"p{k}", "", [5, 6, k], problem_id=f"p{k}"), ONE) for k in range(20)]
        failed = [
            found for found in await asyncio.gather(*asked, return_exceptions=True) if isinstance(found, ServerGone)
        ]
        assert failed
        assert all(servers[1].url in str(error) for error in failed)
        with pytest.raises(ServerGone, match=servers[1].url):
            await sync.check_version(1)

    with_two(tiny_policy, use)


def test_one_server_that_does_not_answer_at_the_start_ends_the_run(tiny_policy: Path) -> None:
    async def run(urls: list[str]) -> None:
        client = VLLMClient(urls, patience_seconds=0.3)
        engines_of(client, None)
        await client.open()

    with FollowingServer(str(tiny_policy)) as server:
        with FollowingServer(str(tiny_policy)) as gone:
            url = gone.url
        with pytest.raises(ServerGone, match=f"{url} does not answer"):
            asyncio.run(run([server.url, url]))


def test_an_address_that_stands_twice_is_named() -> None:
    with pytest.raises(BadConfig, match="names a server twice"):
        check_client(VLLMClient(["http://a:1", "http://a:1/"]), None)


def test_a_server_of_our_own_takes_weights_and_is_followed() -> None:
    server, client = VLLMServer("policy", "log", has_controls=True), VLLMClient()
    assert "--worker-extension-cls" in server.command()
    check_client(client, server)
    engines = engines_of(client, server)
    client.base_url = "http://a:1"
    assert [engine.name for engine in engines] == client.urls
