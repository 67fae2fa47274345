"""The training reward of a run: a fall is said once, with its causes; flat, noisy and rising runs are left in peace."""

import json
from pathlib import Path

import numpy
import pytest

from espalier.rl.probes.reward_falls import (
    Fall,
    RewardTrend,
    RewardWatch,
    describe_fall,
    find_fall,
    slope_errors,
    student_quantile,
)


def accuracies(chances: list[float], seed: int, num_problems: int = 64, group_size: int = 8) -> list[float]:
    """Mean accuracies of iterations: `chances` are what an average problem is solved with, problems differ."""
    rng = numpy.random.default_rng(seed)
    chance = numpy.array(chances)[:, None]
    easy = rng.beta(1.5 * chance, 1.5 * (1 - chance), size=(len(chances), num_problems))
    return [float(mean) for mean in rng.binomial(group_size, easy).mean(1) / group_size]


def line(start: float, end: float, count: int) -> list[float]:
    return [float(value) for value in numpy.linspace(start, end, count)]


def falls(rewards: list[float]) -> list[Fall]:
    trend = RewardTrend()
    return [fall for fall in map(trend.add, rewards) if fall is not None]


def test_the_slope_by_hand_in_its_standard_errors() -> None:
    # the line is 1.1, 1.7, 2.3, 2.9; the squares of the rest add up to 0.01 + 0.09 + 0.09 + 0.01; the spread is 5
    assert slope_errors([1.0, 2.0, 2.0, 3.0]) == pytest.approx(0.6 / (0.2 / 2 / 5) ** 0.5)
    assert slope_errors([0.1] * 20) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("share", "degrees", "table"),
    [(0.99, 18, 2.552), (0.995, 18, 2.878), (0.9995, 18, 3.922), (0.999, 38, 3.319), (0.9995, 60, 3.460)],
)
def test_quantiles_of_students_distribution_are_those_of_the_tables(share: float, degrees: int, table: float) -> None:
    assert student_quantile(share, degrees) == pytest.approx(table, abs=2e-3)


def test_fewer_than_one_in_a_hundred_flat_runs_are_said_to_fall() -> None:
    """Of 24 iterations; with rollouts as they are, normal noise, and noise with a long tail as of a few hard problems;
    and of 100 iterations."""
    rng = numpy.random.default_rng(0)
    few = [accuracies([0.09] * 24, seed) for seed in range(400)]
    flat = [rng.normal(0.5, 0.1, 24).tolist() for _ in range(300)]
    tailed = [(rng.random(24) ** 8).tolist() for _ in range(300)]
    assert sum(bool(falls(run)) for run in few + flat + tailed) < 10
    assert sum(bool(falls(accuracies([0.3] * 100, seed))) for seed in range(500)) < 8


def test_a_fall_from_nine_to_five_per_cent_is_usually_seen_within_thirty_iterations() -> None:
    runs = [accuracies(line(0.09, 0.05, 20) + [0.05] * 10, seed) for seed in range(100)]
    assert sum(bool(falls(run[:20])) for run in runs) >= 30
    assert sum(bool(falls(run)) for run in runs) >= 55
    assert all(falls(accuracies(line(0.4, 0.2, 20), seed)) for seed in range(50))


def test_a_run_that_rises_or_stands_still_does_not_fall() -> None:
    assert [falls(accuracies(line(0.1, 0.6, 30) + [0.6] * 70, seed)) for seed in range(100)] == [[]] * 100
    assert falls([0.0] * 60) == falls([1.0] * 60) == falls([0.1] * 60) == []
    assert falls([0.5] * 30 + [0.49] * 30) == []  # significant, and too little to say


def test_a_fall_is_said_once_with_the_halves_it_shows_in() -> None:
    rewards = accuracies([0.4] * 30 + [0.15] * 50, seed=1)
    (fall,) = falls(rewards)
    assert fall.last in (40, 50)
    assert fall.first < fall.border <= 31 <= fall.last
    assert fall.before == pytest.approx(numpy.mean(rewards[fall.first - 1 : fall.border - 1]))
    assert fall.after == pytest.approx(numpy.mean(rewards[fall.border - 1 : fall.last]))
    assert fall.after < 0.75 * fall.before


def test_a_rise_before_it_does_not_hide_a_fall() -> None:
    rewards = accuracies(line(0.05, 0.6, 20) + line(0.6, 0.05, 20), seed=2)
    assert [(fall.first, fall.last) for fall in falls(rewards)] == [(21, 40)]


def test_a_second_fall_is_said_too() -> None:
    assert len(falls(accuracies([0.8] * 30 + [0.5] * 40 + [0.15] * 30, seed=3))) == 2


def test_too_few_iterations_say_nothing() -> None:
    assert falls([1.0] * 10 + [0.0] * 9) == []
    assert falls([1.0] * 10 + [0.0] * 10) != []
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
    assert caplog.text.count("the training reward falls") == 1
    for cut in (int(said[0]) - 7, int(said[0]) - 1, int(said[0])):
        lines = [{"step": 0, "eval/accuracy": 0.4}, *rows[:cut]]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
        resumed = RewardWatch(metrics)
        again = [row["step"] for row in rows[cut:] if resumed.add(int(row["step"]), row)]
        assert again == [step for step in said if step > cut]


def watched(tmp_path: Path, right: list[float], rewards: list[float]) -> RewardWatch:
    watch = RewardWatch(tmp_path / "metrics.jsonl")
    for i, (accuracy, reward) in enumerate(zip(right, rewards, strict=True), 1):
        watch.add(i, {"rollout/accuracy": accuracy, "rollout/reward": reward, "update/learning_rate": 1e-4})
    return watch


def test_right_answers_that_fall_under_a_rising_reward_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a policy that has learned to please a process reward model."""
    right = accuracies(line(0.3, 0.02, 30), seed=5)
    watched(tmp_path, right, line(6.8, 10.5, 30))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("right answers fall, ")
    assert "while the training reward goes from 7." in message
    caplog.clear()
    watched(tmp_path, right, right)  # the reward is the outcome: one line, of the reward
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the training reward falls")
    caplog.clear()
    watched(tmp_path, accuracies([0.3] * 30, seed=5), line(6.8, 10.5, 30))
    assert not caplog.records
    rng = numpy.random.default_rng(0)
    for still in (rng.normal(7, 0.2, 30), rng.normal(0, 1, 30), numpy.zeros(30)):  # a reward that stands still
        watched(tmp_path, right, still.tolist())
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith("right answers fall, ")
        caplog.clear()


def test_right_answers_are_those_of_the_rollouts_that_the_reward_is_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What dynamic sampling or a filter keeps is no measure of the policy; and a run whose first lines are gone counts
    from those that it has."""
    watch = RewardWatch(tmp_path / "metrics.jsonl")
    rows = zip(line(0.5, 0.2, 30), line(0.3, 0.6, 30), strict=True)
    for i, (kept, drawn) in enumerate(rows, 1):
        watch.add(i, {"rollout/accuracy": kept, "rollout/drawn_accuracy": drawn, "rollout/reward": drawn})
    assert not caplog.records
    late = RewardWatch(tmp_path / "metrics.jsonl")
    for i, value in enumerate(line(0.5, 0.2, 30), 31):
        late.add(i, {"rollout/accuracy": value, "rollout/reward": value})
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the training reward falls: 0.453 in iterations 31 to 40")


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
        "falls: 0.09 in iterations 1 to 5, 0.05 in 6 to 10, a slope of -5.0 standard errors",
        "it is 0.0001, an iteration moves the policy by 0.02 nats per token: try 3e-05",
        "75% of them, 25% before",
        "largest ratio 11, 1.0% of tokens clipped, KL of an update 0.003",
        "120 tokens per response, 80 before; 40% cut, 0% before",
    )
    assert [told.count(part) for part in parts] == [1] * 5
    places = [told.index(part) for part in parts]
    assert places == sorted(places)


def test_a_run_without_these_metrics_is_described_all_the_same() -> None:
    assert "falls: 0.09" in describe_fall(Fall(1, 6, 10, 0.09, 0.05, 5.0), {})
