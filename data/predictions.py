"""What a model says of training examples, one frozen dataclass for each kind of JSONL line (as in data.records).

A row has the id of its example. Which kind a file holds follows from the examples and the model: a causal language
model gives log-probs of responses (`ResponseLogprobs`) and of both sides of pairs (`PairLogprobs`), a scalar head
scores of steps (`StepPredictions`), of responses (`RewardPrediction`) and of both sides of pairs
(`PairRewards`). Numbers are rounded to 6 digits.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ResponseLogprobs:
    """What a causal language model says of a response, in nats."""

    id: str
    """the example's id"""
    logprob: float
    """sum over the response tokens"""
    token_logprobs: list[float]
    """one per response token"""
    mean_entropy: float
    """mean over the response tokens"""
    reference_logprob: float | None = None
    """the reference's sum; null without a reference"""
    reward: float | None = None
    """beta * (log-prob - reference log-prob); null without a reference"""


@dataclass(frozen=True)
class PairLogprobs:
    """What a causal language model says of both sides of a pair, in nats."""

    id: str
    """the example's id"""
    chosen_logprob: float
    """sum over the tokens of the preferred side"""
    rejected_logprob: float
    """sum over the tokens of the other side"""
    num_chosen_tokens: int
    """tokens of the preferred side"""
    num_rejected_tokens: int
    """tokens of the other side"""
    reference_chosen_logprob: float | None = None
    """the reference's sum; null without a reference, as all below"""
    reference_rejected_logprob: float | None = None
    """the reference's sum of the other side"""
    chosen_reward: float | None = None
    """DPO's reward: beta * (log-prob - reference log-prob), of means over tokens where the objective is
    length-normalised"""
    rejected_reward: float | None = None
    """the same of the other side"""
    margin: float | None = None
    """chosen less rejected reward"""


@dataclass(frozen=True)
class StepPredictions:
    """What a process reward model says of an example's steps."""

    id: str
    """the example's id"""
    scores: list[float]
    """in [0, 1], one per step end that is read"""
    targets: list[float]
    """what they were to be"""


@dataclass(frozen=True)
class RewardPrediction:
    """What an outcome reward model says of a response."""

    id: str
    """the example's id"""
    score: float
    """in [0, 1]"""
    target: float
    """what it was to be"""
    reward: float | None = None
    """the logit of a head of one label; null of others"""


@dataclass(frozen=True)
class PairRewards:
    """What a reward model of pairs says of both sides."""

    id: str
    """the example's id"""
    chosen_reward: float
    """logit of the preferred side"""
    rejected_reward: float
    """logit of the other side"""
    margin: float
    """chosen less rejected reward"""
