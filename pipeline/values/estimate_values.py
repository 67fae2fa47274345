"""Completion → StepValues: the value after every step of every trajectory, and the labels a reward model learns.

How a state is estimated, how a value becomes a label, and what becomes of noisy labels are three choices. As they are
set, the value is the share of right completions, and the label is the value. Problems are worked on one by one
(`data.row_index`): no file is held in memory, but for smoothed values, which are learnt from all states.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import file_sha256
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.data.steps import check_ends
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.estimated_totals import Sampled, Totals
from espalier.values.first_error import search_state, states_on_right_ways
from espalier.values.label_noise import NoiseRule
from espalier.values.labels import LabelRule
from espalier.values.monte_carlo import Count, StateKey, count_sampled, state_key
from espalier.values.smoothed import smoothed_values
from espalier.values.step_values import (
    UNKNOWN,
    StateEstimate,
    counted,
    inner_estimates,
    problem_accuracies,
    step_values,
)

ESTIMATORS = ("counted", "smoothed", "first_error")
RELATIVE = "relative"


@dataclass(frozen=True)
class EstimateValues:
    """The input is the completions of the `states` that were cut from the `trajectories`.

    A state whose completions failed (`data.failed_rows` beside the input) has no value, which is not 0: the step into
    it has no label, and the trajectory stays. So it is with a state that was not cut (`values.state_sampling`), where
    values are counted; whole trajectories without a state beside others with some are warned of, where the states'
    `meta.json` does not say that they were cut from this file. Labels of inner steps that are all alike are warned of,
    and refused where the values contradict them (`data.examples.label_balance`).
    """

    trajectories: str
    """the file whose steps are valued"""
    states: str
    """the states cut from it"""
    estimator: str = "counted"
    """counted: the share of right completions of the state itself, of which each that was cut must have some;
    smoothed: with the trajectories' outcomes and the neighbours' completions (`values.smoothed`); first_error: values
    are counted where there are completions, labels are 1 up to the first error and 0 from it on, as far as a bisection
    knows (`values.first_error`)"""
    label: str = "soft"
    """soft: the value; hard: 1 above `threshold`, else 0; relative: 1 above `threshold` times the value of the
    problem's prompt (smoothed, or the share of its trajectories that are right); classes: the value rounded to one of
    `num_classes` (`values.labels`)"""
    threshold: float = 0.0
    """a value above it is good, for hard labels and for denoise; of relative labels a share of the prompt's value"""
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

    def run(self, input_path: str, context: StageContext) -> Iterator[StepValues]:
        """Return one record per trajectory. Raises BadInput where files do not belong together, sampling is not
        finished or all of it failed, a setting is unknown or means nothing for the estimator, and where the labels
        would teach nothing."""
        rules = self._rules()
        rows = ProblemRows(context.output)
        for kind, path in ((Trajectory, self.trajectories), (State, self.states), (Completion, input_path)):
            rows.add(kind, path)
        return self._records(rows, rules, input_path, context)

    def _records(
        self, rows: ProblemRows, rules: tuple[LabelRule, NoiseRule], input_path: str, context: StageContext
    ) -> Iterator[StepValues]:
        """Yield the records in the order of the trajectories."""
        totals = Totals()
        try:
            for record in rows.in_file_order(self._placed(rows, rules, input_path, totals)):
                totals.add_record(record)
                yield record
            totals.check_sampled(input_path)
            totals.note(input_path, context.counts)
            if totals.num_stateless and not self._is_cut_from_these():
                totals.warn_of_stateless(self.trajectories, self.states)
            totals.check_labels(context.output)
        finally:
            rows.close()

    def _placed(
        self, rows: ProblemRows, rules: tuple[LabelRule, NoiseRule], input_path: str, totals: Totals
    ) -> Iterator[tuple[int, StepValues]]:
        """Yield (place of the trajectory, record), problem by problem; smoothed values come from all problems."""
        failed_ids = read_failed(input_path)
        together: list[tuple[int, Trajectory]] = []
        all_sampled: list[Sampled] = []
        for problem in rows.problems():
            trajectories: list[Trajectory] = rows.rows(0, problem)
            states: list[State] = rows.rows(1, problem)
            sampled = self._sampled(states, rows.rows(2, problem), failed_ids)
            totals.add_sampled(sampled)
            totals.num_problems += bool(trajectories)
            if self.label == RELATIVE and trajectories and not _has_success(trajectories, sampled):
                totals.unsolved.add(trajectories[0].problem_id)
            if self.estimator == "counted":
                self._add_inner(trajectories, states, totals)
            placed = zip(rows.places(0, problem), trajectories, strict=True)
            if self.estimator == "smoothed":
                together += placed
                all_sampled.append(sampled)
            elif not totals.num_missing:
                yield from zip(
                    (place for place, _ in placed),
                    self._valued(trajectories, [sampled], rules, totals.unsolved),
                    strict=True,
                )
        if together:
            totals.check_sampled(input_path)
            together.sort(key=lambda one: one[0])
            records = self._valued([trajectory for _, trajectory in together], all_sampled, rules, totals.unsolved)
            yield from zip((place for place, _ in together), records, strict=True)

    def _valued(
        self,
        trajectories: Sequence[Trajectory],
        sampled: Sequence[Sampled],
        rules: tuple[LabelRule, NoiseRule],
        unsolved: Collection[str],
    ) -> Iterator[StepValues]:
        """Yield the records of whole problems, in the order of their trajectories; nothing is relative to the prompt of
        one that is `unsolved`, and its inner steps have no label."""
        rule, noise = rules
        counts = {key: count for one in sampled for key, count in one.counts.items()}
        failed = {key for one in sampled for key in one.failed}
        estimates = self._estimates(trajectories, counts, failed)
        good = states_on_right_ways(trajectories) if self.estimator == "first_error" else set()
        accuracies = problem_accuracies(trajectories)
        for row in trajectories:
            prompt_value = accuracies[row.problem_id]
            known = step_values(row, inner_estimates(row, estimates), prompt_value)
            if self.estimator == "first_error":
                labels = search_state(row, counts, good).labels(len(row.steps))
                weights = [float(label is not None) for label in labels]
            else:
                own = self._of_prompt(rule, row, estimates, prompt_value) if self.label == RELATIVE else rule
                labels, weights = noise.apply(own, known.values, known.low, known.high, prompt_value, row.is_correct)
                if row.problem_id in unsolved:
                    num_inner = len(labels) - 1
                    labels, weights = (
                        [*[None] * num_inner, *labels[num_inner:]],
                        [*[0.0] * num_inner, *weights[num_inner:]],
                    )
            if not self.has_terminal and labels:
                labels, weights = [*labels[:-1], None], [*weights[:-1], 0.0]
            yield replace(known, labels=labels, weights=weights)

    @staticmethod
    def _of_prompt(
        rule: LabelRule, row: Trajectory, estimates: Mapping[StateKey, StateEstimate], accuracy: float
    ) -> LabelRule:
        """Return the rule whose threshold is a share of the value of the trajectory's prompt."""
        prompt = estimates.get(state_key(row.problem_id, []), UNKNOWN).value
        return replace(rule, threshold=rule.threshold * (accuracy if prompt is None else prompt))

    def _rules(self) -> tuple[LabelRule, NoiseRule]:
        """Return the label and the noise rule. Raises BadInput on settings that are unknown or that the estimator
        cannot have: each would do nothing, in silence."""
        if self.estimator == "pooled":
            raise BadInput("stage.estimator=pooled is no longer there: choose smoothed, which needs fewer completions")
        if self.estimator not in ESTIMATORS:
            raise BadInput(f"there is no estimator '{self.estimator}': choose from {', '.join(ESTIMATORS)}")
        if self.label == RELATIVE and not 0 < self.threshold < 1:
            raise BadInput("stage.label=relative needs stage.threshold between 0 and 1, the share of its prompt's "
                           f"value that a good state has (0.5: half of it), got {self.threshold:g}")  # fmt: skip
        if self.label == RELATIVE and (self.estimator == "first_error" or self.noise == "denoise"):
            other = "stage.estimator=first_error" if self.estimator == "first_error" else "stage.noise=denoise"
            raise BadInput(f"stage.label=relative does nothing beside {other}, which has labels of its own: leave one "
                           "of them out")  # fmt: skip
        rule = LabelRule("hard" if self.label == RELATIVE else self.label, self.threshold, self.num_classes)
        noise = NoiseRule(self.noise, self.max_width, self.min_confidence, self.tolerance)
        if self.estimator == "smoothed" and not self.threshold and (self.label == "hard" or self.noise == "denoise"):
            what = "stage.label=hard" if self.label == "hard" else "stage.noise=denoise"
            raise BadInput(f"{what} of smoothed values needs stage.threshold above 0 (0.5: more likely right than "
                           "wrong): a posterior mean is never 0, so with 0 every step is good")  # fmt: skip
        if self.estimator == "first_error" and self.noise != "keep":
            raise BadInput(f"stage.noise={self.noise} does nothing to labels of stage.estimator=first_error, which "
                           "come from no value: set stage.noise=keep")  # fmt: skip
        return rule, noise

    def _add_inner(self, trajectories: Sequence[Trajectory], states: Sequence[State], totals: Totals) -> None:
        """Count the distinct inner states of a problem's trajectories, those of them that were not cut, and the
        trajectories without any that was. Raises BadInput for a state of another file's trajectories."""
        by_trajectory: list[set[StateKey]] = []
        for row in trajectories:
            check_ends(row.steps, row.step_ends, row.id)
            by_trajectory.append({state_key(row.problem_id, row.response_ids[:end]) for end in row.step_ends[:-1]})
        inner = set[StateKey]().union(*by_trajectory)
        for state in states:
            if state.step and state_key(state.problem_id, state.prefix_ids) not in inner:
                raise BadInput(f"{self.states}: state '{state.id}' lies on no trajectory of {self.trajectories}: name "
                               "the trajectories that the states were cut from")  # fmt: skip
        cut = inner & {state_key(state.problem_id, state.prefix_ids) for state in states}
        stateless = sum(bool(own) and not own & cut for own in by_trajectory) if cut else 0
        totals.add_inner(len(inner), len(inner - cut), stateless)

    def _is_cut_from_these(self) -> bool:
        """Say whether the provenance of the states names the trajectories' file as it is."""
        try:
            stored = json.loads(Path(self.states).with_suffix(".meta.json").read_bytes())
            return file_sha256(self.trajectories) in stored["inputs"].values()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return False  # none, or a file of somebody else's by that name

    def _sampled(
        self, states: Sequence[State], answered: Sequence[Completion], failed_ids: Mapping[str, str]
    ) -> Sampled:
        """Count a problem's completions. Raises BadInput for a completion of no state."""
        counts = count_sampled(states, answered)
        keys = {state.id: state_key(state.problem_id, state.prefix_ids) for state in states}
        without = {name: key for name, key in keys.items() if key not in counts}
        failed = frozenset(key for name, key in without.items() if name in failed_ids)
        missing = [name for name in without if name not in failed_ids] if self.estimator == "counted" else []
        unparseable = sum(completion.answer is None for completion in answered)
        return Sampled(counts, failed, missing, len(set(keys.values())), unparseable)

    def _estimates(
        self, rows: Sequence[Trajectory], counts: Mapping[StateKey, Count], failed: Collection[StateKey]
    ) -> Mapping[StateKey, StateEstimate]:
        """Return the estimates of the states, 95 % intervals with them."""
        if self.estimator == "smoothed":
            smoothed = smoothed_values(rows, counts)
            return {
                key: StateEstimate(one.value, *one.interval(), counts.get(key, UNKNOWN.count))
                for key, one in smoothed.items()
            }
        return dict.fromkeys(failed, UNKNOWN) | {key: counted(count) for key, count in counts.items()}


def _has_success(trajectories: Sequence[Trajectory], sampled: Sampled) -> bool:
    """Say whether any solution or completion of a problem is right."""
    return any(row.is_correct for row in trajectories) or any(one.num_correct for one in sampled.counts.values())
