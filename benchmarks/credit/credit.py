"""Which credit learns more per generated token, per second and per update: learning curves of methods, side by side.

    bash scripts/bench.sh credit --tune --hours 3          the learning rate of every method on every cell
    bash scripts/bench.sh credit --hours 3                 runs that are missing, then tables and pictures of all
    bash scripts/bench.sh credit --cells word_arithmetic --methods grpo vineppo_k9 --seeds 0 1 --hours 1
    bash scripts/bench.sh credit --hours 0                 tables and pictures alone

plan.yaml holds the cells (a task and the policy that every run starts from, with budgets and a target accuracy) and the
methods. A run trains on one core until it has spent the cell's tokens and seconds, and is a directory of its own below
`--folder`: finished ones are kept, cut ones go on. Its record (benchmarks/results/credit/) is all that figures need, so
that sessions of a few hours can add runs; on another machine, where training the policies ends in other bits, with
other seeds. Time goes round by round: every method on every cell has seed 0 before any has seed 1.

Tokens are all that the engine generated for training (rollouts, completions, greedy baselines; those of a reward model
made before the run too), seconds those of iterations; evaluations count in neither. Accuracy is the mean of
`evaluation.samples` sampled answers to held-out problems. Seconds of runs side by side are compared with seconds of
runs side by side: a busy machine spoils them, tokens not.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.credit.learning_rates import listed, runs_of_other_rates, tuned_rates, tuning_areas
from benchmarks.credit.pictures import draw
from benchmarks.credit.plan import Cell, Method, Plan, Run, benchmark_runs, chosen, read_plan, tuning_runs
from benchmarks.credit.runs import ENVIRONMENT, Places, Record, check_policies, digest, read_records, record, start
from benchmarks.credit.schedule import Spent, spend
from benchmarks.credit.tables import summarise
from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import load_before
from benchmarks.result import RESULTS, write_result
from espalier.data.records import BadInput

HOW = "bash scripts/bench.sh credit"


def places_by_cell(rows: Sequence[str], plan: Plan, option: str) -> dict[str, Path]:
    """Return CELL=FOLDER arguments as a mapping. Raises BadInput on another form, cell or folder."""
    found = {}
    for row in rows:
        name, _, folder = row.partition("=")
        if name not in plan.cells or not Path(folder).is_dir():
            raise BadInput(f"{option} {row}: give CELL=FOLDER with a cell of plan.yaml ({', '.join(plan.cells)}) and a "
                           "folder that exists")  # fmt: skip
        found[name] = Path(folder).resolve()
    return found


def missing(runs: Sequence[Run], records: Sequence[Record]) -> list[Run]:
    """Return the runs that have no record yet, in their order; of tuning, `records` are those of the policies here."""
    done = {(row.cell, row.method, row.seed, row.learning_rate, row.is_tuning) for row in records}
    return [
        run for run in runs
        if (run.cell.name, run.method.name, run.seed, run.learning_rate, run.is_tuning) not in done
    ]  # fmt: skip


def asked_runs(
    arguments: argparse.Namespace, plan: Plan, cells: Sequence[Cell], methods: Sequence[Method],
    records: Sequence[Record], policy: Callable[[Cell], Path],
) -> list[Run]:  # fmt: skip
    """Return the runs that the command line asks for and that have no record. A method without a learning rate that
    was tuned from the policy here is left out with a warning."""
    policies = {cell.name: digest(policy(plan.cells[cell.rates_of or cell.name])) for cell in cells}
    if arguments.tune:
        here = [row for row in records if row.policy == policies.get(row.cell)]
        areas = {key: found[policies[key[0]]] for key, found in tuning_areas(plan, here).items()}
        return missing(tuning_runs(plan, cells, methods, areas), here)
    tuned = tuned_rates(plan, records)
    pairs = [(cell.name, method.name) for cell in cells for method in methods if cell.takes(method)]
    rates = {pair: tuned[pair][policies[pair[0]]] for pair in pairs if policies[pair[0]] in tuned.get(pair, {})}
    if arguments.learning_rate:
        for cell, method in pairs:
            known = set(tuned.get((cell, method), {}).values())
            if (cell, method) not in rates and known and arguments.learning_rate not in known:
                raise BadInput(f"--learning-rate {arguments.learning_rate:g}: {method} on {cell} was tuned from other "
                               f"policies, to {listed(known)}, and runs of another rate are in no figure: --tune from "
                               "this one, or give such a rate")  # fmt: skip
        rates = dict.fromkeys(pairs, arguments.learning_rate) | rates
    untuned = [pair for pair in pairs if pair not in rates]
    if untuned:
        names = ", ".join(f"{method} on {plan.cells[cell].rates_of or cell}" for cell, method in untuned[:4])
        print(f"warning: {len(untuned)} without a learning rate tuned from the policy here are left out ({names}): "
              "run --tune first, or give --learning-rate", file=sys.stderr)  # fmt: skip
    return missing(benchmark_runs(cells, methods, arguments.seeds, rates), records)


def work(places: Places, runs: Sequence[Run], cores: Sequence[int], end: float) -> Spent:
    """Make what the runs need, then spend the time on them, until the monotonic clock says `end`."""
    for cell in {run.cell.name: run.cell for run in runs}.values():
        places.policy(cell)
        if any(run.cell == cell and run.method.needs_process_rewards for run in runs):
            places.process_rewards_of(cell)

    def finish(run: Run) -> None:
        kept = record(places, run)
        last = kept.points[-1]
        print(f"{run.cell.name} {run.name}: {kept.points[0].accuracy:.3f} to {last.accuracy:.3f} in {last.updates:g} "
              f"updates, {last.tokens:,.0f} tokens, {last.seconds:.0f} s", file=sys.stderr, flush=True)  # fmt: skip

    spent = spend(runs, cores, end, lambda run, core: start(places, run, core), finish)
    for run in spent.failed:
        log = places.run_dir(run).parent / f"{places.run_dir(run).name}.log"
        print(f"error: {run.cell.name} {run.name} failed: see {log}", file=sys.stderr)
    print(f"{len(spent.finished)} runs finished, {len(spent.cut)} cut, {len(spent.failed)} failed, of {len(runs)}",
          file=sys.stderr)  # fmt: skip
    return spent


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="*", help="of plan.yaml; all where none is named")
    parser.add_argument("--methods", nargs="*", help="of plan.yaml; all where none is named")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--hours", type=float, default=math.inf, help="stop after so long; 0: only write the figures")
    parser.add_argument("--tune", action="store_true", help="only the runs that choose learning rates")
    parser.add_argument("--learning-rate", type=float, default=0.0, help="of methods that are not tuned on a cell")
    parser.add_argument("--cores", nargs="*", type=int, default=sorted(os.sched_getaffinity(0)), help="one run on each")
    parser.add_argument("--folder", type=Path, default=Path("experiments/credit"), help="keeps policies and runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="keeps records and credit.json")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "credit_curves")
    parser.add_argument("--plan", type=Path, default=Path(__file__).with_name("plan.yaml"))
    parser.add_argument("--policy", nargs="*", default=[], metavar="CELL=FOLDER", help="policies made elsewhere")
    parser.add_argument("--process-rewards", nargs="*", default=[], metavar="CELL=RUN",
                        help="run directories of scripts/process_rewards.sh made elsewhere")  # fmt: skip
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    """Spend the time, write the figures; return the exit code: 1 where a run failed."""
    plan = read_plan(arguments.plan)
    cells = chosen(arguments.cells, plan.cells, "--cells")
    methods = chosen(arguments.methods, plan.methods, "--methods")
    if plan.tuning_seed in arguments.seeds:
        raise BadInput(f"--seeds: {plan.tuning_seed} is the seed of tuning, which no run may have")
    places = Places(
        plan, arguments.folder.resolve(), arguments.results.resolve(),
        places_by_cell(arguments.policy, plan, "--policy"),
        places_by_cell(arguments.process_rewards, plan, "--process-rewards"),
    )  # fmt: skip
    records, stale = read_records(plan, places.results)
    load, code, end = load_before(), 0, time.monotonic() + 3600 * arguments.hours
    os.environ.update(ENVIRONMENT)
    while time.monotonic() < end and (runs := asked_runs(arguments, plan, cells, methods, records, places.policy)):
        check_policies(records, runs, places.policy)
        spent = work(places, runs, arguments.cores, end)
        records, stale = read_records(plan, places.results)
        code = int(bool(spent.failed))
        if not arguments.tune or spent.failed or spent.cut:
            break  # else: lower rates may be wanted now
    stale += runs_of_other_rates(plan, records)
    for line in stale:
        print(f"warning: left out: {line}", file=sys.stderr)
    figures, tables, found = summarise(plan, records, HOW)
    tuned = {f"{cell} {method}": rates for (cell, method), rates in tuned_rates(plan, records).items()}
    loads = [row.load for row in records]
    commits = sorted({row.commit for row in records})
    detail = {"tuned": tuned, "left_out": stale, "load_before": load, "commits": commits,
              "loads": [min(loads), max(loads)] if loads else []}  # fmt: skip
    print(write_result("credit", figures, detail, tables=tables, folder=places.results))
    for path in draw(plan, found, arguments.pictures):
        print(path)
    return code


def main() -> int:
    """Run the benchmark; bad input ends with one line."""
    try:
        return run(parse())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
