"""What tests share: word arithmetic, its tokenizer and tiny policy, a server that misbehaves, a real one.

Everything is built on the spot; nothing is downloaded. `real_server` starts vLLM on the CPU (half a minute),
once for all tests that ask for it; mark those `server`.
"""

import asyncio
import hashlib
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from aiohttp import web

from data.tasks.word_arithmetic import WordArithmetic

ROOT = Path(__file__).resolve().parent.parent

# Property tests draw the same examples for the same code, so that a suite's verdict can be had again; new
# examples are sought by hand: `bash scripts/test.sh --hypothesis-profile=default` draws others at every run.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def datasets_dir() -> Path:
    """The folder of public datasets: $ESPALIER_DATA, else ../shared/datasets."""
    path = Path(os.environ.get("ESPALIER_DATA", ROOT.parent / "shared" / "datasets"))
    if not path.is_dir():
        pytest.skip("no datasets: set ESPALIER_DATA")
    return path


@pytest.fixture(scope="session")
def task() -> WordArithmetic:
    """Word arithmetic, small."""
    return WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)


@pytest.fixture(scope="session")
def demonstration_texts(task: WordArithmetic) -> list[str]:
    """Prompt and completion of every demonstration."""
    return [row.prompt + row.completion for row in task.demonstrations("train")]


@pytest.fixture(scope="session")
def tokenizer(demonstration_texts: list[str]) -> Any:
    """A byte-level tokenizer trained on the demonstrations."""
    from models.tiny import build_tokenizer

    return build_tokenizer(demonstration_texts, vocab_size=320)


@pytest.fixture(scope="session")
def tiny_policy(demonstration_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and its tokenizer; heads of 32, as vLLM on CPUs takes none smaller."""
    from models.tiny import build_tiny

    return build_tiny(
        tmp_path_factory.mktemp("models") / "tiny",
        demonstration_texts,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        vocab_size=320,
        max_length=512,
        seed=0,
    )


@pytest.fixture(scope="session")
def real_server(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM server that serves `tiny_policy`, with the controls that take new weights."""
    from sampling.server import VLLMServer

    server = VLLMServer(
        model=str(tiny_policy),
        log=str(tmp_path_factory.mktemp("server") / "server.log"),
        max_model_len=256,
        has_controls=True,
        options={"enforce_eager": True, "max_num_seqs": 32},
    )
    with server:
        yield server


class CompletionServer:
    """`/v1/models` and `/v1/completions` on a free loopback port, in a thread of its own.

    The answer is a function of the prompt's ids alone, so any row can be checked. `faults` (kinds of
    `_fault`, in turn) hit `fault_share` of the requests; `refuses(prompt_ids)` answers 400; after
    `hang_after` answers nothing is answered any more; after `die_after` answers the port is closed and every
    connection dropped. A request lasts `seconds` on average; `models` is what /v1/models answers.
    """

    def __init__(
        self,
        *,
        faults: tuple[str, ...] = (),
        fault_share: float = 0.0,
        refuses: Callable[[list[int]], bool] = lambda prompt_ids: False,
        answer: Callable[[list[int], int], tuple[str, list[int]]] | None = None,
        hang_after: int | None = None,
        die_after: int | None = None,
        seconds: float = 0.0,
        max_model_len: int = 100,
        models: Any = ...,
    ):
        self.faults, self.fault_share, self.refuses = faults, fault_share, refuses
        self.answer = answer or self.samples
        self.hang_after, self.die_after, self.seconds = hang_after, die_after, seconds
        self.models = models
        if models is ...:
            self.models = {"data": [{"id": "policy", "max_model_len": max_model_len}]}
        self.bodies: list[dict[str, Any]] = []
        self.num_answers = 0
        self.num_faults: Counter[str] = Counter()
        self._rng = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @staticmethod
    def samples(prompt_ids: list[int], index: int) -> tuple[str, list[int]]:
        """(text, token ids) of sample `index`."""
        digest = hashlib.sha256(f"{prompt_ids}/{index}".encode()).hexdigest()
        return f"answer {digest[:12]}", [int(digit, 16) for digit in digest[: 4 + index]]

    def __enter__(self) -> "CompletionServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0)
        self._loop.run_until_complete(self._runner.setup())
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        self._loop.run_until_complete(self._site.start())
        self.port = self._runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        for request in asyncio.all_tasks(self._loop):
            request.cancel()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        if self._is_hanging():
            await asyncio.sleep(3600)
        if isinstance(self.models, bytes):
            return web.Response(body=self.models, content_type="application/json")
        return web.json_response(self.models)

    def _is_hanging(self) -> bool:
        return self.hang_after is not None and self.num_answers >= self.hang_after

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.seconds * self._rng.random() * 2)
        if self.die_after is not None and self.num_answers >= self.die_after:
            await self._site.stop()
            for connection in list(self._runner.server.connections):  # type: ignore[union-attr]
                connection.force_close()
                connection.transport and connection.transport.abort()
        if self._is_hanging():
            await asyncio.sleep(3600)
        if self.refuses(body["prompt"]):
            return web.json_response({"error": "this prompt is refused"}, status=400)
        choices = []
        for index in range(body["n"]):
            text, ids = self.answer(body["prompt"], index)
            choices.append({"index": index, "text": text, "token_ids": ids, "finish_reason": "stop"})
            if "logprobs" in body:
                choices[-1]["logprobs"] = {"token_logprobs": [-token / 8 for token in ids]}
        if self._rng.random() < self.fault_share:
            kind = self.faults[self.num_faults.total() % len(self.faults)]
            return await self._fault(kind, request, {"choices": choices})
        self.num_answers += 1
        return web.json_response({"choices": choices})

    async def _fault(self, kind: str, request: web.Request, good: dict[str, Any]) -> web.StreamResponse:
        self.num_faults[kind] += 1
        text = json.dumps(good)
        if kind.isdigit():
            return web.json_response({"error": "injected"}, status=int(kind))
        if kind == "garbled":
            return web.Response(text=text[: len(text) // 2], content_type="application/json")
        if kind == "fewer choices":
            return web.json_response({"choices": good["choices"][:-1]})
        if kind == "no choices":
            return web.json_response({"error": "200, and yet an error"})
        if kind == "aborted":
            return web.json_response({"choices": [{**row, "finish_reason": "abort"} for row in good["choices"]]})
        if kind == "cut body":
            response = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await response.prepare(request)
            await response.write(text[:10].encode())
            request.transport.close()  # type: ignore[union-attr]
            return response
        if kind == "not http":
            request.transport.write(b"garbage\r\n\r\n")  # type: ignore[union-attr]
        request.transport.close()  # type: ignore[union-attr]
        return web.Response()


@pytest.fixture(scope="session")
def completion_server() -> type[CompletionServer]:
    """The class: `with completion_server(faults=("500",), fault_share=0.3) as server: server.base_url`."""
    return CompletionServer
