"""Which credit teaches more: SFT, RestEM, DPO-positive, PPO, GRPO, RLOO and VinePPO from one SFT policy.

Every method gets the same number of rollouts (`iterations` x 64 problems x 8) and of optimizer steps of the policy
(one an iteration); a seed changes problems, samples and order. Accuracy is greedy, on the same held-out problems.
RestEM and DPO-positive take their rollouts from the SFT policy at once and train on them. What a method needs beside
that (critic steps, completions) is counted in its seconds and shown.

Every run is a directory of its own: a finished one is kept, a cut one goes on.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.rl import value_error
from benchmarks.rl.policy import run_program, train
from espalier.runtime.run_dir import code_commit

ONLINE = {
    "ppo": "exp/ppo/ppo_word_arithmetic",
    "grpo": "exp/ppo/grpo_word_arithmetic",
    "rloo": "exp/ppo/rloo_word_arithmetic",
    "vineppo": "exp/ppo/vineppo_word_arithmetic",
}
OFFLINE = {"restem": "exp/sft/restem_word_arithmetic", "dpo_positive": "exp/dpo/dpop_word_arithmetic"}
METHODS = ("sft", *OFFLINE, *ONLINE)
NUM_PROBLEMS, GROUP_SIZE = 64, 8
Accuracies = Mapping[str, Mapping[int, float]]  # method → seed → accuracy
# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) of a 95 % interval over seeds (Student's t); no interval from one seed: it is nan."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = _T95.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


class Credit:
    """The runs in `folder`, all from `policy`."""

    def __init__(self, folder: Path, policy: Path, iterations: int, num_eval: int, value_problems: int):
        self.folder, self.policy, self.iterations = folder, policy, iterations
        self.value_problems = value_problems
        self.data = [f"task.num_dev={num_eval}", f"evaluation.num_problems={num_eval}"]

    def run(self, method: str, seed: int) -> dict[str, Any]:
        """Return what one run taught: `{accuracy, curve: [[updates, seconds, accuracy], ...], seconds}`."""
        if method == "sft":
            seed = 0  # it learns nothing more, and greedy answers know no seed
        path = self.folder / f"{method}-{seed}.json"
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        started = time.monotonic()
        if method in ONLINE:
            rows = self._online(method, seed)
        elif method == "sft":
            rows = self._evaluated(self.policy, self.folder / f"sft-{seed}", seed)
        else:
            rows = self._evaluated(self._offline(method, seed), self.folder / f"{method}-{seed}-evaluation", seed)
        curve = curve_of(rows)
        found = {"accuracy": curve[-1][2], "curve": curve, "seconds": round(time.monotonic() - started, 1),
                 "commit": code_commit()}  # fmt: skip
        path.write_text(json.dumps(found) + "\n")
        print(f"{method}, seed {seed}: {found['accuracy']:.3f} in {found['seconds']:.0f} s", file=sys.stderr)
        return found

    def kept(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Method → seed → what `run` found, of all finished runs of as many iterations."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for method in METHODS:
            paths = {int(path.stem.rpartition("-")[2]): path for path in self.folder.glob(f"{method}-[0-9]*.json")}
            runs = {seed: json.loads(paths[seed].read_text()) for seed in sorted(paths)}
            if method in ONLINE:
                runs = {seed: run for seed, run in runs.items() if run["curve"][-1][0] == self.iterations}
            found |= {method: runs} if runs else {}
        return found

    def _online(self, method: str, seed: int) -> list[dict[str, float]]:
        run = self.folder / f"{method}-{seed}"
        settings = [
            f"num_iterations={self.iterations}",
            f"checkpoints.save_every={max(1, self.iterations // 6)}",
            "evaluation.every=4",
        ]
        self._main(ONLINE[method], run, self.policy, seed, settings)
        return read_rows(run)

    def _main(self, experiment: str, run: Path, model: Path, seed: int, settings: Sequence[str]) -> None:
        own = ["-cn", experiment, f"output_dir={run}", f"model.path={model}", f"seed={seed}"]
        run_program(run.with_suffix(".log"), "main.py", *own, *self.data, *settings)

    def _evaluated(self, model: Path, run: Path, seed: int) -> list[dict[str, float]]:
        """Return the evaluation before the first iteration of a run that learns nothing."""
        settings = [
            "num_iterations=1",
            "rollout.num_problems=1",
            "update.learning_rate=0.0",
            "evaluation.every=2",
            "checkpoints.save_every=0",
        ]
        self._main(ONLINE["grpo"], run, model, seed, settings)
        return read_rows(run)[:1]

    def _offline(self, method: str, seed: int) -> Path:
        """Sample from the SFT policy, choose what to learn from, take as many steps as there are iterations."""
        run, log = self.folder / f"{method}-{seed}", self.folder / f"{method}-{seed}.log"
        run.mkdir(parents=True, exist_ok=True)
        sampled, chosen = run / "trajectories.jsonl", run / "examples.jsonl"
        asked = self.iterations * NUM_PROBLEMS
        sampling = [f"policy={self.policy}", f"requests.limit={asked}", f"requests.first={asked * seed}",
                    f"task.num_train={asked * (seed + 1)}", f"params.n={GROUP_SIZE}", "params.max_tokens=96",
                    f"seed={seed}"]  # fmt: skip
        if not chosen.is_file():
            run_program(log, "service_api_caller_v1.py", "-cn", "api/vllm/trajectories", f"output={sampled}", *sampling)
            stage = "problems/restem_demonstrations" if method == "restem" else "pairs/dpo_positive_preferences"
            run_program(log, "run_stage.py", "-cn", stage, f"input={sampled}", f"output={chosen}", f"seed={seed}")
        own = [f"max_steps={self.iterations}", f"seed={seed}", "checkpoints.save_every=0"]
        if method == "restem":
            own += ["update.batch_size=512", "update.learning_rate=1.0e-4", "update.warmup_steps=5"]
        train(run / "train", self.policy, chosen, log, OFFLINE[method], own)
        return run / "train" / "model"

    def kept_value_errors(self) -> list[dict[str, Any]]:
        """Return those that have been measured."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("values-[0-9]*.json"))]

    def value_errors(self, seed: int) -> dict[str, Any]:
        """Of the PPO run of this seed, which must be finished."""
        path = self.folder / f"values-{seed}.json"
        if not path.is_file():
            found = value_error.measure(self.folder / f"ppo-{seed}", self.value_problems, self.folder / "values.log")
            path.write_text(json.dumps(found) + "\n")
        return json.loads(path.read_text())  # type: ignore[no-any-return]


def read_rows(run: Path) -> list[dict[str, float]]:
    """Return a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve_of(rows: Sequence[Mapping[str, float]]) -> list[list[float]]:
    """Return [updates, seconds of iterations so far, accuracy] at every evaluation."""
    seconds, found = 0.0, []
    for row in rows:
        seconds += row.get("seconds/iteration", 0.0)
        if "eval/accuracy" in row:
            found.append([row["step"], round(seconds, 1), row["eval/accuracy"]])
    return found


def difference(runs: Accuracies, one: str, other: str, goal: float, how: str) -> dict[str, Any] | None:
    """Return a figure: accuracy of `one` minus that of `other`, seed by seed over the seeds that both have, with its 95
    % interval, all of which has to lie above the goal (nan does not). None where no seed has both."""
    seeds = [seed for seed in runs[one] if seed in runs[other]]
    if not seeds:
        return None
    mean, low, high = interval([runs[one][seed] - runs[other][seed] for seed in seeds])
    ends = {"low": None if math.isnan(low) else round(low, 4), "high": None if math.isnan(high) else round(high, 4)}
    return {"value": round(mean, 4), **ends, "unit": f"accuracy, difference, 95 %, {len(seeds)} seeds", "goal": goal,
            "better": "higher", "met": low > goal, "how": how}  # fmt: skip


def figures(runs: Accuracies, errors: Sequence[Mapping[str, Any]], how: str) -> dict[str, Any]:
    """Return what there are runs for."""
    found = {}
    for one, other in [("vineppo", "ppo"), *((method, "sft") for method in METHODS[1:])]:
        if one in runs and other in runs:
            figure = difference(runs, one, other, 0.0, how)
            found |= {f"{one}_minus_{other}": figure} if figure else {}
    if errors:
        ratios = [row["critic"]["error"] / max(row["k9"]["error"], 1e-9) for row in errors]
        value = fmean(ratios)
        found["value_error_critic_over_k9"] = {
            "value": round(value, 4), "low": round(min(ratios), 4), "high": round(max(ratios), 4), "unit": "ratio",
            "goal": 1.0, "better": "higher", "met": value > 1.0, "how": how,
        }  # fmt: skip
    return found


def measure(
    credit: Credit, methods: Sequence[str], seeds: Sequence[int], how: str
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return (figures, detail, tables) of the runs asked for and of all that stand in the folder already."""
    for seed in seeds:
        for method in methods:
            credit.run(method, seed)
        if "ppo" in methods:
            credit.value_errors(seed)
    found, errors = credit.kept(), credit.kept_value_errors()
    accuracies = {method: {seed: run["accuracy"] for seed, run in runs.items()} for method, runs in found.items()}
    if "sft" in accuracies:  # the same for every seed
        every = {seed for runs in accuracies.values() for seed in runs}
        accuracies["sft"] = dict.fromkeys(sorted(every), accuracies["sft"][0])
    detail = {"iterations": credit.iterations, "runs": found, "value_errors": errors}
    return figures(accuracies, errors, how), detail, tables(found, errors)


def tables(found: Mapping[str, Mapping[int, Mapping[str, Any]]], errors: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return accuracies with their intervals and seconds; the way there; value errors."""
    rows, curves, steps = [], [], list[int]()
    for method, runs in found.items():
        mean, low, high = interval([run["accuracy"] for run in runs.values()])
        seconds = fmean(run["curve"][-1][1] for run in runs.values())
        rows.append(
            [
                method,
                len(runs),
                *(_per_cent(value) for value in (mean, low, high)),
                round(seconds) if method in ONLINE else "",
            ]
        )
        if method in ONLINE:
            by_step = [{point[0]: point for point in run["curve"]} for run in runs.values()]
            steps = steps or sorted(by_step[0])
            curves.append([method, *(_point([run[step] for run in by_step if step in run]) for step in steps)])
    title = "Greedy accuracy, per cent, from one SFT policy at equal updates and rollouts."
    columns = ["method", "seeds", "mean", "low", "high", "seconds of iterations"]
    shown = [{"title": title, "columns": columns, "rows": rows}]
    if curves:
        if {"vineppo", "ppo"} <= found.keys():
            curves.append(["vineppo - ppo", *(_apart(found["vineppo"], found["ppo"], step) for step in steps)])
        title = ("Accuracy after so many updates, per cent, and seconds of iterations until then (means over seeds); "
                 "the difference seed by seed with its 95 % interval.")  # fmt: skip
        shown.append({"title": title, "columns": ["method", *(f"{step:g}" for step in steps)], "rows": curves})
    if errors:
        names = ["critic", *(f"k{k}" for k in value_error.KS)]
        values = [[name, round(fmean(row[name]["error"] for row in errors), 4),
                   round(fmean(row[name]["better_first"] for row in errors), 3)] for name in names]  # fmt: skip
        shown.append({"title": f"State values beside the mean of {value_error.NUM_TRUE} completions.",
                      "columns": ["estimate", "mean absolute error", "better of two steps first"],
                      "rows": values})  # fmt: skip
    return shown


def _point(seeds: Sequence[Sequence[float]]) -> str:
    """Return one evaluation of all seeds: `accuracy (seconds)`."""
    if not seeds:
        return ""
    return f"{100 * fmean(point[2] for point in seeds):.1f} ({fmean(point[1] for point in seeds):.0f} s)"


def _apart(one: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]], step: float) -> str:
    """Return accuracy after `step` updates minus the other's: `mean [low, high]` over the seeds that both have."""
    at_step = [
        {seed: point[2] for seed, run in runs.items() for point in run["curve"] if point[0] == step}
        for runs in (one, other)
    ]
    apart = [at_step[0][seed] - at_step[1][seed] for seed in sorted(at_step[0].keys() & at_step[1].keys())]
    if not apart:
        return ""
    mean, low, high = (f"{100 * value:+.1f}" for value in interval(apart))
    return mean if len(apart) < 2 else f"{mean} [{low}, {high}]"


def _per_cent(value: float) -> str:
    """Empty where there is no number."""
    return "" if math.isnan(value) else f"{100 * value:.1f}"
