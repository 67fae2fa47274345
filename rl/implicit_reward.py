"""An implicit process reward model that is trained along on outcomes alone (PRIME, Cui et al. 2025, arXiv 2502.01456).

The reward of a response token is beta times the log-ratio of this network, a causal LM that begins as the policy, and a
reference. In every iteration it takes one pass of optimizer steps on the rollouts, each on whole minibatches in the
order of their groups, with the cross-entropy of beta times the log-ratio of a response against the grader's verdict
(`training.objectives.implicit_ce`), before advantages are estimated: `experience.implicit_rewards`.

Log-probs of both networks are those at the rollouts' temperature.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.models.packing_check import packs_rows
from espalier.models.precision import autocast
from espalier.rl.experience import RowScorer, empty_loss, policy_logprobs
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.learner import write_model
from espalier.rl.rank_watch import RankWatch, pair_accuracy
from espalier.rl.row_parts import RowPart, begin_step, joined, on_ranks, take_step
from espalier.rl.row_shares import cuts_of_ranks, taker
from espalier.rl.training_engines import load_trained, make_training_engine
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.schemas import ImplicitRewardConfig, RLConfig
from espalier.training.engine import Engine
from espalier.training.objectives.implicit_ce import implicit_ce_losses
from espalier.training.sums import NotFinite, Sums

log = logging.getLogger(__name__)


_WARNING = (
    "the implicit reward ranked {share:.0f} % of pairs of a right and a wrong rollout of one problem rightly over "
    "{num} iterations, no better than chance: the policy is led away from right answers; raise "
    "implicit_reward.learning_rate (it must learn faster than the policy), or set its weight to 0 "
    "(advantage.process_weight with advantage=prime, else implicit_reward.weight)"
)


_ALL_ALIKE = (
    "the grader has called all rollouts of the last {num} iterations {verdict}, and the implicit reward learns that "
    "everything the policy writes is: it pays it to leave its own texts; take problems that are solved now and then "
    "(and have a gold answer), or implicit_reward=none"
)
_WATCHED = 5


@dataclass
class ImplicitReward:
    """Implements `rl.learner.Learner`. `reference` is the policy of the start, None where it is not asked: the policy
    before the update is the reference, or the KL penalty has it. Sizes in rollouts."""

    engine: Engine
    config: ImplicitRewardConfig
    reference: Any | None
    temperature: float
    precision: str
    minibatch_size: int
    micro_batch_size: int
    micro_batch_tokens: int = 0
    metrics: IterationMetrics = field(default_factory=IterationMetrics)
    watch: RankWatch = field(default_factory=lambda: RankWatch(_WARNING))
    num_alike: int = 0
    """iterations in a row whose outcomes were all the same"""
    folder = "implicit_reward"
    kept_in = "implicit_rewards"
    fits_returns = False
    learns_in_score = True

    def score(self, groups: Sequence[RolloutGroup], experience: Experience, scorer: RowScorer) -> Experience:
        """Return the experience with the rewards of its response tokens, after the steps on it. Raises NotFinite."""
        model, beta = self.engine.model, self.config.beta
        outcomes = [rollout.trajectory.is_correct for group in groups for rollout in group.rollouts]
        sizes = [len(group.rollouts) for group in groups]
        reference = self._reference_logprobs(experience, scorer)
        logprobs, sums = self._fit(experience, reference, torch.tensor(outcomes, dtype=torch.float32))
        rewards = beta * (logprobs - reference)
        measured = {**sums.means_here(), "pair_accuracy_before": pair_accuracy(_totals(rewards), outcomes, sizes)}
        self.watch.add(measured["pair_accuracy_before"], outcomes, sizes)
        self._watch_outcomes(outcomes)
        if self.config.update == "before":
            rewards = beta * (scorer.logprobs(model, self.temperature)[0] - reference)
            measured["pair_accuracy_after"] = pair_accuracy(_totals(rewards), outcomes, sizes)
        said = [total > 0 for total in _totals(rewards)]
        right = sum(one == other for one, other in zip(said, outcomes, strict=True))
        measured |= {"sign_accuracy": right / len(said), "reward": float(rewards[experience.response_mask].mean())}
        self.metrics.add(measured, "implicit_reward/")
        return replace(experience, implicit_rewards=rewards)

    def _watch_outcomes(self, outcomes: Sequence[bool]) -> None:
        """Warn once of a run of iterations in which all outcomes are the same."""
        self.num_alike = self.num_alike + 1 if len(set(outcomes)) == 1 else 0
        if self.num_alike == _WATCHED:
            log.warning(_ALL_ALIKE.format(num=_WATCHED, verdict="right" if outcomes[0] else "wrong"))

    def _reference_logprobs(self, experience: Experience, scorer: RowScorer) -> torch.Tensor:
        """Return [N, T]; those of a KL penalty are of the same policy."""
        if self.config.reference == "policy":
            return experience.old_logprobs
        if experience.reference_logprobs is not None:
            return experience.reference_logprobs
        return scorer.logprobs(self.reference, self.temperature)[0]

    def _fit(
        self, experience: Experience, reference: torch.Tensor, outcomes: torch.Tensor
    ) -> tuple[torch.Tensor, Sums]:
        """Take one pass of steps against `outcomes` [N]: (the log-probs [N, T] that its passes gave, what was
        measured)."""
        seen, sums = torch.zeros(experience.ids.shape), Sums()
        for rows in torch.arange(len(outcomes)).split(self.minibatch_size):
            self._step(experience, reference, outcomes, rows, seen, sums)
        return seen, sums

    def _step(
        self,
        experience: Experience,
        reference: torch.Tensor,
        outcomes: torch.Tensor,
        rows: torch.Tensor,
        seen: torch.Tensor,
        sums: Sums,
    ) -> None:
        """Take one optimizer step on the rollouts `rows` [R]: the mean loss over them; their log-probs go to `seen`."""
        mask, engine = experience.response_mask, self.engine
        sizes = (packs_rows(engine.model), self.micro_batch_size, self.micro_batch_tokens)
        cuts = cuts_of_ranks(experience.ids, experience.attention_mask, rows, *sizes)
        begin_step(engine, cuts)
        masks = (experience.ids, experience.attention_mask, mask)
        call = partial(self.backward_part, outcomes, len(rows))
        for part, (measured, logprobs) in on_ranks(call, masks, {"reference_logprobs": reference}, cuts):
            sums.add(measured.rows)
            part.fill(seen, logprobs)
        norm = take_step(engine, self.config.learning_rate)
        if not math.isfinite(norm):
            raise NotFinite(f"the implicit reward's gradient norm is {norm}: lower implicit_reward.learning_rate")
        sums.add({"grad_norm": (norm, 1)})

    def backward_part(self, outcomes: torch.Tensor, count: int, part: RowPart) -> tuple[Sums, torch.Tensor]:
        """On the rank that has the rows: add their gradients, of the loss divided by `count`; `outcomes` [N] are of all
        rollouts. Return (what was measured, the log-probs of the response tokens). Raises NotFinite."""
        rows, model, sums, seen = part.experience(), self.engine.model, Sums(), list[torch.Tensor]()
        assert rows.reference_logprobs is not None
        for cut, length in part.cuts:
            take = taker(cut, length, self.engine.device)
            own = take(rows.response_mask)
            with autocast(self.engine.device, self.precision):
                ids, attention_mask = take(rows.ids), take(rows.attention_mask).long()
                found = policy_logprobs(model, ids, attention_mask, own, self.temperature)[0]
            logprobs, numbers = found.float() * own, part.numbers[cut]
            scores = self.config.beta * (logprobs - take(rows.reference_logprobs)).sum(-1)
            total = implicit_ce_losses(scores, outcomes[numbers].to(scores.device)).sum()
            if not math.isfinite(float(total.detach())):
                raise NotFinite(f"the implicit reward's loss is {float(total.detach())} on rollouts "
                                f"{numbers.tolist()[:8]}")  # fmt: skip
            self.engine.backward(total / count)
            seen.append(logprobs.detach().cpu()[rows.response_mask[cut, :length]])
            sums.add({"loss": (float(total.detach()), len(cut))})
        for _ in range(part.num_empty):
            self.engine.backward(empty_loss(model, self.precision))
        return sums, joined(seen)

    def check(self, experience: Experience, estimate: Estimate) -> None:
        """Learn nothing from advantages."""

    def step(self, experience: Experience, rows: torch.Tensor, number: int, sums: Sums) -> dict[str, float]:
        """Take no step: this iteration's were taken before its advantages were estimated."""
        return {}

    def save_state(self, folder: Path) -> None:
        """What a resume needs; called on every rank."""
        self.engine.save_state(folder)

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote."""
        self.engine.load_state(folder)

    def save_model(self, folder: Path) -> None:
        """A standard folder; called on every rank."""
        self.engine.save_model(folder)

    def export(self, tokenizer: Any, run_dir: Path) -> None:
        """`implicit_reward/`, a causal LM: `prm/make_log_ratio_reward` makes a reward model of it and its reference."""
        write_model(self.save_model, tokenizer, run_dir / self.folder)


def _totals(rewards: torch.Tensor) -> list[float]:
    """Sum [N, T] over tokens."""
    found: list[float] = rewards.double().sum(-1).tolist()
    return found


def make_implicit_reward(config: RLConfig, temperature: float, reference: Any | None) -> ImplicitReward | None:
    """Return the learner with its own engine, None where the config has none."""
    if (settings := config.implicit_reward) is None:
        return None
    rates = (settings.learning_rate, settings.max_grad_norm)
    engine = make_training_engine(config, load_trained(config, settings.model), settings.optimizer, *rates)
    update = config.update
    sizes = (update.minibatch_size, update.micro_batch_size, update.micro_batch_tokens)
    return ImplicitReward(engine, settings, reference, temperature, config.precision, *sizes)
