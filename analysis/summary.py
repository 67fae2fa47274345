"""The numbers of a quick start: accuracies, paired differences between policies, the PRM's quality, seconds.

Policies are compared problem by problem, so the interval of a difference is paired and much narrower than
the two accuracies' own intervals suggest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from espalier.analysis.run_files import QUALITY, Interval, Meta, PolicyEvaluation, RewardModelQuality
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.evaluate import interval

Differences = dict[tuple[str, str], dict[str, Interval]]


def paired_difference(after: PolicyEvaluation, before: PolicyEvaluation) -> dict[str, Interval]:
    """Metric → mean of after - before over problems, for the metrics both have.

    Raises BadInput where the two do not hold the same problems.
    """
    place = {problem: index for index, problem in enumerate(before.problems)}
    if set(after.problems) != set(place) or len(after.problems) != len(before.problems):
        raise BadInput(f"{after.path} and {before.path} do not hold the same problems: evaluate both on the same split")
    differences = {}
    for name in after.per_problem:
        if name in before.per_problem:
            pairs = zip(after.problems, after.per_problem[name], strict=True)
            gaps = [value - before.per_problem[name][place[problem]] for problem, value in pairs]
            row = interval(gaps)
            differences[name] = Interval(row["mean"], row["low"], row["high"], len(gaps))
    return differences


def all_differences(evaluations: Mapping[str, PolicyEvaluation]) -> Differences:
    """(after, before) → differences: every policy against sft, and process_dpo against dpo."""
    pairs = [("process_dpo", "sft"), ("process_dpo", "dpo")]
    pairs += [(policy, "sft") for policy in evaluations if policy not in ("sft", "process_dpo")]
    return {pair: paired_difference(evaluations[pair[0]], evaluations[pair[1]]) for pair in pairs}


def summarize(
    seconds: Mapping[str, float],
    evaluations: Mapping[str, PolicyEvaluation],
    prm: RewardModelQuality,
    differences: Differences,
    metas: Sequence[Meta] = (),
) -> dict[str, Any]:
    """Return the content of summary.json; `label_signal`: what that stage counted, where the run has it."""
    return {
        "seconds": dict(seconds),
        "accuracy": {
            policy: {name: asdict(value) for name, value in evaluation.accuracy.items()}
            for policy, evaluation in evaluations.items()
        },
        "label_signal": next((meta.counts for meta in metas if meta.name == "label_signal"), None),
        "prm": {"target": prm.target}
        | {
            f"{kind}_{name}": None if (value := getattr(getattr(prm, kind), name)) is None else asdict(value)
            for kind in ("inner", "terminal")
            for name in QUALITY
        },
        "differences": {
            f"{after}_minus_{before}": {name: asdict(value) for name, value in rows.items()}
            for (after, before), rows in differences.items()
        },
    }
