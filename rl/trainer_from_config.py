"""The parts of a run from its config: policy, critic, reference, reward, estimator, sampler; what does not fit together
is reported before anything starts."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from espalier.models.frozen_reward import cut_by
from espalier.models.inputs import network
from espalier.models.packing_check import is_cut
from espalier.models.scalar_head import rescale_head
from espalier.models.tokenizer_checks import check_same_tokenizer
from espalier.rewards.outcome_model import read_normaliser
from espalier.rewards.score import ChecksProblems, HoldsModels, Reward
from espalier.rewards.verifiers import check_judges
from espalier.rl.combinations import check_combinations, critic_normaliser, reads_start, values_are_scaled
from espalier.rl.delivery.delivery import Delivery
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.engines_from_config import RLClient, check_window, engines_of, make_weight_sync, window_of
from espalier.rl.estimator_context import AdvantageEstimator, NamesCompletions
from espalier.rl.evaluation import Evaluation
from espalier.rl.held_out_benchmarks import check_benchmark_prompts
from espalier.rl.implicit_reward import ImplicitReward, make_implicit_reward
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.kl import KLController
from espalier.rl.learner import Learner
from espalier.rl.memory_of_run import reward_is_cut, warn_of_learner_memory
from espalier.rl.policy import Policy
from espalier.rl.policy_loss import PolicyLoss
from espalier.rl.probes.watch import Watch, check_probes
from espalier.rl.problems import choose_problems
from espalier.rl.rank_scores import is_shared
from espalier.rl.reward_scaling import RewardScaling
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_checks import check_params
from espalier.rl.rollout_filters import RolloutFilter
from espalier.rl.rollout_source import SampledGroups
from espalier.rl.samples import RolloutLog, kept_random_state
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
from espalier.runtime.distributed import device, from_main_rank, world_size
from espalier.runtime.entrypoint import BadConfig, build
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import SamplingParams
from espalier.sampling.stop_tokens import with_stop_tokens
from espalier.training.cut_networks import of_run
from espalier.training.engine import Engine

if TYPE_CHECKING:  # loaded only where the config has them
    from espalier.rl.critic import Critic
    from espalier.rl.ema import MovingAverage
    from espalier.sampling.server import VLLMServer

log = logging.getLogger("rl")


def make_trainer(config: RLConfig, tokenizer: Any, server: "VLLMServer | None", client: RLClient) -> Trainer:
    """Return every component of the run, built from its config, before the server (None: one that runs already, or
    engines without one) starts."""
    check_parts(config)
    warn_of_learner_memory(config, world_size())
    params, task = with_stop_tokens(build(config.params), tokenizer), build(config.task)
    check_benchmark_prompts(task, config.held_out_benchmarks)
    with cut_by(cuts := of_run(config.deepspeed)):
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
    with cut_by(cuts if reward_is_cut(config) else None):
        reward = build(config.reward)
    check_who_scores(reward)
    with cut_by(cuts):
        rollout_filter = make_filter(config, estimator)
        further = make_further_estimators(config, params)
    check_networks(model, tokenizer, str(config.model["path"]), (reward, estimator, rollout_filter, *further.values()),
                   {"critic": critic, "implicit reward": implicit_reward})  # fmt: skip
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
        make_weight_sync(config, engines, client, server, engine.device),
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


def check_parts(config: RLConfig) -> None:
    """Raise BadConfig where two settings contradict each other, or one would be silently without effect."""
    check_combinations(config)
    check_engines(config)
    check_probes(config.probes)
    if not 0 <= config.rollout.max_refused_share <= 1:
        raise BadConfig(f"rollout.max_refused_share must be in [0, 1], got {config.rollout.max_refused_share:g}")


def check_networks(
    policy: Any, tokenizer: Any, path: str, parts: Iterable[Any], learners: Mapping[str, Learner | None]
) -> None:
    """Bring the networks that parts hold to the device. Raises BadConfig where one of them, or of another learner, has
    other token ids than the policy of `path`."""
    for part in parts:
        if isinstance(part, HoldsModels):
            for name, found in part.networks().items():
                check_vocabulary(policy, int(found.config.vocab_size), name)
                check_same_tokenizer(tokenizer, str(found.config.name_or_path), name)
            part.to(device())
    for name, learner in learners.items():
        if learner is not None:
            config = network(learner.engine.model).config
            check_vocabulary(policy, int(config.vocab_size), name)
            if str(config.name_or_path) not in ("", path):
                check_same_tokenizer(tokenizer, str(config.name_or_path), name)


def check_vocabulary(policy: Any, size: int, name: str) -> None:
    """Raise BadConfig where another network does not know the policy's token ids."""
    own = int(policy.config.vocab_size)
    if size != own:
        raise BadConfig(f"the policy knows {own} token ids and the {name} {size}: both must have one tokenizer")


def make_reward_scaling(config: RLConfig) -> RewardScaling | None:
    """Return what brings rewards to one scale over the run, None where the config asks for nothing."""
    kind = config.update.reward_scaling
    return None if kind == "none" else RewardScaling(kind, config.update.reward_limit)


def check_who_scores(reward: Reward) -> None:
    """Raise BadConfig where ZeRO-3 has cut a network of a reward that rank 0 alone asks: a part of it asks elsewhere,
    and no setting of that part says so by its name (`asking`, `engines`)."""
    networks = reward.networks().values() if isinstance(reward, HoldsModels) else ()
    cut = any(isinstance(one, torch.nn.Module) and is_cut(one) for one in networks)
    if cut and world_size() > 1 and not is_shared(reward):
        raise BadConfig("a term of the reward has a network, which ZeRO-3 cuts over all ranks, and another one asks a "
                        "server or engines, as rank 0 alone does: name what asks `asking` or `engines` in its config, "
                        "or set deepspeed=zero2")  # fmt: skip


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
