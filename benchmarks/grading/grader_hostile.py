"""Ten thousand hostile answers, from the main thread, from eight threads and from asyncio.

    bash scripts/faults.sh grader_hostile [--number 10000]

Each call is timed by the wall clock. Eight threads share as many symbolic workers as the pool has, so their calls
also wait for one another; the figure of one second is therefore taken over calls of one thread at a time (main
thread, asyncio, one other thread), and the slowest call of the eight is reported beside it. Memory is the peak of
every process of the pool, polled from /proc, and the parent's growth after the first tenth of the calls, when
its caches are full. Sixty spellings of code stand among the answers, and then once more each as prediction
and as gold of every kind; afterwards the file that they would create is looked for.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.grading.hostile_answers import GOLDS, KINDS, Hostile, hostile_answers, injections
from benchmarks.result import write_result
from espalier.data.answers.grading import grade_answer
from espalier.data.answers.pool import POOL

HOW = "bash scripts/faults.sh grader_hostile"
NUM_THREADS = 8


def resident_mib(pid: int | str, field: str) -> float:
    """Return `VmRSS` or `VmHWM` (the peak) of a process in MiB; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)


def descendants(pid: int) -> list[int]:
    """Return process ids below `pid`."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:
            continue
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


class PeakWatch(threading.Thread):
    """Polls the memory of all descendants; `peak` in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            self.peak = max([self.peak, *(resident_mib(pid, "VmHWM") for pid in descendants(os.getpid()))])


class Calls:
    """Grades hostile answers and keeps the seconds of every call and what was raised."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.raised: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
        self.slow: list[tuple[float, str]] = []

    def grade(self, case: Hostile, caller: str) -> None:
        """One call."""
        started = time.perf_counter()
        try:
            grade = grade_answer(
                prediction=case.prediction, gold=case.gold, kind=case.kind, num_options=case.num_options
            )
            self.verdicts[grade.verdict] += 1
        except Exception as error:
            self.raised[f"{type(error).__name__}: {case.kind}: {case.family}"] += 1
        seconds = time.perf_counter() - started
        self.seconds.setdefault(caller, []).append(seconds)
        if seconds > 0.98:
            self.slow.append(
                (round(seconds, 2), f"{caller}: {case.kind}: {case.prediction[:40]!r} / {case.gold[:40]!r}")
            )


def main_thread(calls: Calls, cases: list[Hostile]) -> None:
    """One after another, here."""
    for case in cases:
        calls.grade(case, "main thread")


def one_other_thread(calls: Calls, cases: list[Hostile]) -> None:
    """One after another, in a thread."""
    with ThreadPoolExecutor(1) as threads:
        list(threads.map(lambda case: calls.grade(case, "one thread"), cases))


def eight_threads(calls: Calls, cases: list[Hostile]) -> None:
    """Eight at a time."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda case: calls.grade(case, "eight threads"), cases))


def in_event_loop(calls: Calls, cases: list[Hostile]) -> None:
    """From a coroutine, in turn directly and with to_thread."""

    async def grade_all() -> None:
        for number, case in enumerate(cases):
            if number % 2:
                calls.grade(case, "asyncio")
            else:
                await asyncio.to_thread(calls.grade, case, "asyncio.to_thread")

    asyncio.run(grade_all())


CALLERS: tuple[tuple[Callable[[Calls, list[Hostile]], None], float], ...] = (
    (main_thread, 0.4), (one_other_thread, 0.1), (eight_threads, 0.3), (in_event_loop, 0.2),
)  # fmt: skip


def grade_injections(calls: Calls, path: str) -> int:
    """Grade every spelling, as prediction, as gold and as both, of every kind; the number of calls."""
    number = 0
    for code in injections(path):
        for kind in KINDS:
            for prediction, gold in ((code, GOLDS.get(kind, "12")), ("12", code), (code, code + " ")):
                calls.grade(Hostile(prediction, gold, kind, "code", 4), "main thread")
                number += 1
    return number


def shares(number: int, largest: int = 250) -> list[int]:
    """Return `number` as a sum of shares of at most `largest`."""
    return [largest] * (number // largest) + [number % largest] * bool(number % largest)


def count(value: float, goal: float, unit: str) -> dict[str, Any]:
    """Return a figure: lower is better."""
    value = round(value, 3)
    ends = {"value": value, "low": value, "high": value}
    return {**ends, "unit": unit, "goal": goal, "better": "lower", "met": value <= goal, "how": HOW}


def main() -> None:
    """Grade, watch, write results/grader_hostile.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    folder = tempfile.mkdtemp(prefix="canary-")
    path = f"{folder}/made"
    POOL.start()
    watch, calls = PeakWatch(), Calls()
    watch.start()
    started = time.perf_counter()
    cases = hostile_answers(arguments.seed, arguments.number, path)
    resident = []
    for call_all, part in CALLERS:
        for share in shares(round(arguments.number * part)):
            call_all(calls, list(islice(cases, share)))
            gc.collect()
            resident.append(resident_mib("self", "VmRSS"))
        print(f"{call_all.__name__}: done, parent {resident[-1]:.0f} MiB", file=sys.stderr, flush=True)
    num_injections = grade_injections(calls, path)
    created = sorted(os.listdir(folder))
    watch.is_over.set()
    watch.join()
    left = len(descendants(os.getpid()))
    POOL.stop()
    alone = [seconds for caller, times in calls.seconds.items() if caller != "eight threads" for seconds in times]
    settled = resident[len(resident) // 10]
    figures = {
        "grader_hostile_over_one_second": count(sum(s > 1.0 for s in alone), 0, "calls"),
        "grader_hostile_exceptions": count(sum(calls.raised.values()), 0, "calls"),
        "grader_hostile_child_mib": count(watch.peak, 1024, "MiB"),
        "grader_hostile_parent_growth_mib": count(resident[-1] - settled, 50, "MiB"),
        "grader_hostile_files_created": count(len(created), 0, "files"),
    }
    detail = {
        "calls": {caller: len(times) for caller, times in calls.seconds.items()},
        "slowest_seconds": {caller: round(max(times), 3) for caller, times in calls.seconds.items()},
        "over_one_second": {caller: sum(s > 1.0 for s in times) for caller, times in calls.seconds.items()},
        "injection_calls": num_injections,
        "raised": dict(calls.raised),
        "verdicts": dict(calls.verdicts),
        "slow": sorted(calls.slow, reverse=True)[:20],
        "parent_mib": [round(value) for value in resident],
        "processes_at_the_end": left,
        "seconds": round(time.perf_counter() - started),
        "load_before": round(load, 2),
    }
    print(write_result("grader_hostile", figures, detail))
    print({name: figure["value"] for name, figure in figures.items()})


if __name__ == "__main__":
    main()
