"""Evaluate a policy: accuracy, pass@k, votes, best of n, robustness, lengths; one JSON, one table, predictions.

Accuracies are means over the problems published with their answer; intervals are bootstrapped over problems
(`pipeline.evaluation.intervals`). What is written beside the output as `<stem>.predictions.jsonl` holds every problem,
those without a published answer too: what was answered, and how the samples were voted on.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from espalier.data.jsonl import iter_rows, write_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.pipeline.evaluation.evaluation_inputs import (
    Ranking,
    Samples,
    check_known,
    has_gold,
    named_paths,
    read_problems,
    read_rankings,
    read_samples,
)
from espalier.pipeline.evaluation.evaluation_table import Row, make_row, make_rows, make_table
from espalier.pipeline.evaluation.intervals import Interval, bootstrap_interval, interval, intervals
from espalier.pipeline.evaluation.option_orders import choices, read_order, robustness
from espalier.pipeline.prm.seen_problems import note_seen
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import check_aggregate
from espalier.rewards.votes import (
    MAX_COMPARISONS,
    answer_classes,
    best_index,
    best_of,
    by_problem,
    is_right,
    majority_answer,
    majority_vote,
    pass_at_k,
    sizes_up_to,
    weighted_vote,
    winning_answer,
)

__all__ = ["Evaluate", "Prediction", "best_of", "bootstrap_interval", "by_problem", "interval", "majority_vote"]

log = logging.getLogger("stage")

PerProblem = dict[str, list[float]]  # metric → one value a problem


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

        `accuracy` and `pass_at_k` by metric, with `per_problem` values of the labelled `problems`; `responses` of
        samples and greedy (`unparseable`, `cut_by_length`, tokens, steps, characters); `breakdown` by subject and
        level; `option_orders` (`pipeline.evaluation.option_orders`); numbers of problems; `table` for reading.
        """
        for how in self.aggregates:
            check_aggregate(how)
        samples = read_samples(input_path, self.greedy)
        problems = read_problems(self.problems) if self.problems else {}
        if problems:
            check_known(samples, problems, self.problems)
        rankings = list(self._rankings(samples, context))
        self._join_answers(samples, context)
        labelled = samples.labelled
        accuracies = _accuracies(samples, rankings) if labelled else {}
        coverage = _coverage(samples) if labelled else {}
        responses = _responses(samples)
        result: dict[str, Any] = {
            "accuracy": intervals(accuracies),
            "pass_at_k": intervals(coverage),
            "responses": responses,
            "unparseable": responses["samples"]["unparseable"]["mean"],
            "num_samples": samples.num_samples,
            "num_problems": len(samples.groups),
            "num_unlabelled": len(samples.groups) - len(labelled),
            "num_refused": samples.num_refused,
            "num_not_sampled": len(problems.keys() - samples.groups.keys()),
            "breakdown": _breakdown(accuracies, labelled, problems),
            "option_orders": self._robustness(samples, problems),
            "problems": labelled,
            "per_problem": {**accuracies, **coverage},
        }
        result["table"] = make_table(_rows(result))
        self._tell(result, context)
        predictions = context.output.with_name(context.output.stem + ".predictions.jsonl")
        write_records(predictions, (make_prediction(samples, problem, rankings) for problem in samples.groups))
        return result

    def _join_answers(self, samples: Samples, context: StageContext) -> None:
        """Compare the distinct answers of all problems, several at a time; what votes ask afterwards is known."""
        groups = list(samples.groups.values())
        with context.progress("compare answers", len(groups), "problem") as progress, ThreadPoolExecutor(8) as threads:
            num_apart = []
            for done, classes in enumerate(threads.map(answer_classes, groups), 1):
                num_apart += [classes.num_apart] if classes.num_apart else []
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
        log.info("%s\n%s", context.output, result["table"]["plain"])

    def _rankings(self, samples: Samples, context: StageContext) -> Iterator[Ranking]:
        for name, path in named_paths(self.scores, "stage.scores").items():
            yield from read_rankings(path, name, self.aggregates, samples.trajectories())
            if "scores" in next(iter_rows(path))[1]:  # outcome scores do not say it
                note_seen(samples.groups, path, context, "look better by its scores than other problems would", name)

    def _orders(self) -> dict[str, Any]:
        if self.option_orders and not isinstance(self.option_orders, Mapping):
            raise BadInput(f"stage.option_orders must map names to files, got {str(self.option_orders)[:80]!r}")
        return {str(name): paths for name, paths in dict(self.option_orders or {}).items()}

    def _robustness(self, samples: Samples, problems: Mapping[str, Problem]) -> dict[str, Any] | None:
        named = self._orders()
        if not named:
            return None
        if not problems:
            raise BadInput("stage.option_orders needs stage.problems: the problems of the input, with their options")
        if "given" in named:
            raise BadInput("stage.option_orders: 'given' is the input itself: choose another name")
        groups = {p: [t] for p, t in samples.greedy.items()} or samples.groups
        labels = {problem: has_gold(group[0].gold) for problem, group in groups.items()}
        orders = {"given": choices(groups, problems, self.problems)}
        orders |= {name: read_order(paths, name, labels) for name, paths in named.items()}
        return robustness(orders, samples.labelled)


def _accuracies(samples: Samples, rankings: Sequence[Ranking]) -> PerProblem:
    """Return accuracy by metric, one value for each labelled problem."""
    n = samples.num_samples
    groups = [samples.groups[problem] for problem in samples.labelled]
    table: PerProblem = {}
    if samples.greedy:
        table["greedy"] = [float(samples.greedy[problem].is_correct) for problem in samples.labelled]
    table["mean"] = [sum(t.is_correct for t in group) / n for group in groups]
    table[f"majority_{n}"] = [majority_vote(group) for group in groups]
    for row in rankings:
        table[f"best_of_{n}_{row.name}"] = [best_of(group, row.scores_of(group)) for group in groups]
    for row in rankings:
        table[f"weighted_{n}_{row.name}"] = [weighted_vote(group, row.weights_of(group)) for group in groups]
    return table


def _coverage(samples: Samples) -> PerProblem:
    """Return pass@k for k = 1, 2, 4, ..., n, one value for each labelled problem."""
    n = samples.num_samples
    right = [sum(t.is_correct for t in samples.groups[problem]) for problem in samples.labelled]
    return {f"pass_at_{k}": [pass_at_k(n, count, k) for count in right] for k in sizes_up_to(n)}


_MEASURES: dict[str, tuple[str, Callable[[Trajectory], float]]] = {
    "unparseable": ("share", lambda t: t.answer is None),
    "cut_by_length": ("share", lambda t: t.finish_reason == "length"),
    "response_tokens": ("tokens", lambda t: len(t.response_ids)),
    "steps": ("steps", lambda t: len(t.steps)),
    "response_chars": ("characters", lambda t: len(t.response)),
}


def _responses(samples: Samples) -> dict[str, dict[str, Interval]]:
    """`{"samples": {measure: interval}, "greedy": ...}` over all problems, labelled or not.

    Tokens are left out where a sampler returned no token ids.
    """
    kinds = {"samples": list(samples.groups.values()), "greedy": [[t] for t in samples.greedy.values()]}
    figures = {}
    for kind, groups in kinds.items():
        has_ids = all(t.response_ids or not t.response for group in groups for t in group)
        rows = {
            name: [sum(map(measure, group)) / len(group) for group in groups]
            for name, (_, measure) in _MEASURES.items()
            if has_ids or name != "response_tokens"
        }
        if groups:
            figures[kind] = intervals(rows)
    return figures


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
        rows += [make_row(f"{name}, {kind}", figure, _MEASURES[name][0]) for name, figure in figures.items()]
    short = ("greedy", "mean", f"majority_{result['num_samples']}")
    for group, values in result["breakdown"].items():
        for value, figures in values.items():
            shown = {name: figures[name] for name in short if name in figures}
            rows += make_rows(shown, suffix=f", {group} {shorten(value, 60, placeholder=' ...')}")
    return rows


def make_prediction(samples: Samples, problem: str, rankings: Sequence[Ranking]) -> Prediction:
    """Return one problem's predictions by every way of choosing."""
    group, greedy = samples.groups[problem], samples.greedy.get(problem)
    majority = majority_answer(group)
    is_labelled = has_gold(group[0].gold)
    right = greedy.is_correct if greedy is not None else bool(is_right(majority, group))
    return Prediction(
        id=problem,
        answer=greedy.answer if greedy is not None else majority,
        is_correct=right if is_labelled else None,
        greedy_answer=greedy.answer if greedy is not None else None,
        majority_answer=majority,
        best_of={row.name: group[best_index(row.scores_of(group))].answer for row in rankings},
        weighted={row.name: winning_answer(group, row.weights_of(group)) for row in rankings},
        answers=[t.answer for t in group],
        num_correct=sum(t.is_correct for t in group) if is_labelled else None,
    )
