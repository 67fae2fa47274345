"""Break a part of a run on a Ray cluster at a random moment, and see what the run makes of it.

    bash scripts/faults.sh cluster [--times 20] [--kinds engine node] [--seed 1 --add]

benchmarks/results/cluster_faults.json keeps the runs of kinds that are not named; `--add` those of another seed too.

`main.py` trains a tiny model with PPO: two learners on one Ray node, two engines on two others (raylets of this
machine), by `launcher=ray` and `client=ray_engines`. The engines sample by the weights and the request alone
(`benchmarks.cluster.repeatable_engine`), so that a run that comes back exactly ends with the same bits. Broken is, by
turns: an engine's process, its actor, its node (another one joins 3 s later), a learner (rank 1), the driver (rank 0),
and an engine's node is silent for 30 s (SIGSTOP of its raylet). Every second run draws one version ahead: its samples
depend on the moment of a delivery, so it is held to the ledger and to the problems of an undisturbed run.

A run is good where it ends by itself with exit code 0, leaves nothing running or reserved, every iteration stands once
in its metrics with a ledger that closes, and the final weights, samples and metrics are those of an undisturbed run, or
drawn ahead, the problems of every iteration. Writes benchmarks/results/cluster_faults.json.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.result import stamp_of_now, write_result
from benchmarks.rl.rl_kills import KINDS as RL_KINDS
from benchmarks.rl.rl_kills import prepare
from espalier.runtime.ray_cluster import join_cluster, leave_cluster

RESULTS = ROOT / "benchmarks" / "results" / "cluster_faults.json"
MARK = "ESPALIER_FAULTS"
KINDS = ("engine", "actor", "node", "learner", "driver", "silence")
SILENCE = 30.0
LIMIT = 400.0
NEW_NODE_SECONDS = 3.0
ITERATIONS = 16
NOT_OF_THE_POLICY = ("seconds/", "tokens_per_second/", "engine/serving", "rollout/asked_again", "rollout/lost_",
                     "memory/", "ranks/")  # fmt: skip


class Nodes:
    """A head without room, a node for two learners and two for an engine each; all their processes bear `mark`."""

    def __init__(self, mark: str):
        from ray.cluster_utils import Cluster

        os.environ[MARK] = mark
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.mark = mark
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.cluster.add_node(num_cpus=2)
        self.of_engines = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        join_cluster(self.cluster.address)

    @property
    def address(self) -> str:
        """Of the cluster."""
        return str(self.cluster.address)

    def processes(self, words: str, rank: str = "") -> list[int]:
        """Return those of ours whose command has the words, of that rank alone."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            is_ours = f"{MARK}={self.mark}".encode() in variables
            if is_ours and words in command and (not rank or f"RANK={rank}".encode() in variables):
                found.append(int(folder.name))
        return found

    def break_node(self) -> None:
        """Take one of the engines' nodes away, and add another later."""
        self.cluster.remove_node(self.of_engines.pop(), allow_graceful=False)
        time.sleep(NEW_NODE_SECONDS)
        self.of_engines.append(self.cluster.add_node(num_cpus=1))

    def silence_node(self) -> None:
        """Stop the raylet of one for a while."""
        (raylet,) = self.of_engines[-1].all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGSTOP)
        time.sleep(SILENCE)
        os.kill(raylet.process.pid, signal.SIGCONT)

    def left(self, seconds: float = 30.0) -> str:
        """Return what still runs, or is reserved, after so many seconds; "" where nothing is."""
        import ray

        end = time.monotonic() + seconds
        while True:
            names = ("repeatable_engine", "repeatable_main", "ray::EngineHost", "ray::RankHost")
            counts = {name: len(self.processes(name)) for name in names}
            free, all_of_it = (found.get("CPU", 0.0) for found in (ray.available_resources(), ray.cluster_resources()))
            lacking = all_of_it - free
            if not any(counts.values()) and not lacking:
                return ""
            if time.monotonic() > end:
                return f"{counts}, {lacking:g} CPUs reserved"
            time.sleep(0.2)

    def close(self) -> None:
        """Take the cluster down."""
        leave_cluster()
        self.cluster.shutdown()


def break_(nodes: Nodes, kind: str, is_over: Callable[[], bool]) -> bool:
    """Do it as soon as there is something to break; whether there was."""
    if kind in ("node", "silence"):
        if is_over():
            return False
        nodes.break_node() if kind == "node" else nodes.silence_node()
        return True
    words = {"engine": "repeatable_engine", "actor": "ray::EngineHost"}.get(kind, "repeatable_main")
    rank = {"learner": "1", "driver": "0"}.get(kind, "")
    while not is_over():
        if found := nodes.processes(words, rank):
            os.kill(random.choice(found), signal.SIGKILL)
            return True
        time.sleep(0.05)
    return False


def rows_of(run: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of its metrics."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)


def digest_of(run: Path) -> str:
    """Return SHA-256 of final weights, samples and metrics, but for seconds and for who served."""
    digest = hashlib.sha256()
    for name in ("model", "critic"):
        for path in sorted((run / name).glob("*.safetensors")):
            digest.update(path.read_bytes())
    for row in rows_of(run):
        digest.update(json.dumps({k: v for k, v in row.items() if not k.startswith(NOT_OF_THE_POLICY)}).encode())
    for path in sorted(run.glob("samples/*.jsonl")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def problems_of(run: Path) -> str:
    """Return which problems were sampled in which iteration."""
    names = {}
    for path in sorted(run.glob("samples/*.jsonl")):
        names[path.name] = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    return json.dumps(names)


def what_is_wrong_with_its_metrics(run: Path) -> str:
    """Say which iteration is missing, doubled, or has a ledger that does not close."""
    rows = [row for row in rows_of(run) if "rollout/reward" in row]
    steps = [row["step"] for row in rows]
    if steps != list(range(1, ITERATIONS + 1)):
        return f"iterations {steps}"
    for row in rows:
        trained = sum(value for name, value in row.items() if name.startswith("ledger/trained_age_"))
        if trained + row["ledger/filtered"] != row["rollout/drawn_tokens"]:
            return f"iteration {row['step']}: {trained} tokens trained of {row['rollout/drawn_tokens']} drawn"
    return ""


class Runs:
    """Runs on these nodes, in folders below `folder`."""

    def __init__(self, nodes: Nodes, folder: Path):
        self.nodes, self.folder = nodes, folder
        base = [word for word in prepare(folder) if not word.startswith(("num_iterations=", "samples."))]
        self.settings = [
            *base, *RL_KINDS["ppo"], f"num_iterations={ITERATIONS}", "samples.num_problems=4", "launcher=ray",
            f"launcher.address={nodes.address}", "launcher.num_ranks=2", "launcher.placement=STRICT_PACK",
            "client=ray_engines", f"client.address={nodes.address}", "client.num_engines=2",
        ]  # fmt: skip

    def start(self, run: Path, ahead: int) -> subprocess.Popen[bytes]:
        """Begin one."""
        command = [sys.executable, "benchmarks/cluster/repeatable_main.py", *self.settings, f"output_dir={run}"]
        with run.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(
                [*command, f"rollout.max_staleness={ahead}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def undisturbed(self, ahead: int) -> tuple[Path, float]:
        """Return a run that nothing is done to, and its seconds."""
        run, started = self.folder / f"undisturbed-{ahead}", time.monotonic()
        if code := self.start(run, ahead).wait(LIMIT):
            raise SystemExit(f"the undisturbed run ended with exit code {code}: see {run.with_suffix('.log')}")
        return run, time.monotonic() - started

    def disturbed(self, name: str, kind: str, ahead: int, wait: float) -> dict[str, Any]:
        """Return what came of a run in which `kind` is broken after so many seconds."""
        run, started = self.folder / name, time.monotonic()
        process = self.start(run, ahead)
        done: list[bool] = []

        def then() -> None:
            time.sleep(wait)
            done.append(break_(self.nodes, kind, lambda: process.poll() is not None))

        thread = threading.Thread(target=then)
        if kind == "node":  # Ray's own test cluster starts nodes in the main thread alone
            then()
        else:
            thread.start()
        try:
            code: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
        seconds = time.monotonic() - started
        if kind != "node":
            thread.join()
        return {"kind": kind, "ahead": ahead, "after": round(wait, 1), "was_broken": done == [True], "code": code,
                "seconds": round(seconds, 1), "left": self.nodes.left()}  # fmt: skip


def measure(times: int, kinds: Sequence[str], seed: int, folder: Path) -> list[dict[str, Any]]:
    """Return what came of every run."""
    rng, rows = random.Random(seed), []
    nodes = Nodes(str(folder))
    try:
        runs = Runs(nodes, folder)
        straight = [runs.undisturbed(ahead) for ahead in (0, 1)]
        again, _ = Runs(nodes, folder / "again").undisturbed(0)
        if digest_of(again) != digest_of(straight[0][0]):
            raise SystemExit("two undisturbed runs differ: faults cannot be judged by them")
        for number in range(times * len(kinds)):
            kind, ahead = kinds[number % len(kinds)], (number // len(kinds)) % 2
            like, seconds = straight[ahead]
            name = f"{number}-{kind}"
            row = runs.disturbed(name, kind, ahead, rng.uniform(0.2 * seconds, 0.95 * seconds))
            run = folder / name
            row["wrong"] = "" if row["code"] == 0 else run.with_suffix(".log").read_text()[-600:]
            if row["code"] == 0:
                row["wrong"] = what_is_wrong_with_its_metrics(run)
                same = problems_of if ahead else digest_of
                row["is_same"] = same(run) == same(like)
                shutil.rmtree(run)
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    finally:
        nodes.close()
    return rows


def is_good(row: dict[str, Any]) -> bool:
    """Say whether the run came through."""
    return row["code"] == 0 and not row["left"] and not row["wrong"] and bool(row.get("is_same"))


def of_kind(rows: Sequence[dict[str, Any]], seed: int, before: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of runs of one kind beside those of before: how many had something broken, on which day and
    by which code, and those that did not come through, whether something was broken or not."""
    part = {**stamp_of_now(), "seeds": [seed], "runs": sum(row["was_broken"] for row in rows)}
    bad = [*before.get("bad", []), *(row for row in rows if not is_good(row))]
    return {"parts": [*before.get("parts", []), part], "bad": bad}


def figures_of(detail: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the share that came through, of each kind in which anything was broken."""
    figures = {}
    for kind, found in sorted(detail.items()):
        num = sum(part["runs"] for part in found["parts"])
        num += sum(not row["was_broken"] for row in found["bad"])
        days = " and ".join(sorted({part["date"] for part in found["parts"]}))
        if num:
            share = 1 - len(found["bad"]) / num
            figures[f"cluster_{kind}_came_through"] = {
                "value": share, "low": share, "high": share, "unit": f"share of {num} runs ({days})", "goal": 1.0,
                "better": "higher", "met": share == 1.0, "how": "bash scripts/faults.sh cluster",
            }  # fmt: skip
    return figures


def main() -> None:
    """Break, compare, write results/cluster_faults.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true")
    arguments = parser.parse_args()
    before: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["detail"] if RESULTS.is_file() else {}
    for kind in arguments.kinds:
        seeds = [seed for part in before.get(kind, {}).get("parts", []) for seed in part["seeds"]]
        if arguments.add and arguments.seed in seeds:
            raise SystemExit(f"{RESULTS} has the runs of --seed {arguments.seed} already")
    folder = Path(tempfile.mkdtemp(prefix="cluster-faults-"))
    (folder / "again").mkdir()
    rows = measure(arguments.times, arguments.kinds, arguments.seed, folder)
    detail = before | {kind: of_kind([row for row in rows if row["kind"] == kind], arguments.seed,
                                     before.get(kind, {}) if arguments.add else {})
                       for kind in arguments.kinds}  # fmt: skip
    print(write_result("cluster_faults", figures_of(detail), detail))
    if all(map(is_good, rows)):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
