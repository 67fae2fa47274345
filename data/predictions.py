"""What a model says of training examples, one frozen dataclass for each kind of JSONL line (as in data.records).

A row has the id of its example. Which kind a file holds follows from the examples and the model: a causal language
model gives log-probs of responses (`ResponseLogprobs`) and of both sides of pairs (`PairLogprobs`), a scalar head
scores of steps (`StepPredictions`), of responses (`RewardPrediction`) and of both sides of pairs
(`PairRewards`). Numbers are rounded to 6 digits.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ResponseLogprobs:
    """Log-probs of the response tokens, one a token, their sum, and the mean entropy (nats) at them. With a reference
    (else None) its summed log-prob and the reward beta * (log-prob - reference log-prob)."""

    id: str
    logprob: float
    token_logprobs: list[float]
    mean_entropy: float
    reference_logprob: float | None = None
    reward: float | None = None


@dataclass(frozen=True)
class PairLogprobs:
    """Summed log-probs of both sides of a pair; with a reference (else None) its log-probs, DPO's rewards
    beta * (log-prob - reference log-prob) (means over tokens where the objective is length-normalised), and their
    difference, the margin."""

    id: str
    chosen_logprob: float
    rejected_logprob: float
    num_chosen_tokens: int
    num_rejected_tokens: int
    reference_chosen_logprob: float | None = None
    reference_rejected_logprob: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class StepPredictions:
    """The score in [0, 1] at every step end that is read, beside its target."""

    id: str
    scores: list[float]
    targets: list[float]


@dataclass(frozen=True)
class RewardPrediction:
    """The score in [0, 1] of a response, beside its target; `reward` is the logit of a head of one label."""

    id: str
    score: float
    target: float
    reward: float | None = None


@dataclass(frozen=True)
class PairRewards:
    """Rewards of both sides of a pair, each the logit of a head of one label, and their difference."""

    id: str
    chosen_reward: float
    rejected_reward: float
    margin: float
