"""Calibration rewards: numbers by hand, and that honesty pays most, found by trying everything else."""

import itertools
import math
from collections.abc import Sequence

import pytest

from espalier.data.answers.grading import grade_answer
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.rewards.calibration import (
    ConfidenceReward,
    LinguisticCalibrationReward,
    StatedForecasts,
    confidence_score,
    linguistic_calibration,
)
from espalier.rewards.composed import ComposedReward
from espalier.rewards.score import ChecksProblems, Reward, StatesRange
from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.combinations import check_proper_score
from espalier.runtime.schemas import RLConfig
from tests.support.root_config import root_config

OUTCOME = {"_target_": "espalier.rewards.outcome.OutcomeReward"}


def response(text: str, gold: str, is_correct: bool, finish: str = "stop") -> Trajectory:
    return Trajectory("a", "p", "?", text, [text], [1], [2, 3], [2], finish, gold, None, is_correct)


def test_the_calibration_reward_by_hand() -> None:
    reward, log_score, distance = linguistic_calibration(0.5, [0.5, 0.3])
    assert log_score == pytest.approx(math.log(0.5))
    assert distance == pytest.approx(0.2)
    assert reward == pytest.approx(math.log(0.5) - 5 * 0.2 + 5)


def test_the_gold_is_no_part_of_the_sum_and_its_probability_is_kept_above_epsilon() -> None:
    assert linguistic_calibration(0.0, [0.7, 0.3])[0] == pytest.approx(math.log(1e-4) + 5)
    assert linguistic_calibration(0.4, [0.7, 0.3])[0] == pytest.approx(math.log(0.4) + 5)


def test_nothing_offered_costs_the_whole_penalty() -> None:
    assert linguistic_calibration(0.0, [])[0] == pytest.approx(math.log(1e-4) - 5 + 5)


@pytest.mark.parametrize("truth", [(0.5, 0.3, 0.2), (0.9, 0.05, 0.05), (0.4, 0.4, 0.2), (1.0, 0.0, 0.0)])
def test_the_calibration_reward_is_highest_at_the_truth_alone(truth: tuple[float, ...]) -> None:
    grid = [index / 20 for index in range(21)]
    expected = {
        stated: sum(
            share * linguistic_calibration(probability, stated)[0]
            for share, probability in zip(truth, stated, strict=True)
        )
        for stated in itertools.product(grid, repeat=3)
    }
    ordered = sorted(expected, key=expected.__getitem__, reverse=True)
    assert ordered[0] == truth
    assert expected[ordered[0]] > expected[ordered[1]] + 1e-6


def test_with_a_weight_of_at_most_one_it_would_pay_to_state_too_much() -> None:
    def expected(stated: tuple[float, float], weight: float) -> float:
        return sum(0.5 * linguistic_calibration(one, stated, sum_weight=weight)[0] for one in stated)

    assert expected((0.7, 0.7), 0.5) > expected((0.5, 0.5), 0.5)
    assert expected((0.7, 0.7), 5.0) < expected((0.5, 0.5), 5.0)
    with pytest.raises(BadInput, match="sum_weight"):
        LinguisticCalibrationReward(StatedForecasts(), sum_weight=1.0)


@pytest.mark.parametrize("score", ["brier", "log"])
@pytest.mark.parametrize("truth", [0.05, 0.3, 0.5, 0.85])
def test_a_confidence_score_is_highest_at_the_truth_alone(score: str, truth: float) -> None:
    grid = [index / 20 for index in range(21)]
    expected = [
        truth * confidence_score(q, True, score) + (1 - truth) * confidence_score(q, False, score) for q in grid
    ]
    best = sorted(range(21), key=expected.__getitem__, reverse=True)
    assert grid[best[0]] == pytest.approx(truth)
    assert expected[best[0]] > expected[best[1]]


def test_rlcr_by_hand_and_the_best_answer_pays_most() -> None:
    rows = [
        response("Answer: fish\nConfidence: 60%", "fish", True),
        response("Answer: rice\nConfidence: 60%", "fish", False),
    ]
    assert [score.total for score in ConfidenceReward()(rows)] == pytest.approx([1 - 0.16, -0.36])
    assert ConfidenceReward()(rows)[0].parts == pytest.approx({"outcome": 1.0, "confidence": 0.6, "brier": -0.16})
    assert [score.total for score in ConfidenceReward(0.0)(rows)] == pytest.approx([-0.16, -0.36])
    # an honest answer that is right with probability p expects p - p (1 - p) = p^2: more for the likelier answer
    for p in (0.2, 0.5, 0.8):
        honest = p * (1 + confidence_score(p, True, "brier")) + (1 - p) * confidence_score(p, False, "brier")
        assert honest == pytest.approx(p * p)


def test_rlcr_reads_tags_and_malformed_ones_are_wrong_with_full_confidence() -> None:
    text = (
        "<think> It swims. </think> <answer>fish</answer> <analysis> Or not. </analysis> <confidence>0.6</confidence>"
    )
    kind = {"gold": ["fish"], "kind": "short_answer"}
    for read, total in ((text, 1 - 0.16), (text.replace("0.6", "60%"), -1.0), (text.replace("</answer>", ""), -1.0),
                        (text.replace("fish", "rice"), -0.36), (text + "</confidence>", -1.0)):  # fmt: skip
        row = response(read, "fish", grade_answer(prediction=read, **kind).is_correct)  # type: ignore[arg-type]
        assert ConfidenceReward()([row])[0].total == pytest.approx(total)


def test_a_cut_or_unreadable_response_is_wrong_with_full_confidence() -> None:
    rows = [response("Answer: fish\nConfidence: 60%", "fish", False, "length"), response("fish", "fish", True)]
    assert [score.total for score in ConfidenceReward()(rows)] == [-1.0, -1.0]
    cut = LinguisticCalibrationReward(StatedForecasts())(rows)[0]
    assert cut.total == pytest.approx(math.log(1e-4))
    assert cut.parts["num_answers"] == 0


def test_the_parts_of_the_calibration_reward_are_logged() -> None:
    row = response("It is fish (60%), or else rice (30%).", "fish", True)
    parts = LinguisticCalibrationReward(StatedForecasts())([row])[0].parts
    assert parts == pytest.approx(
        {"log_score": math.log(0.6), "sum_distance": 0.1, "num_answers": 2.0, "gold_probability": 0.6}
    )


def test_a_score_keeps_the_probability_of_every_answer_that_it_was_made_from() -> None:
    said = response("It is fish (60%), or else rice (30%).", "fish", True)
    line = response("Answer: rice\nConfidence: 70%", "fish", False)
    cut = response("It is fish (60%).", "fish", False, "length")
    reward = LinguisticCalibrationReward(StatedForecasts())
    scores = reward([said, line, cut])
    assert [score.answers for score in scores] == [{"fish": 0.6, "rice": 0.3}, {"rice": 0.7}, {}]
    for score in scores:
        gold = score.answers.get("fish", 0.0)
        assert score.total == pytest.approx(linguistic_calibration(gold, list(score.answers.values()))[0])
    # the most confident answer alone is scored by its confidence
    assert [score.answers for score in ConfidenceReward()([said, line, cut])] == [{"fish": 0.6}, {"rice": 0.7}, {}]


def test_answers_are_kept_by_composed_rewards_also_where_the_score_is_replaced() -> None:
    said, cut = (response("Answer: fish\nConfidence: 60%", "fish", True, how) for how in ("stop", "length"))
    terms: dict[str, Reward] = {"one": ConfidenceReward(), "two": LinguisticCalibrationReward(StatedForecasts())}
    assert ComposedReward(terms)([said, cut])[0].answers == {"fish": 0.6, "two_fish": 0.6}
    reward = ComposedReward({"one": ConfidenceReward()}, non_stop_reward=-3.0, min_tokens=5)
    (short,) = reward([said])
    assert (short.total, short.answers, short.parts["stopped"]) == (-3.0, {"fish": 0.6}, 0.0)


def test_a_problem_without_a_gold_or_that_the_reader_does_not_know_is_refused_before_anything_is_drawn() -> None:
    class Reader(StatedForecasts):
        def check_problems(self, problems: Sequence[Problem]) -> None:
            raise BadInput(f"no question of {problems[0].id}")

    known = [Problem("a", "?", "Ana")]
    reward = LinguisticCalibrationReward(StatedForecasts())
    assert isinstance(reward, ChecksProblems)
    reward.check_problems(known)
    with pytest.raises(BadInput, match="problem 'b' has no gold answer"):
        reward.check_problems([*known, Problem("b", "?", "")])
    with pytest.raises(BadInput, match="problem 'b' has no gold answer"):
        ConfidenceReward().check_problems([*known, Problem("b", "?", "")])
    with pytest.raises(BadInput, match="no question of a"):
        LinguisticCalibrationReward(Reader()).check_problems(known)


def test_ranges_hold_the_rewards() -> None:
    assert isinstance(ConfidenceReward, StatesRange)
    assert ConfidenceReward.score_range({"score": "brier", "correctness_weight": 1.0}).total == (-1.0, 1.0)
    assert LinguisticCalibrationReward.score_range({"constant": 5.0}).total == (-math.inf, 5.0)


@pytest.mark.parametrize("divides", [True, False])
def test_dividing_by_a_groups_spread_makes_a_proper_score_improper(divides: bool) -> None:
    """A group states confidences from 0.5 to 0.9 of an answer that is right with 0.6: which confidence gains most?"""
    stated = [0.5, 0.6, 0.7, 0.8, 0.9]
    by_outcome = {is_right: group_advantages([confidence_score(q, is_right, "brier") for q in stated], divides)
                  for is_right in (True, False)}  # fmt: skip
    gains = [0.6 * right + 0.4 * wrong for right, wrong in zip(by_outcome[True], by_outcome[False], strict=True)]
    assert stated[gains.index(max(gains))] == (0.8 if divides else 0.6)


@pytest.mark.parametrize("divides", [True, False])
def test_a_run_that_divides_a_proper_score_is_warned(divides: bool, caplog: pytest.LogCaptureFixture) -> None:
    reward = {"_target_": "espalier.rewards.calibration.ConfidenceReward"}
    advantage = {"_target_": "espalier.rl.advantages.grpo.GRPO", "divide_by_std": divides}
    check_proper_score(root_config(RLConfig, output_dir="", reward=reward, advantage=advantage))
    assert ("divide_by_std=false" in caplog.text) == divides
    caplog.clear()
    form = "first_error" if divides else "progress"
    blames = {"_target_": "espalier.rl.advantages.process_values.ProcessValueAdvantage", "path": "M", "form": form}
    check_proper_score(root_config(RLConfig, output_dir="", reward=reward, advantage=blames))
    assert ("another advantage.form" in caplog.text) == divides
    caplog.clear()
    light = advantage | {"divide_by_std": False, "negative_weight": 1.0 if divides else 0.5}
    check_proper_score(root_config(RLConfig, output_dir="", reward=reward, advantage=light))
    assert ("negative_weight weighs" in caplog.text) != divides
    caplog.clear()
    check_proper_score(root_config(RLConfig, output_dir="", reward=OUTCOME, advantage=advantage))
    assert not caplog.text
