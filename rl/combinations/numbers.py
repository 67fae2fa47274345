"""Counts, words and schedules of a run, each by itself."""

import logging
from operator import attrgetter

from espalier.models.precision import PRECISIONS
from espalier.rl.combinations.components import demand
from espalier.rl.evaluation import METRICS
from espalier.rl.reward_scaling import SCALINGS
from espalier.rl.update import critic_iterations, steps_per_iteration
from espalier.runtime.schemas import RLConfig

log = logging.getLogger(__name__)
WHITENINGS = ("none", "scale", "standard")
ORDERS = ("random", "epochs")


def check_numbers(config: RLConfig) -> None:
    """Counts that make no run, words that mean nothing, and settings that wait for something that never comes."""
    for key in ("num_iterations", "rollout.num_problems", "rollout.group_size", "update.num_epochs",
                "update.minibatch_size", "update.micro_batch_size", "engine.concurrency"):  # fmt: skip
        number = attrgetter(key)(config)
        demand(number >= 1, f"{key} must be at least 1, got {number}")
    tokens = config.update.micro_batch_tokens
    demand(tokens >= 0, f"update.micro_batch_tokens must be at least 0 (0: a pass by rollouts), got {tokens}")
    evaluates = config.evaluation.every > 0
    demand(not evaluates or config.evaluation.num_problems >= 1,
           f"evaluation.num_problems must be at least 1, got {config.evaluation.num_problems}, or set "
           "evaluation.every=0")  # fmt: skip
    demand(config.evaluation.metric in METRICS,
           f"evaluation.metric must be one of {', '.join(METRICS)}, got '{config.evaluation.metric}'")  # fmt: skip
    for key in ("evaluation.patience", "checkpoints.keep_best"):
        number = attrgetter(key)(config)
        demand(number <= 0 or evaluates, f"{key}={number} goes by evaluations, and evaluation.every="
               f"{config.evaluation.every} makes none: set evaluation.every, or {key}=0")  # fmt: skip
    demand(config.precision in PRECISIONS, f"precision must be auto, bf16 or fp32, got '{config.precision}'")
    demand(
        config.update.whitening in WHITENINGS,
        f"update.whitening must be one of {', '.join(WHITENINGS)}, got '{config.update.whitening}'",
    )
    scaling, limit = config.update.reward_scaling, config.update.reward_limit
    demand(scaling in SCALINGS, f"update.reward_scaling must be one of {', '.join(SCALINGS)}, got '{scaling}'")
    demand(limit >= 0, f"update.reward_limit must be at least 0 (0: no bound), got {limit:g}")
    demand(limit == 0 or scaling != "none", f"update.reward_limit={limit:g} bounds rewards that are scaled, and "
           "update.reward_scaling=none: set it to scale or standard, or the reward's own limit")  # fmt: skip
    demand(
        config.rollout.order in ORDERS,
        f"rollout.order must be one of {', '.join(ORDERS)}, got '{config.rollout.order}'",
    )
    rounds = config.rollout.dynamic_sampling_rounds
    demand(rounds >= 0, f"rollout.dynamic_sampling_rounds must be at least 0, got {rounds}")
    demand(
        rounds == 0 or config.rollout.group_size >= 2,
        f"rollout.dynamic_sampling_rounds={rounds} replaces groups whose rewards agree, and those of "
        "rollout.group_size=1 always do: set rollout.dynamic_sampling_rounds=0",
    )
    bounds = list(config.rollout.accuracy_range)
    demand(len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1,
           f"rollout.accuracy_range must be two shares, the lower first, got {bounds}")  # fmt: skip
    demand(rounds > 0 or bounds == [0, 1], f"rollout.accuracy_range={bounds} says which groups are replaced, and "
           "rollout.dynamic_sampling_rounds=0 replaces none: set it to 1 or more")  # fmt: skip


def check_schedules(config: RLConfig) -> None:
    """A policy that is never trained; a warning where a warm-up outlasts the run."""
    warmup = critic_iterations(config)
    demand(0 <= warmup < config.num_iterations, f"critic.num_warmup_iterations={warmup} of num_iterations="
           f"{config.num_iterations} leaves the policy untrained: set it below num_iterations")  # fmt: skip
    steps = (config.num_iterations - warmup) * steps_per_iteration(config)
    if config.update.warmup_steps > steps:
        log.warning("update.warmup_steps=%d outlasts the run of %d steps: update.learning_rate is never reached",
                    config.update.warmup_steps, steps)  # fmt: skip
