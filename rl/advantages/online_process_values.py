"""A process reward model as value that is trained along: cheap values that follow the policy.

The critic's network is the model: V(s) before the first token of a step is its score at the last token of the step
before, so `critic=reward_model` starts from a trained process reward model, and what is saved is one. It is read in one
pass over the rollouts, before the update. Steps are credited in the form "progress" (PAV, Setlur et al. 2024), the
outcome and the change of V, or "value", A = V(s') - V(s), where the last step alone sees the outcome and pays for what
the model did not know: rl/credit/process_credit.py.

It learns from two kinds of samples of V(s), for every inner state s that a rollout passed:

- the rollout's own reward, free of charge: one sample of each of its states;
- in every `refresh_every`-th iteration the rewards of `completions_per_refresh` new completions, K
  (`completions_per_state`) from each of the states that tell most: Math-Shepherd's soft labels (Wang et al. 2024) of a
  few states.

The target of a state is the mean of its samples and counts as often as there are samples; with
`critic.loss=cross_entropy` that is the likelihood of every one of them. States that rollouts share are learnt once for
each. A rollout's own reward moves the model after its advantage was made, never before.
"""

from collections.abc import Sequence
from dataclasses import replace

from espalier.data.records import BadInput
from espalier.rl.credit.completion_plans import CompletionPlan
from espalier.rl.credit.monte_carlo_credit import describe_states, mean_rewards
from espalier.rl.credit.process_credit import credit_rollouts
from espalier.rl.credit.state_targets import Place, choose_states, inner_states, state_targets
from espalier.rl.credit.step_credit import check_whole_rewards
from espalier.rl.credit_watch import ScaleWatch
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.values.monte_carlo import state_key

FORMS = ("value", "progress")
STATES = ("uncertain", "disagreeing")


class OnlineProcessValueAdvantage:
    """`states` says which are completed: those whose score is nearest 1/2 ("uncertain"), or those of the groups whose
    rewards differ most, the same order among them ("disagreeing"). `completions_per_refresh` 0: none. `weight` is not
    read by the form "value". Raises BadInput on settings out of range.
    """

    needs_critic = True
    reads_token_rewards = False
    samples_more = True
    smallest_group = 2
    takes_step_rewards = False
    has_process_scores = True

    def __init__(
        self,
        form: str = "progress",
        weight: float = 1.0,
        completions_per_refresh: int = 64,
        completions_per_state: int = 4,
        refresh_every: int = 1,
        states: str = "uncertain",
    ):
        for is_good, need in (
            (form in FORMS, f"form must be one of {', '.join(FORMS)}, got '{form}'"),
            (states in STATES, f"states must be one of {', '.join(STATES)}, got '{states}'"),
            (refresh_every >= 1, f"refresh_every must be at least 1, got {refresh_every}"),
            (completions_per_refresh == 0 or completions_per_refresh >= completions_per_state,
             f"completions_per_refresh must be 0 or at least completions_per_state ({completions_per_state}), got "
             f"{completions_per_refresh}"),
        ):  # fmt: skip
            if not is_good:
                raise BadInput(f"advantage.{need}")
        self.plan = CompletionPlan(completions_per_state)
        self.form, self.weight, self.refresh_every = form, weight, refresh_every
        self.num_states = completions_per_refresh // completions_per_state
        self.scale = ScaleWatch()
        self.by_disagreement = states == "disagreeing"

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step, and the critic its targets. Raises BadInput where the
        reward has process terms."""
        check_whole_rewards(groups)
        scores = experience.values
        assert scores is not None
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [reward for group in groups for reward in group.rewards]
        states = inner_states(groups)
        # after the last step the state is terminal, and its score the outcome
        rows = [
            [*(float(scores[place]) for place in own), reward] if rollout.trajectory.steps else []
            for own, reward, rollout in zip(states, rewards, rollouts, strict=True)
        ]
        estimate = credit_rollouts(groups, rows, self.form, self.weight, experience.response_mask)
        if self.form == "value" and not context.asker:
            self.scale.look(rows, rewards)
        pairs = [(score, row[-1]) for row in rows for score in row[:-1]]
        metrics = {
            "step_score": sum(score for score, _ in pairs) / max(1, len(pairs)),
            "brier": sum((score - reward) ** 2 for score, reward in pairs) / max(1, len(pairs)),
        }
        is_refreshed = context.policy_version % self.refresh_every == 0
        number = self.num_states if is_refreshed else 0
        chosen = choose_states(groups, states, scores, number, self.by_disagreement)
        completed: dict[Place, tuple[float, int]] = {}
        if chosen:
            by_key = {state_key(state.problem_id, state.prefix_ids): state for state in chosen.values()}
            completions = self.plan.complete(list(chosen.values()), context)
            values = mean_rewards(by_key, completions, context)
            completed = {
                place: (values[key], len(completions[state.id]))
                for (place, state), key in zip(chosen.items(), by_key, strict=True)
            }
            gaps = [abs(float(scores[place]) - value) for place, (value, _) in completed.items()]
            metrics |= describe_states([rollout.trajectory for rollout in rollouts], completions, values)
            metrics["completed_error"] = sum(gaps) / len(gaps)
        returns, weights = state_targets(states, rewards, completed, experience.response_mask)
        return replace(estimate, returns=returns, return_weights=weights, metrics=metrics)
