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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.credit.curves import Point, points_of
from benchmarks.credit.plan import Run, read_plan, settings_of
from benchmarks.credit.rare_success_result import NAMES, PAIRS, PLAN, write
from benchmarks.credit.runs import digest, planned_policy, tokens_of
from benchmarks.processes.forked import ROOT
from benchmarks.result import RESULTS, machine
from benchmarks.rl.policy import run_program
from espalier.data.jsonl import write_json
from espalier.models.log_ratio_reward import is_log_ratio_reward
from espalier.runtime.run_dir import code_commit

RECORDS = RESULTS / "rare_success"
GRPO_RATE = 1.0e-4


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
    tasks = {name: cell.task for name, cell in CELLS.items()}
    write([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))], tasks)


if __name__ == "__main__":
    main()
