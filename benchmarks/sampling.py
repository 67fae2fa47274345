"""Sampling through a server against sampling in process, the same requests side by side in one run.

    bash scripts/bench.sh sampling MODEL

A: all that service_api_caller_v1.py does once its server is up: requests over HTTP, answers graded, steps
cut, records written. B: `vllm.LLM.generate` on the same prompts, nothing else done. Each side has a process
of its own. Both engines live through the whole run and take turns (A B, B A, A B ...), seven rounds after
one warm-up, so that what else happens on the machine meets both alike; tokens are generated tokens. Each
waits first until the other is at rest: vLLM's processes spin for a second after their last answer, on the
core that the other needs. Look at the machine's load first: a busy core makes the figure worthless.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.result import figure, write_result
from benchmarks.sides import Side, load_before, serve
from data.tasks.word_arithmetic import WordArithmetic
from models.load import load_tokenizer
from sampling.client import SampleRequest, SamplingParams
from sampling.requests import TrajectoryRequests
from sampling.runner import Runner
from sampling.server import VLLMServer
from sampling.vllm_client import VLLMClient

REST_SECONDS = 2.5
ENGINE = {"enforce_eager": True, "max_num_seqs": 256}


class ServerSide:
    """A: runner, client, grading and files against a running server."""

    def __init__(self, model: str, base_url: str, requests: list[SampleRequest], params: SamplingParams):
        self.tokenizer = load_tokenizer(model)
        self.task = WordArithmetic()
        self.base_url, self.requests, self.params = base_url, requests, params
        self.source = TrajectoryRequests("train", 0, len(requests))
        self.source.load(self.task, self.tokenizer)

    def tokens_per_second(self) -> float:
        """One pass over all requests into a fresh file."""
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(
                VLLMClient(self.base_url),
                self.params,
                lambda request, samples: self.source.records(self.task, self.tokenizer, request, samples),
                Path(folder) / "trajectories.jsonl",
                num_in_flight=64,
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
        """One generate call over all prompts."""
        time.sleep(REST_SECONDS)
        started = time.perf_counter()
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return tokens / (time.perf_counter() - started)


def side_command(name: str, arguments: argparse.Namespace, base_url: str = "") -> list[str]:
    """The command line of one side."""
    command = [sys.executable, "-m", "benchmarks.sampling", arguments.model, "--side", name, "--base-url", base_url]
    return [*command, "--num-problems", str(arguments.num_problems)]


def serve_side(arguments: argparse.Namespace) -> None:
    """The child's loop: one round for each line of standard input."""
    params = SamplingParams(n=8, temperature=1.0, max_tokens=128)
    tokenizer = load_tokenizer(arguments.model)
    requests = TrajectoryRequests("train", 0, arguments.num_problems).load(WordArithmetic(), tokenizer)
    if arguments.side == "server":
        side: Any = ServerSide(arguments.model, arguments.base_url, requests, params)
    else:
        side = InProcess(arguments.model, requests, params)
    serve(lambda _: {"tokens_per_second": side.tokens_per_second()})


def measure(arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """(through the server, in process) of every round."""
    pairs = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        quiet = {**ENGINE, "disable_log_stats": True, "disable_uvicorn_access_log": True}
        server = stack.enter_context(VLLMServer(arguments.model, f"{folder}/server.log", options=quiet))
        commands = [side_command("server", arguments, server.base_url), side_command("engine", arguments)]
        sides = []
        for command in commands:
            sides.append(Side(command))
            stack.callback(sides[-1].stop)
            sides[-1].ask()  # up, and warm
        for turn in range(arguments.rounds):
            order = sides if turn % 2 else sides[::-1]
            rates = {side: side.ask()["tokens_per_second"] for side in order}
            pairs.append((rates[sides[0]], rates[sides[1]]))
            print(f"round {turn}: server {pairs[-1][0]:.0f}, in process {pairs[-1][1]:.0f} tokens/s", file=sys.stderr)
    return pairs


def main() -> None:
    """Measure and write results/sampling.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--num-problems", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=["server", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--base-url", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve_side(arguments)
        return
    load = load_before()
    pairs = measure(arguments)
    ratios = [one / other for one, other in pairs]
    figures = {"server_vs_in_process": figure(ratios, goal=0.9, how="bash scripts/bench.sh sampling MODEL")}
    detail = {
        "requests": f"{arguments.num_problems} prompts x n=8, 64 requests in flight, max_num_seqs 256",
        "tokens_per_second": [[round(one), round(other)] for one, other in pairs],
        "load_before": load,
    }
    print(write_result("sampling", figures, detail))
    print(f"server / in process: {figures['server_vs_in_process']['value']}")


if __name__ == "__main__":
    main()
