"""Does a policy choose the same option when the options stand in another order?

Every order is a file of trajectories and the file of problems it was sampled from. `Problem.info["option_order"]`
says which option stands where: a list whose i-th number is the place (from 0) that the option now at place i had
as published; without it the order is the published one. Problem ids are the same under every order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput, Problem
from espalier.data.row_index import ProblemRows
from espalier.pipeline.evaluation.evaluation_inputs import ProblemSamples, SampleRows, check_known, read_problems
from espalier.pipeline.evaluation.intervals import Interval, interval, intervals
from espalier.rewards.votes import is_right, majority_answer

_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?", re.ASCII)


@dataclass(frozen=True)
class Choice:
    """What was chosen under one order: the option's published place, None where no option was."""

    option: int | None
    is_right: float


def option_order(problem: Problem, place: str) -> list[int]:
    """Return the published place of the option at every place. Raises BadInput where that is no permutation."""
    order = problem.info.get("option_order")
    if order is None:
        return list(range(len(problem.options)))
    size = len(problem.options)
    if not isinstance(order, list) or any(type(i) is not int for i in order) or sorted(order) != list(range(size)):
        raise BadInput(f"{place}: problem '{problem.id}': info.option_order must hold 0 to {size - 1} once each, "
                       f"got {str(order)[:60]}")  # fmt: skip
    return order


def chosen_option(answer: str | None, order: Sequence[int]) -> int | None:
    """Return the published place of the option whose letter was answered; None for no answer or another text."""
    match = _LETTER.fullmatch(answer.strip()) if answer is not None else None
    index = ord(match[1].upper()) - ord("A") if match else -1
    return order[index] if 0 <= index < len(order) else None


def choose(samples: ProblemSamples, problems: Mapping[str, Problem], place: str) -> Choice:
    """Return what was chosen: the answer of the greedy solution, or the majority's."""
    answer = majority_answer(samples.chosen)
    option = chosen_option(answer, option_order(problems[samples.id], place))
    return Choice(option, is_right(answer, samples.chosen))


def read_order(paths: Mapping[str, Any], name: str, labels: Mapping[str, bool], beside: Path) -> dict[str, Choice]:
    """Problem → what was chosen under the order `name`; the index of its rows lies beside a file. Raises BadInput where
    its problems are not those of `labels`."""
    setting = f"stage.option_orders.{name}"
    if not isinstance(paths, Mapping) or set(paths) != {"trajectories", "problems"}:
        raise BadInput(f"{setting} must name two files, trajectories and problems, got {str(paths)[:80]!r}")
    with ProblemRows(beside) as rows:
        samples = SampleRows(rows, paths["trajectories"])
        here = {one.id: one.is_labelled for one in samples}
        if here.keys() != labels.keys():
            problem = min(here.keys() ^ labels.keys())
            raise BadInput(f"{samples.path}: not the same problems as the input ('{problem}' is only in one)")
        other = next((problem for problem, is_labelled in here.items() if is_labelled != labels[problem]), None)
        if other is not None:
            raise BadInput(f"{samples.path}: problem '{other}' has a gold answer in one order only")
        problems = read_problems(paths["problems"])
        for problem in here:
            check_known(problem, problems, paths["problems"], samples.path)
        return {one.id: choose(one, problems, paths["problems"]) for one in samples}


def robustness(orders: Mapping[str, Mapping[str, Choice]], labelled: Sequence[str]) -> dict[str, Any]:
    """`{"accuracy": {order: interval}, "right_under_all", "right_under_any", "flip_rate", "num_orders"}`.

    `flip_rate` is the share of problems, without gold ones included, whose chosen option is not the same under
    every order; no answer counts as a choice of its own. Accuracies are those of the `labelled` problems, None
    where there is none.
    """
    problems = list(next(iter(orders.values())))
    flips = [float(len({choices_of[problem].option for choices_of in orders.values()}) > 1) for problem in problems]
    rights = {name: [choices_of[problem].is_right for problem in labelled] for name, choices_of in orders.items()}
    accuracy: dict[str, Interval] = intervals(rights) if labelled else {}
    columns = list(zip(*rights.values(), strict=True))
    return {
        "num_orders": len(orders),
        "accuracy": accuracy,
        "right_under_all": interval([min(column) for column in columns]) if labelled else None,
        "right_under_any": interval([max(column) for column in columns]) if labelled else None,
        "flip_rate": interval(flips),
    }
