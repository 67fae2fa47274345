"""Runs side by side, one per core, until the time is over: which is next, and what becomes of those that are cut."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.credit.plan import Run


class Job(Protocol):
    """A run in a process of its own."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def stop(self) -> None:
        """End it, so that it can go on from its last checkpoint."""


@dataclass
class Spent:
    """What became of the runs; `cut` are resumed when they are asked for again."""

    finished: list[Run] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)
    cut: list[Run] = field(default_factory=list)


def spend(
    runs: Sequence[Run],
    cores: Sequence[int],
    end: float,
    start: Callable[[Run, int], Job],
    finish: Callable[[Run], None],
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Spent:
    """Work through the runs in their order, one per core at a time, and stop what runs when `now` is `end`.

    A run that is begun late is cut, not left out: to pass a long one by would put quick methods ahead in seeds. After a
    failure the method's other runs on that cell are left alone.
    """
    waiting, spent = list(runs), Spent()
    running: dict[int, tuple[Run, Job]] = {}
    try:
        while (waiting or running) and now() < end:
            for core in cores:
                while waiting and core not in running:
                    run = waiting.pop(0)
                    if not _has_failed(run, spent.failed):
                        running[core] = (run, start(run, core))
            for core, (run, job) in list(running.items()):
                code = job.poll()
                if code is None:
                    continue
                del running[core]
                if code:
                    spent.failed.append(run)
                else:
                    finish(run)
                    spent.finished.append(run)
            if len(running) == len(cores) or (running and not waiting):
                wait(1.0)
    finally:
        for run, job in running.values():
            job.stop()
            spent.cut.append(run)
    return spent


def _has_failed(run: Run, failed: Sequence[Run]) -> bool:
    return any(other.cell == run.cell and other.method == run.method for other in failed)
