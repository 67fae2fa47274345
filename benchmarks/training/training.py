"""Training side by side with TRL and with a bare loop: SFT, step-DPO, process rewards; what log-probs and scores cost.

    bash scripts/bench.sh training [--quick]

The same tiny Llama, data, effective batch, learning rate and precision (bf16 autocast over float32 weights) on all
sides. Each side has a process of its own that lives through the comparison, one thread count for all, and they take
turns (A B C D, D C B A, ...), five rounds after one warm-up; a figure is the median over rounds of the ratio of
non-padding tokens per second. Before that every side trains on the same examples in the same order from the same
weights, and the losses of these steps must agree: the first to 1e-3, those after it to 1e-2 (bf16).

TRL has its trainers as they come and at their best exact setting found for a CPU (benchmarks/training/peer.py).
It has no PRMTrainer since 1.14: the last version that has one is taken for that comparison. `kills_bit_identical` is
read from what `bash scripts/faults.sh training_kills` wrote.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import Side, load_before
from benchmarks.result import RESULTS, figure, write_result
from benchmarks.training import logprob_memory, score_passes
from benchmarks.training.corpus import Sizes, build
from benchmarks.training.settings import SETTINGS

HOW = "bash scripts/bench.sh training"
GOALS = {
    "sft_vs_trl_default": 1.8,
    "sft_vs_trl_best": 1.1,
    "sft_vs_bare_loop": 0.95,
    "dpo_vs_trl_default": 2.0,
    "dpo_vs_trl_best": 1.3,
    "prm_vs_trl_default": 1.8,
    "prm_vs_trl_best": 1.1,
}
CHECKED_STEPS = 4


@dataclass(frozen=True)
class Plan:
    """Sizes and lengths of the runs; `steps` of the sides whose batches are alike, for each kind."""

    sizes: Sizes
    steps: dict[str, int]
    rounds: int
    vocabularies: tuple[int, ...]
    num_scored: int


FULL = Plan(Sizes(3200, 512, 1024), {"sft": 12, "dpo": 8, "prm": 32}, 5, logprob_memory.VOCABULARIES, 24)
QUICK = Plan(Sizes(256, 128, 64), {"sft": 2, "dpo": 2, "prm": 2}, 1, (1_000, 10_000), 3)


def block_steps(kind: str, plan: Plan) -> int:
    """Return steps in one block of length-sorted batches, as transformers' LengthGroupedSampler cuts them."""
    return min(max(1, getattr(plan.sizes, kind) // (4 * SETTINGS[kind].batch_size)), 50)


class Comparison:
    """The sides of one kind: `product`, `default`, `best`, for SFT also `bare`."""

    def __init__(self, kind: str, folder: Path, plan: Plan, arguments: argparse.Namespace, stack: ExitStack):
        self.kind, self.plan = kind, plan
        peer = [arguments.trl_python, "-m", "benchmarks.training.peer", str(folder), kind]
        own = [sys.executable, "-m", "benchmarks.training.product", str(folder), kind]
        commands = {"product": [*own, *arguments.settings], "default": [*peer, "default"], "best": [*peer, "best"]}
        if kind == "sft":
            commands["bare"] = [sys.executable, "-m", "benchmarks.training.plain_loop", str(folder)]
        path = [str(ROOT)] if kind != "prm" else [arguments.prm_trl, str(ROOT)]
        surroundings = {"OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false"}
        self.sides = {}
        for name, command in commands.items():
            only = {"PYTHONPATH": os.pathsep.join(path if name in ("default", "best") else [str(ROOT)])}
            self.sides[name] = Side(command, {**surroundings, **only})
            stack.callback(self.sides[name].stop)

    def same_losses(self) -> dict[str, list[float]]:
        """Return the losses of every side on the same examples in the same order; this is the warm-up too.

        Raises SystemExit where they differ: then the sides do not do the same work.
        """
        own = self.sides["product"].ask({"max_steps": CHECKED_STEPS})
        losses = {"product": own["losses"]}
        for name, side in self.sides.items():
            if name != "product":
                losses[name] = side.ask({"step_ids": own["step_ids"]})["losses"]
        for name, found in losses.items():
            gaps = [abs(one - other) for one, other in zip(found, own["losses"], strict=True)]
            if gaps[0] > 1e-3 or max(gaps) > 1e-2:
                raise SystemExit(f"{self.kind}: the losses of '{name}' are not those of the product: {losses}")
        return losses

    def question(self, name: str, seed: int, product: dict[str, Any] | None) -> dict[str, Any]:
        """Return what one side is asked to do in round `seed`."""
        if name == "bare":
            assert product is not None
            return {"step_ids": product["step_ids"]}
        steps = block_steps(self.kind, self.plan) if name == "best" else self.plan.steps[self.kind]
        return {"max_steps": steps, "seed": seed}

    def rounds(self) -> list[dict[str, dict[str, Any]]]:
        """side → result, of every round; the order of the sides is turned around from round to round."""
        found = []
        product = None  # the bare loop gets the batches of the product's last run
        for turn in range(self.plan.rounds):
            names = list(self.sides)
            results = {}
            for name in names if turn % 2 == 0 else names[::-1]:
                seed = turn + 1
                if name == "bare" and product is None:
                    raise AssertionError("the product goes first in the first round")
                results[name] = self.sides[name].ask(self.question(name, seed, product))
                product = results["product"] if name == "product" else product
            found.append(results)
            rates = ", ".join(f"{name} {rate(result):.0f}" for name, result in results.items())
            print(f"{self.kind}, round {turn + 1}: {rates} tokens/s", file=sys.stderr)
        return found


def rate(result: dict[str, Any], is_prepared: bool = True) -> float:
    """Return non-padding tokens per second; `is_prepared` false counts the product's own preparation too."""
    return result["tokens"] / (result["seconds"] + (0.0 if is_prepared else result["prepare_seconds"]))


def ratios(kind: str, rounds: Sequence[dict[str, dict[str, Any]]], other: str) -> list[float]:
    """Return product / other of every round. Against DPO as it comes, which computes the reference in every step, what
    the product computes beforehand for these pairs is counted."""
    is_prepared = not (kind == "dpo" and other == "default")
    return [rate(round_["product"], is_prepared) / rate(round_[other]) for round_ in rounds]


def compare(
    kind: str, folder: Path, plan: Plan, arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, detail) of one kind."""
    with ExitStack() as stack:
        comparison = Comparison(kind, folder, plan, arguments, stack)
        losses = comparison.same_losses()
        rounds = comparison.rounds()
    names = {"default": "trl_default", "best": "trl_best", "bare": "bare_loop"}
    figures = {}
    for other in comparison.sides:
        if other != "product":
            name = f"{kind}_vs_{names[other]}"
            figures[name] = figure(ratios(kind, rounds, other), goal=GOALS[name], how=HOW)
    detail = {
        "tokens_per_second": {side: [round(rate(row[side])) for row in rounds] for side in comparison.sides},
        "computed_over_non_padding_tokens": padding(rounds),
        "losses_on_the_same_examples": {side: [round(loss, 5) for loss in row] for side, row in losses.items()},
        "mean_loss_of_the_rounds": {side: round(fmean(fmean(row[side]["losses"]) for row in rounds), 4)
                                    for side in comparison.sides},
        "trl": rounds[0]["best"]["version"],
    }  # fmt: skip
    return figures, detail


def padding(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Return tokens with padding over tokens without, of every side that counts them."""
    return {
        side: round(sum(row[side]["computed_tokens"] for row in rounds) / sum(row[side]["tokens"] for row in rounds), 3)
        for side in rounds[0]
        if "computed_tokens" in rounds[0][side]
    }


def memory_figure(found: dict[str, dict[int, dict[str, int]]]) -> dict[str, Any]:
    """Return the product's peak at the largest vocabulary over its peak at the smallest: flat is 1."""
    peaks = {size: row["peak"] for size, row in found["product"].items()}
    value = peaks[max(peaks)] / peaks[min(peaks)]
    return lower(value, [value], 1.1, "ratio")


def passes_figure(found: dict[str, Any]) -> dict[str, Any]:
    """Forward passes for all steps of a trajectory."""
    passes = [at_once for _, at_once, _ in found["passes"]]
    return lower(fmean(passes), passes, 1, "forward passes")


def lower(value: float, all_values: Sequence[float], goal: float, unit: str) -> dict[str, Any]:
    """Return a figure of which less is better."""
    ends = {"low": round(min(all_values), 4), "high": round(max(all_values), 4)}
    return {"value": round(value, 4), **ends, "unit": unit, "goal": goal, "better": "lower", "met": value <= goal,
            "how": HOW}  # fmt: skip


def kills_figure() -> dict[str, Any]:
    """Return what benchmarks/training/training_kills.py found. Raises SystemExit where it was never run."""
    path = RESULTS / "training_kills.json"
    if not path.is_file():
        raise SystemExit(f"{path}: no such file: run bash scripts/faults.sh training_kills first")
    found: dict[str, Any] = json.loads(path.read_text())["figures"]["kills_bit_identical"]
    return found


SIDES = {"product": "this project", "default": "TRL as it comes", "best": "TRL at its best", "bare": "bare loop"}


def rates_table(detail: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return rates and the losses that go with them, of every side."""
    rows = []
    for kind in kinds:
        found = detail[kind]
        for side, rates in found["tokens_per_second"].items():
            losses = found["losses_on_the_same_examples"][side]
            padded = found["computed_over_non_padding_tokens"].get(side, "")
            mean = found["mean_loss_of_the_rounds"][side]
            rows.append([kind, SIDES[side], round(median(rates)), padded, losses[0], losses[-1], mean])
    losses_of = ["loss of step 1 *", f"of step {CHECKED_STEPS} *", "mean loss of the rounds"]
    columns = ["kind", "side", "tokens/s", "computed / non-padding tokens", *losses_of]
    return {
        "title": "Medians of the rounds (* on the same examples in the same order).",
        "columns": columns,
        "rows": rows,
    }


def memory_table(found: dict[str, dict[int, dict[str, int]]]) -> dict[str, Any]:
    """Return peaks in MiB."""
    shown = {
        method: {size: round(row["peak"] / 2**20, 1) for size, row in rows.items()} for method, rows in found.items()
    }
    rows = [[size, *(sizes.get(size, "") for sizes in shown.values())] for size in found["product"]]
    title = (f"Peak memory of {logprob_memory.TOKENS} log-probs, forward and backward, MiB beyond inputs, head and "
             "their gradients.")  # fmt: skip
    return {"title": title, "columns": ["vocabulary", "this project", "full logits"], "rows": rows}


def scoring_table(found: dict[str, Any]) -> dict[str, Any]:
    """At once against a prefix at a time."""
    steps, at_once, one_by_one = (sum(column) for column in zip(*found["passes"], strict=True))
    rows = [[len(found["passes"]), steps, at_once, one_by_one, found["seconds_ratio"], found["score_difference"]]]
    columns = ["trajectories", "steps", "passes at once", "passes a prefix at a time", "seconds, ratio",
               "largest difference of a score (bf16)"]  # fmt: skip
    return {"title": "Scoring every step of a trajectory.", "columns": columns, "rows": rows}


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two steps a side: does it run; prints, writes no result")
    parser.add_argument("--kinds", nargs="*", default=list(SETTINGS), choices=[*SETTINGS, "none"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-python", default=str(ROOT / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--prm-trl", default=str(ROOT / ".venv-bench" / "trl-with-prm"))
    parser.add_argument("--settings", nargs="*", default=[], help="key=value settings of the product, to try them")
    arguments = parser.parse_args()
    if not Path(arguments.trl_python).exists():
        raise SystemExit(f"{arguments.trl_python}: no such file: bash scripts/bench.sh training installs TRL there")
    return arguments


def main() -> None:
    """Measure and write results/training.json; without all kinds, or quick, print instead."""
    arguments = parse()
    plan, load = QUICK if arguments.quick else FULL, load_before()
    kinds = [kind for kind in SETTINGS if kind in arguments.kinds]
    figures: dict[str, Any] = {}
    detail: dict[str, Any] = {"threads": arguments.threads, "load_before": load}
    with tempfile.TemporaryDirectory(prefix="training-") as scratch:
        folder = Path(scratch)
        build(folder, plan.sizes)
        for kind in kinds:
            found, detail[kind] = compare(kind, folder, plan, arguments)
            figures |= found
        passes = score_passes.measure(folder, plan.num_scored)
    memory = logprob_memory.peaks(plan.vocabularies)
    figures["score_passes_per_trajectory"] = passes_figure(passes)
    figures["logprob_memory_150k_over_1k"] = memory_figure(memory)
    figures["kills_bit_identical"] = kills_figure()
    detail |= {"scoring": passes, "logprob_memory_bytes": memory}
    tables = [rates_table(detail, kinds), memory_table(memory), scoring_table(passes)]
    if arguments.quick or kinds != list(SETTINGS):
        print(json.dumps({"detail": detail, "figures": figures, "tables": tables}, indent=1))
        return
    versions = {"trl": detail["sft"]["trl"], "trl_with_prm": detail["prm"]["trl"]}
    print(write_result("training", figures, detail, more_versions=versions, tables=tables))


if __name__ == "__main__":
    main()
