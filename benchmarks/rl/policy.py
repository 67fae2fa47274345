"""The SFT policy that runs start from: an imperfect teacher's, as in the quick start, unless another task is said."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.processes.forked import ROOT


def run_program(log: Path, program: str, *settings: str) -> None:
    """One program of this project, whole; raises SystemExit where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        command = [sys.executable, program, *settings]
        code = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"{program} {' '.join(settings[:4])} ... ended with exit code {code}: see {log}")


def make_policy(
    folder: Path,
    num_steps: int,
    experiment: str = "exp/sft/word_arithmetic",
    task: Sequence[str] = (),
    settings: Sequence[str] = (),
    start: Path | None = None,
) -> Path:
    """Return `folder/sft/model` after `num_steps` steps of `experiment` on demonstrations of the task that the settings
    `task` say, from the model `start` or a fresh network; what is there already is kept."""
    model, log = folder / "sft" / "model", folder / "programs.log"
    if model.is_dir():
        return model
    demonstrations, base = folder / "demonstrations.jsonl", folder / "base"
    few = ["task.num_demonstrations=2000"] if num_steps < 100 else []
    if not demonstrations.is_file():
        run_program(log, "run_stage.py", "-cn", "problems/make_demonstrations", f"output={demonstrations}", *few, *task)
    if start is None and not base.is_dir():
        run_program(log, "run_stage.py", "-cn", "training/make_policy", f"input={demonstrations}", f"output={base}")
    train(folder / "sft", start or base, demonstrations, log, experiment, [f"max_steps={num_steps}", *settings])
    return model


def train(run: Path, model: Path, examples: Path, log: Path, experiment: str, settings: Sequence[str]) -> None:
    """`trainer_base_ds_mul.py` on a file of examples; a finished run is left as it is."""
    own = ["-cn", experiment, f"output_dir={run}", f"model.path={model}", f"examples.path={examples}"]
    run_program(log, "trainer_base_ds_mul.py", *own, *settings)
