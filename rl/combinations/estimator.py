"""The estimator of advantages, and further ones, beside critic, KL penalty, whitening and the size of a group."""

from espalier.rl.combinations.components import blames_first_error, component_settings, demand, estimators_of
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig
from espalier.training.deepspeed_engine import cuts_weights


def check_estimator(config: RLConfig) -> None:
    """The estimator beside the critic, the KL penalty, whitening and the size of a group."""
    found = component_settings(config.advantage)
    if found is None:
        return
    kind, settings = found
    name, has_critic = kind.__name__, config.critic is not None
    demand(has_critic or not kind.needs_critic,
           f"{name} needs a critic: choose critic=policy, reward_model_body, reward_model or scratch")  # fmt: skip
    demand(kind.needs_critic or not has_critic,
           f"{name} reads no values: a critic would be trained for nothing: set critic=none")  # fmt: skip
    in_reward = config.kl.coefficient > 0 and config.kl.place == "reward"
    demand(kind.reads_token_rewards or not in_reward,
           f"{name} does not see a KL penalty in the reward: set kl.place=loss")  # fmt: skip
    demand(kind.reads_token_rewards or not config.update.whitens_rewards,
           f"{name} does not see rewards of tokens: set update.whitens_rewards=false")  # fmt: skip
    demand(getattr(kind, "smallest_group", 1) < 2 or not config.update.whitens_rewards,
           f"{name} compares sums over responses, and update.whitens_rewards=true adds a number to every token's "
           "reward, so that length would count: set it to false")  # fmt: skip
    scaling = _scaling_of(config)
    demand(kind.reads_token_rewards or not scaling,
           f"{name} does not see rewards of tokens: set update.reward_scaling=none")  # fmt: skip
    changed = scaling or ("update.whitens_rewards=false" if config.update.whitens_rewards else "")
    demand(not changed or not (kind.samples_more or settings.get("has_group_baseline")),
           f"{name} takes a baseline of rewards as they were given off rewards that are scaled: set "
           f"{changed}")  # fmt: skip
    demand(not blames_first_error(kind, settings) or config.update.whitening != "standard",
           "update.whitening=standard shifts the advantages of 0 that advantage.form=first_error gives steps before an "
           "error, most of them above 0: set update.whitening=scale or none")  # fmt: skip
    demand(settings.get("negative_weight", 1.0) == 1.0 or config.update.whitening != "standard",
           "update.whitening=standard shifts advantages after advantage.negative_weight has weighed them: set "
           "update.whitening=scale or none")  # fmt: skip
    demand(settings.get("completes_agreeing_groups") is not False or config.update.whitening != "standard",
           "update.whitening=standard shifts the advantages of 0 that advantage.completes_agreeing_groups=false gives "
           "groups whose rewards agree: set update.whitening=scale or none")  # fmt: skip
    masks = settings.get("masks_other_tokens")
    demand(not masks or config.update.whitening != "standard",
           "update.whitening=standard shifts the advantages of 0 that "
           "advantage.masks_other_tokens gives: set update.whitening=scale or none")  # fmt: skip
    demand(settings.get("completes_agreeing_groups") is not False or config.rollout.group_size >= 2,
           "advantage.completes_agreeing_groups=false leaves groups out whose rewards agree, and those of "
           "rollout.group_size=1 always do: set it to true")  # fmt: skip


def _scaling_of(config: RLConfig) -> str:
    """Return the setting that switches the scaling of rewards off; "" where it is off."""
    return "" if config.update.reward_scaling == "none" else "update.reward_scaling=none"


def check_enumerable(config: RLConfig) -> None:
    """True values on a task whose solutions have no position, or by a policy that no rank holds whole."""
    task = component_settings(config.task)
    for key, kind, _ in estimators_of(config):
        reads = getattr(kind, "reads_positions", False)
        demand(not reads or task is None or hasattr(task[0], "position"),
               f"{key}: {kind.__name__} computes values on tasks that can be enumerated, and this one has no "
               "`position` (data/tasks/enumerable.py): choose task=word_arithmetic or another estimator")  # fmt: skip
        demand(not reads or not cuts_weights(config.deepspeed),
               f"{key}: {kind.__name__} computes with the whole policy on rank 0, of which ZeRO-3 leaves it a part: "
               "set deepspeed=none or zero2")  # fmt: skip


def check_samples(config: RLConfig) -> None:
    """Further estimators that have nothing to say, or no critic to say it by."""
    samples = config.samples
    demand(samples.rollouts_per_problem >= 0,
           f"samples.rollouts_per_problem must be 0 (all) or more, got {samples.rollouts_per_problem}")  # fmt: skip
    for name, node in samples.estimators.items():
        found = component_settings(node)
        if found is None:
            raise BadConfig(f"samples.estimators.{name} must be an advantage config (a _target_ with its settings, as "
                            "in conf/advantage/): choose estimators=from_groups or with_completions")  # fmt: skip
        demand(not found[0].needs_critic or config.critic is not None,
               f"samples.estimators.{name}: {found[0].__name__} reads a critic, and the run has none: leave it out, or "
               "choose advantage=gae with a critic")  # fmt: skip
    demand(not samples.estimators or not _scaling_of(config),
           "samples.estimators are compared on one scale, and update.reward_scaling changes that of some: choose "
           "estimators=none, or set update.reward_scaling=none")  # fmt: skip
    demand(not samples.estimators or not config.update.whitens_rewards,
           "samples.estimators are compared on one scale, and update.whitens_rewards changes that of some: choose "
           "estimators=none, or set update.whitens_rewards=false")  # fmt: skip
    demand(not samples.estimators or (samples.every > 0 and samples.num_problems > 0),
           "samples.estimators are asked about rollouts that are written down, and samples.every="
           f"{samples.every} with samples.num_problems={samples.num_problems} writes none")  # fmt: skip
