"""A server in vLLM's place whose answers are a function of the prompt alone, and which fails as it is asked to.

    python -m benchmarks.processes.answering_server --tokenizer MODEL/tokenizer.json [--fault-share 0.3]

prints its port. Sample k of a prompt is one to forty steps long by a hash of both (0.2 to 8 kB a row) and ends with
the end token. A fault is a 500, a 429 with Retry-After, a body cut off in the middle, or an answer that comes
`--late` seconds late, each as often. Of the prompts, `--refused-share` are answered 400 every time. `POST /freeze`
stops the answers to completions for good, while /health and /v1/models go on; `GET /ledger` says how often each
prompt was asked, alone or among others, and how often in a list that was refused for one of its prompts.
"""

import argparse
import asyncio
import hashlib
import json
import random
from collections import Counter
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

FAULTS = ("500", "429", "cut", "late")
END = "<|end|>"


def digest_of(*values: Any) -> int:
    """Return a number that depends on the values alone."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big")


def is_refused(prompt_ids: list[int], share: float) -> bool:
    """Say whether the server answers this prompt with 400."""
    return digest_of("refused", prompt_ids) % 10_000 < share * 10_000


class AnsweringServer:
    """Its answers and its ledger."""

    def __init__(self, arguments: argparse.Namespace):
        self.tokenizer = Tokenizer.from_file(arguments.tokenizer)
        self.arguments = arguments
        self.asked: Counter[str] = Counter()
        self.in_refused_lists: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.is_frozen = False
        self._rng = random.Random(arguments.seed)

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/ledger", self._ledger)
        app.router.add_post("/freeze", self._freeze)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": 100_000}]})

    async def _ledger(self, request: web.Request) -> web.Response:
        found = {"asked": self.asked, "in_refused_lists": self.in_refused_lists, "faults": self.faults}
        return web.json_response(found)

    async def _freeze(self, request: web.Request) -> web.Response:
        self.is_frozen = True
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self.tokenizer.encode((await request.json())["prompt"], add_special_tokens=False).ids
        return web.json_response({"tokens": ids, "count": len(ids)})

    def _choice(self, prompt_ids: list[int], index: int) -> dict[str, Any]:
        number = digest_of(prompt_ids, index)
        count = 1 + number % 5 if number % 7 else 40
        steps = [f"buys: {number % 10} + {step} = {number % 10 + step}\n" for step in range(count)]
        text = "".join(steps) + f"#### {number % 30}"
        ids = [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.tokenizer.token_to_id(END)]
        return {"index": index, "text": text, "token_ids": ids, "finish_reason": "stop"}

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        self.asked.update(map(json.dumps, prompts))
        await asyncio.sleep(self.arguments.seconds * 2 * self._rng.random())
        if self.is_frozen:
            await asyncio.sleep(86_400)
        if any(is_refused(prompt, self.arguments.refused_share) for prompt in prompts):
            if len(prompts) > 1:
                self.in_refused_lists.update(map(json.dumps, prompts))
            return web.json_response({"error": "this prompt is refused"}, status=400)
        pairs = [(prompt, index) for prompt in prompts for index in range(body["n"])]
        choices = [self._choice(*pair) | {"index": number} for number, pair in enumerate(pairs)]
        if self._rng.random() < self.arguments.fault_share:
            return await self._fault(request, json.dumps({"choices": choices}))
        return web.json_response({"choices": choices})

    async def _fault(self, request: web.Request, text: str) -> web.StreamResponse:
        kind = self._rng.choice(FAULTS)
        self.faults[kind] += 1
        if kind == "500":
            return web.json_response({"error": "injected"}, status=500)
        if kind == "429":
            return web.json_response({"error": "injected"}, status=429, headers={"Retry-After": "1"})
        if kind == "late":
            await asyncio.sleep(self.arguments.late)
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(text))})
        await response.prepare(request)
        await response.write(text[: len(text) // 2].encode())
        if request.transport is not None:
            request.transport.close()
        return response


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the process ends."""
    runner = web.AppRunner(AnsweringServer(arguments).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="what an answer takes, on average")
    parser.add_argument("--fault-share", type=float, default=0.0)
    parser.add_argument("--refused-share", type=float, default=0.0)
    parser.add_argument("--late", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
