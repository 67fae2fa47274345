"""Labels of searched trees beside labels of independent completions: process reward models at equal generated tokens.

Seed s takes training problems from the s-th block of `STRIDE` on. "independent": `labelled` problems, 8 solutions of
each and 4 completions of every state on them (values/estimate_values). What that generates is the budget of the other
ways: trees of the same problems in the same order, and of as many after them as bring the generated tokens nearest to
it (values/value_trees). Which problems and states are labelled is each way's own choice, the tokens are equal. Every
model is trained on all of its way's responses by the task's own recipe (conf/exp/reward): equal epochs, so more updates
where there are more responses.

All models score the same solutions of dev problems. The truth of an inner step is the task's: whether the solution is
right so far (prm/compare_with_truth). Intervals of one seed are bootstrapped over problems, those of differences on the
same draws.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from benchmarks.credit.intervals import figure_above_zero, mean_over_seeds
from benchmarks.rl.policy import run_program
from benchmarks.search.cells import FOLDER, Cell, serve
from benchmarks.search.origin import NOT_RECORDED, UNKNOWN, Origin, check_policy, origin, weights
from benchmarks.search.runs import keep, read, read_one
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, StepValues
from espalier.data.search_tree import SearchTree
from espalier.pipeline.evaluation.intervals import Interval, resampled
from espalier.pipeline.prm.compare_with_truth import CompareWithTruth, JudgedStep, measures
from espalier.pipeline.prm.prm_calibration import auc
from espalier.pipeline.stage import StageContext
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig

HOW = "bash scripts/bench.sh search data"
INDEPENDENT = "independent"
TREES = {
    "omega_prm": ("search=omega_prm",),
    "mcts": ("search=uct", "search.method.simulations=8", "search.method.rollouts=4"),
}
"""Way → settings of its search; the outcome is the score, as trees that are data want it."""
STRIDE = 1000


@dataclass(frozen=True)
class TreeDataRecord:
    """One reward model, of a run of so many `labelled` problems for independent completions and `scored` dev problems.
    `tokens` were generated for its labels, of `problems`; `responses` and distinct inner steps with a label, on which
    it was trained in `updates`. `auc` and `index_auc` (of the step's number alone) over inner
    steps, and how far `auc` is above that of independent completions (None of these themselves)."""

    cell: str
    way: str
    seed: int
    labelled: int
    scored: int
    tokens: int
    problems: int
    responses: int
    labelled_steps: int
    updates: int
    auc: Interval
    index_auc: Interval
    above_independent: Interval | None
    origin: Origin = UNKNOWN


@dataclass(frozen=True)
class Labelling:
    """The labels of one seed of a cell, of `labelled` problems where they are independent, made below `folder` by the
    server at `url`. What is there is not made again."""

    cell: Cell
    policy: str
    seed: int
    labelled: int
    folder: Path
    url: str

    def values(self, way: str) -> tuple[Path, int]:
        """Return the step values of a way and the tokens that were generated for them."""
        return self._independent() if way == INDEPENDENT else self._of_trees(way)

    def sample(self, output: Path, config: str, *settings: str) -> int:
        """Ask the server; the tokens that it generated."""
        run_program(self.folder / "programs.log", "service_api_caller_v1.py", "-cn", f"api/vllm/{config}",
                    f"output={output}", f"policy={self.policy}", f"seed={self.seed}", "client=vllm", "server=none",
                    f"client.base_url={self.url}", f"params.max_tokens={self.cell.max_tokens}", *self.cell.task,
                    *settings)  # fmt: skip
        return int(json.loads(output.with_suffix(".meta.json").read_text())["counts"]["generated_tokens"])

    def stage(self, name: str, source: Path, output: Path, *settings: str) -> None:
        """Run an offline stage."""
        run_program(self.folder / "programs.log", "run_stage.py", "-cn", name, f"input={source}", f"output={output}",
                    *settings)  # fmt: skip

    def _independent(self) -> tuple[Path, int]:
        folder = self.folder / INDEPENDENT
        rows, states, completions, values = (
            folder / f"{name}.jsonl" for name in ("trajectories", "states", "completions", "values")
        )
        tokens = self.sample(rows, "trajectories", *self._problems(0, self.labelled))
        self.stage("values/cut_states", rows, states)
        tokens += self.sample(completions, "completions", f"requests.states={states}")
        self.stage("values/estimate_values", completions, values, f"stage.trajectories={rows}",
                   f"stage.states={states}")  # fmt: skip
        return values, tokens

    def _of_trees(self, way: str) -> tuple[Path, int]:
        _, budget = self._independent()
        trees, block, first = list[SearchTree](), max(1, self.labelled // 4), 0
        while sum(tree.num_tokens for tree in trees) < budget:
            if first + block > STRIDE:
                raise SystemExit(f"{self.cell.name}: {STRIDE} problems are too few for {budget} tokens of trees")
            output = self.folder / way / f"{first}.jsonl"
            self.sample(output, "search", *TREES[way], "scorer@search.scorer=outcome", "requests.split=train",
                        *self._problems(first, block))  # fmt: skip
            trees += in_order(read_records(SearchTree, output.with_suffix(".trees.jsonl")))
            first += block
        kept = trees[: nearest_prefix([tree.num_tokens for tree in trees], budget)]
        path, values = self.folder / way / "trees.jsonl", self.folder / way / "values.jsonl"
        if not path.is_file():
            write_records(path, kept)
        self.stage("values/value_trees", path, values)
        return values, sum(tree.num_tokens for tree in kept)

    def _problems(self, first: int, number: int) -> tuple[str, str]:
        return f"requests.first={self.seed * STRIDE + first}", f"requests.limit={number}"


def in_order(trees: Sequence[SearchTree]) -> list[SearchTree]:
    """Return trees by the number of their problem: they are written as searches end, the short ones first."""
    return sorted(trees, key=lambda tree: int(tree.problem_id.rpartition("-")[2]))


def nearest_prefix(costs: Sequence[int], budget: int) -> int:
    """Return how many of the first costs have the sum nearest to the budget, at least one; the fewer of two that are
    equally near."""
    sums = list(accumulate(costs))
    return 1 + min(range(len(sums)), key=lambda at: (abs(sums[at] - budget), at))


def compare(own: Sequence[JudgedStep], other: Sequence[JudgedStep]) -> Interval | None:
    """Return how far the AUC of one model's scores is above that of another's, with an interval over problems. Raises
    ValueError where they do not score the same steps."""
    for one, two in zip(own, other, strict=True):
        if (one.problem_id, one.step, one.is_right) != (two.problem_id, two.step, two.is_right):
            raise ValueError(f"a step of problem {one.problem_id} is scored by one model alone")
    truth = [step.is_right for step in own]

    def above(weights: Any) -> float | None:
        first, second = (auc([step.score for step in steps], truth, weights) for steps in (own, other))
        return None if first is None or second is None else first - second

    return resampled([step.problem_id for step in own], above)


def run_data(
    cell: Cell, policy: str, seeds: Sequence[int], labelled: int, number: int, results: Path
) -> list[TreeDataRecord]:
    """Make the records of a cell that are missing; `number` dev problems are scored. Raises BadInput on a record of
    another size (those of a trial are no figures), or of another policy for the same seed."""
    made: list[TreeDataRecord] = []
    missing: list[tuple[int, str]] = []
    for seed, way in product(seeds, [INDEPENDENT, *TREES]):
        path = _path(results, cell, way, seed)
        if not path.is_file():
            missing.append((seed, way))
            continue
        found = read_one(path, TreeDataRecord)
        if (found.labelled, found.scored) != (labelled, number):
            raise BadInput(f"{path} is of --labelled {found.labelled} --problems {found.scored}: remove it, or ask for "
                           "these")  # fmt: skip
    if not missing:
        return made
    check_policy(read(results, TreeDataRecord), cell.name, seeds, weights(policy))
    with serve(policy, "partial_block_cache") as server:
        for seed, way in missing:
            folder = FOLDER / "data" / f"{cell.name}-{labelled}-{number}-{seed}"
            labels = Labelling(cell, policy, seed, labelled, folder, server.base_url)
            record = measure(labels, way, number)
            keep(record, _path(results, cell, way, seed))
            print(record, flush=True)
            made.append(record)
    return made


def dev_solutions(labels: Labelling, number: int) -> Path:
    """Return 8 solutions of each of so many dev problems, the same for all seeds."""
    path = FOLDER / "data" / f"{labels.cell.name}-dev-{number}.jsonl"
    labels.sample(path, "trajectories", "requests.split=dev", f"requests.limit={number}", "seed=0")
    return path


def measure(labels: Labelling, way: str, number: int) -> TreeDataRecord:
    """Label, train, score and compare with the truth, and, where labels are of trees, with independent completions."""
    solutions = dev_solutions(labels, number)
    values, tokens = labels.values(way)
    steps = judged(labels, way, solutions)
    other = None if way == INDEPENDENT else judged(labels, INDEPENDENT, solutions)
    found = measures(steps)
    rows = read_records(StepValues, values)
    logged = (labels.folder / way / "prm" / "metrics.jsonl").read_text().splitlines()
    return TreeDataRecord(
        cell=labels.cell.name,
        way=way,
        seed=labels.seed,
        labelled=labels.labelled,
        scored=number,
        tokens=tokens,
        problems=len({row.problem_id for row in rows}),
        responses=len(rows),
        labelled_steps=num_labelled(rows),
        updates=max(json.loads(line)["step"] for line in logged),
        auc=found["inner_auc"],
        index_auc=found["index_auc"],
        above_independent=None if other is None else compare(steps, other),
        origin=origin(weights(labels.policy)),
    )


def num_labelled(rows: Sequence[StepValues]) -> int:
    """Return how many distinct inner steps have a label."""
    return len({(row.problem_id, tuple(row.response_ids[:end])) for row in rows
                for end, label in zip(row.step_ends[:-1], row.labels, strict=False) if label is not None})  # fmt: skip


def judged(labels: Labelling, way: str, solutions: Path) -> list[JudgedStep]:
    """Return the inner steps of the solutions, scored by the model of a way and judged by the task."""
    cell, folder = labels.cell, labels.folder / way
    values, _ = labels.values(way)
    scores = folder / "scores.jsonl"
    run_program(labels.folder / "programs.log", "trainer_base_ds_mul.py", "-cn", f"exp/reward/{cell.name}",
                f"output_dir={folder / 'prm'}", f"model.path={labels.policy}", f"examples.path={values}",
                f"seed={labels.seed}", "examples.part=all", "eval_examples=null")  # fmt: skip
    labels.stage("prm/score_steps", solutions, scores, f"stage.model={folder / 'prm' / 'model'}")
    task = build(compose_config(SampleConfig, "api/vllm/trajectories", [*cell.task, "policy=p", "output=o"]).task)
    context = StageContext(task, folder / "truth.json", 60)
    return CompareWithTruth(str(scores)).judged_steps(str(solutions), context)


def _path(results: Path, cell: Cell, way: str, seed: int) -> Path:
    return results / f"{cell.name}-{way}-{seed}.json"


def data_parts(records: Sequence[TreeDataRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, the table): of every cell and way of trees the AUC above that of independent completions, seed
    by seed."""
    figures: dict[str, Any] = {}
    for cell, way in dict.fromkeys((row.cell, row.way) for row in records if row.above_independent):
        gaps = [row.above_independent["mean"] for row in records
                if (row.cell, row.way) == (cell, way) and row.above_independent]  # fmt: skip
        unit = "AUC of inner steps"
        figures[f"{cell}_{way}_labels_minus_independent"] = figure_above_zero(mean_over_seeds(gaps), unit, HOW)
    columns = ["cell", "labels", "seed", "AUC of inner steps", "of their number alone", "above independent",
               "generated tokens", "problems", "responses", "labelled inner steps", "updates", "machine"]  # fmt: skip
    table = [[row.cell, row.way, row.seed, _text(row.auc), f"{row.index_auc['mean']:.3f}",
              _text(row.above_independent), row.tokens, row.problems, row.responses, row.labelled_steps, row.updates,
              row.origin.machine or NOT_RECORDED]
             for row in sorted(records, key=lambda row: (row.cell, row.seed, row.way))]  # fmt: skip
    return figures, {"title": "Labels of trees beside independent completions", "columns": columns, "rows": table}


def _text(found: Interval | None) -> str:
    return "" if found is None else f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
