"""The critic: the value of the state before every token, by a network with an optimizer of its own.

`values[n, t]` is about the state that token t was chosen in, so it is read one position earlier: a value never
sees the token it is the baseline of.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from espalier.data.records import BadInput
from espalier.models.inputs import network
from espalier.models.logits import response_values
from espalier.models.packing_check import packs_rows
from espalier.models.precision import autocast
from espalier.models.scalar_head import critic_form
from espalier.rl.experience import RowScorer, empty_loss
from espalier.rl.learner import write_model
from espalier.rl.losses import VALUE_RANGES, check_value_loss, cross_entropy_loss, value_loss
from espalier.rl.row_parts import RowPart, begin_step, on_ranks, take_step
from espalier.rl.row_shares import cuts_of_ranks, taker
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.distributed import is_main_rank
from espalier.runtime.schemas import CriticConfig
from espalier.training.engine import BadCheckpoint, Engine
from espalier.training.schedule import check_schedule, learning_rate
from espalier.training.sums import NotFinite, Sums
from espalier.values.explained_variance import explained_variance

_ROUNDING = 1e-4


def critic_values(
    model: Any,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    form: str,
    response_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, T] in float32, aligned with `ids` as log-probs are, of the tokens in `response_mask` (default: all);
    it means nothing elsewhere and in column 0. `form` probability: sigmoid."""
    found = response_values(model, ids, attention_mask, response_mask)
    return pad(torch.sigmoid(found) if form == "probability" else found, (1, 0))


@dataclass
class Critic:
    """Implements `rl.learner.Learner`. `engine` trains the network; sizes in rollouts; `num_steps`: of the whole run,
    at whose end its schedule ends. The network's config says `critic_form`, so that a saved critic is read as what it
    is.

    Raises BadInput on a form that does not exist, and on a network that was saved as a critic of another form.
    """

    engine: Engine
    config: CriticConfig
    precision: str
    micro_batch_size: int
    num_steps: int
    micro_batch_tokens: int = 0
    is_scaled: bool = False
    """Whether its returns are of rewards that a run scales (`rl.reward_scaling`): its values are in no fixed unit."""
    folder = "critic"
    kept_in = "critics"
    fits_returns = True
    learns_in_score = False

    def __post_init__(self) -> None:
        check_schedule(self.config.schedule, "critic.schedule")
        form = self.config.form
        if form not in VALUE_RANGES:
            raise BadInput(f"critic.form must be one of {', '.join(VALUE_RANGES)}, got '{form}'")
        check_value_loss(self.config.loss, form, self.config.clip_range)
        inner = network(self.engine.model)
        saved = critic_form(inner.config)
        if saved not in (None, form):
            raise BadInput(f"{inner.config.name_or_path or 'the critic'} was saved as a critic of form {saved}, and "
                           f"critic.form={form}: set critic.form={saved}, or critic.model.source=reward_model_body for "
                           "a fresh head")  # fmt: skip
        inner.config.critic_form = form
        if self.is_scaled or getattr(inner.config, "values_scaled_rewards", False):
            inner.config.values_scaled_rewards = self.is_scaled

    def save_state(self, folder: Path) -> None:
        """What a resume needs, and which form its values have; called on every rank."""
        self.engine.save_state(folder)
        if is_main_rank():
            low, high = (bound if math.isfinite(bound) else None for bound in VALUE_RANGES[self.config.form])
            (folder / "critic.json").write_text(json.dumps({"form": self.config.form, "range": [low, high]}) + "\n")

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote. Raises BadCheckpoint where that was a critic of another form."""
        record = folder / "critic.json"
        saved = json.loads(record.read_text())["form"] if record.is_file() else self.config.form
        if saved != self.config.form:
            raise BadCheckpoint(f"{folder} holds a critic of form {saved}, and critic.form={self.config.form}: choose "
                                "another output_dir")  # fmt: skip
        self.engine.load_state(folder)

    def save_model(self, folder: Path) -> None:
        """A standard folder; called on every rank."""
        self.engine.save_model(folder)

    def export(self, tokenizer: Any, run_dir: Path) -> None:
        """`critic/`."""
        write_model(self.save_model, tokenizer, run_dir / self.folder)

    def score(self, groups: Sequence[RolloutGroup], experience: Experience, scorer: RowScorer) -> Experience:
        """Return the experience with the values [N, T] of all rollouts, before the update."""
        model = self.engine.model
        return replace(experience, values=scorer(model, 1, self.read, packs_rows(model))[0])

    def read(self, ids: torch.Tensor, mask: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the values [B, T] of some rows."""
        return (critic_values(self.engine.model, ids, mask, self.config.form, chosen),)

    def check(self, experience: Experience, estimate: Estimate) -> None:
        """Raise BadInput where its values cannot be what came after a token."""
        returns = estimate.returns if estimate.to_come is None else estimate.to_come
        if returns is not None:
            check_returns(self.config.form, returns, experience.response_mask)
        if self.config.loss == "cross_entropy" and estimate.returns is not None:
            check_returns("probability", estimate.returns, experience.response_mask)  # the targets, too

    def step(self, experience: Experience, rows: torch.Tensor, number: int, sums: Sums) -> dict[str, float]:
        """Take the optimizer step `number` on the rollouts `rows` [R]: the mean loss over their response tokens.

        Raises NotFinite where the loss or the norm of the gradient is not finite.
        """
        config = self.config
        rate = learning_rate(number, config.learning_rate, config.warmup_steps, config.schedule, self.num_steps)
        self.engine.model.train()
        weights = experience.return_weights
        count = max(1.0, float((experience.response_mask if weights is None else weights)[rows].sum()))
        if weights is not None:
            rows = rows[weights[rows].any(dim=1)]
        sums.add({"value_loss": (0.0, 0.0), "value_clip_share": (0.0, 0.0)})  # also where no row has a weight
        sizes = (packs_rows(self.engine.model), self.micro_batch_size, self.micro_batch_tokens)
        cuts = cuts_of_ranks(experience.ids, experience.attention_mask, rows, *sizes)
        num_passes = begin_step(self.engine, cuts)
        masks = (experience.ids, experience.attention_mask, experience.response_mask)
        learnt = {name: getattr(experience, name) for name in ("values", "returns", "return_weights")}
        learnt = {name: tensor for name, tensor in learnt.items() if tensor is not None}
        for _, part in on_ranks(partial(self.backward_part, count), masks, learnt, cuts):
            sums.add(part.rows)
        norm = take_step(self.engine, rate) if num_passes else 0.0  # no rank has anything to learn from
        if not math.isfinite(norm):
            raise NotFinite(f"the critic's gradient norm is {norm}: try a lower critic.learning_rate")
        sums.add({"value_grad_norm": (norm, 1)})
        return {"value_learning_rate": rate}

    def backward_part(self, count: float, part: RowPart) -> Sums:
        """On the rank that has the rows: add their gradients, of the loss divided by `count`; return what was measured.
        Raises NotFinite."""
        rows, sums = part.experience(), Sums()
        for cut, length in part.cuts:
            total, clipped, counted = self._loss(rows, cut, length)
            if not math.isfinite(float(total.detach())):
                raise NotFinite(f"the value loss is {float(total.detach())} on rollouts "
                                f"{part.numbers[cut].tolist()[:8]}")  # fmt: skip
            self.engine.backward(self.config.loss_coefficient * total / count)
            sums.add({"value_loss": (float(total.detach()), counted), "value_clip_share": (clipped, counted)})
        for _ in range(part.num_empty):
            self.engine.backward(empty_loss(self.engine.model, self.precision))
        return sums

    def _loss(self, experience: Experience, cut: torch.Tensor, length: int) -> tuple[torch.Tensor, float, float]:
        """Return (summed loss [] of rows `cut`, tokens the clip decides, tokens, each counted by its weight)."""
        assert experience.values is not None
        assert experience.returns is not None
        take = taker(cut, length, self.engine.device)
        with autocast(self.engine.device, self.precision):
            ids, attention_mask = take(experience.ids), take(experience.attention_mask).long()
            mask = take(experience.response_mask)
            weights = None if experience.return_weights is None else take(experience.return_weights)
            mask = mask if weights is None else mask & (weights > 0)
            is_likelihood = self.config.loss == "cross_entropy"
            form = "linear" if is_likelihood else self.config.form  # of which the loss takes the sigmoid itself
            values = critic_values(self.engine.model, ids, attention_mask, form, mask)
        old, returns = take(experience.values), take(experience.returns)
        counted = float(mask.sum() if weights is None else weights[mask].sum())
        if is_likelihood:
            return cross_entropy_loss(values, returns, mask, weights), 0, counted
        total, clipped, _ = value_loss(values, old, returns, mask, self.config.clip_range, weights)
        return total, clipped, counted


def check_returns(form: str, returns: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise BadInput where a critic of this form cannot say what came after a token.

    `returns` [N, T] are read where `mask` is true.
    """
    low, high = VALUE_RANGES[form]
    chosen = returns[mask]
    outside = ~((chosen >= low - _ROUNDING) & (chosen <= high + _ROUNDING) & chosen.isfinite())
    if outside.any():
        raise BadInput(f"{int(outside.sum())} of {len(chosen)} returns lie outside what the critic can say: they are "
                       f"{float(chosen.min()):.4g} to {float(chosen.max()):.4g}, its values {low:g} to {high:g} "
                       f"(critic.form={form}); nothing was learnt from them: choose critic=reward_model_body or policy "
                       "(critic.form=linear), or a reward within the range")  # fmt: skip


def describe_values(experience: Experience) -> dict[str, float]:
    """Return how good the critic was before the update, over response tokens.

    `explained_variance` (where its targets differ) and `error` (mean absolute) are against its own targets;
    `outcome_error` is the mean absolute distance from the rewards that really came after the state.
    """
    if experience.values is None or experience.returns is None or experience.rewards is None:
        return {}
    mask = experience.response_mask
    values, returns = experience.values[mask], experience.returns[mask]
    to_come = experience.rewards.flip(-1).cumsum(-1).flip(-1)[mask]
    explained = explained_variance(values, returns)
    return {
        "value": float(values.mean()),
        "return": float(returns.mean()),
        **({} if explained is None else {"explained_variance": explained}),
        "error": float((values - returns).abs().mean()),
        "outcome_error": float((values - to_come).abs().mean()),
    }
