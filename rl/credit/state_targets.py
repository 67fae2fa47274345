"""What is known of the inner states of rollouts, as targets of a value; which of them are worth completing."""

from collections.abc import Mapping, Sequence

import torch

from espalier.data.records import State
from espalier.rl.types import RolloutGroup
from espalier.values.monte_carlo import StateKey, state_key, states_of

# (rollout, column in the tensors of the token behind the state): where the value of a state stands.
Place = tuple[int, int]


def inner_states(groups: Sequence[RolloutGroup]) -> list[dict[Place, State]]:
    """Return the states of every rollout after each step but the last, by the place of their value."""
    found: list[dict[Place, State]] = []
    for row, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        states = states_of(rollout.trajectory)
        found.append({(row, len(state.prompt_ids) + len(state.prefix_ids)): state for state in states})
    return found


def reward_variance(rewards: Sequence[float]) -> float:
    """Compute the variance of a group's rewards: of 0 and 1 it is largest where half of them are 1."""
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def choose_states(
    groups: Sequence[RolloutGroup],
    states: Sequence[Mapping[Place, State]],
    scores: torch.Tensor,
    number: int,
    by_disagreement: bool,
) -> dict[Place, State]:
    """Choose at most `number` distinct states to complete, each at the place of the first rollout that passed it: those
    whose score (of `scores` [N, T]) is nearest 1/2; `by_disagreement`: first those of groups whose rewards vary
    most."""
    spreads = [reward_variance(group.rewards) for group in groups for _ in group.rollouts]
    first: dict[StateKey, tuple[Place, State]] = {}
    for row in states:
        for place, state in row.items():
            first.setdefault(state_key(state.problem_id, state.prefix_ids), (place, state))

    def order(candidate: tuple[Place, State]) -> tuple[float, float]:
        place = candidate[0]
        return -spreads[place[0]] if by_disagreement else 0.0, abs(float(scores[place]) - 0.5)

    return dict(sorted(first.values(), key=order)[:number])  # stable: of equal ones the first rollouts'


def state_targets(
    states: Sequence[Mapping[Place, State]],
    rewards: Sequence[float],
    completed: Mapping[Place, tuple[float, int]],
    response_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (targets, how many samples each is the mean of) [N, T], 0 where no inner state's value stands.

    `rewards` [N] are one sample of every state of a rollout; `completed` has (mean reward, number) of the completions
    of some.
    """
    targets, weights = torch.zeros(response_mask.shape), torch.zeros(response_mask.shape)
    for row, reward in zip(states, rewards, strict=True):
        for place in row:
            mean, number = completed.get(place, (0.0, 0))
            targets[place] = (reward + number * mean) / (1 + number)
            weights[place] = 1.0 + number
    return targets, weights
