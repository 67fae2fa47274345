"""A training run → a folder of candidate policies, one model folder for every checkpoint that is to be compared.

    candidates/step-00000000    the policy the run started from (`which: all`), a link
    candidates/step-00000020    a checkpoint's weights as a model folder (`which: all`)
    candidates/step-00000060    the trained model, a link

Train with `checkpoints.save_every` above 0 and a large `checkpoints.keep` to have something to choose from; they
are of one process or of DeepSpeed, as `training.export_model` reads them.
"""

import json
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from espalier.data.records import BadInput
from espalier.runtime.manifest import weight_files
from espalier.training.checkpoint import checkpoints
from espalier.training.export_model import Context, ExportModel

log = logging.getLogger("stage")

WHICH = ("all", "last")


def last_step(run: Path) -> int:
    """Return the number of optimizer steps of a finished run. Raises BadInput where its metrics do not say."""
    path = run / "metrics.jsonl"
    try:
        steps = [int(json.loads(line)["step"]) for line in path.read_bytes().splitlines() if line.strip()]
        return max(steps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: does not say how many steps were trained ({error}): train again") from None


def start_of(run: Path) -> str:
    """Find the model folder a run started from. Raises BadInput where the run's config names none that is here."""
    try:
        path = yaml.safe_load((run / "config.yaml").read_bytes())["model"]["path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BadInput(f"{run}/config.yaml: does not say where training started ({error!r}): not a run") from None
    if not isinstance(path, str) or not (Path(path) / "config.json").is_file():
        raise BadInput(f"{run}: started from {path!r}, which is no model folder here: candidates need one")
    return path


@dataclass
class _Place:
    """Where one candidate goes."""

    output: Path
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportCheckpoints:
    """`run_dir`: a finished training run. `which`: all, the start and the end with the checkpoints between; or last."""

    run_dir: str
    which: str = "all"

    def __post_init__(self) -> None:
        if self.which not in WHICH:
            raise BadInput(f"stage.which must be one of {', '.join(WHICH)}, got '{self.which}'")

    def inputs(self) -> list[str]:
        """Return the run's config and its model's weights: a run without them is not finished."""
        run = Path(self.run_dir)
        return [str(run / "config.yaml"), *weight_files(run / "model")]

    def run(self, input_path: str, context: Context) -> None:
        """Writes the folder itself, complete or not at all."""
        run, output = Path(self.run_dir), context.output
        final = last_step(run)
        partial = output.with_name(f"{output.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self._link(partial, output, final, run / "model")
            if self.which == "all":
                start = start_of(run)
                self._link(partial, output, 0, Path(start))
                for checkpoint in checkpoints(run):
                    step = int(checkpoint.name.removeprefix("step-"))
                    if 0 < step < final:
                        ExportModel(str(run), checkpoint.name).run("", _Place(partial / _name(step)))
            context.counts["candidates"] = len(list(partial.iterdir()))
            partial.replace(output)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if self.which == "all" and context.counts["candidates"] < 3:
            log.warning("%s: no checkpoint between start and end: set checkpoints.save_every and checkpoints.keep",
                        run)  # fmt: skip

    @staticmethod
    def _link(partial: Path, output: Path, step: int, target: Path) -> None:
        """A link that holds once `partial` bears the name `output`, and moves with the run."""
        (partial / _name(step)).symlink_to(os.path.relpath(target.resolve(), output.resolve()))


def _name(step: int) -> str:
    return f"step-{step:08d}"
