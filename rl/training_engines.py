"""The engines of a run: plain torch or DeepSpeed under the policy and the critic, adapters on the policy; and what
cannot be had together, reported before anything starts."""

from collections.abc import Mapping
from typing import Any

import torch

from espalier.models.inputs import network
from espalier.models.load import BadModel, load_reference
from espalier.models.packing_check import is_cut, packing_of
from espalier.runtime.distributed import device
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.schemas import RLConfig
from espalier.training.deepspeed_engine import DeepSpeedEngine, cut_over_ranks, cuts_weights, loading
from espalier.training.engine import Engine, TorchEngine

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RENAMED = ("mixtral", "minimax", "minimax_m2", "phimoe")
_NOISES = ("dropout", "layerdrop", "pdrop", "jitter")


def check_engines(config: RLConfig) -> None:
    """Raise BadConfig where an engine or adapters cannot do what another setting asks of them."""
    if int(((config.deepspeed or {}).get("tensor_parallel") or {}).get("autotp_size") or 1) > 1:
        raise BadConfig("main.py deals rollouts to all ranks, tensor parallelism wants the same on some: set "
                        "deepspeed=zero3")  # fmt: skip

    lora = config.lora or {}
    if lora.get("bits"):
        raise BadConfig("lora.bits: rounded weights cannot be delivered to the sampler: set lora=lora")
    if lora.get("dropout"):
        raise BadConfig("lora.dropout: a ratio of 1 must mean an unchanged policy: set lora.dropout=0")
    if not 0 <= config.ema.decay < 1:
        raise BadConfig(f"ema.decay must be in [0, 1) (0: no average), got {config.ema.decay:g}")


def check_experts(model: Any, path: str) -> None:
    """Raise BadModel where engines cannot take new weights of a network's experts."""
    config = network(model).config.get_text_config()
    if not any(int(getattr(config, name, None) or 0) > 1 for name in _NUM_EXPERTS):
        return
    if config.model_type in _RENAMED:
        raise BadModel(f"{path}: {config.model_type} is held under other names than it is published under, and engines "
                       "take published ones: choose another network for main.py")  # fmt: skip
    if device().type == "cpu":
        raise BadModel(f"{path} has experts, and vLLM on CPUs computes otherwise by them once it has read weights "
                       "anew, even its own: train it by main.py where there are GPUs")  # fmt: skip


def without_dropout(model: Any) -> Any:
    """Return the model with every dropout of its modules off: a ratio of one must mean an unchanged policy."""
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name in _noises(vars(part)):
            setattr(part, name, 0.0)
    return model


def has_noise(model: Any) -> bool:
    """Say whether the config of the network names a noise of training: some networks read it there in every pass."""
    config = getattr(network(model), "config", None)
    parts = [] if config is None else [config, config.get_text_config()]
    return any(_noises(vars(part)) for part in parts)


def _noises(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of those that are on."""
    return [
        name
        for name, value in settings.items()
        if isinstance(value, float) and value > 0 and any(word in name for word in _NOISES)
    ]


def load_trained(config: RLConfig, node: Any) -> Any:
    """Return the network of a config node; with ZeRO-3 its weights are cut over the ranks as they are read, but for
    DoRA, whose magnitudes are made of whole ones."""
    is_whole = bool(config.lora and config.lora.get("is_dora"))
    with loading(None if is_whole else config.deepspeed):
        return build(node)


def load_frozen(config: RLConfig, path: str, attention: str) -> Any:
    """Return the policy of the start as a reference. With ZeRO-3 its weights are cut over the ranks too, unless
    `kl.kind=full` reads it within the update, where ranks make passes of different numbers."""
    settings = None if config.kl.kind == "full" else config.deepspeed
    with loading(settings, config.precision):
        model = without_dropout(load_reference(path, attention)).to(device())
    return cut_over_ranks(model, settings, config.precision) if settings and cuts_weights(settings) else model


def start_policy(config: RLConfig, engine: Engine) -> Any:
    """Return the policy of the start: without its adapters, or a frozen copy. `engine` trains the policy."""
    if config.lora:
        from espalier.models.without_adapters import PolicyWithoutAdapters

        return PolicyWithoutAdapters(engine.model)
    return load_frozen(config, config.model["path"], config.model["attention"])


def make_training_engine(
    config: RLConfig, model: Any, optimizer: Any, learning_rate: float, max_grad_norm: float
) -> Engine:
    """DeepSpeed where the run has its JSON, else plain torch; `optimizer` is a config node."""
    model = without_dropout(model).to(device())
    if not is_cut(model):
        packing_of(model)  # on whole weights
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    built = build(optimizer, params=trained, lr=learning_rate)
    if not config.deepspeed:
        return TorchEngine(model, built, device(), max_grad_norm)
    return DeepSpeedEngine(
        model,
        built,
        config.deepspeed,
        micro_batch_size=1,  # of its own books only: see start_step
        num_micro_batches=1,
        max_grad_norm=max_grad_norm,
        precision=config.precision,
    )
