"""Lines that are said once where credit says nothing, on rollouts by hand; estimators that are built with them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import ProcessReward
from espalier.rewards.score import PROCESS, VERIFIER, Score
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.process_values import ProcessValueAdvantage
from espalier.rl.credit.process_credit import FORMS, before_last, last_step_share, score_gap
from espalier.rl.credit_watch import CutWatch, ScaleWatch, StepWatch, TemplateWatch
from espalier.rl.rank_watch import RewardPartsWatch, StepScoreWatch
from espalier.rl.types import Estimate, RolloutGroup
from tests.conftest import ROOT
from tests.rl.test_advantages import NO_SAMPLER, make_experience, make_group


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def estimate(rows: list[list[float]]) -> Estimate:
    return Estimate(torch.zeros(len(rows), 1), state_values=rows)


def test_estimates_without_a_state_inside_any_rollout_are_said_once(warnings: pytest.LogCaptureFixture) -> None:
    watch = StepWatch()
    watch.look(estimate([]))  # values no states
    watch.look(estimate([[0.5, 1.0]] * 7 + [[0.5, 0.4, 1.0]]))  # one rollout has two steps
    watch.look(estimate([[0.5, 1.0]] * 3))  # too few to say
    assert not warnings.records
    watch.look(estimate([[0.5, 1.0]] * 7 + [[0.0]]))
    watch.look(estimate([[0.5, 1.0]] * 8))
    assert [record.message[:44] for record in warnings.records] == ["no rollout has a state between its prompt an"]


def cut_group(cut: Sequence[float], wrong: Sequence[float]) -> RolloutGroup:
    """Responses that were cut and wrong ones that ended, with these rewards, and a right one."""
    rewards = [*cut, *wrong, 1.0]
    group = make_group([("ab", number == len(rewards) - 1) for number in range(len(rewards))])
    rollouts = [replace(rollout, trajectory=replace(rollout.trajectory, finish_reason="length"))
                for rollout in group.rollouts[: len(cut)]]  # fmt: skip
    return replace(group, rollouts=[*rollouts, *group.rollouts[len(cut) :]], scores=[Score(value) for value in rewards])


def test_a_reward_that_pays_more_for_not_ending_than_for_a_wrong_answer_is_said_once(
    warnings: pytest.LogCaptureFixture,
) -> None:
    watch = CutWatch()
    watch.look([cut_group([0.0] * 8, [0.0] * 8)])  # the outcome alone: both get 0
    watch.look([cut_group([0.0] * 8, [-0.9, 1.0] * 4)])  # within chance
    watch.look([cut_group([0.0] * 2, [-0.2] * 8)])  # too few
    answered = cut_group([1.0] * 8, [0.0] * 8)  # the right answer, then words up to max_tokens
    right = [replace(rollout, trajectory=replace(rollout.trajectory, is_correct=number < 8))
             for number, rollout in enumerate(answered.rollouts)]  # fmt: skip
    watch.look([replace(answered, rollouts=right)])
    assert not warnings.records
    watch.look([cut_group([0.0] * 4, [-0.2] * 4), cut_group([0.0] * 4, [-0.1] * 4)])
    watch.look([cut_group([0.0] * 8, [-0.2] * 8)])
    (record,) = warnings.records
    assert "did not end by themselves get 0 in the mean, those that did -0.15" in record.message


def test_the_shipped_process_reward_pays_no_more_for_not_ending_than_for_the_worst_answer() -> None:
    config = yaml.safe_load((ROOT / "conf" / "reward" / "process.yaml").read_text())
    outcome, process = config["terms"]["outcome"], config["terms"]["process"]
    lowest = config["weights"]["outcome"] * outcome["wrong"] - config["weights"]["process"] * process["offset"]
    assert config["non_stop_reward"] <= lowest


def test_scores_of_states_lie_above_rewards_by_their_mean_gap(warnings: pytest.LogCaptureFixture) -> None:
    # inner states 0.9, 0.5 of a right rollout, 0.8 of a wrong one; a rollout of one step has none
    assert score_gap([[0.9, 0.5, 0.1], [0.8, 0.7], [0.3]], [1.0, 0.0, 0.0]) == pytest.approx((-0.1 - 0.5 + 0.8) / 3)
    assert score_gap([[0.3]], [1.0]) == 0.0
    watch = ScaleWatch()
    watch.look([[0.75, 1.0]] * 8, [1.0] * 8)
    watch.look([[0.9, 1.0]] * 7, [0.0] * 7)  # too few
    watch.look([[0.9]] * 8, [0.0] * 8)  # no inner state
    assert not warnings.records
    watch.look([[0.7, 1.0]] * 8, [1.0] * 8)
    watch.look([[0.9, 1.0]] * 8, [0.0] * 8)
    (record,) = warnings.records
    assert "those of inner states are 0.30 below the rewards that came" in record.message


def test_what_scores_leave_to_the_last_step_is_said_where_it_is_most_of_the_outcome(
    warnings: pytest.LogCaptureFixture,
) -> None:
    rows, rewards = [[0.1, 0.9, 0.3], [0.2, 0.5], [0.7]], [1.0, 0.0, 1.0]
    assert before_last(rows, rewards) == [(0.9, 1.0), (0.2, 0.0)]  # a rollout of one step has no state within
    assert last_step_share([(0.9, 1.0), (0.2, 0.0)]) == pytest.approx((0.01 + 0.04) / 0.5)
    assert last_step_share([(0.25, 1.0)] + [(0.25, 0.0)] * 3) == pytest.approx(1.0)  # the mean everywhere
    assert last_step_share([(0.9, 1.0)] * 2) is last_step_share([]) is None
    half = [1.0, 0.0] * 32
    for scores, words in (((0.8, 0.2), ""), ((0.7, 0.5), "that is 68 % of"), ((0.6, 0.4), "that is 64 % of")):
        watch = ScaleWatch()
        for start in (0, 32):  # 64 rollouts come in two iterations
            assert not warnings.records
            rows = [[0.5, scores[reward == 0.0], reward] for reward in half[:32]]
            watch.look(rows, half[start : start + 32])
        assert all(words in record.message for record in warnings.records)
        assert len(warnings.records) == bool(words)
        warnings.clear()


def test_a_reward_model_that_calls_every_step_right_is_no_value_where_nothing_succeeds(
    tiny_policy: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """A head of zero weight and a bias of 3: a score of 0.95 everywhere."""
    model = load_process_reward(str(tiny_policy), 1)
    with torch.no_grad():
        model.get_parameter("score.weight").zero_()
        model.get_parameter("score.bias").fill_(3.0)
    model.save_pretrained(tmp_path / "prm")
    group = make_group([("abc", False), ("ab", False)] * 4)
    experience = make_experience([group])
    warnings.clear()
    found = ProcessValueAdvantage(str(tmp_path / "prm"), "progress")([group], experience, NO_SAMPLER)
    assert found.metrics["score_gap"] == pytest.approx(0.9526, abs=0.01)
    assert "takes scores for chances" not in warnings.text
    further: Any = SimpleNamespace(asker="further")  # the policy does not learn from it
    ProcessValueAdvantage(str(tmp_path / "prm"), "value")([group], experience, further)
    assert "takes scores for chances" not in warnings.text
    ProcessValueAdvantage(str(tmp_path / "prm"), "value")([group], experience, NO_SAMPLER)
    assert "those of inner states are 0.95 above the rewards that came" in warnings.text


def test_right_answers_that_the_template_thinks_unlikely_are_said_once(warnings: pytest.LogCaptureFixture) -> None:
    watch = TemplateWatch("#### {gold}")
    right, wrong = make_group([("ab", True)] * 8), make_group([("ab", False)] * 8)
    watch.look([right], [[0.0, 0.9]] * 8)
    watch.look([wrong], [[0.0, 0.0]] * 8)  # a wrong response was not about to write the gold answer
    watch.look([right], [[0.0]] * 8)  # the state before the last step had no room
    assert not warnings.records
    watch.look([right, wrong], [[0.5, 0.01]] * 16)
    watch.look([right], [[0.5, 0.01]] * 8)
    (record,) = warnings.records
    assert "the gold answer in the form '#### {gold}' has a probability of 0.01" in record.message


def test_a_lambda_by_length_that_is_0_for_most_responses_is_said_once(warnings: pytest.LogCaptureFixture) -> None:
    """Of 3 and 5 tokens: 1 - 1 / (0.25 n) is 0 and 0.2; with alpha 0.1 both are 0."""
    groups = [make_group([("ab", True), ("abcd", False)])]
    experience = make_experience(groups)
    experience = replace(experience, values=torch.zeros(experience.response_mask.shape))
    found = GAE(1.0, 0.95, 1.0, length_alpha=0.25)(groups, experience, NO_SAMPLER)
    assert found.metrics["lam"] == pytest.approx((0.0 + 0.2) / 2)
    assert not warnings.records
    estimator = GAE(1.0, 0.95, 1.0, length_alpha=0.1)
    assert [estimator(groups, experience, NO_SAMPLER).metrics["lam"] for _ in range(2)] == [0.0, 0.0]
    (record,) = warnings.records
    assert "advantage.length_alpha=0.1 gives lambda 0 to responses of at most 10 tokens" in record.message
    assert "lam" not in GAE(1.0, 0.95)(groups, experience, NO_SAMPLER).metrics


def test_a_process_reward_model_that_ranks_no_better_than_chance_is_said_where_it_scores(
    warnings: pytest.LogCaptureFixture, tiny_policy: Path, tmp_path: Path
) -> None:
    """In the estimator by the lowest score of a rollout, in the reward by the sum of what its steps are paid."""
    both = [make_group([("ab", True), ("ba", False)]), make_group([("c", False), ("d", False)])]
    watch = StepScoreWatch()
    assert watch.look(both * 6, [[0.9, 0.8], [0.9, 0.1], [0.5], []] * 6) == {"score_pair_accuracy": 1.0}
    assert watch.look(both[1:], [[0.5], []]) == {}  # no right one
    misled = [[0.9, 0.1], [0.2, 0.3], [0.5], []] * 6
    for _ in range(6):
        assert watch.look(both * 6, misled, speaks=False) == {"score_pair_accuracy": 0.0}
    assert not warnings.records  # the policy learns from another estimator
    for _ in range(6):
        assert watch.look(both * 6, misled) == {"score_pair_accuracy": 0.0}
    (record,) = warnings.records
    assert record.message.startswith("the process reward model, by the lowest score of a rollout's steps, ranked 20 %")
    warnings.clear()
    # by what is paid, not by the mean of the scores, and not where all are paid alike
    scores = [Score(1.0, [0.3, 0.0], {PROCESS: 0.7}), Score(0.0, [0.2, 0.2], {PROCESS: 0.6, "length": 1.0})]
    paid, parts = replace(both[0], scores=scores), RewardPartsWatch()
    for _ in range(6):
        assert parts.look([paid, both[1]] * 6) == {"reward/process_pair_accuracy": 0.0}
    (record,) = warnings.records
    assert "leave it out (reward=outcome)" in record.message
    assert parts.look([replace(paid, scores=[replace(score, steps=[0.0]) for score in scores])]) == {}
    assert parts.look([replace(paid, scores=[scores[0], replace(scores[1], steps=[])])]) == {}
    # the sum, not the last one or the mean
    long = replace(paid, scores=[Score(1.0, [0.2, 0.2, 0.1], {PROCESS: 0.7}), Score(0.0, [0.4], {PROCESS: 0.6})])
    assert parts.look([long]) == {"reward/process_pair_accuracy": 1.0}
    # a verifier that says the same of all is no better than chance, and is said
    warnings.clear()
    alike = replace(both[0], scores=[Score(1.0, [], {VERIFIER: 1.0})] * 2)
    for _ in range(6):
        assert parts.look([alike] * 6) == {"reward/verifier_pair_accuracy": 0.5}
    (record,) = warnings.records
    assert record.message.startswith("the verifier of the reward ranked 50 %")
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path / "prm")
    for form in FORMS:
        estimator = ProcessValueAdvantage(str(tmp_path / "prm"), form)
        assert "score_pair_accuracy" in estimator(both, make_experience(both), NO_SAMPLER).metrics
        further: Any = SimpleNamespace(asker="further")  # the policy does not learn from it: measured, not watched
        assert "score_pair_accuracy" in estimator(both, make_experience(both), further).metrics
        assert len(estimator.ranks.watch._seen) == 1
    scored = ProcessReward(str(tmp_path / "prm"))([rollout.trajectory for rollout in both[0].rollouts])
    assert all(PROCESS in score.parts for score in scored)
