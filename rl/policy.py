"""The policy: the learner whose rollouts are trained on, and its weights as the sampler gets them.

The loss of a minibatch is the weighted sum over its response tokens, over all micro-batches and ranks, divided by
one number for the whole minibatch: the gradient does not depend on how it is cut.

Where nothing but the surrogate has a gradient, a rollout whose advantages are all 0 (its group agreed) has none:
its tokens are counted and its forward and backward passes are left out.

Where one step on all rollouts is the whole update, its pass is also the first over them: the old policy's log-probs are
read off it (`makes_one_pass`), unless an estimator has read them before. Either way they are compared with the engine's
before any weight changes.
"""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights

from espalier.models.inputs import network
from espalier.models.merged import adapter_scalings
from espalier.models.packing_check import packs_rows
from espalier.rl.delivery.policy_weights import HeldWeights, PolicyWeights
from espalier.rl.experience import RowScorer, reference_terms
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.kl import bounded
from espalier.rl.learner import RowSums, UpdateSums, write_model
from espalier.rl.losses import token_weights
from espalier.rl.metrics import kl_per_response
from espalier.rl.policy_loss import PolicyLoss
from espalier.rl.probes.watch import Watch
from espalier.rl.row_parts import OLD, RowPart, begin_step, joined, on_ranks, take_step
from espalier.rl.row_shares import cuts_of_ranks
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.rl.update import critic_iterations, steps_per_iteration
from espalier.runtime.base_model import base_of_run, write_base
from espalier.runtime.distributed import is_main_rank
from espalier.runtime.leading import ask_alike
from espalier.runtime.manifest import write_folder
from espalier.runtime.rank_calls import RankCalls
from espalier.runtime.schemas import RLConfig
from espalier.training.engine import Engine, TorchEngine
from espalier.training.schedule import check_schedule, learning_rate
from espalier.training.shards import GatheredWeights, Shards
from espalier.training.sums import NotFinite

if TYPE_CHECKING:
    from espalier.rl.delivery.sharded_weights import ShardedWeights
    from espalier.rl.ema import MovingAverage


def without_weights(model: Any, device: torch.device) -> Any:
    """Return the same network with its buffers on `device` and no weights (theirs is `meta`): to be called with weights
    put in (`torch.func.functional_call`)."""
    with init_empty_weights(include_buffers=False):
        empty = type(model)(copy.deepcopy(model.config))
    for part in empty.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    empty.generation_config = model.generation_config
    empty.train(False)
    return empty


@dataclass
class Policy:
    """Implements `rl.learner.Learner`. `max_tokens` are the sampler's; `loss.reference` is None without a KL penalty.

    `may_wait`: whether its log-probs before the update may be compared with the engine's as late as in the update: not
    where an estimator samples more, which costs more than a pass, nor where a pass that trains has noise of its own.
    """

    loss: PolicyLoss
    max_tokens: int
    average: "MovingAverage | None" = None
    may_wait: bool = False
    watch: Watch | None = None
    metrics: IterationMetrics = field(default_factory=IterationMetrics)
    folder = ""
    kept_in = "policies"
    fits_returns = False
    learns_in_score = False

    def __post_init__(self) -> None:
        self.engine: Engine = self.loss.engine
        self.config: RLConfig = self.loss.config
        check_schedule(self.config.update.schedule)

    @cached_property
    def _trained(self) -> Any:
        """The model without an engine's wrapper, with its adapters."""
        return self.engine.model if isinstance(self.engine, TorchEngine) else self.engine.model.module

    @cached_property
    def _scalings(self) -> dict[str, float]:
        """Of its adapters."""
        return adapter_scalings(self._trained)

    @cached_property
    def network(self) -> Any:
        """What computes as the delivered weights say: the engine's own model where that holds them as they are, else
        one without weights of its own."""
        is_plain = isinstance(self.engine, TorchEngine) and not self._scalings
        return self.engine.model if is_plain else without_weights(network(self.engine.model), self.engine.device)

    def makes_one_pass(self, num_rollouts: int) -> bool:
        """Say whether the only step on all rollouts needs nothing of them that an earlier pass would give."""
        config = self.config
        is_one_step = config.update.num_epochs == 1 and config.update.minibatch_size >= num_rollouts
        has_penalty = self.loss.reference is not None or config.kl.coefficient != 0
        return is_one_step and self.may_wait and not has_penalty and config.update.entropy_bonus == 0

    def score(self, groups: Sequence[RolloutGroup], experience: Experience, scorer: RowScorer) -> Experience:
        """Return the experience with the log-probs of the reference, and the KL penalty in its rewards where that is
        its place; the policy's own are scored unless the update's pass will give them."""
        if not self.makes_one_pass(len(experience.ids)):
            experience.old.score()
        kl, reference = self.config.kl, self.loss.reference
        if reference is None:
            return experience
        temperature = self.loss.temperature
        experience = replace(experience, reference_logprobs=scorer.logprobs(reference, temperature)[0])
        if kl.place != "reward":
            return experience
        assert experience.rewards is not None
        terms = reference_terms(scorer, experience, self.engine.model, reference, kl.kind, temperature)
        return replace(experience, rewards=experience.rewards - self.loss.kl.coefficient * bounded(terms, kl))

    def check(self, experience: Experience, estimate: Estimate) -> None:
        """Any advantages can be learnt."""

    def rows_with_gradient(self, experience: Experience, rows: torch.Tensor) -> torch.Tensor:
        """Return those of `rows` [R] that can have a gradient."""
        assert experience.advantages is not None
        if self.loss.has_more_than_surrogate(experience):
            return rows
        return rows[experience.advantages[rows].any(dim=1)]

    def step(self, experience: Experience, rows: torch.Tensor, number: int, sums: UpdateSums) -> dict[str, float]:
        """Take one optimizer step, unless the critic alone is trained so far: the schedule begins behind that.

        Raises NotFinite, and ProbeFailed where the log-probs turn out not to be the engine's.
        """
        config, planned = self.config, steps_per_iteration(self.config)
        first = critic_iterations(config) * planned
        if number < first:
            return {}
        total = config.num_iterations * planned - first
        rate = learning_rate(
            number - first, config.update.learning_rate, config.update.warmup_steps, config.update.schedule, total
        )
        ratios, num_passes = self._backward(experience, rows, sums)
        if self.watch is not None and not self.watch.is_compared:
            with self.metrics.clock.phase("probes"):
                self.metrics.add(self.watch.compare(experience))
        if not self._is_guarded(ratios, sums):
            norm = take_step(self.engine, rate) if num_passes else 0.0  # no rank has anything to learn from
            if not math.isfinite(norm):
                raise NotFinite(f"the gradient norm is {norm}: try a lower update.learning_rate")
            sums.add({"grad_norm": (norm, 1)})
        return {"learning_rate": rate}

    def _backward(self, experience: Experience, rows: torch.Tensor, sums: UpdateSums) -> tuple[list[float], int]:
        """Have the ranks make the gradients of `rows` [R]; return ([sum, number] of their tokens' ratios, passes of
        every rank)."""
        config, mask, old = self.config, experience.response_mask, experience.old
        divisor = self._name_metrics(experience, rows, sums)
        learnt = self.rows_with_gradient(experience, rows)
        if not old.is_scored:
            is_only_pass = self.makes_one_pass(len(mask))
            old.score(rows[~torch.isin(rows, learnt)] if is_only_pass else None)
        is_scored = old.is_scored
        is_packed = packs_rows(self.engine.model) and self.loss.penalty_kind(experience) != "full"
        sizes = (is_packed, config.update.micro_batch_size, config.update.micro_batch_tokens)
        cuts = cuts_of_ranks(experience.ids, experience.attention_mask, learnt, *sizes)
        num_passes = begin_step(self.engine, cuts)
        masks = (experience.ids, experience.attention_mask, mask)
        call = partial(self.backward_part, self.loss.kl.coefficient, divisor, config.update.num_epochs > 1)
        values = self.loss.tensors(experience, is_scored)
        ratios, found = [0.0, 0.0], [torch.zeros(mask.shape) for _ in range(0 if is_scored else 2)]
        for part, (measured, scored) in on_ranks(call, masks, values, cuts):
            sums.merge(measured, part.numbers)
            ratios = [ratios[0] + measured.ratio_sum, ratios[1] + measured.num_counted]
            for whole, tokens in zip(found, scored, strict=True):
                part.fill(whole, tokens)
        if not is_scored:
            old.fill(learnt, found[0][learnt], found[1][learnt])
        return ratios, num_passes

    def backward_part(
        self, coefficient: float, divisor: float, keeps_rises: bool, part: RowPart
    ) -> tuple[RowSums, list[torch.Tensor]]:
        """On the rank that has the rows: add their gradients, with this `coefficient` of the KL penalty. Return what
        was measured and, where log-probs of before were not known, log-probs and entropies of the response tokens.
        Raises NotFinite."""
        self.loss.kl.coefficient = coefficient
        rows, sums = part.experience(), RowSums(keeps_rises)
        is_scored = OLD in part.values
        scored: list[list[torch.Tensor]] = [[] for _ in range(0 if is_scored else 2)]
        for cut, length in part.cuts:
            mask = rows.response_mask[cut]
            weights = token_weights(mask, self.config.update.loss_aggregation, self.max_tokens)[0][:, :length]
            total, own = self.loss(rows, weights, cut, length, sums)
            value = float(total.detach())
            if not math.isfinite(value):
                raise NotFinite(f"the loss is {value} on rollouts {part.numbers[cut].tolist()[:8]}")
            sums.add({"loss": (value, 0)})
            self.engine.backward(total / max(divisor, 1.0))
            for parts, tensor in zip(scored, own, strict=True):
                parts.append(tensor[mask[:, :length]])
        for _ in range(part.num_empty):
            self.engine.backward(self.loss.empty())
        return sums, [joined(parts) for parts in scored]

    def _name_metrics(self, experience: Experience, rows: torch.Tensor, sums: UpdateSums) -> float:
        """Name the metrics, with what the minibatch `rows` [R] counts for; return what its loss is divided by."""
        mask = experience.response_mask[rows]
        share = token_weights(mask, self.config.update.loss_aggregation, self.max_tokens)[1]
        sums.add({"loss": (0.0, share), "surrogate_loss": (0.0, share), "clip_share": (0.0, int(mask.sum()))})
        if self.config.update.entropy_bonus:
            sums.add({"entropy_bonus": (0.0, share)})
        sums.add(dict.fromkeys(self.loss.names(experience), (0.0, 0.0)))
        return share

    def _is_guarded(self, ratios: list[float], sums: UpdateSums) -> bool:
        """Say whether this minibatch is left out because the policy has run away from the one that made it."""
        limit = self.config.update.max_mean_ratio
        if limit <= 0:
            return False
        total, tokens = ratios
        is_skipped = not total <= limit * max(tokens, 1.0)  # also where it is not a number
        sums.add({"skipped": (float(is_skipped), 1)})
        if is_skipped:
            ask_alike(self.engine.discard)
        return is_skipped

    def adapt_penalty(self, experience: Experience) -> None:
        """Move the KL coefficient by how far the policy before the update was from its reference."""
        if experience.reference_logprobs is not None:
            self.loss.kl.update(kl_per_response(experience), len(experience.ids))

    @cached_property
    def _sharded(self) -> "ShardedWeights | None":
        """Where no rank holds all weights."""
        if self.engine.shards is None:
            return None
        from espalier.rl.delivery.sharded_weights import ShardedPolicy, ShardedWeights

        return ShardedWeights(RankCalls(ShardedPolicy(self.engine, self._gathered)))

    @cached_property
    def _gathered(self) -> GatheredWeights:
        """A few at a time."""
        return GatheredWeights(self.engine.shards or Shards(self._trained), self._scalings)

    def weights(self) -> PolicyWeights:
        """Return them as they are delivered; called on every rank."""
        if self._sharded is not None:
            return self._sharded
        return HeldWeights(self.network, self.engine.whole_weights(), self._scalings)

    def next_weights(self) -> PolicyWeights:
        """Return the `weights` of a new version, with which the moving average goes on."""
        with self.metrics.clock.phase("weight_sync"):
            weights = self.weights()
            if self.average is not None:
                self.average.update(weights)
        return weights

    def save_state(self, folder: Path) -> None:
        """The engine's, the moving average in `ema.safetensors`, the KL coefficient in `kl.json`."""
        self.engine.save_state(folder)
        if is_main_rank():
            (folder / "kl.json").write_text(json.dumps({"coefficient": self.loss.kl.coefficient}) + "\n")
            if self.average is not None:
                self.average.save(folder)

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote. Raises BadCheckpoint."""
        self.engine.load_state(folder)
        if self.average is not None:
            self.average.load(folder, self.weights())
        self.loss.kl.coefficient = float(json.loads((folder / "kl.json").read_text())["coefficient"])

    def save_model(self, folder: Path) -> None:
        """A standard folder, adapters merged; called on every rank."""
        if self._scalings:
            self._gathered.save(self.network, folder)
        else:
            self.engine.save_model(folder)

    def export(self, tokenizer: Any, run_dir: Path) -> None:
        """`adapter/` and `model_ema/` where there is one, and last of all `model/`, with adapters merged."""
        if self._scalings:
            trained_on = base_of_run(run_dir)
            write_folder(run_dir / "adapter", lambda folder: self._save_adapter(folder, trained_on))
        if self.average is not None:
            average = self.average.weights()
            write_model(lambda folder: self._save_average(average, folder), tokenizer, run_dir / "model_ema")
        write_model(self.save_model, tokenizer, run_dir / "model")

    def _save_average(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        if is_main_rank():
            self.network.save_pretrained(folder, state_dict=weights)

    def _save_adapter(self, folder: Path, trained_on: str) -> None:
        """peft's folder, with the fingerprint of its base."""
        self.engine.save_model(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
        if is_main_rank():
            write_base(folder, trained_on)
