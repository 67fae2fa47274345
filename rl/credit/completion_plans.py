"""Completion plans: which states are completed, how often, and how long a completion may be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import RolloutGroup, are_alike
from espalier.sampling.client import SamplingParams
from espalier.values.labels import wilson_interval
from espalier.values.monte_carlo import StateKey, state_key, states_of

BUDGETS = ("remaining", "fresh")


@dataclass(frozen=True)
class CompletionPlan:
    """K completions of every state, or more of those whose value is unclear. Raises BadInput on settings out of range.

    Adaptive K, with `max_completions` above K, costs an unbiased mean: a state that begins with a streak ends with it.
    """

    completions_per_state: int
    """K: completions of every state in the first round."""
    max_step: int | None = None
    """States after more than so many steps are not completed (null: all are)."""
    budget: str = "remaining"
    """Tokens of a completion: "remaining" is what the state leaves of the rollout's own max_tokens, "fresh" is
    max_tokens (as VinePPO, whose late states may run longer than a rollout can)."""
    completes_agreeing_groups: bool = True
    """Whether the states of groups whose rewards agree are completed; else their advantages are 0."""
    max_completions: int = 0
    """0 (K alone), or about how many a state may get at most."""
    round_completions: int = 4
    """How many more an open state gets per round."""
    max_width: float = 0.3
    """A state is open while its 95 % interval (Wilson 1927) is wider."""

    def __post_init__(self) -> None:
        least, most = self.completions_per_state, self.max_completions
        for is_good, need in (
            (least >= 1, f"completions_per_state must be at least 1, got {least}"),
            (self.budget in BUDGETS, f"budget must be {' or '.join(BUDGETS)}, got '{self.budget}'"),
            (self.max_step is None or self.max_step >= 0, f"max_step must be at least 0 or null, got {self.max_step}"),
            (most == 0 or most > least, f"max_completions must be 0 or above completions_per_state ({least}), got "
                                        f"{most}: no state would get more"),
            (self.round_completions >= 1, f"round_completions must be at least 1, got {self.round_completions}"),
        ):  # fmt: skip
            if not is_good:
                raise BadInput(f"advantage.{need}")

    def states(
        self, groups: Sequence[RolloutGroup], trajectories: Sequence[Sequence[Trajectory]], first_step: int
    ) -> dict[StateKey, State]:
        """Collect the distinct states to complete, from the one after step `first_step` (0: the prompt) on.

        `trajectories[i]` are those of group i as they were cut; of equal states the first one stays.
        """
        chosen: dict[StateKey, State] = {}
        for group, cut in zip(groups, trajectories, strict=True):
            if not self.completes_agreeing_groups and are_alike(group.rewards):
                continue  # or not known: the group is not scored yet
            for state in (state for trajectory in cut for state in states_of(trajectory, first_step)):
                if self.max_step is None or state.step <= self.max_step:
                    chosen.setdefault(state_key(state.problem_id, state.prefix_ids), state)
        return chosen

    def complete(self, states: Sequence[State], context: EstimatorContext) -> dict[str, list[Completion]]:
        """Ask for the completions of every state, by its id; in rounds where K is adaptive."""
        completions: dict[str, list[Completion]] = {state.id: [] for state in states}
        asked, number, round_number = list(states), self.completions_per_state, 0
        while asked:
            params = [self.params_of(state, number, context.params) for state in asked]
            for state, more in zip(asked, context.complete(asked, params, round_number), strict=True):
                completions[state.id] += more
            asked = [state for state in states if self._is_open(completions[state.id])]
            number, round_number = self.round_completions, round_number + 1
        return completions

    def params_of(self, state: State, number: int, params: SamplingParams) -> SamplingParams:
        """Return how `number` completions of the state are sampled, beside rollouts of `params`."""
        spent = len(state.prefix_ids) if self.budget == "remaining" else 0
        return replace(params, n=number, return_logprobs=False, max_tokens=max(1, params.max_tokens - spent))

    def _is_open(self, completions: Sequence[Completion]) -> bool:
        if len(completions) >= self.max_completions:
            return False
        low, high = wilson_interval(sum(completion.is_correct for completion in completions), len(completions))
        return high - low > self.max_width
