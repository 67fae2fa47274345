"""Evaluated candidates → the policy of the next round, a link to one of them.

The rules of RestEM (Singh et al. 2024, as in VinePPO):

    first_non_improvement    walk forward while accuracy strictly rises, stop before the first that does not
    best                     the highest accuracy, of equal ones the earliest
    last                     the end of training, whatever the figures

The figures of all candidates and what was chosen stand in the provenance beside the link.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.records import BadInput
from espalier.pipeline.pairs.trajectory_groups import check_choice, sample_order
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

RULES = ("first_non_improvement", "best", "last")


def choose(accuracies: Sequence[float], rule: str) -> int:
    """Return the place of the chosen candidate among accuracies in the order of training."""
    check_choice("rule", rule, RULES)
    if rule == "last":
        return len(accuracies) - 1
    if rule == "best":
        return max(range(len(accuracies)), key=lambda place: (accuracies[place], -place))
    place = 0
    while place + 1 < len(accuracies) and accuracies[place + 1] > accuracies[place]:
        place += 1
    return place


def candidate_accuracies(path: str, names: Sequence[str], metric: str) -> list[float]:
    """Return the mean of `metric` of each candidate from what `vllm_inference.py` wrote of all (policies.json).

    A candidate `step-20` is the policy whose name ends in `-step-20`, or is that. Raises BadInput where one has no
    such figure.
    """
    try:
        evaluated = json.loads(Path(path).read_bytes())["policies"]
        figures = {name: row["accuracy"] for name, row in evaluated.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not the evaluation of policies ({error!r}): name policies.json") from None
    return [_accuracy(path, name, figures, metric) for name in names]


def _accuracy(path: str, name: str, figures: dict[str, Any], metric: str) -> float:
    keys = [key for key in figures if key == name or key.endswith(f"-{name}")]
    if len(keys) != 1:
        raise BadInput(f"{path}: {len(keys)} evaluations of '{name}': evaluate every candidate once")
    try:
        return float(figures[keys[0]][metric]["mean"])
    except (KeyError, TypeError, ValueError):
        there = ", ".join(figures[keys[0]])
        raise BadInput(f"{path}: '{keys[0]}' has no accuracy '{metric}': there are {there}") from None


@dataclass(frozen=True)
class ChooseCheckpoint:
    """The input is policies.json; `candidates` the folder of model folders, in the order of their names."""

    candidates: str
    rule: str
    metric: str = "mean"

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, RULES)

    def inputs(self) -> list[str]:
        """None beside the evaluation."""
        return []

    def run(self, input_path: str, context: StageContext) -> None:
        """Write the link itself, under another name first.

        Raises BadInput where there is no candidate, or one has no such accuracy.
        """
        folder = Path(self.candidates)
        names = sorted((path.name for path in folder.glob("*") if path.is_dir()), key=sample_order)
        if not names:
            raise BadInput(f"{folder}: no candidate there: export checkpoints first")
        accuracies = candidate_accuracies(input_path, names, self.metric)
        place = choose(accuracies, self.rule)
        context.counts.update({name: round(value, 5) for name, value in zip(names, accuracies, strict=True)})
        context.counts["chosen"] = names[place]
        output = context.output
        partial = output.with_name(f"{output.name}.partial")
        partial.unlink(missing_ok=True)
        partial.symlink_to(os.path.relpath((folder / names[place]).absolute(), output.absolute().parent))
        partial.replace(output)
        if place == 0 and len(names) > 1 and self.rule != "last":
            log.warning("%s: no checkpoint is better than the start, which stays the policy", folder)
