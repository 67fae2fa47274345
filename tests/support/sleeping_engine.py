"""An engine that samples by request and weights alone and loses all of them when it sleeps, with no vLLM behind it:
what `sampling.engine_process` runs, for runs whose engine sleeps.

python -m tests.support.sleeping_engine DESCRIPTOR

Its options: `calls`, a file that gets a line for each thing it is asked; `keeps_losing`, the weight that is not there
any more after a sleep, whatever is delivered; `fails_to_wake`.
"""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.sampling.client import (
    CACHE,
    LOOPBACK,
    WEIGHTS,
    EngineAsleep,
    Sample,
    SampleRequest,
    SamplingParams,
    ServerGone,
)
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_process import serve
from espalier.sampling.weight_chain import Invitation
from espalier.sampling.weight_stream import WeightReceiver


class SleepingEngine:
    """Also `sampling.client.TakesWeights` and a client itself, in the process that asks."""

    weights: WeightReceiver
    name = "the engine"
    host = LOOPBACK
    process = 0
    is_coming = False

    def __init__(self, model: str, options: dict[str, Any], max_model_len: int, **_: Any):
        self.model, self.options, self.max_model_length = model, options, max_model_len
        self.asleep: set[str] = set()
        self.version, self.has_slept = "default", False

    def note(self, what: str) -> None:
        with Path(self.options["calls"]).open("a") as file:
            file.write(f"{what}\n")

    def check_awake(self, what: str) -> None:
        self.note(what)
        if self.asleep:
            self.note("asked while asleep")
            raise EngineAsleep("the engine sleeps")

    async def open(self) -> None:
        self.server = RepeatableServer(self.model, self.max_model_length)
        self.note("open")

    async def close(self) -> None: ...

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.check_awake("sample")
        body = {"prompt": request.prompt_ids, "n": params.n, "temperature": params.temperature,
                "max_tokens": params.max_tokens}  # fmt: skip
        await asyncio.sleep(0)
        return [
            Sample(row["text"], row["token_ids"], row["finish_reason"], row["logprobs"]["token_logprobs"])
            for row in self.server.sample(body)
        ]

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        self.check_awake("prove")
        rows = self.server.prompt_logprobs(ids)[1:]
        return [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows, strict=True)]

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        self.check_awake("prove")
        return None

    def drawn_so_far(self) -> dict[str, int]:
        return {}

    async def is_working(self) -> bool:
        return True

    async def worker_ranks(self) -> list[str]:
        return ["0"]

    async def join_weights(self, invitation: dict[str, Any], first_rank: int) -> None:
        self.weights = await asyncio.to_thread(WeightReceiver, Invitation(**invitation), first_rank)

    async def receive_weights(self, key: str, number: int) -> list[dict[str, str]]:
        self.note("receive")
        if WEIGHTS in self.asleep:
            raise ServerGone("there is no memory for weights")
        found = await asyncio.to_thread(lambda: dict(self.weights.receive()))
        receipt = self.server.load_weights(found)
        if self.has_slept and "keeps_losing" in self.options:
            self.server.model.state_dict()[self.options["keeps_losing"]].zero_()
        return [receipt]

    async def sleep(self) -> None:
        if not self.options.get("enable_sleep_mode"):
            return
        self.note("sleep")
        self.asleep, self.has_slept = {WEIGHTS, CACHE}, True
        for value in self.server.model.state_dict().values():
            value.fill_(float("nan") if value.is_floating_point() else 0)

    async def wake(self, part: str) -> None:
        if part not in self.asleep:
            return
        self.note(f"wake {part}")
        if "fails_to_wake" in self.options:
            raise ServerGone("the vLLM engine fails in wake_up: RuntimeError: CUDA Error: out of memory")
        self.asleep.remove(part)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def reset_cache(self) -> bool:
        return True

    async def stamp(self, version: str) -> None:
        self.note(f"stamp {version}")
        self.version = version

    async def served_version(self) -> str:
        return self.version


class SleepingEngines(DataParallelEngines):
    """A pool of these, which need no GPU to sleep."""

    program = "tests.support.sleeping_engine"

    def can_sleep(self) -> bool:
        return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), SleepingEngine))
