"""Show that a refactoring changed nothing underneath: the same trainings on two commits, compared bit for bit.

    bash scripts/bench.sh unchanged BEFORE [AFTER]        commits; AFTER is HEAD

Both commits are unpacked into a temporary folder and train the same runs (benchmarks/unchanged/runs.py) with the same
libraries, seeds, data and one thread: SFT, DPO, step-DPO, KTO, outcome and process reward models, then GRPO, RLOO, PPO,
VinePPO, SPO, ReMax, REINFORCE++ and process values against a sampler whose answers are a function of the request and
of the delivered weights (benchmarks/processes/repeatable_server.py). Compared are all tensors of the final models and
critics, and all numbers of metrics.jsonl but times, rates and memory. What only changed its name stands in
benchmarks/unchanged/renamed.json. Reinforcement learning begins from the older commit's SFT model on both sides.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes.forked import ROOT
from benchmarks.result import count, write_result
from benchmarks.unchanged.compare import Comparison, compare_runs
from benchmarks.unchanged.datasets import write_datasets, write_tiny
from benchmarks.unchanged.names import name_in
from benchmarks.unchanged.runs import FIXED, ONLINE, PRM, SFT, Run


def resolve(commit: str) -> str:
    """Return the full name of a commit; ends with 2 where there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"error: there is no commit '{commit}' here: name one of `git log --oneline`", file=sys.stderr)
        raise SystemExit(2)
    return done.stdout.strip()


def unpack(commit: str, tree: Path) -> None:
    """Write the files of a commit to a new folder."""
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)


@dataclass(frozen=True)
class Side:
    """A commit's files at `folder`/tree, its data and its runs beside them."""

    folder: Path
    tiny: Path

    @property
    def tree(self) -> Path:
        """Where the files of the commit lie."""
        return self.folder / "tree"

    def run(self, runs: tuple[Run, ...], places: dict[str, str], *, has_server: bool = False) -> None:
        """Do the runs in order; ends with 1 where one of them fails."""
        places = {"tiny": str(self.tiny), "data": str(self.folder / "data"), "server": "<server>", **places}
        output = [[f"output_dir={self.folder / run.folder}"] for run in runs]
        jobs = [{"program": run.program, "settings": run.command(self.tree, places) + more}
                for run, more in zip(runs, output, strict=True)]  # fmt: skip
        server = (
            [name_in(self.tree, "benchmarks.processes.repeatable_server"), places["policy"]] if has_server else None
        )
        path = self.folder / "jobs.json"
        path.write_text(json.dumps({"tree": str(self.tree), "log": str(self.folder / "runs.log"), "server": server,
                                    "runs": jobs}))  # fmt: skip
        subprocess.run([sys.executable, "-m", "benchmarks.unchanged.side", str(path)], cwd=ROOT, check=True)


def train_everything(sides: list[Side]) -> dict[str, Path]:
    """Do all runs on every side, the older commit first; run → the model folder that it began from."""
    for side in sides:
        side.run((SFT,), {})
    policy = sides[0].folder / SFT.folder / "model"
    for side in sides:
        side.run((PRM, *FIXED), {"policy": str(policy)})
    prm = sides[0].folder / PRM.folder / "model"
    for side in sides:
        side.run(ONLINE, {"policy": str(policy), "prm": str(prm)}, has_server=True)
    return {SFT.name: sides[0].tiny, **{run.name: policy for run in (PRM, *FIXED, *ONLINE)}}


def write(comparisons: dict[str, Comparison], commits: list[str], seconds: float) -> Path:
    """Write results/unchanged.json."""
    num_identical = sum(found.is_identical for found in comparisons.values())
    how = f"bash scripts/bench.sh unchanged {commits[0][:12]} {commits[1][:12]}"
    rows = [[name, found.num_tensors, found.num_moved, found.num_numbers, len(found.differences),
             "yes" if found.is_identical else "no"] for name, found in comparisons.items()]  # fmt: skip
    columns = ["run", "tensors", "of them trained", "numbers of metrics.jsonl", "differences", "bit-identical"]
    title = (f"Commit {commits[0][:12]} and commit {commits[1][:12]}, the same trainings with the same seeds: final "
             "weights and metrics, compared bit for bit.")  # fmt: skip
    detail = {
        "before": commits[0],
        "after": commits[1],
        "seconds": round(seconds),
        "differences": {name: found.differences[:20] for name, found in comparisons.items() if found.differences},
        "metrics_only_after": sorted({name for found in comparisons.values() for name in found.only_after}),
    }
    figures = {"runs_bit_identical": count(num_identical, len(comparisons), "runs", how=how)}
    return write_result("unchanged", figures, detail, tables=[{"title": title, "columns": columns, "rows": rows}])


def main() -> None:
    """Unpack, train, compare, write results/unchanged.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--keep", action="store_true", help="leave the runs where they are, and print where")
    arguments = parser.parse_args()
    started = time.monotonic()
    commits = [resolve(arguments.before), resolve(arguments.after)]
    folder = Path(tempfile.mkdtemp(prefix="unchanged-"))
    tiny = write_tiny(folder / "tiny")
    sides = [Side(folder / name, tiny) for name in ("before", "after")]
    for side, commit in zip(sides, commits, strict=True):
        unpack(commit, side.tree)
        write_datasets(side.folder / "data", tiny, side.tree)
    try:
        began_from = train_everything(sides)
    except subprocess.CalledProcessError:  # its line stands above
        raise SystemExit(1) from None
    before, after = (side.folder for side in sides)
    folders = {run.name: run.folder for run in (SFT, PRM, *FIXED, *ONLINE)}
    comparisons = {name: compare_runs(before / at, after / at, began_from[name]) for name, at in folders.items()}
    print(write(comparisons, commits, time.monotonic() - started))
    for name, found in comparisons.items():
        for difference in found.differences[:5]:
            print(f"{name}: {difference}", file=sys.stderr)
    if arguments.keep:
        print(folder)
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
