"""Is a process reward model steady? Many seeds of its training on one fixed set of labels.

    bash scripts/bench.sh road prm_seeds [--run experiments/quickstart] [--seeds 20] [--work FOLDER] [SETTINGS ...]

Reads the labels of a finished quick start: its first policy, trajectories and step values. Every seed trains the
experiment of the quick start's reward model on the problems that are not held out (another order of the examples; the
fresh head is zero in all), scores the held-out tenth, and has one AUC over all its distinct steps, inner and last ones
together: a step is good where it leads to a state of value above 1/2. SETTINGS are the trainer's. What is in FOLDER is
kept, so that a run that was cut goes on.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rl.policy import run_program
from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import Trajectory
from espalier.pipeline.prm.prm_calibration import EvaluateProcessReward, auc
from espalier.pipeline.stage import StageContext

HOW = "bash scripts/bench.sh road prm_seeds"
EXPERIMENT = "exp/reward/word_arithmetic"
HELD_OUT = 0.1
GOAL = 0.92


def auc_of(values: Path, scores: Path) -> float:
    """Return the AUC over all distinct held-out steps of a file of scores."""
    context = StageContext(None, scores, 60.0)  # the index of rows lies beside the scores
    steps = EvaluateProcessReward(str(scores), HELD_OUT).scored_steps(str(values), context)
    found = auc(steps.scores, steps.values > 0.5)
    if found is None:
        raise SystemExit(f"error: {values}: all held-out steps are of one kind: no AUC")
    return found


def train_seed(run: Path, work: Path, seed: int, settings: Sequence[str]) -> dict[str, float]:
    """Train and score one seed in `work`; its AUC, and the held-out loss at its end."""
    values, folder, log = run / "process_rewards" / "step_values.jsonl", work / f"seed-{seed}", work / "programs.log"
    held_out, scores = work / "held_out.jsonl", folder / "step_scores.jsonl"
    if not held_out.is_file():
        rows = read_records(Trajectory, str(run / "process_rewards" / "trajectories.jsonl"))
        write_records(held_out, [row for row in rows if is_held_out(row.problem_id, HELD_OUT)])
    run_program(log, "trainer_base_ds_mul.py", "-cn", EXPERIMENT, f"output_dir={folder}", f"seed={seed}",
                f"model.path={run}/sft/model", f"examples.path={values}", f"examples.held_out_share={HELD_OUT}",
                *settings)  # fmt: skip
    run_program(log, "run_stage.py", "-cn", "prm/score_steps", f"input={held_out}", f"output={scores}",
                f"stage.model={folder}/model")  # fmt: skip
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in logged if "eval/loss" in row]
    return {"auc": round(auc_of(values, scores), 4), "loss": round(losses[-1], 4)}


def figures_of(rows: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Return the figures: the lowest AUC of all seeds, and how many are below the goal."""
    found = sorted(row["auc"] for row in rows.values())
    each = {"unit": f"AUC, {len(found)} seeds", "better": "higher", "goal": GOAL, "how": HOW}
    below = sum(value < GOAL for value in found)
    return {
        "prm_lowest_auc": {**each, "value": found[0], "low": found[0], "high": found[-1], "met": below == 0},
        "prm_seeds_below_goal": {
            "value": below, "low": below, "high": below, "unit": f"of {len(found)} seeds", "goal": 0, "better": "lower",
            "met": below == 0, "how": HOW,
        },
    }  # fmt: skip


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Train what is missing; the section's figures and table."""
    parser = argparse.ArgumentParser(prog=HOW)
    parser.add_argument("--run", type=Path, default=Path("experiments/quickstart"), help="a finished quick start")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("experiments/prm_seeds"))
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="key=value of the trainer")
    arguments = parser.parse_args(words)
    run = arguments.run.resolve()
    if not (run / "process_rewards" / "step_values.jsonl").is_file():
        parser.error(f"{run} is no finished quick start: run bash scripts/quickstart.sh first, or give --run")
    work = arguments.work.resolve()
    rows = {seed: train_seed(run, work, seed, arguments.settings) for seed in range(arguments.seeds)}
    table = [[seed, f"{row['auc']:.3f}", f"{row['loss']:.3f}"] for seed, row in rows.items()]
    return {
        "figures": figures_of(rows),
        "tables": [{"title": "The quick start's reward model, seed by seed, on the same labels",
                    "columns": ["seed", "AUC", "held-out loss"], "rows": table}],
        "settings": arguments.settings,
        "seeds": {str(seed): row for seed, row in rows.items()},
    }  # fmt: skip
