"""Where the signal of a step is lost, link by link: the exact value of a state, labels made of it, reward models
trained on these, and what is read off their scores.

    bash scripts/bench.sh signal_links --cells long_arithmetic rule_logic                policies are made where none is
    bash scripts/bench.sh signal_links --cells long_arithmetic --process-rewards long_arithmetic=RUN

The states are the inner steps of sampled solutions of held-out problems; the truth is whether a solution is right so
far (`data.tasks.enumerable`). Every link is one number for each state, and its AUC against the truth is what it still
knows; within a step's index, so that a score that only knows that later steps are seldom right is worth 0.5. Exact
values come from the policy's own probabilities (`values.exact`). Right completions of a state are binomial given its
value, so that labels of K completions are drawn from it as sampling would, `NUM_DRAWS` times. Reward models with a head
are trained by the task's recipe on the first `--problems` of the train split, one on each kind of label, and have not
seen the held-out ones: values as they are, and made hard, which is 1 where a state is worth half of its problem's
prompt or more, or where any of its completions is right (the hard estimation of Math-Shepherd). `--process-rewards`
gives a finished run of scripts/process_rewards.sh besides, of the same policy, on problems and labels of its own.
Smoothed values know the outcomes of the solutions too. Best of 8 takes, of a problem's solutions, the one whose lowest
or mean inner score is highest (ties: their mean). One seed each: a row says what was learnt, not what can be.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.credit.plan import read_plan
from benchmarks.credit.runs import digest, planned_policy
from benchmarks.result import RESULTS, machine, write_result
from benchmarks.rl.policy import run_program, train
from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import StepScores, StepValues, Trajectory
from espalier.data.tasks.enumerable import positions
from espalier.data.tasks.long_arithmetic import LongArithmetic
from espalier.data.tasks.rule_logic import RuleLogic
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_policy, load_tokenizer
from espalier.pipeline.prm.compare_with_truth import JudgedStep, measures
from espalier.runtime.run_dir import code_commit
from espalier.values.exact.state_values import ExactSettings, exact_values
from espalier.values.monte_carlo import Count, StateKey, state_key
from espalier.values.smoothed import smoothed_values

HOW = "bash scripts/bench.sh signal_links"
RECORDS = RESULTS / "signal_links"
TASKS: dict[str, Callable[[], Any]] = {
    "word_arithmetic": WordArithmetic,
    "long_arithmetic": LongArithmetic,
    "rule_logic": RuleLogic,
}
MAX_TOKENS = 128
KS = (1, 2, 4, 8, 16, 32)
FEW = 4
"""Completions of a state that reward models are trained on."""
NUM_DRAWS = 10
EXACT, INDEX, TRUTH = "exact value", "step index alone", "truth"

Scores = Mapping[StateKey, float]


@dataclass(frozen=True)
class Solutions:
    """Sampled solutions; by the state behind each of their inner steps its exact value, whether the solution is right
    so far, and which step that is. `prompts`: the exact value of each problem's prompt."""

    trajectories: list[Trajectory]
    prompts: dict[str, float]
    values: dict[StateKey, float]
    is_right: dict[StateKey, bool]
    step: dict[StateKey, int]


def states_behind(trajectory: Trajectory) -> list[StateKey]:
    """Return the state behind each inner step."""
    ends = trajectory.step_ends[: len(trajectory.steps) - 1]
    return [state_key(trajectory.problem_id, trajectory.response_ids[:end]) for end in ends]


def sampled(name: str, policy: Path, split: str, num: int, folder: Path) -> list[Trajectory]:
    """Return 8 solutions of each of the first `num` problems of a split."""
    path = folder / f"{split}.jsonl"
    run_program(folder / "programs.log", "service_api_caller_v1.py", "-cn", "api/vllm/trajectories", f"output={path}",
                f"policy={policy}", f"task={name}", f"requests.split={split}", f"requests.limit={num}", "params.n=8",
                f"params.max_tokens={MAX_TOKENS}")  # fmt: skip
    return read_records(Trajectory, path)


def solved(name: str, policy: Path, split: str, num: int, folder: Path) -> Solutions:
    """Sample, and compute truth and exact values, which are kept."""
    task = TASKS[name]()
    problems = {problem.id: problem for problem in task.problems(split)}
    rows = sampled(name, policy, split, num, folder)
    path = folder / f"{split}_values.json"
    if not path.is_file():
        with torch.no_grad():
            found = exact_values(load_policy(str(policy), "eager").eval(), load_tokenizer(str(policy)), task, problems,
                                 rows, ExactSettings(max_tokens=MAX_TOKENS))  # fmt: skip
        write_json(path, [[value.mid for value in row] for row in found.values])
    prompts: dict[str, float] = {}
    values: dict[StateKey, float] = {}
    is_right: dict[StateKey, bool] = {}
    step: dict[StateKey, int] = {}
    for row, own in zip(rows, json.loads(path.read_text()), strict=True):
        prompts[row.problem_id] = own[0]
        places = positions(task, problems[row.problem_id], row.steps, row.id)
        for number, key in enumerate(states_behind(row), 1):
            place = places[number - 1]
            values[key], step[key] = own[number], number
            is_right[key] = place is not None and place.is_right
    return Solutions(rows, prompts, values, is_right, step)


def drawn(values: Scores, num: int, rng: np.random.Generator) -> dict[StateKey, Count]:
    """Return right completions of `num` of every state."""
    return {key: Count(int(rng.binomial(num, min(max(value, 0.0), 1.0))), num) for key, value in values.items()}


def shares(counts: Mapping[StateKey, Count]) -> dict[StateKey, float]:
    """Return the share of right completions."""
    return {key: count.num_correct / count.num_completions for key, count in counts.items()}


def smoothed(solutions: Solutions, counts: Mapping[StateKey, Count]) -> tuple[dict[StateKey, float], dict[str, float]]:
    """Return values that neighbours have shrunk (`values.smoothed`), of states and of prompts."""
    found = smoothed_values(solutions.trajectories, counts)
    prompts = {name: found[state_key(name, [])].value for name in solutions.prompts}
    return {key: found[key].value for key in solutions.values}, prompts


def hard(values: Scores, prompts: Mapping[str, float]) -> dict[StateKey, float]:
    """Return 1 for a state that is worth half of its problem's prompt or more, else 0."""
    return {key: float(value > 0 and value >= prompts[key[0]] / 2) for key, value in values.items()}


def within_index(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the AUC within a step's index, the mean over pairs of a right and a wrong state of one index."""
    weights = [
        row["right_share"] * (1 - row["right_share"]) * row["num"] ** 2 for row in steps if row["auc"] is not None
    ]
    aucs = [row["auc"] for row in steps if row["auc"] is not None]
    return float(np.average(aucs, weights=weights))


def best_of_8(solutions: Solutions, scores: Scores, read: Callable[[Sequence[float]], float]) -> float:
    """Return the share of right answers of the solutions whose inner scores, as `read`, are the highest of their
    problem's."""
    groups: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for row in solutions.trajectories:
        own = [scores[key] for key in states_behind(row)]
        groups[row.problem_id].append((read(own) if own else 1.0, row.is_correct))
    picked = []
    for group in groups.values():
        highest = max(score for score, _ in group)
        picked.append(fmean(float(is_right) for score, is_right in group if score == highest))
    return fmean(picked)


def solvable(solutions: Solutions) -> float:
    """Return the share of problems of which any solution is right."""
    found: dict[str, bool] = defaultdict(bool)
    for row in solutions.trajectories:
        found[row.problem_id] |= row.is_correct
    return fmean(found.values())


def row_of(solutions: Solutions, many: Sequence[Scores]) -> dict[str, Any]:
    """Return what a link knows: AUC with its interval (of the first of `many` draws), within the index, best of 8;
    means over the draws."""
    found = []
    for scores in many:
        steps = [
            JudgedStep(key[0], solutions.step[key], scores[key], right) for key, right in solutions.is_right.items()
        ]
        found.append(measures(steps))
    return {
        "auc": fmean(one["inner_auc"]["mean"] for one in found),
        "interval": [found[0]["inner_auc"][end] for end in ("low", "high")],
        "within": fmean(within_index(one["steps"]) for one in found),
        "best_by_lowest": fmean(best_of_8(solutions, scores, min) for scores in many),
        "best_by_mean": fmean(best_of_8(solutions, scores, fmean) for scores in many),
    }


def labelled(solutions: Solutions, labels: Scores) -> list[StepValues]:
    """Return examples whose inner steps have these labels, the last one its outcome."""
    rows = []
    for one in solutions.trajectories:
        keys = states_behind(one)
        if not keys or len(one.step_ends) != len(one.steps):
            continue
        values = [*(labels[key] for key in keys), float(one.is_correct)]
        num = [*[FEW] * len(keys), 1]
        rows.append(StepValues(
            id=one.id, problem_id=one.problem_id, prompt=one.prompt, steps=one.steps, prompt_ids=one.prompt_ids,
            response_ids=one.response_ids, step_ends=one.step_ends, values=list(values),
            num_correct=[round(value * count) for value, count in zip(values, num, strict=True)], num_completions=num,
            is_correct=one.is_correct))  # fmt: skip
    return rows


def scores_by(model: Path, folder: Path, name: str, solutions: Solutions, task: str) -> dict[StateKey, float]:
    """Return a reward model's score of every state of the held-out solutions."""
    path = folder / f"{name}_scores.jsonl"
    run_program(folder / "programs.log", "run_stage.py", "-cn", "prm/score_steps", f"input={folder / 'dev.jsonl'}",
                f"output={path}", f"stage.model={model}", f"task={task}", "stage.split=dev")  # fmt: skip
    by_id = {row.id: row.scores for row in read_records(StepScores, path)}
    return {key: score for one in solutions.trajectories
            for key, score in zip(states_behind(one), by_id[one.id], strict=False)}  # fmt: skip


def trained(kind: str, labels: Scores, solutions: Solutions, policy: Path, folder: Path, task: str) -> Path:
    """Return a reward model with a head, by the task's recipe, on these labels."""
    examples = folder / f"{kind}.jsonl"
    if not examples.is_file():
        write_records(examples, labelled(solutions, labels))
    train(folder / kind, policy, examples, folder / "programs.log", f"exp/reward/{task}", [])
    return folder / kind / "model"


def measure(task: str, policy: Path, folder: Path, num: tuple[int, int], run: Path | None) -> dict[str, Any]:
    """Return the record of a cell; `num`: problems to learn from, and held out."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    dev = solved(task, policy, "dev", num[1], folder)
    links: dict[str, list[Scores]] = {EXACT: [dev.values]}
    shares_of_index: dict[int, list[bool]] = defaultdict(list)
    for key, right in dev.is_right.items():
        shares_of_index[dev.step[key]].append(right)
    links[INDEX] = [{key: fmean(shares_of_index[number]) for key, number in dev.step.items()}]
    for k in KS:
        links[f"{k} completions"] = [shares(drawn(dev.values, k, rng)) for _ in range(NUM_DRAWS)]
    links[f"{FEW} completions, smoothed"] = [smoothed(dev, drawn(dev.values, FEW, rng))[0] for _ in range(3)]
    learnt = solved(task, policy, "train", num[0], folder)
    counts = drawn(learnt.values, FEW, rng)
    few, (shrunk, of_prompts) = shares(counts), smoothed(learnt, counts)
    labels: dict[str, tuple[str, Scores]] = {
        "truth": (TRUTH, {key: float(right) for key, right in learnt.is_right.items()}),
        "exact": ("exact values", learnt.values),
        "exact_hard": ("exact values, hard", hard(learnt.values, learnt.prompts)),
        "few": (f"{FEW} completions", few),
        "few_hard": (f"{FEW} completions, hard", {key: float(value > 0) for key, value in few.items()}),
        "smoothed": (f"{FEW} completions, smoothed", shrunk),
        "smoothed_hard": (f"{FEW} completions, smoothed, hard", hard(shrunk, of_prompts)),
    }
    for kind, (title, own) in labels.items():
        model = trained(kind, own, learnt, policy, folder, task)
        links[f"head, trained on {title}"] = [scores_by(model, folder, kind, dev, task)]
        print(f"{task}: {title}", file=sys.stderr, flush=True)
    if run is not None:
        links["the given run's reward model"] = [scores_by(run / "prm" / "model", folder, "given", dev, task)]
    return {
        "task": task,
        "links": {name: row_of(dev, many) for name, many in links.items()},
        "states": len(dev.values),
        "right_so_far": fmean(dev.is_right.values()),
        "any_of_8": solvable(dev),
        "right_at_the_end": fmean(float(row.is_correct) for row in dev.trajectories),
        "problems": list(num),
        "policy": digest(policy),
        "machine": machine(),
        "commit": code_commit(),
    }


def write(records: Sequence[Mapping[str, Any]]) -> None:
    """Write the table of all records."""
    columns = ["task", "link", "AUC", "95 % (of the first draw)", "AUC within a step's index",
               "best of 8 by the lowest, % right", "by the mean"]  # fmt: skip
    rows = []
    for record in records:
        for name, link in record["links"].items():
            low, high = link["interval"]
            rows.append([record["task"], name, f"{link['auc']:.3f}", f"{low:.3f} to {high:.3f}",
                         f"{link['within']:.3f}", f"{100 * link['best_by_lowest']:.1f}",
                         f"{100 * link['best_by_mean']:.1f}"])  # fmt: skip
        share = f"{100 * record['right_so_far']:.1f} % of {record['states']:,} states"
        rows.append(
            [
                record["task"],
                f"{share} are right so far",
                "",
                "",
                "",
                f"any of 8: {100 * record['any_of_8']:.1f}",
                f"one: {100 * record['right_at_the_end']:.1f}",
            ]
        )
    table = {"title": "What each link knows of whether a solution is right so far", "columns": columns, "rows": rows}
    write_result("signal_links", {}, {"how": HOW, "records": list(records)}, tables=[table])


def main() -> None:
    """Measure the cells, and write all that are kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="*", choices=list(TASKS), default=["long_arithmetic", "rule_logic"])
    parser.add_argument("--policy", nargs="*", default=[], help="CELL=MODEL, made elsewhere")
    parser.add_argument("--process-rewards", nargs="*", default=[], help="CELL=RUN of scripts/process_rewards.sh")
    parser.add_argument("--problems", type=int, default=100, help="to learn from")
    parser.add_argument("--held-out", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("experiments/credit"), help="keeps policies and runs")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    policies, runs = (dict(row.split("=", 1) for row in rows) for rows in (arguments.policy, arguments.process_rewards))
    plan, folder = read_plan(Path(__file__).with_name("plan.yaml")), arguments.folder.resolve()
    for task in arguments.cells:
        policy = Path(policies[task]).resolve() if task in policies else planned_policy(plan, task, folder)
        own = folder / f"signal_links_{task}"
        run = Path(runs[task]).resolve() if task in runs else None
        write_json(RECORDS / f"{task}.json", measure(task, policy, own, (arguments.problems, arguments.held_out), run))
    write([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))])


if __name__ == "__main__":
    main()
