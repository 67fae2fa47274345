"""Sampling through a server against sampling in process, the same requests side by side in one run.

    bash scripts/bench.sh sampling throughput

Two kinds of requests: whole solutions, n = 8 a problem, and completions of 2,000 states, n = 4 a state. A: all that
service_api_caller_v1.py does once its server is up: requests over HTTP, answers graded, steps cut, records written. B:
`vllm.LLM.generate` on the same prompts, nothing else done. For states a third side asks a server with
shared blocks, so that what those cost or gain in time is seen too. Each side has a process and session of its own.
The engines live through the whole run and take turns (A B, B A, A B ...) after one warm-up, so that what else
happens on the machine meets all alike; tokens are generated tokens. Each waits first until the others are at rest:
vLLM's processes spin for a second after their last answer, on the core that another needs. Look at the load first:
a busy core makes the figure worthless.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import Side, load_before, serve
from benchmarks.result import figure
from benchmarks.sampling.prefill import engine_options
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import State
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.requests import CompletionRequests, RequestSource, TrajectoryRequests
from espalier.sampling.runner import Runner
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient

REST_SECONDS = 2.5
ENGINE = {"enforce_eager": True, "max_num_seqs": 256, "block_size": 32}
GOAL = 0.95
IN_FLIGHT = int(OmegaConf.load(ROOT / "conf" / "sample.yaml").engine.concurrency)  # what the callers do


class ServerSide:
    """A: runner, client, grading and files against a running server."""

    def __init__(self, model: str, base_url: str, source: RequestSource, params: SamplingParams):
        self.tokenizer = load_tokenizer(model)
        self.task = WordArithmetic()
        self.base_url, self.source, self.params = base_url, source, params
        self.requests = source.load(self.task, self.tokenizer)

    def tokens_per_second(self) -> float:
        """Make one pass over all requests into a fresh file."""
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(
                VLLMClient(self.base_url),
                self.params,
                lambda request, samples: self.source.records(self.task, self.tokenizer, request, samples),
                Path(folder) / "rows.jsonl",
                concurrency=IN_FLIGHT,
                stall_seconds=120,
                on_progress=lambda done, fields: None,
            )
            time.sleep(REST_SECONDS)
            started = time.perf_counter()
            tally = asyncio.run(runner.run(self.requests, set()))
            return tally.tokens / (time.perf_counter() - started)


class InProcess:
    """B: `vllm.LLM.generate`."""

    def __init__(self, model: str, requests: list[SampleRequest], params: SamplingParams):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM
        from vllm import SamplingParams as EngineParams

        self.llm = LLM(model=model, dtype="bfloat16", max_model_len=512, disable_log_stats=True, **ENGINE)
        self.prompts: list[Any] = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        self.params = EngineParams(n=params.n, temperature=params.temperature, max_tokens=params.max_tokens)

    def tokens_per_second(self) -> float:
        """Make one generate call over all prompts."""
        time.sleep(REST_SECONDS)
        started = time.perf_counter()
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return tokens / (time.perf_counter() - started)


def side_of(side: str, work: "Work", base_url: str = "") -> Side:
    """Return one side, up and warm."""
    command = [sys.executable, "-m", "benchmarks.sampling.throughput", work.model, side, "--base-url", base_url]
    started = Side([*command, "--states", work.states, "--number", str(work.number)])
    started.ask()
    return started


@dataclass(frozen=True)
class Work:
    """What is asked: `number` states of a file, or solutions of `number` problems where there is none."""

    model: str
    number: int
    states: str = ""

    def source(self, folder: str) -> tuple[RequestSource, SamplingParams]:
        """Return the requests as the pipeline makes them."""
        if not self.states:
            return TrajectoryRequests("train", 0, self.number), SamplingParams(n=8, temperature=1.0, max_tokens=128)
        path = Path(folder) / "states.jsonl"
        write_records(path, read_records(State, self.states)[: self.number])
        return CompletionRequests(str(path)), SamplingParams(n=4, temperature=1.0, max_tokens=128)


def serve_side(side: str, work: Work, base_url: str) -> None:
    """The child's loop: one round for each line of standard input."""
    with tempfile.TemporaryDirectory() as folder:
        source, params = work.source(folder)
        requests = source.load(WordArithmetic(), load_tokenizer(work.model))
        made: Any = (
            ServerSide(work.model, base_url, source, params)
            if side == "server"
            else InProcess(work.model, requests, params)
        )
        serve(lambda _: {"tokens_per_second": made.tokens_per_second()})


def measure_work(work: Work, rounds: int) -> list[list[float]]:
    """Return tokens per second of every round: server, in process, and for states a server with shared blocks."""
    found = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = {**ENGINE, "disable_log_stats": True, "disable_uvicorn_access_log": True}
        kinds = (
            [options, {**engine_options("partial_block_cache"), "disable_log_stats": True}]
            if work.states
            else [options]
        )
        servers = [stack.enter_context(VLLMServer(work.model, f"{folder}/server{number}.log", options=kind))
                   for number, kind in enumerate(kinds)]  # fmt: skip
        sides = [side_of("server", work, servers[0].base_url), side_of("engine", work)]
        sides += [side_of("server", work, server.base_url) for server in servers[1:]]
        for side in sides:
            stack.callback(side.stop)
        for turn in range(rounds):
            rates = {side: side.ask()["tokens_per_second"] for side in (sides if turn % 2 else sides[::-1])}
            found.append([rates[side] for side in sides])
            print(f"round {turn}: {', '.join(f'{rate:.0f}' for rate in found[-1])} tokens/s", file=sys.stderr)
    return found


def measure(model: str, states: str, rounds: int, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figure, detail); the figure is the worse of the two kinds of requests."""
    load = load_before()
    rates = {"trajectories": measure_work(Work(model, 256), rounds),
             "states": measure_work(Work(model, 2000, states), rounds)}  # fmt: skip
    figures = {name: figure([row[0] / row[1] for row in rows], goal=GOAL, how=how) for name, rows in rates.items()}
    detail: dict[str, Any] = {
        "requests": f"256 problems x n=8, 2000 states x n=4, {IN_FLIGHT} prompts in flight, max_num_seqs 256",
        "tokens_per_second": {name: [[round(rate) for rate in row] for row in rows] for name, rows in rates.items()},
        "load_before": load,
        **{f"http_vs_in_process_{name}": row["value"] for name, row in figures.items()},
        "shared_vs_plain_server_states": figure([row[2] / row[0] for row in rates["states"]], goal=1.0, how=how)[
            "value"
        ],
    }
    return {"http_vs_in_process": min(figures.values(), key=lambda row: float(row["value"]))}, detail


def main() -> None:
    """A side of the benchmark, started by `Side`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("side", choices=["server", "engine"])
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--states", default="")
    parser.add_argument("--base-url", default="")
    arguments = parser.parse_args()
    serve_side(arguments.side, Work(arguments.model, arguments.number, arguments.states), arguments.base_url)


if __name__ == "__main__":
    main()
