"""Exact credit: the change of the true value in a step; what it cannot know is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import read_tokens, steps_on_tokens
from espalier.models.load import load_policy, load_tokenizer
from espalier.rewards.score import Score
from espalier.rl.advantages.exact import ExactAdvantage
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.experience import make_experience
from espalier.rl.types import Rollout, RolloutGroup
from espalier.sampling.client import SamplingParams
from espalier.sampling.requests import decode
from espalier.values.exact import state_values
from espalier.values.exact.merge_error import MergeError
from espalier.values.exact.state_values import ExactSettings, exact_values

LIMITS: dict[str, Any] = {"line_mass": 0.3, "state_mass": 0.2, "max_width": 4, "merges": True}
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=40, return_logprobs=True)
Case = tuple[Any, Any, list[RolloutGroup], Any]


@pytest.fixture
def case(tiny_policy: Path, task: WordArithmetic) -> Case:
    """A policy, its tokenizer, two rollouts of one problem, their tensors."""
    model, tokenizer = load_policy(str(tiny_policy), "eager"), load_tokenizer(str(tiny_policy))
    problem = task.problems("train")[0]
    prompt = tokenizer(task.prompt(problem)).input_ids
    rollouts = []
    for number, text in enumerate((f"buys: 1\n#### {problem.gold}", "one\ntwo\n#### -1")):
        ids = [*tokenizer(text).input_ids, 1]
        steps, ends = steps_on_tokens(task.split_steps(text), read_tokens(prompt, ids, decode(tokenizer)))
        is_right = number == 0
        trajectory = Trajectory(f"{problem.id}/{number}", problem.id, "", text, steps, prompt, ids, ends, "stop",
                                problem.gold, "", is_right)  # fmt: skip
        rollouts.append(Rollout(trajectory, [0.0] * len(ids), 0))
    groups = [RolloutGroup(problem, rollouts, [Score(1.0), Score(0.0)])]
    options: dict[str, Any] = {"pad_id": 0, "micro_batch_size": 2, "precision": "fp32", "temperature": 1.0}
    return model, tokenizer, groups, make_experience(groups, model, **options)[0]


def context_of(case: Case, task: Any, params: SamplingParams = PARAMS) -> EstimatorContext:
    sampler = SimpleNamespace(task=task, tokenizer=case[1])
    return SimpleNamespace(sampler=sampler, policy=case[0], params=params)  # type: ignore[return-value]


def test_a_step_is_credited_with_the_change_of_the_true_value(case: Case, task: WordArithmetic) -> None:
    model, tokenizer, groups, experience = case
    estimate = ExactAdvantage(**LIMITS, merge_pairs=0)(groups, experience, context_of(case, task))
    trajectories = [rollout.trajectory for rollout in groups[0].rollouts]
    problems = {groups[0].problem.id: groups[0].problem}
    truth = exact_values(model, tokenizer, task, problems, trajectories, ExactSettings(40, 1.0, **LIMITS)).values
    assert [len(row) for row in estimate.state_values] == [3, 4]
    for row, (trajectory, values) in enumerate(zip(trajectories, truth, strict=True)):
        credit = estimate.advantages[row][experience.response_mask[row]].tolist()
        mids = [value.mid for value in values]
        for step, (start, end) in enumerate(zip([0, *trajectory.step_ends], trajectory.step_ends, strict=False)):
            assert credit[start:end] == pytest.approx([mids[step + 1] - mids[step]] * (end - start), abs=1e-6)
        assert mids[-1] == float(trajectory.is_correct)
    assert estimate.returns is None


def test_the_network_is_left_in_the_mode_it_was_in(case: Case, task: WordArithmetic) -> None:
    model, _, groups, experience = case
    for is_training in (True, False):
        model.train(is_training)
        ExactAdvantage(**LIMITS, merge_pairs=0)(groups, experience, context_of(case, task))
        assert model.training == is_training


def test_what_is_not_known_exactly_is_refused(case: Case, task: WordArithmetic) -> None:
    groups, experience, estimator = case[2], case[3], ExactAdvantage(**LIMITS, merge_pairs=0)
    with pytest.raises(BadInput, match="other has no `position`"):
        estimator(groups, experience, context_of(case, SimpleNamespace(name="other")))
    for scores in ([Score(0.5), Score(0.0)], [Score(1.0, [0.0, 0.0]), Score(0.0)], [Score(0.0), Score(0.0)]):
        with pytest.raises(BadInput, match="set reward=outcome"):
            estimator([replace(groups[0], scores=scores)], experience, context_of(case, task))
    with pytest.raises(BadInput, match=r"set params\.stop"):
        estimator(groups, experience, context_of(case, task, replace(PARAMS, stop=["\n\n"])))


@pytest.mark.parametrize(("error", "num_warnings"), [(0.05, 0), (0.2, 1)])
def test_merged_prefixes_that_differ_are_warned_of(
    error: float,
    num_warnings: int,
    case: Case,
    task: WordArithmetic,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    measured = MergeError(1, error, error, 0.0)
    monkeypatch.setattr(state_values, "measure_merges", lambda *_: measured)
    estimate = ExactAdvantage(**LIMITS, merge_pairs=1)(case[2], case[3], context_of(case, task))
    assert estimate.metrics["merge_error"] == error
    assert caplog.text.count("set advantage.merges=false") == num_warnings
