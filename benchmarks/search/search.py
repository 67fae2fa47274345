"""What search brings, by method, scorer and tokens; and how fast it is beside the public way.

    bash scripts/bench.sh search [accuracy] [speed] [data] [--cells C ...] [--methods M ...] [--scorers S ...]
                          [--sizes N ...] [--seeds S ...] [--problems N] [--labelled N] [--policy CELL=MODEL ...]
                          [--prm CELL=MODEL ...] [--page]

A cell is a task and the policy of plan.yaml (benchmarks/credit). Seed s takes the s-th block of test problems. The
reward model is made by scripts/process_rewards.sh of training problems. Every run is a record in
benchmarks/results/search/; what is there already is not run again, so that shares can be run on their own; `--page`
runs nothing. A share that would stand beside records of another policy or reward model for the same seed, or of another
number of problems, is refused (records of 30 problems are stored: `--problems 30`). `exact` scores by the true value of
the policy, the ceiling, `random` by a hash, the floor.

Speed: step beam search of width 4 and 4 siblings, product and public way (benchmarks/search/public_way.py) on servers
of the same policy, one after the other.

Data: reward models trained on labels of searched trees beside one on independent completions, at equal generated tokens
(benchmarks/search/tree_data.py); `--labelled` problems pay for the latter.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.result import RESULTS, figure, write_result
from benchmarks.sampling.prefill import computed_tokens, empty_cache
from benchmarks.search.arms import LABELS, METHODS, NO_SCORER, SCORERS, SIZES, settings_of
from benchmarks.search.cells import CELLS, FOLDER, Cell, Models, serve
from benchmarks.search.figures import GOAL_PROMPTS, accuracy_table, at_most, method_gaps, prompt_figures, scorer_gaps
from benchmarks.search.origin import (
    NOT_RECORDED,
    UNKNOWN,
    Origin,
    check_number,
    check_policy,
    check_reward_model,
    origin,
    weights,
)
from benchmarks.search.public_way import PublicSearch
from benchmarks.search.runs import SearchRecord, SearchRun, keep, read, read_one, run_search
from benchmarks.search.tree_data import TreeDataRecord, data_parts, run_data
from espalier.data.records import BadInput
from espalier.models.scalar_head import load_process_reward
from espalier.models.tokenizer import load_tokenizer
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig

HOW = "bash scripts/bench.sh search"
RECORDS = RESULTS / "search"
SPEEDS = RECORDS / "speed"
GOAL_SPEED = 5.0


def run_accuracy(cell: Cell, models: Models, options: argparse.Namespace) -> None:
    """Run what is asked of a cell and not there yet. Raises BadInput where stored records are of another policy, other
    reward models or another number of problems."""
    stored = read(RECORDS, SearchRecord)
    check_number(((row.cell, row.problems) for row in stored), cell.name, options.problems)
    policy = models.policy(cell)
    policy_weights = weights(policy)
    check_policy(stored, cell.name, options.seeds, policy_weights)
    prms = {scorer: models.prm(cell, labels) for scorer, labels in LABELS.items() if scorer in options.scorers}
    prm_weights = {scorer: weights(prm) for scorer, prm in prms.items()}
    for scorer, digest in prm_weights.items():
        check_reward_model([row for row in stored if row.scorer == scorer], cell.name, options.seeds, scorer, digest)
    scorer_settings = {
        **{scorer: [f"search.scorer.path={prm}"] for scorer, prm in prms.items()},
        "exact": ["scorer@search.scorer=exact"],
        "random": ["scorer@search.scorer=random"],
        NO_SCORER: ["scorer@search.scorer=majority"],
    }
    with serve(policy, "partial_block_cache") as server:
        for seed in options.seeds:

            def run(method: str, scorer: str, size: int, settings: Sequence[str], seed: int = seed) -> SearchRecord:
                one = SearchRun(cell.name, cell.task, policy, method, scorer, size, seed, options.problems,
                                cell.max_tokens, (*settings, *scorer_settings[scorer]), policy_weights,
                                prm_weights.get(scorer, ""))  # fmt: skip
                path = RECORDS / f"{one.name}.json"
                if not path.is_file():
                    keep(run_search(one, server.base_url, FOLDER), path)
                    print(path.read_text(), flush=True)
                return read_one(path, SearchRecord)

            single = run("best_of_n", NO_SCORER, 1, ["search=majority", "search.method.n=1"])
            for size in options.sizes:
                for method in options.methods:
                    for scorer in METHODS[method]:
                        if scorer in (*options.scorers, NO_SCORER):
                            run(method, scorer, size, settings_of(method, size, single.tokens))


@dataclass(frozen=True)
class Speed:
    """One way over one block of so many `problems` (0: not recorded): problems per second, share right, prompt tokens
    computed and tokens scored per problem."""

    cell: str
    way: str
    seed: int
    problems_per_second: float
    accuracy: float
    prompt_tokens: float
    scored_tokens: float
    distinct_tokens: float
    problems: int = 0
    origin: Origin = UNKNOWN


def run_speed(cell: Cell, models: Models, options: argparse.Namespace) -> list[Speed]:
    """Run both ways, seed by seed, one after the other. Raises BadInput where records of other seeds, which stay, are
    of another number of problems."""
    kept = [row for row in read(SPEEDS, Speed) if row.seed not in options.seeds]
    check_number(((row.cell, row.problems) for row in kept), cell.name, options.problems)
    policy, prm = models.policy(cell), models.prm(cell)
    digests = weights(policy), weights(prm)
    found: list[Speed] = []
    for seed in options.seeds:
        number = options.problems
        with serve(policy, "partial_block_cache") as server:
            run = SearchRun(cell.name, cell.task, policy, "step_beam", "process", 0, seed, number, cell.max_tokens,
                            ("search=step_beam", f"search.scorer.path={prm}"), *digests)  # fmt: skip
            row = run_search(run, server.base_url, FOLDER)
        counts = (row.prompt_tokens, row.scored_tokens, row.distinct_tokens)
        found.append(Speed(cell.name, "product", seed, number / row.seconds, row.accuracy,
                           *(count / number for count in counts), number, row.origin))  # fmt: skip
        with serve(policy, "plain") as server:
            public = _public(cell, policy, prm, server.base_url, seed, number)
        found.append(replace(public, problems=number, origin=origin(*digests)))
        print(*found[-2:], sep="\n", flush=True)
    return found


def _public(cell: Cell, policy: str, prm: str, url: str, seed: int, number: int) -> Speed:
    config = compose_config(SampleConfig, "api/vllm/trajectories", [*cell.task, f"policy={policy}", "output=x"])
    task, tokenizer = build(config.task), load_tokenizer(policy)
    problems = task.problems("test")[seed * number : (seed + 1) * number]
    search = PublicSearch(url, tokenizer, load_process_reward(prm), task, 4, 4, cell.max_tokens)
    empty_cache(url)
    before, began = computed_tokens(url), time.monotonic()
    right, scored = asyncio.run(search.run(problems))
    seconds = time.monotonic() - began
    computed = computed_tokens(url) - before
    return Speed(cell.name, "public", seed, number / seconds, fmean(right), computed / number, scored / number, 0.0)


def speed_parts(rows: Sequence[Speed]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, the table) of both ways."""
    figures: dict[str, Any] = {}
    for cell in dict.fromkeys(row.cell for row in rows):
        ours = {row.seed: row for row in rows if (row.cell, row.way) == (cell, "product")}
        theirs = {row.seed: row for row in rows if (row.cell, row.way) == (cell, "public")}
        both = [seed for seed in sorted(set(ours) & set(theirs))
                if ours[seed].origin.machine == theirs[seed].origin.machine]  # fmt: skip
        if not both:
            continue
        ratios = [ours[seed].problems_per_second / theirs[seed].problems_per_second for seed in both]
        prompts = [ours[seed].prompt_tokens / ours[seed].distinct_tokens for seed in both]
        scored = [ours[seed].scored_tokens / ours[seed].distinct_tokens for seed in both]
        figures[f"{cell}_speed"] = figure(ratios, goal=GOAL_SPEED, how=f"{HOW} speed")
        for name, values in (("prompt_tokens", prompts), ("scored_tokens", scored)):
            figures[f"{cell}_{name}_by_distinct"] = at_most(values, GOAL_PROMPTS, "ratio", f"{HOW} speed")
    columns = ["cell", "way", "seed", "problems / s", "right, %", "prompt tokens", "scored tokens", "distinct tokens",
               "problems", "machine"]  # fmt: skip
    table = [[row.cell, row.way, row.seed, f"{row.problems_per_second:.2f}", f"{100 * row.accuracy:.1f}",
              f"{row.prompt_tokens:.0f}", f"{row.scored_tokens:.0f}", f"{row.distinct_tokens:.0f}",
              row.problems or NOT_RECORDED, row.origin.machine or NOT_RECORDED]
             for row in rows]  # fmt: skip
    return figures, {"title": "Beside the public way, per problem", "columns": columns, "rows": table}


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["accuracy", "speed", "data"], help="accuracy, speed, data")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--scorers", nargs="+", choices=SCORERS, default=list(SCORERS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--labelled", type=int, default=100)
    parser.add_argument("--policy", nargs="+", default=[], metavar="CELL=MODEL")
    parser.add_argument("--prm", nargs="+", default=[], metavar="CELL=MODEL")
    parser.add_argument("--page", action="store_true")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    """Run the shares that are asked for and write the results of all records. Raises BadInput where records would be
    set beside others that are not alike."""
    models = Models(*(dict(pair.split("=", 1) for pair in given) for given in (options.policy, options.prm)))
    for cell in [] if options.page else [CELLS[name] for name in options.cells]:
        if "accuracy" in options.parts:
            run_accuracy(cell, models, options)
        if "speed" in options.parts:
            for row in run_speed(cell, models, options):
                keep(row, SPEEDS / f"{row.cell}-{row.way}-{row.seed}.json")
        if "data" in options.parts:
            run_data(cell, models.policy(cell), options.seeds, options.labelled, options.problems, RECORDS / "data")
    records = read(RECORDS, SearchRecord)
    gaps, scorers = scorer_gaps(records, HOW)
    speed, beside = speed_parts(read(SPEEDS, Speed))
    data, labels = data_parts(read(RECORDS / "data", TreeDataRecord))
    detail = {"records": "benchmarks/results/search", "sizes": list(SIZES)}
    tables = [accuracy_table(records), scorers, method_gaps(records), beside, labels]
    figures = gaps | prompt_figures(records, HOW) | speed | data
    write_result("search", figures, detail, tables=[table for table in tables if table["rows"]])


def main() -> int:
    """Run the benchmark; bad input ends with one line."""
    try:
        run(parse())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
