"""What a Ray cluster costs, beside the same work without one.

    bash scripts/bench.sh cluster --policy MODEL     a small policy of word_arithmetic: the quick start's SFT model

Throughput: 512 samples (64 problems x 8) by two one-thread engines on two nodes (raylets of this machine, with a core
each) and by the same two engines without Ray. All four engines live through the whole run and take turns (A B, B A,
A B, ...) after one warm-up; every round asks for the same problems with other random numbers. Look at the load first.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes.sides import load_before
from benchmarks.result import figure, write_result
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.runtime.ray_cluster import join_cluster, leave_cluster
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.ray_engines import RayEngines
from espalier.sampling.requests import TrajectoryRequests

HOW = "bash scripts/bench.sh cluster --policy MODEL"
GOAL = 0.9
OPTIONS = {"enforce_eager": True, "max_num_seqs": 256}
PARAMS = SamplingParams(n=8, temperature=1.0, max_tokens=96)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Join a cluster of a head without cores and two nodes of one core each, all on this machine."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        join_cluster(made.address)
        yield
    finally:
        leave_cluster()
        made.shutdown()


async def tokens_per_second(client: EnginePool, requests: list[SampleRequest]) -> float:
    """Ask for all requests at once."""
    started = time.perf_counter()
    found = await asyncio.gather(*(client.sample(request, PARAMS) for request in requests))
    tokens = sum(len(sample.token_ids) for samples in found for sample in samples)
    return tokens / (time.perf_counter() - started)


async def measure(policy: str, folder: Path, rounds: int) -> list[dict[str, float]]:
    """Return tokens per second of every round, with Ray and without."""
    requests = TrajectoryRequests("train", 0, 64).load(WordArithmetic(), load_tokenizer(policy))
    both: dict[str, EnginePool] = {
        "ray": RayEngines(policy, str(folder / "ray.log"), 2, options=OPTIONS, placement="STRICT_SPREAD"),
        "without": DataParallelEngines(policy, str(folder / "without.log"), 2, options=OPTIONS, num_threads=1),
    }
    try:
        for client in both.values():
            await client.open()
            await tokens_per_second(client, requests)
        found = []
        for number in range(rounds):
            order = list(both) if number % 2 else list(both)[::-1]
            found.append({name: await tokens_per_second(both[name], requests) for name in order})
        return found
    finally:
        for client in both.values():
            await client.close()


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    check_model_folder(arguments.policy)
    load = load_before()
    with tempfile.TemporaryDirectory() as folder, two_nodes():
        rows = asyncio.run(measure(arguments.policy, Path(folder), arguments.rounds))
    ratios = [row["ray"] / row["without"] for row in rows]
    detail = {"tokens_per_second": rows, "load_before": load}
    print(write_result("cluster", {"engines_on_ray_vs_without": figure(ratios, goal=GOAL, how=HOW)}, detail))


if __name__ == "__main__":
    main()
