"""From preferences to a policy, where the true reward is known: PPO against a reward model, up to too much of it.

    bash scripts/bench.sh reward_models                          64, 256 and 2048 pairs, seeds 0 to 2
    bash scripts/bench.sh reward_models --sizes 64 --seeds 0     one run
    bash scripts/bench.sh reward_models --seeds                  the figures of the runs that are kept

Task `shopping_notes`: its true reward falls where a reward model made of few preferences still rises. One policy
samples once; seed s draws its own comparisons, labelled with the noise of a judge. Each run is scripts/reward_model.sh
on the first n pairs of its seed: a Bradley-Terry model, judged on 500 comparisons of other problems, and PPO with its
reward, whose true reward is measured on the same rollouts and trains nothing. Proxy (the normalised reward model) and
true reward are drawn over the KL divergence from the policy of the start in nats per response (Gao et al. 2023,
"Scaling laws for reward model overoptimization"). From the largest reward model of a seed a second PPO run is held
near its start by a KL coefficient of 0.3 in place of 0.01. A run's record is in benchmarks/results/reward_models/.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.credit.intervals import figure_above_zero, mean_over_seeds
from benchmarks.processes.forked import ROOT
from benchmarks.result import RESULTS, machine, write_result
from benchmarks.rl.policy import make_policy, run_program
from espalier.analysis.curve_figure import Series, curve_figure
from espalier.data.jsonl import write_json
from espalier.runtime.run_dir import code_commit

HOW = "bash scripts/bench.sh reward_models"
RECORDS = RESULTS / "reward_models"
PICTURE = ROOT / "docs" / "reward_models" / "overoptimisation.svg"
SIZES = (64, 256, 2048)
KL = {"far": 0.01, "near": 0.3}
"""Coefficients of the KL penalty: of the curves, and of runs from the largest reward models that are to gain."""
ITERATIONS = {"far": 40, "near": 20}
NUM_HELD_OUT = 500
NUM_PROBLEMS = 700
"""Of which 4 samples each make six comparisons; a fifth of them are held out."""
SMOOTHED = 3
"""Iterations that a figure of the start, the peak and the end is the mean of."""
TASK = ["task=shopping_notes"]
ENGINE = ("client=data_parallel_engines", "server=none", "client.num_engines=1", "client.num_threads=1",
          "client.max_model_len=256", "params.max_tokens=64")  # fmt: skip


def make_data(folder: Path, seeds: Sequence[int], num_steps: int) -> Path:
    """Return the policy; write `folder/trajectories.jsonl` and for every seed `pairs-SEED.jsonl` and
    `held_out-SEED.jsonl`."""
    log, sampled = folder / "programs.log", folder / "trajectories.jsonl"
    demonstrations, base = folder / "demonstrations.jsonl", folder / "base"
    if not base.is_dir():
        run_program(log, "run_stage.py", "-cn", "problems/make_demonstrations", f"output={demonstrations}", *TASK)
        run_program(log, "run_stage.py", "-cn", "training/make_policy", f"input={demonstrations}", f"output={base}",
                    "stage.hidden_size=96", "stage.num_layers=2", "stage.num_heads=3")  # fmt: skip
    policy = make_policy(folder, num_steps, "exp/sft/shopping_notes", TASK, start=base)
    run_program(log, "service_api_caller_v1.py", "-cn", "api/vllm/trajectories", f"output={sampled}",
                f"policy={policy}", f"requests.limit={NUM_PROBLEMS}", "params.n=4", *TASK, *ENGINE)  # fmt: skip
    for seed in seeds:
        for name, part, count in (("pairs", "train", max(SIZES)), ("held_out", "held_out", NUM_HELD_OUT)):
            run_program(log, "run_stage.py", "-cn", "pairs/draw_comparisons", f"input={sampled}",
                        f"output={folder / f'{name}-{seed}.jsonl'}", f"stage.num_pairs={count}", f"stage.part={part}",
                        "stage.held_out_share=0.2", "stage.pairs_per_problem=0", f"seed={seed}")  # fmt: skip
    return policy


def measure(folder: Path, policy: Path, size: int, seed: int, how_far: str) -> dict[str, Any]:
    """Make one run, or what is missing of it, and return its record."""
    run = folder / f"run-{size}-{seed}"
    run.mkdir(parents=True, exist_ok=True)
    pairs = run / "preferences.jsonl"
    if not pairs.is_file():
        pairs.write_text("".join((folder / f"pairs-{seed}.jsonl").read_text().splitlines(keepends=True)[:size]))
    command = ["bash", "scripts/reward_model.sh", f"policy={policy}", f"run={run}", f"seed={seed}",
               f"preferences={pairs}", f"held_out={folder / f'held_out-{seed}.jsonl'}", f"kl={KL[how_far]}",
               f"num_iterations={ITERATIONS[how_far]}", f"name={how_far}"]  # fmt: skip
    log = run / "programs.log"
    with log.open("ab") as file:
        code = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"scripts/reward_model.sh in {run} ended with exit code {code}: see {log}")
    return record_of(run, size, seed, how_far)


def record_of(run: Path, size: int, seed: int, how_far: str) -> dict[str, Any]:
    """Return what is kept of a finished run."""
    rows = [json.loads(line) for line in (run / how_far / "metrics.jsonl").read_text().splitlines()]
    keys = {"kl": "kl/per_response", "proxy": "reward/outcome_model", "true": "reward/true",
            "tokens": "rollout/response_length"}  # fmt: skip
    curve = [{name: round(row[key], 5) for name, key in keys.items()} for row in rows if keys["kl"] in row]
    return {
        "size": size, "seed": seed, "how_far": how_far, "curve": curve,
        "reward_model": json.loads((run / "reward_model.json").read_text()),
        "seconds": round(sum(row.get("seconds/iteration", 0.0) for row in rows), 1),
        "machine": machine(), "commit": code_commit(),
    }  # fmt: skip


def smoothed(curve: Sequence[Mapping[str, float]], key: str) -> list[float]:
    """Return running means over `SMOOTHED` iterations."""
    values = [row[key] for row in curve]
    return [fmean(values[start : start + SMOOTHED]) for start in range(len(values) - SMOOTHED + 1)]


def summary(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a run's start, peak and end of the true reward, its last proxy and KL, where the peak is, and the pair
    accuracies of its reward model."""
    curve = record["curve"]
    true, kl, proxy = (smoothed(curve, key) for key in ("true", "kl", "proxy"))
    peak = max(range(len(true)), key=true.__getitem__)
    model = record["reward_model"]
    return {
        "start": true[0], "peak": true[peak], "peak_kl": kl[peak], "end": true[-1], "end_kl": kl[-1],
        "proxy_start": proxy[0], "proxy_end": proxy[-1], "accuracy": model["accuracy"]["mean"],
        "true_accuracy": model["score_accuracy"]["mean"],
    }  # fmt: skip


def figures_of(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for every size, over seeds: the gain in true reward at the end, the fall from the peak to the end (what
    over-optimisation took; the peak is the highest of many noisy means), the gain in the proxy, and how far pair
    accuracy is above chance; of the runs near the start the gain at the end."""
    figures = {}
    near = [summary(record) for record in records if record["how_far"] == "near"]
    if near:
        gain = mean_over_seeds([row["end"] - row["start"] for row in near])
        figures[f"gain_near_the_start_{max(SIZES)}"] = figure_above_zero(gain, "true reward", HOW)
    for size in SIZES:
        rows = [summary(record) for record in records if record["size"] == size and record["how_far"] == "far"]
        if not rows:
            continue
        differences = {
            "gain_at_end": [row["end"] - row["start"] for row in rows],
            "fall_from_peak": [row["peak"] - row["end"] for row in rows],
            "proxy_gain": [row["proxy_end"] - row["proxy_start"] for row in rows],
        }
        for name, values in differences.items():
            unit = "standard deviations" if name == "proxy_gain" else "true reward"
            figures[f"{name}_{size}"] = figure_above_zero(mean_over_seeds(values), unit, HOW)
        above = mean_over_seeds([row["true_accuracy"] - 0.5 for row in rows])
        figures[f"pair_accuracy_above_half_{size}"] = figure_above_zero(above, "accuracy", HOW)
    return figures


def draw(records: Sequence[Mapping[str, Any]]) -> None:
    """Draw true and proxy reward over KL, means over seeds at equal iterations."""
    series = []
    for size in SIZES:
        curves = [record["curve"] for record in records if record["size"] == size and record["how_far"] == "far"]
        if not curves:
            continue
        length = min(map(len, curves)) - SMOOTHED + 1
        means = {
            key: [fmean(smoothed(curve, key)[at] for curve in curves) for at in range(length)]
            for key in ("kl", "true", "proxy")
        }
        for group, key in enumerate(("true", "proxy")):
            points = list(zip(means["kl"], means[key], strict=True))
            series.append(Series(f"{size} pairs: {key} ({len(curves)})", group, points))
    if series:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        title = "True reward and reward model (its own scale) during PPO, mean over seeds (how many)"
        groups = ("true reward", "reward model")
        svg = curve_figure(title, groups, series, "KL from the start, nats per response", "reward")
        PICTURE.write_text(f"{svg}\n", encoding="utf-8")


def write(records: Sequence[Mapping[str, Any]]) -> None:
    """Write the figures, the table of all runs and the picture."""
    rows = []
    for record in records:
        found = summary(record)
        accuracy = record["reward_model"]["score_accuracy"]
        rows.append([record["size"], record["seed"], KL[record["how_far"]],
                     f"{100 * accuracy['mean']:.1f} [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]",
                     *(f"{found[key]:.2f}" for key in ("start", "peak")), f"{found['peak_kl']:.1f}",
                     f"{found['end']:.2f}", f"{found['end_kl']:.1f}", f"{found['proxy_end']:.2f}"])  # fmt: skip
    columns = [
        "pairs",
        "seed",
        "KL coefficient",
        "pair accuracy, %",
        "true reward: start",
        "peak",
        "at KL",
        "end",
        "at KL",
        "proxy at the end",
    ]
    table = {"title": "PPO against reward models", "columns": columns, "rows": rows}
    write_result("reward_models", figures_of(records), {"records": "benchmarks/results/reward_models"}, tables=[table])
    draw(records)


def _record(size: int, seed: int, how_far: str) -> Path:
    return RECORDS / f"{size}-{how_far}-{seed}.json"


def main() -> None:
    """Make the runs that are asked for and have no record; write the figures of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", default="experiments/reward_models", help="keeps the policy and the runs")
    parser.add_argument("--policy-steps", type=int, default=1000, help="of the policy of the start")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).resolve()
    RECORDS.mkdir(parents=True, exist_ok=True)
    wanted = [(size, seed, how_far) for seed in arguments.seeds for size in arguments.sizes for how_far in KL
              if how_far == "far" or size == max(SIZES)]  # fmt: skip
    missing = [run for run in wanted if not _record(*run).is_file()]
    if missing:
        policy = make_data(folder, sorted({seed for _, seed, _ in missing}), arguments.policy_steps)
    for run in missing:
        record = measure(folder, policy, *run)
        write_json(_record(*run), record)
        print(f"{run}: {summary(record)}", file=sys.stderr)
    write([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))])


if __name__ == "__main__":
    main()
