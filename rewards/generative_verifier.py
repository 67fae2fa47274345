"""A generative verifier that judges at once: p(Yes) of its question about a solution, by a forward pass.

It is a causal language model that was trained on verifications (docs/generative_verifiers.md), or any that answers the
question. It reads texts, the prompt's and the response's, as its demonstrations were read, and tokenises them itself.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.verification import VerifierFormat
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.verdict_probs import VerdictTokens, YesProb, warn_of_mass, yes_probs
from espalier.rewards.score import VERIFIER, Score, ScoreRange


class GenerativeVerifier:
    """`path`: the model's folder; `verifier`: how it is asked; `batch_tokens`: padded tokens of one forward pass."""

    def __init__(self, path: str, verifier: VerifierFormat, batch_tokens: int = 16384, attention: str = "auto"):
        self.path = path
        self.model: Any = load_policy(path, attention=attention).requires_grad_(False)
        self.tokenizer = load_tokenizer(path)
        self.verifier, self.batch_tokens = verifier, batch_tokens

    @cached_property
    def verdicts(self) -> VerdictTokens:
        """The tokens of a Yes and of a No. Raises BadInput where they cannot be distinguished."""
        return VerdictTokens.of(self.tokenizer, self.verifier.question, self.verifier.yes, self.verifier.no)

    def probs(self, texts: Sequence[str], on_progress: Callable[[int], None] = lambda done: None) -> list[YesProb]:
        """Return p(Yes) behind each text, which ends where the verdict stands. Warns where the model answers the
        question with neither verdict: it was asked otherwise when it was trained."""
        found = yes_probs(
            self.model,
            self.tokenizer,
            texts,
            self.verdicts,
            batch_tokens=self.batch_tokens,
            on_progress=on_progress,
        )
        warn_of_mass([one.mass for one in found], self.path)
        return found


class GenerativeVerifierReward:
    """p(Yes) of the whole solution as its outcome. A response cut by its length is asked about like any other: set
    `non_stop_reward` of a composed reward for it.

    Raises BadInput on a verifier that is asked about steps.
    """

    def __init__(self, path: str, verifier: VerifierFormat, batch_tokens: int = 16384, attention: str = "auto"):
        if verifier.unit != "solution":
            raise BadInput("a generative verifier rewards whole solutions: choose verifier=solution for it")
        self.verifier = GenerativeVerifier(path, verifier, batch_tokens, attention)

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """Return a share."""
        return ScoreRange((0.0, 1.0))

    def to(self, device: torch.device) -> None:
        """Move the network."""
        self.verifier.model.to(device)

    def networks(self) -> dict[str, Any]:
        """Return the one network."""
        return {"generative verifier": self.verifier.model}

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score a trajectory."""
        form = self.verifier.verifier
        texts = [form.ask(row.prompt, [row.response], has_rationale=False) for row in trajectories]
        found = self.verifier.probs(texts)
        return [Score(one.share, parts={VERIFIER: one.share, "verdict_mass": one.mass}) for one in found]
