"""What a Ray cluster costs, beside the same work without one, and weights on their way to its nodes.

    bash scripts/bench.sh cluster weights
    bash scripts/bench.sh cluster throughput --policy MODEL     a small policy of word_arithmetic: the quick start's SFT
    bash scripts/bench.sh cluster overlap real driver --policy MODEL

Weights: 1 GB of bfloat16 tensors to actors on two nodes (raylets of this machine) by `sampling.weight_stream`, digests
and copies into an engine's own tensors included, in turns with a bare gloo broadcast of ten tensors of the same size in
all over the same three processes, after a delivery of each that is not timed. Memory: how far a process' peak of a
delivery lies above what it held before, in the first one too, in which the memory of its buckets is made.

Throughput: 512 samples (64 problems x 8) by two one-thread engines on two nodes (raylets of this machine, with a core
each) and by the same two engines without Ray. All four engines live through the whole run and take turns (A B, B A,
A B, ...) after one warm-up; every round asks for the same problems with other random numbers. Look at the load first.

Overlap and driver: `benchmarks.cluster.overlap`, with engines that sleep; real: there too, with real ones.
"""

import argparse
import asyncio
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed

from benchmarks.cluster.overlap import GOAL as GOAL_OVERLAP
from benchmarks.cluster.overlap import measure_driver, measure_overlap, measure_real_overlap, overlap_ratios
from benchmarks.processes.sides import load_before
from benchmarks.result import RESULTS, figure, write_result
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.runtime.ray_cluster import (
    call_actor,
    join_cluster,
    leave_cluster,
    node_address,
    place_actor,
    release,
    reserve,
)
from espalier.runtime.ray_rooms import Room
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_pool import EnginePool
from espalier.sampling.ray_engines import RayEngines
from espalier.sampling.requests import TrajectoryRequests
from espalier.sampling.weight_buckets import HOST, kinds_of
from espalier.sampling.weight_chain import Invitation, own_address
from espalier.sampling.weight_digest import digest
from espalier.sampling.weight_stream import WeightReceiver, WeightSender

dist: Any = torch.distributed  # parts of it have no types
HOW = "bash scripts/bench.sh cluster"
PARTS = ["weights", "throughput", "overlap", "real", "driver"]
GOAL = 0.9
GOAL_FLAT = 1.1  # times the cost of few engines, or of few rollouts
GOAL_SECONDS = 1.5  # times a bare broadcast
GOAL_MIB = 128  # all buckets that an end holds
NUM_TENSORS, TENSOR = 250, 2_000_000  # in bfloat16 1 GB
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


def peak_above(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `work` returns, and by how many MiB this process' resident memory rose at most meanwhile."""

    def kib(name: str) -> int:
        rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(rows[name].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    found = work()
    return found, (kib("VmHWM") - before) / 1024


class EngineEnd:
    """One worker with weights of its own, in an actor."""

    def join(self, streamed: dict[str, Any], shared: dict[str, Any], rank: int) -> None:
        """Join the trainer's groups."""
        self.ends = {
            "stream": WeightReceiver(Invitation(**streamed), rank),
            "shared": WeightReceiver(Invitation(**shared), rank, HOST),
        }
        self.own = {str(k): torch.ones(TENSOR, dtype=torch.bfloat16) for k in range(NUM_TENSORS)}
        self.parts = [torch.ones(NUM_TENSORS * TENSOR // 10, dtype=torch.bfloat16) for _ in range(10)]

    def take(self, side: str) -> float:
        """Take one delivery of that group into the own weights; MiB above what was held."""

        def work() -> None:
            for name, value in self.ends[side].receive():
                digest(value)
                self.own[name].copy_(value)

        return peak_above(work)[1]

    def join_bare(self, address: str, port: int, rank: int) -> None:
        """Join the group of the bare broadcast."""
        self.group = bare_group(address, port, rank)

    def take_bare(self) -> float:
        """Take part in the bare broadcast."""
        broadcast(self.group, self.parts)
        return float(self.own["0"][0])


def bare_group(address: str, port: int, rank: int) -> Any:
    """Return a gloo group of three processes, the first of which is found there."""
    store = dist.TCPStore(address, port, 3, is_master=rank == 0)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, 3, options)


def broadcast(group: Any, parts: Sequence[torch.Tensor]) -> None:
    """Send tensors from rank 0 to all others, or take them."""
    for part in parts:
        group.broadcast([part], dist.BroadcastOptions()).wait()


async def measure_weights(rounds: int) -> list[dict[str, float]]:
    """Return seconds and MiB of every round."""
    room = Room("ends", 2, {"CPU": 1}, "STRICT_SPREAD")
    group = await reserve(room, 60)
    actors = [place_actor(EngineEnd, group, number, room.resources) for number in range(2)]
    address = own_address(await asyncio.to_thread(node_address))
    senders = {"stream": WeightSender(address, 2), "shared": WeightSender(address, 2, device=HOST)}
    weights = {str(k): torch.full((TENSOR,), float(k), dtype=torch.bfloat16) for k in range(NUM_TENSORS)}
    parts = [torch.ones(NUM_TENSORS * TENSOR // 10, dtype=torch.bfloat16) for _ in range(10)]
    kinds = kinds_of(weights)

    async def both(
        name: str, own: Callable[[], Any], *arguments: Any, has_rank: bool = False
    ) -> tuple[float, list[Any], Any]:
        asked = [asyncio.create_task(call_actor(actor, name, *arguments, *([rank] if has_rank else [])))
                 for rank, actor in enumerate(actors, start=1)]  # fmt: skip
        started = time.perf_counter()
        found = await asyncio.to_thread(own)
        answers = await asyncio.gather(*asked)
        return time.perf_counter() - started, answers, found

    def join_all() -> None:
        for sender in senders.values():
            sender.join()
        if [sender.way for sender in senders.values()] != ["connections", "memory that they share"]:
            raise SystemExit("error: the groups do not go the ways that they are named by")

    with socket.create_server((address, 0)) as free:
        port = int(free.getsockname()[1])
    invitations = [sender.invitation.as_dict() for sender in senders.values()]
    await both("join", join_all, *invitations, has_rank=True)
    _, _, bare = await both("join_bare", partial(bare_group, address, port, 0), address, port, has_rank=True)
    rows = []
    for number in range(rounds + 1):
        row: dict[str, float] = {}
        for side in ("stream", "shared", "bare") if number % 2 else ("bare", "shared", "stream"):
            if side == "bare":
                row["bare_seconds"] = (await both("take_bare", partial(broadcast, bare, parts)))[0]
                continue
            send = partial(senders[side].send, kinds, weights.items())
            row[f"{side}_seconds"], of_engines, (_, own) = await both("take", partial(peak_above, send), side)
            row["sender_mib"] = max(own, row.get("sender_mib", 0.0))
            row["receiver_mib"] = max(*of_engines, row.get("receiver_mib", 0.0))
        rows.append(row)
    for sender in senders.values():
        sender.close()
    release(group)
    return rows


def weight_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return seconds beside the bare broadcast, and MiB above what was held. Seconds are those behind the first round;
    the bare broadcast is the fastest of all (it takes 0.45 or 1.0 s on two cores, by chance), or that of the same
    round."""
    timed = rows[1:]
    bare = min(row["bare_seconds"] for row in timed)
    ratios = sorted(row["stream_seconds"] / bare for row in timed)
    paired = sorted(row["stream_seconds"] / row["bare_seconds"] for row in timed)
    shared = sorted(row["shared_seconds"] / row["stream_seconds"] for row in timed)
    memory = sorted(max(row["sender_mib"], row["receiver_mib"]) for row in rows)
    found = {}
    for name, values, value, goal, unit in (
        ("weights_seconds_vs_bare_broadcast", ratios, median(ratios), GOAL_SECONDS, "ratio"),
        ("weights_seconds_vs_bare_broadcast_of_the_round", paired, median(paired), GOAL_SECONDS, "ratio"),
        ("weights_seconds_in_shared_memory_vs_connections", shared, median(shared), 1.0, "ratio"),
        ("weights_memory", memory, memory[-1], GOAL_MIB, "MiB at any end, the most"),
    ):
        found[name] = {"value": round(value, 3), "low": round(values[0], 3), "high": round(values[-1], 3), "unit": unit,
                       "goal": goal, "better": "lower", "met": value <= goal, "how": f"{HOW} weights"}  # fmt: skip
    return found


def real_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an iteration one version ahead beside the longer of sampling and training, and beside one in turn."""
    figures = {}
    for row in rows:
        name = f"real_{row['config'].split('_')[0]}_iteration_vs"
        longer = row["ahead"] / max(row["sampling"], row["training"])
        in_turn = row["ahead"] / row["in_turn"]
        for what, ratio, goal in (("longer_part", longer, GOAL_OVERLAP), ("in_turn", in_turn, 1.0)):
            figures[f"{name}_{what}"] = {
                "value": round(ratio, 3), "low": round(ratio, 3), "high": round(ratio, 3), "unit": "ratio of medians",
                "goal": goal, "better": "lower", "met": ratio <= goal, "how": f"{HOW} real --policy MODEL",
            }  # fmt: skip
    return figures


def driver_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return processor seconds and memory of the driver per 1,000 rollouts where there are most, and beside those where
    there are few."""
    last = rows[-1]
    of_fewest = [row["seconds_per_1000"] for row in rows if row["rollouts"] == rows[0]["rollouts"]]
    growth = (last["peak_gib"] - rows[0]["peak_gib"]) / max(1.0, last["rollouts"] - rows[0]["rollouts"])
    sizes = f"of {last['tokens']:g} tokens, {last['engines']:g} engines"
    values = {
        "driver_seconds_per_1000_rollouts": (last["seconds_per_1000"], f"processor seconds, {sizes}", 5.0, "lower"),
        "driver_gib_per_1000_rollouts": (1000 * growth, f"GiB, {sizes}", 0.5, "lower"),
        "driver_rollouts_per_second": (last["rollouts_per_second"], f"rollouts {sizes}", 100.0, "higher"),
        "driver_cost_of_most_engines_vs_fewest": (of_fewest[-1] / of_fewest[0], "ratio", GOAL_FLAT, "lower"),
        "driver_cost_of_most_rollouts_vs_fewest": (
            last["seconds_per_1000"] / of_fewest[-1], "ratio, of each", GOAL_FLAT, "lower",
        ),
    }  # fmt: skip
    return {
        name: {"value": round(value, 3), "low": round(value, 3), "high": round(value, 3), "unit": unit, "goal": goal,
               "better": better, "met": value <= goal if better == "lower" else value >= goal,
               "how": f"{HOW} driver --policy MODEL"}
        for name, (value, unit, goal, better) in values.items()
    }  # fmt: skip


def main() -> None:
    """Measure what is named and write it beside what is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--policy", default="", help="a policy of word_arithmetic, for all parts but weights")
    parser.add_argument(
        "--rollouts", type=int, nargs="+", default=[512, 2048, 16384], help="of driver, with most engines"
    )
    parser.add_argument(
        "--engines", type=int, nargs="+", default=[1, 4, 16, 64], help="of driver, with fewest rollouts"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part '{unknown[0]}': choose of {', '.join(PARTS)}")
    if parts != ["weights"] and not arguments.policy:
        parser.error(f"{', '.join(part for part in parts if part != 'weights')} need a policy: add --policy MODEL")
    if arguments.policy:
        check_model_folder(arguments.policy)
    load, path = load_before(), RESULTS / "cluster.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    figures, detail = dict(stored.get("figures", {})), dict(stored.get("detail", {}))
    with tempfile.TemporaryDirectory() as folder, two_nodes():
        if "weights" in parts:
            rows = asyncio.run(measure_weights(arguments.rounds))
            figures |= weight_figures(rows)
            detail["weights"] = {"rounds": rows, "load_before": load}
        if "throughput" in parts:
            rows = asyncio.run(measure(arguments.policy, Path(folder), arguments.rounds))
            ratios = [row["ray"] / row["without"] for row in rows]
            how = f"{HOW} throughput --policy MODEL"
            figures["engines_on_ray_vs_without"] = figure(ratios, goal=GOAL, how=how)
            detail["throughput"] = {"tokens_per_second": rows, "load_before": load}
        if "overlap" in parts:
            rows = measure_overlap(arguments.policy, Path(folder))
            ratios = sorted(overlap_ratios(rows))
            figures["iteration_vs_longer_of_drawing_and_training"] = {
                "value": round(ratios[-1], 3), "low": round(ratios[0], 3), "high": round(ratios[-1], 3),
                "unit": "ratio, the worst of three", "goal": GOAL_OVERLAP, "better": "lower",
                "met": ratios[-1] <= GOAL_OVERLAP, "how": f"{HOW} overlap --policy MODEL",
            }  # fmt: skip
            detail["overlap"] = {"rows": rows, "load_before": load}
    if "real" in parts:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_real_overlap(arguments.policy, Path(folder))
        detail["real"] = {"rows": rows, "load_before": load}
        figures |= real_figures(rows)
    if "driver" in parts:
        sizes = [(arguments.rollouts[0], engines) for engines in arguments.engines]
        sizes += [(rollouts, arguments.engines[-1]) for rollouts in arguments.rollouts[1:]]
        rows = measure_driver(arguments.policy, sizes)
        detail["driver"] = {"rows": rows, "load_before": load}
        figures |= driver_figures(rows)
    print(write_result("cluster", figures, detail))


if __name__ == "__main__":
    main()
