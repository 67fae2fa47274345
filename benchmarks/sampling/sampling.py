"""The sampling figures, part by part; each part's figures are written as soon as it is done, the others' stay.

    bash scripts/bench.sh sampling                          all parts, on a finished quick start
    bash scripts/bench.sh sampling prefill values           some of them
    bash scripts/bench.sh sampling plan --run experiments/quickstart

Parts: `throughput` (HTTP against in process), `prefill` (prompt tokens that the engine computes), `values` (tokens for
equal value error), `prm` (a reward model on half the tokens), `plan` (predicted against paid). About 20 minutes on two
quiet cores. The policy is the quick start's SFT model; `plan` compares with what that run paid, so let it have run on
the machine in the same state.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, write_result
from benchmarks.sampling import plan_error, prefill, prm_budget, throughput, value_budget

Part = Callable[[argparse.Namespace, Path, str], tuple[dict[str, Any], dict[str, Any]]]
HOW = "bash scripts/bench.sh sampling"


def model_of(arguments: argparse.Namespace) -> str:
    """Return the policy of the run."""
    return str((arguments.run / "sft" / "model").resolve())


def run_throughput(arguments: argparse.Namespace, folder: Path, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `http_vs_in_process`."""
    states = str((arguments.run / "process_rewards" / "states.jsonl").resolve())
    return throughput.measure(model_of(arguments), states, arguments.rounds, how)


def run_prefill(arguments: argparse.Namespace, folder: Path, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `prompt_tokens_over_block_bound`, `prompt_tokens_over_trie_long`."""
    found = prefill.measure(model_of(arguments), arguments.trajectories // prefill.SAMPLES, arguments.threads)
    return prefill.figures(found, how), found


def run_values(arguments: argparse.Namespace, folder: Path, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `tokens_for_equal_value_error` of the way that conf/requests/smoothed_completions.yaml takes."""
    found, detail = value_budget.measure_recorded(
        model_of(arguments), arguments.value_problems, arguments.value_seeds, how, arguments.threads
    )
    if value_budget.CHOSEN not in found:
        raise SystemExit(f"'{value_budget.CHOSEN}' never met the error of plain K: nothing is written")
    return {"tokens_for_equal_value_error": found[value_budget.CHOSEN]}, {**detail, "ways": found}


def run_prm(arguments: argparse.Namespace, folder: Path, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `prm_auc_half_budget_minus_plain`."""
    return prm_budget.measure(model_of(arguments), folder, arguments.prm_problems, arguments.prm_seeds, how)


def run_plan(arguments: argparse.Namespace, folder: Path, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `plan_tokens_error`, `plan_seconds_error`."""
    return plan_error.measure(arguments.run, folder, 100, how)


PARTS: dict[str, Part] = {
    "throughput": run_throughput,
    "prefill": run_prefill,
    "values": run_values,
    "prm": run_prm,
    "plan": run_plan,
}


def merge(name: str, figures: dict[str, Any], detail: dict[str, Any]) -> Path:
    """Write a part's figures beside those of the other parts that stand in the file."""
    path = RESULTS / "sampling.json"
    stored = json.loads(path.read_text()) if path.is_file() else {}
    parts = {part: row for part, row in stored.get("detail", {}).items() if part in PARTS and part != name}
    known = {key for row in parts.values() for key in row["figures"]}
    kept = {key: row for key, row in stored.get("figures", {}).items() if key in known}
    return write_result("sampling", {**kept, **figures}, {**parts, name: {"figures": [*figures], **detail}})


def main() -> None:
    """Run the parts that are asked for, all where none is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--run", type=Path, default=Path("experiments/quickstart"), help="a finished quick start")
    parser.add_argument("--folder", type=Path, help="keeps the work of prm and plan, to go on with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--value-problems", type=int, default=60)
    parser.add_argument("--value-seeds", type=int, default=5)
    parser.add_argument("--prm-problems", type=int, default=300)
    parser.add_argument("--prm-seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="cores of the engines of prefill and values; 0: all")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part '{unknown[0]}': choose from {', '.join(PARTS)}")
    if not (arguments.run / "sft" / "model").is_dir():
        parser.error(f"{arguments.run} is no finished quick start: run bash scripts/quickstart.sh first, or give --run")
    for name in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (arguments.folder or Path(temporary)).resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            figures, detail = PARTS[name](arguments, folder, f"{HOW} {name}")
        path = merge(name, figures, detail)
        for key, row in figures.items():
            print(f"{key}: {row['value']} ({row['low']} to {row['high']}), goal {row['goal']}, met: {row['met']}")
    print(path)


if __name__ == "__main__":
    main()
