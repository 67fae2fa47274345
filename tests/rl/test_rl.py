"""Reinforcement learning: advantages and losses by hand, masks, deliveries that are stale, exact resume."""

import asyncio
import copy
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_policy
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Score
from espalier.rl.advantages.grpo import GRPO, group_advantages
from espalier.rl.delivery import policy_weights, start_proof, weight_sync
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.start_proof import Reading, Scratch, read_answer
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.experience import RowScorer, logprob_gap, make_experience
from espalier.rl.group_scores import score
from espalier.rl.kl import divergence
from espalier.rl.losses import clipped_surrogate, clipped_tokens
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.probes.canary import ENOUGH_TOKENS, Canary, canary_scores, few_canaries, representatives
from espalier.rl.probes.checks import ProbeFailed
from espalier.rl.probes.watch import Watch
from espalier.rl.problem_order import draw_problems
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_checks import BadSampling, check_params
from espalier.rl.trainer import Trainer
from espalier.rl.types import Experience, Rollout, RolloutGroup
from espalier.rl.update import Update
from espalier.runtime.schemas import KLConfig, RLConfig
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.vllm_client import VLLMClient
from espalier.training.engine import TorchEngine, named_weights
from espalier.training.schedule import learning_rate
from tests.support.pass_logprobs import token_logprobs
from tests.support.rl_cases import (
    PARAMS,
    FakeClient,
    FakeEngine,
    StreamEnd,
    make_trainer,
    make_update,
    read_metrics,
)
from tests.support.root_config import root_config
from tests.support.slow import slow_unless

ROOT = Path(__file__).resolve().parent.parent.parent


def make_rollout(prompt_ids: list[int], response_ids: list[int], logprobs: list[float]) -> Rollout:
    trajectory = Trajectory(
        "p/0", "p", "", "", [], prompt_ids, response_ids, [], "stop", gold="1", answer="1", is_correct=True
    )
    return Rollout(trajectory, logprobs, policy_version=0)


def make_groups(rows: Sequence[tuple[list[int], list[int]]], rewards: Sequence[float]) -> list[RolloutGroup]:
    """Groups of two rollouts; the engine's log-probs are all -1."""
    rollouts = [make_rollout(prompt, response, [-1.0] * len(response)) for prompt, response in rows]
    return [
        RolloutGroup(Problem("p", "", "1"), rollouts[i : i + 2], [Score(x) for x in rewards[i : i + 2]])
        for i in range(0, len(rollouts), 2)
    ]


def make_sync(*engines: FakeEngine) -> WeightSync:
    sync = WeightSync(engines, precision="fp32")
    sync.canaries = [Canary(list(range(5, 25)), start=8), Canary(list(range(40, 70)), start=10)]
    return sync


def plain_update(model: Any, **changes: Any) -> Update:
    """Plain gradient descent at rate 1, unclipped: parameters move by exactly the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = TorchEngine(model, optimizer, torch.device("cpu"), max_grad_norm=1e9)
    settings: dict[str, Any] = {"precision": "fp32", "minibatch_size": 6, "micro_batch_size": 6, "learning_rate": 1.0}
    config = root_config(RLConfig, **{**settings, **changes})
    return make_update(engine, config)


NO_SAMPLER: EstimatorContext = None  # type: ignore[assignment]


def ragged_experience(model: Any, reference: Any = None) -> Experience:
    """Six rollouts of unequal length in three groups, the second of which agrees."""
    rows = [(list(range(5, 5 + 3 + i)), list(range(30, 30 + 2 * i + 1))) for i in range(6)]
    groups = make_groups(rows, rewards=[1, 0, 1, 1, 0, 1])
    how: dict[str, Any] = {"pad_id": 0, "micro_batch_size": 4, "precision": "fp32", "temperature": 1.0}
    experience, scorer = make_experience(groups, model, **how)
    experience.old.score()  # before the update moves this very model
    if reference is not None:
        experience = replace(experience, reference_logprobs=scorer.logprobs(reference, 1.0)[0])
    estimate = GRPO(divide_by_std=True)(groups, experience, NO_SAMPLER)
    return replace(experience, advantages=estimate.advantages, returns=estimate.returns)


def parameters_after(path: Path, micro_batch_size: int, micro_batch_tokens: int = 0) -> torch.Tensor:
    model = load_policy(str(path), "eager")
    sizes = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
    plain_update(model, **sizes)(ragged_experience(model), iteration=0)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_group_advantages_are_rewards_above_the_mean_in_standard_deviations() -> None:
    # mean 1/4; deviations 3/4, -1/4, -1/4, -1/4; sample variance (9 + 3)/16 / 3 = 1/4
    assert group_advantages([1, 0, 0, 0], divide_by_std=True) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_group_advantages_without_the_division_are_rewards_above_the_mean() -> None:
    assert group_advantages([1, 0, 0, 0], divide_by_std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_that_agrees_has_advantages_of_exactly_zero(divide_by_std: bool) -> None:
    assert group_advantages([0.3, 0.3, 0.1 + 0.2], divide_by_std) == [0.0, 0.0, 0.0]


def test_every_response_token_gets_its_rollouts_advantage_and_no_other_token_does(tiny_policy: Path) -> None:
    experience = ragged_experience(load_policy(str(tiny_policy)))
    assert experience.advantages is not None
    half = 0.5**0.5  # rewards 1 and 0: deviations +-1/2, sample std sqrt(1/2)
    expected = torch.tensor([half, -half, 0, 0, -half, half])[:, None] * experience.response_mask
    torch.testing.assert_close(experience.advantages, expected)


def test_clipped_surrogate_by_hand_on_two_tokens() -> None:
    # ratios 1.5 and 0.5; A = 2: min(3.0, 1.2 * 2) = 2.4 (cut); A = -1: min(-0.5, 0.8 * -1) = -0.8 (cut)
    old = torch.log(torch.tensor([[0.4, 0.6, 0.5]]))
    new = torch.log(torch.tensor([[0.6, 0.3, 0.9]]))
    advantages = torch.tensor([[2.0, -1.0, 7.0]])
    mask = torch.tensor([[True, True, False]])
    total, count = clipped_surrogate(new, old, advantages, mask, clip_low=0.2, clip_high=0.2)
    assert float(total) == pytest.approx(-(2.4 - 0.8))
    assert count == 2
    assert clipped_tokens(new, old, advantages, mask, clip_low=0.2, clip_high=0.2) == (2, 2)


def test_the_two_clip_widths_are_independent() -> None:
    # ratio 1.5 lies inside 1 + 0.6, ratio 0.5 lies inside 1 - 0.6: nothing is cut
    old = torch.log(torch.tensor([[0.4, 0.6]]))
    new = torch.log(torch.tensor([[0.6, 0.3]]))
    advantages, mask = torch.tensor([[2.0, -1.0]]), torch.tensor([[True, True]])
    assert float(clipped_surrogate(new, old, advantages, mask, 0.6, 0.6)[0]) == pytest.approx(-(3.0 - 0.5))
    assert float(clipped_surrogate(new, old, advantages, mask, 0.6, 0.2)[0]) == pytest.approx(-(2.4 - 0.5))
    assert float(clipped_surrogate(new, old, advantages, mask, 0.2, 0.6)[0]) == pytest.approx(-(3.0 - 0.8))


def test_the_clip_never_stops_a_ratio_that_moved_the_wrong_way() -> None:
    # ratio 0.5 with A = 2: min(1.0, 0.8 * 2) = 1.0, and its gradient stays
    old, new = torch.log(torch.tensor([[0.6]])), torch.log(torch.tensor([[0.3]])).requires_grad_()
    mask = torch.tensor([[True]])
    total, _ = clipped_surrogate(new, old, torch.tensor([[2.0]]), mask, 0.2, 0.2)
    (slope,) = torch.autograd.grad(total, new)
    assert float(total.detach()) == pytest.approx(-1.0)
    assert float(slope) == pytest.approx(-1.0)  # d(-ratio A)/d log pi = -ratio A
    assert clipped_tokens(new.detach(), old, torch.tensor([[2.0]]), mask, 0.2, 0.2) == (0, 1)


def test_k3_by_hand_on_two_tokens() -> None:
    # reference / policy = 2 and 1/2: (2 - ln 2 - 1) + (1/2 + ln 2 - 1) = 1/2
    policy = torch.log(torch.tensor([[0.2, 0.8, 0.1]]))
    reference = torch.log(torch.tensor([[0.4, 0.4, 0.9]]))
    assert float(divergence(policy, reference, "k3")[0, :2].sum()) == pytest.approx(0.5)


def test_experience_of_a_written_out_example_has_exact_masks(tiny_policy: Path) -> None:
    rollouts = [make_rollout([5, 6], [7, 1], [-0.1, -0.2]), make_rollout([5], [8, 9, 1], [-0.3, -0.4, -0.5])]
    model: Any = load_policy(str(tiny_policy), "eager")
    found, scorer = make_experience(
        [RolloutGroup(Problem("p", "", "1"), rollouts, [])], model,
        pad_id=0, micro_batch_size=1, precision="fp32", temperature=1.0,
    )  # fmt: skip
    assert found.ids.tolist() == [[5, 6, 7, 1], [5, 8, 9, 1]]
    assert found.response_mask.tolist() == [[False, False, True, True], [False, True, True, True]]
    torch.testing.assert_close(found.rollout_logprobs, torch.tensor([[0, 0, -0.1, -0.2], [0, -0.3, -0.4, -0.5]]))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=found.ids[:1]).logits[0], dim=-1)
    torch.testing.assert_close(found.old_logprobs[0], torch.stack(
        [torch.tensor(0.0), torch.tensor(0.0), logprobs[1, 7], logprobs[2, 1]]))  # fmt: skip
    torch.testing.assert_close(scorer.logprobs(model, 1.0)[0], found.old_logprobs)
    gaps = [abs(-0.1 - float(logprobs[1, 7])), abs(-0.2 - float(logprobs[2, 1]))]
    first_row = replace(found, response_mask=found.response_mask & torch.tensor([[True], [False]]))
    assert list(logprob_gap(first_row)) == pytest.approx([sum(gaps) / 2, max(gaps)])


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_an_update_does_not_depend_on_the_micro_batches(tiny_policy: Path, micro_batch_size: int) -> None:
    whole, cut = parameters_after(tiny_policy, 6), parameters_after(tiny_policy, micro_batch_size)
    torch.testing.assert_close(cut, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 30, 1000])
def test_an_update_does_not_depend_on_micro_batches_by_tokens(tiny_policy: Path, micro_batch_tokens: int) -> None:
    whole, cut = parameters_after(tiny_policy, 6), parameters_after(tiny_policy, 6, micro_batch_tokens)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-6)


def test_scores_do_not_depend_on_micro_batches_by_tokens(tiny_policy: Path) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    whole = ragged_experience(model)
    tensors = (whole.ids, whole.attention_mask, whole.response_mask)
    for tokens in (1, 25, 1000):
        logprobs, entropies = RowScorer(tensors, 4, "fp32", micro_batch_tokens=tokens).logprobs(model, 1.0)
        torch.testing.assert_close(logprobs, whole.old_logprobs, rtol=0, atol=2e-6)
        torch.testing.assert_close(entropies, whole.entropies, rtol=0, atol=2e-6)


def test_an_update_is_the_gradient_of_all_tokens_divided_by_their_number(tiny_policy: Path) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    experience = ragged_experience(model)
    assert experience.advantages is not None
    logits = model(input_ids=experience.ids, attention_mask=experience.attention_mask).logits
    logprobs = token_logprobs(logits, experience.ids.long())[0]
    # at ratio 1 the gradient of the surrogate is that of -A log pi; agreeing groups count as tokens
    loss = -(logprobs * experience.advantages[:, 1:]).sum() / experience.response_mask.sum()
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss, parameters)
    moved = torch.cat([(p - slope).detach().flatten() for p, slope in zip(parameters, slopes, strict=True)])
    torch.testing.assert_close(parameters_after(tiny_policy, 6), moved, rtol=0, atol=2e-6)


def test_a_kl_penalty_pulls_a_policy_back_to_its_reference(tiny_policy: Path) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    reference: Any = load_policy(str(tiny_policy), "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    experience = ragged_experience(model, reference)
    experience = replace(experience, advantages=torch.zeros(experience.ids.shape))
    update = plain_update(model, kl=KLConfig(coefficient=1.0), learning_rate=0.05)
    divergences = [update(experience, iteration)["kl_reference"] for iteration in range(5)]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.9 * divergences[0]


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_one_lucky_token_stops_no_update_however_few_tokens_count(tiny_policy: Path, num_epochs: int) -> None:
    """Five of six rollouts agree, the sixth has eleven tokens; one of them is a thousand times likelier than before."""
    model: Any = load_policy(str(tiny_policy), "eager")
    experience = ragged_experience(model)
    advantages = torch.zeros(experience.ids.shape)
    advantages[5] = experience.response_mask[5].float()
    old = experience.old_logprobs.clone()
    place = int(experience.response_mask[5].nonzero()[0])
    old[5, place] -= math.log(1000)
    experience = replace(experience, advantages=advantages, old=OldLogprobs(old, experience.entropies))
    update = plain_update(model, num_epochs=num_epochs, learning_rate=0.0)
    found = update(experience, iteration=0)
    assert found["kl_old"] == pytest.approx((1000 - 1 - math.log(1000)) / 11, rel=1e-3)  # once an epoch, as the others
    assert found["kl_luckiest"] == pytest.approx(found["kl_old"], rel=1e-5)
    watch = Watch(update.config, None, PARAMS, None)
    watch.check_update(found["kl_old"], found["kl_luckiest"])
    old[5, place + 1] -= math.log(1000)  # a second one is no luck
    found = update(experience, iteration=0)
    with pytest.raises(ProbeFailed, match="the KL from the policy before the update"):
        watch.check_update(found["kl_old"], found["kl_luckiest"])


def test_an_estimator_with_returns_is_refused_while_there_is_no_critic(tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy), "eager")
    experience = ragged_experience(model)
    with pytest.raises(ValueError, match="no critic"):
        plain_update(model)(replace(experience, returns=experience.advantages), iteration=0)


def test_the_learning_rate_warms_up_and_stays() -> None:
    rates = [learning_rate(step, peak=1.0, warmup_steps=4) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(0, peak=1.0, warmup_steps=0) == 1.0


def test_problems_are_distinct_and_depend_on_seed_and_iteration_alone(task: WordArithmetic) -> None:
    problems = task.problems("train")
    first = draw_problems(problems, 50, seed=1, iteration=3)
    assert draw_problems(problems, 50, seed=1, iteration=3) == first
    assert draw_problems(problems, 50, seed=1, iteration=4) != first
    assert len({problem.id for problem in first}) == 50
    with pytest.raises(BadInput, match="num_problems must be 1 to 200"):
        draw_problems(problems, 201, seed=1, iteration=3)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (replace(PARAMS, n=3), "params.n"),
        (replace(PARAMS, return_logprobs=False), "return_logprobs"),
        (replace(PARAMS, temperature=0.0), "temperature"),
        (replace(PARAMS, top_p=0.9), "top_p"),
    ],
)
def test_sampling_parameters_that_would_spoil_the_log_probs_are_refused(params: SamplingParams, word: str) -> None:
    with pytest.raises(BadSampling, match=word):
        check_params(params, group_size=4)


def test_rollouts_come_in_the_order_of_their_problems_with_bounded_requests(
    task: WordArithmetic, tokenizer: Any
) -> None:
    client = FakeClient(tokenizer)
    sampler = Sampler(client, task, tokenizer, concurrency=3, stall_seconds=60)
    problems = task.problems("train")[:10]
    groups = asyncio.run(sampler.rollout(problems, PARAMS, "rl-7", policy_version=7))
    assert [group.problem for group in groups] == problems
    assert client.num_most <= 3
    rollout = groups[2].rollouts[3]
    assert rollout.trajectory.id == f"rl-7/{problems[2].id}/3"
    assert rollout.policy_version == 7
    assert tokenizer.decode(rollout.trajectory.prompt_ids) == task.prompt(problems[2])
    assert tokenizer.decode(rollout.trajectory.response_ids[:-1]) == rollout.trajectory.response


def test_a_rollouts_reward_is_whether_its_answer_is_right(task: WordArithmetic, tokenizer: Any) -> None:
    sampler = Sampler(FakeClient(tokenizer), task, tokenizer, concurrency=8, stall_seconds=60)
    groups = asyncio.run(sampler.rollout(task.problems("train")[:20], PARAMS, "rl-0", 0))
    scored = score(groups, OutcomeReward(right=1.0, wrong=-1.0))
    pairs = [(r.trajectory, x) for group in scored for r, x in zip(group.rollouts, group.rewards, strict=True)]
    assert {reward for _, reward in pairs} == {1.0, -1.0}
    assert all((t.response == f"#### {t.gold}") == (reward == 1.0) for t, reward in pairs)


def test_a_prompt_the_sampler_refuses_is_named(task: WordArithmetic, tokenizer: Any) -> None:
    class Refusing(FakeClient):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            raise Refused("too long")

    sampler = Sampler(Refusing(tokenizer), task, tokenizer, concurrency=8, stall_seconds=60)
    with pytest.raises(BadInput, match="problem wa-train-0 cannot be sampled: too long"):
        asyncio.run(sampler.rollout(task.problems("train")[:1], PARAMS, "rl-0", 0))


def test_a_sampler_that_hangs_ends_the_run(task: WordArithmetic, tokenizer: Any) -> None:
    class Hanging(FakeClient):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            await asyncio.sleep(3600)
            raise AssertionError

    sampler = Sampler(Hanging(tokenizer), task, tokenizer, concurrency=8, stall_seconds=0.1)
    with pytest.raises(ServerGone, match="no answer for"):
        asyncio.run(sampler.rollout(task.problems("train")[:3], PARAMS, "rl-0", 0))


@pytest.mark.parametrize("is_working", [True, False])
def test_a_server_that_is_slow_is_asked_for_a_sign_of_life(
    is_working: bool, task: WordArithmetic, tokenizer: Any
) -> None:
    class Slow(VLLMClient):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            await asyncio.sleep(1.2)
            return await FakeClient(tokenizer).sample(request, params)

        async def is_working(self) -> bool:
            return is_working

    sampler = Sampler(Slow(), task, tokenizer, concurrency=8, stall_seconds=0.1)
    asked = sampler.rollout(task.problems("train")[:3], PARAMS, "rl-0", 0)
    if is_working:
        assert len(asyncio.run(asked)) == 3
    else:
        with pytest.raises(ServerGone, match="no answer for"):
            asyncio.run(asked)


def perturbed(path: Path, names: Sequence[str]) -> Any:
    """The policy with noise on the named weights."""
    model: Any = load_policy(str(path), "eager")
    with torch.no_grad():
        for name in names:
            value = model.state_dict()[name]
            value.add_(0.5 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_the_canary_is_quiet_when_the_engine_serves_the_new_weights(tiny_policy: Path) -> None:
    model = perturbed(tiny_policy, ["lm_head.weight", "model.embed_tokens.weight"])
    found = asyncio.run(make_sync(FakeEngine(tiny_policy)).sync(model, version=1))
    assert found["canary_gap_max"] < 1e-3


def test_the_canary_catches_a_stale_weight(tiny_policy: Path) -> None:
    model = perturbed(tiny_policy, ["lm_head.weight"])
    sync = make_sync(FakeEngine(tiny_policy, stale=["lm_head.weight"]))
    with pytest.raises(StaleWeights, match="does not serve policy version 3") as caught:
        asyncio.run(sync.sync(model, version=3))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("stale_number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_stale_engine_of_several_is_caught(
    stale_number: int, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []

    def scratch_copy(*arguments: Any) -> Scratch:
        tokens.append(arguments[-1])
        return start_proof.scratch_copy(*arguments)

    monkeypatch.setattr(weight_sync, "scratch_copy", scratch_copy)
    model = perturbed(tiny_policy, ["lm_head.weight"])
    stale = [["lm_head.weight"] if number == stale_number else [] for number in range(2)]
    engines = [FakeEngine(tiny_policy, stale=names) for names in stale]
    for number, engine in enumerate(engines):
        engine.name = f"engine {number}"
    sync = make_sync(*engines)
    with pytest.raises(StaleWeights, match=f"engine {stale_number} does not serve policy version 3"):
        asyncio.run(sync.sync(model, version=3))
    told = rf"delivery does not reach the whole engine \(engine {stale_number}\)"
    with pytest.raises(StaleWeights, match=told):
        asyncio.run(sync.prove_delivery(model))
    assert tokens == [ENOUGH_TOKENS, *[sys.maxsize] * 5], "what few refuse, all are asked of"
    whole = make_sync(FakeEngine(tiny_policy), FakeEngine(tiny_policy))
    assert asyncio.run(whole.sync(model, version=3))["canary_gap"] < 1e-3
    asyncio.run(whole.prove_delivery(model))


def test_few_rollouts_are_held_against_few_canaries() -> None:
    long, short = [[Canary([0] * (5 + number), 5)] * 8 for number in (100, 10)]
    assert [len(few_canaries(long, number)) for number in (4, 16, 24, 64, 512)] == [2, 2, 3, 8, 8]
    assert len(few_canaries(short, 16)) == 8, "all of them have 80 tokens"
    assert len(few_canaries([Canary([0] * 45, 5)] * 8, 16)) == 4, "with 128 tokens at least"
    assert few_canaries(long[:1], 16) == long[:1]


def test_the_start_is_proven_on_all_canaries_and_a_delivery_on_few(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.rl.probes.canary.ENOUGH_TOKENS", 1)
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", num_iterations=1)
    sync, asked = trainer.delivery.sync, list[tuple[str, int]]()
    for name in ("prove_delivery", "sync", "prove"):
        call = getattr(sync, name)

        async def noted(*arguments: Any, name: str = name, call: Any = call) -> Any:
            asked.append((name, len(sync.canaries)))
            return await call(*arguments)

        monkeypatch.setattr(sync, name, noted)
    trainer.run()
    assert asked[:2] == [("prove_delivery", 8), ("sync", 3)], "an iteration has 24 rollouts"
    assert {number for _, number in asked[1:]} == {3}


def test_the_canary_catches_an_engine_that_answers_nan(tiny_policy: Path) -> None:
    class Broken(FakeEngine):
        async def prompt_logprobs(self, ids: list[int]) -> list[float]:
            return [float("nan")] * (len(ids) - 1)

    with pytest.raises(StaleWeights):
        asyncio.run(make_sync(Broken(tiny_policy)).sync(load_policy(str(tiny_policy)), version=1))


@pytest.mark.parametrize(("more", "steps"), [
    ({"save_every": 1, "evaluation_every": 0}, []),
    pytest.param({"save_every": 0, "evaluation_every": 1}, [0], marks=pytest.mark.slow),
    pytest.param({"save_every": 0, "evaluation_every": 0}, [1], marks=pytest.mark.slow),
], ids=["before a checkpoint", "before an evaluation", "beside the next rollouts"])  # fmt: skip
def test_a_delivery_that_cannot_be_proven_ends_the_run_before_anything_comes_of_it(
    more: dict[str, int], steps: list[int], tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    class Breaking(FakeEngine):
        num_loads = 0

        async def load(self, key: str, number: int) -> None:
            await super().load(key, number)
            self.num_loads += 1

        async def prompt_logprobs(self, ids: list[int]) -> list[float]:
            found = await super().prompt_logprobs(ids)
            return [value - 1.0 for value in found] if self.num_loads > num_at_start else found

    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **more)
    engine = Breaking(tiny_policy)
    trainer.delivery.sync.engines = [engine]
    num_at_start = 3  # the canaries' policy, the scratch copy of the proof, version 0
    with pytest.raises(StaleWeights, match="does not serve policy version 1"):
        trainer.run()
    assert engine.num_loads == num_at_start + 1
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert [row["step"] for row in (read_metrics(tmp_path / "run") if metrics.is_file() else [])] == steps
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_delivery_is_proven_for_every_parameter_at_once(tiny_policy: Path) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = asyncio.run(make_sync(FakeEngine(tiny_policy)).prove_delivery(model))
    assert found["error"] < 1e-4 < 5e-3 < found["nearest_stale"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_perturbations_that_prove_nothing_are_followed_by_others_and_said(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By chance an answer lies on one of some forty ways; of what is stale it does so every time."""
    caplog.set_level("INFO")
    readings: list[Reading] = []

    def doubted(*given: Any) -> Reading:
        reading = read_answer(*given)
        readings.append(replace(reading, doubt=2.0) if len(readings) < num_doubted else reading)
        return readings[-1]

    monkeypatch.setattr(weight_sync, "read_answer", doubted)
    model = load_policy(str(tiny_policy), "eager")
    num_doubted = 5
    asyncio.run(make_sync(FakeEngine(tiny_policy)).prove_delivery(model))
    assert len(readings) == 6
    assert caplog.text.count("proves nothing: ") == 5
    readings.clear()
    num_doubted = 6
    with pytest.raises((StaleWeights, ProbeFailed)):
        asyncio.run(make_sync(FakeEngine(tiny_policy)).prove_delivery(model))


@pytest.mark.parametrize(
    "name",
    slow_unless(
        lambda name: name in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight"),
        [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.norm.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.1.mlp.down_proj.weight",
        ],
    ),
)
def test_a_parameter_that_delivery_does_not_reach_is_named_at_start_up(tiny_policy: Path, name: str) -> None:
    sync = make_sync(FakeEngine(tiny_policy, stale=[name]))
    with pytest.raises(StaleWeights, match=f"from a stale {name}"):
        asyncio.run(sync.prove_delivery(load_policy(str(tiny_policy), "eager")))


class Noisy(FakeEngine):
    """Rounds, as an engine of a wide and deep network does: by more than one parameter of a layer moves a token."""

    SIZE = 0.05

    def __init__(self, path: Path, stale: Sequence[str] = ()):
        super().__init__(path, stale)
        self.draws = torch.Generator().manual_seed(5)

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        found = torch.tensor(await super().prompt_logprobs(ids))
        noisy: list[float] = (found + self.SIZE * torch.randn(found.shape, generator=self.draws)).tolist()
        return noisy


def test_delivery_is_proven_where_rounding_hides_what_one_parameter_does_to_a_token(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    draws, scores = torch.Generator().manual_seed(6), policy_weights.HeldWeights.scores

    def rounded_scores(self: Any, canaries: Any, precision: str, dtype: torch.dtype | None = None) -> Any:
        found = scores(self, canaries, precision)
        noise = Noisy.SIZE * torch.randn(found.logprobs.shape, generator=draws)
        return found if dtype is None else found._replace(logprobs=found.logprobs + noise)

    monkeypatch.setattr(policy_weights.HeldWeights, "scores", rounded_scores)
    canaries = [Canary(torch.randint(5, 200, (90,), generator=draws).tolist(), start=10) for _ in range(4)]

    def sync_with(stale: Sequence[str]) -> WeightSync:
        sync = make_sync(Noisy(tiny_policy, stale))
        sync.canaries = canaries
        return sync

    found = asyncio.run(sync_with([]).prove_delivery(model))
    assert found["error"] < Noisy.SIZE
    assert found["nearest_stale"] < 6 * Noisy.SIZE, "one token alone would not show it"
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(StaleWeights, match=f"from a stale {name}"):
        asyncio.run(sync_with([name]).prove_delivery(model))


@pytest.mark.slow
def test_the_proof_of_a_deep_network_costs_as_many_passes_as_that_of_a_shallow_one(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_policy(str(tiny_policy)).config
    passes: dict[int, int] = {}
    for depth in (3, 12):
        config.num_hidden_layers = depth
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        engine = FakeEngine(tiny_policy)
        engine.model = copy.deepcopy(model).eval()
        passes[depth] = 0

        def counted(*arguments: Any, depth: int = depth) -> Any:
            passes[depth] += 1
            return canary_scores(*arguments)

        monkeypatch.setattr(policy_weights, "canary_scores", counted)
        asyncio.run(make_sync(engine).prove_delivery(model))
    assert passes[12] <= 2 * passes[3]  # doubled perturbations apart they are as many
    stale = "model.layers.6.mlp.down_proj.weight"
    assert len(representatives(model.state_dict())[stale]) == 4
    engine = FakeEngine(tiny_policy, stale=[stale])
    engine.model = copy.deepcopy(model).eval()
    with pytest.raises(StaleWeights, match=f"from a stale {stale}"):
        asyncio.run(make_sync(engine).prove_delivery(model))


def test_one_parameter_of_a_kind_in_each_third_of_the_layers_stands_for_the_others() -> None:
    names = ["embed", *(f"layers.{k}.{part}" for k in range(8) for part in "qk"), "norm"]
    found = representatives(names)
    assert list(found) == ["embed", *(f"layers.{k}.{part}" for part in "qk" for k in (1, 3, 6)), "norm"]
    assert sorted(name for group in found.values() for name in group) == sorted(names)


def test_a_tied_head_is_delivered_under_its_own_name() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]

    class Keeping(StreamEnd):
        async def load(self, key: str, number: int) -> None:
            self.found = await self.received()

        async def prompt_logprobs(self, ids: list[int]) -> list[float]:
            return []

    engine = Keeping()
    asyncio.run(WeightSync(engine).deliver(named_weights(model)))
    assert torch.equal(engine.found["lm_head.weight"], model.model.embed_tokens.weight)
    assert set(engine.found) == {"lm_head.weight"} | {name for name, _ in model.named_parameters()}


def test_a_run_that_is_stopped_and_resumed_ends_with_equal_parameters(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    def make(folder: str, dies_at: str = "") -> Trainer:
        return make_trainer(tiny_policy, task, tokenizer, tmp_path / folder, dies_at, num_iterations=4)

    whole = make("whole")
    whole.run()
    with pytest.raises(ServerGone):
        make("cut", dies_at="rl-3").run()
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-00000002"]
    resumed = make("cut")
    resumed.run()
    resumed.save_model()
    for name, value in whole.policy.engine.model.state_dict().items():
        assert torch.equal(value, resumed.policy.engine.model.state_dict()[name]), name
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    assert [row["step"] for row in read_metrics(tmp_path / "whole")] == [0, 1, 2, 2, 3, 4, 4]
    first: Any = load_policy(str(tiny_policy))
    assert not torch.equal(first.lm_head.weight, whole.policy.engine.model.lm_head.weight)
    saved: Any = load_policy(str(tmp_path / "cut" / "model"))
    assert torch.equal(saved.lm_head.weight, whole.policy.engine.model.lm_head.weight)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("name", ["grpo", "ppo", "vineppo", "remax", "prime"])
def test_two_iterations_against_a_real_server_leave_a_model_and_no_process(
    name: str, tiny_policy: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, str(ROOT / "main.py"), "-cn", f"exp/ppo/{name}_word_arithmetic"]
    command += [f"model.path={tiny_policy}", f"output_dir={run_dir}", "num_iterations=2", "rollout.num_problems=8"]
    command += [
        "kl.coefficient=0.01",
        "update.num_epochs=2",
        "update.minibatch_size=32",
        "evaluation.every=1",
        "evaluation.num_problems=8",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "delivery reaches all" in done.stderr
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 1, 2, 2]
    assert all(0 <= row["engine/canary_gap"] < 0.1 for row in rows if "rollout/reward" in row)
    assert (run_dir / "model" / "model.safetensors").is_file()
    assert (run_dir / "critic" / "model.safetensors").is_file() == (name == "ppo")
    assert (run_dir / "implicit_reward" / "model.safetensors").is_file() == (name == "prime")
    assert ("estimate/num_completions" in rows[1]) == (name == "vineppo")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tiny_policy) not in listed
