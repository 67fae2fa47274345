"""How good is the credit of every estimator: beside exact values, on the same rollouts, per generated token.

    bash scripts/bench.sh credit_oracle [--task NAME] [--policies NAME=FOLDER ...] [--prm FOLDER] [--only ROW ...]
                                        [--problems N] [--quick]

Rollouts of a task that can be enumerated are drawn several times from policies at stages of training (the SFT policy of
benchmarks/credit/plan.yaml and two checkpoints of GRPO from it, unless others are given), each on problems of its own;
every estimator credits them, and its advantages are compared with the exact ones of the same steps (`values/exact/`),
its gradients with the policy gradient (benchmarks/credit/gradient_cosines.py). The rows are
benchmarks/credit/estimators.yaml and all other configs of conf/advantage/; those that cannot be run are left out by
name, with the reason. The exact values themselves are checked against completions on states of `CHECKED_PROBLEMS`
problems, dealt to the policies. The engine computes in float32, as the exact values do. A policy that was measured is
kept in --folder, and what the stored result says of other tasks stays.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

from benchmarks.credit.estimated_credit import CreditBench, Measured, Sizes
from benchmarks.credit.estimator_parts import Row, config_of, parts_of, read_rows
from benchmarks.credit.gradient_cosines import Interval, Products, expected_cosine, jackknife, means_of_batch
from benchmarks.credit.oracle_check import check_states, describe_check, describe_values
from benchmarks.credit.oracle_result import summarise, write
from benchmarks.credit.plan import Cell, Plan, chosen, read_plan
from benchmarks.credit.runs import digest, planned_policy
from benchmarks.rl.policy import run_program
from espalier.data.records import BadInput, Problem
from espalier.data.tasks.enumerable import EnumerableTask
from espalier.runtime.entrypoint import BadConfig, build, compose_config
from espalier.runtime.run_dir import code_commit
from espalier.runtime.schemas import RLConfig
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.values.exact.state_values import ExactSettings, enumerable

BASELINE = "grpo"
BATCH = 8
"""Groups of rollouts in the batch whose cosine is stated: half as many as problems, or fewer."""
LONG = 100
"""Tokens of the longest response above which half as many problems take a core eight minutes too."""
NUM_REFERENCE = 100
"""Problems that the policy gradient is the mean over."""
CHECKED_PROBLEMS = 50
CHECK_TOKENS = 1_000_000
"""Generated for the check of the exact values, over all policies of a task: what a core gives in about five minutes."""


def engine_of(policy: Path, log: Path) -> DataParallelEngines:
    """Return one engine of one thread."""
    return DataParallelEngines(model=str(policy), log=str(log), num_engines=1, num_threads=1, dtype="float32",
                               options={"max_num_seqs": 512})  # fmt: skip


def settings_of_task(cell: Cell) -> tuple[str, ...]:
    """Return the settings of every program that say the task and the longest response."""
    return (*cell.task, *(row for row in cell.settings if row.startswith("params.max_tokens=")))


def build_task(settings: Sequence[str]) -> tuple[EnumerableTask, int]:
    """Return (the task as programs build it, the longest response). Raises BadInput where it cannot be enumerated."""
    words = [*settings, "model.path=none", "output_dir=none", "server=none"]
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", words)
    return enumerable(build(config.task)), int(config.params["max_tokens"])


def make_policies(plan: Plan, cell: Cell, policies: Path, folder: Path, num_iterations: int) -> dict[str, Path]:
    """Return the cell's policy, and two checkpoints of GRPO from it; what is there already is kept."""
    sft = planned_policy(plan, cell.policy, policies)
    run, half = folder / "grpo", num_iterations // 2
    if not (run / "model").is_dir():
        run_program(folder / "programs.log", "main.py", "-cn", "exp/ppo/grpo_word_arithmetic", f"output_dir={run}",
                    f"model.path={sft}", *settings_of_task(cell), f"num_iterations={num_iterations}",
                    f"checkpoints.export_every={half}", "rollout.num_problems=32", "update.minibatch_size=256",
                    "evaluation.every=0", "update.warmup_steps=1")  # fmt: skip
    exported = [run / "policies" / f"iteration-{number:06d}" for number in (half, num_iterations)]
    return {"SFT": sft, f"GRPO {half}": exported[0], f"GRPO {num_iterations}": exported[1]}


def describe(
    policy: str, name: str, found: Measured, num_draws: int, baseline: Products | None = None
) -> dict[str, Any]:
    """Return what the result says of an estimator; a cosine is [value, low, high], what is not known None. The cosine
    of a batch is set against that of `baseline` batch by batch."""

    def rounded(number: float | None) -> float | None:
        return None if number is None or isnan(number) else round(number, 4)

    def listed(interval: Interval) -> list[float | None]:
        return [rounded(number) for number in asdict(interval).values()]

    batch = means_of_batch(found.products, num_draws, BATCH)
    above = None if baseline is None else batch - means_of_batch(baseline, num_draws, BATCH)
    equal = means_of_batch(found.products, num_draws, BATCH / (1 + found.tokens_per_token))
    return {
        "policy": policy,
        "estimator": name,
        **{key: rounded(getattr(found, key)) for key in ("bias", "deviation", "rank_correlation", "wrong_sign")},
        "cosine_expected": listed(expected_cosine(found.products)),
        "cosine_batch": listed(jackknife(batch)),
        "above_baseline": None if above is None else listed(jackknife(above, most=2.0)),
        "cosine_equal_tokens": listed(jackknife(equal)),
        "tokens_per_token": round(found.tokens_per_token, 4),
        "seconds": round(found.seconds, 3),
    }


@dataclass(frozen=True)
class Comparison:
    """What is measured of every policy. `settings` say the task to every program; `checked` problems of a policy, and
    `tokens` for their completions, are for the check of the exact values."""

    task: EnumerableTask
    settings: tuple[str, ...]
    rows: Sequence[Row]
    prm: Path | None
    sizes: Sizes
    checked: int
    tokens: int
    folder: Path

    def asked(self, policy: Path, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return what has to be equal for a measured policy to be kept."""
        asked = {"policy": digest(policy), "prm": self.prm and digest(self.prm), "settings": self.settings,
                 "rows": list(map(asdict, self.rows)), "sizes": asdict(self.sizes), "checked": self.checked,
                 "tokens": self.tokens, "first_problem": problems[0].id}  # fmt: skip
        return dict(json.loads(json.dumps(asked)))

    def measure_rows(self, name: str, policy: Path, bench: CreditBench) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return (what is found of every row that can be run, row → why it cannot)."""
        found, left_out = [], {}
        baseline: Products | None = None
        for row in self.rows:
            with bench.clock.phase(row.name):
                if row.advantage == "exact":
                    measured = bench.measure_exact()
                else:
                    config = config_of(row, self.settings, policy, self.prm)
                    if isinstance(config, str):
                        left_out[row.name] = config
                        continue
                    measured = bench.measure(parts_of(config))
                if row.name == BASELINE:
                    baseline = measured.products
                found.append(describe(name, row.name, measured, self.sizes.num_draws, baseline))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        return found, left_out

    def measure_policy(self, name: str, policy: Path, problems: Sequence[Problem]) -> dict[str, Any]:
        """Return `{rows, left_out, oracle, seconds, commit}` of one policy; kept in `folder`, and read from there where
        the same was asked before, be it by other code: `commit` is what measured it."""
        path, asked = self.folder / f"{name.replace(' ', '-')}.json", self.asked(policy, problems)
        if path.is_file() and (kept := json.loads(path.read_text()))["asked"] == asked:
            commit = kept["found"].setdefault("commit", "unknown")
            if commit != code_commit():
                print(f"warning: {path} was measured at commit {commit}: remove it to measure again", file=sys.stderr)
            return dict(kept["found"])
        engine = engine_of(policy, self.folder / "engine.log")
        with CreditBench(policy, self.task, problems, self.sizes, engine) as bench:
            table, left_out = self.measure_rows(name, policy, bench)
            with bench.clock.phase("check"):
                checked = check_states(bench, self.checked, self.tokens)
            oracle = {**describe_check(checked), **describe_values(bench)}
            seconds = {key.removeprefix("seconds/"): round(taken, 1) for key, taken in bench.clock.take().items()}
        print(name, json.dumps({"oracle": oracle, "seconds": seconds}), file=sys.stderr, flush=True)
        found = {"rows": table, "left_out": left_out, "oracle": oracle, "seconds": seconds, "commit": code_commit()}
        path.write_text(json.dumps({"asked": asked, "found": found}) + "\n")
        return found


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="word_arithmetic", help="a cell of plan.yaml whose task can be enumerated")
    parser.add_argument("--policies", nargs="*", default=[], metavar="NAME=FOLDER", help="stages of one policy")
    parser.add_argument("--prm", type=Path, help="a process reward model with the policies' tokenizer")
    parser.add_argument("--only", nargs="*", default=[], help="these rows alone; prints, writes no result")
    parser.add_argument(
        "--problems", type=int, default=0, help="of every policy, each drawn twice; 0: 32, or 16 long ones"
    )
    parser.add_argument("--folder", type=Path, default=Path("experiments/credit_oracle"), help="keeps what is measured")
    parser.add_argument("--credit-folder", type=Path, default=Path("experiments/credit"),
                        help="has the policies of plan.yaml, or gets them")  # fmt: skip
    parser.add_argument("--iterations", type=int, default=8, help="of GRPO, where the policies are made here")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run; prints, writes no result")
    arguments = parser.parse_args()
    known = [row.name for row in read_rows()]
    unknown = [name for name in arguments.only if name not in known]
    if unknown:
        parser.error(f"there is no row '{unknown[0]}': choose from {', '.join(known)}")
    for text in arguments.policies:
        name, _, path = text.partition("=")
        if not name or not (Path(path) / "config.json").is_file():
            parser.error(f"--policies {text}: give NAME=FOLDER with a model folder")
    if arguments.prm is not None and not (arguments.prm / "config.json").is_file():
        parser.error(
            f"--prm {arguments.prm}: no such model folder: give that of a process reward model (RUN/prm/model)"
        )
    if arguments.problems and arguments.problems < 2 * BATCH:
        parser.error(f"--problems {arguments.problems}: batches of {BATCH} need at least {2 * BATCH}")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Measure every row on every policy; write the result."""
    plan = read_plan(Path(__file__).with_name("plan.yaml"))
    [cell] = chosen([arguments.task], plan.cells, "--task")
    settings = settings_of_task(cell)
    task, max_tokens = build_task(settings)
    folder = arguments.folder.resolve() / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    policies = {name: Path(path) for name, _, path in (text.partition("=") for text in arguments.policies)}
    if not policies:
        policies = make_policies(plan, cell, arguments.credit_folder.resolve(), folder, arguments.iterations)
    truth = ExactSettings(max_tokens, 1.0, merge_pairs=16)
    num = 10 if arguments.quick else arguments.problems or (16 if max_tokens > LONG else 32)
    comparison = Comparison(
        task, settings, [row for row in read_rows() if not arguments.only or row.name in arguments.only],
        arguments.prm and arguments.prm.resolve(),
        Sizes(num, 4, 2, num, truth) if arguments.quick else Sizes(num, 8, 2, max(NUM_REFERENCE, num), truth),
        2 if arguments.quick else -(-CHECKED_PROBLEMS // len(policies)),
        (20_000 if arguments.quick else CHECK_TOKENS) // len(policies),
        folder,
    )  # fmt: skip
    problems = task.problems("dev")
    stride = max(num, comparison.checked)
    if stride * len(policies) > len(problems):
        raise BadInput(f"--problems {num}: {len(policies)} policies have problems of their own, {stride} each, and the "
                       f"task has {len(problems)}: give fewer")  # fmt: skip
    found = {
        name: comparison.measure_policy(name, path.resolve(), [*problems[first:], *problems[:first]])
        for (name, path), first in zip(policies.items(), range(0, len(problems), stride), strict=False)
    }
    result = {"commit": code_commit(), "date": time.strftime("%Y-%m-%d"), "batch": BATCH,
              "sizes": asdict(comparison.sizes), "policies": found}  # fmt: skip
    if arguments.quick or arguments.only:
        print(json.dumps(summarise({cell.name: result}), indent=1))
    else:
        print(write(cell.name, result))


def main() -> int:
    """Run the benchmark; bad input ends with one line."""
    try:
        run(parse())
    except (BadInput, BadConfig) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
