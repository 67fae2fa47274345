"""Rewards: records in and one score each out, in an order that is written down; no cut misaligns them."""

import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.training_layout import TrainingLayout, write_training_layout
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.composed import ComposedReward, compose
from espalier.rewards.format import FormatReward
from espalier.rewards.length import LengthPenalty
from espalier.rewards.model_forecasts import TextScorer
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.rewards.process import ProcessReward, minimum_weights, step_reward_range, step_rewards
from espalier.rewards.score import Reward, Score, ScoreRange, scores_of
from espalier.rl.advantages.process_values import ProcessValueAdvantage
from espalier.rl.combinations import reward_range
from espalier.rl.rollout_filters import ProcessConsistencyFilter


def make_trajectory(name: str, response: str, num_tokens: int, is_correct: bool, finish: str = "stop") -> Trajectory:
    """Lines are steps; the tokens are shared out evenly, the last step takes the rest."""
    steps = response.splitlines(keepends=True)
    ends = [(index + 1) * num_tokens // len(steps) for index in range(len(steps))]
    ids = [5 + (index * 7 + len(name)) % 200 for index in range(num_tokens)]
    return Trajectory(name, "p", "?", response, steps, [3, 4], ids, ends, finish, "1", "1", is_correct)


RIGHT = make_trajectory("a", "one\ntwo\n#### 3", 9, True)
CUT = make_trajectory("bb", "one\ntwo\nth", 12, False, finish="length")
WRONG = make_trajectory("ccc", "one\n#### 4", 4, False)


def test_the_outcome_is_how_the_trajectory_was_graded() -> None:
    assert [score.total for score in OutcomeReward(2.0, -1.0)([RIGHT, CUT, WRONG])] == [2.0, -1.0, -1.0]


@pytest.mark.parametrize("limit", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("offset", [0.0, 0.5, 1.0, -0.5])
@pytest.mark.parametrize("form", ["score", "progress", "minimum"])
def test_the_range_of_process_rewards_holds_every_sum_to_come(form: str, offset: float, limit: float) -> None:
    low, high = step_reward_range(form, offset, limit)
    rng = random.Random(0)
    sums = []
    for _ in range(300):
        scores = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(rng.randint(1, 8))]
        rewards = step_rewards(scores, form, offset, 0.1)
        if limit > 0:
            rewards = [min(max(value, -limit), limit) for value in rewards]
        sums += [sum(rewards[first:]) for first in range(len(rewards))]
    assert low - 1e-9 <= min(sums) <= max(sums) <= high + 1e-9
    if limit == 0:  # and no wider than it has to be
        for bound, found in ((low, min(sums)), (high, max(sums))):
            assert math.isinf(bound) or found == pytest.approx(bound, abs=0.05)


def test_a_part_that_two_terms_have_is_kept_for_both() -> None:
    """One part over the other would show the metrics of the last term alone."""
    scores = {"first": Score(1.0, parts={"verifier": 0.9}), "second": Score(0.5, parts={"verifier": 0.2, "votes": 3.0})}
    assert compose(scores, {"first": 1.0, "second": 2.0}).parts == {
        "verifier": 0.9, "second_verifier": 0.2, "votes": 3.0
    }  # fmt: skip


def test_the_range_of_a_reward_is_read_from_its_config() -> None:
    def node(target: str, **settings: object) -> dict[str, object]:
        return {"_target_": target, **settings}

    outcome = node("espalier.rewards.outcome.OutcomeReward", right=1.0, wrong=-1.0)
    form = node("espalier.rewards.format.FormatReward", pattern=".*", bad=-0.5)
    length = node("espalier.rewards.length.LengthPenalty", free_tokens=1, max_tokens=2, worst=-2.0)
    model = node("espalier.rewards.outcome_model.OutcomeModelReward", path="M")
    process = node("espalier.rewards.process.ProcessReward", path="M")  # progress against 0.5
    anything, nothing = (-math.inf, math.inf), None
    assert reward_range(outcome) == ScoreRange((-1.0, 1.0), nothing)
    assert reward_range(form) == ScoreRange((-0.5, 1.0), nothing)
    assert reward_range(length) == ScoreRange((-2.0, 0.0), nothing)
    assert reward_range(model) == ScoreRange(anything, nothing)
    assert reward_range({**model, "limit": 4.0}) == ScoreRange((-4.0, 4.0), nothing)
    assert reward_range({**model, "form": "probability"}) == ScoreRange((0.0, 1.0), nothing)
    assert reward_range(process) == ScoreRange((0.0, 0.0), (-1.0, 1.0))

    def composed(terms: dict[str, object], **settings: object) -> ScoreRange | None:
        return reward_range(node("espalier.rewards.composed.ComposedReward", terms=terms, **settings))

    terms: dict[str, object] = {"outcome": outcome, "form": form, "process": process}
    weights = {"outcome": 2.0, "form": -1.0}
    assert composed(terms, weights=weights) == ScoreRange((-3.0, 2.5), (-1.0, 1.0))
    assert composed(terms, weights=weights, limit=1.5) == ScoreRange((-1.5, 1.5), (-1.0, 1.0))
    found = composed(terms, weights=weights, limit=1.5, non_stop_reward=-10.0)
    assert found == ScoreRange((-10.0, 1.5), (-1.0, 1.0))
    assert found.total == (-11.0, 2.5)
    assert composed({"outcome": outcome, "model": model}, weights={"model": 0.0}) == ScoreRange((-1.0, 1.0), nothing)
    strange = node("espalier.rewards.aggregate.aggregate", scores=[], how="min")  # says nothing of its range
    assert composed({"outcome": outcome, "strange": strange}) is None


def test_the_format_is_of_the_whole_response() -> None:
    found = FormatReward(r".*#### -?\d+\s*", good=1.0, bad=-0.5)([RIGHT, CUT, WRONG])
    assert [score.outcome for score in found] == [1.0, -0.5, 1.0]
    with pytest.raises(BadInput, match="no regular expression"):
        FormatReward("(")


def test_the_length_penalty_begins_before_the_end_and_grows_to_its_worst() -> None:
    found = LengthPenalty(free_tokens=8, max_tokens=12, worst=-2.0)([RIGHT, CUT, WRONG])
    assert [score.outcome for score in found] == [-0.5, -2.0, 0.0]
    with pytest.raises(BadInput, match="free_tokens < max_tokens"):
        LengthPenalty(free_tokens=8, max_tokens=8)


def test_forms_of_process_rewards_by_hand() -> None:
    scores = [0.75, 0.25, 0.5]
    assert step_rewards(scores, "score", 0.5, 1.0) == [0.25, -0.25, 0.0]
    assert step_rewards(scores, "progress", 0.5, 1.0) == [0.25, -0.5, 0.25]
    assert sum(step_rewards(scores, "progress", 0.5, 1.0)) == pytest.approx(scores[-1] - 0.5)
    assert minimum_weights(scores, 0.001) == pytest.approx([0.0, 1.0, 0.0])
    assert step_rewards(scores, "minimum", 0.0, 0.001) == pytest.approx([0.0, 0.25, 0.0])
    assert sum(minimum_weights(scores, 0.3)) == pytest.approx(1.0)


class Steps:
    """1, 2, 3 ... for the steps, and 10 for the whole."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(10.0, [float(i + 1) for i in range(len(t.steps))], {"steps": 1.0}) for t in trajectories]


def test_the_order_of_composition_is_weigh_sum_clip_replace() -> None:
    terms: dict[str, Reward] = {"outcome": OutcomeReward(), "steps": Steps()}
    reward = ComposedReward(terms, {"steps": 0.5, "outcome": 3.0}, limit=6.0, non_stop_reward=-10.0)
    right, cut, wrong = reward([RIGHT, CUT, WRONG])
    assert right.outcome == 6.0  # 3 * 1 + 0.5 * 10 = 8, clipped
    assert right.steps == [0.5, 1.0, 1.5]
    assert wrong.outcome == 5.0
    # a response without an end is worth exactly the penalty, whatever its steps said
    assert (cut.total, cut.outcome, cut.steps) == (-10.0, -10.0, [0.0, 0.0, 0.0])
    assert right.parts == {"outcome": 1.0, "steps": 1.0, "stopped": 1.0}


def test_a_weight_of_no_term_is_refused() -> None:
    with pytest.raises(BadInput, match=r"reward\.weights\.proces has no term"):
        ComposedReward({"outcome": OutcomeReward()}, {"proces": 1.0})


@pytest.fixture(scope="module")
def reward_model(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of one label whose head says something."""
    model = load_process_reward(str(tiny_policy), 1)
    torch.manual_seed(0)
    for parameter in model.get_submodule("score").parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    path = tmp_path_factory.mktemp("reward") / "model"
    model.save_pretrained(path)
    load_tokenizer(str(tiny_policy)).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", [OutcomeModelReward, ProcessReward])
def test_models_score_a_record_alike_in_whatever_batch(kind: type, reward_model: Path) -> None:
    rows = [replace(RIGHT, id=f"{i}", response_ids=[(5 + i + j) % 300 for j in range(9 + i)]) for i in range(7)]
    rows = [replace(row, step_ends=[3, 6, len(row.response_ids)]) for row in rows]
    together = kind(str(reward_model), batch_tokens=100_000)(rows)
    alone = kind(str(reward_model), batch_tokens=1)(rows)
    assert [score.total for score in together] == pytest.approx([score.total for score in alone], abs=0.02)
    assert len({round(score.total, 3) for score in alone}) > 3  # else an order could not be seen
    mixed = kind(str(reward_model), batch_tokens=40)(rows[::-1])
    assert [score.total for score in mixed[::-1]] == pytest.approx([score.total for score in alone], abs=0.02)


def test_an_outcome_model_is_read_at_the_last_token(reward_model: Path) -> None:
    model = load_process_reward(str(reward_model))
    ids = torch.tensor([[*WRONG.prompt_ids, *WRONG.response_ids]])
    with torch.no_grad():
        logit = float(model(input_ids=ids).logits[0, -1, 0])
    found = OutcomeModelReward(str(reward_model))([WRONG])[0].outcome
    assert found == pytest.approx(logit, abs=0.02)  # scored in bfloat16
    share = OutcomeModelReward(str(reward_model), form="probability")([WRONG])[0].outcome
    assert share == pytest.approx(1 / (1 + torch.tensor(-logit).exp().item()), abs=0.01)
    assert OutcomeModelReward(str(reward_model), limit=0.001)([WRONG])[0].outcome in (0.001, -0.001)


def test_what_a_reward_model_cannot_do_is_told(tiny_policy: Path, tmp_path: Path) -> None:
    load_process_reward(str(tiny_policy), 3).save_pretrained(tmp_path / "classes")
    with pytest.raises(BadInput, match="form=probability"):
        OutcomeModelReward(str(tmp_path / "classes"))
    with pytest.raises(BadInput, match="one of score, progress, minimum"):
        ProcessReward(str(tmp_path / "classes"), form="sum")


def of_layout(model: Path, folder: Path, scores: str, prompts: str = "text") -> str:
    """A copy of a model whose folder says how it was trained to read."""
    shutil.copytree(model, folder)
    write_training_layout(folder, TrainingLayout(scores, prompts))
    return str(folder)


@pytest.mark.parametrize("kind", [
    ProcessReward,
    ProcessValueAdvantage,
    lambda path: ProcessConsistencyFilter(path, 2),
    lambda path: ProcessReward(path, engines=object()),
])  # fmt: skip
def test_an_outcome_model_is_not_read_after_every_step(kind: Any, reward_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="was trained on responses and not on steps"):
        kind(of_layout(reward_model, tmp_path / "outcome", "responses"))
    kind(of_layout(reward_model, tmp_path / "process", "steps"))


def test_the_last_step_of_a_process_reward_model_is_taken_where_it_is_asked_for(
    reward_model: Path, tmp_path: Path
) -> None:
    path = of_layout(reward_model, tmp_path / "process", "steps")
    for kind in (OutcomeModelReward, lambda path: TextScorer(path, 100, "auto")):
        with pytest.raises(BadInput, match=r"was trained on steps and not on responses.*reward=process"):
            kind(path)
    (score,) = OutcomeModelReward(path, form="probability", takes_last_step=True)([WRONG])
    (steps,) = ProcessReward(path, form="score", offset=0.0)([WRONG])
    assert score.outcome == pytest.approx(steps.steps[-1], abs=1e-5)


def test_two_models_of_one_kind_are_two_networks(reward_model: Path, tmp_path: Path) -> None:
    """Each has its tokenizer compared with the policy's."""
    other = of_layout(reward_model, tmp_path / "other", "responses")
    reward = ComposedReward({"one": OutcomeModelReward(str(reward_model)), "two": OutcomeModelReward(other)})
    folders = [network.config.name_or_path for network in reward.networks().values()]
    assert folders == [str(reward_model), other]


@pytest.mark.parametrize("kind", [OutcomeModelReward, ProcessReward])
def test_prompts_unlike_those_of_training_are_named_once(
    kind: Any, reward_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = "responses" if kind is OutcomeModelReward else "steps"
    for prompts, number in (("chat", 1), ("text", 0), ("both", 0)):
        path = of_layout(reward_model, tmp_path / prompts, ends, prompts)
        caplog.clear()
        reward = kind(path)
        reward([RIGHT, WRONG])
        reward([WRONG])
        said = "was trained on prompts that are turns of a chat template, and the policy's are plain text"
        assert caplog.text.count(said) == number


def test_a_response_that_is_too_short_counts_as_one_that_did_not_end() -> None:
    reward = ComposedReward({"outcome": OutcomeReward(10.0, 0.0)}, non_stop_reward=-10.0, min_tokens=9)
    right, cut, wrong = reward([RIGHT, CUT, WRONG])  # 9, 12 and 4 tokens, the end token included
    assert [score.total for score in (right, cut, wrong)] == [10.0, -10.0, -10.0]
    assert [score.parts["stopped"] for score in (right, cut, wrong)] == [1.0, 0.0, 0.0]
    assert wrong.parts["outcome"] == 0.0
    (short,) = ComposedReward({"outcome": OutcomeReward()}, non_stop_reward=-10.0, min_tokens=10)([RIGHT])
    assert short.total == -10.0
    with pytest.raises(BadInput, match=r"min_tokens=3 is read beside reward\.non_stop_reward alone"):
        ComposedReward({"outcome": OutcomeReward()}, min_tokens=3)


def test_a_reward_that_gives_no_record_for_each_trajectory_is_told_what_to_return() -> None:
    class Numbers:
        def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
            return [1.0 for _ in trajectories]

    class OneShort:
        def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
            return [Score(1.0) for _ in trajectories[1:]]

    rows = [Trajectory(str(one), "p", "", "", [], [], [], [], "stop", "1", None, False) for one in range(3)]
    for wrong, said in (
        (Numbers(), r"Numbers must return a list of one .*Score\(outcome, steps\) for each .*, got 1.0"),
        (OneShort(), r"OneShort must return a list of one .*, got 2 for 3"),
        (lambda given: [None] * len(given), "got None"),
        (lambda given: (Score(1.0) for _ in given), "got <generator"),
        (lambda given: [Score(1.0)] * 6, "got 6 for 3"),
    ):
        with pytest.raises(BadInput, match=said):
            scores_of(rows, wrong)
        with pytest.raises(BadInput, match=said):
            scores_of(rows, ComposedReward({"own": wrong, "outcome": OutcomeReward()}, {"own": 1.0, "outcome": 1.0}))
