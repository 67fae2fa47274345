"""The reward of verifiers: weighted scores add up, and the gold alone says what is checked."""

import pytest

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.verifiers.verify import Check, write_checks
from espalier.rewards.composed import ComposedReward
from espalier.rewards.score import Score
from espalier.rewards.verifiers import VerifierReward
from espalier.rl.combinations import check_verifiers
from espalier.rl.metrics import describe_rewards
from espalier.rl.types import RolloutGroup
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig

GOLD = write_checks([Check("gsm8k", "4"), Check("format", r".*####", 0.5), Check("max_length", 8, 0.25)])


def trajectory(response: str, num_tokens: int = 4, gold: str = GOLD, finish: str = "stop") -> Trajectory:
    """A sample of so many tokens."""
    ids = list(range(num_tokens))
    return Trajectory("t/0", "t", "?", response, [response], [1], ids, [num_tokens], finish, gold, None, False)


def test_scores_add_up_by_weight_and_scale() -> None:
    (score,) = VerifierReward(scale=10.0)([trajectory("#### 4")])
    assert score.outcome == pytest.approx(10 * (1 + 0.5 * 1 + 0.25 * 4 / 8))
    assert score.parts == {"gsm8k": 1.0, "format": 1.0, "max_length": 0.5}
    (score,) = VerifierReward()([trajectory("so 5", num_tokens=9)])
    assert (score.outcome, score.parts) == (0.0, {"gsm8k": 0.0, "format": 0.0, "max_length": 0.0})


def test_two_verifiers_of_one_name_have_one_part() -> None:
    gold = write_checks([Check("ifeval", {"func_name": "validate_no_commas"}),
                         Check("ifeval", {"func_name": "validate_quotation"})])  # fmt: skip
    (score,) = VerifierReward()([trajectory("a b", gold=gold)])
    assert (score.outcome, score.parts) == (1.0, {"ifeval": 0.5})


def test_no_cut_into_batches_changes_a_score() -> None:
    rows = [trajectory(f"#### {k}", gold=write_checks([Check("gsm8k", str(k % 3))])) for k in range(9)]
    reward = VerifierReward()
    assert reward(rows) == [score for row in rows for score in reward([row])]


def test_a_response_without_an_end_is_replaced_as_in_every_composed_reward() -> None:
    reward = ComposedReward({"verifiers": VerifierReward(10.0)}, non_stop_reward=-10.0)
    kept, cut = reward([trajectory("#### 4"), trajectory("#### 4", finish="length")])
    assert (kept.outcome, cut.outcome) == (16.25, -10.0)


def test_a_gold_without_verifiers_is_refused() -> None:
    with pytest.raises(BadInput, match=r"reward=verifiers, trajectory t/0: the gold is no list of verifiers"):
        VerifierReward()([trajectory("4", gold="4")])


def test_a_task_whose_golds_name_no_verifiers_is_refused_before_anything_starts() -> None:
    config = RLConfig(reward={"terms": {"v": {"_target_": "espalier.rewards.verifiers.VerifierReward"}}})
    config.task = {"kind": "marked_number"}
    with pytest.raises(BadConfig, match="choose task=verifiable"):
        check_verifiers(config)
    config.task = {"kind": "verifiers"}
    check_verifiers(config)


def test_a_part_is_the_mean_over_the_rollouts_that_have_it() -> None:
    scores = [Score(1.0, parts={"gsm8k": 1.0}), Score(0.0, parts={"ifeval": 0.0}), Score(0.5, parts={"ifeval": 0.5})]
    found = describe_rewards([RolloutGroup(Problem("p", "?", GOLD), [], scores)])
    assert (found["reward/gsm8k"], found["reward/ifeval"]) == (1.0, 0.25)
