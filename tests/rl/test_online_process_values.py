"""A process reward model that is trained along: its targets, its loss, what it values, and that it comes back."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.scalar_head import load_critic, load_process_reward
from espalier.rewards.score import Score
from espalier.rl.advantages.online_process_values import FORMS, OnlineProcessValueAdvantage
from espalier.rl.critic import Critic, critic_values
from espalier.rl.learner import UpdateSums
from espalier.rl.losses import check_value_loss, cross_entropy_loss, value_loss
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.types import Experience
from espalier.runtime.schemas import CriticConfig
from espalier.sampling.client import ServerGone
from espalier.training.engine import TorchEngine
from espalier.training.sums import Sums
from tests.rl.test_advantages import Enumerated, make_experience, make_group
from tests.support.rl_cases import critic_of, make_trainer, read_metrics

LIKELIHOOD: dict[str, Any] = {"form": "probability", "loss": "cross_entropy", "clip_range": 0.0}


def a_context(policy_version: int = 0) -> Any:
    """Words of three letters a or b, right with at least two b: V(a) = 1/4, V(b) = 3/4, V(ba) = 1/2."""
    context: Any = Enumerated("ab", 3, lambda word: word.count("b") >= 2)
    context.policy_version, context.asker = policy_version, ""
    return context


# Three rollouts of a problem, a letter per step behind a prompt of one token: the value behind k letters stands in
# column 1 + k, and the inner states are those behind one and behind two letters.
GROUP = make_group([("abb", True), ("aab", False), ("bab", True)])
SCORES = [[0.5, 0.4], [0.5, 0.9], [0.7, 0.45]]


def scored_experience(groups: Any, scores: list[list[float]]) -> Experience:
    experience = make_experience(groups)
    values = torch.full(experience.response_mask.shape, 9.0)  # of which nothing else may be read
    values[:, 2:4] = torch.tensor(scores)
    return replace(experience, values=values)


def test_steps_are_credited_by_the_models_values_and_the_outcome() -> None:
    estimator = OnlineProcessValueAdvantage("value", completions_per_refresh=0)
    found = estimator([GROUP], scored_experience([GROUP], SCORES), a_context())
    # V_0 is the mean reward of the others: (0 + 1) / 2, (1 + 1) / 2, (1 + 0) / 2; the end token is of the last step
    assert found.advantages[0].tolist() == pytest.approx([0.0, 0.0, -0.1, 0.6, 0.6])
    assert found.advantages[1].tolist() == pytest.approx([0.0, -0.5, 0.4, -0.9, -0.9])
    assert found.advantages[2].tolist() == pytest.approx([0.0, 0.2, -0.25, 0.55, 0.55])
    assert found.state_values[0] == [0.5, 0.5, pytest.approx(0.4), 1.0]
    # squares: 0.25 + 0.36, 0.25 + 0.81, 0.09 + 0.3025
    assert found.metrics == {"step_score": pytest.approx(3.45 / 6), "brier": pytest.approx(2.0625 / 6)}
    # PAV: the reward above the others' mean, and the change of the score; that of the prompt is (0.5 + 0.5 + 0.7) / 3
    progress = OnlineProcessValueAdvantage(weight=2.0, completions_per_refresh=0)
    found = progress([GROUP], scored_experience([GROUP], SCORES), a_context())
    assert found.advantages[0, 1:4].tolist() == pytest.approx([0.5 + 2 * (0.5 - 1.7 / 3), 0.5 - 0.2, 0.5 + 1.2])


def test_values_that_leave_the_outcome_to_the_last_step_are_said_where_it_alone_would_pay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # before the last step 0.4 and 0.45 of right, 0.9 of wrong rollouts: 1.4725 where the rewards' own squares are 2 / 3
    groups = [GROUP] * 22
    experience = scored_experience(groups, SCORES * 22)
    for form in FORMS:
        OnlineProcessValueAdvantage(form, completions_per_refresh=0)(groups, experience, a_context())
    (record,) = (one for one in caplog.records if "the last step" in one.message)
    assert "that is 221 % of the variance of rewards" in record.message


def test_targets_are_the_means_of_outcomes_and_completions_and_count_as_often() -> None:
    context = a_context()
    estimator = OnlineProcessValueAdvantage(completions_per_refresh=11, completions_per_state=4)
    found = estimator([GROUP], scored_experience([GROUP], SCORES), context)
    # 11 // 4 = 2 states, those nearest 1/2: a (0.5; two rollouts share it), ba (0.45)
    assert context.asked == [("a", 4), ("ba", 4)]
    assert found.returns is not None
    assert found.return_weights is not None
    # a: the outcome 1 and 1 of 4 right; ba: the outcome 1 and 2 of 4; all others their outcome alone
    assert found.returns[:, 2:4].tolist() == [pytest.approx(row) for row in ([2 / 5, 1.0], [0.0, 0.0], [1.0, 3 / 5])]
    assert found.return_weights[:, 2:4].tolist() == [[5.0, 1.0], [1.0, 1.0], [1.0, 5.0]]
    assert float(found.return_weights.sum()) == 14.0
    assert float(found.returns.sum()) == pytest.approx(3.0)
    assert found.metrics["completed_error"] == pytest.approx((0.25 + 0.05) / 2)
    assert found.metrics["num_completions"] == 8.0

    later = estimator([GROUP], scored_experience([GROUP], SCORES), a_context(3))
    assert later.metrics["num_completions"] == 8.0
    rare = OnlineProcessValueAdvantage(completions_per_refresh=8, refresh_every=2)
    context = a_context(3)
    without = rare([GROUP], scored_experience([GROUP], SCORES), context)
    assert context.asked == []
    assert without.returns is not None
    assert without.returns[:, 2:4].tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert without.return_weights is not None
    assert float(without.return_weights.sum()) == 6.0


def test_states_of_groups_that_disagree_are_completed_first_where_that_is_asked_for() -> None:
    agreeing = make_group([("bba", True), ("bbb", True)], problem="q")
    disagreeing = make_group([("aab", False), ("abb", True)], problem="p")
    experience = scored_experience([agreeing, disagreeing], [[0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.9, 0.2]])
    for states, asked in (("uncertain", ["b", "bb"]), ("disagreeing", ["ab", "a"])):  # 0.3 and 0.4 away from 1/2
        context = a_context()
        OnlineProcessValueAdvantage(completions_per_refresh=8, states=states)(
            [agreeing, disagreeing], experience, context
        )
        assert [prefix for prefix, _ in context.asked] == asked


def test_the_cross_entropy_of_a_mean_is_the_likelihood_of_every_sample() -> None:
    logits, targets, weights = (
        torch.tensor([[0.3, -1.2, 5.0]]),
        torch.tensor([[0.6, 1.0, 0.0]]),
        torch.tensor([[5.0, 1, 0]]),
    )
    probs = [1 / (1 + math.exp(-value)) for value in (0.3, -1.2)]
    expected = -3 * math.log(probs[0]) - 2 * math.log(1 - probs[0]) - math.log(probs[1])  # 3 of 5 right, and 1 of 1
    mask = torch.tensor([[True, True, False]])
    assert float(cross_entropy_loss(logits, targets, mask, weights)) == pytest.approx(expected, rel=1e-6)
    plain = -0.6 * math.log(probs[0]) - 0.4 * math.log(1 - probs[0]) - math.log(probs[1])
    assert float(cross_entropy_loss(logits, targets, mask)) == pytest.approx(plain, rel=1e-6)
    # squared: 5 x 1/2 x 0.3^2 and 1/2 x 2.2^2
    total, _, tokens = value_loss(logits, logits, targets, mask, 0.0, weights)
    assert float(total) == pytest.approx(0.225 + 2.42)
    assert tokens == 2
    # a clip that decides the first token decides five of the six outcomes
    old = logits + torch.tensor([[5.0, 0.0, 0.0]])
    assert value_loss(logits, old, targets, mask, 0.2, weights)[1:] == (5.0, 2)
    assert value_loss(logits, old, targets, mask, 0.2)[1:] == (1.0, 2)


def targets_of_four() -> Experience:
    """Four rollouts of 3 prompt tokens and 5 others; states behind some, none in the last."""
    ids = torch.randint(5, 300, (4, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) >= 3).expand(4, 8)
    zeros = torch.zeros(4, 8)
    returns, weights = zeros.clone(), zeros.clone()
    for place, target, weight in (((0, 4), 0.25, 4.0), ((0, 6), 1.0, 1.0), ((1, 5), 0.0, 1.0), ((2, 7), 0.8, 5.0)):
        returns[place], weights[place] = target, weight
    old = OldLogprobs(zeros, zeros)
    return Experience(
        ids, torch.ones_like(ids), mask, zeros, old, values=zeros, returns=returns, return_weights=weights
    )


def fit(
    model: Any, optimizer: Any, config: CriticConfig, micro_batch_size: int, num_steps: int
) -> list[dict[str, float]]:
    critic = Critic(
        TorchEngine(model, optimizer, torch.device("cpu"), 1e9), config, "fp32", micro_batch_size, num_steps
    )
    found = []
    for number in range(num_steps):
        sums = Sums()
        critic.step(targets_of_four(), torch.arange(4), number, sums)
        found.append(sums.means())
    return found


def flat(values: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in values])


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_a_step_is_the_gradient_of_the_weighted_loss_over_states(loss: str, tiny_policy: Path) -> None:
    torch.manual_seed(0)
    model: Any = load_critic(str(tiny_policy), "policy", "eager")
    experience = targets_of_four()
    weights, returns = experience.return_weights, experience.returns
    assert weights is not None
    assert returns is not None
    logits = model(input_ids=experience.ids, attention_mask=experience.attention_mask).logits[:, :-1, 0]
    probs = torch.sigmoid(logits)  # column t is read before token t + 1
    w, r = weights[:, 1:], returns[:, 1:]
    each = {"cross_entropy": -r * probs.log() - (1 - r) * (1 - probs).log(), "squared": 0.5 * (probs - r).square()}
    total = (w * each[loss]).sum() / w.sum()
    expected = flat(model.parameters()) - flat(torch.autograd.grad(total, list(model.parameters())))
    for size in (1, 4):
        torch.manual_seed(0)
        stepped: Any = load_critic(str(tiny_policy), "policy", "eager")
        config = CriticConfig(form="probability", loss=loss, clip_range=0.0, learning_rate=1.0)
        (means,) = fit(stepped, torch.optim.SGD(stepped.parameters(), lr=1.0), config, size, 1)
        assert means["value_loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        torch.testing.assert_close(flat(stepped.parameters()), expected, rtol=0, atol=1e-5)


def test_the_loss_falls_to_the_targets_own_entropy(tiny_policy: Path) -> None:
    torch.manual_seed(0)
    model: Any = load_critic(str(tiny_policy), "policy", "eager")
    adam, config = torch.optim.AdamW(model.parameters(), lr=3e-3), CriticConfig(learning_rate=3e-3, **LIKELIHOOD)
    losses = [row["value_loss"] for row in fit(model, adam, config, 4, 60)]
    entropy = sum(w * -(r * math.log(r) + (1 - r) * math.log(1 - r)) for w, r in ((4, 0.25), (5, 0.8))) / 11
    assert entropy < losses[-1] < entropy + 0.3 * (losses[0] - entropy)


def test_losses_that_do_not_fit_are_refused() -> None:
    check_value_loss("squared", "linear", 0.2)
    check_value_loss("cross_entropy", "probability", 0.0)
    for loss, form, clip, words in (
        ("likelihood", "probability", 0.0, "critic.loss must be one of squared, cross_entropy, got 'likelihood'"),
        ("cross_entropy", "linear", 0.0, "critic.form=linear: set critic.form=probability"),
        ("cross_entropy", "probability", 0.2, "has no clip, and critic.clip_range=0.2: set critic.clip_range=0"),
    ):
        with pytest.raises(BadInput, match=words):
            check_value_loss(loss, form, clip)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"form": "minimum"}, "form must be one of value, progress"),
        ({"states": "all"}, "states must be one of uncertain, disagreeing"),
        ({"refresh_every": 0}, "refresh_every must be at least 1"),
        ({"completions_per_refresh": 3}, r"at least completions_per_state \(4\), got 3"),
    ]
    for changes, words in refused:
        with pytest.raises(BadInput, match=words):
            OnlineProcessValueAdvantage(**changes)
    by_steps = replace(GROUP, scores=[Score(1.0, [0.1, 0.2, 0.3]) for _ in GROUP.rollouts])
    with pytest.raises(BadInput, match="without process terms"):
        OnlineProcessValueAdvantage()([by_steps], scored_experience([GROUP], SCORES), a_context())


def test_a_minibatch_without_states_leaves_the_model_alone(tiny_policy: Path) -> None:
    torch.manual_seed(0)
    model: Any = load_critic(str(tiny_policy), "policy", "eager")
    engine = TorchEngine(model, torch.optim.AdamW(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    before = flat(model.parameters())
    sums = UpdateSums(torch.ones(4, 8, dtype=torch.bool))
    Critic(engine, CriticConfig(**LIKELIHOOD), "fp32", 4, 1).step(targets_of_four(), torch.tensor([3]), 0, sums)
    assert torch.equal(flat(model.parameters()), before)
    assert sums.means()["value_grad_norm"] == 0.0


def test_a_run_is_resumed_bit_for_bit_and_its_model_is_a_process_reward_model(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    def make(folder: str, dies_at: str = "") -> Any:
        estimator = OnlineProcessValueAdvantage(completions_per_refresh=6, completions_per_state=3, refresh_every=2)
        critic = CriticConfig(learning_rate=3e-3, warmup_steps=2, schedule="linear", **LIKELIHOOD)
        return make_trainer(
            tiny_policy, task, tokenizer, tmp_path / folder, dies_at, estimator, num_lines=2, critic=critic,
            num_iterations=3, num_epochs=1, evaluation_every=0, save_every=2,
        )  # fmt: skip

    whole = make("whole")
    whole.run()
    with pytest.raises(ServerGone):
        make("cut", dies_at="rl-2").run()
    resumed = make("cut")
    resumed.run()
    for of in (lambda trainer: trainer.policy.engine.model, lambda trainer: critic_of(trainer).engine.model):
        assert torch.equal(flat(of(whole).parameters()), flat(of(resumed).parameters()))
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole")
    assert [row.get("estimate/num_completions") for row in rows] == [6.0, None, 6.0]
    assert all(row["update/value_grad_norm"] > 0 for row in rows)
    assert rows[-1]["update/value_learning_rate"] < 3e-3
    assert rows[-1]["estimate/brier"] < rows[0]["estimate/brier"]  # nearly no answer of this sampler is right
    whole.save_model()
    saved: Any = load_process_reward(str(tmp_path / "whole" / "critic"))
    ids = torch.randint(5, 300, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        score = torch.sigmoid(saved.eval()(input_ids=ids).logits[:, :-1, 0])  # at every token
        value = critic_values(critic_of(whole).engine.model.eval(), ids, torch.ones_like(ids), "probability")[:, 1:]
    torch.testing.assert_close(score, value, rtol=1e-4, atol=1e-5)
