"""What each of four ZeRO-3 ranks holds at most while a network is loaded, saved and delivered, and while a checkpoint
is written and read, beside its share of it.

    bash scripts/bench.sh shares [--quick]

A network with the proportions of Qwen2.5-0.5B and random weights, half as wide and with half the vocabulary, on CPUs
by gloo: its embedding is 1.1 of a share. A share is what a rank keeps of the weights: a fourth; of a checkpoint the
moments too. Counted is memory of the process: the most that its pages rise by, as the kernel keeps it, while weights
are saved and delivered, and a checkpoint written and read (the share lies there before; while weights are saved and
delivered, what an optimizer keeps beside it is no part of it), and while they are loaded the most of its own pages
whenever DeepSpeed has taken its part of a weight and what it was taken from is there; the file that is read is mapped,
its pages are the system's and common to all ranks. What comes on top of a share is given in largest weights too;
gloo's own copies are in it. A reference and a reward model are loaded as training in bf16 loads them. With `--quick`
nothing is written.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes.forked import exit_code, start, start_ranks
from benchmarks.processes.sides import load_before, peak_rss
from benchmarks.result import write_result
from benchmarks.sizes.qwen_shape import TINY, QwenShape, write_qwen
from benchmarks.sizes.tensor_memory import own_pages, reset_peak_rss
from espalier.models.in_parts import is_part, whole_shape
from espalier.models.load import load_policy, load_reference
from espalier.models.scalar_head import load_process_reward
from espalier.rl.delivery.sharded_weights import ShardedPolicy, ShardedWeights
from espalier.rl.training_engines import make_training_engine
from espalier.runtime.distributed import barrier, process_group, rank
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.rank_calls import RankCalls
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import LOOPBACK
from espalier.sampling.weight_stream import WeightSender
from espalier.training.deepspeed_engine import loading
from espalier.training.deepspeed_library import library
from espalier.training.engine import Engine
from espalier.training.shards import GatheredWeights

HOW = "bash scripts/bench.sh shares"
GOAL, RANKS, MIB = 1.3, 4, 2**20
SHAPE = QwenShape(75_968, 448, 24, 7, 1, 2432)
TEXTS = ["one and two are three"]
READER = """
import json, sys
from espalier.sampling.weight_stream import Invitation, WeightReceiver
print(sum(1 for _ in WeightReceiver(Invitation(**json.loads(sys.argv[1])), 1).receive()))
"""


def share_of(model: Any) -> int:
    """Return the bytes that this rank keeps of the weights."""
    return sum(value.ds_tensor.nbytes for value in model.parameters() if is_part(value))


def deliver(weights: ShardedWeights) -> None:
    """Send them from rank 0 to another process, which keeps none of them. Raises SystemExit where they do not come."""

    def send() -> None:
        sender = WeightSender(LOOPBACK, 1)
        words = [sys.executable, "-c", READER, json.dumps(sender.invitation.as_dict())]
        reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        sender.join()
        sender.send(weights.kinds, weights.items())
        if int(reader.communicate(timeout=300)[0]) != len(weights.kinds):
            raise SystemExit("error: not all weights came")
        sender.close()

    weights.on_all_ranks(send)


def take_step(engine: Engine) -> None:
    """Have the optimizer keep what it keeps."""
    engine.start_step(1)
    engine.backward(engine.model(input_ids=torch.arange(8).view(1, 8)).logits.square().mean())
    engine.step(1e-3)


def _rank(folder: Path) -> None:
    """Write what this rank held to `<folder>/<rank>.json`."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: what is freed goes back at once
    words = [f"model.path={folder}/model", "output_dir=unused", "precision=fp32", "deepspeed=zero3",
             "+deepspeed.zero_optimization.stage3_max_live_parameters=0"]  # fmt: skip
    config, found = compose_config(RLConfig, "rl", words), dict[str, dict[str, int]]()

    def note_load(phase: str, read: Callable[[str], Any], precision: str) -> Any:
        before, most = own_pages(), [0]
        cutting = library().runtime.zero.partition_parameters
        free = cutting.free_param
        cutting.free_param = lambda parameter: (most.append(own_pages()), free(parameter))
        answer = load(read, precision)
        cutting.free_param = free
        found[phase] = {"share": share_of(answer), "held": max(most) - before}
        return answer

    def note(phase: str, work: Callable[[], Any], share: int) -> None:
        for _ in range(2):  # the first one loads what a library needs
            before = reset_peak_rss()
            work()
            found[phase] = {"share": share, "held": share + peak_rss() - before}

    def load(read: Callable[[str], Any], precision: str) -> Any:
        with loading(config.deepspeed, precision):
            return read(f"{folder}/model")

    with process_group(timeout_seconds=300, is_needed_alone=True):
        for _ in range(2):  # what a library keeps from its first use
            load(load_policy, "")
        gc.collect()
        note_load("loading a reference", load_reference, "bf16")
        gc.collect()
        note_load("loading a reward model", lambda path: load_process_reward(path, 1), "bf16")
        gc.collect()
        model = note_load("loading", load_policy, "")
        own = share_of(model)
        engine = make_training_engine(config, model, config.optimizer, 1e-3, 1.0)
        assert engine.shards is not None
        policy = ShardedPolicy(engine, GatheredWeights(engine.shards, {}))
        weights = ShardedWeights(RankCalls(policy))
        note("saving", lambda: engine.save_model(folder / "saved"), own)
        note("delivery", lambda: deliver(weights), own)
        take_step(engine)
        state = folder / "state"
        note("writing a checkpoint", lambda: engine.save_state(state), 3 * own)
        barrier()
        note("reading a checkpoint", lambda: engine.load_state(state), 3 * own)
        largest = max(whole_shape(value).numel() * value.itemsize for value in model.parameters())
    (folder / f"{rank()}.json").write_text(json.dumps({"phases": found, "largest": largest}))


def run(shape: QwenShape) -> list[dict[str, Any]]:
    """Return what each rank found. Raises SystemExit where one fails."""
    with tempfile.TemporaryDirectory(prefix="shares-") as name:
        folder = Path(name)
        exit_code(start(lambda: write_qwen(folder / "model", TEXTS, shape)))  # whose memory the ranks would inherit
        log = folder / "log"
        codes = [exit_code(pid) for pid in start_ranks("benchmarks/sizes/shares.py", ["--rank", name], log, RANKS)]
        if any(codes):
            raise SystemExit(f"error: a rank failed: {log.read_text()[-2000:]}")
        return [json.loads((folder / f"{one}.json").read_text()) for one in range(RANKS)]


def figure(ratios: list[float]) -> dict[str, Any]:
    """Return how many shares the fullest rank held."""
    worst = max(ratios)
    return {"value": round(worst, 3), "low": round(min(ratios), 3), "high": round(worst, 3), "unit": "shares",
            "goal": GOAL, "better": "lower", "met": worst <= GOAL, "how": HOW}  # fmt: skip


def summary(ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, table) of what the ranks found."""
    figures, rows, largest = {}, [], ranks[0]["largest"]
    for phase in ranks[0]["phases"]:
        each = [one["phases"][phase] for one in ranks]
        fullest = max(each, key=lambda row: row["held"] / row["share"])
        figures[f"held_while_{phase.replace(' ', '_')}"] = figure([row["held"] / row["share"] for row in each])
        rows.append([phase, *(round(size / MIB, 1) for size in (fullest["share"], fullest["held"])),
                     round(fullest["held"] / fullest["share"], 3),
                     round((fullest["held"] - fullest["share"]) / largest, 2)])  # fmt: skip
    columns = ["phase", "share, MiB", "held, MiB", "shares", "on top, in largest weights"]
    title = f"The fullest of {RANKS} ranks; the largest weight has {largest / MIB:.1f} MiB."
    return figures, {"title": title, "columns": columns, "rows": rows}


def main() -> None:
    """Measure and write the result; or be one of the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tiny network: does it run; prints, writes no result")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options.rank)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    load, shape = load_before(), TINY if options.quick else SHAPE
    ranks = run(shape)
    figures, table = summary(ranks)
    if options.quick:
        print(json.dumps({"figures": figures, "table": table}, indent=1))
        return
    print(write_result("shares", figures, {"load_before": load, "shape": vars(shape), "ranks": ranks},
                       tables=[table]))  # fmt: skip


if __name__ == "__main__":
    main()
