"""Trajectory → one JSON document: which labels a process reward model is to learn from, by what a first sample shows.

    python run_stage.py -cn values/choose_labels input=trajectories.jsonl output=labels.json

Where the policy succeeds now and then, the values of all states tell right steps from wrong ones; by name they are made
hard by what each prompt is worth (`relative`: `stage.label=relative` of `values/estimate_values`). Where success is
rare, most states have no right completion and their values tell next to nothing; completions are spent along right
solutions then, and steps are labelled by contrast (`values.contrast`).
"""

import logging
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

KINDS = ("values", "relative", "contrast")
FEW_RIGHT = 30  # fewer right trajectories give little to contrast


@dataclass(frozen=True)
class ChooseLabels:
    """Writes `{"labels", "accuracy", "num_right", "num_solved", "num_problems", "why"}`."""

    labels: str = "auto"
    """values, relative, contrast, or auto: contrast or values, by the share of right trajectories"""
    rare_below: float = 0.2
    """share of right trajectories below which auto takes contrast"""
    of_trajectories: int = 0
    """the input is a pilot of so many trajectories: right ones are expected in proportion, and nothing is refused; 0:
    it is all of them"""

    def __post_init__(self) -> None:
        if self.labels not in ("auto", *KINDS):
            raise BadInput(f"stage.labels must be auto, {', '.join(KINDS[:-1])} or {KINDS[-1]}, got '{self.labels}'")
        if self.of_trajectories < 0:
            raise BadInput(f"stage.of_trajectories is a number of trajectories, 0 or more, got {self.of_trajectories}")
        if not 0 <= self.rare_below <= 1:
            raise BadInput(f"stage.rare_below is a share of trajectories, from 0 to 1, got {self.rare_below:g}")

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the choice and what it rests on. Raises BadInput where nothing is right, unless
        values or relative labels are asked for by name."""
        num_rows = num_problems = num_right = num_solved = num_options = 0
        with ProblemRows(context.output) as rows:
            num_rows = rows.add(Trajectory, input_path)
            for problem in rows.problems():
                group: list[Trajectory] = rows.rows(0, problem)
                right = sum(row.is_correct for row in group)
                num_problems, num_right, num_solved = num_problems + 1, num_right + right, num_solved + bool(right)
                num_options = max(num_options, *(row.num_options for row in group))
        if not num_rows:
            raise BadInput(f"{input_path}: no trajectory: sample some first")
        accuracy = num_right / num_rows
        expected = round(accuracy * max(num_rows, self.of_trajectories))
        labels, rule = self.labels, "as stage.labels says"
        if labels == "auto":
            is_rare = accuracy < self.rare_below
            labels = "contrast" if is_rare and expected >= FEW_RIGHT else "values"
            rule = f"{'below' if is_rare else 'not below'} stage.rare_below={self.rare_below:g}"
            if is_rare and labels == "values":
                rule += f", but fewer than {FEW_RIGHT} right trajectories"
                log.warning("success is rare, and %d right trajectories are too few to label steps by contrast: sample "
                            "more problems, or train the policy first", expected)  # fmt: skip
        why = (f"{accuracy:.1%} of {num_rows} trajectories are right ({rule}), {num_solved} of {num_problems} problems "
               "solved")  # fmt: skip
        if self.of_trajectories:
            why += f"; some {expected} right ones if there are {self.of_trajectories}"
        log.info("labels by %s: %s", labels, why)
        if not num_right and self.labels not in ("values", "relative") and not self.of_trajectories:
            raise BadInput(f"{input_path}: {why}: steps are labelled along right solutions, there is none, and values "
                           "would be next to 0 everywhere: sample more problems, or train the policy first "
                           "(labels=values completes all states anyway)")  # fmt: skip
        if labels == "contrast" and num_options:
            log.warning("of %d options one in %d answers is right by luck, and contrast takes every step of a right "
                        "solution for right: values (labels=values) know better", num_options, num_options)  # fmt: skip
        context.counts.update(labels=labels, accuracy=round(accuracy, 4), right=num_right, problems_solved=num_solved)
        return {"labels": labels, "accuracy": accuracy, "num_right": num_right, "num_solved": num_solved,
                "num_problems": num_problems, "why": why}  # fmt: skip
