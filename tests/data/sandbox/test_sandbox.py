"""Hostile programs are contained; what ordinary programs need works; where nothing can be confined, nothing runs."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grading.hostile_programs import PROGRAMS, HostileProgram
from benchmarks.grading.program_escapes import Surroundings, left_processes
from espalier.data.records import BadInput
from espalier.data.sandbox import run
from espalier.data.sandbox.called_names import NoTest, read_assert_tests
from espalier.data.sandbox.confine import missing_parts
from espalier.data.sandbox.plain_values import NoPlainValue, read_line, write_line
from espalier.data.sandbox.run import FunctionCall, run_script, run_tests
from tests.support.slow import slow_unless

needs_kernel = pytest.mark.skipif(bool(missing_parts()), reason=f"this kernel lacks {', '.join(missing_parts())}")


def passes(program: str, *tests: str) -> list[bool]:
    """Say of each test with `assert` whether a program passes it."""
    return run_tests(program, read_assert_tests(tests))


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    tmp_path_factory.getbasetemp()  # before the folder of temporary files is another one, which goes away
    found = Surroundings()
    yield found
    found.close()


def test_there_are_fifty_hostile_programs_with_names_of_their_own() -> None:
    assert len({case.name for case in PROGRAMS}) == len(PROGRAMS) >= 50


@needs_kernel
@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: case.name not in ("endless drip", "stop itself"), PROGRAMS),
    ids=lambda case: case.name,
)
def test_a_hostile_program_is_contained_and_not_graded_right(surroundings: Surroundings, case: HostileProgram) -> None:
    assert surroundings.run(case).found == []


@needs_kernel
@pytest.mark.parametrize(("program", "wanted"), [
    ("import threading\nt = threading.Thread(target=lambda: print('x'))\nt.start()\nt.join()", "x\n"),
    ("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    print('x')\nasyncio.run(f())", "x\n"),
    ("with open('a', 'w') as f:\n    f.write('x')\nprint(open('a').read())", "x\n"),
    ("import sys\nsys.setrecursionlimit(5000)\ndef f(n):\n    return f(n - 1) if n else 'x'\nprint(f(3000))", "x\n"),
    ("import decimal, fractions, re, json, heapq, datetime, random\nprint(random.random() < 1)", "True\n"),
    ("import sys\nprint(sys.stdin.read().upper())", "ÄB\n\n"),
])  # fmt: skip
def test_ordinary_programs_run(program: str, wanted: str) -> None:
    found = run_script(program, "äb\n")
    assert (found.output, found.reason) == (wanted, "")


@needs_kernel
def test_programs_run_beside_one_another_in_threads(surroundings: Surroundings) -> None:
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda k: passes("def f(x): return x + 1", f"assert f({k}) == {k + 1}"), range(12)))
    assert found == [[True]] * 12
    assert not left_processes(str(surroundings.scratch))


@pytest.mark.parametrize("name", ["read a file", "write outside", "connect", "remove a file"])
def test_without_the_sandbox_the_same_programs_are_seen_to_escape(surroundings: Surroundings, name: str) -> None:
    (case,) = (case for case in PROGRAMS if case.name == name)
    done = subprocess.run(
        [sys.executable, "-c", surroundings.program(case)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == case.wanted
    assert surroundings.traces() == {"write outside": ["wrote a file"], "connect": ["connected"],
                                     "remove a file": ["changed a file"]}.get(name, [])  # fmt: skip
    surroundings.mark.unlink(missing_ok=True)


@needs_kernel
def test_a_program_dies_with_the_process_that_grades_it(tmp_path: Path) -> None:
    code = "from espalier.data.sandbox.run import run_script\nprint('begun', flush=True)\n"
    code += "run_script('while True: pass', '', 60)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(run.__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as grading:
        assert grading.stdout is not None
        assert grading.stdout.readline() == b"begun\n"
        _await(lambda: bool(left_processes(str(tmp_path))))
        grading.kill()
    _await(lambda: not left_processes(str(tmp_path)))


def _await(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_kernel
def test_all_tests_of_a_program_have_one_deadline() -> None:
    started = time.monotonic()
    program = "import time\ndef f(x): time.sleep(99)"
    assert run_tests(program, read_assert_tests(["f(1)"] * 5), seconds=0.1, max_seconds=3.0) == [False] * 5
    assert time.monotonic() - started < 10


@needs_kernel
def test_what_a_function_or_a_test_prints_is_neither_a_verdict_nor_in_the_way() -> None:
    program = "def f(x):\n    print('ok\\n' * 100_000)\n    return x"
    assert passes(program, "print('ok', flush=True)\nassert f(1) == 2", "assert f(1) == 1") == [False, True]


@needs_kernel
def test_descriptors_do_not_leak() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        passes("def f(x): return x", "assert f(1) == 1")
        run_tests("def f(x): return x", [FunctionCall("f", [2], 2)])
        run_script("print(1)", "")
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_runs_where_the_kernel_cannot_confine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "missing_parts", lambda: ["landlock"])
    with pytest.raises(
        BadInput, match=r"landlock missing: run code verifiers on Linux 5\.13 .*ESPALIER_SANDBOX_WITHOUT"
    ):
        run_script("print(1)", "")
    monkeypatch.setattr(run, "missing_parts", lambda: ["seccomp"])
    monkeypatch.setenv("ESPALIER_SANDBOX_WITHOUT", "landlock")
    with pytest.raises(BadInput, match="seccomp missing"):
        run_script("print(1)", "")
    monkeypatch.setenv("ESPALIER_SANDBOX_WITHOUT", "seccomp")
    with pytest.raises(BadInput, match="may name landlock alone"):
        run_script("print(1)", "")


@pytest.mark.parametrize("value", [
    0, -1, 1 << 80, 1.5, float("inf"), "ä\n", b"\x00", None, True, [1, [2]], (1, (2,)), {1, 2}, frozenset("a"),
    {"a": (1,), 2: [None], (1, 2): 3}, 1j,
])  # fmt: skip
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = read_line(write_line(value))
    assert found == value
    assert type(found) is type(value)


def test_no_class_of_the_sender_crosses() -> None:
    class Sly(int):
        pass

    for value in (Sly(1), object(), [lambda: 0], {1: Sly(2)}):
        with pytest.raises(NoPlainValue):
            write_line(value)


@needs_kernel
def test_a_program_that_waits_for_its_turn_loses_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SLOTS", threading.BoundedSemaphore(1))
    slots = run._SLOTS
    slots.acquire()
    threading.Timer(1.5, slots.release).start()
    assert run_tests("def f(x): return x", [FunctionCall("f", [1], 1)], max_seconds=1.4) == [True]


@needs_kernel
def test_a_reply_that_is_too_long_is_not_read_as_the_next_ones() -> None:
    program = "def f(x):\n    return 'x' * (5 << 20) if x else 0"
    calls = [FunctionCall("f", [x], x) for x in (0, 1, 0, 0)]
    assert run_tests(program, calls) == [True, False, True, True]


@needs_kernel
@pytest.mark.parametrize(("program", "tests", "wanted"), [
    ("pass", ["assert max([1, 2, 3]) == 3"], [False]),
    ("def max(x): return x[-1]", ["assert max([1, 2, 3]) == 3", "assert max([3, 1]) == 3"], [True, False]),
    ("def sum(a, b): return 6", ["assert sum(10, 15) == 6", "assert abs(sum(1, 2) - 6) < 1"], [True, True]),
    ("def gcd(a, b): return 2", ["assert gcd(4, 6) == 2", "assert math.isclose(gcd(2, 4), 2)"], [True, True]),
    ("def f(x): return x\ndef abs(x): return 0", ["assert abs(f(9) - 1) < 1e-6"], [False]),
    ("def f(x): return 0\ndef Counter(x): return 0", ["from collections import Counter\nassert f([1]) == Counter([1])"],
     [False]),
    ("def f(x): return [x, x]", ["from collections import *\nassert Counter(f(1)) == {1: 2}"], [True]),
    ("def f(x): return x", ["def helper(y):\n    return f(y) + 1\nfor k in range(3):\n    assert helper(k) == k + 1"],
     [True]),
    ("def f(x): return x", ["assert True or f(1)"], [False]),
    ("class Solution:\n    def f(self, x): return x", ["assert f(1) == 1"], [True]),
])  # fmt: skip
def test_the_tests_alone_say_what_is_asked_of_the_program(program: str, tests: list[str], wanted: list[bool]) -> None:
    assert passes(program, *tests) == wanted


@pytest.mark.parametrize(("tests", "message"), [
    ([""], "runs nothing"),
    (["import math"], "runs nothing"),
    (["def test_f():\n    assert f(1) == 1"], "runs nothing"),
    (["assert f(1) == 1", "assert True"], "calls no function of the program"),
    (["assert 1 == 1"], "calls no function of the program"),
    (["assert f([1]) == Counter([1])"], "'Counter' is a name of the standard library that the test does not import"),
    (["assert abs(sum(1, 2)) == 3"], "the tests call abs, sum, all of Python's own"),
    (["assert f("], "a test is no Python"),
])  # fmt: skip
def test_tests_that_would_judge_nothing_are_refused(tests: list[str], message: str) -> None:
    with pytest.raises(NoTest, match=message):
        read_assert_tests(tests)
