"""Settings that contradict each other, or of which one would be silently without effect: by the config alone, so that
nothing has been loaded, started or sampled when it is said.

Every check takes the config of a run, raises BadConfig in one line that names the settings, and can be called alone.
"""

from espalier.rl.combinations.components import reward_range
from espalier.rl.combinations.critic import (
    check_critic_range,
    check_implicit_reward,
    critic_normaliser,
    reads_start,
    values_are_scaled,
    warn_of_other_units,
)
from espalier.rl.combinations.estimator import check_enumerable, check_estimator, check_samples
from espalier.rl.combinations.numbers import check_numbers, check_schedules
from espalier.rl.combinations.reward import (
    check_proper_score,
    check_step_rewards,
    check_stop,
    check_value_scale,
    check_verifiers,
)
from espalier.rl.combinations.sampling import (
    check_clusters,
    check_correction,
    check_filter,
    check_sleep,
    check_staleness,
    check_tree,
)
from espalier.rl.kl import check_kl
from espalier.runtime.schemas import RLConfig

__all__ = [
    "check_clusters",
    "check_combinations",
    "check_correction",
    "check_critic_range",
    "check_enumerable",
    "check_estimator",
    "check_filter",
    "check_implicit_reward",
    "check_numbers",
    "check_proper_score",
    "check_samples",
    "check_schedules",
    "check_sleep",
    "check_staleness",
    "check_step_rewards",
    "check_stop",
    "check_tree",
    "check_value_scale",
    "check_verifiers",
    "critic_normaliser",
    "reads_start",
    "reward_range",
    "values_are_scaled",
    "warn_of_other_units",
]


def check_combinations(config: RLConfig) -> None:
    """All of them."""
    check_kl(config.kl)
    check_numbers(config)
    check_schedules(config)
    check_filter(config)
    check_estimator(config)
    check_enumerable(config)
    check_tree(config)
    check_staleness(config)
    check_sleep(config)
    check_clusters(config)
    check_correction(config)
    check_step_rewards(config)
    check_stop(config)
    check_verifiers(config)
    check_value_scale(config)
    check_critic_range(config)
    warn_of_other_units(config)
    check_implicit_reward(config)
    check_samples(config)
    check_proper_score(config)
