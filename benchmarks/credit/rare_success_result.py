"""What the runs of benchmarks/credit/rare_success.py say: figures over seeds, and the table of all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.credit.curves import Point, accuracy_at
from benchmarks.credit.intervals import figure_above_zero, mean_over_seeds
from benchmarks.credit.learning_rates import runs_of, shown_runs, tuned_rates
from benchmarks.credit.plan import read_plan
from benchmarks.credit.runs import read_records
from benchmarks.result import RESULTS, write_result

HOW = "bash scripts/bench.sh rare_success"
PAIRS = ("outcome", "process", "step")
NAMES = {"outcome": "dpo", "process": "process_dpo", "step": "step_dpo"}
GOAL_AUC = 0.85
PLAN = Path(__file__).with_name("plan.yaml")
TUNING_SEED = 0
"""Settings were chosen on it: its rows are shown, and no figure counts them."""


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

    for name in sorted({row["cell"] for row in records}):
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
    """Return GRPO's stored curves on a cell of plan.yaml at its tuned rates, by seed and the policy's digest; none
    where it was not tuned."""
    plan = read_plan(PLAN)
    stored, _ = read_records(plan, RESULTS)
    tuned = tuned_rates(plan, stored).get((task, "grpo"), {})
    shown = shown_runs(runs_of(stored, task, "grpo"), tuned) if tuned else []
    return {(row.seed, row.policy): row.points for row in shown}


def without_tuning(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that figures are of: not those of the seed that settings were chosen on."""
    return [row for row in records if int(row["seed"]) != TUNING_SEED]


def write(records: Sequence[dict[str, Any]], tasks: Mapping[str, str]) -> None:
    """Write the figures and the table of all records; `tasks`: that of every cell."""
    check_recipes(without_tuning(records))
    figures: dict[str, dict[str, Any]] = {}
    rows = []
    for name, task in tasks.items():
        mine = sorted((row for row in records if row["cell"] == name), key=lambda row: int(row["seed"]))
        if counted := without_tuning(mine):
            of_cell = figures_of(counted) | grpo_figures(counted, grpo_curves(task))
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
