"""The critic: where it begins, what it may see, what it learns, and that it comes back bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import BadModel, load_policy, load_tokenizer
from espalier.models.packing_check import packs_rows
from espalier.models.scalar_head import load_critic, load_process_reward
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.rl import trainer_from_config
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.combinations import check_critic_range, critic_normaliser, values_are_scaled, warn_of_other_units
from espalier.rl.critic import Critic, check_returns, critic_values, describe_values
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.row_shares import micro_batches
from espalier.rl.trainer_from_config import check_parts, check_vocabulary
from espalier.rl.types import Estimate, Experience
from espalier.runtime.entrypoint import BadConfig, compose_config
from espalier.runtime.schemas import CriticConfig, KLConfig, RLConfig
from espalier.sampling.client import ServerGone
from espalier.training.engine import BadCheckpoint, TorchEngine
from espalier.training.piece_files import PieceReader
from espalier.training.sums import Sums
from tests.support.rl_cases import PARAMS, critic_of, make_trainer, read_metrics
from tests.support.root_config import root_config


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_fresh_head_has_the_policys_body_and_the_right_spread(tiny_policy: Path) -> None:
    critic = load_critic(str(tiny_policy), "policy")
    head = critic.get_parameter("score.weight")
    assert head.shape == (1, 64)
    assert float(head.detach().std()) == pytest.approx(65**-0.5, rel=0.35)  # 64 draws
    assert float(critic.get_parameter("score.bias").detach()) == 0.0
    body: Any = load_policy(str(tiny_policy))
    assert torch.equal(critic.get_parameter("model.norm.weight"), body.model.norm.weight)
    assert torch.equal(critic.get_parameter("model.embed_tokens.weight"), body.model.embed_tokens.weight)


def test_a_critic_from_a_reward_model_is_that_model(tiny_policy: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = load_critic(str(tiny_policy), "policy")
    trained.save_pretrained(tmp_path / "reward")
    for source in ("auto", "reward_model"):
        assert torch.equal(weights(load_critic(str(tmp_path / "reward"), source)), weights(trained))


def test_a_critic_from_scratch_takes_the_sizes_alone(tiny_policy: Path) -> None:
    scratch, body = load_critic(str(tiny_policy), "scratch"), load_critic(str(tiny_policy), "policy")
    assert packs_rows(scratch)
    assert packs_rows(body)
    names = [name for name, value in body.named_parameters() if "norm" not in name and "bias" not in name]
    assert [name for name, _ in scratch.named_parameters()] == [name for name, _ in body.named_parameters()]
    assert not any(torch.equal(scratch.get_parameter(name), body.get_parameter(name)) for name in names)


def test_a_critic_of_the_wrong_folder_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="is no reward model"):
        load_critic(str(tiny_policy), "reward_model")
    load_process_reward(str(tiny_policy), 3).save_pretrained(tmp_path / "classes")
    with pytest.raises(BadModel, match="has 3 labels"):
        load_critic(str(tmp_path / "classes"))


def test_a_value_does_not_see_the_token_it_is_the_baseline_of(tiny_policy: Path) -> None:
    critic = load_critic(str(tiny_policy), "policy", "eager").eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    other = torch.tensor([[5, 6, 7, 99, 9]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        first, second = critic_values(critic, ids, mask, "linear"), critic_values(critic, other, mask, "linear")
        shares = critic_values(critic, ids, mask, "probability")
    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.equal(first[:, 4], second[:, 4])
    torch.testing.assert_close(shares[:, 1:], torch.sigmoid(first[:, 1:]))


def make_experience() -> Experience:
    lengths = [(3, 4), (5, 1), (2, 7), (4, 2)]
    total = max(sum(row) for row in lengths)
    ids = torch.randint(5, 300, (4, total), generator=torch.Generator().manual_seed(0))
    places = torch.arange(total)
    attention = torch.stack([places < a + b for a, b in lengths]).long()
    mask = torch.stack([(places >= a) & (places < a + b) for a, b in lengths])
    zeros = torch.zeros(4, total)
    return Experience(ids, attention, mask, zeros, OldLogprobs(zeros, zeros), values=zeros, returns=mask.float())


def test_nothing_is_said_of_the_variance_that_a_critic_explains_where_there_is_none() -> None:
    experience = make_experience()
    same = replace(experience, rewards=torch.zeros_like(experience.values))  # all returns are 1
    assert "explained_variance" not in describe_values(same)
    returns = torch.arange(experience.ids.numel()).view_as(experience.ids).float()
    assert describe_values(replace(same, returns=returns))["explained_variance"] == pytest.approx(0.0)


def step_once(tiny_policy: Path, size: int, tokens: int = 0) -> tuple[Any, dict[str, float]]:
    torch.manual_seed(0)
    model = load_critic(str(tiny_policy), "policy", "eager")
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    sums = Sums()
    critic = Critic(engine, CriticConfig(clip_range=0.0, learning_rate=1.0), "fp32", size, 1, tokens)
    critic.step(make_experience(), torch.arange(4), 0, sums)
    return model, sums.means()


def test_a_critics_step_is_the_gradient_of_the_mean_squared_error_over_tokens(tiny_policy: Path) -> None:
    torch.manual_seed(0)
    model: Any = load_critic(str(tiny_policy), "policy", "eager")
    experience = make_experience()
    padded = model(input_ids=experience.ids, attention_mask=experience.attention_mask).logits[:, :-1, 0]
    values = padded[experience.response_mask[:, 1:]]  # not packed, and the last layer in full
    loss = 0.5 * (values - 1).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    expected = weights(model) - torch.cat([slope.flatten() for slope in slopes])
    for size, tokens in ((1, 0), (3, 0), (4, 0), (4, 1), (1, 22)):
        stepped, means = step_once(tiny_policy, size, tokens)
        torch.testing.assert_close(weights(stepped), expected, rtol=0, atol=5e-6)
        assert means["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_rollouts_of_a_problem_stay_together_where_rows_are_packed() -> None:
    lengths = torch.tensor([9, 3, 8, 4, 7, 5])
    attention_mask = (torch.arange(9) < lengths[:, None]).long()
    rows = torch.tensor([5, 0, 3, 1, 4])
    cuts = [(cut.tolist(), length) for cut, length in micro_batches(attention_mask, rows, 2, is_packed=True)]
    assert cuts == [([0, 1], 9), ([3, 4], 7), ([5], 5)]
    cuts = [(cut.tolist(), length) for cut, length in micro_batches(attention_mask, rows, 2, is_packed=False)]
    assert cuts == [([1, 3], 4), ([5, 4], 7), ([0], 9)]


def node(target: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": target, **settings}


PPO = node("espalier.rl.advantages.gae.GAE", gamma=1.0, lam=0.95)
VINE = node("espalier.rl.advantages.vineppo.VinePPO", completions_per_state=2)
RLOO = node("espalier.rl.advantages.rloo.RLOO")
TREE = node("espalier.rl.advantages.tree.TreeAdvantage")
SPO = node("espalier.rl.advantages.spo.SPO", completions_per_state=2, masks_other_tokens=True)
PRM_VALUES = node("espalier.rl.advantages.process_values.ProcessValueAdvantage", path="PRM", form="value")
OUTCOME = node("espalier.rewards.outcome.OutcomeReward")
SIGNED = node("espalier.rewards.outcome.OutcomeReward", right=1.0, wrong=-1.0)
SCORES = node("espalier.rewards.process.ProcessReward", path="PRM", form="score", offset=0.0, limit=5.0)
BOTH = node("espalier.rewards.composed.ComposedReward", weights={"process": 0.5},
            terms={"outcome": OUTCOME, "process": {**SCORES, "form": "progress"}})  # fmt: skip
KL_IN_REWARD = KLConfig(coefficient=0.1, kind="k1", place="reward")


def settings(**changes: Any) -> RLConfig:
    return root_config(RLConfig, **{"advantage": RLOO, "reward": OUTCOME, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage": PPO}, "needs a critic"),
        ({"critic": CriticConfig()}, "trained for nothing"),
        ({"advantage": VINE, "kl": KL_IN_REWARD}, r"set kl\.place=loss"),
        ({"advantage": VINE, "reward": SCORES}, "VinePPO values whole responses, and reward ProcessReward"),
        ({"advantage": SPO, "reward": BOTH}, "SPO values whole responses, and reward ComposedReward"),
        ({"advantage": SPO, "whitening": "standard"}, r"update.whitening=standard .*advantage\.masks_other_tokens"),
        ({"advantage": {**VINE, "completes_agreeing_groups": False}, "group_size": 1}, "completes_agreeing_groups"),
        (
            {"advantage": {**VINE, "completes_agreeing_groups": False}, "whitening": "standard"},
            r"whitening=standard shifts .* advantage\.completes_agreeing_groups=false",
        ),
        ({"whitens_rewards": True}, r"RLOO compares sums over responses, .* length would count"),
        (
            {"estimators": {"rloo": RLOO}, "advantage": PPO, "critic": CriticConfig(), "whitens_rewards": True},
            r"one scale, and update\.whitens_rewards changes",
        ),
        (
            {"advantage": TREE, "branches": [2, 2], "kl": KLConfig(coefficient=0.1, kind="k3", target=6.0)},
            r"kl\.target=6 is of whole responses",
        ),
        ({"advantage": PRM_VALUES, "reward": SIGNED}, "advantage.form=value .* OutcomeReward gives -1 to 1"),
        ({"dynamic_sampling_rounds": 1, "group_size": 1}, "rollout.dynamic_sampling_rounds=1 .* rollout.group_size=1"),
        ({"patience": 2}, "evaluation.patience=2 .* evaluation.every=0"),
        ({"keep_best": 1}, "checkpoints.keep_best=1 .* evaluation.every=0"),
        ({"evaluation_metric": "ece"}, "evaluation.metric must be one of accuracy, reward, got 'ece'"),
        ({"evaluation_every": 1, "evaluation_num_problems": 0}, "evaluation.num_problems must be at least 1"),
        ({"minibatch_size": 0}, "minibatch_size must be at least 1, got 0"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"micro_batch_tokens": -1}, "micro_batch_tokens must be at least 0"),
        ({"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
        ({"precision": "fp16"}, "precision must be auto, bf16 or fp32"),
        ({"whitening": "black"}, "whitening must be one of"),
        ({"advantage": PPO, "critic": CriticConfig(num_warmup_iterations=10)}, "num_iterations=10 leaves the policy"),
        ({"reward": node("espalier.rewards.outcome.OutcomeReward", rihgt=2.0)}, "has no setting 'rihgt'"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        check_parts(settings(**changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"kl": KL_IN_REWARD}, {"advantage": VINE}, {"advantage": PRM_VALUES}, {"whitening": "standard"},
     {"advantage": {**PRM_VALUES, "form": "progress"}, "reward": SIGNED}, {"advantage": SPO, "whitening": "scale"},
     {"advantage": PPO, "critic": CriticConfig(), "reward": BOTH, "kl": KL_IN_REWARD}],
)  # fmt: skip
def test_parts_that_fit_are_not_refused(changes: dict[str, Any]) -> None:
    check_parts(settings(**changes))


@pytest.mark.parametrize("source", ["reward_model", "auto"])
def test_a_critic_that_begins_as_a_normalised_reward_model_says_the_normalised_scores(
    source: str, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.models.precision.has_fast_bf16", lambda device_type: False)
    torch.manual_seed(1)
    model = load_critic(str(tiny_policy), "policy")
    torch.nn.init.constant_(model.get_parameter("score.bias"), 0.3)
    model.save_pretrained(tmp_path / "reward")
    load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path / "reward")
    path, scale = str(tmp_path / "reward"), tmp_path / "scale.json"
    scale.write_text('{"reward": {"mean": 0.7, "std": 2.5}}')
    begins = node("espalier.models.scalar_head.load_critic", path=path, source=source, attention="eager")
    term = node("espalier.rewards.outcome_model.OutcomeModelReward", path=path, normaliser=str(scale))
    reward = node("espalier.rewards.composed.ComposedReward", terms={"outcome": OUTCOME, "outcome_model": term})
    given = CriticConfig(model=begins, optimizer=node("torch.optim.AdamW"))
    critic = trainer_from_config.make_critic(settings(advantage=PPO, critic=given, reward=reward))
    assert critic is not None
    ids = [5, 9, 11, 30, 7, 8]
    row = torch.tensor([ids])
    values = critic_values(critic.engine.model.eval(), row, torch.ones_like(row), "linear")[0].tolist()
    score = OutcomeModelReward(path, normaliser=str(scale))
    prefixes = [Trajectory("p/0", "p", "Q", "a", ["a"], ids[:2], ids[2:end], [end - 2], "stop", "1", "1", True)
                for end in range(3, 6)]  # fmt: skip
    assert values[3:] == pytest.approx([one.outcome for one in score(prefixes)], abs=1e-6)
    plain = critic_values(load_critic(path, source), row, torch.ones_like(row), "linear")[0].tolist()
    assert values[3:] == pytest.approx([(value - 0.7) / 2.5 for value in plain[3:]], abs=1e-6)


def test_a_critic_is_normalised_as_the_model_it_begins_as_alone() -> None:
    term = {"_target_": "O", "path": "A/model", "normaliser": "scale.json"}
    reward = {"_target_": "R", "terms": {"truth": {"_target_": "T"}, "outcome_model": term}}

    def found(reward: Any, **model: str) -> str:
        return critic_normaliser(settings(critic=CriticConfig(model={"path": "A/model", **model}), reward=reward))

    assert found(reward, source="reward_model") == found(term, source="auto") == "scale.json"
    assert found(reward, source="reward_model", path="./A/model/") == "scale.json"
    assert found(reward, source="reward_model", path="B/model") == ""
    assert found(reward, source="reward_model_body") == found(reward, source="policy") == ""
    assert found({**term, "normaliser": ""}, source="reward_model") == ""
    assert critic_normaliser(settings(reward=reward)) == ""


def test_a_critic_that_begins_in_other_units_than_its_rewards_is_warned_of(
    tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_critic(str(tiny_policy), "policy").save_pretrained(tmp_path / "A")
    load_critic(str(tiny_policy), "policy").save_pretrained(tmp_path / "B")
    own, other = str(tmp_path / "A"), str(tmp_path / "B")
    term = {"_target_": "O", "path": own, "normaliser": "scale.json"}
    plain = {"_target_": "R", "terms": {"outcome_model": {**term, "normaliser": ""}}}
    normalised = {"_target_": "R", "terms": {"outcome_model": term}, "weights": {"outcome_model": 1.0}}
    light = {**normalised, "weights": {"outcome_model": 0.1}}
    for path, reward, scaling, is_warned in (
        (own, normalised, "none", False), (own, plain, "none", False), (other, normalised, "none", True),
        (own, light, "none", True), (own, normalised, "scale", True), (own, plain, "scale", True),
        (str(tiny_policy), normalised, "none", False),
    ):  # fmt: skip
        for source in ({"source": "reward_model"}, {"source": "auto"}, {}):
            caplog.clear()
            critic = CriticConfig(model={"path": path, **source})
            warn_of_other_units(settings(critic=critic, reward=reward, reward_scaling=scaling))
            assert ("the rewards are scaled otherwise" in caplog.text) == is_warned, (path, reward, scaling, source)
    caplog.clear()
    warn_of_other_units(settings(critic=CriticConfig(model={"path": other, "source": "policy"}), reward=normalised))
    warn_of_other_units(settings(reward=normalised))
    assert not caplog.text


def test_a_critic_of_scaled_rewards_says_so_in_its_folder(tiny_policy: Path) -> None:
    for is_scaled in (False, True):
        model = load_critic(str(tiny_policy), "policy")
        given = settings(advantage=PPO, critic=CriticConfig(model={"path": "x", "source": "policy"}))
        engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), 1.0)
        assert given.critic is not None
        Critic(engine, given.critic, "fp32", 1, 1, is_scaled=is_scaled)
        assert getattr(model.config, "values_scaled_rewards", False) == is_scaled


def test_the_critic_of_a_run_is_marked_by_what_its_rewards_hold(tiny_policy: Path) -> None:
    for recipe, is_marked in (("ppo_implicit_reward_word_arithmetic", True), ("ppo_word_arithmetic", False)):
        words = [f"model.path={tiny_policy}", "output_dir=D", "kl.coefficient=0"]
        critic = trainer_from_config.make_critic(compose_config(RLConfig, f"exp/ppo/{recipe}", words))
        assert critic is not None
        assert getattr(critic.engine.model.config, "values_scaled_rewards", False) == is_marked, recipe


def test_values_of_added_implicit_rewards_are_marked_as_no_chances_of_success() -> None:
    for recipe, is_added in (("ppo_implicit_reward_word_arithmetic", True), ("ppo_word_arithmetic", False)):
        config = compose_config(RLConfig, f"exp/ppo/{recipe}", ["model.path=M", "output_dir=D"])
        config.kl = KLConfig(coefficient=0.0)
        assert values_are_scaled(config) == is_added, recipe
        config.kl = KLConfig(kind="k1", place="reward", coefficient=0.1)
        assert values_are_scaled(config)
        config.kl = KLConfig(coefficient=0.1)  # in the loss
        assert values_are_scaled(config) == is_added, recipe
        config.update.whitens_rewards = True
        assert values_are_scaled(config)


def test_a_warm_up_that_outlasts_the_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_parts(settings(num_iterations=2, warmup_steps=3))  # of 512 rollouts in one minibatch each
    assert "update.warmup_steps=3 outlasts the run of 2 steps" in caplog.text


def test_networks_of_several_tokenizers_are_refused(tiny_policy: Path) -> None:
    with pytest.raises(BadConfig, match="320 token ids and the critic 400"):
        check_vocabulary(load_policy(str(tiny_policy)), 400, "critic")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"reward": node("espalier.rewards.outcome.OutcomeReward", right=3.0)}, "values from 0 to 1, .* from 0 to 3"),
        ({"reward": SIGNED}, "OutcomeReward gives returns from -1 to 1"),
        ({"reward": SCORES}, "ProcessReward gives returns from 0 to inf"),
        ({"reward": BOTH}, r"ComposedReward gives returns from -0\.5 to 1\.5"),
        ({"kl": KL_IN_REWARD}, "kl.place=reward takes off a cost that has no bound"),
        ({"kl": KLConfig(coefficient=0.1)}, ""),
    ],
)
def test_a_critic_of_shares_is_refused_beside_returns_that_leave_them(changes: dict[str, Any], words: str) -> None:
    shares = settings(advantage=PPO, critic=CriticConfig(form="probability"), **changes)
    if words:
        with pytest.raises(BadConfig, match=words):
            check_critic_range(shares)
    else:
        check_critic_range(shares)
    check_critic_range(settings(advantage=PPO, critic=CriticConfig(form="linear"), **changes))


def test_returns_that_leave_the_critics_range_are_refused_before_anything_is_learnt(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    critic = CriticConfig(learning_rate=1e-3, form="probability")
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", "", GAE(1.0, 0.95), critic=critic,
        evaluation_every=0, rollout_num_problems=2,
    )  # fmt: skip
    trainer.rollout_source.reward = OutcomeReward(wrong=-1.0)
    before = weights(critic_of(trainer).engine.model)
    with pytest.raises(BadInput, match=r"\d+ of \d+ returns lie outside .* -1 to .*, its values 0 to 1 .*model_body"):
        trainer.run()
    assert torch.equal(weights(critic_of(trainer).engine.model), before)
    assert torch.equal(weights(trainer.policy.engine.model), weights(load_policy(str(tiny_policy), "eager")))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_returns_at_the_ends_of_a_range_are_within_it_and_those_that_are_no_number_in_none() -> None:
    mask = torch.tensor([[True, True, False]])
    check_returns("probability", torch.tensor([[0.0, 1.0, 7.0]]), mask)
    check_returns("linear", torch.tensor([[-50.0, 7.0, 7.0]]), mask)
    for form in ("probability", "linear"):
        with pytest.raises(BadInput, match="1 of 2 returns"):
            check_returns(form, torch.tensor([[0.0, float("nan"), 7.0]]), mask)


def test_with_a_short_lambda_it_is_what_really_came_that_is_compared_with_the_range() -> None:
    # rewards of 0.4 a token, values of 0.1: one-step targets are 0.5 and 0.4, the returns 1.2, 0.8, 0.4
    mask = torch.ones(1, 3, dtype=torch.bool)
    zeros = torch.zeros(1, 3)
    experience = Experience(
        mask.long(), mask.long(), mask, zeros, OldLogprobs(zeros, zeros), rewards=zeros + 0.4, values=zeros + 0.1
    )
    nothing: Any = None
    found = GAE(gamma=1.0, lam=0.0)([], experience, nothing)
    assert found.returns is not None
    assert found.to_come is not None
    assert found.returns.max() < 0.51
    assert found.to_come.tolist() == [pytest.approx([1.2, 0.8, 0.4])]


def test_a_likelihood_fits_no_targets_above_one(tiny_policy: Path) -> None:
    """Of rewards that state no range: what comes lies within it, a target of it and a bootstrapped value above."""
    mask, zeros = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3)
    to_come = torch.tensor([[0.9, 0.9, 0.5]])
    estimate = Estimate(zeros, torch.tensor([[1.03, 0.77, 0.5]]), to_come=to_come)
    experience = Experience(mask.long(), mask.long(), mask, zeros, OldLogprobs(zeros, zeros))
    critic = make_critic(tiny_policy, "probability", "policy")
    critic.check(experience, estimate)
    critic.config = replace(critic.config, loss="cross_entropy", clip_range=0.0)
    with pytest.raises(BadInput, match="1 of 3 returns lie outside"):
        critic.check(experience, estimate)


def test_a_critic_on_a_reward_models_body_has_a_fresh_head(tiny_policy: Path, tmp_path: Path) -> None:
    for labels in (1, 4):
        trained = load_process_reward(str(tiny_policy), labels)
        with torch.no_grad():
            trained.get_parameter("score.weight").fill_(3.0)
            trained.get_parameter("model.norm.weight").fill_(2.0)
        trained.save_pretrained(tmp_path / f"prm-{labels}")
        critic = load_critic(str(tmp_path / f"prm-{labels}"), "reward_model_body")
        assert torch.equal(critic.get_parameter("model.norm.weight"), trained.get_parameter("model.norm.weight"))
        head = critic.get_parameter("score.weight").detach()
        assert head.shape == (1, 64)
        assert float(head.std()) == pytest.approx(65**-0.5, rel=0.35)
        assert float(critic.get_parameter("score.bias").detach()) == 0.0
    with pytest.raises(BadModel, match="is no reward model"):
        load_critic(str(tiny_policy), "reward_model_body")


def make_critic(path: Path, form: str, source: str = "auto") -> Critic:
    model: Any = load_critic(str(path), source, "eager")
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    return Critic(engine, CriticConfig(form=form), "fp32", 4, 1)


def test_a_saved_critic_says_its_form_and_is_read_as_no_other(tiny_policy: Path, tmp_path: Path) -> None:
    for form, other in (("linear", "probability"), ("probability", "linear")):
        critic = make_critic(tiny_policy, form)
        critic.engine.save_model(tmp_path / form)
        assert json.loads((tmp_path / form / "config.json").read_text())["critic_form"] == form
        make_critic(tmp_path / form, form)
        with pytest.raises(BadInput, match=f"{form} was saved as a critic of form {form}, and critic.form={other}"):
            make_critic(tmp_path / form, other)
        make_critic(tmp_path / form, other, "reward_model_body")  # a fresh head
        make_critic(tmp_path / form, other, "scratch")
        (tmp_path / f"{form}-state").mkdir()
        critic.save_state(tmp_path / f"{form}-state")
        make_critic(tiny_policy, form).load_state(tmp_path / f"{form}-state")
        with pytest.raises(BadCheckpoint, match=f"holds a critic of form {form}, and critic.form={other}"):
            make_critic(tiny_policy, other).load_state(tmp_path / f"{form}-state")
    record = json.loads((tmp_path / "probability-state" / "critic.json").read_text())
    assert record == {"form": "probability", "range": [0.0, 1.0]}
    load_process_reward(str(tmp_path / "probability"))
    with pytest.raises(BadModel, match="is a critic of form linear, whose values are no scores from 0 to 1"):
        load_process_reward(str(tmp_path / "linear"))


CASES: dict[str, dict[str, Any]] = {
    # critic, adaptive KL in the reward, whitening, resampling, cosine: all that a checkpoint must carry or repeat
    "ppo": {
        "estimator": GAE(gamma=1.0, lam=0.9),
        "critic": CriticConfig(learning_rate=1e-3, warmup_steps=2, schedule="linear"),
        "kl": KLConfig(coefficient=0.05, kind="k1", place="reward", target=0.01, horizon=100),
        "whitening": "standard",
        "dynamic_sampling_rounds": 1,
        "schedule": "cosine",
    },
    "vineppo": {
        "estimator": VinePPO(completions_per_state=3, prompt_value="sampled"),
        "num_lines": 2,
        "kl": KLConfig(coefficient=0.01, kind="k3"),
    },
}


@pytest.mark.parametrize("name", ["ppo", pytest.param("vineppo", marks=pytest.mark.slow)])
def test_ppo_and_vineppo_stopped_and_resumed_end_with_equal_parameters(
    name: str, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    def make(folder: str, dies_at: str = "") -> Any:
        small = {"num_iterations": 3, "num_epochs": 1, "evaluation_every": 0, "save_every": 2}
        small |= {"rollout_num_problems": 2 if name == "vineppo" else 3, **CASES[name]}
        return make_trainer(tiny_policy, task, tokenizer, tmp_path / folder, dies_at, **small)

    whole = make("whole")
    whole.run()
    with pytest.raises(ServerGone):
        make("cut", dies_at="rl-2").run()
    resumed = make("cut")
    resumed.run()
    assert torch.equal(weights(whole.policy.engine.model), weights(resumed.policy.engine.model))
    assert whole.policy.loss.kl.coefficient == resumed.policy.loss.kl.coefficient
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    last = read_metrics(tmp_path / "whole")[-1]
    checkpoint = tmp_path / "cut" / "checkpoints" / "step-00000002"
    if name == "ppo":
        assert torch.equal(weights(critic_of(whole).engine.model), weights(critic_of(resumed).engine.model))
        assert json.loads((checkpoint / "kl.json").read_text())["coefficient"] != 0.05
        assert "moments/exp_avg/score.weight" in PieceReader(checkpoint / "critic" / "pieces").stored
        assert last["estimate/explained_variance"] <= 1
        assert last["update/value_learning_rate"] < 1e-3
        whole.save_model()
        assert torch.equal(weights(load_critic(str(tmp_path / "whole" / "critic"))),
                           weights(critic_of(whole).engine.model))  # fmt: skip
    else:
        assert not (checkpoint / "critic").exists()
        assert last["estimate/num_completions"] == 3 * last["estimate/num_states"]
        assert last["estimate/num_steps"] == 3


def test_a_critics_warm_up_leaves_the_policy_alone(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    critic = CriticConfig(learning_rate=1e-3, num_warmup_iterations=1)
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", "", GAE(1.0, 1.0), critic=critic,
        num_iterations=1, num_epochs=1, evaluation_every=0,
    )  # fmt: skip
    before = weights(critic_of(trainer).engine.model)
    experience = make_experience()
    experience = replace(experience, advantages=experience.response_mask.float())
    found = trainer.update(experience, iteration=0)
    assert torch.equal(weights(trainer.policy.engine.model), weights(load_policy(str(tiny_policy), "eager")))
    assert not torch.equal(weights(critic_of(trainer).engine.model), before)
    assert "learning_rate" not in found
    assert trainer.update(experience, iteration=1)["learning_rate"] > 0
    assert not torch.equal(weights(trainer.policy.engine.model), weights(load_policy(str(tiny_policy), "eager")))


def test_a_value_network_alone_learns_the_returns_of_a_policy_that_stays(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    critic = CriticConfig(learning_rate=1e-3, num_warmup_iterations=2)
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", "", GAE(1.0, 1.0), critic=critic,
        num_iterations=3, stop_after=2, num_epochs=1, rollout_num_problems=2, evaluation_every=0,
        kl=KLConfig(coefficient=0.2, kind="k1", place="reward", target=6.0, horizon=100),
    )  # fmt: skip
    before = weights(critic_of(trainer).engine.model)
    trainer.run()
    trainer.save_model()
    found = weights(load_critic(str(tmp_path / "run" / "critic"), "reward_model"))
    assert torch.equal(found, weights(critic_of(trainer).engine.model))
    assert not torch.equal(found, before)
    assert torch.equal(weights(trainer.policy.engine.model), weights(load_policy(str(tiny_policy), "eager")))
    assert len(read_metrics(tmp_path / "run")) == 2
    assert trainer.policy.loss.kl.coefficient == 0.2  # a policy that takes no step says nothing of its penalty


def test_a_minibatch_whose_ratio_ran_away_is_skipped_and_counted(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", "", max_mean_ratio=2.0, num_epochs=1, minibatch_size=24
    )
    ids = torch.randint(5, 300, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12).expand(4, 12) > 3
    zeros = torch.zeros(4, 12)
    old = torch.full((4, 12), -20.0) * mask  # the policy now gives each token far more than e^-20
    experience = Experience(ids, torch.ones_like(ids), mask, zeros, OldLogprobs(old, zeros), advantages=mask.float())
    before = weights(trainer.policy.engine.model)
    found = trainer.update(experience, iteration=0)
    assert found["skipped"] == 1.0
    assert torch.equal(weights(trainer.policy.engine.model), before)
    assert "grad_norm" not in found
    near = replace(experience, old=OldLogprobs(torch.full((4, 12), -5.75) * mask, zeros))
    assert trainer.update(near, iteration=0)["skipped"] == 0.0
    assert PARAMS.temperature == 1.0
