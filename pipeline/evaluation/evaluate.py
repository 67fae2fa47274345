"""Evaluate a policy: accuracy, pass@k, votes, best of n, robustness, lengths; one JSON, one table, predictions.

Accuracies are means over the problems published with their answer; intervals are bootstrapped over problems
(`pipeline.evaluation.intervals`). What is written beside the output as `<stem>.predictions.jsonl` holds every problem,
those without a published answer too: what was answered, and how the samples were voted on. Problems are worked on one
by one (`data.row_index`): what is kept of a problem is one number per figure.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from textwrap import shorten
from typing import Any

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Problem
from espalier.data.row_index import ProblemRows
from espalier.pipeline.evaluation.evaluation_inputs import (
    ProblemSamples,
    SampleRows,
    check_known,
    named_paths,
    read_problems,
)
from espalier.pipeline.evaluation.evaluation_table import Row, make_by_n_table, make_row, make_rows, make_table
from espalier.pipeline.evaluation.intervals import Interval, bootstrap_interval, interval, intervals
from espalier.pipeline.evaluation.option_orders import Choice, choose, read_order, robustness
from espalier.pipeline.evaluation.problem_figures import MEASURES, Figures, PerProblem
from espalier.pipeline.evaluation.rankings import Ranking, ScoreFile
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import check_aggregate
from espalier.rewards.votes import (
    MAX_COMPARISONS,
    answer_classes,
    best_index,
    best_of,
    is_right,
    majority_answer,
    majority_vote,
    winning_answer,
)

__all__ = ["Evaluate", "Prediction", "best_of", "bootstrap_interval", "interval", "majority_vote"]

log = logging.getLogger("stage")

_TOGETHER = 16  # problems whose answers are compared at a time


@dataclass(frozen=True)
class Prediction:
    """What a policy answered to a problem."""

    id: str
    """the problem's id"""
    answer: str | None
    """the greedy one where there is one, else the majority's"""
    is_correct: bool | None
    """whether it is right; null where the problem is published without its answer"""
    greedy_answer: str | None
    """of the greedy response"""
    majority_answer: str | None
    """of most samples"""
    best_of: dict[str, str | None]
    """answer of the sample that ranks first, by name of the scorer and its aggregate"""
    weighted: dict[str, str | None]
    """answer with the largest weighted vote, by the same names"""
    answers: list[str | None]
    """of the samples in their order"""
    num_correct: int | None
    """right samples; null where the problem is published without its answer"""


@dataclass(frozen=True)
class Evaluate:
    """The input: n samples per problem. All else may be empty.

    `greedy`: one greedy trajectory a problem. `scores`: StepScores (or outcome scores) of the samples, one file
    or several by name; `aggregates` say how steps make one score (`rewards.aggregate`). `problems`: Problem
    rows, for a breakdown by info.subject and info.level. `option_orders`: name → {trajectories, problems}, the
    same problems with their options in another order.
    """

    greedy: str = ""
    scores: Any = ""
    aggregates: tuple[str, ...] | list[str] = ("product", "minimum", "last")
    problems: str = ""
    option_orders: Any = ""

    def inputs(self) -> list[str]:
        """Return every file named here."""
        orders = [path for row in self._orders().values() if isinstance(row, Mapping) for path in row.values()]
        named = named_paths(self.scores, "stage.scores").values()
        return [str(path) for path in (self.greedy, *named, self.problems, *orders) if path]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return one JSON document; a figure is `{"mean", "low", "high", "n"}`, mean and 95 % interval over n problems.

        `accuracy` and `pass_at_k` by metric, with `per_problem` values of the labelled `problems`; `by_n`, what 1, 2,
        4, ... of the samples would have given by each vote and ranking (`rewards.votes_by_n`); `responses` of samples
        and greedy (`unparseable`, `cut_by_length`, tokens, steps, characters); `breakdown` by subject and level;
        `last_minimum` of each file of step scores, the share of solutions whose lowest score is the last step's;
        `option_orders` (`pipeline.evaluation.option_orders`); numbers of problems; `table` for reading.
        """
        for how in self.aggregates:
            check_aggregate(how)
        problems = read_problems(self.problems) if self.problems else {}
        with ProblemRows(context.output) as rows:
            samples = SampleRows(rows, input_path, self.greedy)
            files = [ScoreFile(rows, path, name, self.aggregates)
                     for name, path in named_paths(self.scores, "stage.scores").items()]  # fmt: skip
            labels = self._look(samples, files, problems, context)
            orders = self._read_orders(labels, problems, context)
            figures = Figures(samples.num_samples)
            predictions = context.output.with_name(context.output.stem + ".predictions.jsonl")
            write_records(predictions, self._predictions(samples, files, problems, figures, orders, context))
        accuracies, coverage, responses = figures.accuracies, figures.coverage, figures.responses()
        result: dict[str, Any] = {
            "accuracy": intervals(accuracies),
            "pass_at_k": intervals(coverage),
            "by_n": figures.by_n(),
            "responses": responses,
            "unparseable": responses["samples"]["unparseable"]["mean"],
            "num_samples": samples.num_samples,
            "num_problems": samples.num_problems,
            "num_unlabelled": samples.num_problems - len(figures.labelled),
            "num_refused": samples.num_refused,
            "num_not_sampled": len(problems) - samples.num_problems if problems else 0,
            "breakdown": _breakdown(accuracies, figures.labelled, problems),
            "last_minimum": {file.name: file.last_minimum for file in files if file.last_minimum is not None},
            "option_orders": robustness(orders, figures.labelled) if orders else None,
            "problems": figures.labelled,
            "per_problem": {**accuracies, **coverage},
        }
        result["table"] = make_table(_rows(result)) | {"by_n": make_by_n_table(result["by_n"], result["pass_at_k"])}
        self._tell(result, context)
        return result

    def _look(
        self, samples: SampleRows, files: Sequence[ScoreFile], problems: Mapping[str, Problem], context: StageContext
    ) -> dict[str, bool]:
        """Look at every problem's scores once; problem → whether it is published with its answer, where options are
        asked for in other orders."""
        labels: dict[str, bool] = {}
        for one in samples:
            if problems:
                check_known(one.id, problems, self.problems, samples.path)
            for file in files:
                file.look(one)
            if self.option_orders:
                labels[one.id] = one.is_labelled
        for file in files:
            file.settle(context)
        return labels

    def _predictions(
        self,
        samples: SampleRows,
        files: Sequence[ScoreFile],
        problems: Mapping[str, Problem],
        figures: Figures,
        orders: Mapping[str, dict[str, Choice]],
        context: StageContext,
    ) -> Iterator[Prediction]:
        """Yield every problem's, and fill the figures and what was chosen under the given order. Distinct answers are
        compared several problems at a time; what votes ask afterwards is known."""
        num_apart, done, problems_left = [], 0, iter(samples)
        with (
            context.progress("compare answers", samples.num_problems, "problem") as progress,
            ThreadPoolExecutor(8) as threads,
        ):
            while some := list(islice(problems_left, _TOGETHER)):
                for classes in threads.map(answer_classes, (one.group for one in some)):
                    num_apart += [classes.num_apart] if classes.num_apart else []
                for one in some:
                    rankings = [ranking for file in files for ranking in file.rankings(one)]
                    figures.add(one, rankings)
                    if orders:
                        orders["given"][one.id] = choose(one, problems, self.problems)
                    yield make_prediction(one, rankings)
                done += len(some)
                progress.update(done)
        if num_apart:
            context.counts["problems_with_uncompared_answers"] = len(num_apart)
            log.warning("%d problems have more distinct answers than %d comparisons reach: %d answers vote as they are "
                        "written", len(num_apart), MAX_COMPARISONS, sum(num_apart))  # fmt: skip

    def _tell(self, result: dict[str, Any], context: StageContext) -> None:
        context.counts["problems"] = result["num_problems"]
        context.counts["unparseable"] = result["unparseable"]
        for name, said in (
            ("num_unlabelled", "are published without an answer: predictions are written, no accuracy is claimed"),
            ("num_refused", "were refused when they were sampled: they are in no figure"),
            ("num_not_sampled", f"of {self.problems} have no samples: they are in no figure"),
        ):
            if result[name]:
                context.counts[name.removeprefix("num_")] = result[name]
                log.warning("%d problems %s", result[name], said)
        table = result["table"]
        log.info("%s\n%s%s", context.output, table["plain"], "\n" + table["by_n"]["plain"] if result["by_n"] else "")

    def _orders(self) -> dict[str, Any]:
        if self.option_orders and not isinstance(self.option_orders, Mapping):
            raise BadInput(f"stage.option_orders must map names to files, got {str(self.option_orders)[:80]!r}")
        return {str(name): paths for name, paths in dict(self.option_orders or {}).items()}

    def _read_orders(
        self, labels: Mapping[str, bool], problems: Mapping[str, Problem], context: StageContext
    ) -> dict[str, dict[str, Choice]]:
        """Return what was chosen under the other orders, behind an empty one for the given order; {} without any."""
        named = self._orders()
        if not named:
            return {}
        if not problems:
            raise BadInput("stage.option_orders needs stage.problems: the problems of the input, with their options")
        if "given" in named:
            raise BadInput("stage.option_orders: 'given' is the input itself: choose another name")
        others = {name: read_order(paths, name, labels, context.output) for name, paths in named.items()}
        return {"given": {}, **others}


def _labels(problem: Problem, name: str) -> list[str]:
    """Return the problem's values of info.subject or info.level; `not given` where it has none."""
    value = problem.info.get(name)
    values = value if isinstance(value, list) else [value]
    return [str(item) for item in values if item not in (None, "")] or ["not given"]


def _breakdown(
    accuracies: PerProblem, labelled: Sequence[str], problems: Mapping[str, Problem]
) -> dict[str, dict[str, dict[str, Interval]]]:
    """`{"subject": {value: {metric: interval}}, "level": ...}`; what no problem says is left out."""
    breakdown: dict[str, dict[str, dict[str, Interval]]] = {}
    for name in ("subject", "level") if problems and labelled else ():
        positions: dict[str, list[int]] = defaultdict(list)
        for place, problem in enumerate(labelled):
            for value in _labels(problems[problem], name):
                positions[value].append(place)
        if set(positions) != {"not given"}:
            breakdown[name] = {
                value: intervals({metric: [row[i] for i in positions[value]] for metric, row in accuracies.items()})
                for value in sorted(positions, key=lambda text: text.rjust(8) if text.isdigit() else text)
            }
    return breakdown


def _rows(result: Mapping[str, Any]) -> list[Row]:
    """Return the table: accuracies, pass@k, robustness, responses, then greedy, mean and majority by group."""
    rows = make_rows({**result["accuracy"], **result["pass_at_k"]})
    orders = result["option_orders"]
    if orders:
        rows += make_rows(orders["accuracy"], suffix=" (order of options)")
        rows += [make_row(name, orders[name]) for name in ("right_under_all", "right_under_any") if orders[name]]
        rows.append(make_row("flip_rate", orders["flip_rate"]))
    for kind, figures in result["responses"].items():
        rows += [make_row(f"{name}, {kind}", figure, MEASURES[name][0]) for name, figure in figures.items()]
    short = ("greedy", "mean", f"majority_{result['num_samples']}")
    for group, values in result["breakdown"].items():
        for value, figures in values.items():
            shown = {name: figures[name] for name in short if name in figures}
            rows += make_rows(shown, suffix=f", {group} {shorten(value, 60, placeholder=' ...')}")
    return rows


def make_prediction(samples: ProblemSamples, rankings: Sequence[Ranking]) -> Prediction:
    """Return a problem's predictions by every way of choosing."""
    group, greedy = samples.group, samples.greedy
    majority = majority_answer(group)
    right = greedy.is_correct if greedy is not None else bool(is_right(majority, group))
    return Prediction(
        id=samples.id,
        answer=greedy.answer if greedy is not None else majority,
        is_correct=right if samples.is_labelled else None,
        greedy_answer=greedy.answer if greedy is not None else None,
        majority_answer=majority,
        best_of={row.name: group[best_index(row.scores_of(group))].answer for row in rankings},
        weighted={row.name: winning_answer(group, row.weights_of(group)) for row in rankings},
        answers=[t.answer for t in group],
        num_correct=sum(t.is_correct for t in group) if samples.is_labelled else None,
    )
