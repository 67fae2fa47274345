"""Adapters instead of full weights: LoRA (Hu et al. 2022) and DoRA (Liu et al. 2024), through peft.

Only the adapters (and a fresh scalar head) are trained. They start as the identity, so at step 0 the model is
its base. The reference of DPO is the policy with its adapters off (`models.without_adapters`). A saved
adapter is peft's own folder; `merge_adapter` makes a standard Hugging Face folder of it and its base.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from espalier.models.load import BadModel, from_pretrained, load_policy
from espalier.models.quantised import check_bits, quantise, round_weights
from espalier.models.scalar_head import load_process_reward

HEADS = ("score", "classifier")
QUANTISATION = "quantisation.json"
# What peft calls the tasks of our models, by the ending of the network's name.
TASKS = {"ForCausalLM": "CAUSAL_LM", "ForTokenClassification": "TOKEN_CLS", "ForSequenceClassification": "SEQ_CLS"}


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `rank` on the linear layers named in `targets` ("all-linear": all but the head).

    The update of a weight is `alpha / rank` times B A; with `is_dora` its direction only, beside a trained
    magnitude. `dropout` is applied to the adapters' input. `bits` 4 or 8 keeps the frozen base quantised
    (QLoRA, models.quantised), 0 as it is.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    is_dora: bool = False
    bits: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            raise BadModel(f"lora: rank must be at least 1, alpha above 0 and dropout in [0, 1), got {self.rank}, "
                           f"{self.alpha} and {self.dropout}")  # fmt: skip
        check_bits(self.bits)

    def wrap(self, model: PreTrainedModel) -> Any:
        """Return the model with adapters, all else frozen; a scalar head is trained and saved whole.

        Raises BadModel where `targets` names no layer of the model, or one that shares its weight with another.
        """
        from peft import LoraConfig, get_peft_model

        name = type(model).__name__
        task = next((task for ending, task in TASKS.items() if name.endswith(ending)), None)
        if task is None:
            raise BadModel(f"lora: a {name} cannot have adapters here: {', '.join(TASKS)} can")
        if self.bits:
            model = quantise(model, self.bits)
        heads = [head for head in HEADS if hasattr(model, head)]
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=self.targets,
            use_dora=self.is_dora,
            task_type=task,  # type: ignore[arg-type]
            modules_to_save=heads or None,
        )
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            names = sorted({path.rpartition(".")[2] for path, part in model.named_modules()
                            if isinstance(part, torch.nn.Linear)})  # fmt: skip
            raise BadModel(f"lora.targets {self.targets} is not in the model: its layers are {', '.join(names)}, or "
                           f"all-linear ({str(error)[:80]})") from None  # fmt: skip
        _check_own_weights(adapted)
        return adapted


def _check_own_weights(adapted: Any) -> None:
    """Raise BadModel where an adapter is on a weight of several layers: it changes the output of one, and merged would
    change them all (tied embeddings)."""
    from peft.tuners.lora import LoraLayer

    model = adapted.get_base_model()
    owners = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        own = layer.get_base_layer().parameters(recurse=False) if isinstance(layer, LoraLayer) else ()
        if any(owners[id(value)] > 1 for value in own):
            raise BadModel(f"lora.targets: {name} shares its weight with another layer, which a merge would change "
                           "too: leave it out")  # fmt: skip


def read_adapter(adapter: Path) -> dict[str, Any]:
    """Return `adapter_config.json`. Raises BadModel where the folder holds no adapter."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).is_file():
            raise BadModel(f"{adapter}: no {name} there: an adapter folder is needed (adapter/ of a run with lora)")
    try:
        settings: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
        settings["task_type"] = str(settings["task_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadModel(f"{adapter}/adapter_config.json cannot be read ({error}): save the adapter again") from None
    return settings


def write_bits(adapter: Path, bits: int) -> None:
    """Leave a note beside an adapter that its base was quantised, which peft's own files do not say."""
    if bits:
        (adapter / QUANTISATION).write_text(json.dumps({"bits": bits}) + "\n")


def read_bits(adapter: Path) -> int:
    """Read the bits of the base that an adapter was trained on; 0: it was not quantised. Raises BadModel on a file that
    does not say."""
    path = adapter / QUANTISATION
    try:
        return int(json.loads(path.read_text())["bits"]) if path.is_file() else 0
    except (ValueError, KeyError, TypeError) as error:
        raise BadModel(f"{path} cannot be read ({error}): save the adapter again") from None


def base_of_adapter(adapter: Path, base: str = "") -> PreTrainedModel:
    """Load the model an adapter stands on: `base`, or the folder the adapter itself names; a head of its size.

    Raises BadModel where neither names one, and on an adapter of another task.
    """
    settings = read_adapter(adapter)
    path = base or settings.get("base_model_name_or_path") or ""
    if not path:
        raise BadModel(f"{adapter} does not name its base model: set stage.base")
    if settings["task_type"] == "CAUSAL_LM":
        return load_policy(path)
    if settings["task_type"] == "TOKEN_CLS":
        return load_process_reward(path, _num_labels(adapter))
    if settings["task_type"] == "SEQ_CLS":
        exempt = (["score."], ["lm_head.", "score."])
        return from_pretrained(AutoModelForSequenceClassification, path, *exempt, num_labels=_num_labels(adapter))
    raise BadModel(f"{adapter}: an adapter of task {settings['task_type']} cannot be merged here")


def _num_labels(adapter: Path) -> int | None:
    """Return the rows of the head that is saved with an adapter."""
    from safetensors import safe_open

    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.endswith("score.weight"):
                return int(file.get_slice(name).get_shape()[0])
    return None


def merge_adapter(adapter: Path, load_base: Callable[[], Any]) -> Any:
    """Add the adapter to the weights of its base, in float32; the plain model that this makes.

    An adapter of a quantised base is added to the rounded weights it was trained on. Raises BadModel where the two do
    not fit, and where the adapter is on a weight of several layers.
    """
    from peft import PeftModel

    read_adapter(adapter)
    bits = read_bits(adapter)
    base = round_weights(load_base(), bits) if bits else load_base()
    try:
        adapted = PeftModel.from_pretrained(base, str(adapter))
        _check_own_weights(adapted)
        return adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # safetensors, torch and peft raise many kinds; each is one bad adapter
        shown = str(error).strip().split("\n")[0][:200]
        raise BadModel(f"{adapter}: cannot merge it with {base.config._name_or_path}: {shown}") from error
