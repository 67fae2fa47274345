"""Which settings a model is trained with where nobody named an experiment: by its size, and by what its GPUs hold.

    python -m espalier.checks.recipe dpo gsm8k,word_arithmetic MODEL 8 [lora=lora ...]

prints the trainer's arguments (`-cn exp/dpo/preference_pairs size=dpo/7b deepspeed=zero3`); a line on stderr says why.

The shell pipelines ask it; the doctor says the same of a config. Learning rates, and where each was published, are in
conf/size/. The experiments of the embedded tasks (conf/exp/<kind>/<task>.yaml and the like) are for tiny policies and
taken for those alone.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from espalier.checks.check import CheckFailed, Skipped
from espalier.checks.resources import num_parameters, whole_memory
from espalier.data.records import BadInput
from espalier.runtime.entrypoint import CONF
from espalier.runtime.schemas import RLConfig, TrainConfig
from espalier.training.memory_plan import GIB

# The largest number of parameters that counts as a size of conf/size/: halfway to the next, on a log scale.
SIZES = (("0.5b", 0.87e9), ("1.5b", 3.2e9), ("7b", 15e9), ("32b", 47e9), ("70b", float("inf")))
NEUTRAL = {
    "sft": "sft/demonstrations",
    "reward": "reward/step_values",
    "outcome": "reward/outcome_pairs",
    "dpo": "dpo/preference_pairs",
    "ppo": "ppo/ppo_outcome_model",
}
# Weights, gradients and moments in bytes per trained parameter on the GPU of one rank (docs/launching.md); what a run
# needs in all is `training.memory_plan`'s.
BYTES_PER_PARAMETER = {
    "none": (4, 4, 8),
    "zero0": (4, 4, 8),
    "zero1": (4, 4, 12),
    "zero2": (4, 4, 12),
    "zero3": (4, 4, 12),
    "zero1_offload": (4, 4, 0),
    "zero2_offload": (4, 0, 0),
    "zero3_offload": (0, 0, 0),
}
_TINY = 20e6  # parameters of a policy that the experiments of the embedded tasks are for, at most
_LARGE = ("32b", "70b")
SMALLEST = 0.1e9  # parameters of a model that the presets' rates are for, at least
_ALONE, _ON_RANKS = ("none", "zero2_offload", "zero3_offload"), ("none", "zero1", "zero2", "zero3", "zero3_offload")


@dataclass(frozen=True)
class Node:
    """What one GPU has: its memory and its part of the machine's, in GiB (an H100 of eight with 1.8 TiB)."""

    gpu_gib: float = 80.0
    host_gib: float = 225.0
    usable: float = 0.7  # the rest is for activations


def node_here() -> Node:
    """Return the smallest GPU of this machine; without one that of `Node`."""
    import torch

    if not torch.cuda.is_available():
        return Node()
    num = torch.cuda.device_count()
    smallest = min(torch.cuda.get_device_properties(number).total_memory for number in range(num))
    return Node(round(smallest / GIB, 1), round(whole_memory() / num / GIB, 1))


def engine_name(settings: Any) -> str:
    """Return what conf/deepspeed calls a JSON of these settings."""
    if not settings:
        return "none"
    zero = settings.get("zero_optimization") or {}
    is_offloaded = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    return f"zero{zero.get('stage', 0)}{'_offload' if is_offloaded else ''}"


def size_of(parameters: int) -> str:
    """Return the size of conf/size/ that a number of parameters is nearest to."""
    return next(name for name, largest in SIZES if parameters <= largest)


def zero_of(parameters: int, num_ranks: int, has_adapters: bool, node: Node = Node()) -> str | None:
    """Return the fastest conf/deepspeed whose weights, gradients and moments leave room for activations; None where not
    even offloading does, and adapters over a base in 4 bits are left (lora=qlora).

    Adapters' own gradients and moments count as nothing: a hundredth of the weights.
    """
    for name in _ALONE if num_ranks == 1 else _ON_RANKS:
        weights, gradients, moments = (0 if has_adapters and part else each
                                       for part, each in enumerate(BYTES_PER_PARAMETER[name]))  # fmt: skip
        stage = int(name[4]) if name.startswith("zero") else 0
        shares = [each / (num_ranks if stage >= least else 1)
                  for each, least in zip((weights, gradients, moments), (3, 2, 1), strict=True)]  # fmt: skip
        copies = 2 if stage < 3 else 0  # bf16; under ZeRO-3 of a layer at a time
        is_offloaded = name.endswith("_offload")
        fits_gpu = (sum(shares) + copies) * parameters <= node.usable * node.gpu_gib * GIB
        fits_host = not is_offloaded or 16 * parameters <= num_ranks * node.host_gib * GIB
        if fits_gpu and fits_host and not (is_offloaded and has_adapters):
            return name
    return None


def preset(kind: str, parameters: int, num_ranks: int, has_adapters: bool, node: Node = Node()) -> list[str]:
    """Return the overrides `size=…` and `deepspeed=…` (or `lora=qlora`) for a kind of training, one of NEUTRAL's.

    Raises BadInput where the model does not fit that many GPUs.
    """
    size, engine = size_of(parameters), zero_of(parameters, num_ranks, has_adapters, node)
    if engine is None and not has_adapters:
        raise BadInput(f"a model of {parameters / 1e9:.1f}B parameters has no room for training all its weights on "
                       f"{num_ranks} GPU{'s' * (num_ranks > 1)} of {node.gpu_gib:g} GiB: set lora=qlora, or more GPUs "
                       "(nproc=)")  # fmt: skip
    adapters = "lora_large" if kind == "sft" and size in _LARGE else "lora"
    words = [f"size=[{kind}/{size},{kind}/{adapters}]" if has_adapters else f"size={kind}/{size}"]
    if engine is None:
        return [*words, "lora=qlora"]
    return words if engine == "none" else [*words, f"deepspeed={engine}"]


def rate_of(size: str) -> float:
    """Return the learning rate that `size=…` of a preset sets: of several files that of the last."""
    files = [CONF / "size" / f"{name}.yaml" for name in size.removeprefix("size=").strip("[]").split(",")]
    merged: Any = OmegaConf.merge(*map(OmegaConf.load, files))
    return float(merged["update"]["learning_rate"])


_PREFERENCES = ("dpo", "ipo", "kto", "nca", "hinge", "reference_free", "preference", "implicit")
_HEADS = {"process_reward": "reward", "outcome_reward": "outcome", "bradley_terry": "outcome"}


def kind_of(config: RLConfig | TrainConfig) -> str:
    """Return the kind of conf/size/ that a run is of, by its objective's module; "" where none fits."""
    if isinstance(config, RLConfig):
        return "ppo"
    module = str(config.objective["_target_"]).split(".")[-2]
    if module in _HEADS:
        return _HEADS[module]
    return "dpo" if module.startswith(_PREFERENCES) else "sft" if module == "sft" else ""


def num_gpus() -> int:
    """Return how many GPUs this machine has, at least 1."""
    import torch

    return max(1, torch.cuda.device_count())


def parameters_of(model: str) -> int:
    """Count a model's parameters, from the headers of its weight files, else (a hub name, other files) from its config.

    Raises BadInput where the folder is damaged.
    """
    try:
        return num_parameters(model)
    except CheckFailed as error:
        raise BadInput(str(error)) from None
    except Skipped:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            return sum(
                one.numel() for one in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).parameters()
            )


def recipe(
    kind: str, names: Sequence[str], model: str, num_ranks: int, overrides: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Return (the trainer's arguments, why in a line). `names`: experiments beside the kind's neutral one, for tiny
    policies, of which the first that there is counts. Raises BadInput."""
    folder = NEUTRAL[kind].split("/")[0]
    parameters = parameters_of(model)
    chosen = dict(word.split("=", 1) for word in overrides if "=" in word)
    own = next((name for name in names if (CONF / "exp" / folder / f"{name}.yaml").is_file()), None)
    count = f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"
    if own and parameters <= _TINY:
        return [
            "-cn",
            f"exp/{folder}/{own}",
        ], f"{model} ({count} parameters) is trained as conf/exp/{folder}/{own}.yaml says"
    has_adapters = chosen.get("lora", "none") != "none"
    node = node_here()
    words = preset(kind, parameters, num_ranks, has_adapters, node)
    if "lora=qlora" in words and chosen["lora"] != "qlora":
        raise BadInput(f"{model} ({count} parameters) does not fit {num_ranks} GPU{'s' * (num_ranks > 1)} of "
                       f"{node.gpu_gib:g} GiB with lora={chosen['lora']}: set lora=qlora, or more GPUs "
                       "(nproc=)")  # fmt: skip
    words = [word for word in words if word.split("=", 1)[0] not in chosen]
    name = f"exp/{NEUTRAL[kind]}"
    key = "ppo" if kind == "ppo" else "exp"
    why = f"{model} ({count} parameters) is trained by {name} {' '.join(words)} "
    why += f"on GPUs of {node.gpu_gib:g} GiB (docs/training.md; {key}= names another)"
    if parameters < SMALLEST:
        why += "; its rate is that of much larger models"
    return ["-cn", name, *words], why


def main() -> int:
    """Print the arguments, say why."""
    usage = f"give KIND TASKS MODEL RANKS [overrides], with KIND one of {', '.join(NEUTRAL)} and RANKS a number"
    if len(sys.argv) < 5 or sys.argv[1] not in NEUTRAL or not sys.argv[4].isdecimal():
        print(f"error: {usage}", file=sys.stderr)
        return 2
    kind, names, model, num_ranks, *overrides = sys.argv[1:]
    if "/" in model and not Path(model).exists() and model.startswith((".", "/", "~")):
        print(f"error: {model}: no such model folder: check the path", file=sys.stderr)
        return 2
    try:
        words, why = recipe(kind, names.split(","), model, int(num_ranks), overrides)
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(" ".join(words))
    print(why, file=sys.stderr)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
