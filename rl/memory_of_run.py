"""The memory plan of a run of main.py from its config: the learners, what is only read, and what a delivery holds.

A pass is taken to be as large as the settings let it be: `update.micro_batch_size` rows of the engine's window, or
`update.micro_batch_tokens`, and one row at least. What an engine takes on the same device is not in it
(`checks.gpu_plan`).
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from espalier.models.frozen_reward import is_held_in_halves
from espalier.models.gpu_attention import AUTO, kernel_of
from espalier.models.load import max_length_of
from espalier.models.log_ratio_reward import REFERENCE, is_log_ratio_reward
from espalier.models.precision import has_fast_bf16, is_bf16
from espalier.models.recompute import recomputes
from espalier.rl.combinations import reads_start
from espalier.rl.update import most_rollouts
from espalier.runtime.entrypoint import BadConfig, find_component
from espalier.runtime.schemas import RLConfig
from espalier.sampling.engine_arguments import spelled
from espalier.sampling.shared_buckets import sender_bytes
from espalier.training.memory_of_run import (
    NoPlan,
    cutting_of,
    micro_batch_of,
    model_nodes,
    network_of,
    of_node,
    steps_rows,
    warn_of_memory,
)
from espalier.training.memory_plan import Network, Setup, Work, held_numbers, merged_numbers
from espalier.training.shards import GROUP_BYTES


def rl_setup(config: RLConfig, num_ranks: int, is_gpu: bool) -> Setup:
    """Return how a rank of main.py computes its largest pass. Raises NoPlan where a network has none."""
    if config.kl.kind == "full" and config.kl.coefficient > 0:
        raise NoPlan("no memory plan of kl.kind=full: it holds the logits of all tokens, of two networks")
    policy = of_node(config.model, config.lora)
    networks = [policy]
    if config.critic is not None:
        networks.append(network_of(str(config.critic.model["path"]), 1))
    if config.implicit_reward is not None:
        networks.append(of_node(config.implicit_reward.model))
    cutting = cutting_of(config.deepspeed, num_ranks, is_gpu)
    kind = "cuda" if is_gpu else "cpu"
    read: dict[bool, list[int]] = {False: [], True: []}
    for path, is_cut in read_networks(config):
        read[is_cut].append(held_numbers(network_of(path).shape, is_held_in_halves(path, kind)))
    is_half = is_bf16(config.precision, kind)
    return Setup(
        tuple(networks),
        _work(config, num_ranks),
        frozen=sum(read[False]),
        frozen_cut=tuple(read[True]),
        reference=policy.shape if reads_start(config) and not config.lora else None,
        is_start=True,
        is_bf16=is_half,
        is_bf16_fast=has_fast_bf16(kind),
        recomputes=recomputes(config.model.get("gradient_checkpointing")),
        is_eager=config.model.get("attention") == "eager",
        attention=kernel_of(str(config.model.get("attention", AUTO)), "cuda" if is_gpu else "cpu", is_half),
        delivered=merged_numbers(policy.shape) if config.lora and cutting["stage"] < 3 else 0,
        buffers=sender_bytes(kind) + (_gathered_bytes(policy) if cutting["stage"] == 3 else 0),
        steps_rows=all(steps_rows(one.optimizer) for one in (config, config.critic, config.implicit_reward) if one),
        averaged=policy.shape.parameters if config.ema.decay else 0,
        **cutting,
    )


def read_networks(config: RLConfig) -> Iterator[tuple[str, bool]]:
    """Return (folder, whether ZeRO-3 cuts it, where it is chosen) of the networks that score rollouts, or a rank's
    share of them: those of the reward, of the estimators and of the filter; of two policies both."""
    others = [config.advantage, config.filter, *config.samples.estimators.values()]
    for node, is_cut in ((config.reward, reward_is_cut(config)), (others, True)):
        for component in model_nodes(_without_engines(node)):
            path, own = component["path"], is_cut and _is_read_frozen(component)
            yield path, own
            if is_log_ratio_reward(path) and Path(path, REFERENCE).is_dir():
                yield str(Path(path, REFERENCE)), own


def _is_read_frozen(component: dict[str, Any]) -> bool:
    """Say whether a component has its network from `models.frozen_reward`; of one that is not there, no."""
    try:
        return bool(getattr(find_component(str(component["_target_"])), "reads_frozen_reward", False))
    except BadConfig:
        return False


def reward_is_cut(config: RLConfig) -> bool:
    """Say whether ZeRO-3, where it is chosen, cuts the networks of the reward over the ranks: not where rank 0 alone
    reads them, beside what engines answer or while all train (`rollout.dynamic_sampling_rounds` of rollouts that are
    drawn ahead)."""
    is_alone = config.rollout.max_staleness > 0 and config.rollout.dynamic_sampling_rounds > 0
    return not is_alone and _without_engines(config.reward) == config.reward


def _without_engines(node: Any) -> Any:
    """Return the node without components that have their networks in engines, or on a server."""
    if isinstance(node, dict):
        asked = (node.get(name) for name in ("asking", "engines"))
        if any(isinstance(one, dict) and "_target_" in one for one in asked):
            return {}
        return {name: _without_engines(value) for name, value in node.items()}
    return [_without_engines(value) for value in node] if isinstance(node, list) else node


def warn_of_learner_memory(config: RLConfig, num_ranks: int) -> None:
    """Warn of a learner that alone does not fit the GPU that is here (`training.memory_of_run.warn_of_memory`)."""
    warn_of_memory(lambda: (rl_setup(config, num_ranks, is_gpu=True), micro_batch_of(config.update, window_of(config))))


def _gathered_bytes(policy: Network) -> int:
    """Return what is gathered at once of parameters that are cut: at least the largest one, which is the embedding."""
    return max(GROUP_BYTES, 4 * policy.shape.vocabulary * policy.shape.hidden)


def window_of(config: RLConfig) -> int:
    """Return tokens of the engine's window, of the longest row: vLLM's own option comes before ours, and where it is no
    number (auto) the policy's positions are taken."""
    for node in (config.client or {}, config.server or {}):
        own = spelled(node.get("options") or {}).get("max_model_len") or node.get("max_model_len")
        if own:
            return int(own) if str(own).isdecimal() else max_length_of(str(config.model["path"])) or 512
    return 512


def passes_per_step(config: RLConfig, num_ranks: int) -> int:
    """Count the forward and backward passes of the rank with the most rows."""
    own = _own_rows(config, num_ranks)
    if not config.update.micro_batch_tokens:
        return math.ceil(own / config.update.micro_batch_size)
    return math.ceil(own / max(1, config.update.micro_batch_tokens // window_of(config)))  # a row is never parted


def _own_rows(config: RLConfig, num_ranks: int) -> int:
    return math.ceil(min(config.update.minibatch_size, most_rollouts(config)) / num_ranks)


def _work(config: RLConfig, num_ranks: int) -> Work:
    window, own = window_of(config), _own_rows(config, num_ranks)
    rows = min(config.update.micro_batch_size, own)
    response = min(window, int(config.params["max_tokens"]))
    tokens, reads = rows * window, rows * response
    if config.update.micro_batch_tokens:
        tokens = min(own * window, max(window, config.update.micro_batch_tokens))
        reads = tokens * response // window
    return Work(tokens, reads, pairs=tokens * window, passes=passes_per_step(config, num_ranks))
