"""A checkpoint → a standard Hugging Face folder.

    python run_stage.py -cn training/export_model stage.run_dir=RUN output=DIR

The model is built as the run built it (its class, its head, its adapters) and takes the checkpoint's weights, of
any engine and number of ranks. Adapters are merged, and stand in `adapter/` too.
"""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from espalier.data.records import BadInput
from espalier.data.trained_on import copy_trained_on
from espalier.data.training_layout import read_training_layout
from espalier.models.load import load_tokenizer
from espalier.models.lora import write_bits
from espalier.models.quantised import round_weights
from espalier.runtime.base_model import base_of_run, check_base, write_base
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.fingerprints import changed_input, input_fingerprints
from espalier.runtime.manifest import write_folder
from espalier.training.checkpoint import Best, read_state, select
from espalier.training.engine import load_weights
from espalier.training.example_cache import stored_examples
from espalier.training.pieces import stored_weights
from espalier.training.trained_on import write_trained_on

log = logging.getLogger("stage")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Context(Protocol):
    """What the stage needs of its context: where to write, and what to say of it."""

    output: Path
    counts: dict[str, Any]


@dataclass(frozen=True)
class ExportModel:
    """`run_dir`: of a training run. `checkpoint`: latest, best (by the run's best_metric) or step-N. `dtype`:
    float32 or bfloat16."""

    run_dir: str
    checkpoint: str = "latest"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadInput(f"stage.dtype must be {' or '.join(DTYPES)}, got '{self.dtype}'")
        if self.checkpoint in ("auto", "none"):
            raise BadInput(f"stage.checkpoint must be latest, best or step-N, got '{self.checkpoint}'")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's own config. Raises BadInput where `run_dir` has none, or that of something else."""
        path = Path(self.run_dir) / "config.yaml"
        if not path.is_file():
            raise BadInput(f"{path}: no such file: stage.run_dir must be the directory of a training run")
        config = yaml.safe_load(path.read_text())
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise BadInput(f"{path}: is not the config of a training run: it has no model")
        return config

    @cached_property
    def folder(self) -> Path:
        """The checkpoint, read through and found whole."""
        rule = self.config.get("checkpoints", self.config)  # runs of before have no topics
        lowest = rule.get("best_is", "lowest") == "lowest"
        folder = select(Path(self.run_dir), self.checkpoint, Best(str(rule.get("best_metric", "")), lowest, 1))
        assert folder is not None  # only auto and none give none
        return folder

    def inputs(self) -> list[str]:
        """Return the run's config and the checkpoint's manifest, which stands for all of its files."""
        return [str(Path(self.run_dir) / "config.yaml"), str(self.folder / "manifest.json")]

    def run(self, input_path: str, context: Context) -> None:
        """Write the folder, complete or not at all. Raises BadInput where an input is given, and BadConfig where
        weights that the checkpoint does not hold would come from another model than the run began with."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads a run: set stage.run_dir, leave input empty")
        model = build(self.config["model"])
        lora = self.config.get("lora")
        bits = int(lora.get("bits", 0)) if lora else 0
        if lora:  # adapters of a quantised base belong to its rounded weights
            model = build({**lora, "bits": 0}).wrap(round_weights(model, bits) if bits else model)
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        trained_on = base_of_run(Path(self.run_dir))
        if not all(parameter.requires_grad for parameter in model.parameters()):  # the others are the base's
            check_base(trained_on, self.config["model"]["path"], Path(self.run_dir))
        load_weights(model, stored_weights(self.folder, shapes), str(self.folder))
        tokenizer = load_tokenizer(self.config["model"]["path"])

        def write(partial: Path) -> None:
            self._say_trained_on(partial, tokenizer, context)
            whole = model
            if lora:
                model.save_pretrained(partial / "adapter")
                write_bits(partial / "adapter", bits)
                write_base(partial / "adapter", trained_on)
                copy_trained_on(partial, partial / "adapter")
                (partial / "adapter" / "README.md").unlink(missing_ok=True)
                whole = model.merge_and_unload(safe_merge=True)
            whole.to(DTYPES[self.dtype]).save_pretrained(partial)
            tokenizer.save_pretrained(partial)

        write_folder(context.output, write)
        context.counts.update(step=read_state(self.folder).step, parameters=model.num_parameters())

    def _own_examples(self) -> Any:
        """Return the config node of the run's examples. Raises BadInput where their files have changed since."""
        node, origin = self.config["examples"], Path(self.run_dir) / "provenance.yaml"
        began = (yaml.safe_load(origin.read_text()) or {}) if origin.is_file() else {}
        if changed := changed_input(began.get("inputs", {}), input_fingerprints({"examples": node})):
            raise BadInput(f"{changed} has changed since the run began")
        return node

    def _say_trained_on(self, folder: Path, tokenizer: Any, context: Context) -> None:
        """Write what the run trains on: as its own model says it, or, where it has none yet, or one of an earlier
        version that says less, by its examples."""
        finished = Path(self.run_dir) / "model"
        copy_trained_on(finished, folder)
        has_head = self.config["model"].get("num_labels") is not None
        if finished.is_dir() and not (has_head and read_training_layout(str(finished)) is None):
            return
        try:
            examples = stored_examples(self._own_examples(), tokenizer)
        except (BadInput, BadConfig, KeyError, TypeError) as error:  # settings of an earlier version are the latter
            context.counts["trained_on"] = "not known"
            log.warning("%s does not say all of what it was trained on: the examples of %s cannot be read (%s)",
                        context.output, self.run_dir, error)  # fmt: skip
            return
        write_trained_on(folder, examples, tokenizer, self.config["model"])
