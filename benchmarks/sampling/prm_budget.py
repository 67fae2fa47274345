"""A process reward model trained on labels for half the tokens against one trained on plain K = 9, true step labels.

Both are trained by the programs themselves on the same trajectories of the embedded task: one on plain K = 9 labels
(`requests/completions`, `stage/values/estimate_values`), one on `requests/smoothed_completions` with at most 4
completions a state on average (`stage/values/smoothed_values`). Each scores every step of 8 fresh solutions of every
problem of the dev split. There the truth of a step is known: it is right where each line so far names the problem's
next operation and its true result. The figure is the difference of the areas under the ROC curve, a pair of models a
seed. Best of 8 (product of the scores) is graded by the answer.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.records import Problem, StepScores, Trajectory
from espalier.data.tasks.arithmetic_operations import apply_operation
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.pipeline.prm.prm_calibration import auc

ROOT = Path(__file__).resolve().parent.parent.parent
PLAIN = 9
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided, by the number of seeds


def run(program: str, config: str, *words: str) -> None:
    """One of our programs; its own messages are shown. Raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, program, "-cn", config, *words], cwd=ROOT, check=True)


def true_steps(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Say whether the solution is on the true way after each step: the operations' true results, then the answer."""
    value = int(problem.info["start"])
    lines = []
    for verb, amount in problem.info["operations"]:
        before, value = value, apply_operation(value, (verb, amount))
        lines.append((f"{verb}: {before} ", f" = {value}"))
    found, is_right = [], True
    for place, step in enumerate(steps):
        text = step.rstrip("\n")
        if place < len(lines):
            head, tail = lines[place]
            is_right = is_right and text.startswith(head) and text.endswith(tail)
        else:
            is_right = is_right and place == len(lines) and text == f"#### {value}"
        found.append(is_right)
    return found


def evaluate(trajectories: str, scores: str) -> dict[str, float]:
    """Return `auc` over distinct steps, `best_of_8` and `mean` accuracy of the solutions."""
    problems = {problem.id: problem for problem in WordArithmetic().problems("dev")}
    by_id = {row.id: row.scores for row in read_records(StepScores, scores)}
    steps: dict[tuple[str, tuple[int, ...]], tuple[float, bool]] = {}
    groups: dict[str, list[tuple[float, bool]]] = {}
    for row in read_records(Trajectory, trajectories):
        truth = true_steps(problems[row.problem_id], row.steps)
        for end, score, is_right in zip(row.step_ends, by_id[row.id], truth, strict=True):
            steps[row.problem_id, tuple(row.response_ids[:end])] = (score, is_right)
        groups.setdefault(row.problem_id, []).append((math.prod(by_id[row.id]), row.is_correct))
    area = auc([score for score, _ in steps.values()], [is_right for _, is_right in steps.values()])
    if area is None:
        raise ValueError(f"{trajectories}: every step is right, or none: nothing to tell apart")
    best = [fmean(is_right for score, is_right in group if score == max(group)[0]) for group in groups.values()]
    mean = fmean(is_right for group in groups.values() for _, is_right in group)
    return {"auc": area, "best_of_8": fmean(map(float, best)), "mean": mean, "steps": len(steps)}


def make_labels(model: str, folder: Path, num_problems: int) -> dict[str, int]:
    """Return trajectories, both kinds of labels and fresh solutions; way -> the tokens that its completions cost."""
    rows, states = f"{folder}/trajectories.jsonl", f"{folder}/states.jsonl"
    ask = "service_api_caller_v1.py"
    run(ask, "api/vllm/trajectories", f"policy={model}", f"output={rows}", f"requests.limit={num_problems}")
    run("run_stage.py", "values/cut_states", f"input={rows}", f"output={states}")
    common = [f"policy={model}", f"requests.states={states}"]
    run(ask, "api/vllm/completions", f"output={folder}/plain.jsonl", f"params.n={PLAIN}", *common)
    run(ask, "api/vllm/smoothed_completions", f"output={folder}/half.jsonl", f"requests.trajectories={rows}", *common)
    run(ask, "api/vllm/trajectories", f"policy={model}", f"output={folder}/dev.jsonl", "requests.split=dev")
    for name, stage in (("plain", "values/estimate_values"), ("half", "values/smoothed_values")):
        run("run_stage.py", stage, f"input={folder}/{name}.jsonl", f"output={folder}/{name}_values.jsonl",
            f"stage.trajectories={rows}", f"stage.states={states}")  # fmt: skip
    return {name: int(json.loads((folder / f"{name}.meta.json").read_text())["counts"]["generated_tokens"])
            for name in ("plain", "half")}  # fmt: skip


def train_and_score(model: str, folder: Path, name: str, seed: int) -> dict[str, float]:
    """Train one model on one kind of labels and score the fresh solutions."""
    out, dev = folder / f"{name}-{seed}", f"{folder}/dev.jsonl"
    run("trainer_base_ds_mul.py", "exp/reward/word_arithmetic", f"output_dir={out}", f"model.path={model}",
        f"examples.path={folder}/{name}_values.jsonl", f"seed={seed}")  # fmt: skip
    run("run_stage.py", "prm/score_steps", f"input={dev}", f"output={out}.jsonl", f"stage.model={out}/model")
    return evaluate(dev, f"{out}.jsonl")


def measure(
    model: str, folder: Path, num_problems: int, num_seeds: int, how: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figure, detail). Work stands in `folder`: what is finished there is not done again."""
    model = str(Path(model).resolve())
    tokens = make_labels(model, folder, num_problems)
    found: dict[str, list[dict[str, float]]] = {
        name: [train_and_score(model, folder, name, seed) for seed in range(num_seeds)] for name in ("plain", "half")
    }
    gaps = [half["auc"] - plain["auc"] for half, plain in zip(found["half"], found["plain"], strict=True)]
    reach = _T95.get(len(gaps), 2.776) * stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    value = fmean(gaps)
    figure = {"value": round(value, 5), "low": round(value - reach, 5), "high": round(value + reach, 5), "unit": "AUC",
              "goal": 0.0, "better": "higher", "met": value - reach > 0, "how": how}  # fmt: skip
    detail = {"problems": num_problems, "seeds": num_seeds, "tokens": tokens,
              "token_share": round(tokens["half"] / tokens["plain"], 4), "runs": found}  # fmt: skip
    return {"prm_auc_half_budget_minus_plain": figure}, detail
