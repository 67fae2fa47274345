"""What search brings, by method, scorer and tokens; and how fast it is beside the public way.

    bash scripts/bench.sh search [accuracy] [speed] [data] [--cells C ...] [--methods M ...] [--scorers S ...]
                          [--sizes N ...] [--seeds S ...] [--problems N] [--labelled N] [--policy CELL=MODEL ...]
                          [--prm CELL=MODEL ...] [--page]

A cell is a task and the policy of plan.yaml (benchmarks/credit). Seed s takes the s-th block of test problems. The
reward model is made by scripts/process_rewards.sh of training problems. Every run is a record in
benchmarks/results/search/; what is there already is not run again, so that shares can be run on their own; `--page`
runs nothing. `exact` scores by the true value of the policy, the ceiling, `random` by a hash, the floor.

Speed: step beam search of width 4 and 4 siblings, product and public way (benchmarks/search/public_way.py) on servers
of the same policy, one after the other.

Data: reward models trained on labels of searched trees beside one on independent completions, at equal generated tokens
(benchmarks/search/tree_data.py); `--labelled` problems pay for the latter.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.credit.intervals import Mean, mean_over_seeds
from benchmarks.result import RESULTS, figure, write_result
from benchmarks.sampling.prefill import computed_tokens, empty_cache
from benchmarks.search.arms import LABELS, METHODS, NO_SCORER, SCORERS, SIZES, settings_of
from benchmarks.search.cells import CELLS, FOLDER, Cell, Models, serve
from benchmarks.search.public_way import PublicSearch
from benchmarks.search.runs import SearchRecord, SearchRun, keep, read, read_one, run_search
from benchmarks.search.tree_data import TreeDataRecord, data_parts, run_data
from espalier.models.scalar_head import load_process_reward
from espalier.models.tokenizer import load_tokenizer
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig

HOW = "bash scripts/bench.sh search"
RECORDS = RESULTS / "search"
GOAL_SPEED, GOAL_PROMPTS = 5.0, 1.1


def run_accuracy(cell: Cell, models: Models, options: argparse.Namespace) -> None:
    """Run what is asked of a cell and not there yet."""
    policy = models.policy(cell)
    scorer_settings = {
        **{scorer: [f"search.scorer.path={models.prm(cell, labels)}"]
           for scorer, labels in LABELS.items() if scorer in options.scorers},
        "exact": ["scorer@search.scorer=exact"],
        "random": ["scorer@search.scorer=random"],
        NO_SCORER: ["scorer@search.scorer=majority"],
    }  # fmt: skip
    with serve(policy, "partial_block_cache") as server:
        for seed in options.seeds:

            def run(method: str, scorer: str, size: int, settings: Sequence[str], seed: int = seed) -> SearchRecord:
                one = SearchRun(cell.name, cell.task, policy, method, scorer, size, seed, options.problems,
                                cell.max_tokens, (*settings, *scorer_settings[scorer]))  # fmt: skip
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
    """One way over one block: problems per second, share right, prompt tokens computed and tokens scored per
    problem."""

    cell: str
    way: str
    seed: int
    problems_per_second: float
    accuracy: float
    prompt_tokens: float
    scored_tokens: float
    distinct_tokens: float


def run_speed(cell: Cell, models: Models, options: argparse.Namespace) -> list[Speed]:
    """Run both ways, seed by seed, one after the other."""
    policy, prm = models.policy(cell), models.prm(cell)
    found: list[Speed] = []
    for seed in options.seeds:
        number = options.problems
        with serve(policy, "partial_block_cache") as server:
            run = SearchRun(cell.name, cell.task, policy, "step_beam", "process", 0, seed, number, cell.max_tokens,
                            ("search=step_beam", f"search.scorer.path={prm}"))  # fmt: skip
            row = run_search(run, server.base_url, FOLDER)
        counts = (row.prompt_tokens, row.scored_tokens, row.distinct_tokens)
        found.append(Speed(cell.name, "product", seed, number / row.seconds, row.accuracy,
                           *(count / number for count in counts)))  # fmt: skip
        with serve(policy, "plain") as server:
            found.append(_public(cell, policy, prm, server.base_url, seed, number))
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


def above(name: str, one: Sequence[float], other: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the figure of a mean difference, seed by seed; met where its interval lies above 0 (with fewer than three
    seeds: where it is above 0)."""
    mean = mean_over_seeds([a - b for a, b in zip(one, other, strict=True)])
    low = mean.value if mean.low is None else mean.low
    return {name: {"value": round(mean.value, 4), "low": _rounded(mean.low), "high": _rounded(mean.high),
                   "unit": f"accuracy, {mean.n} seeds", "goal": 0.0, "better": "higher", "met": low > 0,
                   "how": HOW}}  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _text(mean: Mean) -> str:
    interval = "" if mean.low is None or mean.high is None else f" [{100 * mean.low:.1f}, {100 * mean.high:.1f}]"
    return f"{100 * mean.value:.1f}{interval}"


def accuracy_parts(records: Sequence[SearchRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, the table) of accuracy: of every method how far the exact value and a reward model by contrast
    are above the reward model by values, and that above a random score, at 16 times one sample's tokens."""
    groups: dict[tuple[str, str, str, int], dict[int, SearchRecord]] = {}
    for row in records:
        groups.setdefault((row.cell, row.method, row.scorer, row.size), {})[row.seed] = row
    figures: dict[str, Any] = {}
    for (cell, method, scorer, size), rows in groups.items():
        below = {"process": "random", "contrast": "process", "exact": "process"}.get(scorer)
        other = groups.get((cell, method, below or "", size))
        if size == 16 and below and other and (seeds := sorted(set(rows) & set(other))):
            pair = [[group[seed].accuracy for seed in seeds] for group in (rows, other)]
            figures |= above(f"{cell}_{method}_{scorer}_minus_{below}", *pair)
    table = [
        [cell, method, scorer, size, _text(mean_over_seeds([row.accuracy for row in rows.values()])), len(rows),
         f"{fmean(row.tokens for row in rows.values()):.0f}",
         f"{fmean(row.prompt_tokens / row.distinct_tokens for row in rows.values()):.2f}"]
        for (cell, method, scorer, size), rows in sorted(groups.items())
    ]  # fmt: skip
    columns = ["cell", "method", "scorer", "times one sample", "right, %", "seeds", "tokens per problem",
               "prompt tokens computed / distinct"]  # fmt: skip
    return figures, {"title": "Accuracy by tokens", "columns": columns, "rows": table}


def speed_parts(rows: Sequence[Speed]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, the table) of both ways."""
    figures: dict[str, Any] = {}
    for cell in dict.fromkeys(row.cell for row in rows):
        ours = {row.seed: row for row in rows if (row.cell, row.way) == (cell, "product")}
        theirs = {row.seed: row for row in rows if (row.cell, row.way) == (cell, "public")}
        both = sorted(set(ours) & set(theirs))
        ratios = [ours[seed].problems_per_second / theirs[seed].problems_per_second for seed in both]
        prompts = [ours[seed].prompt_tokens / ours[seed].distinct_tokens for seed in both]
        scored = [ours[seed].scored_tokens / ours[seed].distinct_tokens for seed in both]
        figures[f"{cell}_speed"] = figure(ratios, goal=GOAL_SPEED, how=f"{HOW} speed")
        for name, values in (("prompt_tokens", prompts), ("scored_tokens", scored)):
            found = figure(values, goal=GOAL_PROMPTS, how=f"{HOW} speed")
            figures[f"{cell}_{name}_by_distinct"] = {**found, "better": "lower", "met": found["value"] <= GOAL_PROMPTS}
    columns = ["cell", "way", "seed", "problems / s", "right, %", "prompt tokens", "scored tokens", "distinct tokens"]
    table = [[row.cell, row.way, row.seed, f"{row.problems_per_second:.2f}", f"{100 * row.accuracy:.1f}",
              f"{row.prompt_tokens:.0f}", f"{row.scored_tokens:.0f}", f"{row.distinct_tokens:.0f}"]
             for row in rows]  # fmt: skip
    return figures, {"title": "Beside the public way, per problem", "columns": columns, "rows": table}


def main() -> None:
    """Run the shares that are asked for and write the results of all records."""
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
    options = parser.parse_args()
    models = Models(*(dict(pair.split("=", 1) for pair in given) for given in (options.policy, options.prm)))
    cells = [] if options.page else [CELLS[name] for name in options.cells]
    speeds = RECORDS / "speed"
    for cell in cells:
        if "accuracy" in options.parts:
            run_accuracy(cell, models, options)
        if "speed" in options.parts:
            for row in run_speed(cell, models, options):
                keep(row, speeds / f"{row.cell}-{row.way}-{row.seed}.json")
        if "data" in options.parts:
            run_data(cell, models.policy(cell), options.seeds, options.labelled, options.problems, RECORDS / "data")
    figures, accuracy = accuracy_parts(read(RECORDS, SearchRecord))
    more, beside = speed_parts(read(speeds, Speed))
    detail = {"records": "benchmarks/results/search", "sizes": list(SIZES)}
    data, labels = data_parts(read(RECORDS / "data", TreeDataRecord))
    write_result("search", figures | more | data, detail, tables=[accuracy, beside, labels])


if __name__ == "__main__":
    main()
