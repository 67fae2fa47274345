"""Reinforcement learning, part by part; each part's figures are written as soon as it is done, the others' stay.

    bash scripts/bench.sh rl                            all parts
    bash scripts/bench.sh rl trl loop                   some of them
    bash scripts/bench.sh rl loop --quick               does it run? prints, writes no result

Parts: `trl` (an iteration of GRPO beside TRL's GRPOTrainer; the same loss on the same rollouts), `loop` (what an
iteration spends on weights and on itself; the same run with a server restart in every iteration). `kills_exact` is
read from what `bash scripts/faults.sh rl_kills` wrote. The stored part `credit` (methods at equal updates, with SFT,
RestEM and DPO-positive) was made by an earlier form of this benchmark and stays; its successor is
`bash scripts/bench.sh credit`.

On two quiet cores `trl` takes 3 minutes, `loop` 6.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import Side, load_before
from benchmarks.result import RESULTS, figure, write_result
from benchmarks.rl import same_loss
from benchmarks.rl.policy import make_policy

HOW = "bash scripts/bench.sh rl"
PARTS = ("trl", "loop")
EXPERIMENT = "exp/ppo/grpo_word_arithmetic"
# Of TRL on two cores: the whole batch generated at once, then micro-batches of this many rows (its exact settings).
PEER_MICRO_BATCH = 64
# Of ours: two engines without a server, compiled, all problems of an iteration in flight at once, their prompts
# computed once each; micro-batches of the size that was fastest by hand.
FAST = ("client=data_parallel_engines_partial_block_cache", "server=none", "engine.concurrency=64",
        "client.options.max_num_seqs=512", "client.options.enforce_eager=false",
        "update.micro_batch_size=256")  # fmt: skip
# Iterations of every side beyond those that count: one warms up, and one is never asked for, so that no side saves and
# ends beside another's last iteration.
SPARE = 2
PHASES = ("rollout", "completions", "reward", "forward", "update")


@dataclass(frozen=True)
class Plan:
    """Sizes: SFT steps, problems an iteration, rounds, iterations of `loop`."""

    sft_steps: int
    num_problems: int
    rounds: int
    loop_iterations: int
    restarts: int


FULL = Plan(500, 64, 5, 12, 4)
QUICK = Plan(20, 8, 1, 2, 1)

Found = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def product_command(policy: Path, run: Path, num_problems: int, num_iterations: int, *settings: str) -> list[str]:
    """Return GRPO on the policy, nothing but iterations."""
    return [
        *(sys.executable, "-m", "benchmarks.rl.product", *[s for s in settings if s.startswith("--")]),
        *("-cn", EXPERIMENT, f"model.path={policy}", f"output_dir={run}", f"rollout.num_problems={num_problems}"),
        *(f"update.minibatch_size={8 * num_problems}", f"num_iterations={num_iterations}", "evaluation.every=0"),
        *("checkpoints.save_every=0", *[s for s in settings if not s.startswith("--")]),
    ]


def peer_commands(
    python: str, policy: Path, folder: Path, settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Write the settings of TRL's sides, by name, to `folder`; how each is started."""
    commands = {}
    for name, own in settings.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(own))
        commands[name] = [python, "-m", "benchmarks.rl.peer", str(policy), str(path)]
    return commands


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Of every side."""
    return {"OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}


def measure_trl(arguments: argparse.Namespace, plan: Plan, policy: Path, folder: Path) -> Found:
    """`trl_grpo_over_ours` (TRL as it comes), `trl_best_over_ours`, `trl_loss_difference`: rounds of one iteration
    each, turn about, after one warm-up."""
    common = {
        "num_problems": plan.num_problems, "group_size": 8, "max_tokens": 96, "learning_rate": 1e-6,
        "num_steps": plan.rounds + SPARE, "seed": 0, "precision": "bf16",
    }  # fmt: skip
    best = {"attention": "eager", "micro_batch_size": arguments.peer_micro_batch, "options": arguments.peer_options}
    ways = {"trl": {"attention": "sdpa", "micro_batch_size": 8, "options": {"gradient_checkpointing": True}},
            "trl_best": best}  # fmt: skip
    settings = {name: common | way for name, way in ways.items()}
    peers = peer_commands(arguments.trl_python, policy, folder, settings)
    own = product_command(policy, folder / "run", plan.num_problems, plan.rounds + SPARE, "update.learning_rate=1.0e-6",
                          "update.warmup_steps=0",
                          f"seed={common['seed']}", *FAST)  # fmt: skip
    losses = compare_losses(arguments, policy, folder, peers["trl_best"], common | best)
    with ExitStack() as stack:
        commands = {"product": own, **peers}
        sides = {}
        for (
            name,
            command,
        ) in commands.items():  # one by one: sides that start beside one another keep each other waiting
            sides[name] = Side(command, environment(arguments))
            stack.callback(sides[name].stop)
            print(f"trl: {name} is warm after {sides[name].ask()['seconds']:.2f} s", file=sys.stderr)
        rounds = []
        for turn in range(plan.rounds):
            names = list(sides) if turn % 2 == 0 else list(sides)[::-1]
            rounds.append({name: sides[name].ask() for name in names})
            shown = ", ".join(f"{name} {rounds[-1][name]['seconds']:.2f} s" for name in sides)
            print(f"trl, round {turn}: {shown}", file=sys.stderr)
    lengths = {name: [row[name]["response_length"] for row in rounds] for name in ways}
    lengths["product"] = [row["product"]["metrics"]["rollout/response_length"] for row in rounds]
    seconds = {name: [round(row[name]["seconds"], 3) for row in rounds] for name in sides}
    figures = {
        **{f"{name}_over_ours".replace("trl_over", "trl_grpo_over"): figure(
            [row[name]["seconds"] / row["product"]["seconds"] for row in rounds], goal=goal, how=f"{HOW} trl"
        ) for name, goal in (("trl", 3.5), ("trl_best", 1.0))},
        "trl_loss_difference": lower(losses["difference"], [losses["difference"]], 1e-4, "relative", f"{HOW} trl"),
    }  # fmt: skip
    detail = {
        "seconds": seconds,
        "response_length": {name: [round(value, 2) for value in row] for name, row in lengths.items()},
        "losses": losses,
        "settings": {"product": list(FAST), **settings},
        "trl": rounds[0]["trl"]["trl"],
    }
    rows = [[name, round(median(seconds[name]), 2), round(fmean(lengths[name]), 1)] for name in seconds]
    title = f"One iteration of GRPO, {plan.num_problems} x 8 samples, one step: medians of {plan.rounds} rounds."
    return figures, detail, [{"title": title, "columns": ["side", "seconds", "tokens a response"], "rows": rows}]


def compare_losses(
    arguments: argparse.Namespace,
    policy: Path,
    folder: Path,
    peer: Sequence[str],
    settings: dict[str, Any],
    num_groups: int = 4,
) -> dict[str, Any]:
    """Return loss and gradient norm of both sides on the same rollouts, in float32; the larger relative difference."""
    experience = same_loss.make_rollouts(str(policy), num_groups)
    rollouts, plain = folder / "rollouts.pt", folder / "peer_fp32.json"
    same_loss.for_peer(experience, rollouts)
    plain.write_text(json.dumps({**settings, "precision": "fp32"}))
    ours = same_loss.own_loss(str(policy), experience)
    command = [*peer[:-1], str(plain), "--loss", str(rollouts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False,
                          env={**os.environ, **environment(arguments)})  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise SystemExit(f"TRL's side failed:\n{done.stderr[-2000:]}")
    theirs = json.loads(lines[0].removeprefix("result "))
    gaps = [abs(ours[name] - theirs[name]) / abs(theirs[name]) for name in ("loss", "grad_norm")]
    return {"product": ours, "trl": theirs, "difference": max(gaps)}


def measure_loop(arguments: argparse.Namespace, plan: Plan, policy: Path, folder: Path) -> Found:
    """Return `sync_share`, `overhead_share`, `restart_over_live`: the live run and the restarting one, turn about."""
    turns = {"live": plan.loop_iterations, "restarting": plan.restarts}
    live = product_command(policy, folder / "live", plan.num_problems, turns["live"] + SPARE)
    iterations = turns["restarting"] + SPARE
    restarting = product_command(policy, folder / "restarting", plan.num_problems, iterations, "--restarts")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    with ExitStack() as stack:
        sides = {"live": Side(live, environment(arguments)), "restarting": Side(restarting, environment(arguments))}
        for name, side in sides.items():
            stack.callback(side.stop)
            side.ask()  # warm-up
            print(f"loop: {name} is warm", file=sys.stderr)
        each = max(1, turns["live"] // turns["restarting"])
        for _ in range(turns["restarting"]):
            found["live"] += [sides["live"].ask() for _ in range(each)]
            found["restarting"].append(sides["restarting"].ask())
            seconds = [found[name][-1]["seconds"] for name in turns]
            print("loop: live {:.2f} s, restarting {:.2f} s".format(*seconds), file=sys.stderr)
    rows = [row["metrics"] for row in found["live"]]
    syncs = [row["seconds/weight_sync"] / row["seconds/iteration"] for row in rows]
    overheads = [overhead(row) for row in rows]
    live_seconds = median(row["seconds"] for row in found["live"])
    ratios = [row["seconds"] / live_seconds for row in found["restarting"]]
    how = f"{HOW} loop"
    figures = {
        "sync_share": lower(median(syncs), syncs, 0.01, "share", how),
        "overhead_share": lower(median(overheads), overheads, 0.05, "share", how),
        "restart_over_live": figure(ratios, goal=4.0, how=how),
    }
    phases = [name for name in rows[0] if name.startswith("seconds/")]
    spent = [[name.partition("/")[2], round(median(row.get(name, 0.0) for row in rows), 3)] for name in phases]
    detail = {
        "seconds": {name: [round(row["seconds"], 3) for row in part] for name, part in found.items()},
        "tokens_per_second": {name: round(median(row[name] for row in rows), 1)
                              for name in rows[0] if name.startswith("tokens_per_second/")},
    }  # fmt: skip
    title = f"Seconds of an iteration of GRPO with a live engine, medians of {len(rows)}."
    return figures, detail, [{"title": title, "columns": ["phase", "seconds"], "rows": spent}]


def overhead(row: dict[str, float]) -> float:
    """Return the share of an iteration outside generation, scoring (log-probs too) and gradients; the sync is in it."""
    return 1 - sum(row.get(f"seconds/{phase}", 0.0) for phase in PHASES) / row["seconds/iteration"]


def lower(value: float, values: Sequence[float], goal: float, unit: str, how: str) -> dict[str, Any]:
    """Return a figure of which less is better."""
    ends = {"low": float(f"{min(values):.3g}"), "high": float(f"{max(values):.3g}")}
    met = not math.isnan(value) and value <= goal
    return {"value": float(f"{value:.3g}"), **ends, "unit": unit, "goal": goal, "better": "lower", "met": met,
            "how": how}  # fmt: skip


def merge(name: str, found: Found) -> Path:
    """Write a part's figures beside those of the other parts that stand in the file, and kills_exact where it is."""
    figures, detail, tables = found
    path = RESULTS / "rl.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    parts = {part: row for part, row in stored.get("detail", {}).items() if part != name}
    known = {key for row in parts.values() for key in row["figures"]}
    kept = {key: row for key, row in stored.get("figures", {}).items() if key in known}
    kills = RESULTS / "rl_kills.json"
    if kills.is_file():
        kept["kills_exact"] = json.loads(kills.read_text())["figures"]["kills_exact"]
    parts[name] = {"figures": [*figures], "tables": tables, **detail}
    shown = [table for part in parts.values() for table in part["tables"]]
    more = {"trl": parts["trl"]["trl"]} if "trl" in parts else {}
    return write_result("rl", {**kept, **figures}, parts, more_versions=more, tables=shown)


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run; prints, writes no result")
    parser.add_argument("--folder", type=Path, default=Path("experiments/rl_benchmark"), help="keeps policy and runs")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--peer-micro-batch", type=int, default=PEER_MICRO_BATCH)
    parser.add_argument("--peer-options", type=json.loads, default={}, help="JSON: more options of TRL's GRPOConfig")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part '{unknown[0]}': choose from {', '.join(PARTS)}")
    if "trl" in (arguments.parts or PARTS) and not Path(arguments.trl_python).exists():
        parser.error(f"{arguments.trl_python}: no such file: bash scripts/bench.sh rl installs TRL there")
    return arguments


def main() -> None:
    """Run the parts that are asked for, all where none is."""
    arguments = parse()
    plan = QUICK if arguments.quick else FULL
    base = (arguments.folder / ("quick" if arguments.quick else "full")).resolve()
    policy = make_policy(base, plan.sft_steps)
    measures = {"trl": measure_trl, "loop": measure_loop}
    for name in arguments.parts or PARTS:
        load = load_before()
        folder = base / name / str(os.getpid())  # a run directory would be taken for a finished run
        folder.mkdir(parents=True, exist_ok=True)
        figures, detail, tables = measures[name](arguments, plan, policy, folder)
        detail |= {"load_before": load, "threads": arguments.threads}
        if arguments.quick:
            print(json.dumps({"figures": figures, "detail": detail, "tables": tables}, indent=1))
        else:
            print(merge(name, (figures, detail, tables)))


if __name__ == "__main__":
    main()
