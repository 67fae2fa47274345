"""Run the trainings of one commit, whose files lie in a folder, with the sampler of that commit.

    python -m benchmarks.unchanged.side JOBS.json

The libraries are loaded once and every run is a forked child, so that a start takes no seconds. This process imports
nothing of the package, or the children would find this tree's modules where theirs belong. JOBS.json: `tree`, `log`,
`server` (its module and its model, or null), `runs` (program and settings of each; `<server>` becomes the address).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification  # noqa: F401  (once, before the forks)

from benchmarks.processes.forked import ROOT, exit_code, start_program


def enter(tree: Path) -> None:
    """Make the tree the place that this process and its children import from."""
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(tree)


def start_server(module: str, model: str, tree: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the tree's sampler; the process and its address."""
    command = [sys.executable, "-m", module, "--model", model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{process.stdout.readline().strip()}"


def run_all(jobs: dict[str, Any]) -> int:
    """Do every run in order; 0, or 1 as soon as one of them fails (what it printed ends in the log)."""
    tree, log = Path(jobs["tree"]), Path(jobs["log"])
    enter(tree)
    process, address = None, ""
    if jobs["server"]:
        module, model = jobs["server"]
        process, address = start_server(module, model, tree)
    try:
        for job in jobs["runs"]:
            settings = [setting.replace("<server>", address) for setting in job["settings"]]
            code = exit_code(start_program(job["program"], settings, log, root=tree))
            if code:
                print(f"error: {job['program']} {' '.join(settings)} ended with exit code {code}: see {log}",
                      file=sys.stderr)  # fmt: skip
                return 1
    finally:
        if process is not None:
            process.terminate()
            process.wait(10)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run_all(json.loads(Path(sys.argv[1]).read_text())))
