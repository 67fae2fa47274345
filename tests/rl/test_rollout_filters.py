"""Filters of rollouts: which ones PROF keeps, and what a run with a filter trains on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from espalier.data.records import BadInput
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import score_trajectories
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.combinations import check_combinations
from espalier.rl.rollout_filters import ProcessConsistencyFilter, balanced_counts
from espalier.rl.trainer_from_config import check_kept
from espalier.rl.types import RolloutGroup
from espalier.rl.update import steps_per_iteration
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig
from tests.rl.test_advantages import make_group
from tests.runtime.test_configs import CONF, compose_config
from tests.support.rl_cases import make_trainer, read_metrics
from tests.support.root_config import root_config


@pytest.fixture(scope="module")
def prm(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model whose scores differ."""
    folder = tmp_path_factory.mktemp("prm") / "model"
    torch.manual_seed(0)
    fresh = load_process_reward(str(tiny_policy), 1)
    torch.nn.init.normal_(fresh.get_parameter("score.weight"), std=0.1)
    fresh.save_pretrained(folder)
    return folder


def ids(group: RolloutGroup) -> list[str]:
    assert len(group.scores) == len(group.rollouts)
    return [rollout.trajectory.id for rollout in group.rollouts]


@pytest.mark.parametrize("num_kept", range(1, 9))
def test_right_and_wrong_rollouts_are_kept_so_that_their_product_is_largest(num_kept: int) -> None:
    for right in range(9):
        for wrong in range(max(0, num_kept - right), 9):
            kept = balanced_counts(right, wrong, num_kept)
            assert sum(kept) == num_kept
            assert 0 <= kept[0] <= right
            assert 0 <= kept[1] <= wrong
            best = max(k * (num_kept - k) for k in range(num_kept + 1) if k <= right and num_kept - k <= wrong)
            assert kept[0] * kept[1] == best
    with pytest.raises(ValueError, match="9 rollouts are to be kept of 8"):
        balanced_counts(3, 5, 9)


def test_prof_keeps_right_rollouts_of_good_steps_and_wrong_ones_of_bad_steps(prm: Path) -> None:
    group = make_group([("ab", True), ("a", False), ("b", True), ("ba", False), ("bb", True), ("aa", False)])
    scores = [[0.9, 0.1], [0.8], [0.7], [0.1, 0.3], [0.9, 0.9], [0.6, 0.6]]  # means 0.5 0.8 0.7 0.2 0.9 0.6
    assert ids(ProcessConsistencyFilter(str(prm), 4).choose(group, scores)) == ["p/2", "p/3", "p/4", "p/5"]
    assert ids(ProcessConsistencyFilter(str(prm), 3).choose(group, scores)) == ["p/2", "p/3", "p/4"]
    as_drawn = ProcessConsistencyFilter(str(prm), 4, filters_wrong=False)
    assert ids(as_drawn.choose(group, scores)) == ["p/1", "p/2", "p/3", "p/4"]
    # one step costs a right rollout 0.3: 0.7 becomes 0.4; a wrong one is the more consistent for it: 0.8 becomes 0.5
    odd = ProcessConsistencyFilter(str(prm), 4, penalty=0.3)
    assert ids(odd.choose(group, scores)) == ["p/0", "p/1", "p/3", "p/4"]
    long = ProcessConsistencyFilter(str(prm), 4, penalty=1.0, long_steps=2)
    assert long.consistency([0.9, 0.9], True) == pytest.approx(-0.1)
    assert long.consistency([], False) == 1.0


def test_prof_fills_up_where_a_group_has_too_few_of_a_kind_and_takes_the_models_scores(prm: Path) -> None:
    chosen = ProcessConsistencyFilter(str(prm), 3)
    groups = [make_group([("ab", True), ("ba", False), ("a", False), ("bb", False)], "p"),
              make_group([("a", True), ("ab", True), ("abb", True), ("b", True)], "q")]  # fmt: skip
    found = chosen(groups)
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    means = [sum(row) / len(row) for row in score_trajectories(chosen.model, trajectories, pad_id=0)]
    assert len({round(mean, 4) for mean in means}) > 4
    best_wrong = sorted(sorted(range(1, 4), key=lambda k: means[k])[:2])
    assert ids(found[0]) == ["p/0", *(f"p/{k}" for k in best_wrong)]
    worst = min(range(4), key=lambda k: means[4 + k])
    assert ids(found[1]) == [f"q/{k}" for k in range(4) if k != worst]


class FirstTwo:
    """Keeps the first two of every group."""

    num_kept = 2

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        self.seen = list(groups)
        return [replace(group, rollouts=group.rollouts[:2], scores=group.scores[:2]) for group in groups]


def test_a_run_with_a_filter_trains_on_what_it_keeps_and_says_how_right_all_were(
    tiny_policy: Path, task: Any, tokenizer: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"num_iterations": 1, "evaluation_every": 0, "save_every": 0, "num_epochs": 1}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", filter={"num_kept": 2}, **settings)
    source: Any = trainer.rollout_source
    source.rollout_filter = FirstTwo()
    trainer.run()
    (row,) = read_metrics(tmp_path / "run")
    seen = [rollout.trajectory for group in source.rollout_filter.seen for rollout in group.rollouts]
    kept = [r.trajectory for group in source.rollout_filter.seen for r in group.rollouts[:2]]
    assert (len(seen), len(kept)) == (24, 12)
    assert row["rollout/drawn_tokens"] == sum(len(trajectory.response_ids) for trajectory in seen)
    assert row["rollout/tokens"] == sum(len(trajectory.response_ids) for trajectory in kept)
    assert row["rollout/unfiltered_accuracy"] == pytest.approx(sum(one.is_correct for one in seen) / 24, abs=1e-7)
    assert row["rollout/drawn_accuracy"] == row["rollout/unfiltered_accuracy"]  # no dynamic sampling before it
    assert row["rollout/accuracy"] == pytest.approx(sum(one.is_correct for one in kept) / 12, abs=1e-7)


def test_steps_of_an_iteration_are_those_of_the_rollouts_that_are_kept() -> None:
    config = root_config(RLConfig, rollout_num_problems=8, group_size=16, minibatch_size=32)
    assert steps_per_iteration(config) == 4
    assert steps_per_iteration(replace(config, filter={"num_kept": 4})) == 1


BLAMED = ["advantage=process_values", "advantage.form=first_error", "advantage.path=M"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["filter=prof", "filter.num_kept=8"],
            r"filter\.num_kept=8 must be at least 1 and below rollout\.group_size=8",
        ),
        (["advantage=pure"], r"PURE reads process rewards, and reward OutcomeReward has none"),
        (
            ["advantage=pure", "reward=process"],
            r"advantage PURE reads process rewards of the form minimum, and reward\.terms\.process\.form is progress: "
            r"set reward\.terms\.process\.form=minimum",
        ),
        (["advantage=pure", "reward=process_alone", "reward.path=M"], r"set reward\.form=minimum, or choose another"),
        (["advantage=process_grpo"], r"ProcessGRPO reads process rewards"),
        (["advantage=shared_prefixes", "reward=process"], r"SharedPrefixes values whole responses"),
        (
            ["reward=process", "reward.non_stop_reward=null"],
            r"min_tokens=2 is read beside reward\.non_stop_reward",
        ),
        (["advantage=grpo", "advantage.negative_weight=0.1", "update.whitening=standard"], r"whitening=scale or none"),
        ([*BLAMED, "reward=process"], r"keeps a model's scores out of what is paid, .* set reward=outcome"),
        ([*BLAMED, "update.whitening=standard"], r"shifts the advantages of 0 that advantage\.form=first_error gives"),
        (["advantage=gold_likelihood", "reward=process"], r"GoldLikelihood values whole responses"),
        (["advantage=gold_likelihood", "advantage.form=value", "reward.wrong=-1"], r"gives -1 to 1: choose another"),
    ],
)
def test_settings_of_filters_and_estimators_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    paths = ["filter.path=M"] if "filter=prof" in overrides else []
    paths += ["reward.terms.process.path=M"] if "reward=process" in overrides else []
    composed = compose_config(CONF, "rl", "model.path=M", "output_dir=D", *overrides, *paths)
    config: Any = OmegaConf.to_object(composed)
    with pytest.raises(BadConfig, match=message):
        check_combinations(config)


def test_pure_is_accepted_with_process_rewards_of_the_min_form_and_other_estimators_with_any() -> None:
    alone = ["reward=process_alone", "reward.path=M"]
    for overrides in (
        ["advantage=pure", *alone, "reward.form=minimum"],
        ["advantage=pure", "reward=process", "reward.terms.process.path=M", "reward.terms.process.form=minimum"],
        ["advantage=process_grpo", *alone],
        [*BLAMED, "update.whitening=scale"],
        ["advantage=grpo", "advantage.negative_weight=0.1"],
        ["reward=process", "reward.terms.process.path=M", "reward.non_stop_reward=null", "reward.min_tokens=0"],
    ):
        composed = compose_config(CONF, "rl", "model.path=M", "output_dir=D", *overrides)
        config: Any = OmegaConf.to_object(composed)
        check_combinations(config)


def test_further_estimators_are_compared_with_what_the_filter_keeps() -> None:
    config = root_config(RLConfig, group_size=4, filter={"num_kept": 1})
    check_kept(config, GAE(1.0, 1.0))
    with pytest.raises(BadConfig, match=r"filter\.num_kept must be at least 2, got 1: .* \(RLOO\)"):
        check_kept(config, RLOO())


def test_a_filters_settings_are_refused_when_it_is_built(prm: Path) -> None:
    with pytest.raises(BadInput, match=r"filter\.num_kept must be at least 1"):
        ProcessConsistencyFilter(str(prm), 0)
