"""A network of Qwen2.5-0.5B's shape (random weights, the full vocabulary of 151,936) beside TRL, on a CPU: the seconds
of a step and the peak memory of a process, of SFT, DPO and process rewards, at equal losses; and an iteration of GRPO
(`benchmarks.sizes.peer_iterations`).

    bash scripts/bench.sh sizes peers [--methods sft dpo prm grpo sft_in_backward dpo_in_backward prm_in_backward]
        [--rounds 3] [--steps 3] [--batch 8] [--threads 2] [--precision fp32]

The sides are those of `benchmarks.training`: the program as its users start it, TRL as it comes (padded batches of 8,
gradient checkpointing) and TRL at its best exact setting of this size (`BEST`). All sides read the same examples in the
same order from the same weights; losses that are not equal in every step, to 1e-3 of them (in bf16 to 2e-3), are an
error and no figure. A side is a process of its own that nothing else runs beside (three would not fit), and the sides
take turns, round by round. The first step of a process is left out of its seconds. Its peak memory is the most that it
was resident with until its last step ended, loading and the passes of a reference included (VmHWM).

`--precision bf16` has all sides compute in it, as TRL does where nobody says otherwise, and the engine of GRPO too.

With `--threads 1`, seconds are those of CPU that the process itself used, which other programs on the machine do not
count into. What is done is kept in --work: the same command at the same commit goes on from there. Methods that are not
named stay as they are in benchmarks/results/sizes.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import Side, load_before
from benchmarks.result import RESULTS, figure, kept, made_now, stamp_of_now
from benchmarks.sizes import peer_iterations
from benchmarks.sizes.peer_plan import LARGEST_GAP, SIDES, Plan, name_of
from benchmarks.sizes.qwen_shape import HALF_BILLION, TINY
from benchmarks.training.corpus import read_ids, tokens_of
from benchmarks.training.settings import read_settings

HOW = "bash scripts/bench.sh sizes peers"
# The same trainings with `update.step_in_backward`, which keeps less and cannot clip: no side clips then.
IN_BACKWARD = "_in_backward"
METHODS = ("sft", "dpo", "prm", "grpo", *(f"{kind}{IN_BACKWARD}" for kind in ("sft", "dpo", "prm")))
SPEED_GOALS = {"default": 1.5, "best": 1.0}
ITERATION_GOAL = 2.0  # of GRPO, both ways
MEMORY_GOAL = 0.8
# Of ours: SFT, whose scores of the vocabulary take the most, in passes of about so many tokens; of the others a step is
# one pass that computes again what is cheap.
ONE_PASS = ("update.micro_batch_tokens=1024", "model.gradient_checkpointing=selective")
AT_ONCE = ("update.step_in_backward=true", "update.max_grad_norm=0", "update.micro_batch_size=${update.batch_size}")
LEAST = (*AT_ONCE, "model.gradient_checkpointing=true")
# Process rewards hold no gradient of the embedding and few of its moments, and so compute nothing again.
OWN = {"sft": ("update.micro_batch_tokens=256",), "dpo": ONE_PASS, "prm": ONE_PASS,
       "sft_in_backward": LEAST, "dpo_in_backward": LEAST, "prm_in_backward": AT_ONCE}  # fmt: skip
# Of TRL, beside what `benchmarks.training.peer` found for a small network; a step is one pass. DPO has no padding-free
# batches at the moment (1.16 falls back to padding), process rewards never had.
BEST: dict[str, dict[str, Any]] = {"sft": {"padding_free": True, "max_length": None}, "dpo": {}, "prm": {}}


def kind_of(method: str) -> str:
    """Return what a method trains: sft, dpo, prm or grpo."""
    return method.partition(IN_BACKWARD)[0]


def command(method: str, side: str, folder: Path, arguments: argparse.Namespace) -> tuple[list[str], str]:
    """Return how a side is started, and its PYTHONPATH."""
    kind = kind_of(method)
    if side == "product":
        return [sys.executable, "-m", "benchmarks.training.product", str(folder), kind, *OWN[method]], str(ROOT)
    best = BEST[kind] | {"micro": read_settings(folder, kind).batch_size}
    options = json.dumps((best if side == "best" else {}) | ({} if kind == method else {"max_grad_norm": 0.0}))
    peer = [arguments.trl_python, "-m", "benchmarks.training.peer", str(folder), kind, side, "--options", options]
    return peer, os.pathsep.join([arguments.prm_trl, str(ROOT)] if kind == "prm" else [str(ROOT)])


def run_side(words: Sequence[str], path: str, threads: int, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a process of its own answers to one question."""
    side = Side(words, {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path})
    try:
        return side.ask(question)
    finally:
        side.stop()


def run_method(method: str, plan: Plan, folder: Path, arguments: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """Return side → answer, of every round; the order of the sides is turned around from round to round.

    Raises SystemExit where a loss is not the product's.
    """
    rounds, step_ids = [], None
    for turn in range(plan.rounds):
        found: dict[str, dict[str, Any]] = {}
        for side in list(SIDES) if turn % 2 == 0 else list(SIDES)[::-1]:
            words, path = command(method, side, folder, arguments)
            question = {"max_steps": plan.steps} if side == "product" else {"step_ids": step_ids}
            make = partial(run_side, words, path, plan.threads, question)
            keeping = {"plan": plan.of_a_run(), "words": words, "question": question}
            path_of_side = arguments.work / f"{name_of(method, plan.precision)}-{turn}-{side}.json"
            found[side], _ = kept(path_of_side, keeping, stamp_of_now(), make)
            step_ids = found[side]["step_ids"]
            seconds = seconds_per_step(found[side], plan.threads)
            peak, losses = found[side]["peak_bytes"] / 2**30, found[side]["losses"]
            print(f"{method}, round {turn + 1}, {SIDES[side]}: {seconds:.2f} s per step, {peak:.2f} GiB, "
                  f"losses {losses}", file=sys.stderr)  # fmt: skip
        check_losses(method, found, plan.precision)
        rounds.append(found)
    return rounds


def check_losses(method: str, found: Mapping[str, Mapping[str, Any]], precision: str = "fp32") -> float:
    """Return the largest relative difference of a loss from the product's. Raises SystemExit above `LARGEST_GAP`: then
    the sides do not do the same work."""
    own = found["product"]["losses"]
    gaps = [abs(one - other) / abs(one) for side in found.values()
            for one, other in zip(own, side["losses"], strict=True)]  # fmt: skip
    if not all(gap <= LARGEST_GAP[precision] for gap in gaps):  # one that is no number neither
        losses = {name: side["losses"] for name, side in found.items()}
        raise SystemExit(f"error: {method}: the sides' losses differ by {max(gaps):.1e} of them, which is no figure "
                         f"at equal loss: {losses}")  # fmt: skip
    return max(gaps)


def seconds_per_step(answer: Mapping[str, Any], threads: int, is_prepared: bool = True) -> float:
    """Return the mean over the steps after the first: of CPU with one thread, else of the wall. `is_prepared` false
    adds each step's share of what the product computes before the first one."""
    kind = "cpu_seconds" if threads == 1 else "seconds"
    steps = answer[f"step_{kind}"]
    more = 0.0 if is_prepared else float(answer[f"prepare_{kind}"]) / len(steps)
    return fmean(steps[1:]) + more


def figures_of(
    method: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]], threads: int, precision: str = "fp32"
) -> dict[str, Any]:
    """Return the product's speed and memory in those of both sides of TRL. Against DPO as it comes, which computes the
    reference in every step, what the product computes beforehand for these pairs is counted."""
    found, name = {}, name_of(method, precision)
    how = f"{HOW} --methods {method}" + (f" --precision {precision}" if precision != "fp32" else "")
    for other, goal in SPEED_GOALS.items():
        goal = ITERATION_GOAL if method == "grpo" else goal
        is_prepared = not (kind_of(method) == "dpo" and other == "default")
        ratios = [seconds_per_step(row[other], threads) / seconds_per_step(row["product"], threads, is_prepared)
                  for row in rounds]  # fmt: skip
        found[f"half_billion_{name}_vs_trl_{other}"] = figure(ratios, goal=goal, how=how)
        if method == "grpo":
            continue  # engines beside a learner: the table has their sum
        shares = [row["product"]["peak_bytes"] / row[other]["peak_bytes"] for row in rounds]
        found[f"half_billion_{name}_memory_vs_trl_{other}"] = {
            **figure(shares, goal=MEMORY_GOAL, how=how), "better": "lower", "met": median(shares) <= MEMORY_GOAL,
        }  # fmt: skip
    return found


def rows_of(method: str, part: Mapping[str, Any]) -> list[list[Any]]:
    """Return a row of the table for each side."""
    rounds, threads, rows = part["rounds"], part["plan"]["threads"], []
    for side, shown in SIDES.items():
        answers = [row[side] for row in rounds]
        seconds = median(seconds_per_step(answer, threads) for answer in answers)
        padded = (
            round(answers[0]["computed_tokens"] / answers[0]["tokens"], 2) if "computed_tokens" in answers[0] else ""
        )
        losses = ", ".join(f"{loss:.5f}" for loss in answers[0]["losses"])
        peak = median(answer["peak_bytes"] for answer in answers) / 2**30
        rows.append([method, shown, round(seconds, 2), padded, round(peak, 2), losses, part["made"]])
    return rows


def section(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the section's figures and table, of the parts of its methods."""
    columns = ["method", "side", "seconds per step", "computed / non-padding tokens", "peak, GiB", "losses", "made"]
    rows = [row for method, part in parts.items() for row in rows_of(method, part)]
    title = "Qwen2.5-0.5B's shape, in float32 where bf16 is not named: medians of the rounds, without the first step."
    return {"figures": {name: one for part in parts.values() for name, one in part["figures"].items()},
            "tables": [{"title": title, "columns": columns, "rows": rows}], "methods": dict(parts)}  # fmt: skip


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=HOW, description=__doc__, formatter_class=about)
    parser.add_argument("--quick", action="store_true", help="a tiny network: does it run; prints, writes no result")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each process, the first of which warms up")
    parser.add_argument("--batch", type=int, default=8, help="examples per step; of DPO half as many pairs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=LARGEST_GAP)
    parser.add_argument("--work", type=Path, default=Path("experiments/sizes_peers"))
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--prm-trl", default=str(ROOT / ".venv-bench" / "trl-with-prm"))
    arguments = parser.parse_args(list(words))
    if arguments.steps < 2 or min(arguments.rounds, arguments.threads) < 1 or arguments.batch < 2:
        parser.error("--steps and --batch must be at least 2, --rounds and --threads at least 1")
    if not Path(arguments.trl_python).exists():
        parser.error(f"{arguments.trl_python}: no such file: bash scripts/install_bench.sh installs TRL there")
    arguments.work = arguments.work.resolve()
    return arguments


def measure(words: Sequence[str]) -> dict[str, Any] | None:
    """Return figures, tables and all answers, those of other methods as they were; None, printed, with `--quick`."""
    arguments = parse(words)
    shape = TINY if arguments.quick else HALF_BILLION
    plan = Plan(shape, arguments.batch, arguments.steps, arguments.rounds, arguments.threads, arguments.precision)
    folder, parts = plan.data(arguments.work), {}
    if not arguments.quick and (path := RESULTS / "sizes.json").is_file():
        parts = json.loads(path.read_text())["detail"].get("peers", {}).get("methods", {})
    for method in arguments.methods:
        load = load_before()
        made = made_now()
        run = peer_iterations.run_rounds if method == "grpo" else partial(run_method, method)
        rounds = run(plan, folder, arguments)
        seconds = "CPU" if plan.threads == 1 else "wall"
        made += f", {plan.threads} threads, seconds of {seconds}, load before {load}"
        name = name_of(method, plan.precision)
        parts[name] = {"made": made, "plan": asdict(plan), "rounds": rounds,
                       "figures": figures_of(method, rounds, plan.threads, plan.precision)}  # fmt: skip
        if method != "grpo":
            parts[name]["tokens_per_example"] = fmean(tokens_of(row) for row in read_ids(folder, kind_of(method)))
    names = [name_of(method, precision) for method in METHODS for precision in LARGEST_GAP]
    found = section({name: parts[name] for name in names if name in parts})
    if arguments.quick:
        print(json.dumps(found, indent=1))
        return None
    return found
