"""ReMax (Li et al. 2024): the baseline of a problem's rollouts is the reward of its greedy response. No critic.

The paper has one reward, at the end: every token is compared with the greedy response's, A_t = R - R(greedy). With
process rewards a token is compared with what the greedy response still had to come at the same token
(rl/credit/baselines.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from espalier.rl.credit.baselines import expected_to_come, spread_baselines
from espalier.rl.credit.token_maps import rewards_to_go
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


class ReMaxAdvantage:
    """Samples one greedy response per problem, by the policy that drew the rollouts, scored by the run's own reward.

    A KL penalty placed in the reward counts from each token on (the baseline has none of it, as in the paper).
    """

    needs_critic = False
    reads_token_rewards = True
    samples_more = True
    smallest_group = 1

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Take what the greedy response had to come off the rewards to go."""
        assert experience.rewards is not None
        greedy = replace(context.params, n=1, temperature=0.0)
        version = groups[0].rollouts[0].policy_version
        answers = context.rollout([group.problem for group in groups], greedy, f"greedy-{version}")
        mask = experience.response_mask
        baselines = spread_baselines(expected_to_come(answers, mask.shape[1]), groups, mask)
        advantages = rewards_to_go(experience.rewards, mask) - baselines
        return Estimate(advantages, metrics={"greedy_reward": sum(a.rewards[0] for a in answers) / len(answers)})
