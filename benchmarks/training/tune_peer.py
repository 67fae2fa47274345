"""Which exact setting of TRL is fastest on this machine: rates of every candidate of `peer.CANDIDATES`.

    .venv/bin/python -m benchmarks.training.tune_peer [--kinds sft]

One candidate after the other on a quiet machine, each with a short warm-up and the median of three runs. What comes
out best belongs into `BEST`, `BEST_MICRO_BATCH` and `BEST_ATTENTION` of peer.py.
"""

import json
import os
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import Side, load_before
from benchmarks.training.corpus import build
from benchmarks.training.settings import CANDIDATES, SETTINGS
from benchmarks.training.training import FULL, block_steps, parse, rate


def main() -> None:
    """Print a line for every candidate."""
    arguments = parse()
    load_before()
    with tempfile.TemporaryDirectory(prefix="training-") as scratch:
        build(Path(scratch), FULL.sizes)
        for kind in (kind for kind in SETTINGS if kind in arguments.kinds):
            path = [str(ROOT)] if kind != "prm" else [arguments.prm_trl, str(ROOT)]
            surroundings = {"OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": os.pathsep.join(path)}
            for options in CANDIDATES[kind]:
                command = [arguments.trl_python, "-m", "benchmarks.training.peer", scratch, kind, "best"]
                side = Side([*command, "--options", json.dumps(options)], surroundings)
                try:
                    side.ask({"max_steps": 1})
                    steps = block_steps(kind, FULL)
                    rates = [rate(side.ask({"max_steps": steps, "seed": seed})) for seed in (1, 2, 3)]
                finally:
                    side.stop()
                print(f"{kind} {json.dumps(options)}: {median(rates):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
