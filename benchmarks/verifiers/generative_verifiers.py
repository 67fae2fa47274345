"""Best of 8 by generative verifiers, by an outcome reward model, and by majority, on word_arithmetic.

    bash scripts/bench.sh generative_verifiers                      seeds 1 to 3, a quarter of an hour each on a core
    bash scripts/bench.sh generative_verifiers --seeds 1 --policy MODEL
    bash scripts/bench.sh generative_verifiers --seeds 1 --num-problems 1000 --num-test 300 --max-steps 600
    bash scripts/bench.sh generative_verifiers --seeds              the figures of the runs that are kept

The policy is the quick start's. Seed s takes the s-th lot of training problems, samples 8 solutions of each, and trains
three judges of the same solutions from the policy, each with equally many optimizer steps: a direct verifier, one with
rationales (of the task's own teacher, which is mistaken about a step in twenty), both beside solutions at a quarter of
the weight, and a 2-class outcome reward model with balanced classes. All judge the same 8 solutions of held-out
problems. A finished run is one record in benchmarks/results/generative_verifiers/; what is done of a run is kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.credit.intervals import figure_above_zero, mean_over_seeds
from benchmarks.credit.plan import read_plan
from benchmarks.credit.runs import digest, planned_policy
from benchmarks.result import RESULTS, machine, write_result
from benchmarks.rl.policy import run_program
from espalier.data.jsonl import write_json
from espalier.runtime.run_dir import code_commit

HOW = "bash scripts/bench.sh generative_verifiers"
RECORDS = RESULTS / "generative_verifiers"
ENGINE = ("client=data_parallel_engines", "client.num_engines=1", "server=none")
RECIPE = ("num_problems", "num_test", "max_steps", "policy")
SCORERS = ("outcome_model", "direct", "rationales_1", "rationales_8", "hard_8")


class Run:
    """The stages of one seed in its folder; each is made once."""

    def __init__(self, folder: Path, policy: Path, seed: int, num_problems: int, max_steps: int):
        self.folder, self.policy, self.seed = folder, policy, seed
        self.num_problems, self.max_steps = num_problems, max_steps
        self.log = folder / "programs.log"

    def path(self, name: str) -> Path:
        """Return a file of the run."""
        return self.folder / f"{name}.jsonl"

    def stage(self, name: str, read: str, written: str, *settings: str) -> None:
        """Run an offline stage; an output that exists stays."""
        own = (f"input={self.path(read)}", f"output={self.path(written)}", f"seed={self.seed}")
        run_program(self.log, "run_stage.py", "-cn", name, *own, *settings)

    def sample(self, config: str, written: str, *settings: str) -> None:
        """Sample with an engine of its own."""
        own = (f"output={self.path(written)}", f"seed={self.seed}", "params.max_tokens=192", *ENGINE)
        run_program(self.log, "service_api_caller_v1.py", "-cn", config, *own, *settings)

    def train(self, name: str, experiment: str, *settings: str) -> Path:
        """Return the model that is trained from the policy."""
        own = (f"output_dir={self.folder / name}", f"model.path={self.policy}", f"seed={self.seed}",
               f"max_steps={self.max_steps}")  # fmt: skip
        run_program(self.log, "trainer_base_ds_mul.py", "-cn", experiment, *own, *settings)
        return self.folder / name / "model"

    def sample_solutions(self, num_test: int) -> None:
        """Write `train` and `test`, 8 solutions of each problem."""
        first = self.seed * self.num_problems
        task = f"task.num_train={first + self.num_problems}"
        limits = (f"requests.first={first}", f"requests.limit={self.num_problems}")
        policy = (f"policy={self.policy}", "params.n=8")
        self.sample("api/vllm/trajectories", "train", task, *limits, *policy)
        self.sample("api/vllm/trajectories", "test", "requests.split=test", f"requests.limit={num_test}", *policy)

    def train_judges(self) -> dict[str, Path]:
        """Return the three models."""
        task = f"task.num_train={(self.seed + 1) * self.num_problems}"
        self.stage("problems/select_demonstrations", "train", "solutions")
        self.stage("prm/write_rationales", "train", "teacher", task)
        self.stage("problems/verifier_demonstrations", "train", "direct")
        teacher = f"stage.verifications={self.path('teacher')}"
        self.stage("problems/verifier_demonstrations", "train", "rationales", teacher)
        models = {
            name: self.train(
                f"verifier_{name}",
                "exp/sft/verifier_word_arithmetic",
                f"examples.verify.path={self.path(name)}",
                f"examples.generate.path={self.path('solutions')}",
            )
            for name in ("direct", "rationales")
        }
        models["outcome_model"] = self.train(
            "outcome_model",
            "exp/reward/outcome_trajectories",
            f"examples.path={self.path('train')}",
            "model.attention=eager",
            "update.learning_rate=1e-3",
            "update.warmup_steps=20",
            "update.batch_size=64",
            "update.micro_batch_size=64",
        )
        return models

    def judge(self, models: dict[str, Path]) -> dict[str, Any]:
        """Return what the judges' stages counted; the scores of each are a file of its name."""
        written = f"stage.verifications={self.path('written')}"
        self.sample("api/vllm/verifications", "written", f"policy={models['rationales']}", "params.n=8",
                    f"requests.solutions={self.path('test')}")  # fmt: skip
        verifier = f"stage.model={models['rationales']}"
        self.stage("prm/score_steps", "test", "scores_outcome_model", f"stage.model={models['outcome_model']}",
                   "stage.layout=whole")  # fmt: skip
        settings: dict[str, tuple[str, ...]] = {
            "direct": (f"stage.model={models['direct']}",),
            "rationales_1": (verifier, written, "stage.max_votes=1"),
            "rationales_8": (verifier, written),
            "hard_8": ("stage.model=''", written, "stage.votes=hard"),
        }
        for name, own in settings.items():
            self.stage("prm/score_by_verifier", "test", f"scores_{name}", *own)
        metas = {name: self.folder / f"scores_{name}.meta.json" for name in settings}
        return {name: json.loads(path.read_text())["counts"] for name, path in metas.items()}

    def evaluate(self) -> dict[str, Any]:
        """Return the accuracies of votes and best of 8 by every scorer."""
        scores = ",".join(f"{name}:{self.path(f'scores_{name}')}" for name in SCORERS)
        output = self.folder / "evaluation.json"
        run_program(self.log, "run_stage.py", "-cn", "evaluation/evaluate", f"input={self.path('test')}",
                    f"output={output}", f"stage.scores={{{scores}}}")  # fmt: skip
        accuracy: dict[str, Any] = json.loads(output.read_text())["accuracy"]
        return accuracy


def best_of_8(accuracy: dict[str, Any], name: str) -> float:
    """Return the share of problems whose best of 8 by a scorer is right."""
    return float(accuracy[f"best_of_8_{name}"]["mean"])


def figures_of(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, over the seeds, best of 8 by each verifier above that by the outcome reward model, and above majority."""
    figures: dict[str, dict[str, Any]] = {}
    for name in SCORERS[1:]:
        ours = [best_of_8(row["accuracy"], name) for row in records]
        others = {
            "outcome_model": [best_of_8(row["accuracy"], "outcome_model") for row in records],
            "majority": [float(row["accuracy"]["majority_8"]["mean"]) for row in records],
        }
        for other, theirs in others.items():
            gains = [mine - his for mine, his in zip(ours, theirs, strict=True)]
            figures[f"{name}_minus_{other}"] = figure_above_zero(mean_over_seeds(gains), "accuracy of best of 8", HOW)
    return figures


def check_recipes(records: Sequence[dict[str, Any]]) -> None:
    """Raise SystemExit where records were not made alike, so that no mean over them is one."""
    recipes = {row["seed"]: tuple(row[name] for name in RECIPE) for row in records}
    if len(set(recipes.values())) > 1:
        raise SystemExit(f"{RECORDS}: seeds {', '.join(map(str, sorted(recipes)))} are of several recipes "
                         f"({', '.join(RECIPE)}): move those of one away, and run them again")  # fmt: skip


def write(records: Sequence[dict[str, Any]]) -> None:
    """Write the figures and the table of all records."""
    check_recipes(records)
    columns = ["seed", "problems", "mean of samples", "majority of 8", *(f"best of 8: {name}" for name in SCORERS)]
    rows = []
    for row in sorted(records, key=lambda row: int(row["seed"])):
        accuracy = row["accuracy"]
        shares = [float(accuracy["mean"]["mean"]), float(accuracy["majority_8"]["mean"])]
        shares += [best_of_8(accuracy, name) for name in SCORERS]
        rows.append([row["seed"], row["num_problems"], *(f"{100 * share:.1f}" for share in shares)])
    table = {"title": "Right, in percent", "columns": columns, "rows": rows}
    write_result("generative_verifiers", figures_of(records), {"records": f"benchmarks/results/{RECORDS.name}"},
                 tables=[table])  # fmt: skip


def main() -> None:
    """Make the runs that are asked for and have no record; write the figures of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--policy", default="", help="the quick start's, made elsewhere")
    parser.add_argument("--folder", default="experiments/verifiers", help="keeps policy and runs")
    parser.add_argument("--num-problems", type=int, default=300)
    parser.add_argument("--num-test", type=int, default=80)
    parser.add_argument("--max-steps", type=int, default=300, help="optimizer steps of every judge")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan, folder = read_plan(Path("benchmarks/credit/plan.yaml")), Path(arguments.folder).resolve()
    RECORDS.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        path = RECORDS / f"{seed}.json"
        if path.is_file():
            continue
        given = arguments.policy
        policy = Path(given).resolve() if given else planned_policy(plan, "word_arithmetic", folder)
        run = Run(folder / f"seed-{seed}", policy, seed, arguments.num_problems, arguments.max_steps)
        run.sample_solutions(arguments.num_test)
        counts = run.judge(run.train_judges())
        recipe = {"num_problems": arguments.num_problems, "num_test": arguments.num_test,
                  "max_steps": arguments.max_steps, "policy": digest(policy)}  # fmt: skip
        record = {"seed": seed, **recipe, "accuracy": run.evaluate(), "counts": counts, "machine": machine(),
                  "commit": code_commit()}  # fmt: skip
        write_json(path, record)
        print(f"seed {seed}: {path}", file=sys.stderr)
    write([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))])


if __name__ == "__main__":
    main()
