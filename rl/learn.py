"""From scored rollouts to a step of the policy: experience → probes → advantages → update.

The old policy's log-probs come from a pass of their own before everything else, or, where one step on all rollouts is
the whole update, from the pass that makes its gradient (`Update.makes_one_pass`): then only rollouts without a gradient
are scored apart. Either way they are compared with the engine's before any weight changes, and before an estimator
samples more, which costs more than a pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.rl.critic import check_returns
from espalier.rl.experience import RowScorer, make_experience, reference_terms, token_rewards
from espalier.rl.losses import whiten
from espalier.rl.metrics import describe_kl, timed
from espalier.rl.probes.watch import Watch
from espalier.rl.training_engines import has_noise
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.rl.update import Update
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import SamplingParams
from espalier.training.engine import Engine

# (groups, experience, iteration) → (advantages, seconds that its questions took), on every rank.
AskEstimator = Callable[[Sequence[RolloutGroup], Experience, int], tuple[Estimate, dict[str, float]]]


@dataclass
class Learn:
    """`reference` is None without a KL penalty. `samples_more`: the estimator asks the sampler for more.

    `may_wait`: whether the comparison with the engine may stand behind the estimator, in the update's own pass.
    """

    config: RLConfig
    engine: Engine
    reference: Any | None
    update: Update
    watch: Watch
    params: SamplingParams
    pad_id: int
    samples_more: bool

    def __post_init__(self) -> None:
        self.may_wait = self.reference is None and not self.samples_more and not has_noise(self.engine.model)

    def __call__(
        self, groups: Sequence[RolloutGroup], iteration: int, values: dict[str, float], ask: AskEstimator
    ) -> tuple[Experience, Estimate, dict[str, float]]:
        """(what was learnt from, its estimate, the update's metrics); other metrics and seconds are added to `values`.
        Raises ProbeFailed."""
        is_one_pass = self.may_wait and self.update.makes_one_pass(sum(len(group.rollouts) for group in groups))
        experience, scorer = self._experience(groups, values, is_scored=not is_one_pass)
        with timed(values, "probes"):
            values |= self.watch.look(groups, experience, iteration)
            if not is_one_pass:
                values |= self.watch.compare(experience)
            self.watch.check_kl(values.get("kl/per_token", 0.0))
        with timed(values, "advantage"):
            estimate, times = ask(groups, experience, iteration)
            advantages = estimate.advantages
            if self.config.update.whitening != "none":
                shifts_mean = self.config.update.whitening == "standard"
                advantages = whiten(advantages, experience.response_mask, shifts_mean)
            experience = replace(experience, advantages=advantages, returns=estimate.returns)
            self._check_returns(experience, estimate)
        values["seconds/advantage"] -= sum(times.values())  # the rest of it is the estimator's own
        for name, seconds in times.items():
            values[name] = values.get(name, 0.0) + seconds
        compare = self._score_others(experience, scorer, values) if is_one_pass else None
        with timed(values, "update"):
            updated = self.update(experience, iteration, compare)
            self.watch.check_update(updated.get("kl_old", 0.0), updated["kl_luckiest"])
        values["seconds/update"] -= values.pop("seconds/probes_within", 0.0)
        if "kl/per_response" in values:
            self.update.kl.update(values["kl/per_response"], len(experience.ids))
        return experience, estimate, updated

    def _check_returns(self, experience: Experience, estimate: Estimate) -> None:
        """Raise BadInput where the critic cannot say what it is asked to learn."""
        returns = estimate.returns if estimate.to_come is None else estimate.to_come
        if self.update.critic is not None and returns is not None:
            check_returns(self.update.critic.config.form, returns, experience.response_mask)

    def _experience(
        self, groups: Sequence[RolloutGroup], values: dict[str, float], is_scored: bool
    ) -> tuple[Experience, RowScorer]:
        config = self.config
        with timed(values, "forward"):
            experience, scorer = make_experience(
                groups,
                self.engine.model,
                self.reference,
                pad_id=self.pad_id,
                micro_batch_size=config.update.micro_batch_size,
                precision=config.precision,
                temperature=self.params.temperature,
                is_scored=is_scored,
            )
            rewards = token_rewards(groups, experience.response_mask)
            if self.reference is not None:
                kl = config.kl
                terms = reference_terms(
                    scorer, experience, self.engine.model, self.reference, kl.kind, self.params.temperature
                )
                if kl.max_token > 0:
                    terms = terms.clamp(-kl.max_token, kl.max_token)
                if kl.place == "reward":
                    rewards = rewards - self.update.kl.coefficient * terms
                values["kl/coefficient"] = self.update.kl.coefficient
                values |= describe_kl(experience, rewards, groups)
            values["forward/tokens"] = float(experience.attention_mask.sum()) if is_scored else 0.0
            critic = self.update.critic
            state_values = critic.values(scorer) if critic is not None else None
            return replace(experience, rewards=rewards, values=state_values), scorer

    def _score_others(self, experience: Experience, scorer: RowScorer, values: dict[str, float]) -> Callable[[], None]:
        """Score the rollouts that the update makes no pass over; what it calls once it has scored the rest."""
        with timed(values, "forward"):
            every = torch.arange(len(experience.ids))
            others = every[~torch.isin(every, self.update.rows_with_gradient(experience, every))]
            values["forward/tokens"] = float(experience.attention_mask[others].sum())
            logprobs, entropies = scorer.logprobs(self.engine.model, self.params.temperature, others)
            experience.old_logprobs[others], experience.entropies[others] = logprobs[others], entropies[others]

        def compare() -> None:
            with timed(values, "probes"), timed(values, "probes_within"):
                values.update(self.watch.compare(experience))

        return compare
