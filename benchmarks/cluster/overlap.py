"""Iterations that draw ahead: how far drawing and training overlap, and what the driver costs.

Overlap: eight iterations of two sleeping engines on two nodes of a Ray cluster and a learner that sleeps too, one
version ahead; the median iteration from the third on, beside the longer of the two. With a real vLLM engine and a real
learner, a thread each, `main.py` in turn and one version ahead; sampling and training are measured in turn. Driver:
processor seconds of this process per 1,000 rollouts of many tokens, and its memory, with 1 to 64 sleeping engines on
this machine.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes.forked import ROOT
from espalier.data.records import Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.rewards.outcome import OutcomeReward
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_source import SampledGroups
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import SamplingParams
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.ray_engines import RayEngines

PROGRAM = "benchmarks.cluster.sleeping_engine"
GOAL = 1.1
TOKENS = 4096
PAIRS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0))
"""Seconds that drawing and training take."""


REAL = {
    "grpo_word_arithmetic": ["rollout.num_problems=32"],
    "vineppo_word_arithmetic": ["rollout.num_problems=8", "advantage.completions_per_state=3"],
}
REAL_SECONDS = 900
SAMPLING = ("rollout", "reward", "completions")


class NoDelivery:
    """Engines that take any weights at any time."""

    takes_in_flight = True
    computes_in = "nothing"

    @property
    def sync(self) -> "NoDelivery":
        """Itself."""
        return self

    async def check_version(self, version: int) -> None:
        """They serve any."""

    async def ask_marker_now(self) -> None:
        """They cache nothing."""

    def begin_proof(self) -> None:
        """There is nothing to prove."""

    async def prove(self) -> None:
        """There is nothing to prove."""

    def take_proof(self) -> dict[str, float]:
        """There is none."""
        return {}


def source_of(
    client: EnginePool, tokenizer: Any, loop: BackgroundLoop, group_size: int, *settings: str
) -> SampledGroups:
    """Return what draws from these engines."""
    config: Any = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", ["output_dir=x", "model.path=x", *settings])
    task = WordArithmetic()
    problems: Sequence[Problem] = list(task.problems("train"))
    sampler = Sampler(client, task, tokenizer, concurrency=4096, stall_seconds=120)
    params = SamplingParams(n=group_size, temperature=1.0, max_tokens=8192, return_logprobs=True)
    delivery: Any = NoDelivery()
    return SampledGroups(config, problems, sampler, params, OutcomeReward(), delivery, loop, IterationMetrics())


def sample_of(tokens: int, tokenizer: Any) -> dict[str, Any]:
    """Return ids and text of a solution of so many tokens, in steps of one line."""
    ids = tokenizer("12 + 7 = 19\n" * tokens).input_ids[:tokens]
    return {"ids": ids, "text": tokenizer.decode(ids)}


def iteration_seconds(source: SampledGroups, training: float, num: int = 8) -> list[float]:
    """Return the seconds of every iteration."""
    found = []
    for iteration in range(num):
        started = time.perf_counter()
        source(iteration)
        time.sleep(training)
        with source.at_rest(iteration + 1):
            pass
        found.append(time.perf_counter() - started)
    return found


def measure_overlap(policy: str, folder: Path) -> list[dict[str, Any]]:
    """Return the seconds of every iteration, for each pair of times; joined to a cluster of two nodes."""
    tokenizer, rows = load_tokenizer(policy), []
    for drawing, training in PAIRS:
        client = RayEngines(
            policy,
            str(folder / "sleeping.log"),
            2,
            options={"seconds": drawing, **sample_of(64, tokenizer)},
            placement="STRICT_SPREAD",
        )
        client.program = PROGRAM
        with BackgroundLoop() as loop:
            loop.run(client.open())
            try:
                settings = ("rollout.num_problems=32", "num_iterations=8", "rollout.max_staleness=1")
                seconds = iteration_seconds(source_of(client, tokenizer, loop, 8, *settings), training)
            finally:
                loop.run(client.close())
        rows.append({"drawing": drawing, "training": training, "iterations": seconds})
    return rows


def measure_real_overlap(policy: str, folder: Path) -> list[dict[str, Any]]:
    """Return, of each method, the seconds of an iteration in turn, of its sampling and of the rest of it, and of an
    iteration one version ahead: medians from the fourth iteration on, while the policy hardly moves."""
    rows = []
    for config, settings in REAL.items():
        seconds = {}
        for ahead in (0, 1):
            run = folder / f"{config}-{ahead}"
            words = [
                "main.py", "-cn", f"exp/ppo/{config}", f"model.path={policy}", f"output_dir={run}", "server=none",
                "client=data_parallel_engines", "client.num_engines=1", "client.num_threads=1",
                f"rollout.max_staleness={ahead}", "num_iterations=12", "evaluation.every=0", "samples.every=0",
                "params.max_tokens=96", "update.learning_rate=1e-6", *settings,
            ]  # fmt: skip
            command = [sys.executable, *words]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            with (folder / "real.log").open("ab") as log:
                subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True, timeout=REAL_SECONDS
                )
            found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            steady = [row for row in found if row.get("step", 0) > 3 and "seconds/iteration" in row][:-1]
            whole = median(row["seconds/iteration"] for row in steady)
            waited = median(sum(row.get(f"seconds/{name}", 0.0) for name in SAMPLING) for row in steady)
            seconds[ahead] = (whole, waited)
        (in_turn, sampling), (one_ahead, waited) = seconds[0], seconds[1]
        rows.append({
            "config": config, "in_turn": in_turn, "sampling": sampling, "training": in_turn - sampling,
            "ahead": one_ahead, "ahead_waited": waited,
        })  # fmt: skip
    return rows


def overlap_ratios(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return a steady iteration of each pair beside the longer of its two times."""
    return [median(row["iterations"][2:-1]) / max(row["drawing"], row["training"]) for row in rows]


def measure_driver(policy: str, sizes: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Return processor seconds per 1,000 rollouts, rollouts per second and peak memory, for each (rollouts, engines) of
    `sizes`; memory only rises: the largest come last."""
    tokenizer, rows = load_tokenizer(policy), []
    options = {"seconds": 0.0, **sample_of(TOKENS, tokenizer)}
    for num, engines in sizes:
        with tempfile.TemporaryDirectory() as folder, BackgroundLoop() as loop:
            client = DataParallelEngines(policy, f"{folder}/sleeping.log", engines, options=options, num_threads=1)
            client.program = PROGRAM
            loop.run(client.open())
            try:
                source = source_of(client, tokenizer, loop, 8, f"rollout.num_problems={num // 8}", "num_iterations=1")
                before, started = _processor_seconds(), time.perf_counter()
                source(0)
                spent, taken = _processor_seconds() - before, time.perf_counter() - started
            finally:
                loop.run(client.close())
        rows.append({
            "engines": engines, "rollouts": num, "tokens": TOKENS, "seconds_per_1000": 1000 * spent / num,
            "rollouts_per_second": num / taken, "peak_gib": _peak_gib(),
        })  # fmt: skip
    return rows


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
