"""Trajectory → StepScores without a reward model: how much likelier a trained policy is to take each step than another.

    python run_stage.py -cn prm/score_by_log_ratio input=trajectories.jsonl output=step_scores.jsonl \\
      stage.policy=RUN/dpo/model stage.reference=SFT_MODEL

A policy trained by DPO on whole solutions is an implicit process reward model (Rafailov et al. 2024, "From r to Q*";
Yuan et al. 2024, "Free process rewards without process labels"): beta (log pi - log pi_ref), summed over a step's
tokens, is that step's reward. Wrong steps are those that training has made less likely.

With l_1 .. l_S the steps' log-ratios, the score after step t is sigmoid(beta x) in (0, 1), where x is the `minimum` of
l_1 .. l_t (a solution is as good as its worst step so far), or their `sum`, as published.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.data.steps import check_ends
from espalier.data.training_problems import problem_hash, read_training_problems
from espalier.pipeline.stage import StageContext

HOW: dict[str, Callable[[float, float], float]] = {"minimum": min, "sum": operator.add}


def log_ratio_scores(
    logprobs: Sequence[float], reference: Sequence[float], step_ends: Sequence[int], beta: float, how: str
) -> list[float]:
    """Return the scores of the module from the log-probs of a response's tokens under both models."""
    ratios = [one - other for one, other in zip(logprobs, reference, strict=True)]
    steps = [math.fsum(ratios[start:end]) for start, end in zip([0, *step_ends], step_ends, strict=False)]
    return [_sigmoid(beta * x) for x in accumulate(steps, HOW[how])]  # not rounded: far ones would be equal


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class ScoreByLogRatio:
    """Two causal LMs with one tokenizer."""

    policy: str
    """the folder of the policy that was trained on pairs"""
    reference: str
    """the folder of the policy that it was trained from"""
    beta: float = 0.5
    """as in its training; it moves scores, not their order"""
    how: str = "minimum"
    """minimum or sum of the steps' log-ratios so far"""
    batch_tokens: int = 8192
    """padded tokens of one forward pass"""

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise BadInput(f"stage.how must be one of {', '.join(HOW)}, got '{self.how}'")
        if not self.beta > 0:
            raise BadInput(f"stage.beta must be above 0, got {self.beta}")

    def inputs(self) -> list[str]:
        """Return nothing: model folders that the config names are inputs of every stage."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """Return one record per trajectory, in order. Raises BadInput where the models are one or say the same, or
        their tokenizers differ."""
        from espalier.models.load import load_policy, load_tokenizer
        from espalier.models.sampled_logprobs import sampled_logprobs
        from espalier.runtime.distributed import device

        if Path(self.policy).resolve() == Path(self.reference).resolve():
            raise BadInput(f"stage.policy and stage.reference are one model, {self.policy}: every log-ratio would be 0")
        if load_tokenizer(self.policy).get_vocab() != load_tokenizer(self.reference).get_vocab():
            raise BadInput(f"{self.policy} and {self.reference} have different tokenizers: name the policy that "
                           "stage.policy was trained from")  # fmt: skip
        trajectories = read_records(Trajectory, input_path)
        for row in trajectories:
            check_ends(row.steps, row.step_ends, row.id)
        found = []
        for name, policy in (("policy", self.policy), ("reference", self.reference)):
            with context.progress(f"log-probs of the {name}", len(trajectories), "solution") as progress:
                model = load_policy(policy).to(device())
                found.append(sampled_logprobs(model, trajectories, self.batch_tokens, progress.update))
        if any(found[0]) and found[0] == found[1]:
            raise BadInput(f"{self.policy} and {self.reference} give every token the same log-prob: stage.policy is a "
                           "copy of the reference, train it on pairs first")  # fmt: skip
        seen = read_training_problems(self.policy)
        context.counts["steps"] = sum(len(row.steps) for row in trajectories)
        return [
            StepScores(
                row.id,
                row.problem_id,
                log_ratio_scores(own, other, row.step_ends, self.beta, self.how),
                None if seen is None else problem_hash(row.problem_id) in seen,
            )
            for row, own, other in zip(trajectories, *found, strict=True)
        ]
