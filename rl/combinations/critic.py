"""What trains along with the policy: a critic and the range of its returns, an implicit reward and who reads it."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.models.load import is_reward_model
from espalier.rl.combinations.components import adds_implicit_rewards, class_name, demand, estimators_of, reward_range
from espalier.rl.losses import VALUE_RANGES, check_value_loss
from espalier.rl.update import most_rollouts
from espalier.runtime.schemas import RLConfig

log = logging.getLogger(__name__)
REFERENCES = ("start", "policy")
UPDATES = ("before", "after")
_REMEDY = "choose critic=reward_model_body or policy (critic.form=linear)"


def check_critic_range(config: RLConfig) -> None:
    """A critic whose values are bounded beside returns that are not within its bounds."""
    critic = config.critic
    if critic is None:
        return
    demand(critic.form in VALUE_RANGES, f"critic.form must be one of {', '.join(VALUE_RANGES)}, got '{critic.form}'")
    check_value_loss(critic.loss, critic.form, critic.clip_range)
    lowest, highest = VALUE_RANGES[critic.form]
    says = f"critic.form={critic.form} says values from {lowest:g} to {highest:g}"
    reward = reward_range(config.reward)
    if reward is not None:
        low, high = reward.total
        demand(lowest <= low and high <= highest, f"{says}, and reward {class_name(config.reward)} gives returns from "
               f"{low:g} to {high:g}: {_REMEDY}, or a reward within the critic's range")  # fmt: skip
    lam = config.advantage.get("critic_lam")
    lam = config.advantage.get("lam", 1.0) if lam is None else lam
    demand(critic.loss != "cross_entropy" or reward is None or reward.to_come is None or lam == 1,
           f"critic.loss=cross_entropy fits shares from 0 to 1, and with rewards of steps and lambda {lam:g} a target, "
           "rewards to come and the critic's own value behind them, may lie above 1: set advantage.critic_lam=1, or "
           "critic.loss=squared")  # fmt: skip
    demand(critic.loss_coefficient > 0, f"critic.loss_coefficient must be above 0, got {critic.loss_coefficient:g}")
    demand(not config.update.whitens_rewards or (lowest, highest) == VALUE_RANGES["linear"],
           f"{says}, and update.whitens_rewards=true scales returns to any number: {_REMEDY}, or set it to "
           "false")  # fmt: skip
    demand(config.update.reward_scaling == "none" or (lowest, highest) == VALUE_RANGES["linear"],
           f"{says}, and update.reward_scaling={config.update.reward_scaling} scales returns to any number: {_REMEDY}, "
           "or set it to none")  # fmt: skip
    in_reward = config.kl.coefficient > 0 and config.kl.place == "reward"
    demand(not in_reward or (lowest, highest) == VALUE_RANGES["linear"],
           f"{says}, and kl.place=reward takes off a cost that has no bound: {_REMEDY}, or kl.place=loss")  # fmt: skip
    demand(not adds_implicit_rewards(config) or (lowest, highest) == VALUE_RANGES["linear"],
           f"{says}, and implicit rewards, which have no bound, are added to those of tokens: {_REMEDY}, or "
           "implicit_reward=none")  # fmt: skip


def values_are_scaled(config: RLConfig) -> bool:
    """Say whether a critic learns other rewards than those that are given: scaled ones, or with implicit ones or the
    cost of a KL penalty in them."""
    is_scaled = config.update.reward_scaling != "none" or config.update.whitens_rewards
    has_cost = config.kl.coefficient > 0 and config.kl.place == "reward"
    return is_scaled or has_cost or adds_implicit_rewards(config)


@dataclass(frozen=True)
class NormalisedTerm:
    """A component of the reward that scores by the model of `path`, normalised by a file, and its weight."""

    path: str
    normaliser: str
    weight: float


def critic_normaliser(config: RLConfig) -> str:
    """Return the file by which rewards of the model that the critic begins as are normalised; "" where none are."""
    path = _begun_as(config)
    own = [term for term in _normalised_terms(config.reward) if path and _same(term.path, path)]
    return own[0].normaliser if own else ""


def warn_of_other_units(config: RLConfig) -> None:
    """A critic that begins as a reward model, and says its scores in other units than the rewards have."""
    path, terms = _begun_as(config), list(_normalised_terms(config.reward))
    if not path or not (terms or config.update.reward_scaling != "none") or not is_reward_model(path):
        return
    is_plain = config.update.reward_scaling == "none"
    if not (is_plain and any(_same(term.path, path) and term.weight == 1 for term in terms)):
        log.warning("the critic begins with the scores of %s, and the rewards are scaled otherwise (the normaliser of "
                    "another model, a weight other than 1, or update.reward_scaling): its first values are off; choose "
                    "critic=reward_model_body", path)  # fmt: skip


def _begun_as(config: RLConfig) -> str:
    """Return the folder that the critic begins as, head and all, if it is a reward model's; "" for another start."""
    node = config.critic.model if config.critic is not None else None
    if not isinstance(node, Mapping) or node.get("source", "auto") not in ("reward_model", "auto"):
        return ""
    return str(node.get("path") or "")


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _normalised_terms(node: Any, weight: float = 1.0) -> Iterator[NormalisedTerm]:
    """Return the components at or below a node that have a normaliser."""
    if not isinstance(node, Mapping):
        return
    if node.get("normaliser"):
        yield NormalisedTerm(str(node["path"]), str(node["normaliser"]), weight)
    weights = node.get("weights") or {}
    for name, part in (node.get("terms") or {}).items():
        yield from _normalised_terms(part, weight * float(weights.get(name, 1.0)))


def check_implicit_reward(config: RLConfig) -> None:
    """Settings of a reward that is trained along, and an estimator that reads it where there is one, and only there."""
    settings = config.implicit_reward
    for key, kind, given in estimators_of(config):
        needs = getattr(kind, "needs_implicit_rewards", False)
        demand(not needs or settings is not None, f"{key}: {kind.__name__} reads an implicit reward, and the run has "
               "none: set implicit_reward=policy")  # fmt: skip
        if settings is None or key != "advantage":
            continue
        takes = getattr(kind, "takes_implicit_rewards", False)
        demand(needs or takes, f"{kind.__name__} reads no implicit reward: it would be trained for nothing: set "
               "implicit_reward=none, or choose advantage=prime, gae or reinforce_plus_plus")  # fmt: skip
        demand(not takes or not given.get("has_group_baseline"), f"{kind.__name__} takes a baseline without implicit "
               "rewards off rewards that have them: set advantage.has_group_baseline=false, or choose "
               "advantage=prime")  # fmt: skip
        demand(takes or settings.weight == 1, f"{kind.__name__} weighs implicit rewards by advantage.process_weight, "
               f"and implicit_reward.weight={settings.weight:g} is for gae and reinforce_plus_plus: leave it at "
               "1")  # fmt: skip
    if settings is None:
        return
    demand(not config.samples.estimators or not adds_implicit_rewards(config),
           "samples.estimators are compared on one scale, and implicit rewards are added to what some of them read: "
           "choose estimators=none, or advantage=prime")  # fmt: skip
    demand(settings.weight >= 0, f"implicit_reward.weight must be at least 0, got {settings.weight:g}")
    for key, choices in (("reference", REFERENCES), ("update", UPDATES)):
        value = getattr(settings, key)
        demand(value in choices, f"implicit_reward.{key} must be one of {', '.join(choices)}, got '{value}'")
    for key in ("beta", "learning_rate"):
        number = getattr(settings, key)
        demand(number > 0, f"implicit_reward.{key} must be above 0, got {number:g}")
    size, group = config.update.minibatch_size, most_rollouts(config) // config.rollout.num_problems
    demand(settings.update != "after" or size % group == 0 or size >= group * config.rollout.num_problems,
           f"implicit_reward.update=after scores a minibatch before its step, and update.minibatch_size ({size}) parts "
           f"groups of {group} rollouts, which are compared: set a multiple, or update=before")  # fmt: skip


def reads_start(config: RLConfig) -> bool:
    """Say whether the policy of the start is asked for log-probs: for a KL penalty, or as an implicit reward's
    reference."""
    implicit = config.implicit_reward
    return config.kl.coefficient > 0 or (implicit is not None and implicit.reference == "start")
