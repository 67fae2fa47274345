"""An adapter → a standard Hugging Face folder.

python run_stage.py -cn training/merge_lora stage.adapter=DIR output=DIR
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.data.records import BadInput
from espalier.data.trained_on import copy_trained_on
from espalier.models.load import load_tokenizer
from espalier.models.lora import base_of_adapter, merge_adapter
from espalier.pipeline.stage import StageContext
from espalier.runtime.base_model import base_of_adapter_folder, check_base
from espalier.runtime.manifest import write_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MergeLora:
    """`adapter`: peft's folder. `base`: its base model, "" for the one it names. `dtype`: float32 or bfloat16."""

    adapter: str
    base: str = ""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadInput(f"stage.dtype must be {' or '.join(DTYPES)}, got '{self.dtype}'")

    def inputs(self) -> list[str]:
        """Return the two files of an adapter."""
        return [str(Path(self.adapter) / name) for name in ("adapter_config.json", "adapter_model.safetensors")]

    def run(self, input_path: str, context: StageContext) -> None:
        """Write the folder, complete or not at all. Raises BadInput where there is an input, and BadConfig where the
        base is not the one that the adapter was trained on."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads an adapter: set stage.adapter, leave input empty")
        base = base_of_adapter(Path(self.adapter), self.base)
        check_base(base_of_adapter_folder(Path(self.adapter)), base.config._name_or_path, Path(self.adapter))
        tokenizer = load_tokenizer(base.config._name_or_path)
        merged = merge_adapter(Path(self.adapter), lambda: base)

        def write(partial: Path) -> None:
            merged.to(DTYPES[self.dtype]).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            copy_trained_on(Path(self.adapter), partial)

        write_folder(context.output, write)
        context.counts.update(parameters=merged.num_parameters())
