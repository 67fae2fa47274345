"""Log-probs and entropies of the rollouts by the policy before the update: from a pass of their own, or read off the
pass that makes the update's gradient.

Who reads them before the update has filled them gets real numbers all the same: the pass is made then, and the update
finds every row scored. Where nobody reads them that pass is saved.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch

from espalier.rl.iteration_metrics import Clock

# Rows [R] → log-probs and entropies [N, T] that hold those rows.
ScoreRows = Callable[[torch.Tensor], Sequence[torch.Tensor]]


class OldLogprobs:
    """`logprobs` and `entropies` [N, T], known from the beginning or made by `to_score`."""

    def __init__(self, logprobs: torch.Tensor, entropies: torch.Tensor):
        self._logprobs, self._entropies = logprobs, entropies
        self._has = torch.ones(len(logprobs), dtype=torch.bool)
        self._score: ScoreRows | None = None
        self._clock = Clock()
        self.in_own_pass = torch.zeros(len(logprobs), dtype=torch.bool)
        """[N]: whether a row was scored by a pass that made nothing else."""

    @classmethod
    def to_score(cls, shape: Sequence[int], score: ScoreRows, clock: Clock) -> Self:
        """Make one of `shape` [N, T] that holds no row yet; `score` makes passes, which `clock` counts as forward."""
        made = cls(*(torch.full(tuple(shape), float("nan")) for _ in range(2)))
        made._has[:] = False
        made._score, made._clock = score, clock
        return made

    @property
    def is_scored(self) -> bool:
        """Whether every row is known."""
        return bool(self._has.all())

    @property
    def logprobs(self) -> torch.Tensor:
        """[N, T], 0 outside the response; what is not known yet is scored first, by all ranks."""
        self.score()
        return self._logprobs

    @property
    def entropies(self) -> torch.Tensor:
        """[N, T], as `logprobs`."""
        self.score()
        return self._entropies

    def first(self, num: int) -> "OldLogprobs":
        """Return those of the first `num` rows, which share nothing with these: what is scored there stays unknown
        here, and its seconds are not counted."""
        made = OldLogprobs(self._logprobs[:num].clone(), self._entropies[:num].clone())
        made._has = self._has[:num].clone()
        score = self._score
        if score is not None:
            made._score = lambda rows: [whole[:num] for whole in score(rows)]
        return made

    def score(self, rows: torch.Tensor | None = None) -> None:
        """Score those of `rows` [R] (None: all) that are not known by a pass of their own, on all ranks."""
        every = torch.arange(len(self._has))
        missing = every[~self._has] if rows is None else rows[~self._has[rows]].sort().values
        if len(missing) == 0:
            return
        assert self._score is not None
        with self._clock.phase("forward"):
            logprobs, entropies = self._score(missing)
        self.fill(missing, logprobs[missing], entropies[missing])
        self.in_own_pass[missing] = True

    def fill(self, rows: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Take `logprobs` and `entropies` [R, T] of `rows` [R] from a pass that was made before any weight changed."""
        self._logprobs[rows], self._entropies[rows] = logprobs, entropies
        self._has[rows] = True
