"""What loading for ZeRO-3 takes where each of two ranks reads its part of every weight, beside ranks that read each
weight whole and are sent it by rank 0, as DeepSpeed cuts weights by itself.

    bash scripts/bench.sh loading [--quick]

A Llama of half a billion random float32 parameters, on CPUs by gloo. Counted are seconds from a barrier until the
slowest rank is done, with the file in the system's memory and not (its pages are dropped before); and the most that a
rank's process takes on top of what it took before: pages of its own, looked at every few milliseconds, and all, with
those of the mapped file. A share, which it keeps, is in both. Two ranks of one machine read the file's pages once
between them; on two nodes each reads what it asks for. With `--quick` nothing is written.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.processes.forked import exit_code, start, start_ranks
from benchmarks.processes.sides import load_before, peak_rss
from benchmarks.result import write_result
from benchmarks.sizes.tensor_memory import own_pages, reset_peak_rss
from espalier.models.in_parts import loaded_in_parts
from espalier.models.load import load_policy
from espalier.runtime.distributed import barrier, process_group, rank
from espalier.training.weight_cutter import ZeroCutter

HOW, RANKS, ROUNDS, MIB = "bash scripts/bench.sh loading", 2, 3, 2**20
WAYS = {"parts": "each rank reads its part", "whole": "each rank reads all, rank 0 sends"}
SETTINGS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
SIZES = {"vocab_size": 64000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 16}  # fmt: skip
QUICK = {**SIZES, "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def write_network(folder: Path, sizes: dict[str, int]) -> None:
    """Random weights in float32, in one file."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.save_pretrained(folder, max_shard_size="100GB")


@contextmanager
def most_own_pages() -> Iterator[list[int]]:
    """Have the list's last number be the most of its own pages that this process takes within, in bytes."""
    found, is_done = [own_pages()], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            found.append(max(found[-1], own_pages()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        is_done.set()
        watcher.join()


def _drop_pages(folder: Path) -> None:
    """Have the system read the file from its disk again."""
    with (folder / "model" / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rank(folder: Path, way: str) -> None:
    """Write what loading took on this rank to `<folder>/<rank>.json`."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: what is freed goes back at once
    found: dict[str, Any] = {}
    with process_group(timeout_seconds=300, is_needed_alone=True):
        for name in ("first", "cached", "from disk"):
            cutter = ZeroCutter(SETTINGS)
            cutter.reads_parts = way == "parts"
            if name == "from disk" and rank() == 0:
                _drop_pages(folder)
            barrier()
            before, own, begin = reset_peak_rss(), own_pages(), time.monotonic()
            with most_own_pages() as most, loaded_in_parts(cutter):
                model: Any = load_policy(str(folder / "model"))
            barrier()
            found[f"seconds, {name}"] = time.monotonic() - begin
            found |= {"own": most[-1] - own, "process": peak_rss() - before}
            found["share"] = sum(value.ds_tensor.nbytes for value in model.parameters())
            del model
            gc.collect()
    (folder / f"{rank()}.json").write_text(json.dumps(found))


def run(sizes: dict[str, int]) -> dict[str, list[list[dict[str, float]]]]:
    """Return what each rank of each round found, by the way of loading. Raises SystemExit where one fails."""
    found: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="loading-") as name:
        folder = Path(name)
        exit_code(start(lambda: write_network(folder / "model", sizes)))  # whose memory the ranks would inherit
        for way in [*WAYS] * ROUNDS:
            log = folder / "log"
            pids = start_ranks("benchmarks/sizes/loading.py", ["--rank", name, way], log, RANKS)
            codes = [exit_code(pid) for pid in pids]
            if any(codes):
                raise SystemExit(f"error: a rank failed: {log.read_text()[-2000:]}")
            found[way].append([json.loads((folder / f"{one}.json").read_text()) for one in range(RANKS)])
    return found


def summary(found: dict[str, list[list[dict[str, float]]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, table): the slowest and fullest rank of a round, the median of rounds."""
    rows = []
    for way, rounds in found.items():
        worst = {key: statistics.median(max(one[key] for one in ranks) for ranks in rounds) for key in rounds[0][0]}
        rows.append([WAYS[way], *(round(worst[key], 2) for key in ("seconds, cached", "seconds, from disk")),
                     *(round(worst[key] / MIB) for key in ("share", "own", "process"))])  # fmt: skip
    seconds = {way: [max(one["seconds, cached"] for one in ranks) for ranks in rounds] for way, rounds in found.items()}
    ratios = sorted(part / whole for part, whole in zip(seconds["parts"], seconds["whole"], strict=True))
    ratio = {"value": round(statistics.median(ratios), 2), "low": round(ratios[0], 2), "high": round(ratios[-1], 2),
             "unit": "of the seconds for all", "goal": 1.0, "better": "lower",
             "met": statistics.median(ratios) <= 1, "how": HOW}  # fmt: skip
    columns = ["way", "seconds, file in memory", "seconds, from disk", "share, MiB", "own pages, MiB", "process, MiB"]
    return {"seconds_in_parts": ratio}, {"title": "Loading on two ranks", "columns": columns, "rows": rows}


def main() -> None:
    """Measure and write the result; or be one of the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tiny network: does it run; prints, writes no result")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(Path(options.rank[0]), options.rank[1])
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    load, sizes = load_before(), QUICK if options.quick else SIZES
    found = run(sizes)
    figures, table = summary(found)
    print(json.dumps({"figures": figures, "table": table}, indent=1))
    if not options.quick:
        detail = {"load_before": load, "sizes": sizes, "ranks": found}
        print(write_result("loading", figures, detail, tables=[table]))


if __name__ == "__main__":
    main()
