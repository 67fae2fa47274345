"""Completion → StepLabels: values by a choice of estimators, labels by a rule, and what to do with noisy ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from espalier.data.examples.label_balance import check_balance, label_balance
from espalier.data.examples.step_labels import StepLabels, inner_steps
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.data.steps import check_ends
from espalier.pipeline.stage import StageContext
from espalier.values.first_error import search_state, states_on_right_ways
from espalier.values.label_noise import NoiseRule
from espalier.values.labels import LabelRule, wilson_interval
from espalier.values.monte_carlo import Count, StateKey, count_sampled, state_key
from espalier.values.smoothed import smoothed_values

ESTIMATORS = ("counted", "smoothed", "first_error")
Estimate = tuple[float, float, float]


@dataclass(frozen=True)
class LabelSteps:
    """Input: completions of the `states` cut from the `trajectories`, which may be of some states only.

    `estimator`: "counted" (the share of right completions of the state itself), "smoothed" (with the trajectories and
    the neighbours' completions: `values.smoothed`), or "first_error" (1 up to the first error, 0 from it on, as
    far as a bisection knows: `values.first_error`). A state that the
    estimator says nothing of has no label. `label`, `threshold`, `num_classes` are those of
    `values.labels.LabelRule`; `noise`, `max_width`, `min_confidence`, `tolerance` those of
    `values.label_noise.NoiseRule`. `has_terminal`: whether the last step is labelled, by the outcome.

    Labels of inner steps that are all alike are said, and refused where the values contradict them
    (`data.examples.label_balance`).
    """

    trajectories: str
    states: str
    estimator: str = "counted"
    label: str = "soft"
    threshold: float = 0.0
    num_classes: int = 5
    noise: str = "keep"
    max_width: float = 0.6
    min_confidence: float = 0.75
    tolerance: int = 2
    has_terminal: bool = True

    def inputs(self) -> list[str]:
        """Both files."""
        return [self.trajectories, self.states]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepLabels]:
        """One record a trajectory. Raises BadInput where files do not belong together, a setting is unknown or
        means nothing for the estimator, and where the labels would teach nothing."""
        rule, noise = self._rules()
        rows = read_records(Trajectory, self.trajectories)
        counts = count_sampled(read_records(State, self.states), read_records(Completion, input_path))
        estimates = self._estimates(rows, counts)
        good = states_on_right_ways(rows) if self.estimator == "first_error" else set()
        prompt_values = _prompt_values(rows)
        records: list[StepLabels] = []
        for row in rows:
            steps = _steps_of(row, counts, estimates)
            steps = steps if self.has_terminal else [*steps[:-1], _UNKNOWN][: len(steps)]
            prompt_value = prompt_values[row.problem_id]
            values, low, high = ([getattr(step, name) for step in steps] for name in ("value", "low", "high"))
            labels, weights = noise.apply(rule, values, low, high, prompt_value, row.is_correct)
            if self.estimator == "first_error":
                labels = search_state(row, counts, good).labels(len(row.steps))
                weights = [0.0 if label is None else 1.0 for label in labels]
            if not self.has_terminal and labels:
                labels, weights = [*labels[:-1], None], [*weights[:-1], 0.0]
            records.append(_record(row, steps, labels, weights, prompt_value))
        inner_labels, inner_values = inner_steps(records)
        check_balance(inner_labels, inner_values, str(context.output), "take another stage.threshold (0.5: more likely "
                      "right than wrong), soft labels, or another stage.noise")  # fmt: skip
        labels = [label for record in records for label in record.labels]
        context.counts.update(
            trajectories=len(rows),
            states_completed=len(counts),
            completions=sum(count.num_completions for count in counts.values()),
            steps=len(labels),
            labelled_steps=sum(label is not None for label in labels),
        )
        balance = label_balance(inner_labels, inner_values)
        if balance is not None:
            known = [label for label in inner_labels if label is not None]
            context.counts["mean_inner_label"] = round(sum(known) / len(known), 4)
            if balance.mean_value is not None:
                context.counts["mean_inner_value"] = round(balance.mean_value, 4)
        return records

    def _rules(self) -> tuple[LabelRule, NoiseRule]:
        """The label and the noise rule. Raises BadInput on settings that are unknown or that the estimator cannot
        have: each would do nothing, in silence."""
        if self.estimator == "pooled":
            raise BadInput("stage.estimator=pooled is no longer there: choose smoothed, which needs fewer completions")
        if self.estimator not in ESTIMATORS:
            raise BadInput(f"there is no estimator '{self.estimator}': choose from {', '.join(ESTIMATORS)}")
        rule = LabelRule(self.label, self.threshold, self.num_classes)
        noise = NoiseRule(self.noise, self.max_width, self.min_confidence, self.tolerance)
        if self.estimator == "smoothed" and not self.threshold and (self.label == "hard" or self.noise == "denoise"):
            what = "stage.label=hard" if self.label == "hard" else "stage.noise=denoise"
            raise BadInput(f"{what} of smoothed values needs stage.threshold above 0 (0.5: more likely right than "
                           "wrong): a posterior mean is never 0, so with 0 every step is good")  # fmt: skip
        if self.estimator == "first_error" and self.noise != "keep":
            raise BadInput(f"stage.noise={self.noise} does nothing to labels of stage.estimator=first_error, which "
                           "come from no value: set stage.noise=keep")  # fmt: skip
        return rule, noise

    def _estimates(self, rows: Sequence[Trajectory], counts: Mapping[StateKey, Count]) -> dict[StateKey, Estimate]:
        """(value, low, high) of the states that are known, with 95 % intervals."""
        if self.estimator in ("counted", "first_error"):
            return {key: (count.value, *wilson_interval(count.num_correct, count.num_completions))
                    for key, count in counts.items()}  # fmt: skip
        return {key: (one.value, *one.interval()) for key, one in smoothed_values(rows, counts).items()}


@dataclass(frozen=True)
class _Step:
    """What is known of the state after a step."""

    value: float | None
    low: float
    high: float
    count: Count


_UNKNOWN = _Step(None, 0.0, 1.0, Count(0, 0))


def _steps_of(row: Trajectory, counts: Mapping[StateKey, Count], estimates: Mapping[StateKey, Estimate]) -> list[_Step]:
    """One entry a step; the last is the outcome, which is known exactly."""
    check_ends(row.steps, row.step_ends, row.id)
    found: list[_Step] = []
    for end in row.step_ends[:-1]:
        key = state_key(row.problem_id, row.response_ids[:end])
        count = counts.get(key, Count(0, 0))
        found.append(_Step(*estimates[key], count) if key in estimates else _UNKNOWN)
    outcome = float(row.is_correct)
    return [*found, _Step(outcome, outcome, outcome, Count(int(row.is_correct), 1))] if row.steps else []


def _record(
    row: Trajectory, steps: Sequence[_Step], labels: list[float | None], weights: list[float], prompt_value: float
) -> StepLabels:
    return StepLabels(
        id=row.id,
        problem_id=row.problem_id,
        prompt=row.prompt,
        steps=row.steps,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        step_ends=row.step_ends,
        labels=labels,
        weights=weights,
        values=[step.value for step in steps],
        low=[step.low for step in steps],
        high=[step.high for step in steps],
        num_correct=[step.count.num_correct for step in steps],
        num_completions=[step.count.num_completions for step in steps],
        prompt_value=prompt_value,
        is_correct=row.is_correct,
    )


def _prompt_values(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Problem → the share of its trajectories that are right."""
    found: dict[str, list[bool]] = {}
    for row in rows:
        found.setdefault(row.problem_id, []).append(row.is_correct)
    return {problem_id: sum(rights) / len(rights) for problem_id, rights in found.items()}
