"""A process reward model as value: step-level credit without completions and without a critic.

Its score after a step is its estimate of the value of the state the step leads to. What a step is credited with has
four forms, "value", "progress" (PAV, Setlur et al. 2024), "minimum" (PURE, Cheng et al. 2025) and "first_error":
rl/credit/process_credit.py. The form "value" needs scores that are values, chances of success: a model that says
whether the steps so far are right (of labels by contrast, of human labels) is high where success is rare, and the last
step would pay the difference. A warning says so (rl/credit_watch.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.training_layout import STEPS
from espalier.models.frozen_reward import PromptWatch, load_frozen_reward, place
from espalier.rewards.process import packs_prompts, score_trajectories
from espalier.rl.credit.process_credit import FORMS, credit_rollouts, score_gap
from espalier.rl.credit_watch import ScaleWatch
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.group_scores import trajectories_of
from espalier.rl.rank_watch import StepScoreWatch
from espalier.rl.row_shares import read_shares
from espalier.rl.types import Estimate, Experience, RolloutGroup


class ProcessValueAdvantage:
    """`path` is a trained process reward model. `weight` is read by the forms "progress" and "minimum" alone.

    Raises BadInput on a form that does not exist.
    """

    needs_critic = False
    reads_token_rewards = False
    samples_more = False
    smallest_group = 2
    has_process_scores = True
    reads_frozen_reward = True

    def __init__(
        self, path: str, form: str = "progress", weight: float = 1.0, batch_tokens: int = 16384, attention: str = "auto"
    ):
        if form not in FORMS:
            raise BadInput(f"advantage.form must be one of {', '.join(FORMS)}, got '{form}'")
        self.model = load_frozen_reward(path, STEPS, attention)
        self.prompts = PromptWatch(path)
        self.form, self.weight, self.batch_tokens = form, weight, batch_tokens
        self.scale, self.ranks = ScaleWatch(), StepScoreWatch()

    def to(self, device: torch.device) -> None:
        """Move the network."""
        place(self.model, device)

    def networks(self) -> dict[str, Any]:
        """Name the one network."""
        return {"process reward model": self.model}

    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return one score per step, in [0, 1], of each trajectory."""
        return score_trajectories(self.model, trajectories, pad_id=0, batch_tokens=self.batch_tokens)

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        """Give every response token the advantage of its step; each rank scores its share of the rollouts.

        Raises BadInput where the form "value" meets a reward outside 0 to 1.
        """
        trajectories = trajectories_of(groups)
        self.prompts(trajectories)
        scores = read_shares(trajectories, self.scores, packs_prompts(self.model))
        rewards = [reward for group in groups for reward in group.rewards]
        every = [score for row in scores for score in row]
        last = [row[-1] for row in scores if row]
        metrics = {
            "step_score": sum(every) / max(1, len(every)),
            "last_score": sum(last) / max(1, len(last)),
            "score_gap": score_gap(scores, rewards),
            **self.ranks.look(groups, scores, speaks=not context.asker),
        }
        if self.form == "value" and not context.asker:
            self.scale.look(scores, rewards)
        estimate = credit_rollouts(groups, scores, self.form, self.weight, experience.response_mask)
        return replace(estimate, metrics=metrics)
