"""StepValues → JSON: whether the labels carry signal, with the numbers and the remedy, before training on them.

`verdict` is "carries signal", "weak" or "none" by the rule that the document holds, `remedy` one line with the numbers
(empty where there is signal), `figures` those of `values.label_reliability` with 95 % intervals over problems, `steps`
a row per step index, `labels` "soft" or "hard" (labels are 0 and 1 where values are not), `low_gain_share` the share of
steps whose values are too small for soft labels. Weak labels are warned of. Labels whose reliability is below
`smallest_reliability`, interval and all, end the stage with exit code 2.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput, StepValues
from espalier.data.row_index import ProblemRows
from espalier.pipeline.evaluation.intervals import Interval
from espalier.pipeline.prm.step_score_metrics import figure_intervals
from espalier.pipeline.stage import StageContext
from espalier.values.label_reliability import (
    LOW_GAIN,
    LOW_GAIN_SHARE,
    NONE,
    RULE,
    SIGNAL,
    WEAK_AUC,
    WEAK_BELOW,
    CountedState,
    SignalSums,
    completions_for,
    counted_states,
    low_gain_share,
    sum_problems,
    verdict,
)
from espalier.values.value_prior import ValuePrior, fit_prior

log = logging.getLogger("stage")

DRAWS = 2_000
MIN_PROBLEMS = 20  # intervals over fewer problems are too narrow to refuse anything
UNKNOWN = "not known"


@dataclass(frozen=True)
class LabelSignal:
    """The input is step values with the counts of their completions."""

    smallest_reliability: float = 0.2
    """labels are refused where the 95 % interval of the lower of `reliability` and `within_trajectory` is all below it
    (20 problems or more); 0 refuses nothing. At 0.2 five times as many labels are needed as without noise"""

    def __post_init__(self) -> None:
        if not 0 <= self.smallest_reliability < 1:
            raise BadInput(
                f"stage.smallest_reliability must be from 0 (refuses nothing) to below 1, got "
                f"{self.smallest_reliability}"
            )

    def inputs(self) -> list[str]:
        """None beside the step values."""
        return []

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the document. Raises BadInput where the labels are refused."""
        num_few = num_unlabelled = 0
        kinds = set[str]()
        with ProblemRows(context.output) as rows:
            rows.add(StepValues, input_path)

            def read() -> Iterator[list[CountedState]]:
                nonlocal num_few, num_unlabelled
                num_few = num_unlabelled = 0
                for problem in rows.problems_by_id():
                    every: list[StepValues] = rows.rows(0, problem)
                    own = [row for row in every if any(label is not None for label in row.labels[:-1])]
                    num_unlabelled += len(every) - len(own)
                    kinds.update(_kinds(own))
                    states, few = counted_states(own)
                    num_few += few
                    if states:
                        yield states

            document = describe_signal(sum_problems(read), is_soft="hard" not in kinds or "soft" in kinds)
        document["states_with_fewer_than_two_completions"] = num_few
        if num_unlabelled:
            document["trajectories_without_inner_labels"] = num_unlabelled  # nothing is trained on their states
        context.counts.update(states=document["states"], verdict=document["verdict"])
        for name in ("reliability", "within_trajectory", "expected_auc", "share_zero"):
            if document["figures"].get(name):
                context.counts[name] = document["figures"][name]["mean"]
        line = f"{input_path}: the labels' verdict is '{document['verdict']}'"
        high = document["read"]["high"] if document["read"] else 0.0
        is_enough = document["problems"] >= MIN_PROBLEMS and document["verdict"] != UNKNOWN
        if self.smallest_reliability and is_enough and high < self.smallest_reliability:
            why = document["remedy"] or f"their reliability is at most {high:.2f} (the upper end of its interval)"
            raise BadInput(
                f"{line}: {why}. Refused before training; stage.smallest_reliability=0 trains on them anyway"
            )
        if document["verdict"] != SIGNAL:
            log.warning("%s: %s", line, document["remedy"])
        elif not is_enough:
            log.warning("%s: '%s' rests on %d problems, whose intervals are too narrow: sample %d or more", input_path,
                        SIGNAL, document["problems"], MIN_PROBLEMS)  # fmt: skip
        return document


def _kinds(rows: Sequence[StepValues]) -> set[str]:
    """Return what inner labels show: "soft" where one is no 0 or 1, "hard" where one is and its value is not."""
    inner = [pair for row in rows for pair in zip(row.labels[:-1], row.values[:-1], strict=True)]
    return {
        "soft" if label not in (0, 1) else "hard"
        for label, value in inner
        if label is not None and (label not in (0, 1) or value not in (0, 1, None))
    }


def describe_signal(sums: SignalSums, is_soft: bool = True) -> dict[str, Any]:
    """Return the document on the states of these sums, whose labels are soft or hard; its verdict is "not known" where
    no two of them can be compared, or two of one problem alone."""
    number = sums.num_states
    figures: dict[str, Any] = figure_intervals(sums.table, sums.figures, draws=DRAWS) if number else {}
    known = [figures[name] for name in ("reliability", "within_trajectory") if figures.get(name)]
    read: Interval | None = min(known, key=lambda one: one["mean"]) if known else None
    per_state = sums.num_completions / number if number else None
    steps = sums.step_figures() if number else []
    document = {
        "verdict": UNKNOWN,
        "remedy": "",
        "rule": RULE,
        "read": read,
        "problems": len(sums.table),
        "states": number,
        "completions_per_state": per_state,
        "figures": figures,
        "labels": "soft" if is_soft else "hard",
        "low_gain_share": low_gain_share(steps) if steps else None,
        "steps": steps,
    }
    if read is None or per_state is None:
        document["verdict"] = NONE if number > 1 else UNKNOWN
        document["remedy"] = _remedy_alike(figures) if number > 1 else (
            "no two states have two completions or more: sample params.n=2 or more per state"
        )  # fmt: skip
        return document
    prior = fit_prior(figures["mean_value"]["mean"], figures["value_variance"]["mean"])
    figures["expected_auc"] = _expected_auc(figures, per_state)
    if len(sums.table) == 1:
        document["remedy"] = "one problem does not show how much the labels of others differ: sample more problems"
        return document
    low_gain = (low_gain_share(steps) or 0.0) if is_soft else 0.0
    document["verdict"] = verdict(read["mean"], read["low"], read["high"], figures["expected_auc"]["mean"], low_gain)
    if document["verdict"] != SIGNAL:
        only_scale = verdict(read["mean"], read["low"], read["high"], figures["expected_auc"]["mean"], 0.0) == SIGNAL
        remedies = [] if only_scale else [_remedy(figures, read, per_state, prior, steps)]
        if low_gain >= LOW_GAIN_SHARE and document["verdict"] != NONE:
            remedies.append(_remedy_scale(low_gain, figures["mean_value"]["mean"]))
        document["remedy"] = "; ".join(remedies)
    return document


def _expected_auc(figures: dict[str, Any], num_completions: float) -> Interval:
    """Return the expected AUC of the labels, its interval by the ends of the interval of the values' variance."""
    variance = figures["value_variance"]
    priors = {name: fit_prior(figures["mean_value"]["mean"], variance[name]) for name in ("mean", "low", "high")}
    k = max(2, round(num_completions))
    row = {name: round(prior.expected_auc(k), 5) if prior else 0.5 for name, prior in priors.items()}
    return {**row, "n": variance["n"]}


def _remedy_alike(figures: dict[str, Any]) -> str:
    mean = figures["mean_value"]["mean"]
    rest = "train the policy first, or take easier problems" if mean < 0.5 else "take harder problems"
    return f"all labels are {mean:g}, so that there is nothing to learn: {rest}"


def _remedy_scale(low_gain: float, mean: float) -> str:
    """Labels relative to a prompt whose value is near 1 call nearly everything good."""
    way = (
        "take labels made hard by what each prompt is worth (labels=relative of scripts/process_rewards.sh, or "
        "values/estimate_values stage.estimator=smoothed stage.label=relative stage.threshold=0.5)"
    )
    return (
        f"at {100 * low_gain:.0f} % of the steps a reward model that knew the values would lower its "
        f"loss by less than {LOW_GAIN:g} nats, from which heads were seen to learn nothing: "
        f"{way if mean < 0.5 else 'take harder problems'}"
    )


def _remedy(
    figures: dict[str, Any], read: Interval, num: float, prior: ValuePrior | None, steps: Sequence[dict[str, Any]]
) -> str:
    mean, zero, one = (figures[name]["mean"] for name in ("mean_value", "share_zero", "share_one"))
    for_r = completions_for(WEAK_BELOW, read["mean"], num)
    for_auc = prior.completions_for(WEAK_AUC) if prior else None
    facts = (
        f"success from a state is {100 * mean:.0f} %, {100 * zero:.0f} % of states have 0 of {num:.3g} right and "
        f"{100 * one:.0f} % all; reliability {read['mean']:.2f} [{read['low']:.2f}, {read['high']:.2f}], expected AUC "
        f"{figures['expected_auc']['mean']:.2f}"
    )
    if for_r is None or for_auc is None:
        more = "values do not differ beyond the completions' noise, so no number of completions is known to be enough"
    else:
        more = (f"complete more per state (params.n >= {max(for_r, for_auc)}: reliability {WEAK_BELOW:g} and AUC "
                f"{WEAK_AUC:g})")  # fmt: skip
    ways = [more]
    least = 0.05 * sum(row["states"] for row in steps)  # fewer states than that show no reliability
    late = [row for row in steps if row["states"] >= least and (row["reliability"] or 0) >= WEAK_BELOW]
    if mean < 0.5 and late:
        first = max(late, key=lambda row: row["reliability"])
        ways.append(f"spend them on late states (values/cut_states stage.first_step={first['step']}: after that step "
                    f"the reliability is {first['reliability']:.2f}) or on states of solutions that succeeded "
                    "(labels=contrast of scripts/process_rewards.sh)")  # fmt: skip
    ways.append("train the policy first" if mean < 0.5 else "take harder problems")
    return f"{facts}: {', or '.join(ways)}"
