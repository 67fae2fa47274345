"""A server in vLLM's place that samples the same answer to the same request under the same weights, always.

    python -m benchmarks.processes.repeatable_server --model MODEL

prints its port. A local model answers in float32, one request at a time, so no answer depends on what else is in
flight; sample k of a prompt is drawn with a seed that is a hash of the served weights, the prompt's ids and k. It
speaks what reinforcement learning asks of vLLM: completions with ids and log-probs, prompt log-probs, new weights
over a stream (/collective_rpc) with a receipt, the stamp of their version, /reset_prefix_cache (there is no cache).
"""

import argparse
import asyncio
import hashlib
import json
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.data.steps import Decoder
from espalier.sampling.weight_buckets import HOST
from espalier.sampling.weight_chain import Invitation, StreamBroken
from espalier.sampling.weight_digest import digest
from espalier.sampling.weight_stream import WeightReceiver


class RepeatableServer:
    """One model; `digest` says which weights it serves."""

    def __init__(self, path: str, max_model_len: int):
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.decode = Decoder(self.tokenizer)
        self.end = int(self.tokenizer.eos_token_id)
        self.max_model_len = max_model_len
        self.digest, self.version = "", "default"
        self.weights: WeightReceiver | None = None

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/collective_rpc", self._load)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/update_weight_version", self._stamp)
        app.router.add_get("/weight_info", self._show_stamp)
        return app

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.max_model_len}]})

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _stamp(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _show_stamp(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        match body["method"]:
            case "worker_rank":
                return web.json_response({"results": ["0"]})
            case "join_weights":
                rank = int(body["kwargs"]["first_rank"])
                invitation = Invitation(**body["kwargs"]["invitation"])
                self.weights = await asyncio.to_thread(WeightReceiver, invitation, rank, HOST)
                return web.json_response({"results": [{"rank": rank}]})
            case "receive_weights":
                return await self._receive()
        return web.json_response({"results": ["True"]})  # a random state to keep: there is none

    async def _receive(self) -> web.Response:
        assert self.weights is not None
        try:
            found = await asyncio.to_thread(lambda weights: dict(weights.receive()), self.weights)
        except StreamBroken as error:  # who asked was killed meanwhile
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"results": [self.load_weights(found)]})

    def load_weights(self, weights: dict[str, torch.Tensor]) -> dict[str, str]:
        """Serve the weights; name → digest of each."""
        self.model.load_state_dict(weights)
        found = {name: digest(value) for name, value in weights.items()}
        self.digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        return found

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(0)
        if "prompt_logprobs" in body:
            return web.json_response({"choices": [{"prompt_logprobs": self.prompt_logprobs(body["prompt"])}]})
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [choice for prompt in prompts for choice in self.sample({**body, "prompt": prompt})]
        numbered = [{**choice, "index": number} for number, choice in enumerate(choices)]
        return web.json_response({"choices": numbered, "usage": {}})

    @torch.no_grad()
    def prompt_logprobs(self, ids: list[int]) -> list[Any]:
        """As vLLM writes them: nothing for the first token, then {id: {"logprob": value}}."""
        rows = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
        found = [{str(token): {"logprob": float(row[token])}} for token, row in zip(ids[1:], rows, strict=False)]
        return [None, *found]

    @torch.no_grad()
    def sample(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return `n` answers to one prompt, all rows in one batch of the same make-up every time."""
        prompt, temperature = body["prompt"], float(body.get("temperature", 1.0))
        generators = [torch.Generator().manual_seed(self._seed(prompt, k)) for k in range(int(body.get("n", 1)))]
        rows: list[list[int]] = [[] for _ in generators]
        logprobs: list[list[float]] = [[] for _ in generators]
        ids, cache = torch.tensor([prompt] * len(rows)), None
        room = min(int(body["max_tokens"]), self.max_model_len - len(prompt))
        for _ in range(room):
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            shares = torch.log_softmax(logits / temperature if temperature > 0 else logits, -1)
            drawn = [self._draw(row, generator, temperature) for row, generator in zip(shares, generators, strict=True)]
            for row, values, token, share in zip(rows, logprobs, drawn, shares, strict=True):
                if not row or row[-1] != self.end:
                    row.append(token)
                    values.append(float(share[token]))
            ids = torch.tensor([[token] for token in drawn])
            if all(row[-1] == self.end for row in rows):
                break
        return [self._choice(k, *pair) for k, pair in enumerate(zip(rows, logprobs, strict=True))]

    def _draw(self, shares: torch.Tensor, generator: torch.Generator, temperature: float) -> int:
        if temperature == 0:
            return int(shares.argmax())
        return int(torch.multinomial(shares.exp(), 1, generator=generator))

    def _seed(self, prompt: list[int], index: int) -> int:
        text = f"{self.digest}/{prompt}/{index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _choice(self, index: int, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        has_end = bool(ids) and ids[-1] == self.end
        text = self.decode(ids[:-1] if has_end else ids)  # without special tokens, as vLLM does
        reason = "stop" if has_end else "length"
        return {"index": index, "text": text, "token_ids": ids, "finish_reason": reason,
                "logprobs": {"token_logprobs": logprobs}}  # fmt: skip


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the process ends."""
    server = RepeatableServer(arguments.model, arguments.max_model_len)
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-len", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
