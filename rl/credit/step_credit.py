"""Values of the states along a trajectory → advantages of its steps."""

from collections.abc import Sequence
from itertools import pairwise

from espalier.data.records import BadInput
from espalier.rl.advantages.rloo import leave_one_out
from espalier.rl.types import RolloutGroup

PROMPT_VALUES = ("group", "leave_one_out", "sampled")


def check_whole_rewards(groups: Sequence[RolloutGroup]) -> None:
    """Raise BadInput where the reward has process terms, for values that are means of the rewards of whole
    responses."""
    if any(score.steps for group in groups for score in group.scores):
        raise BadInput("Monte-Carlo values are of whole responses: choose a reward without process terms")


def fill_values(values: Sequence[float | None], outcome: float) -> list[float]:
    """List V_0 .. V_S of S steps: the terminal value is the outcome, and a state without a value has that of the next.

    `values` holds V_0 .. V_{S-1}, None where a state was not valued: behind a cap on the number of states every
    value is then the outcome, and the steps there have advantage 0.
    """
    filled = [outcome]
    for value in reversed(values):
        filled.append(filled[-1] if value is None else value)
    return filled[::-1]


def step_advantages(state_values: Sequence[float]) -> list[float]:
    """Credit S steps with A(step i) = V(s_{i+1}) - V(s_i), from V_0 .. V_S (VinePPO, Kazemnejad et al. 2024); gamma 1.

    The reward of the last step is in V_S, the outcome. S advantages, which sum to V_S - V_0.
    """
    return [after - before for before, after in pairwise(state_values)]


def prompt_values(rewards: Sequence[float], how: str) -> list[float]:
    """Return value the prompt for every rollout of a group, free of charge from the group's own rewards.

    "group": their mean, the same for all. "leave_one_out": the mean of the others, which does not hold the
    outcome it is compared with.
    """
    if how == "leave_one_out":
        return [reward - advantage for reward, advantage in zip(rewards, leave_one_out(rewards), strict=True)]
    mean = sum(rewards) / len(rewards)
    return [mean] * len(rewards)
