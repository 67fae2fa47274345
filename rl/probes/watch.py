"""The probes of a run: every iteration's rollouts and steps looked at before anything is learnt or kept from them.

`look` stands between the tensors of the rollouts and the estimator, `compare` between the old policy's log-probs and
the first step, `check_update` behind the update and before the delivery and the checkpoint: what stops the run there
leaves the last checkpoint as it was. Rank 0 looks; passes are made on all ranks, which may hold parts of the policy.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from espalier.data.records import BadInput
from espalier.models.inputs import network
from espalier.models.precision import autocast
from espalier.rl.experience import device_of, policy_logits
from espalier.rl.probes.checks import (
    TEMPERATURE,
    VERSION,
    ExpectedRow,
    Fault,
    Gap,
    ProbeFailed,
    allowed,
    check_layout,
    check_policy_moves,
    crossed,
    measure_gap,
    surprise,
)
from espalier.rl.probes.diagnosis import MAX_ROWS, LogprobMismatch, diagnose, truncated_logprobs
from espalier.rl.probes.rounding import rounded, rounds_nothing
from espalier.rl.types import Experience, RolloutGroup
from espalier.runtime.leading import ask_alike
from espalier.runtime.schemas import ProbesConfig, RLConfig
from espalier.sampling.client import SamplingParams

log = logging.getLogger(__name__)

_WARN_RATIO = 0.6  # of what the engine may differ
_SURPRISE = 0.02  # nats per token: less says nothing that matters
_MAX_LOGITS = 2**24  # at a time, where rollouts are scored again
_SURE = 6.0  # standard errors
_LOOKS = "rounding.safetensors"
_FEWEST = 64  # tokens that say something of a mean, where others are left out


def check_probes(limits: ProbesConfig) -> None:
    """Raise BadInput on a setting that does not exist."""
    if limits.on_fault not in ("stop", "warn"):
        raise BadInput(f"probes.on_fault must be stop or warn, got '{limits.on_fault}'")
    if not limits.max_gap >= 0:
        raise BadInput(f"probes.max_gap must be at least 0 (0: measured), got {limits.max_gap:g}")


class Engines(Protocol):
    """What samples."""

    @property
    def computes_in(self) -> torch.dtype:
        """Their dtype."""

    @property
    def is_awake(self) -> bool:
        """Whether they can be asked now."""

    def logprobs_of(self, rows: list[list[int]]) -> list[list[list[float]]]:
        """Return every engine's log-probs of whole rows, of each token but the first, without its prefix cache."""

    def is_received(self) -> bool:
        """Say whether they read the policy's weights as they were sent."""


@dataclass
class Watch:
    """`model` is the policy; `engines`: None where they cannot be asked."""

    config: RLConfig
    model: Any
    params: SamplingParams
    tokenizer: Any
    engines: Engines | None = None
    computing_in: Callable[[str], AbstractContextManager[None]] | None = None
    """The training engine's, which may set a precision of its own; None: plain autocast."""
    is_compared: bool = field(default=True, init=False)
    """Whether the rollouts looked at last were compared."""
    _rounded: tuple[slice, torch.Tensor | None] | None = field(default=None, init=False)
    """Of rows looked at last; without log-probs where rounding changes nothing."""
    _roundings: list[tuple[int, torch.Tensor]] = field(default_factory=list, init=False)
    """Rollouts of a look and their differences [R] by rounding, of the looks that are not too old, the newest last."""
    _kept: list[tuple[int, torch.Tensor]] = field(default_factory=list, init=False)
    """The same, as it was when something was last learnt."""
    _own: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool), init=False)
    """[N, T] of the rollouts looked at last: tokens that the version to be trained drew itself."""
    _is_drifting: bool = field(default=False, init=False)
    _has_reported: bool = field(default=False, init=False)
    _has_fault: bool = field(default=False, init=False)  # of the rollouts looked at last

    def __post_init__(self) -> None:
        check_probes(self.config.probes)

    def look(self, groups: Sequence[RolloutGroup], experience: Experience, version: int) -> dict[str, float]:
        """Return rollouts that the policy of `version` is to learn from, and their layout; metrics. Raises
        ProbeFailed."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rows = [ExpectedRow(r.context_ids, r.drawn_ids, r.trajectory.finish_reason) for r in rollouts]
        ages = [[version - drawn_by for drawn_by in rollout.token_versions] for rollout in rollouts]
        oldest, newest = (choose((age for row in ages for age in row), default=0) for choose in (max, min))
        fault = check_layout(
            rows,
            experience.ids,
            experience.attention_mask,
            experience.response_mask,
            end_ids=self._end_ids(),
            bos_id=getattr(self.tokenizer, "bos_token_id", None),
            has_stop_strings=bool(self.params.stop),
        )
        limit = self.config.rollout.max_staleness
        if fault is None and (oldest > limit or newest < 0):
            drawn_by = version - (oldest if oldest > limit else newest)
            what = f"policy version {drawn_by}" if drawn_by >= 0 else "an unknown policy version"
            allowed_ages = f" (rollout.max_staleness={limit})" if limit else ""
            fault = Fault(VERSION, f"rollouts of {what} are to train version {version}{allowed_ages}")
        self._has_fault = fault is not None
        self._own = experience.response_mask
        if fault is None and oldest:
            self._own = self._own.clone()
            self._own[self._own.clone()] = torch.tensor([age == 0 for row in ages for age in row])
        if fault is not None:
            self._report(fault)
        self._rounded = None if self._has_fault else self._round(experience)
        self.is_compared = False
        measured = {"engine/version_lag": float(oldest)}
        if limit:
            measured["engine/token_age"] = sum(map(sum, ages)) / max(1, sum(map(len, ages)))
        return measured

    def compare(self, experience: Experience) -> dict[str, float]:
        """Return the engine's log-probs of the rollouts looked at last with the trainer's; metrics. Raises
        ProbeFailed."""
        self.is_compared = True
        num_own = int(self._own.sum())
        share = {"engine/compared_share": num_own / max(1, int(experience.response_mask.sum()))}
        # what older versions drew is compared with nothing: the trainer has their log-probs no more
        if num_own < _FEWEST and share["engine/compared_share"] < 1:
            return share
        gap = measure_gap(experience.rollout_logprobs, experience.old_logprobs, self._own)
        found = dict(gap.metrics())
        if self._rounded is not None:
            rows, scored = self._rounded
            rounding = self._pooled(experience, rows, scored)
            is_few = scored is not None and len(scored) < min(MAX_ROWS, len(experience.ids))
            if is_few and crossed(gap, rounding, self.config.probes.max_gap):
                rows, scored = self._round(experience, MAX_ROWS) or (rows, scored)
                rounding = self._pooled(experience, rows, scored)
            found["rounding"] = rounding.mean
            fault = self._compare(experience, gap, rounding, found)
            if fault is not None:
                self._report(fault)
            self._warn_of_drift(gap, rounding)
        more = share if self.config.rollout.max_staleness else {}
        return more | {f"engine/{name}": value for name, value in found.items()}

    def keep(self) -> None:
        """Remember the looks so far: an iteration that a signal ends before anything is learnt is made again by the
        resume."""
        self._kept = self._roundings

    def save(self, folder: Path) -> None:
        """What rounding made of the looks that are kept, and whose arithmetic it was."""
        looks = {
            f"{place:02d}.{rows}": differences.contiguous() for place, (rows, differences) in enumerate(self._kept)
        }
        save_file(looks, folder / _LOOKS, {"arithmetic": self._arithmetic})

    def load(self, folder: Path) -> None:
        """What `save` wrote; nothing from a checkpoint of before it did, or of engines that computed otherwise."""
        self._kept = self._roundings = []
        if not (folder / _LOOKS).is_file():
            return
        with safe_open(folder / _LOOKS, "pt") as file:
            if (file.metadata() or {}).get("arithmetic") == self._arithmetic:
                self._kept = self._roundings = [
                    (int(name.partition(".")[2]), file.get_tensor(name)) for name in sorted(file.keys())
                ]

    @property
    def _arithmetic(self) -> str:
        dtype = self.engines.computes_in if self.engines is not None else torch.bfloat16
        return f"{dtype} beside {self.config.precision}"

    def check_kl(self, per_token: float) -> None:
        """The policy's distance from its reference, before the update. Raises ProbeFailed."""
        self._check_steps([("the KL from the reference", per_token, self.config.probes.max_reference_kl)])

    def check_update(self, kl_old: float, luckiest: float = 0.0) -> None:
        """The policy's distance (mean k3) from the one before the update. Raises ProbeFailed.

        The luckiest token, which makes `luckiest` of that mean, is left out: one that was drawn by luck and became
        likely has a ratio of thousands, and moves the mean of many tokens alone.
        """
        kl = max(kl_old - luckiest, 0.0) if math.isfinite(kl_old) else kl_old
        self._check_steps([("the KL from the policy before the update", kl, self.config.probes.max_update_kl)])

    def _check_steps(self, values: Sequence[tuple[str, float, float]]) -> None:
        fault = check_policy_moves(values)
        if fault is not None:
            self._report(fault)

    def _report(self, fault: Fault) -> None:
        if self.config.probes.on_fault == "stop":
            raise ProbeFailed(fault)
        log.warning("%s", fault)
        self._has_reported = True

    def _round(self, experience: Experience, number: int = 0) -> tuple[slice, torch.Tensor | None] | None:
        """Return (some of the rows, their log-probs [n, T'] in the engine's arithmetic), T' as far as they are
        filled; None for log-probs where the trainer's own are that. `number` of rows (0: an eighth, two at least, where
        these and the looks before are `MAX_ROWS`, which are taken otherwise)."""
        count = len(experience.ids)
        if count == 0:
            return None
        few = max(2, count // 8)
        is_known = few + sum(rows for rows, _ in self._roundings) >= MAX_ROWS
        number = min(count, number or (few if is_known else MAX_ROWS), MAX_ROWS)
        step = count // number
        rows = slice(None, step * number, step)
        dtype = self.engines.computes_in if self.engines is not None else torch.bfloat16
        if rounds_nothing(dtype, self.config.precision):
            return rows, None
        width = int(experience.attention_mask[rows].sum(-1).max())
        ids, mask = experience.ids[rows, :width], experience.attention_mask[rows, :width]
        return rows, self._rescore(ids, mask, self.params.temperature, 1.0, "fp32", dtype)

    def _pooled(self, experience: Experience, rows: slice, scored: torch.Tensor | None) -> Gap:
        """Return what rounding makes of the trainer's log-probs, whoever drew the tokens: by these rows and the looks
        before, as many as make `MAX_ROWS` rollouts. A few alone may happen to hold none that rounding moves."""
        old, mask = experience.old_logprobs[rows], experience.response_mask[rows]
        scored = old if scored is None else scored
        own = (old[:, : scored.shape[1]] - scored)[mask[:, : scored.shape[1]]]
        looks = [*self._roundings, (len(old), own)]
        if not bool(own.isfinite().all()):
            looks = looks[-1:]  # and the ones before stay as they are
        else:
            while sum(number for number, _ in looks[1:]) >= MAX_ROWS:
                looks.pop(0)
            self._roundings = looks
        known = torch.cat([differences for _, differences in looks])[None]
        return measure_gap(torch.zeros_like(known), known, torch.ones_like(known, dtype=torch.bool))

    def _compare(self, experience: Experience, gap: Gap, rounding: Gap, found: dict[str, float]) -> Fault | None:
        max_gap, mask = self.config.probes.max_gap, self._own
        reasons = crossed(gap, rounding, max_gap)
        if reasons and self._has_reported:  # looked into once
            log.warning("engine and trainer still disagree: %s", ", ".join(reasons))
        elif reasons:
            case = LogprobMismatch(
                experience.ids,
                experience.attention_mask,
                mask,
                experience.rollout_logprobs,
                experience.old_logprobs,
                self.params.temperature,
                self._first_ids(experience),
            )
            left = max_gap or allowed(rounding)
            can_ask = self.engines is not None and self.engines.is_awake
            ask = self.engines.logprobs_of if self.engines is not None and can_ask else None
            is_received = self.engines is not None and self.engines.is_received()
            if self.engines is not None and not can_ask:
                reasons.append("the engines sleep and were not asked again: engine.sleeps=false would say more")
            return diagnose(case, self._rescore, ask, left, ", ".join(reasons), is_received)
        is_chosen = self.config.rollout.dynamic_sampling_rounds > 0 or bool(self.config.filter)
        if reasons or is_chosen:  # chosen rollouts are no sample of the policy
            return None
        return self._compare_draws(experience, max(_SURPRISE, rounding.mean), found)

    def _compare_draws(self, experience: Experience, limit: float, found: dict[str, float]) -> Fault | None:
        """Say whether the tokens were drawn as their log-probs say."""
        values = (experience.old_logprobs, experience.entropies)
        found["surprise"], errors = surprise(*values, self._own)
        if self.params.stop or abs(errors) <= _SURE or abs(found["surprise"]) <= limit:
            return None
        variances = ask_alike(partial(self.variances, experience.ids, experience.attention_mask))
        _, errors = surprise(*values, self._own, variances)
        if abs(errors) <= _SURE:
            return None
        how = "likelier" if found["surprise"] < 0 else "less likely"
        reason = f"the engine draws tokens that are {how} than their own log-probs say: -log-prob - entropy is "
        return Fault(TEMPERATURE, f"{reason}{found['surprise']:.3g}, {abs(errors):.0f} standard errors (or a top-p or "
                     "top-k cuts)")  # fmt: skip

    def _warn_of_drift(self, gap: Gap, rounding: Gap) -> None:
        """Once, when the difference comes near to what is allowed."""
        is_near = gap.mean > _WARN_RATIO * (self.config.probes.max_gap or allowed(rounding))
        if is_near and not self._is_drifting:
            log.warning("the engine's log-probs drift from the trainer's: mean gap %.3g, rounding makes %.3g", gap.mean,
                        rounding.mean)  # fmt: skip
        self._is_drifting = is_near

    def _end_ids(self) -> list[int]:
        """Return every token that ends a response: the tokenizer's, the model's and the sampler's."""
        settings = getattr(network(self.model), "generation_config", None)
        given = getattr(settings, "eos_token_id", None)
        found = {getattr(self.tokenizer, "eos_token_id", None), *(given if isinstance(given, list) else [given])}
        found |= set(self.params.stop_token_ids)
        return sorted(int(token) for token in found if token is not None)

    def _first_ids(self, experience: Experience) -> list[int]:
        """Return tokens that a tokenizer may put before a prompt: its own, and the one that is there."""
        names = ("bos_token_id", "cls_token_id", "eos_token_id")
        own = [getattr(self.tokenizer, name, None) for name in names]
        return list(dict.fromkeys(int(t) for t in [*own, int(experience.ids[0, 0])] if t is not None))

    @torch.no_grad()
    def _logits(
        self, ids: torch.Tensor, attention_mask: torch.Tensor, precision: str = ""
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return (ids, logits aligned with them) of a few rows at a time, on the model's device."""
        self.model.eval()
        device = device_of(self.model)
        size = max(1, _MAX_LOGITS // (ids.shape[1] * int(network(self.model).config.vocab_size)))
        for row in range(0, len(ids), size):
            part, mask = (rows[row : row + size].to(device, torch.long) for rows in (ids, attention_mask))
            with self._computing(device, precision or self.config.precision):
                logits = policy_logits(self.model, part, mask)
            yield part, logits

    def _computing(self, device: torch.device, precision: str) -> AbstractContextManager[None]:
        return autocast(device, precision) if self.computing_in is None else self.computing_in(precision)

    def _rescore(self, *arguments: Any) -> torch.Tensor:
        """Have all ranks make `rescored`; return what it gives."""
        return ask_alike(partial(self.rescored, *arguments))

    def rescored(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        temperature: float,
        top_p: float,
        precision: str = "",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the log-probs [B, T] of rows by the policy, in the arithmetic of `dtype` where there is one; on every
        rank."""
        with rounded(network(self.model), dtype) if dtype is not None else nullcontext():
            logits = self._logits(ids, attention_mask, precision)
            return torch.cat([truncated_logprobs(found / temperature, part, top_p).cpu() for part, found in logits])

    def variances(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the variance of -log-prob at every place of rows, [B, T]; on every rank."""
        logits = self._logits(ids, attention_mask)
        return torch.cat([_variances(part, self.params.temperature).cpu() for _, part in logits])


def _variances(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of -log-prob under softmax(logits / temperature) [B, T, V] → [B, T], a few tokens at a time."""
    found = []
    for part in logits.flatten(0, 1).split(max(1, _MAX_LOGITS // 8 // logits.shape[-1])):
        logs = torch.log_softmax(part.double() / temperature, dim=-1)
        shares = logs.exp()
        found.append((shares * logs.square()).sum(-1) - (shares * logs).sum(-1).square())
    return torch.cat(found).view(logits.shape[:-1])
