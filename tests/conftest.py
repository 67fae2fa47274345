"""What tests share: word arithmetic, its tokenizer and tiny policy, a server that misbehaves, a real one.

Everything is built on the spot; nothing is downloaded. `real_server` starts vLLM on the CPU (half a minute),
once for all tests that ask for it; mark those `server`. Their files are in `_ONE_SERVER`, which one worker runs.
"""

import asyncio
import atexit
import gc
import hashlib
import json
import logging
import os
import random
import shutil
import socket
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from aiohttp import web

from espalier.data.tasks.word_arithmetic import WordArithmetic
from tests.support.parsed_once import parse_yaml_once

ROOT = Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.support.scripts"]  # the fixture `script`

# Many small processes: one thread each is faster than two that wait; a fork of a process with more of them may hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch asks for the name of both ends of every connection of a group: a question that the name server loses costs a
# second then, and not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Tokenised examples of tests are no user's: one folder for all workers, removed by the first.
if "ESPALIER_TEST_CACHE" not in os.environ:
    os.environ["ESPALIER_TEST_CACHE"] = os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="espalier-examples-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

parse_yaml_once()

# Property tests draw the same examples for the same code, so that a suite's verdict can be had again; new
# examples are sought by hand: `bash scripts/test.sh --hypothesis-profile=default` draws others at every run.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.load_profile("same")


# Files with tests that ask `real_server`, one after the other: some change its weights, some count its tokens.
_ONE_SERVER = ("test_asking.py", "test_judging.py", "test_live_engine.py", "test_partial_block_cache_engine.py",
               "test_pipeline.py", "test_server.py", "test_vllm_client.py")  # fmt: skip


# The longest of the others.
_LONG = ("test_configs.py", "test_ranks.py", "test_rl_ranks.py", "test_rl.py", "test_data_parallel_engines.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's, and all files of `_ONE_SERVER` are."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "real_server" if Path(file).name in _ONE_SERVER else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws does not depend on the tests before it, and differs from what others draw. Fixtures of a
    module or session have the seed of the first test that asks for them. One thread: with tiny matrices two mostly wait
    for each other."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a real server first, and other long ones: the longest must not be the last to begin."""
    long = {item.path for item in items if item.get_closest_marker("server") or item.path.name in _LONG}
    asking = {item.path.name for item in items if "real_server" in getattr(item, "fixturenames", ())}
    assert asking <= set(_ONE_SERVER), f"name them in _ONE_SERVER: {asking - set(_ONE_SERVER)}"
    items.sort(key=lambda item: item.path not in long)  # stable: the order within a file stays


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: a look through all objects (0.7 s for 730,000 of them), which
    every fork of a test begins with, need not see it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def program_log(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[Callable[[], Any]], str]]:
    """What a call prints, with logging set up as programs have it."""
    from espalier.runtime.logs import set_up_logging

    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def printed(call: Callable[[], Any]) -> str:
        set_up_logging()
        call()
        return capfd.readouterr().err

    yield printed
    root.handlers[:] = before
    root.setLevel(level)


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
    from espalier.models.tiny import build_tokenizer

    return build_tokenizer(demonstration_texts, vocab_size=320)


@pytest.fixture(scope="session")
def tiny_policy(demonstration_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and its tokenizer; heads of 32, as vLLM on CPUs takes none smaller."""
    from espalier.models.tiny import build_tiny

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
def chat_model(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy's folder, its tokenizer with a chat template."""
    from espalier.models.load import load_tokenizer

    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = load_tokenizer(str(tiny_policy))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_policy / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def tiny_prm(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model in a folder `prm`: the body of `tiny_policy` with a random head, so that scores differ."""
    import torch

    from espalier.models.scalar_head import load_process_reward

    path = tmp_path_factory.mktemp("reward_model") / "prm"
    model = load_process_reward(str(tiny_policy), 1)
    random_numbers = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(model.get_parameter("score.weight"), std=0.1, generator=random_numbers)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tiny_policy / name).read_bytes())
    return path


@pytest.fixture(scope="session")
def real_server(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM server that serves `tiny_policy`, with the controls that take new weights, and as a chat API; it leaves
    nothing behind."""
    from espalier.sampling.child_process import group_members
    from espalier.sampling.server import VLLMServer

    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    server = VLLMServer(
        model=str(tiny_policy),
        log=str(tmp_path_factory.mktemp("server") / "server.log"),
        max_model_len=256,
        has_controls=True,
        options={"enforce_eager": True, "max_num_seqs": 32, "chat_template": str(template)},
    )
    with server:
        assert server.process is not None
        group = server.process.pid
        yield server
    assert group_members(group) == []
    with socket.socket() as probe:
        assert probe.connect_ex((server.host, server.port)) != 0


class CompletionServer:
    """`/v1/models` and `/v1/completions` on a free loopback port, in a thread of its own.

    The answer is a function of the prompt's ids alone, so any row can be checked. `faults` (kinds of
    `_fault`, in turn) hit the `first_faults` and `fault_share` of the requests; `refuses(prompt_ids)` answers 400;
    after `hang_after` answers nothing is answered any more (`hangs_behind`: but /v1/models is, as with a frozen
    engine); after `die_after` answers the port is closed and every connection dropped; where
    `hangs(prompt_ids)` there is no answer, where `breaks(prompt_ids)` a 500. `key` is the API key that is
    wanted, `tokenize` stands behind /tokenize (None: there is none), `headers` come with injected faults,
    /metrics counts tokens. A request lasts `seconds` on average and `slow(prompt_ids)` more;
    `models` is what /v1/models answers.
    """

    def __init__(
        self,
        *,
        faults: tuple[str, ...] = (),
        fault_share: float = 0.0,
        first_faults: int = 0,
        refuses: Callable[[list[int]], bool] = lambda prompt_ids: False,
        answer: Callable[[list[int], int], tuple[str, list[int]]] | None = None,
        hang_after: int | None = None,
        die_after: int | None = None,
        seconds: float = 0.0,
        max_model_len: int = 100,
        models: Any = ...,
        key: str = "",
        tokenize: Callable[[str], list[int]] | None = None,
        hangs: Callable[[list[int]], bool] = lambda prompt_ids: False,
        headers: dict[str, str] | None = None,
        hangs_behind: bool = False,
        slow: Callable[[list[int]], float] = lambda prompt_ids: 0.0,
        breaks: Callable[[list[int]], bool] = lambda prompt_ids: False,
    ):
        self.faults, self.fault_share, self.refuses = faults, fault_share, refuses
        self.first_faults = first_faults
        self.answer = answer or self.samples
        self.hang_after, self.die_after, self.seconds = hang_after, die_after, seconds
        self.models = models
        if models is ...:
            self.models = {"data": [{"id": "policy", "max_model_len": max_model_len}]}
        self.key, self.tokenize, self.hangs, self.breaks = key, tokenize, hangs, breaks
        self.headers, self.hangs_behind = headers or {}, hangs_behind
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.slow, self.num_now, self.most_at_once = slow, 0, 0
        self.counters = {"prompt_tokens": 0, "generation_tokens": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0}
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

    @property
    def prompts(self) -> list[list[int]]:
        """Every prompt that was asked for, as often as it was."""
        found = [body["prompt"] for body in self.bodies]
        return [prompt for asked in found for prompt in (asked if isinstance(asked[0], list) else [asked])]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/metrics", self._metrics)
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
        if self._is_hanging() and not self.hangs_behind:
            await asyncio.sleep(3600)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if isinstance(self.models, bytes):
            return web.Response(body=self.models, content_type="application/json")
        return web.json_response(self.models)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenize is None:
            return web.Response(status=404)
        ids = self.tokenize((await request.json())["prompt"])
        return web.json_response({"count": len(ids), "tokens": ids})

    async def _metrics(self, request: web.Request) -> web.Response:
        names = {"engine": "0", "model_name": "policy"}
        labels = ",".join(f'{name}="{value}"' for name, value in names.items())
        rows = [f"vllm:{name}_total{{{labels}}} {float(value)}" for name, value in self.counters.items()]
        return web.Response(text="# HELP vllm:prompt_tokens_total Number of tokens.\n" + "\n".join(rows) + "\n")

    def _is_hanging(self) -> bool:
        return self.hang_after is not None and self.num_answers >= self.hang_after

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.times.append(time.monotonic())
        if "messages" in body:
            body["prompt"] = [len(turn["content"]) for turn in body["messages"]]
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            await asyncio.sleep(self.seconds * self._rng.random() * 2 + max(map(self.slow, prompts)))
        finally:
            self.num_now -= 1
        if self.die_after is not None and self.num_answers >= self.die_after:
            await self._site.stop()
            for connection in list(self._runner.server.connections):  # type: ignore[union-attr]
                connection.force_close()
                connection.transport and connection.transport.abort()
        if self._is_hanging() or any(map(self.hangs, prompts)):
            await asyncio.sleep(3600)
        if any(map(self.breaks, prompts)):
            return web.json_response({"error": "injected"}, status=500)
        if any(map(self.refuses, prompts)):
            return web.json_response({"error": "this prompt is refused"}, status=400)
        choices = []
        for number, prompt in enumerate(prompts):
            choices += self._choices(body, prompt, number * body["n"])
        if self._rng.random() < self.fault_share or len(self.bodies) <= self.first_faults:
            kind = self.faults[self.num_faults.total() % len(self.faults)]
            return await self._fault(kind, request, {"choices": choices})
        self.num_answers += len(prompts)
        for prompt in prompts:
            self.counters["prompt_tokens"] += len(prompt)
            self.counters["prefix_cache_queries"] += len(prompt)
            self.counters["prefix_cache_hits"] += len(prompt) // 2
        return web.json_response({"choices": choices, "prompt_token_ids": body["prompt"]})

    def _choices(self, body: dict[str, Any], prompt: list[int], first: int) -> list[dict[str, Any]]:
        found = []
        for index in range(body["n"]):
            text, ids = self.answer(prompt, index)
            choice: dict[str, Any] = {"index": first + index, "text": text, "token_ids": ids, "finish_reason": "stop"}
            if "logprobs" in body:
                choice["logprobs"] = {"token_logprobs": [-token / 8 for token in ids]}
            if "messages" in body:
                choice["message"] = {"role": "assistant", "content": choice.pop("text")}
                choice |= {"logprobs": {"content": [{"logprob": -token / 8} for token in ids]}}
            found.append(choice)
            self.counters["generation_tokens"] += len(ids)
        return found

    async def _fault(self, kind: str, request: web.Request, good: dict[str, Any]) -> web.StreamResponse:
        self.num_faults[kind] += 1
        text = json.dumps(good)
        if kind.isdigit():
            return web.json_response({"error": "injected"}, status=int(kind), headers=self.headers)
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
