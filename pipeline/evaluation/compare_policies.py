"""Two policies on the same problems: paired differences with 95 % intervals, and McNemar's exact test.

The input is the evaluation.json of one policy, `baseline` that of the other; differences are policy minus
baseline, problem by problem. Where every problem is right or wrong (greedy, a vote), the p value of McNemar's
exact test (1947; two-sided) tells whether the policies differ: under no difference, a problem that only one of
them solves is as likely the one's as the other's.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.pipeline.evaluation.evaluation_table import to_markdown, to_plain
from espalier.pipeline.evaluation.intervals import intervals
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

HEADER = ("metric", "policy", "baseline", "difference", "low", "high", "p", "n")


@dataclass(frozen=True)
class PolicyFigures:
    """`per_problem[metric][i]` is the policy's accuracy on `problems[i]`."""

    path: str
    problems: list[str]
    per_problem: dict[str, list[float]]


def mcnemar_p(only_policy: int, only_baseline: int) -> float:
    """Return two-sided exact p value of so unequal a split of the problems that only one of the two solves.

    Twice the binomial tail at 1/2, at most 1; without such problems 1.
    """
    discordant = only_policy + only_baseline
    tail = term = 1
    for k in range(min(only_policy, only_baseline)):
        term = term * (discordant - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << discordant))


def read_figures(path: str) -> PolicyFigures:
    """Return what a comparison needs of an evaluation.json. Raises BadInput where it is something else."""
    place = Path(path)
    if not place.is_file():
        raise BadInput(f"{path}: no such file: evaluate the policy first (run_stage.py -cn evaluation/evaluate)")
    try:
        value = json.loads(place.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON ({error}): run the evaluation again") from None
    problems = value.get("problems") if isinstance(value, dict) else None
    per_problem = value.get("per_problem") if isinstance(value, dict) else None
    if not isinstance(problems, list) or not isinstance(per_problem, dict):
        raise BadInput(
            f"{path}: holds no problems and per_problem: give the output of run_stage.py -cn evaluation/evaluate"
        )
    if not problems or not per_problem:
        raise BadInput(f"{path}: no problem in it has a published answer: there is no accuracy to compare")
    if len({str(problem) for problem in problems}) != len(problems):
        raise BadInput(f"{path}: a problem stands twice: run the evaluation again")
    for name, values in per_problem.items():
        if not isinstance(values, list) or len(values) != len(problems) or not all(map(_is_share, values)):
            raise BadInput(f"{path}: per_problem.{name} must be {len(problems)} shares: run the evaluation again")
    return PolicyFigures(path, problems, per_problem)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1


def paired_values(policy: PolicyFigures, baseline: PolicyFigures) -> dict[str, tuple[list[float], list[float]]]:
    """Metric → (policy's values, baseline's values of the same problems), of the metrics both have.

    Raises BadInput where the problems differ, or no metric is common to both.
    """
    place = {problem: index for index, problem in enumerate(baseline.problems)}
    different = set(policy.problems) ^ set(place)
    if different:
        example = f"'{min(map(str, different))}' is only in one, {len(different)} such problems"
        raise BadInput(f"{policy.path} and {baseline.path} do not hold the same problems ({example}): evaluate both on "
                       "the same split")  # fmt: skip
    order = [place[problem] for problem in policy.problems]
    common = [name for name in policy.per_problem if name in baseline.per_problem]
    if not common:
        raise BadInput(f"{policy.path} and {baseline.path} have no metric in common: evaluate both alike")
    return {name: (policy.per_problem[name], [baseline.per_problem[name][i] for i in order]) for name in common}


def discordant(policy: Sequence[float], baseline: Sequence[float]) -> tuple[int, int] | None:
    """Return how many problems only the policy and only the baseline has right; None where values are not 0 or 1."""
    if any(value not in (0, 1) for value in (*policy, *baseline)):
        return None
    pairs = list(zip(policy, baseline, strict=True))
    return sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)


@dataclass(frozen=True)
class ComparePolicies:
    """Input: the policy's evaluation.json; `baseline`: the one it is compared with."""

    baseline: str

    def inputs(self) -> list[str]:
        """Return the baseline's evaluation."""
        return [self.baseline]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """`{"difference": {metric: interval}, "policy", "baseline": {metric: interval}, "mcnemar": {metric:
        {only_policy, only_baseline, p}}, "only_in_one": [metric], "num_problems", "table"}`."""
        policy, baseline = read_figures(input_path), read_figures(self.baseline)
        pairs = paired_values(policy, baseline)
        tests = {}
        for name, (ours, theirs) in pairs.items():
            counts = discordant(ours, theirs)
            if counts is not None:
                tests[name] = {"only_policy": counts[0], "only_baseline": counts[1], "p": mcnemar_p(*counts)}
        gaps = {name: [a - b for a, b in zip(*both, strict=True)] for name, both in pairs.items()}
        result: dict[str, Any] = {
            "difference": intervals(gaps),
            "policy": intervals({name: ours for name, (ours, _) in pairs.items()}),
            "baseline": intervals({name: theirs for name, (_, theirs) in pairs.items()}),
            "mcnemar": tests,
            "only_in_one": sorted(policy.per_problem.keys() ^ baseline.per_problem.keys()),
            "num_problems": len(policy.problems),
        }
        result["table"] = _table(result)
        context.counts["problems"] = len(policy.problems)
        context.counts["metrics"] = len(pairs)
        log.info("%s minus %s\n%s", input_path, self.baseline, result["table"]["plain"])
        return result


def _table(result: dict[str, Any]) -> dict[str, Any]:
    """Return `{"rows", "markdown", "plain"}`; accuracies in percent, differences in points."""
    rows, lines = [], []
    for name, gap in result["difference"].items():
        ours, theirs = result["policy"][name]["mean"], result["baseline"][name]["mean"]
        p = result["mcnemar"].get(name, {}).get("p")
        rows.append({"metric": name, "policy": ours, "baseline": theirs, **gap, "p": p})
        shown = [f"{100 * gap[key]:+.1f}" for key in ("mean", "low", "high")]
        p_value = "" if p is None else f"{p:.2g}"
        lines.append([name, f"{100 * ours:.1f} %", f"{100 * theirs:.1f} %", *shown, p_value, str(gap["n"])])
    return {"rows": rows, "markdown": to_markdown(HEADER, lines), "plain": to_plain(HEADER, lines)}
