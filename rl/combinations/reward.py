"""The reward beside the estimator and the task that read it."""

import logging
from collections.abc import Mapping

from espalier.rl.combinations.components import (
    blames_first_error,
    class_name,
    component_settings,
    demand,
    estimators_of,
    process_forms,
    reward_range,
)
from espalier.runtime.schemas import RLConfig

log = logging.getLogger(__name__)


def check_step_rewards(config: RLConfig) -> None:
    """Process rewards for estimators that value whole responses; none, or of another form, for those that read them."""
    reward = reward_range(config.reward)
    if reward is None:
        return
    for key, kind, settings in estimators_of(config):
        if reward.to_come is None:
            demand(not getattr(kind, "needs_step_rewards", False), f"{key} {kind.__name__} reads process rewards, and "
                   f"reward {class_name(config.reward)} has none: choose reward=process, process_alone or "
                   "step_verdicts")  # fmt: skip
        else:
            is_paid = key == "advantage" and blames_first_error(kind, settings)
            demand(not is_paid, f"advantage.form=first_error keeps a model's scores out of what is paid, and reward "
                   f"{class_name(config.reward)} has process rewards in it: set reward=outcome")  # fmt: skip
            demand(getattr(kind, "takes_step_rewards", True), f"{key} {kind.__name__} values whole responses, and "
                   f"reward {class_name(config.reward)} has process rewards at step ends: choose a reward without, or "
                   f"{key}=gae, remax or reinforce_plus_plus")  # fmt: skip
        form = getattr(kind, "reward_form", None)
        for place, given in process_forms("reward", config.reward):
            demand(form is None or given == form, f"{key} {kind.__name__} reads process rewards of the form {form}, "
                   f"and {place}.form is {given}: set {place}.form={form}, or choose another {key}")  # fmt: skip


def check_stop(config: RLConfig) -> None:
    """A shortest length that nothing reads: known before networks are loaded."""
    found = component_settings(config.reward)
    settings = {} if found is None else found[1]
    demand(not settings.get("min_tokens", 0) or settings.get("non_stop_reward") is not None,
           f"reward.min_tokens={settings.get('min_tokens')} is read beside reward.non_stop_reward alone: set one, or "
           "reward.min_tokens=0")  # fmt: skip


def check_verifiers(config: RLConfig) -> None:
    """A reward of verifiers beside a task whose golds name none."""
    kind = config.task.get("kind") if isinstance(config.task, Mapping) else None
    has_none = "rewards.verifiers.VerifierReward" not in str(config.reward)
    demand(has_none or kind == "verifiers", "reward=verifiers checks what the rows name, and those of this task name "
           "no verifiers: choose task=verifiable (task.verifier=NAME), or another reward")  # fmt: skip


def check_value_scale(config: RLConfig) -> None:
    """Process scores as values beside rewards of another scale."""
    reward = reward_range(config.reward)
    if reward is None:
        return
    low, high = reward.total
    for key, kind, settings in estimators_of(config):
        is_value = getattr(kind, "has_process_scores", False) and settings["form"] == "value"
        demand(not is_value or (low >= 0 and high <= 1), f"{key}.form=value sets process scores from "
               f"0 to 1 beside rewards, and reward {class_name(config.reward)} gives {low:g} to {high:g}: choose "
               f"another {key}.form, progress say, or a reward from 0 to 1")  # fmt: skip


def check_proper_score(config: RLConfig) -> None:
    """A warning where a group's spread divides rewards whose expectation is highest at true confidences."""
    rewarded, estimated = component_settings(config.reward), component_settings(config.advantage)
    if rewarded is None or estimated is None or not getattr(rewarded[0], "is_proper_score", False):
        return
    if estimated[1].get("divide_by_std", False):
        log.warning("advantage.divide_by_std=true divides by a spread that depends on the stated confidences: %s is no "
                    "proper score then, and confidences drift: set advantage.divide_by_std=false",
                    rewarded[0].__name__)  # fmt: skip
    elif blames_first_error(*estimated):
        log.warning("advantage.form=first_error divides by a spread that depends on the stated confidences: %s is no "
                    "proper score then, and confidences drift: set another advantage.form",
                    rewarded[0].__name__)  # fmt: skip
    elif estimated[1].get("negative_weight", 1.0) != 1:
        log.warning("advantage.negative_weight weighs what is below the others otherwise: %s is no proper score then, "
                    "and confidences drift: set it to 1", rewarded[0].__name__)  # fmt: skip
