"""Completion → StepValues: the value after every step of every trajectory, and the labels a reward model learns.

How a state is estimated, how a value becomes a label, and what becomes of noisy labels are three choices. As they are
set, the value is the share of right completions, and the label is the value.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from espalier.data.examples.label_balance import check_balance, inner_steps, label_balance
from espalier.data.failed_rows import failed_path, read_failed
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.pipeline.stage import StageContext
from espalier.values.first_error import search_state, states_on_right_ways
from espalier.values.label_noise import NoiseRule
from espalier.values.labels import LabelRule
from espalier.values.monte_carlo import Count, StateKey, count_completions, count_sampled, state_key
from espalier.values.smoothed import smoothed_values
from espalier.values.step_values import (
    UNKNOWN,
    StateEstimate,
    counted,
    inner_estimates,
    problem_accuracies,
    step_values,
)

log = logging.getLogger("stage")

ESTIMATORS = ("counted", "smoothed", "first_error")


@dataclass(frozen=True)
class _Sampled:
    """Right completions of the states that have any; `failed`: states that have none because their requests failed;
    `num_unparseable`: completions without an answer to read."""

    counts: dict[StateKey, Count]
    failed: set[StateKey]
    num_states: int
    num_unparseable: int


@dataclass(frozen=True)
class EstimateValues:
    """The input is the completions of the `states` that were cut from the `trajectories`.

    A state whose completions failed (`data.failed_rows` beside the input) has no value, which is not 0: the step into
    it has no label, and the trajectory stays. Labels of inner steps that are all alike are warned of, and refused
    where the values contradict them (`data.examples.label_balance`).
    """

    trajectories: str
    """the file whose steps are valued"""
    states: str
    """the states cut from it"""
    estimator: str = "counted"
    """counted: the share of right completions of the state itself, of which each must have some; smoothed: with the
    trajectories' outcomes and the neighbours' completions (`values.smoothed`); first_error: values are counted where
    there are completions, labels are 1 up to the first error and 0 from it on, as far as a bisection knows
    (`values.first_error`)"""
    label: str = "soft"
    """soft: the value; hard: 1 above `threshold`, else 0; classes: the value rounded to one of `num_classes`
    (`values.labels`)"""
    threshold: float = 0.0
    """a value above it is good, for hard labels and for denoise"""
    num_classes: int = 5
    """evenly spaced labels from 0 to 1: K completions make K + 1"""
    noise: str = "keep"
    """keep every label; drop uncertain ones; weight them by how certain they are; or denoise (`values.label_noise`)"""
    max_width: float = 0.6
    """noise=drop leaves out labels whose 95 % interval is wider"""
    min_confidence: float = 0.75
    """noise=denoise leaves out problems that the policy solves less often"""
    tolerance: int = 2
    """noise=denoise: how many steps before the first lost state carry their value relative to the prompt's"""
    has_terminal: bool = True
    """whether the last step is labelled, by the outcome"""

    def inputs(self) -> list[str]:
        """Return both files."""
        return [self.trajectories, self.states]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepValues]:
        """Return one record per trajectory. Raises BadInput where files do not belong together, sampling is not
        finished or all of it failed, a setting is unknown or means nothing for the estimator, and where the labels
        would teach nothing."""
        rule, noise = self._rules()
        rows = read_records(Trajectory, self.trajectories)
        sampled = self._read_sampled(input_path)
        estimates = self._estimates(rows, sampled)
        default = None if self.estimator == "counted" else UNKNOWN
        good = states_on_right_ways(rows) if self.estimator == "first_error" else set()
        accuracies = problem_accuracies(rows)
        records: list[StepValues] = []
        for row in rows:
            prompt_value = accuracies[row.problem_id]
            known = step_values(row, inner_estimates(row, estimates, default), prompt_value)
            if self.estimator == "first_error":
                labels = search_state(row, sampled.counts, good).labels(len(row.steps))
                weights = [float(label is not None) for label in labels]
            else:
                labels, weights = noise.apply(rule, known.values, known.low, known.high, prompt_value, row.is_correct)
            if not self.has_terminal and labels:
                labels, weights = [*labels[:-1], None], [*weights[:-1], 0.0]
            records.append(replace(known, labels=labels, weights=weights))
        self._count(records, sampled, input_path, context)
        check_balance(*inner_steps(records), str(context.output), "take another stage.threshold (0.5: more likely "
                      "right than wrong), soft labels, or another stage.noise")  # fmt: skip
        return records

    def _rules(self) -> tuple[LabelRule, NoiseRule]:
        """Return the label and the noise rule. Raises BadInput on settings that are unknown or that the estimator
        cannot have: each would do nothing, in silence."""
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

    def _read_sampled(self, input_path: str) -> _Sampled:
        """Count the completions. Raises BadInput where all states failed, and for `counted` where a state has no
        completion and did not fail; the other estimators ask some states only."""
        states, answered = read_records(State, self.states), read_records(Completion, input_path)
        failed_ids = read_failed(input_path)
        if self.estimator == "counted":
            counts = count_completions(states, answered, failed_ids)
        else:
            counts = count_sampled(states, answered)
        keys = {state.id: state_key(state.problem_id, state.prefix_ids) for state in states}
        failed = {key for name, key in keys.items() if name in failed_ids and key not in counts}
        num_states = len(set(keys.values()))
        if failed and len(failed) == num_states:
            raise BadInput(f"{input_path}: the completions of all {num_states} states failed, so that there is no "
                           f"value: see {failed_path(input_path)}")  # fmt: skip
        return _Sampled(counts, failed, num_states, sum(completion.answer is None for completion in answered))

    def _estimates(self, rows: Sequence[Trajectory], sampled: _Sampled) -> Mapping[StateKey, StateEstimate]:
        """Return the estimates of the states, 95 % intervals with them."""
        if self.estimator == "smoothed":
            found = smoothed_values(rows, sampled.counts)
            return {
                key: StateEstimate(one.value, *one.interval(), sampled.counts.get(key, UNKNOWN.count))
                for key, one in found.items()
            }
        return dict.fromkeys(sampled.failed, UNKNOWN) | {key: counted(count) for key, count in sampled.counts.items()}

    def _count(self, records: Sequence[StepValues], sampled: _Sampled, input_path: str, context: StageContext) -> None:
        """Put into the counts what was read and what is known; warn of failed states, and where every completed state
        has the value 0, or 1."""
        values = [count.value for count in sampled.counts.values()]
        completions = sum(count.num_completions for count in sampled.counts.values())
        num_steps, gaps = sum(len(row.labels) for row in records), [row.labels.count(None) for row in records]
        context.counts.update(trajectories=len(records), states=len(values), completions=completions)
        context.counts.update(steps=num_steps, labelled_steps=num_steps - sum(gaps))
        if sum(gaps):
            context.counts["trajectories_with_unlabelled_steps"] = sum(map(bool, gaps))
        if sampled.failed:
            context.counts["states_failed"] = len(sampled.failed)
            leave_out(input_path, len(sampled.failed), sampled.num_states, "states", "failed",
                      details=f": {sum(gaps)} of {num_steps} steps have no label")  # fmt: skip
        if completions:
            context.counts["unparseable"] = round(sampled.num_unparseable / completions, 5)
            mean = sum(values) / len(values)
            context.counts["mean_value"] = round(mean, 4)
            if mean in (0.0, 1.0):
                log.warning(
                    "every completed state has the value %g: there is nothing for a process reward model to learn; "
                    "is the policy strong enough for this task, and the answer format right?",
                    mean,
                )
        inner_labels, inner_values = inner_steps(records)
        balance = label_balance(inner_labels, inner_values)
        if balance is not None:
            labels = [label for label in inner_labels if label is not None]
            context.counts["mean_inner_label"] = round(sum(labels) / len(labels), 4)
            if balance.mean_value is not None:
                context.counts["mean_inner_value"] = round(balance.mean_value, 4)
