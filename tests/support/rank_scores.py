"""A small RL run whose reward holds a network, for `test_rank_scores.py`: `python rank_scores.py input=POLICY,PRM
output=RUN_DIR`, alone or behind a launcher. The last part of RUN_DIR's name says what happens:

- `plain`: GRPO that replaces groups, and evaluations by reward; `prof`: with a filter; `vineppo`: with completions to
  score; `ahead`, `vineppo_ahead` and, with groups that are replaced, `replaced_ahead`: batches are drawn ahead;
  `beside`: the network stands beside a judge that is asked elsewhere;
- `cut`: the network of one term of the reward, and both of another, a log-ratio, are cut over the ranks, if there are
  two;
- `nan`, `refused`: rank 1 finds a score that is no number, or a trajectory that it cannot score; `fails`: rank 0 does;
- `stopped`: rank 0 gets SIGTERM while all score the rollouts of the second iteration, at the first start;
- `nan_ahead`, `stopped_ahead`: the same of batches that are drawn ahead.

Every rank writes RUN_DIR/<rank>.json: the tokens that it has scored, and the scores of every rollout that it trains on:
of all on rank 0, of none on others.
"""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models import frozen_reward
from espalier.models.frozen_reward import cut_by
from espalier.models.in_parts import is_part, whole_shape
from espalier.models.load import load_tokenizer
from espalier.rewards import process
from espalier.rewards.composed import ComposedReward
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.rewards.score import Score
from espalier.rl import rollout_filters
from espalier.rl.advantages.vineppo import VinePPO
from espalier.runtime import peers
from espalier.runtime.distributed import is_main_rank, process_group, rank, world_size
from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import StageConfig
from espalier.training.cut_networks import of_run
from tests.support.rl_cases import make_trainer

num_scored = 0
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "steps_per_print": 10**9}


def count(trajectories: Sequence[Trajectory]) -> None:
    """Of tokens."""
    global num_scored
    num_scored += sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)


class Counted:
    """A reward that counts what it is asked, and does what the scenario says at its second call: the first rollouts,
    behind an evaluation."""

    def __init__(self, reward: Any, scenario: str):
        self.reward, self.scenario, self.num_calls = reward, scenario, 0

    def to(self, device: torch.device) -> None:
        self.reward.to(device)

    def networks(self) -> dict[str, Any]:
        networks: dict[str, Any] = self.reward.networks()
        return networks

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        count(trajectories)
        self.num_calls += 1
        scores: list[Score] = self.reward(trajectories)
        kind = self.scenario.removesuffix("_ahead")
        if kind == "stopped" and is_main_rank() and trajectories[0].id.startswith("rl-1"):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.num_calls != 2:
            return scores
        if kind == "nan" and rank() == 1:
            return [replace(scores[0], outcome=float("nan")), *scores[1:]]
        if self.scenario.endswith("refused") and rank() == 1:
            raise BadInput(f"{trajectories[0].id}: a row of 9 tokens for a network of 8 positions")
        if self.scenario == "fails" and is_main_rank():
            raise MemoryError("no room for a batch")
        return scores


class Judge:
    """Is asked on rank 0 alone."""

    has_engines = True

    def close(self) -> None: ...

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        assert is_main_rank()
        return [Score(0.5) for _ in trajectories]


def settings_of(scenario: str, prm: str) -> dict[str, Any]:
    """Of the trainer."""
    is_several = scenario.startswith("cut")
    with cut_by(of_run(ZERO3 if is_several and world_size() > 1 else None)):
        counted = Counted(process.ProcessReward(prm, batch_tokens=100 if is_several else 16384), scenario)
        ratio = process.ProcessReward(f"{prm}-ratio", batch_tokens=200) if is_several else None
    found: dict[str, Any] = {"reward": ComposedReward({"outcome": OutcomeReward(), "process": counted})}
    if scenario == "prof":
        found = {"filter": {"num_kept": 2}, "num_lines": 2}
    elif scenario.startswith("vineppo"):
        outcome = OutcomeModelReward(prm, "probability", takes_last_step=True)
        found = {"reward": Counted(outcome, scenario), "estimator": VinePPO(completions_per_state=2)}
    elif ratio is not None:
        weights: list[Any] = [*counted.reward.model.parameters(), *ratio.model.parameters()]
        held = sum(weight.ds_tensor.numel() for weight in weights if is_part(weight))
        whole = sum(whole_shape(weight).numel() for weight in weights)
        assert held == 0 if world_size() == 1 else held < 0.51 * whole
        found["reward"] = ComposedReward({"outcome": OutcomeReward(), "process": counted, "ratio": ratio})
    elif scenario == "beside":
        found["reward"] = ComposedReward({"judge": Judge(), "process": counted})
    elif not scenario.endswith("ahead") or scenario.startswith("replaced"):
        found |= {"dynamic_sampling_rounds": 2, "accuracy_range": [0.01, 0.99]}
    if scenario.endswith("ahead"):
        found |= {"max_staleness": 1}
    metric = "accuracy" if scenario == "prof" else "reward"
    return {"num_lines": 2, "num_iterations": 2, "evaluation_every": 1, "evaluation_metric": metric, **found}


@entrypoint(StageConfig, config_name="values/cut_states", config_folder="stage", is_on_ranks=True)
def main(config: StageConfig) -> None:
    """Two iterations."""
    torch.set_num_threads(1)
    set_up_logging()
    peers.ASK_SECONDS = 1.0
    process.autocast = lambda device: nullcontext()  # bfloat16 rounds scores by other rows beside them to some 5e-4
    frozen_reward.AUTO = "fp32"
    policy, prm = str(config.input).split(",")
    run_dir = Path(config.output)
    scenario = run_dir.name
    if (run_dir / "checkpoints").exists():
        scenario = "ahead" if scenario.endswith("ahead") else "plain"
    run_dir.mkdir(exist_ok=True)
    task = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)
    tokenizer = load_tokenizer(policy)
    with process_group(timeout_seconds=60):
        trainer = make_trainer(Path(policy), task, tokenizer, run_dir, "", **settings_of(scenario, prm))
        source: Any = trainer.rollout_source
        if scenario == "prof":
            score_trajectories = rollout_filters.score_trajectories
            rollout_filters.score_trajectories = lambda model, rows, **more: (
                count(rows) or score_trajectories(model, rows, **more)
            )
            source.rollout_filter = rollout_filters.ProcessConsistencyFilter(prm, 2)
        got: dict[str, list[float]] = {}
        make_experience = trainer.make_experience

        def noted(groups: Any, iteration: int) -> Any:
            for group in groups:
                for rollout, score in zip(group.rollouts, group.scores, strict=True):
                    got[rollout.trajectory.id] = [score.outcome, *score.steps]
            return make_experience(groups, iteration)

        trainer.make_experience = noted  # type: ignore[method-assign]
        trainer.run()
    (run_dir / f"{rank()}.json").write_text(json.dumps([num_scored, got]))


if __name__ == "__main__":
    main()
