"""ReMax (Li et al. 2024): the baseline of a problem's rollouts is the reward of its greedy response. No critic."""

from collections.abc import Sequence
from dataclasses import replace

from rl.advantages.token_maps import rewards_to_go, spread_rollouts
from rl.types import Estimate, Experience, Live, RolloutGroup


class ReMaxAdvantage:
    """One greedy response a problem, by the policy that drew the rollouts, scored by the run's own reward.

    A KL penalty placed in the reward counts from each token on (the baseline has none of it, as in the paper).
    """

    needs_critic = False
    reads_token_rewards = True
    samples_more = True
    smallest_group = 1

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, live: Live) -> Estimate:
        """Rewards to go minus the greedy response's reward."""
        assert experience.rewards is not None
        greedy = replace(live.params, n=1, temperature=0.0)
        version = groups[0].rollouts[0].policy_version
        answers = live.rollout([group.problem for group in groups], greedy, f"greedy-{version}")
        baselines = [answer.rewards[0] for answer in answers]
        rows = [baseline for baseline, group in zip(baselines, groups, strict=True) for _ in group.rollouts]
        mask = experience.response_mask
        advantages = rewards_to_go(experience.rewards, mask) - spread_rollouts(rows, mask)
        return Estimate(advantages, metrics={"greedy_reward": sum(baselines) / len(baselines)})
