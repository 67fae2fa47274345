"""What scores responses that are token ids: networks in this process, a generative verifier, or a reward model behind
engines."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import StepTokens

NORM = "norm"
AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "average": lambda values: sum(values) / len(values),
    NORM: lambda values: -math.hypot(*values),
}
"""What becomes of the log-probs of a response's tokens; `norm`, minus their Euclidean length, is the third that
RewardBench's own scorer knows for one policy without a reference."""


def own_policies(folder: str, name: str, others: Sequence[str]) -> list[Any]:
    """Return the policies of a folder of `models.log_ratio_reward`, a reference last. Raises BadInput, which names the
    model, where `others` are set: settings of another score than the folder's."""
    from espalier.models.log_ratio_reward import FILE, load_log_ratio_reward

    if others:
        raise BadInput(f"{name}/{FILE} says which policies are compared: leave out {', '.join(others)}")
    both = load_log_ratio_reward(folder)
    return [network for network in (both.policy, both.reference) if network is not None]


class _InProcess:
    """What scorers have in common whose networks are in this process."""

    batch_tokens: int

    @property
    def tokens_at_once(self) -> int:
        """How many tokens the rows of a call have: one forward pass (a verifier's without their verdicts)."""
        return self.batch_tokens

    def close(self) -> None:
        """Nothing is held but memory."""


@dataclass(frozen=True)
class NetworkScorer(_InProcess):
    """Networks that score rows of tokens: one with a head, or one or two policies."""

    networks: Sequence[Any]
    has_head: bool
    aggregate: str
    batch_tokens: int
    masses: Sequence[float] = ()

    def is_packed(self, longest: StepTokens) -> bool:
        """Say whether rows of which this is the longest are packed. Raises BadInput where it is refused."""
        from espalier.models.packing_check import packing_of

        try:
            choices = [packing_of(network).choice_for(len(longest.prompt_ids) + len(longest.response_ids))
                       for network in self.networks]  # fmt: skip
        except BadInput as error:
            raise BadInput(f"{longest.name}: {error}") from None
        return self.has_head and choices == ["packed"]

    def __call__(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the score of each row."""
        return self._head_scores(rows) if self.has_head else self._ratios(rows)

    def _ratios(self, rows: Sequence[StepTokens]) -> list[float]:
        from espalier.models.sampled_logprobs import sampled_logprobs

        logprobs = [sampled_logprobs(network, rows, self.batch_tokens) for network in self.networks]
        aggregate = AGGREGATES[self.aggregate]
        own, *base = [[aggregate(line) for line in each] for each in logprobs]
        ratios = [one - other for one, other in zip(own, base[0], strict=True)] if base else own
        return [round(ratio, 6) for ratio in ratios]

    def _head_scores(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the logits at the last tokens, or the expected shares of a model with classes."""
        from espalier.models.scalar_head import outcome_scores
        from espalier.rewards.outcome_model import last_logits

        ids = [[*row.prompt_ids, *row.response_ids] for row in rows]
        reads = last_logits(self.networks[0], ids, self.batch_tokens)
        return [round(float(outcome_scores(read)), 6) for read in reads]


@dataclass
class VerifierScorer(_InProcess):
    """A generative verifier (`rewards.generative_verifier.GenerativeVerifier`) that is asked about rows of
    `models.verdict_probs.question_tokens`; `masses`: p(Yes) + p(No) of each row of the last call."""

    verifier: Any
    batch_tokens: int
    has_head: bool = False
    masses: Sequence[float] = ()

    def is_packed(self, longest: StepTokens) -> bool:
        """Return false: rows are padded. Raises BadInput where the longest is too long for the verifier."""
        from espalier.models.verdict_probs import check_window

        check_window(self.verifier.model, longest, self.verifier.verdicts)
        return False

    def __call__(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return p(Yes) of each row, not rounded: of a verifier that is sure many would be equal."""
        from espalier.models.verdict_probs import yes_probs_of_tokens

        found = yes_probs_of_tokens(self.verifier.model, rows, self.verifier.verdicts, self.batch_tokens)
        self.masses = [one.mass for one in found]
        return [one.share for one in found]


@dataclass(frozen=True)
class EngineHead:
    """A reward model behind engines (`rewards.engine_scores.EngineScoredModel`), read as a `NetworkScorer` reads
    its head."""

    model: Any
    batch_tokens: int
    has_head: bool = True
    masses: Sequence[float] = ()

    @property
    def tokens_at_once(self) -> int:
        """How many tokens the rows of a call have: several batches of every engine."""
        tokens: int = self.batch_tokens * 4 * self.model.engines.num_engines
        return tokens

    def close(self) -> None:
        """Let the engines end."""
        self.model.close()

    def is_packed(self, longest: StepTokens) -> bool:
        """Return true: engines put rows together themselves. Raises BadInput where a row is too long for them."""
        from espalier.rewards.engine_scores import check_lengths

        check_lengths(self.model.engines, [longest])
        return True

    def __call__(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the score of each row."""
        return [value for (value,) in self.model.scores(rows, self.batch_tokens)]
