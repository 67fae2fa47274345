"""Credit from a tree of rollouts (`rollout.branches`): SPO tree (Guo et al. 2025, arXiv 2505.23564), TreeRPO (Yang et
al. 2025, arXiv 2506.05183). No critic, and no completion that is not trained on.

The value of a state is the mean of its children's, that of a leaf its reward: V(s) = mean over children c of V(c). The
tokens from a state to its child c get A = V(c) - V(s) (baseline "parent"), or, against the mean of the other children
alone, A = V(c) - mean over c' != c of V(c') ("others", the leave-one-out of RLOO): V(s) holds c itself, so that of b
children the first is (b - 1) / b of the second. With `divide_by_std` it is divided by the standard deviation of the
children's values, as GRPO does for a group.

Siblings are independent samples from one state, so with "others" and no division the expected gradient of a segment is
that of its state. A state deep in the tree stands for its share of the policy's way only. With `node_weights` "leaves"
a segment's advantage is divided by the branches above it (b_2 x .. x b_l on level l), which makes the expected sum over
the tree b_1 times the policy gradient, b_1 the first rollouts of the problem. "equal" divides by nothing, as the papers
do: every token counts alike, and what a state adds to the gradient counts b_2 x .. x b_l times.
"""

from collections.abc import Sequence

from espalier.data.records import BadInput
from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.credit.rollout_trees import Segment, segment_shares, segment_values, segments_by_state
from espalier.rl.credit.step_credit import check_whole_rewards
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup, are_alike

BASELINES = ("parent", "others")
NODE_WEIGHTS = ("leaves", "equal")


class TreeAdvantage:
    """Reads the branches of the groups. Raises BadInput on a setting that does not exist."""

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2
    takes_step_rewards = False
    reads_branches = True

    def __init__(self, baseline: str = "others", divide_by_std: bool = False, node_weights: str = "leaves"):
        for name, value, names in (("baseline", baseline, BASELINES), ("node_weights", node_weights, NODE_WEIGHTS)):
            if value not in names:
                raise BadInput(f"advantage.{name} must be one of {', '.join(names)}, got '{value}'")
        if divide_by_std and baseline == "others":
            raise BadInput("advantage.divide_by_std=true divides what stands above the siblings' mean: set "
                           "advantage.baseline=parent")  # fmt: skip
        self.baseline, self.divide_by_std, self.node_weights = baseline, divide_by_std, node_weights

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every drawn token the advantage of its segment. Raises BadInput where the reward has process terms."""
        check_whole_rewards(groups)
        ends: list[list[int]] = []
        rows: list[list[float]] = []
        values: list[list[float]] = []
        agreeing: list[bool] = []
        for group in groups:
            tree = segments_by_state(group.rollouts)
            found = segment_values(tree, group.rewards)
            shares = segment_shares(tree) if self.node_weights == "leaves" else dict.fromkeys(found, 1.0)
            own: list[list[tuple[Segment, float, float]]] = [[] for _ in group.rollouts]
            for siblings in tree.values():
                of_siblings = [found[segment] for segment in siblings]
                agreeing.append(are_alike(of_siblings))
                before = sum(of_siblings) / len(siblings)
                for segment, advantage in zip(siblings, self.compare(of_siblings), strict=True):
                    own[segment.rollout].append((segment, advantage * shares[segment], before))
            for rollout, reward, parts in zip(group.rollouts, group.rewards, own, strict=True):
                parts.sort(key=lambda part: part[0].start)
                ends.append([segment.end - rollout.num_shared for segment, _, _ in parts])
                rows.append([advantage for _, advantage, _ in parts])
                values.append([*(before for _, _, before in parts), reward])
        metrics = {
            "num_leaves": len(rows) / len(groups),
            "num_siblings": float(len(agreeing)),
            "siblings_that_agree": sum(agreeing) / len(agreeing),
        }
        return Estimate(spread_steps(ends, rows, experience.response_mask), metrics=metrics, state_values=values)

    def compare(self, values: Sequence[float]) -> list[float]:
        """Compare siblings, whose states have these values, with one another; all 0 where the values are equal."""
        if self.baseline == "others":
            return leave_one_out(values)
        return group_advantages(values, self.divide_by_std)
