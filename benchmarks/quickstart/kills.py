"""`kill -9` the whole quick start at random moments, run it again, and look for damage.

    bash scripts/faults.sh kills

A rehearsal of the quick start (few problems, few steps) runs as its users run it. Each round kills it at a
random moment: in odd rounds the whole process group, in even rounds only the script's own process, whose
programs must then stop by themselves. The last run goes to its end. Then every JSONL file is read: each
line whole, each id once, the ids those that belong there; no process is left over.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.result import write_result
from espalier.data.jsonl import read_records
from espalier.data.records import Completion, PreferencePair, State, StepScores, StepValues, Trajectory
from espalier.runtime.process_lifetime import OWNER_VARIABLE

KINDS = {
    "process_rewards/trajectories.jsonl": Trajectory,
    "process_rewards/states.jsonl": State,
    "process_rewards/completions.jsonl": Completion,
    "process_rewards/step_values.jsonl": StepValues,
    "process_rewards/step_scores.jsonl": StepScores,
    "pairs/outcome.jsonl": PreferencePair,
    "pairs/process.jsonl": PreferencePair,
    **{f"evaluation/{name}/samples.jsonl": Trajectory for name in ("sft", "dpo", "process_dpo")},
}


def start(run: Path, num_problems: int, num_test: int, log: Path) -> subprocess.Popen[bytes]:
    """Return the rehearsal, in a process group of its own."""
    command = ["bash", "scripts/quickstart.sh", f"run={run}", "configs=exp/debug"]
    command += [f"num_problems={num_problems}", f"num_test={num_test}"]
    with log.open("ab") as file:
        environment = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def leftovers(run: Path) -> list[str]:
    """Return command lines of processes that still work on this run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(run) in words and path.parent.name != str(os.getpid()) and "benchmarks.quickstart.kills" not in words:
            found.append(words[:120])
    return found


def wait_until_gone(run: Path, seconds: float) -> list[str]:
    """Return what is still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (found := leftovers(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def check(run: Path, num_problems: int, num_test: int) -> dict[str, int]:
    """Return rows of every file; raises where one is missing, torn, doubled or short."""
    rows = {name: len(read_records(kind, run / name)) for name, kind in KINDS.items()}
    expected = {"process_rewards/trajectories.jsonl": 8 * num_problems}
    expected["process_rewards/completions.jsonl"] = 4 * rows["process_rewards/states.jsonl"]
    expected |= {name: 8 * num_test for name in KINDS if name.startswith("evaluation/")}
    for name, number in expected.items():
        if rows[name] != number:
            raise SystemExit(f"{name} has {rows[name]} rows, not {number}")
    for name in ("report.html", "summary.json"):
        if not (run / name).is_file():
            raise SystemExit(f"{name} is missing")
    return rows


def main() -> None:
    """Kill, restart, check, write results/kills.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=90.0, help="seconds before a kill, at most")
    arguments = parser.parse_args()
    run = Path("experiments") / f"kills-{os.getpid()}"
    run.mkdir(parents=True)
    rng = random.Random(arguments.seed)
    sizes = (24, 32)
    moments = []
    for turn in range(arguments.kills):
        process = start(run, *sizes, run / "runs.log")
        try:
            process.wait(rng.uniform(2.0, arguments.longest))
            break
        except subprocess.TimeoutExpired:
            stages = (run / "seconds.jsonl").read_text().count("\n") if (run / "seconds.jsonl").is_file() else 0
            moments.append(stages)
        if turn % 2:
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        left = wait_until_gone(run, 40.0)
        print(f"kill {turn + 1} after {moments[-1]} stage ends; left over: {left}", file=sys.stderr, flush=True)
        if left:
            raise SystemExit(f"processes left over: {left}")
    code = start(run, *sizes, run / "runs.log").wait()
    if code:
        raise SystemExit(f"the last run ended with exit code {code}: see {run}/runs.log")
    rows = check(run, *sizes)
    share = {"value": 1.0, "low": 1.0, "high": 1.0, "unit": "share", "goal": 1.0, "better": "higher", "met": True}
    how = f"bash scripts/faults.sh kills --kills {arguments.kills} --longest {arguments.longest:g}"
    figures = {"files_whole_after_kills": {**share, "how": how}}
    print(write_result("kills", figures, {"kills": len(moments), "stage_ends_before_kill": moments, "rows": rows}))


if __name__ == "__main__":
    main()
