"""The parts of a run from its config: policy, critic, reference, reward, estimator, sampler; what does not fit together
is reported before anything starts."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from espalier.models.inputs import network
from espalier.models.load import max_length_of
from espalier.models.row_limits import longest_row
from espalier.models.scalar_head import rescale_head
from espalier.models.tokenizer_checks import check_same_tokenizer
from espalier.rewards.outcome_model import read_normaliser
from espalier.rewards.score import ChecksProblems, HoldsModels, Reward
from espalier.rewards.verifiers import check_judges
from espalier.rl.combinations import check_combinations, critic_normaliser, reads_start, values_are_scaled
from espalier.rl.delivery.delivery import Delivery
from espalier.rl.delivery.live_engine import LiveEngine
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.delivery.weight_update_engine import OwnEngine, VLLMEngine
from espalier.rl.estimator_context import AdvantageEstimator, NamesCompletions
from espalier.rl.evaluation import Evaluation
from espalier.rl.held_out_benchmarks import check_benchmark_prompts
from espalier.rl.implicit_reward import ImplicitReward, make_implicit_reward
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.kl import KLController
from espalier.rl.learner import Learner
from espalier.rl.memory_of_run import warn_of_learner_memory
from espalier.rl.policy import Policy
from espalier.rl.policy_loss import PolicyLoss
from espalier.rl.probes.watch import Watch, check_probes
from espalier.rl.problems import choose_problems
from espalier.rl.reward_scaling import RewardScaling
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_checks import check_params
from espalier.rl.rollout_filters import RolloutFilter
from espalier.rl.rollout_source import SampledGroups
from espalier.rl.samples import RolloutLog, kept_random_state
from espalier.rl.shared_gpus import warn_of_shared_gpus
from espalier.rl.trainer import Trainer
from espalier.rl.training_engines import (
    check_engines,
    check_experts,
    has_noise,
    load_trained,
    make_training_engine,
    start_policy,
)
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.update import Update, steps_per_iteration
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import device, from_main_rank, is_main_rank, world_size
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import HasEngines, SamplingParams
from espalier.sampling.stop_tokens import with_stop_tokens
from espalier.sampling.vllm_client import VLLMClient
from espalier.training.engine import Engine

if TYPE_CHECKING:  # loaded only where the config has them
    from espalier.rl.critic import Critic
    from espalier.rl.ema import MovingAverage
    from espalier.sampling.server import VLLMServer

log = logging.getLogger("rl")
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}

RLClient = VLLMClient | HasEngines


def make_trainer(config: RLConfig, tokenizer: Any, server: "VLLMServer | None", client: RLClient) -> Trainer:
    """Return every component of the run, built from its config, before the server (None: one that runs already, or
    engines without one) starts."""
    check_parts(config)
    warn_of_learner_memory(config, world_size())
    params, task = with_stop_tokens(build(config.params), tokenizer), build(config.task)
    check_benchmark_prompts(task, config.held_out_benchmarks)
    estimator: AdvantageEstimator = build(config.advantage)
    check_params(params, config.rollout.group_size, estimator.smallest_group)
    model = load_trained(config, config.model)
    check_experts(model, str(config.model["path"]))
    trained = build(config.lora).wrap(model) if config.lora else model
    engine = make_training_engine(
        config, trained, config.optimizer, config.update.learning_rate, config.update.max_grad_norm
    )
    critic = make_critic(config)
    start = start_policy(config, engine) if reads_start(config) else None
    reference = start if config.kl.coefficient > 0 else None
    implicit_reward = make_implicit_reward(config, params.temperature, start)
    reward = build(config.reward)
    rollout_filter = make_filter(config, estimator)
    further = make_further_estimators(config, params)
    for part in (reward, estimator, rollout_filter, *further.values()):
        if isinstance(part, HoldsModels):
            for name, found in part.networks().items():
                check_vocabulary(model, int(found.config.vocab_size), name)
                check_same_tokenizer(tokenizer, str(found.config.name_or_path), name)
            part.to(device())
    for name, learner in (("critic", critic), ("implicit reward", implicit_reward)):
        if learner is not None:
            found = network(learner.engine.model).config
            check_vocabulary(model, int(found.vocab_size), name)
            if str(found.name_or_path) not in ("", str(config.model["path"])):
                check_same_tokenizer(tokenizer, str(found.name_or_path), name)
    check_server = server.check if server is not None else lambda: None
    window = from_main_rank(lambda: window_of(client, server, config.model["path"]))
    check_window(model, window)
    engines = engines_of(client, server)
    concurrency = config.engine.concurrency * len(engines)
    return assemble(
        config,
        engine,
        critic,
        reference,
        reward,
        estimator,
        Sampler(client, task, tokenizer, concurrency, config.engine.stall_seconds, check_server),
        params,
        WeightSync(
            engines,
            config.probes.max_gap,
            config.precision,
            _max_step(config),
            # "auto", or a server that is not ours: as the trainer has them
            _DTYPES.get(served_dtype(server, client)),
            config.probes.on_fault == "stop",
            engine.device,
        ),
        window,
        rollout_filter,
        further,
        implicit_reward,
    )


def assemble(
    config: RLConfig,
    engine: Engine,
    critic: Learner | None,
    reference: Any | None,
    reward: Reward,
    estimator: AdvantageEstimator,
    sampler: Sampler,
    params: SamplingParams,
    weight_sync: WeightSync,
    window: int | None = None,
    rollout_filter: RolloutFilter | None = None,
    further: Mapping[str, AdvantageEstimator] | None = None,
    implicit_reward: ImplicitReward | None = None,
) -> Trainer:
    """Put a run together. `engine` trains the policy; `reference` is None without a KL penalty; `window`: the tokens
    that the engines take (None: any); `further`: the estimators of `samples.estimators`. Raises BadInput on settings
    that do not exist, and where too few problems fit."""
    metrics, loop = IterationMetrics(), BackgroundLoop()
    problems = choose_problems(sampler.task, sampler.tokenizer, window, params.max_tokens)
    if getattr(sampler.task, "kind", "") == "verifiers":
        check_judges(problems.train, reward)
    if isinstance(reward, ChecksProblems):
        is_asked = config.evaluation.every > 0 and config.evaluation.metric == "reward"
        asked = problems.dev[: config.evaluation.num_problems] if is_asked else []
        reward.check_problems([*problems.train, *asked])
    kl = KLController(config.kl.coefficient, config.kl.target, config.kl.horizon)
    policy = Policy(
        PolicyLoss(engine, config, params.temperature, kl, reference),
        params.max_tokens,
        make_average(config),
        may_wait=critic is None and not estimator.samples_more and not has_noise(engine.model),
        metrics=metrics,
    )
    if implicit_reward is not None:
        implicit_reward.metrics = metrics
    beside = [learner for learner in (critic, implicit_reward) if learner is not None]
    delivery = Delivery(weight_sync, policy, loop, metrics, sleeps=config.engine.sleeps)
    policy.watch = watch = Watch(config, engine.model, params, sampler.tokenizer, delivery, engine.computing_in)
    tree = TreeRollouts(config.rollout.branches, config.rollout.segment_steps) if config.rollout.branches else None
    source = SampledGroups(
        config, problems.train, sampler, params, reward, delivery, loop, metrics, rollout_filter, tree,
        valued_by=estimator if isinstance(estimator, NamesCompletions) else None,
    )  # fmt: skip
    return Trainer(
        config=config,
        problems=problems,
        rollout_source=source,
        estimator=estimator,
        policy=policy,
        update=Update(config, [policy, *beside]),
        watch=watch,
        delivery=delivery,
        evaluation=Evaluation(config, problems.dev, source, loop, metrics.clock),
        metrics=metrics,
        samples=RolloutLog(Path(config.output_dir), config.samples, further or {}),
        loop=loop,
        pad_id=int(sampler.tokenizer.pad_token_id),
        reward_scaling=make_reward_scaling(config),
        window=window,
    )


def check_window(model: Any, window: int | None) -> None:
    """Raise BadConfig where the engine's window (None: unknown) lets rollouts grow beyond what the policy can score."""
    longest = longest_row(network(model).config)
    if longest is not None and (window is None or window > longest):
        raise BadConfig(
            f"the engine takes {window or 'any number of'} tokens and the policy, whose rotary frequencies ('dynamic') "
            f"change beyond its positions, {longest}: set server.max_model_len={longest}"
        )


def window_of(client: RLClient, server: "VLLMServer | None", model: str) -> int | None:
    """Return the tokens that every engine takes, before ours run: as they are configured, or as servers that run say
    (ServerGone where one does not answer), or as the model's positions say; None where nobody does."""
    if server is not None:
        return server.max_model_len
    if not isinstance(client, VLLMClient):
        return client.max_model_length

    async def ask() -> None:
        await client.open()
        await client.close()

    asyncio.run(ask())
    return client.max_model_length or max_length_of(model)


def make_client(config: RLConfig) -> "tuple[VLLMServer | None, RLClient]":
    """Return (the server that the run starts, None where it has none of its own; who is asked). Raises BadConfig where
    the two are no pair that takes new weights."""
    # server=none is a node without a component
    server: VLLMServer | None = (
        build(config.server, seed=config.seed) if config.server and "_target_" in config.server else None
    )
    client: RLClient = build(config.client, seed=config.seed)
    check_client(client, server)
    if config.engine.sleeps:
        check_sleep(client)
    elif is_main_rank() and device().type == "cuda":
        warn_of_shared_gpus(client, server)
    if not isinstance(client, VLLMClient):
        client.sleeps = config.engine.sleeps
        client.model = client.model or config.model["path"]
        client.log = client.log or str(Path(config.output_dir) / "engine.log")
    return server, client


@contextmanager
def serving(server: "VLLMServer | None", client: RLClient) -> Iterator[None]:
    """Rank 0 has the server run, where the run has one of its own; the other ranks wait for its first rollouts."""
    if not is_main_rank() or server is None or not isinstance(client, VLLMClient):
        yield
        return
    log.info("starting vLLM")
    with server:
        client.base_url = server.base_url  # its port is known only now
        yield


def check_client(client: Any, server: "VLLMServer | None") -> None:
    """Raise BadConfig where the client and the server are no pair that new weights can be delivered to."""
    if not isinstance(client, HasEngines | VLLMClient):
        raise BadConfig("new weights cannot reach its engines: set client=vllm, data_parallel_engines or ray_engines")
    if isinstance(client, HasEngines):
        if server is not None:
            raise BadConfig("this client has its engines itself: set server=none")
    elif server is not None and server.options.get("data_parallel_size") not in (None, 1):
        raise BadConfig("server.options.data_parallel_size: set client=data_parallel_engines server=none, for weights")
    elif len(set(client.urls)) < len(client.urls):
        raise BadConfig(f"client.base_url names a server twice: {', '.join(client.urls)}")
    elif server is None and not client.urls:
        raise BadConfig("server=none: name a running server with controls by client.base_url=http://HOST:PORT, or "
                        "choose client=data_parallel_engines")  # fmt: skip


def check_sleep(client: RLClient) -> None:
    """Raise BadConfig where the engines cannot be put to sleep."""
    if isinstance(client, VLLMClient):
        raise BadConfig("engine.sleeps=true puts engines of the run's own to sleep, and client=vllm asks a server: set "
                        "client=data_parallel_engines server=none, or engine.sleeps=false")  # fmt: skip
    if not client.can_sleep():
        raise BadConfig("engine.sleeps=true lets go of a GPU's memory, and there is no GPU here (vLLM does not sleep "
                        "on CPUs): set engine.sleeps=false")  # fmt: skip


def engines_of(client: RLClient, server: "VLLMServer | None") -> list[LiveEngine]:
    """Return every engine behind the client, as those that take new weights. They need not run yet. From now on
    requests go to those alone that have them; of servers that others started none may be missing."""
    if isinstance(client, HasEngines):
        client.follows_policy = True
        return [OwnEngine(client.engine(number)) for number in range(client.num_engines)]
    client.needs_all = True
    check_server = server.check if server is not None else lambda: None
    return [VLLMEngine(client, check_server, number) for number in range(len(client.urls) if server is None else 1)]


def served_dtype(server: "VLLMServer | None", client: RLClient) -> str:
    """Return what the engine computes in, as its config says; empty where another program started it."""
    if not isinstance(client, VLLMClient):
        return client.dtype
    return server.dtype if server is not None else ""


def _max_step(config: RLConfig) -> float:
    """Return how far one version may lie from the one before; 0 (any) where a fault is only warned of."""
    return config.probes.max_step if config.probes.on_fault == "stop" else 0.0


def check_parts(config: RLConfig) -> None:
    """Raise BadConfig where two settings contradict each other, or one would be silently without effect."""
    check_combinations(config)
    check_engines(config)
    check_probes(config.probes)
    if not 0 <= config.rollout.max_refused_share <= 1:
        raise BadConfig(f"rollout.max_refused_share must be in [0, 1], got {config.rollout.max_refused_share:g}")


def check_vocabulary(policy: Any, size: int, name: str) -> None:
    """Raise BadConfig where another network does not know the policy's token ids."""
    own = int(policy.config.vocab_size)
    if size != own:
        raise BadConfig(f"the policy knows {own} token ids and the {name} {size}: both must have one tokenizer")


def make_reward_scaling(config: RLConfig) -> RewardScaling | None:
    """Return what brings rewards to one scale over the run, None where the config asks for nothing."""
    kind = config.update.reward_scaling
    return None if kind == "none" else RewardScaling(kind, config.update.reward_limit)


def make_filter(config: RLConfig, estimator: AdvantageEstimator) -> RolloutFilter | None:
    """Return the filter of rollouts, None where the config has none. Raises BadConfig where it keeps fewer of a group
    than the estimator compares."""
    if not config.filter:
        return None
    check_kept(config, estimator)
    rollout_filter: RolloutFilter = build(config.filter)
    return rollout_filter


def check_kept(config: RLConfig, estimator: AdvantageEstimator) -> None:
    """Raise BadConfig where a filter keeps fewer rollouts of a group than the estimator compares."""
    kept = int(config.filter["num_kept"]) if config.filter else estimator.smallest_group
    if kept < estimator.smallest_group:
        raise BadConfig(f"filter.num_kept must be at least {estimator.smallest_group}, got {kept}: a rollout needs "
                        f"others to compare ({type(estimator).__name__})")  # fmt: skip


def make_further_estimators(config: RLConfig, params: SamplingParams) -> dict[str, AdvantageEstimator]:
    """Return the estimators of `samples.estimators` by name; what is built after them is what it is without them.
    Raises BadSampling where a group is too small for one, BadConfig where what a filter keeps of it is."""
    with kept_random_state():
        found = {name: build(node) for name, node in config.samples.estimators.items()}
    for estimator in found.values():
        check_params(params, config.rollout.group_size, estimator.smallest_group)
        check_kept(config, estimator)
    return found


def make_critic(config: RLConfig) -> "Critic | None":
    """Return the critic with its own engine, None where the config has none. One that begins as the model whose rewards
    are normalised says the same."""
    if (settings := config.critic) is None:
        return None
    from espalier.rl.critic import Critic

    rates = (settings.learning_rate, settings.max_grad_norm)
    model = load_trained(config, settings.model)
    if normaliser := critic_normaliser(config):
        rescale_head(model, *read_normaliser(normaliser))
    engine = make_training_engine(config, model, settings.optimizer, *rates)
    num_steps = config.num_iterations * steps_per_iteration(config)
    sizes = (config.update.micro_batch_size, num_steps, config.update.micro_batch_tokens)
    return Critic(engine, settings, config.precision, *sizes, is_scaled=values_are_scaled(config))


def make_average(config: RLConfig) -> "MovingAverage | None":
    """Return the moving average of the policy, None where the config has none. Raises BadInput on a decay that makes
    none."""
    if not config.ema.decay:
        return None
    from espalier.rl.ema import MovingAverage

    return MovingAverage(config.ema.decay)
