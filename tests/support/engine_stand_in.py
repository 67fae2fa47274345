"""A program that talks as `sampling.engine_process` does, with no vLLM behind it: what it does is in the request's id,
or the row's name ("die", or "die at 1" for the second engine alone). Where it scores tokens, the logits at a place are
the token there and the engine's number.

python -m tests.support.engine_stand_in DESCRIPTOR
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from espalier.data.steps import TokenRow
from espalier.sampling.client import EngineAsleep, Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.engine_process import serve


class StandIn:
    def __init__(self, model: str, options: dict[str, Any], seed: int, scores_tokens: bool = False, **_: Any):
        self.model, self.options, self.seed, self.scores_tokens = model, options, seed, scores_tokens
        self.version = "default"
        self.num_cancelled = 0
        self.owed: dict[str, int] = {}
        self.is_asleep = False

    async def open(self) -> None:
        if self.model == "missing":
            print("ValueError: no weights", flush=True)
            raise ServerGone("no vLLM engine can be had for missing")
        if self.model == "slow":
            time.sleep(60)

    async def logits_of_rows(self, rows: Sequence[TokenRow]) -> list[list[list[float]]]:
        if not self.scores_tokens:
            raise ServerGone("it samples")
        for row in rows:
            await self._do(row.name)
        return [[[float(row.ids[place]), float(self.options["seed"])] for place in row.places] for row in rows]

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.owed[request.id] = 3 * params.n
        try:
            await self._do(request.id)
        finally:
            del self.owed[request.id]
        if "answer" in self.options:  # a text alone, as a chat API gives it
            return [Sample(self.options["answer"], [], "stop") for _ in range(params.n)]
        stop = f"{request.id}: {request.seed(self.seed)}" if params.is_seeded else ""
        return [Sample(str(self.options["seed"]), request.prompt_ids, "stop", stop=stop) for _ in range(params.n)]

    async def _do(self, name: str) -> None:
        what, _, where = name.partition(" at ")
        what = what if where in ("", str(self.options["seed"])) else "good"
        if what == "refused":
            raise Refused("too long")
        if what == "broken":
            raise KeyError("in\ntwo lines")
        if what == "fail":
            raise ServerGone("the vLLM engine failed: RuntimeError: no memory")
        if what == "die":
            print("RuntimeError: out of memory", flush=True)
            os._exit(7)
        if what == "hang":
            time.sleep(60)
        try:
            await asyncio.sleep({"long": 60, "slow": 0.3}.get(what.partition("/")[0], 0.01))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def drawn_so_far(self) -> dict[str, int]:
        return self.owed

    async def is_working(self) -> bool:
        return True

    async def worker_ranks(self) -> list[str]:
        return ["0"]

    async def join_weights(self, invitation: dict[str, Any], first_rank: int) -> None:

        from espalier.sampling.weight_buckets import HOST
        from espalier.sampling.weight_chain import Invitation
        from espalier.sampling.weight_stream import WeightReceiver

        if (before := getattr(self, "weights", None)) is not None:
            before.close()
        self.weights = WeightReceiver(Invitation(**invitation), first_rank, HOST)

    async def receive_weights(self, key: str, number: int) -> list[dict[str, str]]:
        if self.model == "mortal" and self.options["seed"] == 1:
            os._exit(7)
        if self.model == "takes none":
            raise ServerGone("the vLLM engine takes no weights: KeyError: 'strange'")
        from espalier.sampling.weight_digest import digest

        return [{name: digest(value) for name, value in self.weights.receive()}]

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        self.is_asleep = True

    async def wake(self, part: str) -> None:
        self.is_asleep = False

    async def reset_cache(self) -> bool:
        return self.options["seed"] == 0 or "stubborn" not in self.model

    async def stamp(self, version: str) -> None:
        self.version = version if self.options["seed"] == 0 or "stubborn" not in self.model else "old"

    async def served_version(self) -> str:
        return self.version

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        return self.num_cancelled if prompt == [0] else int(self.options["seed"])

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        if self.is_asleep:
            raise EngineAsleep("the engine sleeps")
        return [float(self.options["seed"])] * (len(ids) - 1)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), StandIn))
