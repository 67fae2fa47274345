"""An outcome reward model as reward: its score of the whole response, read at the last token.

The model is a trained folder of `exp/reward` (a token-classification network). Scoring here equals scoring in
training: the same ids, the same last token.

Pairs leave a reward's scale and zero open. With a `normaliser`, the file that `evaluation/measure_reward_model` wrote,
the mean over the policy's responses is taken off and the rest divided by their standard deviation, before anything is
clipped (Stiennon et al. 2020; Huang et al. 2024): a KL coefficient then means the same for every reward model.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.training_layout import RESPONSES
from espalier.models.frozen_reward import PromptWatch, load_frozen_reward, place
from espalier.models.scalar_head import ScoresSteps, scores_from_logits
from espalier.rewards.process import row_logits
from espalier.rewards.score import ANYTHING, Score, ScoreRange, clipped


def read_normaliser(path: str) -> tuple[float, float]:
    """Return (mean, standard deviation) of a reward model's logits. Raises BadInput where the file does not say them,
    or the logits do not differ."""
    try:
        row = json.loads(Path(path).read_text())["reward"]
        mean, deviation = float(row["mean"]), float(row["std"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: says no mean and std of rewards ({error!r}): name the file that "
                       "evaluation/measure_reward_model wrote") from None  # fmt: skip
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0):
        raise BadInput(f"{path}: rewards of mean {mean:g} and std {deviation:g} cannot be normalised: train the reward "
                       "model on more pairs")  # fmt: skip
    return mean, deviation


@torch.inference_mode()
def last_logits(model: Any, rows: Sequence[Sequence[int]], batch_tokens: int) -> list[torch.Tensor]:
    """Return the logits [L] that a network reads at the last token of every row, in order."""
    model.eval()
    found: dict[int, torch.Tensor] = {}
    for batch in row_logits(model, rows, 0, batch_tokens):
        found.update((index, logits[-1].float()) for index, logits in batch)
    return [found[index] for index in range(len(rows))]


class OutcomeModelReward:
    """`form`: "logit" (a Bradley-Terry model's scale, one label), or "probability" (sigmoid, or the expected share
    of a model with classes). A logit is normalised where there is a `normaliser`. The score is clipped to at most
    `limit` away from 0 where `limit` is above 0. `batch_tokens` bounds the padded size of a forward pass.

    Raises BadInput on another form, on logits of a model with classes, on a normaliser of probabilities, and on a
    process reward model, unless `takes_last_step`: then its score of the last step is the response's.
    """

    reads_frozen_reward = True

    def __init__(
        self,
        path: str,
        form: str = "logit",
        limit: float = 0.0,
        normaliser: str = "",
        takes_last_step: bool = False,
        batch_tokens: int = 16384,
        attention: str = "auto",
    ):
        self.model: Any = load_frozen_reward(path, RESPONSES, attention, is_asked_for=takes_last_step)
        self.prompts = PromptWatch(path)
        if isinstance(self.model, ScoresSteps):
            raise BadInput(f"{path} scores steps by the log-ratio of two policies: choose a process reward")
        if form not in ("logit", "probability"):
            raise BadInput(f"the form of an outcome reward model is logit or probability, got '{form}'")
        if form == "logit" and self.model.config.num_labels != 1:
            raise BadInput(f"{path} has {self.model.config.num_labels} labels and no one logit: set form=probability")
        if normaliser and form != "logit":
            raise BadInput("a normaliser is for rewards of form logit: leave it out, or set form=logit")
        self.form, self.limit, self.batch_tokens = form, limit, batch_tokens
        self.mean, self.deviation = read_normaliser(normaliser) if normaliser else (0.0, 1.0)

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return a share, or any number; at most `limit` away from 0."""
        return ScoreRange(clipped((0.0, 1.0) if settings["form"] == "probability" else ANYTHING, settings["limit"]))

    def to(self, device: torch.device) -> None:
        """Move the network."""
        place(self.model, device)

    def networks(self) -> dict[str, Any]:
        """Return the one network."""
        return {"outcome reward model": self.model}

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score a trajectory. Raises BadInput for one without token ids."""
        rows = [[*trajectory.prompt_ids, *trajectory.response_ids] for trajectory in trajectories]
        if not all(rows):
            raise BadInput(f"trajectory '{trajectories[rows.index([])].id}' has no token ids")
        self.prompts(trajectories)
        values = [self._value(read) for read in last_logits(self.model, rows, self.batch_tokens)]
        return [Score(value, parts={"outcome_model": value}) for value in values]

    def _value(self, read: torch.Tensor) -> float:
        """Return the score of logits [L], normalised, then clipped."""
        if self.form == "logit":
            value = (float(read.squeeze(-1)) - self.mean) / self.deviation
        else:
            value = float(scores_from_logits(read))
        return min(max(value, -self.limit), self.limit) if self.limit > 0 else value
