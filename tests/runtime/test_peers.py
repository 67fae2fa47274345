"""Ranks in company: a phase of one that takes longer than a collective may, an error of one that ends all with its exit
code and one line, a rank that is killed or stopped; and the launcher that keeps the exit code."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401, loaded before the fork

import espalier.runtime.distributed
import espalier.sampling.client
from benchmarks.processes.forked import exit_code, start_program, start_ranks
from espalier.runtime.ranks import exit_code_of_ranks, may_start_again

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Ended:
    """How two ranks ended: their exit codes (rank 0 first), what they printed, the seconds until rank 1 had ended."""

    codes: list[int]
    lines: list[str]
    seconds: float


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Scenarios of rank_program.py, each run when it is asked for."""
    folder = tmp_path_factory.mktemp("ranks")

    class Scenarios(dict[str, Ended]):
        def __missing__(self, name: str) -> Ended:
            started = time.monotonic()
            first, second = start_ranks("tests/support/rank_program.py", [f"output={name}"], folder / name, 2)
            code = exit_code(second)
            seconds = time.monotonic() - started
            if name == "stopped":
                os.kill(first, signal.SIGKILL)
            codes = [exit_code(first), code]
            self[name] = Ended(codes, (folder / name).read_text().splitlines(), seconds)
            return self[name]

    return Scenarios()


def test_a_phase_of_rank_0_may_take_longer_than_any_groups_collective(ended: dict[str, Ended]) -> None:
    assert ended["long"].codes == [0, 0], ended["long"]
    assert sorted(ended["long"].lines) == ["rank 0 is done", "rank 1 is done"]


def test_an_interrupted_answer_of_rank_0_rises_on_every_rank_and_they_go_on(ended: dict[str, Ended]) -> None:
    assert ended["interrupted"].codes == [0, 0], ended["interrupted"]


@pytest.mark.slow
def test_ranks_of_unlike_machines_compute_in_one_precision(ended: dict[str, Ended]) -> None:
    assert ended["unlike"].codes == [0, 0], ended["unlike"]
    assert any("computing in fp32: bfloat16 is slow on 1 of 2 ranks" in line for line in ended["unlike"].lines)


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for_and_named(ended: dict[str, Ended]) -> None:
    assert ended["late"].codes == [0, 0], ended["late"]
    assert any("waiting for rank 1 for 3 s; it is alive" in line for line in ended["late"].lines)


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("bad_input", 2, "error: x.jsonl:3: no id"),
        pytest.param("server_gone", 3, "error: no server answers", marks=pytest.mark.slow),
        ("rank_1", 2, "error: rank 1: y.jsonl:7: no id"),
        pytest.param("apart", 2, "error: rank 1: z.jsonl: rank 1 does not see it", marks=pytest.mark.slow),
        ("astray", 2, "error: rank 0: the ranks do not do the same: rank 1 is at 'the answer of rank 0', rank 0 at "
                      "'a barrier': do all see the same files?"),
    ],
)  # fmt: skip
def test_an_error_of_one_rank_ends_both_with_its_exit_code_and_one_line(
    name: str, code: int, line: str, ended: dict[str, Ended]
) -> None:
    assert ended[name].codes == [code, code], ended[name]
    assert ended[name].lines == [line]


@pytest.mark.slow
def test_an_error_of_rank_1_interrupts_what_rank_0_does_for_all(ended: dict[str, Ended]) -> None:
    found = ended["rank_1_early"]
    assert found.codes == [1, 99]  # rank 1 with a traceback, of which its fork makes 99
    assert [line for line in found.lines if line.startswith("error: ")] == [
        "error: rank 1: MemoryError: no room for a batch"
    ]
    assert found.lines.count("Traceback (most recent call last):") == 1
    assert found.seconds < 30


def test_a_rank_that_is_killed_ends_the_other(ended: dict[str, Ended]) -> None:
    assert ended["killed"].codes == [3, -signal.SIGKILL]
    (line,) = ended["killed"].lines
    assert line.startswith("error: rank 1 (process ")
    assert "has ended without a word" in line


def test_who_came_last_is_heard_and_a_visible_wait_for_a_rank_that_is_stuck_has_the_limit(
    ended: dict[str, Ended],
) -> None:
    found = ended["heard"]
    assert found.codes == [3, 3], found
    (line,) = (line for line in found.lines if line.startswith("error: "))
    assert "a collective: a rank has not come within 3 s (rank_timeout_seconds): is it stuck" in line
    assert found.seconds < 25


@pytest.mark.slow
def test_rank_0_stopped_ends_the_other_within_the_limit(ended: dict[str, Ended]) -> None:
    found = ended["stopped"]
    assert found.codes == [-signal.SIGKILL, 3]
    (line,) = found.lines
    assert line.startswith("error: rank 0 (process ")
    assert "has given no sign of life for 3 s (rank_timeout_seconds)" in line


@pytest.mark.slow
def test_a_collective_that_a_living_rank_does_not_come_to_ends_both(ended: dict[str, Ended]) -> None:
    assert ended["stuck"].codes == [3, 3]
    (line,) = ended["stuck"].lines
    assert line.startswith("error: rank 1: a collective between the ranks failed")


def test_ranks_without_a_launchers_address_are_one_line(tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": ""}
    pid = start_program("tests/support/rank_program.py", ["output=long"], tmp_path / "log", environment)
    assert exit_code(pid) == 2
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("error: WORLD_SIZE is 2, but ")
    assert line.endswith("MASTER_ADDR expected, but not set: start the program by launch.py")


def test_a_limit_that_no_collective_could_keep_is_refused() -> None:
    with (
        pytest.raises(espalier.runtime.distributed.BadTimeout, match="rank_timeout_seconds must be at least 1, got 0"),
        espalier.runtime.distributed.process_group(0.0),
    ):
        pass


def test_a_ranks_own_word_comes_before_a_kill_and_that_before_the_signals_that_followed() -> None:
    code = exit_code_of_ranks
    assert code([0, 0]) == 0
    assert code([-signal.SIGTERM, 3]) == 3
    assert code([143, 2]) == 2
    assert code([143, -signal.SIGKILL]) == 137
    assert code([-signal.SIGTERM, -signal.SIGKILL]) == 137
    assert code([0, 143]) == 143


def test_only_what_may_end_otherwise_is_started_again() -> None:
    assert [code for code in (0, 1, 2, 3, 4, 5, 130, 134, 137, 139, 143) if may_start_again(code)] == [3, 134, 137, 139]


CHILD = """
import os, signal, sys, time
def stop(number, frame):
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
path = os.path.join(os.path.dirname(__file__), f"{sys.argv[1]}-{os.environ['RANK']}")
open(path, "a").write("x")
if sys.argv[1] == "killed" and len(open(path).read()) == 2:
    sys.exit(0)
if sys.argv[1] == "killed" and os.environ["RANK"] == "1":
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "wait":
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
if os.environ["RANK"] == "1":
    sys.exit(int(sys.argv[1]))
time.sleep(60)
"""


def test_the_launcher_ends_with_the_exit_code_of_the_program_and_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    pids = {}
    for word, code in (("3", 3), ("wait", 143)):
        settings = ["--standalone", "--nproc_per_node", "2", str(tmp_path / "child.py"), word]
        pids[start_program("launch.py", settings, tmp_path / f"{word}.log", {"OMP_NUM_THREADS": "1"})] = code
    assert {pid: exit_code(pid) for pid in pids} == pids, [path.read_text() for path in tmp_path.glob("*.log")]
    assert [path.read_text() for path in tmp_path.glob("*.log")] == ["", ""]


@pytest.mark.slow
def test_the_launcher_starts_a_run_again_that_lost_a_rank_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    pids, num_starts = {}, {"3": 2, "killed": 2, "2": 1, "wait": 1}
    for word, code in (("3", 3), ("killed", 0), ("2", 2), ("wait", 143)):
        settings = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "1", str(tmp_path / "child.py"), word]
        pids[start_program("launch.py", settings, tmp_path / f"{word}.log", {"OMP_NUM_THREADS": "1"})] = code
    assert {pid: exit_code(pid) for pid in pids} == pids, [path.read_text() for path in tmp_path.glob("*.log")]
    for word, starts in num_starts.items():
        assert len((tmp_path / f"{word}-0").read_text()) == starts, word
        said = (tmp_path / f"{word}.log").read_text()
        assert said.count("started again (1 of 1)") == starts - 1, said


@pytest.mark.slow
def test_a_launcher_that_is_stopped_between_two_starts_ends_with_that(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import sys; sys.exit(3)")
    log = tmp_path / "stopped.log"
    settings = ["--standalone", "--nproc_per_node", "1", "--max-restarts", "1", str(tmp_path / "child.py")]
    pid = start_program("launch.py", settings, log, {"OMP_NUM_THREADS": "1"})
    end = time.monotonic() + 60
    while not (log.is_file() and "started again" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 143, log.read_text()
