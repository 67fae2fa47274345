"""Settings that contradict each other, or of which one would be silently without effect: by the config alone, so that
nothing has been loaded, started or sampled when it is said.

Every check takes the config of a run, raises BadConfig in one line that names the settings, and can be called alone.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from espalier.rewards.score import ScoreRange, StatesRange
from espalier.rl.kl import check_kl
from espalier.rl.losses import VALUE_RANGES, check_value_loss
from espalier.rl.update import steps_per_iteration
from espalier.runtime.entrypoint import BadConfig, check_component, find_component
from espalier.runtime.schemas import RLConfig

log = logging.getLogger(__name__)
WHITENINGS = ("none", "scale", "standard")
ORDERS = ("random", "epochs")
REFERENCES = ("start", "policy")
UPDATES = ("before", "after")
_REMEDY = "choose critic=reward_model_body or policy (critic.form=linear)"


def check_combinations(config: RLConfig) -> None:
    """All of them."""
    check_kl(config.kl)
    check_numbers(config)
    check_schedules(config)
    check_filter(config)
    check_estimator(config)
    check_tree(config)
    check_staleness(config)
    check_sleep(config)
    check_clusters(config)
    check_correction(config)
    check_step_rewards(config)
    check_verifiers(config)
    check_value_scale(config)
    check_critic_range(config)
    check_implicit_reward(config)
    check_samples(config)
    check_proper_score(config)


def check_numbers(config: RLConfig) -> None:
    """Counts that make no run, words that mean nothing, and settings that wait for something that never comes."""
    for key in ("num_iterations", "rollout.num_problems", "rollout.group_size", "update.num_epochs",
                "update.minibatch_size", "update.micro_batch_size", "engine.concurrency"):  # fmt: skip
        number = attrgetter(key)(config)
        _check(number >= 1, f"{key} must be at least 1, got {number}")
    tokens = config.update.micro_batch_tokens
    _check(tokens >= 0, f"update.micro_batch_tokens must be at least 0 (0: a pass by rollouts), got {tokens}")
    evaluates = config.evaluation.every > 0
    _check(not evaluates or config.evaluation.num_problems >= 1,
           f"evaluation.num_problems must be at least 1, got {config.evaluation.num_problems}, or set "
           "evaluation.every=0")  # fmt: skip
    for key in ("evaluation.patience", "checkpoints.keep_best"):
        number = attrgetter(key)(config)
        _check(number <= 0 or evaluates, f"{key}={number} goes by evaluations, and evaluation.every="
               f"{config.evaluation.every} makes none: set evaluation.every, or {key}=0")  # fmt: skip
    _check(config.precision in ("bf16", "fp32"), f"precision must be bf16 or fp32, got '{config.precision}'")
    _check(
        config.update.whitening in WHITENINGS,
        f"update.whitening must be one of {', '.join(WHITENINGS)}, got '{config.update.whitening}'",
    )
    _check(
        config.rollout.order in ORDERS,
        f"rollout.order must be one of {', '.join(ORDERS)}, got '{config.rollout.order}'",
    )
    rounds = config.rollout.dynamic_sampling_rounds
    _check(rounds >= 0, f"rollout.dynamic_sampling_rounds must be at least 0, got {rounds}")
    _check(
        rounds == 0 or config.rollout.group_size >= 2,
        f"rollout.dynamic_sampling_rounds={rounds} replaces groups whose rewards agree, and those of "
        "rollout.group_size=1 always do: set rollout.dynamic_sampling_rounds=0",
    )
    bounds = list(config.rollout.accuracy_range)
    _check(len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1,
           f"rollout.accuracy_range must be two shares, the lower first, got {bounds}")  # fmt: skip
    _check(rounds > 0 or bounds == [0, 1], f"rollout.accuracy_range={bounds} says which groups are replaced, and "
           "rollout.dynamic_sampling_rounds=0 replaces none: set it to 1 or more")  # fmt: skip


def check_schedules(config: RLConfig) -> None:
    """A policy that is never trained; a warning where a warm-up outlasts the run."""
    warmup = config.critic.num_warmup_iterations if config.critic is not None else 0
    _check(0 <= warmup < config.num_iterations, f"critic.num_warmup_iterations={warmup} of num_iterations="
           f"{config.num_iterations} leaves the policy untrained: set it below num_iterations")  # fmt: skip
    steps = (config.num_iterations - warmup) * steps_per_iteration(config)
    if config.update.warmup_steps > steps:
        log.warning("update.warmup_steps=%d outlasts the run of %d steps: update.learning_rate is never reached",
                    config.update.warmup_steps, steps)  # fmt: skip


def check_staleness(config: RLConfig) -> None:
    """Rollouts of older versions without a correction, or in a tree."""
    age = config.rollout.max_staleness
    _check(age >= 0, f"rollout.max_staleness must be at least 0, got {age}")
    if age == 0:
        return
    ahead = f"rollout.max_staleness={age}"
    _check(config.update.tis_cap > 0 or config.update.correction == "none",
           f"{ahead} trains on what older versions drew, and update.tis_cap=0 corrects nothing: set update.tis_cap=2, "
           "or update.correction=none where that is meant")  # fmt: skip
    for key, kind, _ in estimators_of(config):
        _check(not (key.startswith("samples.") and kind.samples_more),
               f"{key} asks for samples, and {ahead} has the engines draw rollouts meanwhile, which cannot draw as if "
               "nothing had been asked: leave it out, or set rollout.max_staleness=0")  # fmt: skip
    _check(not config.rollout.branches, f"a tree compares siblings of one version, and {ahead} mixes versions: set "
           "rollout.max_staleness=0 or rollout.branches=[]")  # fmt: skip


def check_sleep(config: RLConfig) -> None:
    """Engines that are put to sleep while they draw."""
    age = config.rollout.max_staleness
    _check(not config.engine.sleeps or age == 0, f"engine.sleeps=true has the engines sleep while the policy is "
           f"trained, and rollout.max_staleness={age} has them draw meanwhile: set rollout.max_staleness=0, or "
           "engine.sleeps=false")  # fmt: skip


def check_clusters(config: RLConfig) -> None:
    """Ranks on a cluster that the engines are not on."""
    if not config.launcher:
        return
    ranks, engines = config.launcher.get("address"), config.client.get("address")
    _check(not ranks or engines is None or bool(engines), f"launcher.address={ranks} has the ranks on a cluster, and "
           f"the engines would be on a Ray of rank 0's own: set client.address={ranks} too")  # fmt: skip


def check_correction(config: RLConfig) -> None:
    """Bounds of a ratio that is never taken."""
    update = config.update
    is_bound = update.tis_floor > 0 or update.tis_level != "token" or update.correction == "mask"
    _check(update.tis_cap > 0 or not is_bound, f"update.tis_cap=0 corrects nothing, whatever update.tis_floor="
           f"{update.tis_floor:g}, update.tis_level={update.tis_level} and update.correction={update.correction} say: "
           "set update.tis_cap=2")  # fmt: skip


def check_filter(config: RLConfig) -> None:
    """A filter that would keep all, or more than there are."""
    found = component_settings(config.filter)
    if found is None:
        return
    kept, drawn = found[1]["num_kept"], config.rollout.group_size
    _check(1 <= kept < drawn, f"filter.num_kept={kept} must be at least 1 and below rollout.group_size={drawn}: raise "
           "rollout.group_size, or set filter=none")  # fmt: skip
    _check(not config.rollout.branches, "a filter keeps some rollouts of a group, and a tree needs all its branches: "
           "set filter=none or rollout.branches=[]")  # fmt: skip


def check_estimator(config: RLConfig) -> None:
    """The estimator beside the critic, the KL penalty, whitening and the size of a group."""
    found = component_settings(config.advantage)
    if found is None:
        return
    kind, settings = found
    name, has_critic = kind.__name__, config.critic is not None
    _check(has_critic or not kind.needs_critic,
           f"{name} needs a critic: choose critic=policy, reward_model_body, reward_model or scratch")  # fmt: skip
    _check(kind.needs_critic or not has_critic,
           f"{name} reads no values: a critic would be trained for nothing: set critic=none")  # fmt: skip
    in_reward = config.kl.coefficient > 0 and config.kl.place == "reward"
    _check(kind.reads_token_rewards or not in_reward,
           f"{name} does not see a KL penalty in the reward: set kl.place=loss")  # fmt: skip
    _check(kind.reads_token_rewards or not config.update.whitens_rewards,
           f"{name} does not see rewards of tokens: set update.whitens_rewards=false")  # fmt: skip
    masks = settings.get("masks_other_tokens")
    _check(not masks or config.update.whitening != "standard",
           "update.whitening=standard shifts the advantages of 0 that "
           "advantage.masks_other_tokens gives: set update.whitening=scale or none")  # fmt: skip
    _check(settings.get("completes_agreeing_groups") is not False or config.rollout.group_size >= 2,
           "advantage.completes_agreeing_groups=false leaves groups out whose rewards agree, and those of "
           "rollout.group_size=1 always do: set it to true")  # fmt: skip


def estimators_of(config: RLConfig) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Return (its key, its class, its settings) of the run's estimator and of the further ones."""
    nodes = {"advantage": config.advantage}
    nodes |= {f"samples.estimators.{name}": node for name, node in config.samples.estimators.items()}
    for key, node in nodes.items():
        found = component_settings(node)
        if found is not None:
            yield key, *found


def check_tree(config: RLConfig) -> None:
    """Branches that are none, and a tree that the estimator does not read."""
    branches, steps = list(config.rollout.branches), config.rollout.segment_steps
    _check(all(number >= 2 for number in branches), f"rollout.branches must be numbers of at least 2, got {branches}: "
           "one child is the rollout itself")  # fmt: skip
    _check(steps >= 1, f"rollout.segment_steps must be at least 1, got {steps}")
    for key, kind, _ in estimators_of(config):
        reads = getattr(kind, "reads_branches", False)
        _check(reads or not branches, f"{key}: {kind.__name__} takes rollouts for independent, and rollout.branches="
               f"{branches} makes trees of them: choose advantage=tree, or set rollout.branches=[]")  # fmt: skip
        _check(not reads or bool(branches), f"{key}: {kind.__name__} compares the branches of a tree: set "
               "rollout.branches, [2, 2] for instance")  # fmt: skip


def check_step_rewards(config: RLConfig) -> None:
    """Process rewards for estimators that value whole responses; none, or of another form, for those that read them."""
    reward = reward_range(config.reward)
    if reward is None:
        return
    for key, kind, _ in estimators_of(config):
        if reward.to_come is None:
            _check(not getattr(kind, "needs_step_rewards", False), f"{key} {kind.__name__} reads process rewards, and "
                   f"reward {_name(config.reward)} has none: choose reward=process or process_alone")  # fmt: skip
        else:
            _check(getattr(kind, "takes_step_rewards", True), f"{key} {kind.__name__} values whole responses, and "
                   f"reward {_name(config.reward)} has process rewards at step ends: choose a reward without, or "
                   f"{key}=gae, remax or reinforce_plus_plus")  # fmt: skip
        form = getattr(kind, "reward_form", None)
        for place, given in process_forms("reward", config.reward):
            _check(form is None or given == form, f"{key} {kind.__name__} reads process rewards of the form {form}, "
                   f"and {place}.form is {given}: set {place}.form={form}, or choose another {key}")  # fmt: skip


def check_verifiers(config: RLConfig) -> None:
    """A reward of verifiers beside a task whose golds name none."""
    kind = config.task.get("kind") if isinstance(config.task, Mapping) else None
    has_none = "rewards.verifiers.VerifierReward" not in str(config.reward)
    _check(has_none or kind == "verifiers", "reward=verifiers checks what the rows name, and those of this task name "
           "no verifiers: choose task=verifiable (task.verifier=NAME), or another reward")  # fmt: skip


def process_forms(key: str, node: Any) -> Iterator[tuple[str, str]]:
    """Return (its key, its form) of every term of a reward that gives process rewards in a form."""
    found = component_settings(node)
    settings = found[1] if found is not None else node if isinstance(node, Mapping) else {}
    if "form" in settings:
        bounds = reward_range(node)
        if bounds is not None and bounds.to_come is not None:
            yield key, str(settings["form"])
    for name, part in settings.items():
        yield from process_forms(f"{key}.{name}", part)


def check_value_scale(config: RLConfig) -> None:
    """Process scores as values beside rewards of another scale."""
    reward = reward_range(config.reward)
    if reward is None:
        return
    low, high = reward.total
    for key, kind, settings in estimators_of(config):
        is_value = getattr(kind, "has_process_scores", False) and settings["form"] == "value"
        _check(not is_value or (low >= 0 and high <= 1), f"{key}.form=value sets process scores from "
               f"0 to 1 beside rewards, and reward {_name(config.reward)} gives {low:g} to {high:g}: choose "
               f"another {key}.form, progress say, or a reward from 0 to 1")  # fmt: skip


def check_samples(config: RLConfig) -> None:
    """Further estimators that have nothing to say, or no critic to say it by."""
    samples = config.samples
    _check(samples.rollouts_per_problem >= 0,
           f"samples.rollouts_per_problem must be 0 (all) or more, got {samples.rollouts_per_problem}")  # fmt: skip
    for name, node in samples.estimators.items():
        found = component_settings(node)
        if found is None:
            raise BadConfig(f"samples.estimators.{name} must be an advantage config (a _target_ with its settings, as "
                            "in conf/advantage/): choose estimators=from_groups or with_completions")  # fmt: skip
        _check(not found[0].needs_critic or config.critic is not None,
               f"samples.estimators.{name}: {found[0].__name__} reads a critic, and the run has none: leave it out, or "
               "choose advantage=gae with a critic")  # fmt: skip
    _check(not samples.estimators or (samples.every > 0 and samples.num_problems > 0),
           "samples.estimators are asked about rollouts that are written down, and samples.every="
           f"{samples.every} with samples.num_problems={samples.num_problems} writes none")  # fmt: skip


def check_implicit_reward(config: RLConfig) -> None:
    """Settings of a reward that is trained along, and an estimator that reads it where there is one, and only there."""
    settings = config.implicit_reward
    for key, kind, _ in estimators_of(config):
        reads = getattr(kind, "needs_implicit_rewards", False)
        _check(not reads or settings is not None, f"{key}: {kind.__name__} reads an implicit reward, and the run has "
               "none: set implicit_reward=policy")  # fmt: skip
        _check(reads or settings is None or key != "advantage", f"{kind.__name__} reads no implicit reward: it "
               "would be trained for nothing: set implicit_reward=none, or choose advantage=prime")  # fmt: skip
    if settings is None:
        return
    for key, choices in (("reference", REFERENCES), ("update", UPDATES)):
        value = getattr(settings, key)
        _check(value in choices, f"implicit_reward.{key} must be one of {', '.join(choices)}, got '{value}'")
    for key in ("beta", "learning_rate"):
        number = getattr(settings, key)
        _check(number > 0, f"implicit_reward.{key} must be above 0, got {number:g}")
    size, group = config.update.minibatch_size, config.rollout.group_size
    _check(settings.update != "after" or size % group == 0 or size >= group * config.rollout.num_problems,
           f"implicit_reward.update=after scores a minibatch before its step, and update.minibatch_size ({size}) parts "
           f"groups of {group} rollouts, which are compared: set a multiple, or update=before")  # fmt: skip


def reads_start(config: RLConfig) -> bool:
    """Say whether the policy of the start is asked for log-probs: for a KL penalty, or as an implicit reward's
    reference."""
    implicit = config.implicit_reward
    return config.kl.coefficient > 0 or (implicit is not None and implicit.reference == "start")


def check_critic_range(config: RLConfig) -> None:
    """A critic whose values are bounded beside returns that are not within its bounds."""
    critic = config.critic
    if critic is None:
        return
    _check(critic.form in VALUE_RANGES, f"critic.form must be one of {', '.join(VALUE_RANGES)}, got '{critic.form}'")
    check_value_loss(critic.loss, critic.form, critic.clip_range)
    lowest, highest = VALUE_RANGES[critic.form]
    says = f"critic.form={critic.form} says values from {lowest:g} to {highest:g}"
    reward = reward_range(config.reward)
    if reward is not None:
        low, high = reward.total
        _check(lowest <= low and high <= highest, f"{says}, and reward {_name(config.reward)} gives returns from "
               f"{low:g} to {high:g}: {_REMEDY}, or a reward within the critic's range")  # fmt: skip
    _check(critic.loss_coefficient > 0, f"critic.loss_coefficient must be above 0, got {critic.loss_coefficient:g}")
    _check(not config.update.whitens_rewards or (lowest, highest) == VALUE_RANGES["linear"],
           f"{says}, and update.whitens_rewards=true scales returns to any number: {_REMEDY}, or set it to "
           "false")  # fmt: skip
    in_reward = config.kl.coefficient > 0 and config.kl.place == "reward"
    _check(not in_reward or (lowest, highest) == VALUE_RANGES["linear"],
           f"{says}, and kl.place=reward takes off a cost that has no bound: {_REMEDY}, or kl.place=loss")  # fmt: skip


def check_proper_score(config: RLConfig) -> None:
    """A warning where a group's spread divides rewards whose expectation is highest at true confidences."""
    rewarded, estimated = component_settings(config.reward), component_settings(config.advantage)
    if rewarded is None or estimated is None or not getattr(rewarded[0], "is_proper_score", False):
        return
    if estimated[1].get("divide_by_std", False):
        log.warning("advantage.divide_by_std=true divides by a spread that depends on the stated confidences: %s is no "
                    "proper score then, and confidences drift: set advantage.divide_by_std=false",
                    rewarded[0].__name__)  # fmt: skip


def component_settings(node: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return (the class or function behind a `_target_`, all its arguments, defaults too); None where the node names
    none. Raises BadConfig on a key that it does not take."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        return None
    check_component(node)
    kind = find_component(str(node["_target_"]))
    bound = inspect.signature(kind).bind(**{name: value for name, value in node.items() if not name.startswith("_")})
    bound.apply_defaults()
    return kind, dict(bound.arguments)


def reward_range(node: Any) -> ScoreRange | None:
    """Return what the scores of a reward's config can be; None where its class does not say."""
    found = component_settings(node)
    if found is None or not isinstance(found[0], StatesRange):
        return None
    kind, settings = found
    return kind.score_range({name: _with_ranges(value) for name, value in settings.items()})


def _with_ranges(value: Any) -> Any:
    """Return the value with the range of every reward in place of the reward's config."""
    if not isinstance(value, Mapping):
        return value
    if "_target_" in value:
        return reward_range(value)
    return {name: _with_ranges(part) for name, part in value.items()}


def _name(node: Mapping[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def _check(is_good: bool, message: str) -> None:
    if not is_good:
        raise BadConfig(message)
