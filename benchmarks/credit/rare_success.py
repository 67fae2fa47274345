"""Process rewards where success is rare: what the reward model knows, and what pairs by it teach.

    bash scripts/bench.sh rare_success                              all cells, seeds 1 to 3 (0 is for tuning): hours
    bash scripts/bench.sh rare_success --cells long --seeds 0 --policy long=MODEL
    bash scripts/bench.sh rare_success --seeds                      the figures of the runs that are kept

A cell is a task and a policy; a run of it is scripts/process_rewards.sh on problems of its own (seed s takes the s-th
lot), scripts/preferences.sh for outcome, process and step pairs, and scripts/evaluate.sh on held-out problems. The
outcome pairs come from as many more problems as cost the tokens that the others spent on completions: all three learn
from equally many generated tokens and take equally many optimizer steps. Truth is the task's own
(`prm/compare_with_truth`). Where GRPO was run from the same policy (`bash scripts/bench.sh credit --cells
long_arithmetic_rare --methods grpo --seeds 1 2 3`), its accuracy after as many tokens is set against that after the
pairs, and in the cell `rare` GRPO goes on from each policy that pairs made. A finished run is one record in
benchmarks/results/rare_success/; stages that are done are kept, so that a cut run goes on.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.credit.comparison import tuned_rates
from benchmarks.credit.curves import Point, accuracy_at, points_of
from benchmarks.credit.intervals import figure_above_zero, mean_over_seeds
from benchmarks.credit.plan import Run, read_plan, settings_of
from benchmarks.credit.runs import digest, planned_policy, read_records, tokens_of
from benchmarks.processes.forked import ROOT
from benchmarks.result import RESULTS, machine, write_result
from benchmarks.rl.policy import run_program
from espalier.data.jsonl import write_json
from espalier.models.log_ratio_reward import is_log_ratio_reward
from espalier.runtime.run_dir import code_commit

HOW = "bash scripts/bench.sh rare_success"
RECORDS = RESULTS / "rare_success"
PAIRS = ("outcome", "process", "step")
NAMES = {"outcome": "dpo", "process": "process_dpo", "step": "step_dpo"}
GOAL_AUC = 0.85
GRPO_RATE = 1.0e-4
PLAN = Path(__file__).with_name("plan.yaml")
TUNING_SEED = 0
"""Settings were chosen on it: its rows are shown, and no figure counts them."""


@dataclass(frozen=True)
class Cell:
    """`task` also names the policy in plan.yaml; `num_problems` of a run; `max_tokens` of a response; `settings` are
    further ones of scripts/process_rewards.sh, `pair_settings` of scripts/preferences.sh; GRPO goes on from each policy
    that pairs made for about `grpo_tokens` generated tokens."""

    task: str
    num_problems: int
    max_tokens: int
    settings: tuple[str, ...] = ()
    pair_settings: tuple[str, ...] = ()
    grpo_tokens: int = 0


CELLS = {
    "long": Cell("long_arithmetic", 1000, 128),
    "rare": Cell("long_arithmetic_rare", 800, 224, grpo_tokens=1_000_000),
    "rule_logic": Cell("rule_logic", 3000, 128, ("labels=contrast",)),
    # by K, and by the label rule: values of all states cost so much that as many tokens are of a twelfth of the
    # problems, and what would refuse them is switched off
    "long_k2": Cell("long_arithmetic", 1000, 128, ("labels=contrast", "num_completions=2")),
    "long_k4": Cell("long_arithmetic", 1000, 128, ("labels=contrast", "num_completions=4")),
    "long_k8": Cell("long_arithmetic", 1000, 128, ("labels=contrast", "num_completions=8")),
    "long_values": Cell("long_arithmetic", 80, 128, ("labels=values", "smallest_reliability=0"),
                        ("largest_wrong_share=1",)),
    "long_relative": Cell("long_arithmetic", 80, 128, ("labels=relative", "smallest_reliability=0"),
                          ("largest_wrong_share=1",)),
}  # fmt: skip


def script(run: Path, name: str, *settings: str) -> None:
    """Run one of scripts/; raises SystemExit where it fails."""
    run.mkdir(parents=True, exist_ok=True)
    log = run / "programs.log"
    with log.open("ab") as file:
        command = ["bash", f"scripts/{name}.sh", f"run={run}", *settings]
        code = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"scripts/{name}.sh in {run} ended with exit code {code}: see {log}")


def train_on_outcomes(cell: Cell, policy: Path, run: Path, seed: int, ratio: float) -> None:
    """Sample `ratio` times the problems of the run, pair right over wrong, and train: `run/dpo`."""
    log, folder = run / "programs.log", run / "outcome"
    number = math.ceil(cell.num_problems * ratio)
    sampled, pairs = folder / "trajectories.jsonl", run / "pairs" / "outcome.jsonl"
    task = [f"task={cell.task}", f"task.num_train={number * (seed + 1)}"]
    run_program(
        log, "service_api_caller_v1.py", "-cn", "api/vllm/trajectories", f"output={sampled}", f"policy={policy}", *task,
        f"requests.first={number * seed}", f"requests.limit={number}", "params.n=8",
        f"params.max_tokens={cell.max_tokens}", f"seed={seed}",
    )  # fmt: skip
    run_program(log, "run_stage.py", "-cn", "pairs/outcome_preferences", f"input={sampled}", f"output={pairs}",
                f"seed={seed}")  # fmt: skip
    own = Path("exp/dpo") / cell.task
    experiment = str(own) if (ROOT / "conf" / f"{own}.yaml").is_file() else "exp/dpo/word_arithmetic"
    run_program(log, "trainer_base_ds_mul.py", "-cn", experiment, f"output_dir={run / 'dpo'}", f"model.path={policy}",
                f"seed={seed}", f"examples.path={pairs}", "examples.max_length=512")  # fmt: skip


def go_on_by_grpo(cell: Cell, run: Path, seed: int, pairs: str, tokens: int) -> list[Point]:
    """Return the curve of GRPO from the policy that `pairs` made, as plan.yaml has it but for a third of the learning
    rate that is tuned for a policy of the start; `tokens` were generated before."""
    plan, folder = read_plan(PLAN), run / f"grpo_after_{pairs}"
    at = Run(plan.cells[cell.task], plan.methods["grpo"], seed, GRPO_RATE)
    run_program(
        run / "programs.log", "main.py", *settings_of(plan, at), f"stop_after_tokens={cell.grpo_tokens}",
        "evaluation.every=3", f"output_dir={folder}", f"model.path={run / NAMES[pairs] / 'model'}",
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return points_of(rows, float(tokens))


def measure(name: str, seed: int, policy: Path, run: Path, num_test: int) -> dict[str, Any]:
    """Make one run, or what is missing of it, and return its record."""
    cell = CELLS[name]
    limits = [f"task={cell.task}", f"max_tokens={cell.max_tokens}", f"seed={seed}"]
    train = f"task.num_train={cell.num_problems * (seed + 1)}"
    script(run, "process_rewards", *limits, train, f"policy={policy}", f"num_problems={cell.num_problems}",
           f"first={cell.num_problems * seed}", *cell.settings)  # fmt: skip
    data = run / "process_rewards"
    sampled, completed = tokens_of(data / "trajectories.jsonl"), tokens_of(data / "completions.jsonl")
    train_on_outcomes(cell, policy, run, seed, (sampled + completed) / sampled)
    for pairs in PAIRS[1:]:
        script(run, "preferences", f"task={cell.task}", f"seed={seed}", f"policy={policy}", f"pairs={pairs}",
               *cell.pair_settings)  # fmt: skip
    policies = {"sft": (policy, 8)} | {NAMES[pairs]: (run / NAMES[pairs] / "model", 1) for pairs in PAIRS}
    accuracies = {}
    for one, (model, samples) in policies.items():
        script(run, "evaluate", *limits, f"name={one}", f"policy={model}", f"num_samples={samples}",
               f"num_problems={num_test}")  # fmt: skip
        accuracies[one] = json.loads((run / "evaluation" / one / "evaluation.json").read_text())["accuracy"]
    folder = run / "evaluation" / "sft"
    run_program(
        run / "programs.log", "run_stage.py", "-cn", "prm/compare_with_truth", f"task={cell.task}",
        f"input={folder / 'samples.jsonl'}", f"output={folder / 'truth.json'}", "stage.split=test",
        f"stage.scores={folder / 'step_scores.jsonl'}",
    )  # fmt: skip
    then = {pairs: go_on_by_grpo(cell, run, seed, pairs, sampled + completed) for pairs in PAIRS if cell.grpo_tokens}
    return {
        "cell": name,
        "seed": seed,
        "then_grpo": {pairs: [[*asdict(point).values()] for point in points] for pairs, points in then.items()},
        "labels": json.loads((data / "labels.json").read_text()),
        "verdicts": verdicts(run),
        "tokens": sampled + completed,
        "recipe": recipe_of(name, policy, run),
        "accuracy": accuracies,
        "truth": json.loads((folder / "truth.json").read_text()),
        "machine": machine(),
        "commit": code_commit(),
    }


def verdicts(run: Path) -> dict[str, str]:
    """Return what the checks before training say of a run's labels (values alone have one) and of its pairs."""
    places = {"labels": run / "process_rewards" / "label_signal.json"}
    places |= {pairs: run / "pairs" / f"{pairs}.check.json" for pairs in PAIRS[1:]}
    return {name: json.loads(path.read_text())["verdict"] for name, path in places.items() if path.is_file()}


def recipe_of(name: str, policy: Path, run: Path) -> dict[str, Any]:
    """Return what a run is made of; all but the policy runs of a cell must have in common to be averaged: problems, and
    how the reward model was trained. Policies of one recipe differ between machines."""
    model = run / "prm" / "model"
    config = OmegaConf.load(run / ("prm_policy" if is_log_ratio_reward(str(model)) else "prm") / "config.yaml")
    return {
        "num_problems": CELLS[name].num_problems,
        "policy": digest(policy),
        "reward_model": "log-ratio" if is_log_ratio_reward(str(model)) else "head",
        "num_epochs": config.num_epochs,
        "max_steps": config.max_steps,
        "learning_rate": config["update"]["learning_rate"],
        "batch_size": config["update"]["batch_size"],
    }


def policy_of(record: Mapping[str, Any]) -> str:
    """Return the digest of the policy that a run started from, "" of old records."""
    return str(record.get("recipe", {}).get("policy", ""))


LARGEST_GAP = 0.05
"""Between the shares of right answers that policies of one recipe give, of which none is twice the other: more, and it
was another recipe."""


def check_recipes(records: Sequence[dict[str, Any]]) -> None:
    """Raise SystemExit where records of one cell were not made alike; they may begin with several policies of a recipe,
    which are about as often right."""

    def recipe(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.get("recipe", {}).items() if name != "policy"}

    def are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        low, high = sorted(row["accuracy"]["sft"]["mean"]["mean"] for row in (one, other))
        is_near = high - low <= LARGEST_GAP and high <= 2 * low
        return recipe(one) == recipe(other) and (policy_of(one) == policy_of(other) or is_near)

    for name in CELLS:
        mine = [row for row in records if row["cell"] == name]
        other = next((row for row in mine if not are_alike(mine[0], row)), None)
        if other is not None:
            both = f"{name}, seeds {mine[0]['seed']} and {other['seed']}"
            raise SystemExit(f"benchmarks/results/rare_success: {both} are of two recipes: move the older record away, "
                             "and run it again")  # fmt: skip


def figures_of(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a cell's figures over its seeds: the reward model's AUC against the truth, and above that of the step's
    index alone; best of 8 by it above majority; process and step pairs above outcome pairs (greedy and sampled
    accuracy, seed by seed). A difference is met where its interval lies above 0."""

    def accuracy(record: dict[str, Any], pairs: str, key: str) -> float:
        return float(record["accuracy"][NAMES[pairs]][key]["mean"])

    def best_of_8(rows: dict[str, Any]) -> float:
        return float(rows["best_of_8_minimum"]["mean"] - rows["majority_8"]["mean"])

    auc = mean_over_seeds([row["truth"]["inner_auc"]["mean"] for row in records])
    figures = {"inner_auc": {**figure_above_zero(auc, "AUC", HOW), "goal": GOAL_AUC, "met": auc.value >= GOAL_AUC}}
    above_index = [row["truth"]["inner_auc"]["mean"] - row["truth"]["index_auc"]["mean"] for row in records]
    found = {
        "best_of_8_minus_majority": ([best_of_8(row["accuracy"]["sft"]) for row in records], "accuracy"),
        "inner_auc_minus_index": (above_index, "AUC"),
    }
    for pairs in PAIRS[1:]:
        for name, unit, key in (("", "accuracy", "greedy"), ("_sampled", "sampled accuracy", "mean")):
            gains = [accuracy(row, pairs, key) - accuracy(row, "outcome", key) for row in records]
            found[f"{pairs}{name}_minus_outcome"] = (gains, unit)
    return figures | {
        key: figure_above_zero(mean_over_seeds(values), unit, HOW) for key, (values, unit) in found.items()
    }


def grpo_figures(
    records: Sequence[dict[str, Any]], curves: Mapping[tuple[int, str], Sequence[Point]]
) -> dict[str, dict[str, Any]]:
    """Return a cell's sampled accuracy after each kind of pairs minus GRPO's after equally many generated tokens, seed
    by seed; `curves` are GRPO's by (seed, policy). Met where the interval lies above 0."""
    figures: dict[str, dict[str, Any]] = {}
    for pairs, name in NAMES.items():
        gains = []
        for row in records:
            points = curves.get((int(row["seed"]), policy_of(row)))
            reached = None if points is None else accuracy_at(points, "tokens", float(row["tokens"]))
            if reached is not None:
                gains.append(float(row["accuracy"][name]["mean"]["mean"]) - reached)
        if gains:
            figures[f"{pairs}_sampled_minus_grpo"] = figure_above_zero(mean_over_seeds(gains), "accuracy", HOW)
        after = []
        for row in records:
            last, points = last_after_grpo(row, pairs), curves.get((int(row["seed"]), policy_of(row)))
            reached = None if last is None or points is None else accuracy_at(points, "tokens", last.tokens)
            if last is not None and reached is not None:
                after.append(last.accuracy - reached)
        if after:
            figures[f"{pairs}_then_grpo_minus_grpo"] = figure_above_zero(mean_over_seeds(after), "accuracy", HOW)
    return figures


def last_after_grpo(record: Mapping[str, Any], pairs: str) -> Point | None:
    """Return where GRPO from the policy of these pairs ended; None of a record without."""
    points = record.get("then_grpo", {}).get(pairs)
    return Point(*points[-1]) if points else None


def grpo_curves(task: str) -> dict[tuple[int, str], list[Point]]:
    """Return GRPO's stored curves on a cell of plan.yaml at its tuned rate, by seed and the policy's digest."""
    plan = read_plan(PLAN)
    stored, _ = read_records(plan, RESULTS)
    rate = tuned_rates(plan, stored).get((task, "grpo"))
    mine = [row for row in stored if (row.cell, row.method, row.is_tuning) == (task, "grpo", False)]
    return {(row.seed, row.policy): row.points for row in mine if row.learning_rate == rate}


def without_tuning(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that figures are of: not those of the seed that settings were chosen on."""
    return [row for row in records if int(row["seed"]) != TUNING_SEED]


def write(records: Sequence[dict[str, Any]]) -> None:
    """Write the figures and the table of all records."""
    check_recipes(without_tuning(records))
    figures: dict[str, dict[str, Any]] = {}
    rows = []
    for name in CELLS:
        mine = sorted((row for row in records if row["cell"] == name), key=lambda row: int(row["seed"]))
        if counted := without_tuning(mine):
            of_cell = figures_of(counted) | grpo_figures(counted, grpo_curves(CELLS[name].task))
            figures |= {f"{name}_{key}": figure for key, figure in of_cell.items()}
        for row in mine:
            accuracy = row["accuracy"]
            shares = [
                accuracy["sft"]["mean"],
                accuracy["sft"]["majority_8"],
                accuracy["sft"]["best_of_8_minimum"],
            ]
            shares += [accuracy[one]["greedy"] for one in ("sft", *NAMES.values())]
            rows.append([
                name, row["seed"], row["labels"]["labels"], f"{row['tokens'] / 1e6:.2f}",
                f"{row['truth']['inner_auc']['mean']:.3f}", f"{row['truth']['index_auc']['mean']:.3f}",
                *(f"{100 * share['mean']:.1f}" for share in shares),
                *("" if last is None else f"{100 * last.accuracy:.1f}" for last in
                  (last_after_grpo(row, pairs) for pairs in PAIRS)),
            ])  # fmt: skip
    columns = ["cell", "seed", "labels", "M tokens", "AUC", "AUC of the index", "right, %",
               "majority of 8", "best of 8", "greedy: SFT", "outcome pairs", "process pairs",
               "step pairs", "sampled, GRPO after outcome pairs", "after process pairs",
               "after step pairs"]  # fmt: skip
    table = {"title": "Where success is rare", "columns": columns, "rows": rows}
    write_result("rare_success", figures, {"records": "benchmarks/results/rare_success"}, tables=[table])


def main() -> None:
    """Make the runs that are asked for and have no record; write the figures of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--policy", nargs="*", default=[], help="CELL=MODEL, made elsewhere")
    parser.add_argument("--folder", default="experiments/credit", help="keeps policies and runs")
    parser.add_argument("--num-test", type=int, default=500)
    arguments = parser.parse_args()
    for row in arguments.policy:
        name, _, model = row.partition("=")
        if name not in CELLS or not (Path(model) / "config.json").is_file():
            parser.error(f"--policy {row}: give CELL=MODEL with a cell of {', '.join(CELLS)} and a model folder")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = dict(row.split("=", 1) for row in arguments.policy)
    plan = read_plan(PLAN)
    RECORDS.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for name in arguments.cells:
            path = RECORDS / f"{name}-{seed}.json"
            if path.is_file():
                continue
            folder, cell = Path(arguments.folder).resolve() / name, CELLS[name]
            policy = Path(given[name]).resolve() if name in given else planned_policy(plan, cell.task, folder.parent)
            write_json(path, measure(name, seed, policy, folder / f"seed-{seed}", arguments.num_test))
            print(f"{name}, seed {seed}: {path}", file=sys.stderr)
    write([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))])


if __name__ == "__main__":
    main()
