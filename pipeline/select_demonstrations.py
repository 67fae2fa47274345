"""Trajectory → Demonstration: the right solutions, each text once (rejection sampling, distillation)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from data.jsonl import read_records
from data.records import Demonstration, Trajectory
from pipeline.stage import StageContext


@dataclass(frozen=True)
class SelectDemonstrations:
    """At most `max_per_problem` a problem, 0 for no cap."""

    max_per_problem: int = 0

    def inputs(self) -> list[str]:
        """None beside the trajectories."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[Demonstration]:
        """Demonstrations in the order of their trajectories."""
        taken: Counter[str] = Counter()
        seen: set[tuple[str, str]] = set()
        chosen: list[Demonstration] = []
        for trajectory in read_records(Trajectory, input_path):
            key = (trajectory.problem_id, trajectory.response)
            if not trajectory.is_correct or key in seen:
                continue
            if self.max_per_problem and taken[trajectory.problem_id] >= self.max_per_problem:
                continue
            seen.add(key)
            taken[trajectory.problem_id] += 1
            chosen.append(Demonstration(trajectory.id, trajectory.prompt, trajectory.response))
        context.counts["problems"] = len(taken)
        return chosen
