"""The pool of symbolic workers: a deadline that kills, healing, threads, forks, and nothing left over."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.grading.grader_hostile import resident_mib
from espalier.data.answers.math_answers import compare_math
from espalier.data.answers.pool import SymbolicPool

ROOT = Path(__file__).resolve().parent.parent.parent.parent
EASY = ("\\sqrt{8}", "2\\sqrt{2}", [(True, True)])
UNEQUAL = ("\\sqrt{8}", "3\\sqrt{2}", [(True, True)])


@pytest.fixture(scope="module")
def pool() -> Iterator[SymbolicPool]:
    """Two workers, the usual deadline."""
    pool = SymbolicPool(num_workers=2)
    pool.start()
    yield pool
    pool.stop()


def children_of(pid: int) -> list[int]:
    """Process ids of all descendants that are not zombies."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(path.parent.name)
            found += [child, *children_of(child)]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def the_process(pool: SymbolicPool) -> int:
    assert pool._process is not None
    return pool._process.pid


def test_right_and_wrong_are_told_apart(pool: SymbolicPool) -> None:
    assert pool.compare(*EASY)[0] == "right"
    assert pool.compare(*UNEQUAL)[0] == "wrong"


def freeze_workers(pool: SymbolicPool) -> list[int]:
    """Stop every worker, as a hang in native code would; their ids."""
    pool.compare(*EASY)
    frozen = children_of(the_process(pool))
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    return frozen


def test_a_hung_worker_is_killed_and_the_pool_heals(pool: SymbolicPool) -> None:
    frozen = freeze_workers(pool)
    assert frozen
    for _ in frozen:
        started = time.monotonic()
        verdict, reason = pool.compare(*EASY)
        assert time.monotonic() - started < pool.seconds + 1.0
        assert verdict == "unparseable"
        assert "no verdict within" in reason
    assert wait_until_gone(frozen) == []
    assert pool.compare(*EASY)[0] == "right"
    assert pool.compare(*UNEQUAL)[0] == "wrong"


def test_a_worker_killed_while_idle_costs_one_verdict_at_most(pool: SymbolicPool) -> None:
    pool.compare(*EASY)
    for pid in children_of(the_process(pool)):
        os.kill(pid, signal.SIGKILL)
    verdicts = [pool.compare(*EASY)[0] for _ in range(5)]
    assert verdicts[-2:] == ["right", "right"]
    assert verdicts.count("unparseable") <= pool.num_workers


def test_a_memory_bomb_dies_alone(pool: SymbolicPool) -> None:
    pool.compare(*EASY)
    bombs = [
        "\\begin{pmatrix}2&1\\\\1&3\\end{pmatrix}^{999999}", "((((9^{9999})^{9999})^{9999})^{9999})",
        "\\binom{999999}{499999}",
    ]  # fmt: skip
    for bomb in bombs:
        started = time.monotonic()
        pool.compare("x", bomb, [(True, True)])
        assert time.monotonic() - started < pool.seconds + 1.0
        for pid in [the_process(pool), *children_of(the_process(pool))]:
            assert resident_mib(pid, "VmHWM") < 1024
    assert pool.compare(*EASY)[0] == "right"


def test_many_threads_at_once_each_get_their_own_verdict(pool: SymbolicPool) -> None:
    pairs = [(f"{n}\\sqrt{{2}}", f"\\sqrt{{{2 * m * m}}}", n == m) for n in range(2, 6) for m in range(2, 6)] * 4
    with ThreadPoolExecutor(16) as threads:
        verdicts = list(threads.map(lambda pair: pool.compare(pair[0], pair[1], [(True, True)])[0], pairs))
    assert verdicts == ["right" if is_same else "wrong" for _, _, is_same in pairs]


def test_waiting_for_a_worker_costs_an_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first question is answered late here, its second decides; both have all of their processor time."""
    question = ("\\boxed{B}", "\\overline{i}+\\begin{pmatrix} \\pi \\\\ 12 \\end{pmatrix} \\le \\overline{12+z}")
    at_rest = compare_math(*question)
    assert at_rest[0] == "wrong"
    single = SymbolicPool(num_workers=1)
    monkeypatch.setattr("espalier.data.answers.math_answers.POOL", single)
    single.start()
    held = single._free.get()
    threading.Timer(2 * single.seconds, single._free.put, [held]).start()
    try:
        assert compare_math(*question) == at_rest
    finally:
        single.stop()


def test_many_workers_of_one_processor_have_as_much_of_it_each_as_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer by the clock than a hung one is waited for."""
    monkeypatch.setattr("espalier.data.answers.pool._PATIENCE", 0.5)
    crowd = SymbolicPool(num_workers=10, seconds=1.0)
    crowd.start()
    os.sched_setaffinity(the_process(crowd), {min(os.sched_getaffinity(0))})
    try:
        with ThreadPoolExecutor(10) as threads:
            verdicts = list(threads.map(lambda _: crowd.matches("(a|aa)+$", "a" * 27 + "b"), range(10)))
        assert verdicts == [False] * 10
    finally:
        crowd.stop()


def test_it_works_in_a_thread_of_a_program_that_handles_signals(pool: SymbolicPool) -> None:
    verdicts: list[str] = []
    thread = threading.Thread(target=lambda: verdicts.append(pool.compare(*EASY)[0]))
    thread.start()
    thread.join(30)
    assert verdicts == ["right"]


def test_a_fork_has_workers_of_its_own_even_where_a_thread_held_the_lock(pool: SymbolicPool) -> None:
    """The thread that would release the lock is not in the fork; without care its first call waits for ever."""
    pool.compare(*EASY)
    before = the_process(pool)
    is_held, is_forked = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            is_held.set()
            is_forked.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(10)
    child = os.fork()
    if child == 0:  # what pytest holds is never unwound here
        try:
            signal.alarm(30)  # ends the child where it hangs
            verdict, _ = pool.compare(*EASY)
            is_its_own = the_process(pool) != before
            pool.stop()
            os._exit(0 if verdict == "right" and is_its_own else 1)
        except BaseException:
            os._exit(2)
    is_forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert the_process(pool) == before
    assert pool.compare(*EASY)[0] == "right"


def test_the_pool_heals_when_the_forking_process_is_killed(pool: SymbolicPool) -> None:
    pool.compare(*EASY)
    processes = [the_process(pool), *children_of(the_process(pool))]
    os.kill(processes[0], signal.SIGKILL)
    assert wait_until_gone(processes) == []
    verdicts = [pool.compare(*EASY)[0] for _ in range(6)]
    assert verdicts[-2:] == ["right", "right"]
    assert verdicts.count("unparseable") <= pool.num_workers


@pytest.mark.slow
def test_the_first_call_may_come_from_many_threads_and_nothing_is_left_over_after_stop() -> None:
    pool = SymbolicPool(num_workers=2)
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda _: pool.compare(*EASY)[0], range(8)))
    assert verdicts == ["right"] * 8
    processes = [the_process(pool), *children_of(the_process(pool))]
    assert len(processes) == 3
    pool.stop()
    assert wait_until_gone(processes) == []
    assert pool.compare(*EASY)[0] == "right"  # it starts anew
    pool.stop()


PROGRAM = """
import os, sys, time
from benchmarks.grading.grader_hostile import resident_mib
from espalier.data.answers.math_answers import compare_math
from espalier.data.answers.pool import SymbolicPool
pool = SymbolicPool(num_workers=2)
assert pool.compare("1/2", "0.5", [(True, True)])[0] == "right"
if "fork" in sys.argv:
    if os.fork() == 0:
        os.close(1)
        time.sleep(8)
        os._exit(0)
print(pool._process.pid, os.getpid(), flush=True)
if "busy" in sys.argv:
    while True:
        pool.compare("x", "\\\\int e^{-x^2} \\\\sin(x^3) \\\\log(x) dx", [(True, True)])
if "exit" not in sys.argv:
    time.sleep(60)
"""


@pytest.mark.slow
def test_nothing_is_left_over_of_programs_that_were_killed_or_ended_without_stop() -> None:
    """Three programs: killed with -9 while its workers work; killed while a fork of it lives on; ended."""
    programs = {
        word: subprocess.Popen([sys.executable, "-c", PROGRAM, word], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for word in ("busy", "fork", "exit")
    }
    left: dict[str, list[int]] = {}
    for word, program in programs.items():
        assert program.stdout is not None
        server = int(program.stdout.readline().split()[0])
        processes = [server, *children_of(server)]
        if word == "exit":
            assert program.wait(30) == 0
        else:
            assert len(processes) > 1
            time.sleep(0.2)
            program.kill()
            program.wait(10)
        left[word] = wait_until_gone(processes, seconds=5.0)
    assert left == {"busy": [], "fork": [], "exit": []}
