"""Break sampling runs on purpose and look for damage: kills, a flaky server, one that dies or freezes, a full disk.

    bash scripts/faults.sh sampling [--kills 200]

The program is `service_api_caller_v1.py` itself, in forked children that need not load their libraries again, with
its own defaults where not said otherwise. The server (`benchmarks.processes.answering_server`) is a process of its own
whose answers depend on the prompt alone, so the rows of any two runs can be compared byte for byte. Writes
benchmarks/results/faults.json and the table of docs/reliability.md. As root the full disk is a small tmpfs with
1, 2, 3 … pages free, and files are limited to random sizes (RLIMIT_FSIZE); else the latter alone.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast  # noqa: F401  (loaded once, before the forks)

import espalier.sampling.job
import espalier.sampling.requests  # noqa: F401
from benchmarks.processes.answering_server import is_refused
from benchmarks.processes.forked import exit_code, start, start_program
from benchmarks.reliability_page import write_page
from benchmarks.result import write_result
from espalier.data.jsonl import read_records
from espalier.data.prompts import encode_prompt
from espalier.data.records import Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tokenizer import load_tokenizer
from espalier.runtime.process_lifetime import is_running

PROGRAM = "service_api_caller_v1.py"
HOW = "bash scripts/faults.sh sampling"
PAGE = 4096
REFUSED = 0.05


class Server:
    """`with Server(folder, "--fault-share", "0.3") as server: server.url`."""

    def __init__(self, folder: Path, *arguments: str):
        words = ["-m", "benchmarks.processes.answering_server", "--tokenizer", str(folder / "tiny" / "tokenizer.json")]
        self.process = subprocess.Popen([sys.executable, *words, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def ledger(self) -> dict[str, Any]:
        """Return how often each prompt was asked, and the faults that were met."""
        found: dict[str, Any] = json.loads(urllib.request.urlopen(f"{self.url}/ledger", timeout=10).read())
        return found

    def freeze(self) -> None:
        """No completion is answered any more; /health is."""
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/freeze", b""), timeout=10).read()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def prepare(folder: Path) -> None:
    """The tiny policy whose tokenizer writes the prompts, made in a child: this process loads no torch."""

    def build() -> None:
        from espalier.models.tiny import build_tiny

        rows = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200).demonstrations("train")
        texts = [row.prompt + row.completion for row in rows]
        shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320, "max_length": 512, "seed": 0}
        build_tiny(folder / "tiny", texts, **shape)

    if exit_code(start(build)):
        raise SystemExit("the tiny policy could not be made")


def settings(folder: Path, url: str, output: Path, num_problems: int, num_samples: int, *more: str) -> list[str]:
    """Return the program's command line."""
    words = f"""-cn api/vllm/trajectories policy={folder}/tiny output={output} server=none client.base_url={url}
        task.num_train={num_problems} params.n={num_samples}"""
    return [*words.split(), *more]


def lines_of(output: Path) -> dict[str, bytes]:
    """Id → line of every whole row; raises on an id that stands twice."""
    if not output.is_file():
        return {}
    content = output.read_bytes()
    rows = [line for line in content[: content.rfind(b"\n") + 1].split(b"\n") if line]
    found = {json.loads(line)["id"]: line for line in rows}
    if len(found) < len(rows):
        raise SystemExit(f"{output} holds an id twice")
    return found


def straight_run(command: list[str], output: Path, folder: Path) -> tuple[dict[str, bytes], float]:
    """Return an undisturbed run's rows, and its seconds."""
    began = time.monotonic()
    if exit_code(start_program(PROGRAM, command, folder / "runs.log")):
        raise SystemExit(f"the undisturbed run failed: see {folder}/runs.log")
    return lines_of(output), time.monotonic() - began


def wait_for_row(output: Path, pid: int) -> None:
    """Return when the file has grown, or the program has ended."""
    size = output.stat().st_size if output.is_file() else 0
    while is_running(pid) and not (output.is_file() and output.stat().st_size > size):
        time.sleep(0.002)


def kills(folder: Path, number: int, seed: int) -> Counter[str]:
    """`kill -9`, then the same command again: every fourth at a moment drawn evenly over an undisturbed run, the
    others drawn evenly over the time in which it writes rows, from the first row of the run on."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    with Server(folder, "--seconds", "0.04") as server:
        output = folder / "straight.jsonl"
        command = settings(folder, server.url, output, 150, 4, "engine.concurrency=8")
        straight, seconds = straight_run(command, output, folder)
        writing = 150 * 0.04 / 8
        while counts["kills"] < number:
            output = folder / f"killed-{counts['runs']}.jsonl"
            command = settings(folder, server.url, output, 150, 4, "engine.concurrency=8")
            before: dict[str, bytes] = {}
            while True:
                pid = start_program(PROGRAM, command, folder / "runs.log")
                if counts["kills"] < number:
                    counts["starts"] += 1
                    if counts["starts"] % 4:
                        wait_for_row(output, pid)
                    time.sleep(rng.uniform(0.0, writing if counts["starts"] % 4 else seconds))
                    os.kill(pid, signal.SIGKILL)
                code = exit_code(pid)
                if code not in (0, -signal.SIGKILL):
                    raise SystemExit(f"a run ended with exit code {code}: see {folder}/runs.log")
                after = lines_of(output)
                whole = {name: line for name, line in before.items() if f"{name.rpartition('/')[0]}/3" in before}
                counts["rows_lost"] += sum(after.get(name) != line for name, line in whole.items())
                if code == 0:
                    break
                counts["kills"] += 1
                counts["kills_while_rows_came"] += len(before) < len(after) < len(straight)
                counts["torn_tails"] += output.is_file() and not output.read_bytes().endswith((b"\n", b""))
                before = after
            counts["runs"] += 1
            counts["identical"] += lines_of(output) == straight and len(read_records(Trajectory, output)) == 600
            print(f"{counts['kills']} kills, {counts['runs']} runs, {counts['identical']} identical", file=sys.stderr)
            output.unlink()
    return counts


def flaky(folder: Path) -> dict[str, Any]:
    """1,000 good problems and those between them that are always refused, through 30 % of faults."""
    task, tokenizer = WordArithmetic(num_train=1200), load_tokenizer(str(folder / "tiny"))
    prompts: dict[str, list[int]] = {}
    refused: set[str] = set()
    for problem in task.problems("train"):
        if len(prompts) - len(refused) == 1000:
            break
        prompts[problem.id] = encode_prompt(task, tokenizer, problem).ids
        refused |= {problem.id} if is_refused(prompts[problem.id], REFUSED) else set()
    output = folder / "flaky.jsonl"
    faults = f"--fault-share 0.3 --refused-share {REFUSED} --late 4 --seconds 0.02"
    with Server(folder, *faults.split()) as server:
        command = settings(folder, server.url, output, 1200, 1, f"requests.limit={len(prompts)}")
        command.append("client.request_seconds=2")
        code = exit_code(start_program(PROGRAM, command, folder / "flaky.log"))
        ledger = server.ledger()
    rows = read_records(Trajectory, output)
    listed = {json.loads(line)["id"] for line in output.with_suffix(".failed.jsonl").read_text().splitlines()}
    asked = Counter({name: ledger["asked"].get(json.dumps(ids), 0) for name, ids in prompts.items()})
    lists = ledger["in_refused_lists"]
    in_lists = Counter({name: lists.get(json.dumps(ids), 0) for name, ids in prompts.items()})
    good = [name for name in prompts if name not in refused]
    return {
        "exit_code": code,
        "rows": len(rows),
        "rows_wanted": len(good),
        "rows_empty": sum(not row.response for row in rows),
        "requests_per_row": sum(asked[name] for name in good) / len(good),
        "most_requests_of_a_row": max(asked[name] for name in good),
        "refused": len(refused),
        "refused_and_listed": len(refused & listed),
        "listed_wrongly": len(listed - refused),
        "retries_of_refused": sum(asked[name] - in_lists[name] - 1 for name in refused),
        "in_refused_lists": sum(in_lists.values()),
        "faults": ledger["faults"],
    }


def lost_servers(folder: Path) -> dict[str, dict[str, Any]]:
    """Try a server that is killed, one that is stopped (SIGSTOP), one whose engine freezes behind a /health that
    says 200, side by side: exit code, seconds from the last row to the end, rows."""
    harm = {
        "killed": lambda server: server.process.kill(),
        "stopped": lambda server: os.kill(server.process.pid, signal.SIGSTOP),
        "engine_frozen": lambda server: server.freeze(),
    }
    servers = {name: Server(folder, "--seconds", "0.5") for name in harm}
    pids, found = {}, {}
    for name, server in servers.items():
        command = settings(folder, server.url, folder / f"{name}.jsonl", 2000, 2, "engine.concurrency=16")
        pids[name] = start_program(PROGRAM, command, folder / f"{name}.log")
    for name, server in servers.items():
        deadline = time.monotonic() + 60
        while len(lines_of(folder / f"{name}.jsonl")) < 40 and time.monotonic() < deadline:
            time.sleep(0.05)
        harm[name](server)
    while pids:
        pid, status = os.waitpid(-1, 0)
        name = next((name for name, mine in pids.items() if mine == pid), "")
        if not name:
            continue
        del pids[name]
        output = folder / f"{name}.jsonl"
        found[name] = {
            "exit_code": os.waitstatus_to_exitcode(status),
            "seconds": round(time.time() - output.stat().st_mtime, 1),
            "rows": len(read_records(Trajectory, output)),
            "command_told": PROGRAM in (folder / f"{name}.log").read_text().rpartition("to go on:")[2],
        }
        print(f"{name}: {found[name]}", file=sys.stderr)
    for server in servers.values():
        server.__exit__()
    return found


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Give a tmpfs, None where it may not be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=False)


@contextmanager
def at_most_bytes(place: Path, is_disk: bool, num_bytes: int) -> Iterator[None]:
    """Give the tmpfs shrunk to so many bytes; or files that may not be longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_disk:
        subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(place)], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if is_disk:
            subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)


def full_disk(folder: Path, seed: int) -> dict[str, Any]:
    """Fill the disk after 1, 2, 3 ... pages, and files after random numbers of bytes; what stands there is
    read, then the run goes on with room."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    with Server(folder) as server, small_disk(folder / "disk") as disk:
        output = folder / "straight-disk.jsonl"
        straight, _ = straight_run(settings(folder, server.url, output, 50, 2), output, folder)
        size = output.stat().st_size
        pages = range(PAGE, size + 3 * PAGE, PAGE) if disk else ()
        places = [(disk, num_bytes) for num_bytes in pages]
        places += [(None, rng.randrange(10, size)) for _ in range(20)]
        for number, (tmpfs, num_bytes) in enumerate(places):
            place = tmpfs or folder
            output = place / f"full-{number}.jsonl"
            command = settings(folder, server.url, output, 50, 2, "engine.concurrency=2")
            with at_most_bytes(place, tmpfs is not None, num_bytes):
                code = exit_code(start_program(PROGRAM, command, Path("/dev/null")))  # a log would have its limit
                found, content = lines_of(output), output.read_bytes() if output.is_file() else b""
            is_same = all(straight[name] == line for name, line in found.items()) and len(found) % 2 == 0
            again = exit_code(start_program(PROGRAM, command, folder / "disk-again.log"))
            if code:  # a last size may hold it all
                counts["places"] += 1
                counts["exit_code_4"] += code == 4
                counts["valid"] += is_same and (not content or content.endswith(b"\n"))
                counts["resumed_identical"] += again == 0 and lines_of(output) == straight
            for path in place.glob(f"*full-{number}.*"):
                path.unlink()
    return {"by": "tmpfs and RLIMIT_FSIZE" if disk else "RLIMIT_FSIZE", **counts}


def share(value: float, unit: str = "share") -> dict[str, Any]:
    """Return a figure that has to be whole."""
    value = round(value, 5)
    return {"value": value, "low": value, "high": value, "unit": unit, "goal": 1.0, "better": "higher",
            "met": value >= 1.0, "how": HOW}  # fmt: skip


def at_most(value: float, goal: float, unit: str) -> dict[str, Any]:
    """Return a figure that may not be more than its goal."""
    value = round(value, 3)
    return {"value": value, "low": value, "high": value, "unit": unit, "goal": goal, "better": "lower",
            "met": value <= goal, "how": HOW}  # fmt: skip


def main() -> None:
    """Break, look, write results/faults.json and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sampling-faults-"))
    seconds: dict[str, float] = {}
    found: dict[str, Any] = {}
    prepare(folder)
    for name, work in {
        "kills": lambda: dict(kills(folder, arguments.kills, arguments.seed)),
        "flaky": lambda: flaky(folder),
        "lost_servers": lambda: lost_servers(folder),
        "full_disk": lambda: full_disk(folder, arguments.seed),
    }.items():
        began = time.monotonic()
        found[name] = work()
        seconds[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {found[name]}", file=sys.stderr)
    path = write_result("faults", figures(found), {**found, "seconds": seconds, "load_after": os.getloadavg()[0]})
    write_page("faults.json")
    shutil.rmtree(folder)
    print(path)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is promised, and whether it was kept."""
    killed, flakiness, lost, disk = (found[name] for name in ("kills", "flaky", "lost_servers", "full_disk"))
    is_clean = killed["identical"] == killed["runs"] and not killed["rows_lost"]
    refusals = flakiness["refused_and_listed"] == flakiness["refused"] > 0
    is_listed = refusals and not flakiness["listed_wrongly"] and not flakiness["retries_of_refused"]
    complete = (flakiness["rows"] - flakiness["rows_empty"]) / flakiness["rows_wanted"]
    ends_well = [row["exit_code"] == 3 and row["rows"] >= 40 and row["command_told"] for row in lost.values()]
    disk_clean = min(disk["exit_code_4"], disk["valid"], disk["resumed_identical"]) / disk["places"]
    return {
        "kills_clean": share(1.0 if is_clean else killed["identical"] / (killed["runs"] + 1)),
        "flaky_rows_complete": share(complete if flakiness["exit_code"] == 1 else 0.0),
        "flaky_requests_per_row": at_most(flakiness["requests_per_row"], 1.6, "requests"),
        "refused_listed_and_asked_once": share(float(is_listed)),
        "lost_server_exit_3": share(sum(ends_well) / len(ends_well)),
        **{
            f"seconds_to_exit_{name}": at_most(row["seconds"], 120.0, "seconds after the last row")
            for name, row in lost.items()
        },
        "full_disk_clean": share(disk_clean),
    }


if __name__ == "__main__":
    main()
