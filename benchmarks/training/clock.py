"""When the steps of a training began and ended: on the wall, and in this process's own seconds of CPU, into which what
other programs do on the same cores does not count."""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.processes.sides import peak_rss


@dataclass(frozen=True)
class Moment:
    """Seconds, of the wall and of this process (all its threads)."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)


class StepClock:
    """`start` before the first step, `end` after each."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.peak_bytes = 0

    def start(self) -> None:
        """Note when the steps begin."""
        self.moments.append(Moment())

    def end(self) -> None:
        """Note the end of a step, and the most memory that the process has taken up to here."""
        self.moments.append(Moment())
        self.peak_bytes = peak_rss()

    def result(self) -> dict[str, Any]:
        """Return seconds of all steps and of each, and the peak of the process, in bytes."""
        pairs = list(pairwise(self.moments))
        return {
            "seconds": self.moments[-1].wall - self.moments[0].wall,
            "cpu_seconds": self.moments[-1].cpu - self.moments[0].cpu,
            "step_seconds": [after.wall - before.wall for before, after in pairs],
            "step_cpu_seconds": [after.cpu - before.cpu for before, after in pairs],
            "peak_bytes": self.peak_bytes,
        }
