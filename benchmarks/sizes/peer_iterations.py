"""An iteration of GRPO (rollouts and one optimizer step on them) of the network of `benchmarks.sizes.peers`, beside
TRL's, on the sides of `benchmarks.rl`: main.py with a vLLM engine of its own, TRL with transformers' generation.

Random weights hardly ever end an answer, so every answer is as long as it may be, on all sides, and no answer is right.
Rewards are drawn by an answer's tokens (`benchmarks.rl.drawn_rewards`): with equal ones this project would leave the
backward passes and the optimizer's step out, and TRL would not. That both compute the same loss is held on four random
rollouts (`benchmarks.rl.same_loss`) in float32, to 1e-3 of loss and gradient norm; that every rollout had something to
teach, on ours.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.processes.sides import Side
from benchmarks.result import kept, stamp_of_now
from benchmarks.rl.rl import compare_losses, environment, peer_commands, product_command
from benchmarks.sizes.peer_plan import LARGEST_GAP, SIDES, Plan, name_of

GROUP = 8
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # of the engine
# TRL as it comes, and at its best: without gradient checkpointing, the whole step in one pass.
WAYS: dict[str, dict[str, Any]] = {"default": {"attention": "sdpa", "options": {"gradient_checkpointing": True}},
                                   "best": {"attention": "sdpa", "options": {}}}  # fmt: skip


def own_settings(plan: Plan) -> list[str]:
    """Return settings of ours beside the experiment's, which is one for tiny policies: one engine without a server, of
    the precision's dtype; attention as a model of this size has it; one pass, where a problem's prompt stands once."""
    return f"""--drawn-rewards client=data_parallel_engines_partial_block_cache server=none client.num_engines=1
        client.num_threads={plan.threads} client.dtype={DTYPES[plan.precision]}
        client.options.max_num_seqs={GROUP * plan.problems} client.options.enforce_eager=true
        precision={plan.precision} params.max_tokens={plan.new_tokens} seed=0 model.attention=auto
        update.micro_batch_tokens=2048 update.learning_rate=1.0e-6 update.warmup_steps=0""".split()


def peer_settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return what TRL's sides are asked for."""
    common = {"num_problems": plan.problems, "group_size": GROUP, "max_tokens": plan.new_tokens, "learning_rate": 1e-6,
              "micro_batch_size": GROUP, "num_steps": plan.steps + 1, "seed": 0, "precision": plan.precision,
              "has_drawn_rewards": True}  # fmt: skip
    found = {name: common | way for name, way in WAYS.items()}
    found["best"]["micro_batch_size"] = GROUP * plan.problems
    return found


def run_side(words: list[str], surroundings: Mapping[str, str], steps: int) -> dict[str, Any]:
    """Return so many iterations of a process of its own: of each the seconds of the wall and of CPU (its engine's too)
    and the tokens per answer; the peak of all its processes, in bytes."""
    side = Side(words, surroundings)
    answers: list[dict[str, float]] = []
    try:
        for _ in range(steps):
            before = side.cpu_seconds()
            found = side.ask()
            metrics = found.get("metrics", {})
            if "trl" not in found:
                check_taught(metrics)
            length = metrics.get("rollout/response_length", found.get("response_length"))
            answers.append({"seconds": found["seconds"], "cpu_seconds": side.cpu_seconds() - before, "tokens": length})
        names = {"step_seconds": "seconds", "step_cpu_seconds": "cpu_seconds", "response_lengths": "tokens"}
        lists = {name: [answer[key] for answer in answers] for name, key in names.items()}
        return {**lists, "peak_bytes": side.peak_bytes()}
    finally:
        side.stop()


def check_taught(metrics: Mapping[str, float]) -> None:
    """Raise SystemExit where rollouts of ours have no advantage: these are not computed, and TRL's are."""
    if metrics["estimate/advantage_zero"] > 0:
        raise SystemExit("error: grpo: some rollouts have no advantage, so that they were not computed")


def check_lengths(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise SystemExit where the sides' answers are not equally long: then they do not do the same work."""
    lengths = {name: fmean(side["response_lengths"]) for name, side in found.items()}
    if max(lengths.values()) > 1.02 * min(lengths.values()):
        raise SystemExit(
            f"error: grpo: the sides' answers differ in tokens, which is no figure at equal work: {lengths}"
        )


def run_rounds(plan: Plan, folder: Path, arguments: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """Return side → answer, of every round; each answer has the loss of its side on the same rollouts.

    Raises SystemExit where the losses or the lengths of answers differ.
    """
    policy, settings = folder / "policy", peer_settings(plan)
    peers = peer_commands(arguments.trl_python, policy, folder, settings)
    keeping = {"plan": plan.of_a_run(), "own": own_settings(plan), "peers": settings}
    same = partial(compare_losses, arguments, policy, folder, peers["best"], settings["best"], num_groups=1)
    losses, _ = kept(arguments.work / "grpo-losses.json", keeping, stamp_of_now(), same)
    if not losses["difference"] <= LARGEST_GAP["fp32"]:
        raise SystemExit(f"error: grpo: losses or gradients differ by {losses['difference']:.1e} of them, which is no "
                         f"figure at equal loss: {losses}")  # fmt: skip
    rounds = []
    for turn in range(plan.rounds):
        found: dict[str, dict[str, Any]] = {}
        for side in list(SIDES) if turn % 2 == 0 else list(SIDES)[::-1]:
            with tempfile.TemporaryDirectory(prefix="grpo-") as scratch:
                own = product_command(policy, Path(scratch) / "run", plan.problems, plan.steps + 1, *own_settings(plan))
                words = own if side == "product" else peers[side]
                make = partial(run_side, words, environment(arguments), plan.steps)
                path = arguments.work / f"{name_of('grpo', plan.precision)}-{turn}-{side}.json"
                found[side], _ = kept(path, keeping | {"side": side}, stamp_of_now(), make)
            print(f"grpo, round {turn + 1}, {SIDES[side]}: {found[side]}", file=sys.stderr)
        check_lengths(found)
        own_loss, theirs = losses["product"]["loss"], losses["trl"]["loss"]
        rounds.append({name: {**side, "losses": [own_loss if name == "product" else theirs]}
                       for name, side in found.items()})  # fmt: skip
    return rounds
