"""λ-GRPO (Sullivan and Koller 2025, "GRPO is Secretly a Process Reward Model", arXiv 2509.21154): no branch of a group
counts twice. No critic, no samples beside the group.

The responses of a group are a prefix tree. A process step is a run of tokens that the same responses share, so that
GRPO credits it once for every response that runs through it: with their mean advantage, times their number. The paper
divides the loss of every token by that number, |λ|: how many responses of the group begin with the same tokens up to
and including this one. So the first steps, which most responses share, do not outweigh the rest.

The surrogate's loss is proportional to the advantage, so that the advantage is divided here: A_{i,t} / |λ_{i,t}|. What
the loss is divided by (`update.loss_aggregation`) stays the number of tokens or responses, as in the published code. A
KL penalty in the loss, which the published code divides too, is left as it is.
"""

from collections.abc import Sequence

import torch

from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.credit.common_prefixes import passers, response_rows
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup


class LambdaGRPO:
    """Gives every response token its rollout's advantage over the number of rollouts that share the token and all
    before it. `divide_by_std` is GRPO's."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2

    def __init__(self, divide_by_std: bool):
        self.divide_by_std = divide_by_std

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Estimate by the group's rewards and token ids alone."""
        mask = experience.response_mask
        found, shared, row = torch.zeros(mask.shape), 0, 0
        for group in groups:
            advantages = group_advantages(group.rewards, self.divide_by_std)
            for advantage, nodes in zip(advantages, passers(response_rows(group)), strict=True):
                sizes = torch.tensor([len(node) for node in nodes[1:]], dtype=torch.float64)
                found[row, mask[row]] = (advantage / sizes).float()
                shared, row = shared + int((sizes > 1).sum()), row + 1
        return Estimate(found, metrics={"shared_tokens": shared / max(1, int(mask.sum()))})
