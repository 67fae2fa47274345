"""How rollouts are drawn beside what is learnt from them: older versions, sleep, clusters, filters, trees."""

from espalier.rl.combinations.components import component_settings, demand, estimators_of
from espalier.runtime.schemas import RLConfig


def check_staleness(config: RLConfig) -> None:
    """Rollouts of older versions without a correction, or in a tree."""
    age = config.rollout.max_staleness
    demand(age >= 0, f"rollout.max_staleness must be at least 0, got {age}")
    if age == 0:
        return
    ahead = f"rollout.max_staleness={age}"
    demand(config.update.tis_cap > 0 or config.update.correction == "none",
           f"{ahead} trains on what older versions drew, and update.tis_cap=0 corrects nothing: set update.tis_cap=2, "
           "or update.correction=none where that is meant")  # fmt: skip
    for key, kind, _ in estimators_of(config):
        demand(not (key.startswith("samples.") and kind.samples_more),
               f"{key} asks for samples, and {ahead} has the engines draw rollouts meanwhile, which cannot draw as if "
               "nothing had been asked: leave it out, or set rollout.max_staleness=0")  # fmt: skip
    demand(not config.rollout.branches, f"a tree compares siblings of one version, and {ahead} mixes versions: set "
           "rollout.max_staleness=0 or rollout.branches=[]")  # fmt: skip


def check_sleep(config: RLConfig) -> None:
    """Engines that are put to sleep while they draw."""
    age = config.rollout.max_staleness
    demand(not config.engine.sleeps or age == 0, f"engine.sleeps=true has the engines sleep while the policy is "
           f"trained, and rollout.max_staleness={age} has them draw meanwhile: set rollout.max_staleness=0, or "
           "engine.sleeps=false")  # fmt: skip


def check_clusters(config: RLConfig) -> None:
    """Ranks on a cluster that the engines are not on."""
    if not config.launcher:
        return
    ranks, engines = config.launcher.get("address"), config.client.get("address")
    demand(not ranks or engines is None or bool(engines), f"launcher.address={ranks} has the ranks on a cluster, and "
           f"the engines would be on a Ray of rank 0's own: set client.address={ranks} too")  # fmt: skip


def check_correction(config: RLConfig) -> None:
    """Bounds of a ratio that is never taken."""
    update = config.update
    is_bound = update.tis_floor > 0 or update.tis_level != "token" or update.correction in ("mask", "divergence")
    demand(update.tis_cap > 0 or not is_bound, f"update.tis_cap=0 corrects nothing, whatever update.tis_floor="
           f"{update.tis_floor:g}, update.tis_level={update.tis_level} and update.correction={update.correction} say: "
           "set update.tis_cap=2")  # fmt: skip


def check_filter(config: RLConfig) -> None:
    """A filter that would keep all, or more than there are."""
    found = component_settings(config.filter)
    if found is None:
        return
    kept, drawn = found[1]["num_kept"], config.rollout.group_size
    demand(1 <= kept < drawn, f"filter.num_kept={kept} must be at least 1 and below rollout.group_size={drawn}: raise "
           "rollout.group_size, or set filter=none")  # fmt: skip
    demand(not config.rollout.branches, "a filter keeps some rollouts of a group, and a tree needs all its branches: "
           "set filter=none or rollout.branches=[]")  # fmt: skip


def check_tree(config: RLConfig) -> None:
    """Branches that are none, and a tree that the estimator does not read."""
    branches, steps = list(config.rollout.branches), config.rollout.segment_steps
    demand(all(number >= 2 for number in branches), f"rollout.branches must be numbers of at least 2, got {branches}: "
           "one child is the rollout itself")  # fmt: skip
    demand(steps >= 1, f"rollout.segment_steps must be at least 1, got {steps}")
    target = config.kl.target
    demand(not branches or target <= 0, f"kl.target={target:g} is of whole responses, and a leaf of a tree counts its "
           "own tokens: set kl.target=0 (a fixed kl.coefficient), or rollout.branches=[]")  # fmt: skip
    for key, kind, _ in estimators_of(config):
        reads = getattr(kind, "reads_branches", False)
        demand(reads or not branches, f"{key}: {kind.__name__} takes rollouts for independent, and rollout.branches="
               f"{branches} makes trees of them: choose advantage=tree, or set rollout.branches=[]")  # fmt: skip
        demand(not reads or bool(branches), f"{key}: {kind.__name__} compares the branches of a tree: set "
               "rollout.branches, [2, 2] for instance")  # fmt: skip
