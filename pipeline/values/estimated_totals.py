"""What a file of step values is made of, counted as its records pass; and what of it is refused at the end."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.data.examples.label_balance import LabelCounts, judge_balance
from espalier.data.failed_rows import failed_path
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, StepValues
from espalier.values.monte_carlo import Count, StateKey

log = logging.getLogger("stage")


@dataclass(frozen=True)
class Sampled:
    """Right completions of the states that have any; `failed`: states that have none because their requests failed;
    `missing`: ids of states that have none for another reason; `num_unparseable`: completions without an answer to
    read."""

    counts: Mapping[StateKey, Count]
    failed: frozenset[StateKey]
    missing: Sequence[str]
    num_states: int
    num_unparseable: int


@dataclass
class Totals:
    """Sums over all problems."""

    num_states: int = 0
    num_failed: int = 0
    num_missing: int = 0
    num_inner: int = 0
    num_uncut: int = 0
    num_stateless: int = 0
    first_missing: str = ""
    num_valued: int = 0
    sum_of_values: float = 0.0
    num_completions: int = 0
    num_unparseable: int = 0
    num_trajectories: int = 0
    num_steps: int = 0
    num_gaps: int = 0
    num_with_gaps: int = 0
    num_problems: int = 0
    unsolved: set[str] = field(default_factory=set)
    """ids of problems without a success, where labels are relative to that"""
    labels: LabelCounts = field(default_factory=LabelCounts)

    def add_sampled(self, sampled: Sampled) -> None:
        """Take in what was sampled for a problem, or for all."""
        self.num_states += sampled.num_states
        self.num_failed += len(sampled.failed)
        self.num_missing += len(sampled.missing)
        self.first_missing = self.first_missing or next(iter(sampled.missing), "")
        self.num_valued += len(sampled.counts)
        self.sum_of_values += sum(count.value for count in sampled.counts.values())
        self.num_completions += sum(count.num_completions for count in sampled.counts.values())
        self.num_unparseable += sampled.num_unparseable

    def add_inner(self, number: int, uncut: int, stateless: int) -> None:
        """Take in how many inner states the trajectories of a problem have, how many of them were not cut, and how many
        trajectories have none that was, beside others that have some."""
        self.num_inner += number
        self.num_uncut += uncut
        self.num_stateless += stateless

    def add_record(self, record: StepValues) -> None:
        """Take in a record that is written."""
        gaps = record.labels.count(None)
        self.num_trajectories += 1
        self.num_steps += len(record.labels)
        self.num_gaps += gaps
        self.num_with_gaps += gaps > 0
        self.labels.add(record.labels[:-1], record.values[:-1])

    def check_sampled(self, path: str) -> None:
        """Raise BadInput where states have no completion, or all of them failed; `path` is the completions'."""
        if self.num_missing:
            raise BadInput(f"state '{self.first_missing}' has no completion ({self.num_missing} such states): finish "
                           "sampling first")  # fmt: skip
        if self.num_failed and self.num_failed == self.num_states:
            raise BadInput(f"{path}: the completions of all {self.num_states} states failed, so that there is no "
                           f"value: see {failed_path(path)}")  # fmt: skip

    def note(self, path: str, counts: dict[str, Any]) -> None:
        """Put into the counts what was read and what is known; warn of failed states, and where every completed state
        has the value 0, or 1."""
        counts.update(trajectories=self.num_trajectories, states=self.num_valued, completions=self.num_completions)
        counts.update(steps=self.num_steps, labelled_steps=self.num_steps - self.num_gaps)
        if self.num_gaps:
            counts["trajectories_with_unlabelled_steps"] = self.num_with_gaps
        if self.num_failed:
            counts["states_failed"] = self.num_failed
            leave_out(path, self.num_failed, self.num_states, "states", "failed",
                      details=f": {self.num_gaps} of {self.num_steps} steps have no label")  # fmt: skip
        if self.num_uncut:
            counts["states_not_cut"] = self.num_uncut
            leave_out(path, self.num_uncut, self.num_inner, "inner states", "were not cut", is_asked_for=True,
                      details=f": {self.num_gaps} of {self.num_steps} steps have no label")  # fmt: skip
        if self.unsolved:
            counts["problems_without_success"] = len(self.unsolved)
            leave_out(path, len(self.unsolved), self.num_problems, "problems", "have no right solution or completion",
                      details=": their inner steps have no relative label")  # fmt: skip
        if self.num_completions:
            counts["unparseable"] = round(self.num_unparseable / self.num_completions, 5)
            mean = self.sum_of_values / self.num_valued
            counts["mean_value"] = round(mean, 4)
            if mean in (0.0, 1.0):
                log.warning(
                    "every completed state has the value %g: there is nothing for a process reward model to learn; "
                    "is the policy strong enough for this task, and the answer format right?",
                    mean,
                )
        balance = self.labels.balance
        if balance is not None:
            counts["mean_inner_label"] = round(self.labels.mean_label, 4)
            if balance.mean_value is not None:
                counts["mean_inner_value"] = round(balance.mean_value, 4)

    def warn_of_stateless(self, trajectories: str, states: str) -> None:
        """Warn of trajectories without a state beside others of their problem: they may be newer than the states."""
        log.warning("%s: %d of %d trajectories have no state in %s, where others of the same problems have some: %d of "
                    "%d steps have no label: cut the states of these trajectories if some were sampled later",
                    trajectories, self.num_stateless, self.num_trajectories, states, self.num_gaps,
                    self.num_steps)  # fmt: skip

    def check_labels(self, output: Path) -> None:
        """Raise BadInput where the labels would teach nothing."""
        if self.unsolved and len(self.unsolved) == self.num_problems:
            raise BadInput(f"{output}: none of {self.num_problems} problems has a right solution or completion, so "
                           "that no label is relative to anything: sample more, or train the policy first")  # fmt: skip
        judge_balance(self.labels.balance, str(output), "take another stage.threshold (0.5: more likely right than "
                      "wrong), soft labels, or another stage.noise")  # fmt: skip
