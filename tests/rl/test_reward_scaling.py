"""Rewards on one scale over a run: running moments by hand, over iterations, in a run that is cut and goes on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.advantages.gae import GAE
from espalier.rl.combinations import check_critic_range, check_estimator, check_numbers, check_samples
from espalier.rl.reward_scaling import Moments, RewardScaling
from espalier.rl.types import Estimate
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import CriticConfig, KLConfig, RLConfig
from espalier.sampling.client import ServerGone
from espalier.training.engine import BadCheckpoint
from tests.support.rl_cases import make_trainer, read_metrics
from tests.support.root_config import root_config

# Two tokens of prompt or padding; two responses of three and two tokens, and one of none.
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()


def rewards(first: list[float], second: list[float]) -> torch.Tensor:
    """Rewards [3, 4] of the tokens of both responses."""
    return torch.tensor([[0.0, *first], [0.0, *second, 0.0], [0.0] * 4])


def test_moments_added_in_parts_are_those_of_all_numbers() -> None:
    # 1, 3, 8 and 0: mean 3, squared distances 4 + 0 + 25 + 9 = 38
    parts = Moments().with_numbers([1.0, 3.0]).with_numbers([]).with_numbers([8.0, 0.0])
    assert (parts.count, parts.mean) == (4, 3.0)
    assert parts.squares == pytest.approx(38)
    assert parts.deviation == pytest.approx(math.sqrt(38 / 3))


@pytest.mark.parametrize("numbers", [[], [7.0], [0.1] * 3, [0.0, 0.0]])
def test_numbers_that_do_not_differ_divide_by_one(numbers: list[float]) -> None:
    assert Moments().with_numbers(numbers).with_numbers(numbers).deviation == 1.0


def test_rewards_are_divided_by_the_deviation_of_all_responses_so_far() -> None:
    scaling = RewardScaling("scale")
    # responses of 1 + 2 = 3 and 1: mean 2, deviation sqrt(2)
    found = scaling(rewards([1, 0, 2], [0, 1]), MASK)
    torch.testing.assert_close(found, rewards([1, 0, 2], [0, 1]) / math.sqrt(2))
    scaling.keep()
    # with 5 and -1: mean 2, squared distances 1 + 1 + 9 + 9 = 20 of four
    found = scaling(rewards([0, 0, 5], [0, -1]), MASK)
    torch.testing.assert_close(found, rewards([0, 0, 5], [0, -1]) / math.sqrt(20 / 3))
    assert scaling.metrics() == {"rollout/running_mean": 2.0, "rollout/running_std": pytest.approx(math.sqrt(20 / 3))}


def test_the_mean_is_taken_off_at_the_last_token_and_the_limit_comes_last() -> None:
    found = RewardScaling("standard")(rewards([1, 0, 2], [0, 1]), MASK)
    torch.testing.assert_close(found, rewards([1, 0, 2 - 2], [0, 1 - 2]) / math.sqrt(2))
    found = RewardScaling("standard", limit=0.6)(rewards([1, 0, 2], [0, 1]), MASK)
    torch.testing.assert_close(found, rewards([0.6, 0, 0], [0, -0.6]))


def test_an_iteration_that_is_not_learnt_from_is_not_counted() -> None:
    scaling = RewardScaling("scale")
    for _ in range(2):
        found = scaling(rewards([0, 0, 3], [0, 1]), MASK)
        torch.testing.assert_close(found, rewards([0, 0, 3], [0, 1]) / math.sqrt(2))
    assert scaling.moments.count == 0


def test_moments_come_back_to_the_last_bit(tmp_path: Path) -> None:
    scaling, other = RewardScaling("scale"), RewardScaling("scale")
    scaling(rewards([0.1, 0, 1 / 3], [0, 2 / 7]), MASK)
    scaling.keep()
    with pytest.raises(BadCheckpoint, match=r"no moments of rewards \(reward_moments.json\): choose another"):
        other.load(tmp_path)
    scaling.save(tmp_path)
    other.load(tmp_path)
    assert other.moments == scaling.moments


class SeesRewards(GAE):
    """Keeps the rewards of every iteration."""

    seen: list[torch.Tensor]

    def __call__(self, groups: Any, experience: Any, context: Any) -> Estimate:
        self.seen.append(experience.rewards[experience.response_mask])
        return super().__call__(groups, experience, context)


def test_a_run_that_was_cut_goes_on_with_the_moments_it_had(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "reward_scaling": "standard", "critic": CriticConfig(learning_rate=1e-3), "num_iterations": 3, "num_epochs": 1,
        "rollout_num_problems": 3, "save_every": 1, "evaluation_every": 0,
        "kl": KLConfig(coefficient=0.05, kind="k1", place="reward"),
    }  # fmt: skip

    def run(name: str, dies_at: str = "") -> list[torch.Tensor]:
        estimator = SeesRewards(gamma=1.0, lam=0.95)
        estimator.seen = []
        make_trainer(tiny_policy, task, tokenizer, tmp_path / name, dies_at, estimator, **settings).run()
        return estimator.seen

    whole = run("whole")
    with pytest.raises(ServerGone):
        run("cut", "rl-1")
    after = run("cut")
    assert len(after) == 2
    assert all(torch.equal(one, other) for one, other in zip(after, whole[1:], strict=True))
    rows = read_metrics(tmp_path / "whole")
    assert read_metrics(tmp_path / "cut") == rows
    scores = [row["rollout/reward"] for row in rows]
    # 12 rollouts per iteration, whose mean is taken off what the estimator sees; the penalty is apart from it
    means = [sum(scores[: number + 1]) / (number + 1) for number in range(3)]
    assert [row["rollout/running_mean"] for row in rows] == pytest.approx(means)
    for row in rows:
        left = (row["rollout/reward"] - row["rollout/running_mean"]) / row["rollout/running_std"]
        assert row["kl/net_reward"] == pytest.approx(left + row["kl/penalty_in_reward"], abs=1e-6)
        assert row["kl/penalty_in_reward"] == pytest.approx(-0.05 * row["kl/per_response"], abs=1e-6)


def config(
    advantage: str, settings: dict[str, Any] | None = None, reward_scaling: str = "scale", **more: Any
) -> RLConfig:
    """A run whose rewards are scaled."""
    node = {"_target_": f"espalier.rl.advantages.{advantage}", **(settings or {})}
    return root_config(RLConfig, output_dir="", advantage=node, reward_scaling=reward_scaling, **more)


def test_scaled_rewards_are_refused_where_nobody_sees_them_or_a_critic_cannot_say_them() -> None:
    check_estimator(config("rloo.RLOO"))
    with pytest.raises(BadConfig, match=r"GRPO does not see rewards of tokens: set update\.reward_scaling=none"):
        check_estimator(config("grpo.GRPO", {"divide_by_std": True}))
    plus_plus = "reinforce_plus_plus.ReinforcePlusPlusAdvantage"
    check_estimator(config(plus_plus))
    for advantage, given in (("remax.ReMaxAdvantage", {}), (plus_plus, {"has_group_baseline": True})):
        with pytest.raises(BadConfig, match=r"takes a baseline of rewards as they were given off rewards that are sca"):
            check_estimator(config(advantage, given))
    beside = config("rloo.RLOO")
    check_samples(beside)
    beside.samples.estimators = {"rloo": {"_target_": "espalier.rl.advantages.rloo.RLOO"}}
    with pytest.raises(BadConfig, match=r"samples\.estimators are compared on one scale, and update\.reward_scaling"):
        check_samples(beside)
    gae: dict[str, Any] = {"advantage": "gae.GAE", "settings": {"gamma": 1.0, "lam": 1.0}, "reward": None}
    check_critic_range(config(critic=CriticConfig(), **gae))
    with pytest.raises(BadConfig, match="reward_scaling=scale scales returns to any number"):
        check_critic_range(config(critic=CriticConfig(form="probability"), **gae))


@pytest.mark.parametrize(("changes", "message"), [
    ({"reward_scaling": "all"}, "update.reward_scaling must be one of none, scale, standard, got 'all'"),
    ({"reward_limit": -1.0}, "update.reward_limit must be at least 0"),
    ({"reward_scaling": "none", "reward_limit": 5.0}, "update.reward_limit=5 bounds rewards that are scaled"),
])  # fmt: skip
def test_a_scaling_that_is_none_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        check_numbers(config("rloo.RLOO", **changes))
