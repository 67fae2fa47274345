"""Advantages for `test_rank_estimates.py`: `python rank_estimates.py POLICY PRM OUT`, alone or behind a launcher.

Estimators that ask the sampler, the reward or a network of their own, on rollouts that are drawn through the context;
every rank writes what it has to OUT/<rank>.pt: estimates on rank 0, the tokens that its process reward model has read.
A sampler or a reward without networks that is asked on another rank than 0 raises.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.data.records import Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_policy, load_tokenizer
from espalier.rewards.process import score_trajectories
from espalier.rewards.score import Score
from espalier.rl.advantages import process_values
from espalier.rl.advantages.gold_likelihood import GoldLikelihood
from espalier.rl.advantages.remax import ReMaxAdvantage
from espalier.rl.advantages.shared_prefixes import SharedPrefixes
from espalier.rl.advantages.spo import SPO
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.credit.process_credit import credit_rollouts
from espalier.rl.estimator_context import AdvantageEstimator, EstimatorContext
from espalier.rl.experience import make_experience, token_rewards
from espalier.rl.iteration_metrics import Clock
from espalier.rl.rank_scores import with_networks
from espalier.rl.rollout import Sampler
from espalier.rl.row_shares import read_shares
from espalier.rl.types import Estimate
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import is_main_rank, process_group, rank
from espalier.runtime.leading import lead
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from tests.support.rl_cases import PARAMS, FakeClient


class MainRankClient(FakeClient):
    """Answers on rank 0 alone."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        assert is_main_rank()
        return await super().sample(request, params)


def share_of_ones(trajectories: Sequence[Trajectory]) -> list[Score]:
    """A reward that tells answers apart; on rank 0 alone."""
    assert is_main_rank()
    return [Score(sum(letter in "123" for letter in t.response) / len(t.response)) for t in trajectories]


class OwnEstimator(process_values.ProcessValueAdvantage):
    """A user's: its network is asked by a partial of a function."""

    def __call__(self, groups: Any, experience: Any, context: EstimatorContext) -> Estimate:
        """Steps alone."""
        rows = [rollout.trajectory for group in groups for rollout in group.rollouts]
        scores = read_shares(rows, partial(score_trajectories, self.model, pad_id=0), is_packed=False)
        return credit_rollouts(groups, scores, "progress", 1.0, experience.response_mask)


num_read = 0  # tokens


def counted(model: Any, trajectories: Sequence[Trajectory], **settings: Any) -> list[list[float]]:
    """Score, and count what is read."""
    global num_read
    num_read += sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
    return score_trajectories(model, trajectories, **settings)


def main() -> None:
    """Draw two groups, estimate by each, write tensors and metrics."""
    torch.set_num_threads(1)
    policy, prm, out = map(Path, sys.argv[1:4])
    task = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)
    tokenizer = load_tokenizer(str(policy))
    process_values.score_trajectories = counted
    estimators: dict[str, AdvantageEstimator] = {
        "vineppo": VinePPO(completions_per_state=2, max_completions=6, round_completions=2),
        "spo": SPO(completions_per_state=2, prompt_value="sampled", num_segments=3),
        "remax": ReMaxAdvantage(),
        "process_values": process_values.ProcessValueAdvantage(str(prm)),
        "own": OwnEstimator(str(prm)),
        "shared_prefixes": SharedPrefixes(),
        "gold_likelihood": GoldLikelihood("#### {gold}", weight=100.0),
    }
    with process_group(timeout_seconds=60), BackgroundLoop() as loop:
        client = MainRankClient(tokenizer, num_lines=2)
        sampler = Sampler(client, task, tokenizer, concurrency=4, stall_seconds=60)
        clock = Clock()
        network = load_policy(str(policy), "eager")
        params = replace(PARAMS, max_tokens=40)
        context = EstimatorContext(loop, sampler, share_of_ones, params, 0, clock, policy=network, micro_batch_size=4)

        def work() -> dict[str, Any]:
            groups = context.rollout(task.problems("train")[:2], params, "rl-0")
            experience, _ = make_experience(
                groups, network, pad_id=0, micro_batch_size=4, precision="fp32", temperature=1.0, clock=clock
            )
            experience = replace(experience, rewards=token_rewards(groups, experience.response_mask))
            estimates = {name: estimator(groups, experience, context) for name, estimator in estimators.items()}
            assert set(clock.take()) == {"seconds/completions", "seconds/reward", "seconds/prefill"}
            return {name: (e.advantages, e.metrics, e.state_values) for name, e in estimates.items()}

        found = lead(work, [network, *with_networks([*estimators.values()])], clock)
        assert (found is None) == (rank() != 0)
    torch.save((found, num_read), out / f"{rank()}.pt")


if __name__ == "__main__":
    main()
