"""Implicit process reward models beside a Monte-Carlo one: does a score say whether the solution is right so far?

    bash scripts/bench.sh implicit_prm                         what is missing, then the table of all records
    bash scripts/bench.sh implicit_prm --cells word_arithmetic --seeds 1
    bash scripts/bench.sh implicit_prm --seeds                 the table alone

From one policy of plan.yaml solutions of a cell's problems are sampled once. On the same solutions of the same half of
them are trained: the Monte-Carlo reward model (scripts/process_rewards.sh; its completions are tokens more) and, on
outcomes alone, one policy by each of four losses (conf/exp/reward/implicit_*_embedded), which is read as a log-ratio
reward model in three ways (`models.log_ratio_reward`). All score the solutions of the other half, and
`prm/compare_with_truth` gives the AUC over inner steps beside that of the step's index. A record per cell and seed is
kept (benchmarks/results/implicit_prm/): another seed has other problems, solutions and training order.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.credit.intervals import figure_above_zero, mean_over_seeds
from benchmarks.credit.plan import read_plan
from benchmarks.credit.rare_success import script
from benchmarks.credit.runs import digest, planned_policy, tokens_of
from benchmarks.result import RESULTS, machine, write_result
from benchmarks.rl.policy import run_program
from espalier.data.examples.token_examples import is_in_part
from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import StepScores, Trajectory
from espalier.data.steps import step_tokens
from espalier.models.load import load_policy
from espalier.models.log_ratio_reward import Scale, joined_ratios
from espalier.models.sampled_logprobs import sampled_logprobs
from espalier.pipeline.prm.compare_with_truth import CompareWithTruth
from espalier.pipeline.stage import StageContext
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.run_dir import code_commit
from espalier.runtime.schemas import StageConfig

HOW = "bash scripts/bench.sh implicit_prm"
RECORDS = RESULTS / "implicit_prm"
LOSSES = ("ce", "dpo", "nca", "kto")
JOINS = ("minimum", "sum", "step")
HELD_OUT = 0.5
"""Of the problems: reward models are trained on the others."""


@dataclass(frozen=True)
class Cell:
    """`task` also names the policy in plan.yaml; `num_problems` of a run; `max_tokens` of a response."""

    task: str
    num_problems: int
    max_tokens: int


CELLS = {"word_arithmetic": Cell("word_arithmetic", 300, 96), "rule_logic": Cell("rule_logic", 300, 128)}


def truth_of(task: Any, trajectories: Path, scores: Path) -> dict[str, Any]:
    """Return the document of `prm/compare_with_truth`."""
    context = StageContext(task, scores.with_suffix(".truth.json"), line_every_seconds=60)
    return CompareWithTruth(str(scores), "train").run(str(trajectories), context)


def implicit_truths(
    task: Any, held_out: Path, trained: Path, reference: Sequence[Sequence[float]], run: Path, loss: str
) -> dict[str, dict[str, Any]]:
    """Score the held-out solutions by a trained policy, read in every way of `JOINS`; `reference`: their tokens'
    log-probs under the policy that it began as."""
    rows = read_records(Trajectory, str(held_out))
    logprobs = sampled_logprobs(load_policy(str(trained), "eager"), list(map(step_tokens, rows)))
    found = {}
    for how in JOINS:
        scale, file = Scale(how, 0.05), run / f"{loss}_{how}_scores.jsonl"
        ratios = [joined_ratios(own, base, row.step_ends, how)
                  for row, own, base in zip(rows, logprobs, reference, strict=True)]  # fmt: skip
        scores = [list(map(scale.score, of_row)) for of_row in ratios]
        scored = [StepScores(row.id, row.problem_id, own, False) for row, own in zip(rows, scores, strict=True)]
        write_records(file, scored)
        found[f"{loss}_{how}"] = truth_of(task, held_out, file)
    return found


def train_on_outcomes(run: Path, loss: str, policy: Path, seed: int) -> tuple[Path, float]:
    """Train a policy by a loss on the run's outcomes; (its folder, its accuracy at the last step that was logged)."""
    folder, data = run / loss, run / "process_rewards"
    source = run / "pairs.jsonl" if loss in ("dpo", "nca") else data / "trajectories.jsonl"
    if not (folder / "model").is_dir():
        run_program(run / "programs.log", "trainer_base_ds_mul.py", "-cn", f"exp/reward/implicit_{loss}_embedded",
                    f"output_dir={folder}", f"model.path={policy}", f"examples.path={source}", f"seed={seed}",
                    f"examples.held_out_share={HELD_OUT}", "examples.max_length=512")  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return folder / "model", next(row["train/accuracy"] for row in reversed(rows) if "train/accuracy" in row)


def measure(cell: Cell, seed: int, policy: Path, run: Path) -> dict[str, Any]:
    """Make one run, or what is missing of it, and return its record."""
    log, data, pairs, first = (
        run / "programs.log",
        run / "process_rewards",
        run / "pairs.jsonl",
        cell.num_problems * seed,
    )
    task_words = [f"task={cell.task}", f"task.num_train={first + cell.num_problems}"]
    script(run, "process_rewards", *task_words, f"seed={seed}", f"policy={policy}", "folds=1", "labels=values",
           f"held_out_share={HELD_OUT}", f"max_tokens={cell.max_tokens}", f"num_problems={cell.num_problems}",
           f"first={first}")  # fmt: skip
    if not pairs.is_file():
        run_program(log, "run_stage.py", "-cn", "pairs/outcome_preferences", f"input={data / 'trajectories.jsonl'}",
                    f"output={pairs}", f"seed={seed}", "stage.part=train",
                    f"stage.held_out_share={HELD_OUT}")  # fmt: skip
    unused = ["stage.scores=none", "output=none"]
    task = build(compose_config(StageConfig, "stage/prm/compare_with_truth", [*task_words, *unused]).task)
    rows = read_records(Trajectory, str(data / "trajectories.jsonl"))
    rows = [row for row in rows if is_in_part(row.problem_id, "held_out", HELD_OUT)]
    held_out = run / "held_out.jsonl"
    write_records(held_out, rows)
    truth = {"monte_carlo": truth_of(task, held_out, data / "step_scores.jsonl")}
    reference = sampled_logprobs(load_policy(str(policy), "eager"), list(map(step_tokens, rows)))
    accuracies = {}
    for loss in LOSSES:
        trained, accuracies[loss] = train_on_outcomes(run, loss, policy, seed)
        truth |= implicit_truths(task, held_out, trained, reference, run, loss)
    any_truth = next(reversed(truth.values()))
    return {
        "task": cell.task,
        "seed": seed,
        "num_problems": cell.num_problems,
        "policy": digest(policy),
        "auc": {name: found["inner_auc"] for name, found in truth.items()},
        "index_auc": any_truth["index_auc"],
        "num_steps": any_truth["num_steps"],
        "right_share": any_truth["right_share"],
        "training_accuracy": accuracies,
        "tokens": {
            "solutions": tokens_of(data / "trajectories.jsonl"),
            "completions": tokens_of(data / "completions.jsonl"),
        },
        "machine": machine(),
        "commit": code_commit(),
    }


def mean_auc(records: Sequence[dict[str, Any]], name: str) -> float:
    """Return the mean over records of the AUC of a reward model."""
    return mean_over_seeds([row["auc"][name]["mean"] for row in records]).value


def rows_of(cell: str, records: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return the rows of a cell in the table."""
    tokens = {kind: sum(row["tokens"][kind] for row in records) / len(records) / 1e6
              for kind in ("solutions", "completions")}  # fmt: skip
    index, num = mean_over_seeds([row["index_auc"]["mean"] for row in records]).value, len(records)
    monte_carlo = f"{mean_auc(records, 'monte_carlo'):.3f}"
    rows = [
        [cell, "step's index alone", "", "", f"{index:.3f}", num],
        [cell, "Monte-Carlo values", f"{sum(tokens.values()):.2f}", "", monte_carlo, num],
    ]
    for loss in LOSSES:
        aucs = {how: f"{mean_auc(records, f'{loss}_{how}'):.3f}" for how in JOINS}
        rows += [[cell, f"implicit, {loss}", f"{tokens['solutions']:.2f}", how, auc, num] for how, auc in aucs.items()]
    return rows


def figures_of(cell: str, records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, for each loss, the AUC of the worst step so far minus that of the Monte-Carlo model; met where the
    interval over seeds lies above 0."""
    gains = {
        loss: [row["auc"][f"{loss}_minimum"]["mean"] - row["auc"]["monte_carlo"]["mean"] for row in records]
        for loss in LOSSES
    }
    return {
        f"{cell}_{loss}_minus_monte_carlo": figure_above_zero(mean_over_seeds(values), "AUC", HOW)
        for loss, values in gains.items()
    }


def write(records: Sequence[dict[str, Any]]) -> None:
    """Write the figures and the table of all records."""
    figures: dict[str, dict[str, Any]] = {}
    rows: list[list[Any]] = []
    for cell in CELLS:
        if mine := [row for row in records if row["task"] == cell]:
            figures |= figures_of(cell, mine)
            rows += rows_of(cell, mine)
    columns = ["cell", "reward model", "M tokens", "joined by", "AUC, inner steps", "seeds"]
    table = {"title": "Implicit process reward models", "columns": columns, "rows": rows}
    write_result("implicit_prm", figures, {"records": "benchmarks/results/implicit_prm"}, tables=[table])


def main() -> None:
    """Make the runs that are asked for and have no record; write the figures of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", default="experiments/implicit_prm", help="keeps policies and runs")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan = read_plan(Path(__file__).with_name("plan.yaml"))
    RECORDS.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for name in arguments.cells:
            path, folder = RECORDS / f"{name}-{seed}.json", Path(arguments.folder).resolve()
            if path.is_file():
                continue
            policy = planned_policy(plan, CELLS[name].task, folder)
            write_json(path, measure(CELLS[name], seed, policy, folder / name / f"seed-{seed}"))
            print(f"{name}, seed {seed}: {path}", file=sys.stderr)
    write([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))])


if __name__ == "__main__":
    main()
