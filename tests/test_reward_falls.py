"""The training reward of a run: a fall is said once, with its causes; flat, noisy and rising runs are left in peace."""

import json
import random
from pathlib import Path
from statistics import NormalDist

import pytest

from rl.reward_falls import Fall, RewardTrend, RewardWatch, describe_fall, find_fall, normal_scores


def accuracies(chances: list[float], seed: int, num_problems: int = 64, group_size: int = 8) -> list[float]:
    """Mean accuracies of iterations: `chances` are what an average problem is solved with, problems differ."""
    rng = random.Random(seed)
    found = []
    for chance in chances:
        easy = [rng.betavariate(0.5, 0.5 * (1 - chance) / chance) for _ in range(num_problems)]
        found.append(sum(rng.random() < p for p in easy for _ in range(group_size)) / num_problems / group_size)
    return found


def falls(rewards: list[float]) -> list[Fall]:
    trend = RewardTrend()
    return [fall for fall in map(trend.add, rewards) if fall is not None]


def test_normal_scores_by_hand() -> None:
    quantile = NormalDist().inv_cdf
    # ranks 3, 1.5, 1.5 and 4 of 4
    expected = [quantile(3 / 5), quantile(1.5 / 5), quantile(1.5 / 5), quantile(4 / 5)]
    assert normal_scores([0.2, 0.0, 0.0, 7.0]).tolist() == pytest.approx(expected)


def test_fewer_than_one_in_a_hundred_flat_runs_are_said_to_fall() -> None:
    """Half of them normal noise, half of them noise with a long tail, as of a few hard problems."""
    rng = random.Random(0)
    flat = [[rng.gauss(0.5, 0.1) for _ in range(24)] for _ in range(500)]
    tailed = [[rng.random() ** 8 for _ in range(24)] for _ in range(500)]
    assert sum(bool(falls(run)) for run in flat + tailed) < 10


def test_a_run_that_rises_or_stands_still_does_not_fall() -> None:
    assert falls(accuracies([0.1 + 0.02 * i for i in range(40)], seed=0)) == []
    assert falls([0.0] * 60) == falls([1.0] * 60) == []
    assert falls([0.5] * 30 + [0.49] * 30) == []  # significant, and too little to say


def test_a_fall_is_said_once_with_the_iteration_it_began_at() -> None:
    rewards = accuracies([0.4] * 30 + [0.15] * 30, seed=1)
    (fall,) = falls(rewards)
    assert 28 <= fall.border <= 34
    assert fall.before == pytest.approx(0.4, abs=0.06)
    assert fall.after == pytest.approx(0.15, abs=0.06)
    assert fall.last < 45


def test_a_rise_before_it_does_not_hide_a_fall() -> None:
    rewards = accuracies([0.05 + 0.03 * i for i in range(20)] + [0.6 - 0.03 * i for i in range(20)], seed=2)
    assert [fall.border > 20 for fall in falls(rewards)][:1] == [True]


def test_a_second_fall_is_said_too() -> None:
    assert len(falls(accuracies([0.8] * 25 + [0.5] * 25 + [0.15] * 25, seed=3))) == 2


def test_too_few_iterations_say_nothing() -> None:
    assert find_fall([1.0] * 5 + [0.0] * 4) is None
    assert find_fall([]) is None


def test_a_run_that_goes_on_says_nothing_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewards = accuracies([0.4] * 20 + [0.1] * 40, seed=4)
    rows = [{"step": i, "rollout/reward": reward, "update/learning_rate": 1e-4, "rollout/zero_variance": 0.25}
            for i, reward in enumerate(rewards, 1)]  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    whole = RewardWatch(metrics)
    said = [row["step"] for row in rows if whole.add(int(row["step"]), row)]
    assert len(said) == 1
    assert "try 3e-05" in caplog.text
    assert caplog.text.count("the training reward fell from") == 1
    for cut in (int(said[0]) - 1, int(said[0])):
        lines = [{"step": 0, "eval/accuracy": 0.4}, *rows[:cut]]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
        resumed = RewardWatch(metrics)
        again = [row["step"] for row in rows[cut:] if resumed.add(int(row["step"]), row)]
        assert again == [step for step in said if step > cut]


def test_the_causes_stand_in_their_order_with_the_runs_own_numbers() -> None:
    rows = {
        i: {
            "update/learning_rate": 1e-4, "engine/policy_moved": 0.02, "rollout/zero_variance": 0.25 if i < 6 else 0.75,
            "update/ratio_max": 1.0 + i, "update/clip_share": 0.01, "update/kl_old": 0.003,
            "rollout/response_length": 80.0 if i < 6 else 120.0, "rollout/truncated": 0.0 if i < 6 else 0.4,
        }
        for i in range(1, 11)
    }  # fmt: skip
    told = describe_fall(Fall(1, 6, 10, 0.09, 0.05, 5.0), rows)
    parts = (
        "fell from 0.09 (iterations 1 to 5) to 0.05 (since iteration 6), by 5.0 standard errors",
        "it is 0.0001, an iteration moves the policy by 0.02 nats a token: try 3e-05",
        "75% of them, 25% before",
        "largest ratio 11, 1.0% of tokens clipped, KL of an update 0.003",
        "120 tokens a response, 80 before; 40% cut, 0% before",
    )
    assert [told.count(part) for part in parts] == [1] * 5
    places = [told.index(part) for part in parts]
    assert places == sorted(places)


def test_a_run_without_these_metrics_is_described_all_the_same() -> None:
    assert "fell from 0.09" in describe_fall(Fall(1, 6, 10, 0.09, 0.05, 5.0), {})
