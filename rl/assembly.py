"""The parts of a run from its config: policy, critic, reference, reward, estimator, sampler; what does not fit together
is told before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from models.load import load_reference
from models.logprobs import network
from models.lora import PolicyWithoutAdapters
from rewards.score import HoldsModels
from rl.critic import Critic
from rl.engines import check_engines, make_engine, without_dropout
from rl.kl import KLController, check_kl
from rl.live_engine import LiveEngine, OwnEngine, VLLMEngine
from rl.rollout import Sampler, check_params
from rl.trainer import Trainer
from rl.types import AdvantageEstimator
from rl.update import Update
from rl.watch import check_probes
from rl.weight_sync import WeightSync
from runtime.distributed import device, world_size
from runtime.entrypoint import BadConfig, build
from runtime.schemas import RLConfig
from sampling.client import check_one_device
from sampling.local_engines_client import LocalEnginesClient
from sampling.offline_client import OfflineClient
from sampling.server import VLLMServer
from sampling.vllm_client import VLLMClient
from training.engine import Engine

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WHITENINGS = ("none", "scale", "standard")


OwnEngines = OfflineClient | LocalEnginesClient
RLClient = VLLMClient | OwnEngines


def make_trainer(config: RLConfig, tokenizer: Any, server: VLLMServer | None, client: RLClient) -> Trainer:
    """Every component of the run, built from its config, before the server (None: one that runs already, or engines
    without one) starts."""
    params, task = build(config.params), build(config.task)
    estimator: AdvantageEstimator = build(config.advantage)
    check_params(params, config.group_size, estimator.smallest_group)
    check_parts(config, estimator)
    model = build(config.model)
    trained = build(config.lora).wrap(model) if config.lora else model
    engine = make_engine(config, trained, config.optimizer, config.learning_rate, config.max_grad_norm)
    critic = make_critic(config)
    reference = make_reference(config, engine)
    reward = build(config.reward)
    for part in (reward, estimator):
        if isinstance(part, HoldsModels):
            for name, size in part.vocabulary_sizes().items():
                check_vocabulary(model, size, name)
            part.to(device())
    if critic is not None:
        check_vocabulary(model, int(network(critic.engine.model).config.vocab_size), "critic")
    kl = KLController(config.kl.coefficient, config.kl.target, config.kl.horizon)
    check_server = server.check if server is not None else lambda: None
    return Trainer(
        config,
        engine,
        reference,
        task,
        reward,
        estimator,
        Sampler(client, task, tokenizer, config.num_in_flight, config.stall_seconds, check_server),
        params,
        Update(engine, config, params.temperature, params.max_tokens, kl, critic, reference),
        WeightSync(
            engine_of(client, check_server),
            config.probes.max_gap,
            config.precision,
            _max_step(config),
            # "auto", or a server that is not ours: as the trainer has them
            _DTYPES.get(served_dtype(server, client)),
            config.probes.on_fault == "stop",
        ),
        int(tokenizer.pad_token_id),
        Path(config.output_dir),
    )


def check_client(client: Any, server: VLLMServer | None, has_deepspeed: bool = False) -> None:
    """Raise BadConfig where the client and the server are no pair that new weights can be delivered to."""
    if isinstance(client, OwnEngines):
        if server is not None:
            raise BadConfig("this client has its engines itself: set server=none")
        check_one_device(client.options)
        if isinstance(client, OfflineClient):
            _check_same_process(client, has_deepspeed)
    elif not isinstance(client, VLLMClient):
        raise BadConfig("reinforcement learning delivers weights: choose client=vllm (over HTTP), local_engines or "
                        "in_process")  # fmt: skip
    elif server is None and not client.urls:
        raise BadConfig("server=none: name a running server with controls by client.base_url=http://HOST:PORT, or "
                        "choose client=local_engines or in_process")  # fmt: skip


def _check_same_process(client: OfflineClient, has_deepspeed: bool) -> None:
    if not client.is_one_process:
        raise BadConfig("client=offline takes no weights: choose client=local_engines or in_process")
    if has_deepspeed:
        raise BadConfig("client=in_process: vLLM would take DeepSpeed's process group for its own: choose "
                        "client=local_engines or vllm, or deepspeed=none")  # fmt: skip
    if world_size() > 1:
        raise BadConfig("client=in_process is an engine beside one rank: several share client=local_engines or vllm")


def engine_of(client: RLClient, check_server: Callable[[], None]) -> LiveEngine:
    """The engine behind the client, as one that takes new weights."""
    return VLLMEngine(client, check_server) if isinstance(client, VLLMClient) else OwnEngine(client)


def served_dtype(server: VLLMServer | None, client: RLClient) -> str:
    """What the engine computes in, as its config says; empty where another program started it."""
    if not isinstance(client, VLLMClient):
        return client.dtype
    return server.dtype if server is not None else ""


def _max_step(config: RLConfig) -> float:
    """How far one version may lie from the one before; 0 (any) where a fault is only to be told."""
    return config.probes.max_step if config.probes.on_fault == "stop" else 0.0


def check_parts(config: RLConfig, estimator: AdvantageEstimator) -> None:
    """Raise BadConfig where two settings contradict each other, or one would be silently without effect."""
    check_kl(config.kl)
    check_engines(config)
    check_probes(config.probes)
    name = type(estimator).__name__
    if estimator.needs_critic and config.critic is None:
        raise BadConfig(f"{name} needs a critic: choose critic=policy, reward_model or scratch")
    if config.critic is not None and not estimator.needs_critic:
        raise BadConfig(f"{name} reads no values: a critic would be trained for nothing: set critic=none")
    if config.kl.coefficient > 0 and config.kl.place == "reward" and not estimator.reads_token_rewards:
        raise BadConfig(f"{name} does not see a KL penalty in the reward: set kl.place=loss")
    if config.whitening not in WHITENINGS:
        raise BadConfig(f"whitening must be one of {', '.join(WHITENINGS)}, got '{config.whitening}'")
    if config.max_resamplings < 0:
        raise BadConfig(f"max_resamplings must be at least 0, got {config.max_resamplings}")


def check_vocabulary(policy: Any, size: int, name: str) -> None:
    """Raise BadConfig where another network does not know the policy's token ids."""
    own = int(policy.config.vocab_size)
    if size != own:
        raise BadConfig(f"the policy knows {own} token ids and the {name} {size}: both must have one tokenizer")


def make_critic(config: RLConfig) -> Critic | None:
    """The critic with its own engine, None where the config has none."""
    settings = config.critic
    if settings is None:
        return None
    rates = (settings.learning_rate, settings.max_grad_norm)
    engine = make_engine(config, build(settings.model), settings.optimizer, *rates)
    return Critic(engine, settings, config.precision, config.micro_batch_size)


def make_reference(config: RLConfig, engine: Engine) -> Any | None:
    """The policy of the start: without its adapters, or a frozen copy; None without a KL penalty."""
    if config.kl.coefficient <= 0:
        return None
    if config.lora:
        return PolicyWithoutAdapters(engine.model)
    return without_dropout(load_reference(config.model["path"], config.model["attention"])).to(device())
