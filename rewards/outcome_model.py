"""An outcome reward model as reward: its score of the whole response, read at the last token.

The model is a trained folder of `exp/reward` (a token-classification network). Scoring here equals scoring in
training: the same ids, the same last token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from espalier.data.records import BadInput, Trajectory
from espalier.models.scalar_head import ScoresSteps, load_process_reward, scores_from_logits
from espalier.rewards.process import row_logits
from espalier.rewards.score import ANYTHING, Score, ScoreRange, clipped


class OutcomeModelReward:
    """`form`: "logit" (a Bradley-Terry model's scale, one label), or "probability" (sigmoid, or the expected share
    of a model with classes). The score is clipped to at most `limit` away from 0 where `limit` is above 0.
    `batch_tokens` bounds the padded size of a forward pass.

    Raises BadInput on another form, and on logits of a model with classes.
    """

    def __init__(
        self, path: str, form: str = "logit", limit: float = 0.0, batch_tokens: int = 16384, attention: str = "sdpa"
    ):
        self.model: Any = load_process_reward(path, attention=attention).requires_grad_(False)
        if isinstance(self.model, ScoresSteps):
            raise BadInput(f"{path} scores steps by the log-ratio of two policies: choose a process reward")
        if form not in ("logit", "probability"):
            raise BadInput(f"the form of an outcome reward model is logit or probability, got '{form}'")
        if form == "logit" and self.model.config.num_labels != 1:
            raise BadInput(f"{path} has {self.model.config.num_labels} labels and no one logit: set form=probability")
        self.form, self.limit, self.batch_tokens = form, limit, batch_tokens

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return a share, or any number; at most `limit` away from 0."""
        return ScoreRange(clipped((0.0, 1.0) if settings["form"] == "probability" else ANYTHING, settings["limit"]))

    def to(self, device: torch.device) -> None:
        """Move the network."""
        self.model.to(device)  # type: ignore[arg-type]

    def networks(self) -> dict[str, Any]:
        """Return the one network."""
        return {"outcome reward model": self.model}

    @torch.inference_mode()
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score a trajectory. Raises BadInput for one without token ids."""
        self.model.eval()
        values = [0.0] * len(trajectories)
        rows = [[*trajectory.prompt_ids, *trajectory.response_ids] for trajectory in trajectories]
        if not all(rows):
            raise BadInput(f"trajectory '{trajectories[rows.index([])].id}' has no token ids")
        for batch in row_logits(self.model, rows, 0, self.batch_tokens):
            for index, logits in batch:
                read = logits[-1]
                value = float(read.float().squeeze(-1) if self.form == "logit" else scores_from_logits(read))
                values[index] = min(max(value, -self.limit), self.limit) if self.limit > 0 else value
        return [Score(value, parts={"outcome_model": value}) for value in values]
