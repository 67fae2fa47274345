"""Details of PPO at scale: identities of its metrics, whitened rewards, one loss of two networks, a critic that begins
as a published reward model, problems in epochs over a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from espalier.data.records import BadInput
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import BadModel, load_tokenizer
from espalier.models.scalar_head import load_critic
from espalier.models.tokenizer_checks import check_same_tokenizer
from espalier.rl.advantages.gae import GAE
from espalier.rl.combinations import check_critic_range, check_estimator
from espalier.rl.problem_order import epoch_batch
from espalier.rl.types import Estimate
from espalier.runtime.entrypoint import BadConfig, compose_config
from espalier.runtime.schemas import CriticConfig, KLConfig, RLConfig
from espalier.sampling.client import ServerGone
from tests.support.rl_cases import make_trainer, read_metrics
from tests.support.root_config import root_config

PENALTY = KLConfig(coefficient=0.05, kind="k1", place="reward")


class SeesRewards(GAE):
    """Keeps the rewards and values that it was given."""

    seen: list[tuple[torch.Tensor, torch.Tensor]]

    def __call__(self, groups: Any, experience: Any, context: Any) -> Estimate:
        estimate = super().__call__(groups, experience, context)
        self.seen.append((experience.rewards[experience.response_mask], experience.response_mask))
        return estimate


def rows_of(
    run_dir: Path, policy: Path, task: WordArithmetic, tokenizer: Any, **changes: Any
) -> tuple[list[dict[str, float]], SeesRewards]:
    """The metrics of three iterations of PPO with a KL penalty in the reward."""
    estimator = SeesRewards(gamma=1.0, lam=0.95)
    estimator.seen = []
    settings: dict[str, Any] = {"kl": PENALTY, "critic": CriticConfig(loss_coefficient=0.1), "num_iterations": 3,
                                "rollout_num_problems": 3, "evaluation_every": 0, "save_every": 0,
                                "num_lines": 2}  # fmt: skip
    trainer = make_trainer(policy, task, tokenizer, run_dir, "", estimator=estimator, **{**settings, **changes})
    trainer.run()
    return read_metrics(run_dir), estimator


Run = tuple[list[dict[str, float]], SeesRewards]


@pytest.fixture(scope="module")
def plain_run(tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of `rows_of` without changes."""
    return rows_of(tmp_path_factory.mktemp("plain") / "run", tiny_policy, task, tokenizer)


def test_scores_penalty_and_what_is_left_add_up_and_the_penalty_is_the_coefficient_times_k1(plain_run: Run) -> None:
    rows, estimator = plain_run
    for row, (rewards, mask) in zip(rows, estimator.seen, strict=True):
        assert row["kl/net_reward"] == pytest.approx(row["rollout/reward"] + row["kl/penalty_in_reward"], abs=1e-6)
        assert row["kl/net_reward"] == pytest.approx(float(rewards.sum()) / len(mask), abs=1e-6)
        assert row["kl/penalty_in_reward"] == pytest.approx(-0.05 * row["kl/per_response"], abs=1e-6)
        assert row["kl/k2"] >= 0
        assert row["kl/k3"] >= 0
    assert rows[0]["kl/per_response"] == pytest.approx(0, abs=1e-4)  # the policy is the reference
    assert rows[-1]["kl/k2"] > 0


def test_a_penalty_that_is_cut_below_0_costs_the_likelier_tokens_alone(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    experiences = []

    class Keeps(GAE):
        def __call__(self, groups: Any, experience: Any, context: Any) -> Estimate:
            experiences.append((groups, experience))
            return super().__call__(groups, experience, context)

    make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", estimator=Keeps(1.0, 0.95), num_iterations=2,
                 rollout_num_problems=3, evaluation_every=0, save_every=0, num_lines=2,
                 kl=replace(PENALTY, cuts_negative=True), critic=CriticConfig()).run()  # fmt: skip
    groups, experience = experiences[-1]
    mask = experience.response_mask
    scores = iter(total for group in groups for total in group.rewards)
    costs = []
    for row in range(len(mask)):
        places = mask[row].nonzero().squeeze(1).tolist()
        given = [float(experience.old_logprobs[row, t]) - float(experience.reference_logprobs[row, t]) for t in places]
        costs += given
        wanted = [-0.05 * max(0.0, term) for term in given]
        wanted[-1] += next(scores)
        assert experience.rewards[row, places].tolist() == pytest.approx(wanted, abs=1e-6)
    assert min(costs) < -0.001  # some are cut
    last = read_metrics(tmp_path / "run")[-1]
    assert last["kl/penalty_in_reward"] == pytest.approx(-0.05 * sum(max(0.0, c) for c in costs) / len(mask), abs=1e-6)
    assert last["kl/per_response"] == pytest.approx(sum(costs) / len(mask), abs=1e-5)


def test_the_loss_is_the_policys_and_its_coefficient_times_the_critics(plain_run: Run) -> None:
    for row in plain_run[0]:
        assert row["update/value_loss"] > 0
        assert row["update/loss"] == pytest.approx(row["update/surrogate_loss"] + 0.1 * row["update/value_loss"])


def test_a_penalty_in_the_loss_and_a_bonus_are_in_the_loss_too(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    loss = KLConfig(coefficient=0.3, kind="k3", place="loss")
    changes: dict[str, Any] = {"kl": loss, "entropy_bonus": 0.01, "evaluation_every": 0, "save_every": 0,
                               "num_iterations": 2, "rollout_num_problems": 3}  # fmt: skip
    make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **changes).run()
    for row in read_metrics(tmp_path / "run"):
        parts = row["update/surrogate_loss"] + 0.3 * row["update/kl_reference"] - row["update/entropy_bonus"]
        assert row["update/loss"] == pytest.approx(parts, abs=1e-6)


def test_rewards_are_whitened_around_their_mean_behind_the_penalty(
    plain_run: Run, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    plain, before = plain_run
    rows, after = rows_of(tmp_path / "run", tiny_policy, task, tokenizer, num_iterations=1, whitens_rewards=True)
    (given, mask), (found, _) = before.seen[0], after.seen[0]
    assert float(found.std()) == pytest.approx(1.0, abs=1e-4)
    assert float(found.mean()) == pytest.approx(float(given.mean()), abs=1e-5)
    torch.testing.assert_close(found, (given - given.mean()) / given.std() + given.mean(), atol=1e-5, rtol=1e-4)
    # metrics of the reward are of what it is before
    assert rows[0]["kl/net_reward"] == plain[0]["kl/net_reward"] == pytest.approx(float(given.sum()) / len(mask))


def test_whitened_rewards_are_refused_where_nobody_sees_them_or_a_critic_cannot_say_them() -> None:
    def config(advantage: str, **more: Any) -> RLConfig:
        node = {"_target_": f"espalier.rl.advantages.{advantage}"} | more.pop("settings", {})
        return root_config(RLConfig, output_dir="", advantage=node, whitens_rewards=True, **more)

    with pytest.raises(BadConfig, match=r"GRPO does not see rewards of tokens: set update\.whitens_rewards=false"):
        check_estimator(config("grpo.GRPO", settings={"divide_by_std": True}))
    plus_plus = "reinforce_plus_plus.ReinforcePlusPlusAdvantage"
    for advantage, given in (("remax.ReMaxAdvantage", {}), (plus_plus, {"has_group_baseline": True})):
        with pytest.raises(BadConfig, match=r"takes a baseline of rewards as they were given off"):
            check_estimator(config(advantage, settings=given))
    check_estimator(config(plus_plus))
    linear, shares = CriticConfig(), CriticConfig(form="probability")
    gae = {"settings": {"gamma": 1.0, "lam": 1.0}}
    check_estimator(config("gae.GAE", critic=linear, **gae))
    check_critic_range(config("gae.GAE", critic=linear, reward=None, **gae))
    with pytest.raises(BadConfig, match="whitens_rewards=true scales returns to any number"):
        check_critic_range(config("gae.GAE", critic=shares, reward=None, **gae))
    with pytest.raises(BadConfig, match=r"critic\.loss_coefficient must be above 0, got 0"):
        check_critic_range(config("gae.GAE", critic=replace(linear, loss_coefficient=0.0), reward=None, **gae))


def test_a_likelihood_has_no_targets_above_one() -> None:
    """With rewards of steps and lambda below 1 a target is rewards to come and the critic's own value behind them."""
    words = ["model.path=M", "output_dir=D", "critic=reward_model", "critic.model.path=PRM", "critic.clip_range=0",
             "critic.loss=cross_entropy"]  # fmt: skip
    steps = ["reward=process_alone", "reward.path=PRM", "reward.form=minimum", "reward.offset=0", "reward.limit=0"]

    def check(*more: str) -> None:
        check_critic_range(compose_config(RLConfig, "exp/ppo/ppo_word_arithmetic", [*words, *more]))

    check()
    check(*steps, "advantage.critic_lam=1")
    check(*steps, "advantage.lam=1")
    with pytest.raises(BadConfig, match=r"lambda 0.95 a target, .* may lie above 1: set advantage.critic_lam=1, or"):
        check(*steps, "advantage.lam=0.95")
    with pytest.raises(BadConfig, match=r"lambda 0.5 a target"):
        check(*steps, "advantage.lam=1", "advantage.critic_lam=0.5")


@pytest.fixture
def published_reward_model(tiny_policy: Path, tmp_path: Path) -> Path:
    """A reward model as others publish them: transformers' classifier of whole texts, one label, no bias."""
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_policy, num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / "published")
    load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path / "published")
    return tmp_path / "published"


@pytest.mark.parametrize("source", ["auto", "reward_model"])
def test_a_critic_begins_as_a_published_reward_model_head_and_all(source: str, published_reward_model: Path) -> None:
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(published_reward_model)
    critic = load_critic(str(published_reward_model), source)
    assert torch.equal(critic.get_parameter("score.weight"), theirs.score.weight)
    assert float(critic.get_parameter("score.bias").detach()) == 0.0
    ids = torch.tensor([[5, 9, 11, 30, 7]])
    last = critic(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    torch.testing.assert_close(last, theirs(input_ids=ids).logits[0], atol=1e-5, rtol=1e-4)
    fresh = load_critic(str(published_reward_model), "reward_model_body")
    assert not torch.equal(fresh.get_parameter("score.weight"), theirs.score.weight)
    assert torch.equal(fresh.get_parameter("model.norm.weight"), theirs.model.norm.weight)


@pytest.mark.parametrize("source", ["policy", "scratch", "reward_model_body"])
def test_a_fresh_head_of_zeros_says_0_everywhere(source: str, tiny_policy: Path, published_reward_model: Path) -> None:
    path = published_reward_model if source == "reward_model_body" else tiny_policy
    critic = load_critic(str(path), source, head="zero")
    ids = torch.tensor([[5, 9, 11, 30, 7]])
    assert not critic(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.any()
    assert load_critic(str(path), source)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.any()
    names = [name for name, value in critic.named_parameters() if not value.any()]
    assert names == ["score.weight", "score.bias"]


def test_a_head_that_is_not_fresh_or_does_not_exist_is_no_zero_one(
    tiny_policy: Path, published_reward_model: Path
) -> None:
    with pytest.raises(BadModel, match=r"keeps its trained head, and critic\.model\.head=zero is for a fresh one"):
        load_critic(str(published_reward_model), "reward_model", head="zero")
    with pytest.raises(BadModel, match=r"critic\.model\.head must be one of drawn, zero, got 'x'"):
        load_critic(str(tiny_policy), "policy", head="x")


def test_a_critic_of_another_tokenizer_is_refused_in_one_line(
    published_reward_model: Path, tokenizer: Any, demonstration_texts: list[str]
) -> None:
    from espalier.models.tiny import build_tokenizer

    check_same_tokenizer(tokenizer, str(published_reward_model), "critic")
    build_tokenizer(demonstration_texts[:50], vocab_size=300).save_pretrained(published_reward_model)
    with pytest.raises(BadInput, match="the critic has another tokenizer than the policy"):
        check_same_tokenizer(tokenizer, str(published_reward_model), "critic")


@pytest.mark.slow
def test_problems_in_epochs_come_once_each_also_over_a_resume(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"order": "epochs", "evaluation_every": 0, "save_every": 1, "num_epochs": 1}

    def asked(trainer: Any, kept: list[str]) -> None:
        sample = trainer.rollout_source.sampler.client.sample

        async def listen(request: Any, params: Any) -> Any:
            if request.id.startswith("rl-"):
                kept.append(request.id)
            return await sample(request, params)

        trainer.rollout_source.sampler.client.sample = listen

    seen: list[str] = []
    cut = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "rl-4", **settings)
    asked(cut, seen)
    with pytest.raises(ServerGone):
        cut.run()
    seen = [name for name in seen if not name.startswith("rl-4")]
    going_on = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **settings)
    asked(going_on, seen)
    going_on.run()
    problems = [problem.id for problem in task.problems("train")]
    expected = [f"rl-{k}/{problems[index]}" for k in range(6) for index in epoch_batch(len(problems), 6, 5, k)]
    assert sorted(seen) == sorted(expected)
    assert len({name.split("/", 1)[1] for name in seen}) == 36
