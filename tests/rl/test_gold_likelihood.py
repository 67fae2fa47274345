"""The likelihood of the gold answer as value: against the network's own logits, row by row."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput, Problem
from espalier.models.load import load_policy, load_tokenizer
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Score
from espalier.rl.advantages.gold_likelihood import GoldLikelihood
from espalier.rl.credit.answer_tokens import answer_tokens
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.iteration_metrics import Clock
from espalier.rl.rollout import Sampler
from espalier.rl.types import RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import SamplingParams
from espalier.sampling.requests import decode
from tests.rl.test_advantages import make_experience, make_group

PARAMS = SamplingParams(n=3, temperature=0.7, max_tokens=40, return_logprobs=True)


@pytest.fixture(scope="module")
def context(tiny_policy: Path) -> EstimatorContext:
    """The tiny policy, spread so that its answers differ, and nobody who samples."""
    torch.manual_seed(0)
    policy = load_policy(str(tiny_policy), "eager")
    for parameter in policy.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    nobody: Any = None
    sampler = Sampler(nobody, nobody, load_tokenizer(str(tiny_policy)), concurrency=1, stall_seconds=1)
    return EstimatorContext(BackgroundLoop(), sampler, OutcomeReward(), PARAMS, 0, Clock(), policy, micro_batch_size=2)


def logprob(context: EstimatorContext, prefix: Sequence[int], rest: Sequence[int]) -> float:
    """One row alone, in float64 behind the logits."""
    with torch.no_grad():
        logits = context.policy(input_ids=torch.tensor([[*prefix, *rest]])).logits[0].double()
    logs = torch.log_softmax(logits / PARAMS.temperature, dim=-1)
    return sum(float(logs[len(prefix) + i - 1, token]) for i, token in enumerate(rest))


def written(context: EstimatorContext, gold: Any, rows: Sequence[tuple[list[str], bool]]) -> RolloutGroup:
    """A group whose steps are texts, in the tokens of the policy."""
    tokenizer = context.sampler.tokenizer
    group = make_group([("a", right) for _, right in rows], prompt_ids=tokenizer("How many?\n").input_ids)
    rollouts = []
    for rollout, (steps, _) in zip(group.rollouts, rows, strict=True):
        pieces = [tokenizer(step).input_ids for step in steps]
        ids = [token for piece in pieces for token in piece] + [tokenizer.eos_token_id]
        ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
        changed = replace(rollout.trajectory, steps=steps, response="".join(steps), response_ids=ids,
                          step_ends=[*ends[:-1], len(ids)])  # fmt: skip
        rollouts.append(replace(rollout, trajectory=changed, logprobs=[-1.0] * len(ids)))
    return replace(group, problem=Problem("p", "?", gold), rollouts=rollouts)


def first_tokens(group: RolloutGroup, found: torch.Tensor) -> list[list[float]]:
    """The advantage at the first token of every step."""
    rows = []
    for rollout, row in zip(group.rollouts, found, strict=True):
        trajectory = rollout.trajectory
        starts = [0, *trajectory.step_ends[:-1]][: len(trajectory.steps)]
        rows.append([float(row[len(trajectory.prompt_ids) + start]) for start in starts])
    return rows


def test_log_probs_of_continuations_are_those_of_each_row_alone(context: EstimatorContext) -> None:
    prefixes, rests = [[5, 6, 7], [5, 6], [9], [5, 6, 7]], [[8, 9], [7], [4, 4, 4], [8, 9]]
    found = context.continuation_logprobs(prefixes, rests)
    expected = [logprob(context, *pair) for pair in zip(prefixes, rests, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[0] == found[3]
    assert context.continuation_logprobs([], []) == []
    with pytest.raises(ValueError, match="is empty"):
        context.continuation_logprobs([[1], []], [[2], [3]])


def test_an_answers_tokens_are_given_up_to_the_gold_answer_and_counted_from_there(context: EstimatorContext) -> None:
    tokenizer = context.sampler.tokenizer
    read = decode(tokenizer)
    (found,) = answer_tokens(Problem("p", "?", "12"), "#### {gold}", tokenizer, read, counts_end=True)
    assert read(found.given + found.counted[:-1]) == "#### 12"
    assert len(read(found.given)) <= len("#### ")
    assert found.counted[-1] == tokenizer.eos_token_id
    first, second = answer_tokens(Problem("p", "?", ["7", "8"]), "({gold})", tokenizer, read, counts_end=False)
    assert (read(first.given + first.counted), read(second.given + second.counted)) == ("(7)", "(8)")
    assert read(first.counted).endswith("7)")
    with pytest.raises(BadInput, match="'p' has no gold answer"):
        answer_tokens(Problem("p", "?", ""), "{gold}", tokenizer, read, counts_end=False)


@pytest.mark.parametrize("per_token", [False, True])
def test_values_are_the_policys_probability_of_the_gold_answer_after_each_step(
    per_token: bool, context: EstimatorContext
) -> None:
    rows = [(["1 + 1 = 2\n", "2 + 3 = 5\n", "#### 5"], True), (["1 + 1 = 3\n", "#### 3"], False)]
    group = written(context, "5", rows)
    (answer,) = answer_tokens(group.problem, "#### {gold}", context.sampler.tokenizer, context.decode, counts_end=True)

    def value(row: int, step: int) -> float:
        trajectory = group.rollouts[row].trajectory
        prefix = trajectory.prompt_ids + trajectory.response_ids[: [0, *trajectory.step_ends][step]]
        total = logprob(context, prefix + answer.given, answer.counted)
        return float(torch.tensor(total / (len(answer.counted) if per_token else 1)).exp())

    known = [[value(0, k) for k in range(3)], [value(1, k) for k in range(2)]]
    distinct = [known[0][0], known[0][1], known[0][2], known[1][1]]
    assert len({round(math.log(number), 3) for number in distinct}) == 4
    largest = max(distinct)
    experience = make_experience([group])
    progress = GoldLikelihood("#### {gold}", weight=1 / largest, per_token=per_token)([group], experience, context)
    assert progress.state_values[0] == pytest.approx([*known[0], 1.0], rel=1e-3)
    assert progress.state_values[1] == pytest.approx([*known[1], 0.0], rel=1e-3)
    steps = first_tokens(group, progress.advantages)
    first, second, third = (number / largest for number in known[0])
    assert steps[0] == pytest.approx([1 + second - first, 1 + third - second, 1.0], abs=1e-3)
    assert steps[1] == pytest.approx([-1 + (known[1][1] - known[1][0]) / largest, -1.0], abs=1e-3)
    as_value = GoldLikelihood("#### {gold}", form="value", per_token=per_token)([group], experience, context)
    changes = [after - before for before, after in pairwise([*known[0], 1.0])]
    assert first_tokens(group, as_value.advantages)[0] == pytest.approx(changes, rel=1e-2)


def test_the_likeliest_of_several_gold_answers_counts(context: EstimatorContext) -> None:
    rows = [(["1 + 1 = 2\n", "#### 5"], True), (["1 + 1 = 3\n", "#### 3"], False)]
    estimator = GoldLikelihood("#### {gold}")
    groups = [written(context, gold, rows) for gold in ("5", "7", ["5", "7"])]
    first, second, both = (estimator.state_values([group], context) for group in groups)
    best = [[max(pair) for pair in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)]
    assert [value for row in both for value in row] == pytest.approx([value for row in best for value in row], rel=1e-4)


def test_states_without_room_and_responses_without_steps_have_no_value(context: EstimatorContext) -> None:
    rows = [(["1 + 1 = 2\n", "2 + 3 = 5\n", "#### 5"], True), ([""], False), ([""], False)]
    group = written(context, "5", rows)
    end, nothing = group.rollouts[1].trajectory, group.rollouts[2].trajectory
    end = replace(end, steps=[], step_ends=[])
    nothing = replace(nothing, steps=[], step_ends=[], response_ids=[], finish_reason="length")
    rollouts = [group.rollouts[0], replace(group.rollouts[1], trajectory=end),
                replace(group.rollouts[2], trajectory=nothing, logprobs=[])]  # fmt: skip
    group = replace(group, rollouts=rollouts)
    first = group.rollouts[0].trajectory.step_ends[0]
    (answer,) = answer_tokens(group.problem, "#### {gold}", context.sampler.tokenizer, context.decode, counts_end=True)
    short = replace(context, params=replace(PARAMS, max_tokens=first + len(answer)))  # the second state still fits
    for form, last in (("progress", 1.0), ("value", 0.0)):
        found = GoldLikelihood("#### {gold}", form=form)([group], make_experience([group]), short)
        values = found.state_values[0]
        assert values[2:] == [1.0, 1.0]
        assert found.state_values[2] == [0.0]
        steps = first_tokens(group, found.advantages)[0]
        second = 1.0 if form == "progress" else 1.0 - values[1]
        assert steps[1:] == pytest.approx([second, last], abs=1e-5)


def test_what_the_likelihood_of_an_answer_cannot_value_is_refused(context: EstimatorContext) -> None:
    group = written(context, "5", [(["a\n", "#### 5"], True), (["b\n", "#### 3"], False)])
    with pytest.raises(BadInput, match=r"answer_template must hold \{gold\} once"):
        GoldLikelihood("####")
    with pytest.raises(BadInput, match=r"advantage\.form must be one of progress, value"):
        GoldLikelihood("{gold}", form="minimum")
    negative = replace(group, scores=[Score(1.0), Score(-1.0)])
    with pytest.raises(BadInput, match=r"these are -1 to 1"):
        GoldLikelihood("{gold}", form="value")([negative], make_experience([negative]), context)
    processed = replace(group, scores=[Score(1.0, [0.1, 0.2]), Score(0.0, [0.1, 0.2])])
    with pytest.raises(BadInput, match="without process terms"):
        GoldLikelihood("{gold}")([processed], make_experience([processed]), context)
