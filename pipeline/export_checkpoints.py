"""A training run → a folder of candidate policies, one model folder for every checkpoint that is to be compared.

    candidates/step-00000000    the policy the run started from (`which: all`), a link
    candidates/step-00000020    a checkpoint's weights as a model folder (`which: all`)
    candidates/step-00000060    the trained model, a link

Train with `save_every` above 0 and a large `keep_checkpoints` to have something to choose from. DeepSpeed's own
checkpoints are not read: train those runs without it, or take the last model alone.
"""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from data.records import BadInput
from pipeline.stage import StageContext
from pipeline.trajectory_groups import check_choice

log = logging.getLogger("stage")

WHICH = ("all", "last")


def last_step(run: Path) -> int:
    """The number of optimizer steps of a finished run. Raises BadInput where its metrics do not say."""
    path = run / "metrics.jsonl"
    try:
        steps = [int(json.loads(line)["step"]) for line in path.read_bytes().splitlines() if line.strip()]
        return max(steps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: does not say how many steps were trained ({error}): train again") from None


def start_of(run: Path) -> str:
    """The model folder a run started from."""
    try:
        path = yaml.safe_load((run / "config.yaml").read_bytes())["model"]["path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BadInput(f"{run}/config.yaml: does not say where training started ({error!r}): not a run") from None
    if not isinstance(path, str) or not (Path(path) / "config.json").is_file():
        raise BadInput(f"{run}: started from {path!r}, which is no model folder here: candidates need one")
    return path


@dataclass(frozen=True)
class ExportCheckpoints:
    """`run_dir`: a finished training run. `which`: all, the start and the end with the checkpoints between; or last."""

    run_dir: str
    which: str = "all"

    def __post_init__(self) -> None:
        check_choice("which", self.which, WHICH)

    def inputs(self) -> list[str]:
        """The run's config and its model's weights: a run without them is not finished."""
        run = Path(self.run_dir)
        weights = sorted(str(path) for path in (run / "model").glob("*.safetensors"))
        return [str(run / "config.yaml"), *(weights or [str(run / "model" / "model.safetensors")])]

    def run(self, input_path: str, context: StageContext) -> None:
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
                for checkpoint in sorted((run / "checkpoints").glob("step-*")):
                    step = checkpoint.name.removeprefix("step-")
                    if step.isdigit() and 0 < int(step) < final:
                        _export(checkpoint, start, partial / _name(int(step)))
            context.counts["candidates"] = len(list(partial.iterdir()))
            partial.replace(output)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if self.which == "all" and context.counts["candidates"] < 3:
            log.warning("%s: no checkpoint between start and end: set save_every and keep_checkpoints", run)

    @staticmethod
    def _link(partial: Path, output: Path, step: int, target: Path) -> None:
        """A link that holds once `partial` bears the name `output`, and moves with the run."""
        (partial / _name(step)).symlink_to(os.path.relpath(target.resolve(), output.resolve()))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _export(checkpoint: Path, start: str, folder: Path) -> None:
    """One checkpoint of the one-process engine as a model folder."""
    import torch

    from models.load import load_policy, load_tokenizer

    path = checkpoint / "engine.pt"
    if not path.is_file():
        raise BadInput(f"{checkpoint}: no engine.pt there (DeepSpeed's checkpoint?): choose stage.which=last")
    model = load_policy(start)
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    except (RuntimeError, KeyError, OSError, EOFError) as error:
        raise BadInput(f"{path}: not a checkpoint of {start} ({str(error).splitlines()[0][:120]})") from None
    model.config.use_cache = True
    model.save_pretrained(folder)
    load_tokenizer(start).save_pretrained(folder)
