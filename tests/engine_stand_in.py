"""A program that talks as `sampling.engine_process` does, with no vLLM behind it: what it does is in the request's id.

python -m tests.engine_stand_in DESCRIPTOR
"""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.engine_process import serve


class StandIn:
    def __init__(self, model: str, options: dict[str, Any], **_: Any):
        self.model, self.options = model, options
        self.version = "default"
        self.folders: list[str] = []
        self.num_cancelled = 0

    async def open(self) -> None:
        if self.model == "missing":
            raise ServerGone("no vLLM engine can be had for missing")
        if self.model == "slow":
            time.sleep(60)

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        if request.id == "refused":
            raise Refused("too long")
        if request.id == "broken":
            raise KeyError("in\ntwo lines")
        if request.id == "die":
            print("RuntimeError: out of memory", flush=True)
            os._exit(7)
        if request.id == "hang":
            time.sleep(60)
        try:
            await asyncio.sleep(60 if request.id == "long" else 0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [Sample(str(self.options["seed"]), request.prompt_ids, "stop") for _ in range(params.n)]

    async def is_working(self) -> bool:
        return True

    async def receive_weights(self, folder: Path) -> list[dict[str, str]]:
        self.folders.append(str(folder))
        return [{"engine": str(self.options["seed"])}]

    async def reset_cache(self) -> bool:
        return self.options["seed"] == 0 or "stubborn" not in self.model

    async def stamp(self, version: str) -> None:
        self.version = version if self.options["seed"] == 0 or "stubborn" not in self.model else "old"

    async def served_version(self) -> str:
        return self.version

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        return self.num_cancelled if prompt == [0] else int(self.options["seed"])

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        return [float(self.options["seed"])] * (len(ids) - 1)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), StandIn))
