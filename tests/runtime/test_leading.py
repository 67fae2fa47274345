"""Rank 0 leads: what it has the others do, with two gloo ranks (tests/support/led_program.py), and alone."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.forked import run_ranks
from espalier.runtime.leading import ask, ask_alike, lead
from tests.support.slow import slow_unless

ALONE = (
    "RuntimeError: a collective within what rank 0 does alone: the other ranks never come to it; have all make it by "
    "`ask` (espalier/runtime/leading.py)"
)


def ended(scenario: str, folder: Path) -> tuple[list[int], list[str]]:
    """The exit codes of two ranks, and what both printed, without tracebacks."""
    log = folder / scenario
    codes = run_ranks("tests/support/led_program.py", [f"output={scenario}"], log, 2)
    return codes, [line for line in log.read_text().splitlines() if not line.startswith((" ", "Traceback"))]


def test_ranks_compute_with_what_they_have_of_their_own_while_rank_0_takes_its_time(tmp_path: Path) -> None:
    codes, lines = ended("led", tmp_path)
    assert codes == [0, 0], lines
    apart = "all ranks are asked for something where rank 0 does not lead"
    assert sorted(lines) == [f"rank {number}: {apart}" for number in (0, 1)]


def test_a_signals_end_of_what_rank_0_does_rises_on_all_and_they_go_on_together(tmp_path: Path) -> None:
    codes, lines = ended("stopped", tmp_path)
    assert codes == [0, 0], lines


@pytest.mark.parametrize(
    ("scenario", "codes", "line"),
    slow_unless(
        lambda case: case[0] != "collective",
        [
            ("fails", [2, 2], "error: x.jsonl:3: no id"),
            ("rank_0", [2, 2], "error: y.jsonl:7: no id"),
            ("rank_1", [2, 2], "error: rank 1: y.jsonl:7: no id"),
            ("collective", [99, 1], ALONE),
            ("meets", [99, 1], ALONE),
            (
                "network",
                [99, 1],
                "TypeError: a network (Linear) would come to other ranks as a copy: have it called by a method of "
                "the estimator, filter or reward that holds it",
            ),
            (
                "inner",
                [99, 1],
                "TypeError: other ranks cannot be sent this call (Can't pickle local object "
                "'work.<locals>.inner'): make it a method, or a function of a module",
            ),
            ("twice", [99, 1], "RuntimeError: rank 0 leads already"),
        ],
    ),
)
def test_an_error_of_what_rank_0_does_or_asks_ends_both_in_one_line_and_nobody_waits(
    scenario: str, codes: list[int], line: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    found, lines = ended(scenario, tmp_path)
    assert found == codes, lines
    assert line in lines
    assert time.monotonic() - started < 15


def test_one_process_does_what_it_asks_for() -> None:
    phases: Any = None

    def work() -> list[int]:
        return [*ask([lambda: 1]), ask_alike(lambda: 2)]

    assert lead(work, [], phases) == [1, 2]
