"""How good is the credit of every estimator: beside exact values, on the same rollouts, per generated token.

    bash scripts/bench.sh credit_oracle [--policies NAME=FOLDER ...] [--prm FOLDER] [--only ROW ...] [--quick]

Rollouts of word_arithmetic are drawn several times from policies at stages of training (the SFT policy and two
checkpoints of GRPO, unless others are given); every estimator credits them, and its advantages are compared with the
exact ones of the same steps (`values/exact/`). The rows are benchmarks/credit/estimators.yaml and all other configs of
conf/advantage/; those that need a critic, or a reward model that is not given, are left out by name. The engine
computes in float32, as the exact values do. A policy that was measured is kept in --folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.credit.cosine_figure import Point, draw
from benchmarks.credit.estimated_credit import CreditBench, Plan
from benchmarks.processes.forked import ROOT
from benchmarks.result import count, write_result
from benchmarks.rl.policy import make_policy, run_program
from espalier.rl.combinations import component_settings
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import RLConfig
from espalier.sampling.data_parallel_engines import DataParallelEngines

HOW = "bash scripts/bench.sh credit_oracle"
CONFIGS = ROOT / "conf" / "advantage"
FIGURE = ROOT / "docs" / "credit_oracle.svg"
FULL = Plan(num_problems=6, group_size=8, num_draws=3, num_simulated=24, completions=400)
QUICK = Plan(num_problems=3, group_size=4, num_draws=2, num_simulated=6, completions=200)
COLUMNS = ["policy", "estimator", "bias", "standard deviation", "rank correlation", "wrong sign", "cosine", "low",
           "high", "tokens per rollout token", "seconds"]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An estimator of the benchmark: a config of conf/advantage/ and what differs in it."""

    name: str
    advantage: str
    settings: dict[str, Any] = field(default_factory=dict)


def read_rows() -> list[Row]:
    """Return the rows of estimators.yaml, then every other config of conf/advantage/."""
    named = [Row(**row) for row in yaml.safe_load((Path(__file__).parent / "estimators.yaml").read_text())]
    known = {row.advantage for row in named}
    return [*named, *(Row(path.stem, path.stem) for path in sorted(CONFIGS.glob("*.yaml")) if path.stem not in known)]


def config_of(row: Row, policy: Path, prm: Path | None) -> RLConfig | str:
    """Return the config of a run with this estimator, or why it cannot be run here."""
    settings = dict(row.settings)
    if yaml.safe_load((CONFIGS / f"{row.advantage}.yaml").read_text()).get("path") == "???":
        if prm is None:
            return "needs a process reward model: --prm FOLDER"
        settings["path"] = prm
    words = [f"advantage={row.advantage}", f"model.path={policy}", "output_dir=none", "server=none",
             *(f"advantage.{name}={value}" for name, value in settings.items())]  # fmt: skip
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", words)
    found = component_settings(config.advantage)
    kind = None if found is None else found[0]
    for name, reason in (("needs_critic", "needs a critic"), ("reads_branches", "needs a tree of rollouts"),
                         ("needs_step_rewards", "needs process rewards")):  # fmt: skip
        if getattr(kind, name, False):
            return reason
    return config


def make_policies(folder: Path, num_iterations: int) -> dict[str, Path]:
    """Return the SFT policy and two checkpoints of GRPO from it; what is there already is kept."""
    quickstart = ROOT / "experiments" / "quickstart" / "sft" / "model"
    sft = quickstart if quickstart.is_dir() else make_policy(folder, 600)
    run, half = folder / "grpo", num_iterations // 2
    if not (run / "model").is_dir():
        run_program(folder / "programs.log", "main.py", "-cn", "exp/ppo/grpo_word_arithmetic", f"output_dir={run}",
                    f"model.path={sft}", f"num_iterations={num_iterations}", f"checkpoints.export_every={half}",
                    "rollout.num_problems=32", "update.minibatch_size=256", "evaluation.every=0",
                    "update.warmup_steps=1")  # fmt: skip
    exported = [run / "policies" / f"iteration-{number:06d}" for number in (half, num_iterations)]
    return {"SFT": sft, f"GRPO {half}": exported[0], f"GRPO {num_iterations}": exported[1]}


def table_row(policy: str, name: str, found: dict[str, Any]) -> list[Any]:
    """Return a line of the table; the cosine's low and high are over draws."""
    cosines = sorted(found["cosines"])
    numbers = [found["bias"], found["deviation"], found["rank_correlation"], found["sign_error"], fmean(cosines),
               cosines[0], cosines[-1], found["tokens_per_token"]]  # fmt: skip
    return [policy, name, *(round(number, 3) for number in numbers), round(found["seconds"], 2)]


def measure_policy(
    name: str, policy: Path, rows: Sequence[Row], plan: Plan, prm: Path | None, folder: Path
) -> dict[str, Any]:
    """Return `{table, oracle, left_out}` of one policy; kept in `folder`, and read from there where the same was
    asked before."""
    asked = json.loads(json.dumps({"policy": str(policy), "rows": list(map(asdict, rows)), "plan": asdict(plan),
                                   "prm": str(prm)}))  # fmt: skip
    path = folder / f"{name.replace(' ', '-')}.json"
    if path.is_file() and (kept := json.loads(path.read_text()))["asked"] == asked:
        return dict(kept["found"])
    found: dict[str, Any] = {"table": [], "left_out": {}}
    engine = DataParallelEngines(model=str(policy), log=str(folder / "engine.log"), num_engines=1, dtype="float32")
    with CreditBench(policy, plan, engine) as bench:
        for row in rows:
            config = config_of(row, policy, prm)
            if isinstance(config, str):
                found["left_out"][row.name] = config
                continue
            found["table"].append(table_row(name, row.name, bench.measure(build(config.advantage))))
            print(json.dumps(found["table"][-1]), file=sys.stderr, flush=True)
        found["oracle"] = bench.oracle()
        print(name, json.dumps(found["oracle"]), file=sys.stderr, flush=True)
    path.write_text(json.dumps({"asked": asked, "found": found}) + "\n")
    return found


def points_of(table: Sequence[Sequence[Any]]) -> list[Point]:
    """Return a point per estimator: means over the policies."""
    names = list(dict.fromkeys(row[1] for row in table))
    of = {name: [dict(zip(COLUMNS, row, strict=True)) for row in table if row[1] == name] for name in names}
    return [
        Point(
            name,
            1 + fmean(row["tokens per rollout token"] for row in rows),
            fmean(row["cosine"] for row in rows),
            min(row["cosine"] for row in rows),
            max(row["cosine"] for row in rows),
        )
        for name, rows in of.items()
    ]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", nargs="*", default=[], metavar="NAME=FOLDER", help="stages of one policy")
    parser.add_argument("--prm", type=Path, help="a process reward model with the policies' tokenizer")
    parser.add_argument("--only", nargs="*", default=[], help="these rows alone")
    parser.add_argument("--folder", type=Path, default=Path("experiments/credit_oracle"), help="keeps policies, logs")
    parser.add_argument("--iterations", type=int, default=8, help="of GRPO, where the policies are made here")
    parser.add_argument("--operations", nargs=2, type=int, default=[2, 5], metavar=("LEAST", "MOST"))
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
    return arguments


def main() -> None:
    """Measure every row on every policy."""
    arguments = parse()
    plan = replace(QUICK if arguments.quick else FULL, operations=tuple(arguments.operations))
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    policies = {name: Path(path) for name, _, path in (text.partition("=") for text in arguments.policies)}
    policies = policies or make_policies(folder, arguments.iterations)
    rows = [row for row in read_rows() if not arguments.only or row.name in arguments.only]
    prm = arguments.prm and arguments.prm.resolve()
    found = {name: measure_policy(name, path.resolve(), rows, plan, prm, folder) for name, path in policies.items()}
    table = [row for one in found.values() for row in one["table"]]
    oracles = {name: one["oracle"] for name, one in found.items()}
    left_out = {name: reason for one in found.values() for name, reason in one["left_out"].items()}
    within = sum(one["within"] for one in oracles.values())
    asked = sum(one["simulated"] for one in oracles.values())
    figures = {"oracle_within_three_errors": count(within, round(0.98 * asked), "states", how=HOW)}
    detail = {"plan": asdict(plan), "oracle": oracles, "left_out": left_out}
    shown = [
        {"title": "Estimated credit beside exact credit, on the same rollouts.", "columns": COLUMNS, "rows": table}
    ]
    if arguments.quick:
        print(json.dumps({"figures": figures, "detail": detail, "tables": shown}, indent=1))
        return
    FIGURE.write_text(draw(points_of(table)))
    print(write_result("credit_oracle", figures, detail, tables=shown))


if __name__ == "__main__":
    main()
