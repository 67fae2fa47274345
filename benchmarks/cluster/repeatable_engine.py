"""An engine in vLLM's place that samples the same answer to the same request under the same weights, always; and the
programs of this project with such engines on Ray.

    python -m benchmarks.cluster.repeatable_engine DESCRIPTOR
    python benchmarks/cluster/repeatable_main.py -cn ... client=ray_engines server=none

The model is that of `benchmarks.processes.repeatable_server`: one request at a time, in float32, by seeds that are a
hash of the weights and the request.
"""

import asyncio
import contextlib
import sys
from typing import Any

import torch

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.engine_process import serve
from espalier.sampling.weight_buckets import HOST
from espalier.sampling.weight_chain import Invitation, StreamBroken
from espalier.sampling.weight_stream import WeightReceiver


class RepeatableEngine:
    """What `sampling.engine_process` serves; settings are those of a `OneProcessEngine`."""

    def __init__(self, model: str, max_model_len: int, **_: Any):
        self._where = model, max_model_len
        self._turn = asyncio.Lock()
        self._may_draw = asyncio.Event()
        self._may_draw.set()
        self._weights: WeightReceiver | None = None

    async def open(self) -> None:
        """Load the model."""
        torch.set_num_threads(1)
        self.model = RepeatableServer(*self._where)

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return the samples, all under the same weights."""
        body = {"prompt": request.prompt_ids, "n": params.n, "temperature": params.temperature,
                "max_tokens": params.max_tokens}  # fmt: skip
        await self._may_draw.wait()
        async with self._turn:
            rows = await asyncio.to_thread(self.model.sample, body)
            version = ((0, self.model.version),)
        return [
            Sample(row["text"], row["token_ids"], row["finish_reason"], row["logprobs"]["token_logprobs"], "", version)
            for row in rows
        ]

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of every token but the first."""
        async with self._turn:
            rows = await asyncio.to_thread(self.model.prompt_logprobs, ids)
        return [row[str(token)]["logprob"] for token, row in zip(ids[1:], rows[1:], strict=True)]

    def drawn_so_far(self) -> dict[str, int]:
        """Say nothing."""
        return {}

    async def is_working(self) -> bool:
        """It does."""
        return True

    async def worker_ranks(self) -> list[str]:
        """It is one."""
        return ["0"]

    async def join_weights(self, invitation: dict[str, Any], first_rank: int) -> None:
        """Join the trainer's group."""
        if self._weights is not None:
            self._weights.close()
        self._weights = await asyncio.to_thread(WeightReceiver, Invitation(**invitation), first_rank, HOST)

    async def receive_weights(self, key: str, number: int) -> list[dict[str, str]]:
        """Serve what is delivered; the receipt. Raises ServerGone."""
        assert self._weights is not None
        try:
            async with self._turn:
                found = await asyncio.to_thread(lambda weights: dict(weights.receive()), self._weights)
                return [self.model.load_weights(found)]
        except StreamBroken as error:
            raise ServerGone(str(error)) from error

    async def pause(self) -> None:
        """Begin with no request until `resume`."""
        self._may_draw.clear()

    async def resume(self) -> None:
        """Go on."""
        self._may_draw.set()

    async def reset_cache(self) -> bool:
        """There is none."""
        return True

    async def stamp(self, version: str) -> None:
        """Remember the version of the weights."""
        self.model.version = version

    async def served_version(self) -> str:
        """Return the last stamp."""
        return self.model.version

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        """None is."""
        return 0

    async def keep_random_state(self) -> None:
        """There is none."""

    async def put_random_state_back(self) -> None:
        """There is none."""


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), RepeatableEngine))
