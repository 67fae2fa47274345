"""An implicit reward that is trained along: its loss and step by hand, what it says before and after, and that it comes
back bit for bit."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_policy
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.prime import PRIME
from espalier.rl.advantages.reinforce_plus_plus import ReinforcePlusPlusAdvantage
from espalier.rl.combinations import check_critic_range, check_implicit_reward, check_numbers
from espalier.rl.experience import RowScorer, add_implicit_rewards
from espalier.rl.implicit_reward import ImplicitReward
from espalier.rl.metrics import is_replaceable
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.rank_watch import RankWatch, pair_accuracy
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import CriticConfig, ImplicitRewardConfig, KLConfig, RLConfig, RolloutConfig
from espalier.sampling.client import ServerGone
from espalier.training.engine import BadCheckpoint, TorchEngine
from tests.rl.test_prime import groups_of
from tests.rl.test_rl_critic import make_experience, weights
from tests.support.rl_cases import PARAMS, make_trainer, read_metrics
from tests.support.root_config import root_config

ROWS = [[(3, [4], 1.0), (5, [1], 0.0)], [(2, [3, 7], 0.0), (4, [2], 1.0)]]  # of `make_experience`


def moved(path: Path) -> Any:
    """The policy, a little away from itself."""
    model = load_policy(str(path), "eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def learner_of(path: Path, minibatch: int = 4, micro: int = 4, **settings: Any) -> ImplicitReward:
    model = moved(path)
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    config = ImplicitRewardConfig(beta=0.5, learning_rate=1.0, **settings)
    return ImplicitReward(engine, config, load_policy(str(path), "eager"), 0.7, "fp32", minibatch, micro)


def score(learner: ImplicitReward, experience: Experience, groups: list[RolloutGroup]) -> tuple[Any, dict[str, float]]:
    scorer = RowScorer((experience.ids, experience.attention_mask, experience.response_mask), 3, "fp32")
    with torch.random.fork_rng():
        found = learner.score(groups, experience, scorer)
    return found.implicit_rewards, learner.metrics.take()


def plain_logprobs(model: Any, experience: Experience, temperature: float = 0.7) -> torch.Tensor:
    """Log-probs [N, T] from padded rows, not packed, 0 outside the responses."""
    ids, mask = experience.ids.long(), experience.attention_mask.long()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0)) * experience.response_mask


def plain_ratios(model: Any, path: Path, experience: Experience) -> torch.Tensor:
    """Log-ratios [N, T] to the policy."""
    return plain_logprobs(model, experience) - plain_logprobs(load_policy(str(path), "eager"), experience).detach()


def test_a_step_is_the_gradient_of_the_mean_cross_entropy_of_responses_however_it_is_cut(tiny_policy: Path) -> None:
    experience, groups = make_experience(), groups_of(ROWS)
    model = moved(tiny_policy)
    sums = 0.5 * plain_ratios(model, tiny_policy, experience).sum(-1)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    loss = -torch.log(torch.sigmoid(signs * sums)).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = weights(model) - torch.cat([grad.flatten() for grad in grads])
    for micro in (1, 3, 4):
        learner = learner_of(tiny_policy, micro=micro, update="after")
        rewards, metrics = score(learner, experience, groups)
        torch.testing.assert_close(weights(learner.engine.model), expected, rtol=0, atol=5e-6)
        assert metrics["implicit_reward/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        before = 0.5 * plain_ratios(moved(tiny_policy), tiny_policy, experience).detach()
        torch.testing.assert_close(rewards, before, rtol=1e-4, atol=1e-5)  # read off the passes that trained it
        said = [float(total > 0) == float(sign > 0) for total, sign in zip(before.sum(-1), signs, strict=True)]
        assert metrics["implicit_reward/sign_accuracy"] == sum(said) / 4
        assert "implicit_reward/pair_accuracy_after" not in metrics


def test_updated_before_it_is_asked_it_says_what_it_has_become(tiny_policy: Path) -> None:
    experience, groups = make_experience(), groups_of(ROWS)
    first, second = (learner_of(tiny_policy, minibatch=2, update=update) for update in ("before", "after"))
    rewards, metrics = score(first, experience, groups)
    torch.testing.assert_close(
        rewards, 0.5 * plain_ratios(first.engine.model, tiny_policy, experience).detach(), rtol=1e-4, atol=1e-5
    )
    seen, _ = score(second, experience, groups)
    assert torch.equal(weights(first.engine.model), weights(second.engine.model))
    assert metrics["implicit_reward/reward"] == pytest.approx(float(rewards[experience.response_mask].mean()))
    # two steps: what the second minibatch is scored by has learnt from the first already
    torch.testing.assert_close(
        seen[:2], 0.5 * plain_ratios(moved(tiny_policy), tiny_policy, experience).detach()[:2], rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(seen[2:], 0.5 * plain_ratios(moved(tiny_policy), tiny_policy, experience)[2:].detach())


def test_the_policy_before_the_update_may_be_the_reference_and_that_of_a_kl_penalty_is_not_asked_again(
    tiny_policy: Path,
) -> None:
    experience, groups = make_experience(), groups_of(ROWS)
    drawn = torch.randn(experience.ids.shape, generator=torch.Generator().manual_seed(1)) * experience.response_mask
    of_policy = replace(experience, old=OldLogprobs(drawn, drawn))
    of_penalty = replace(experience, reference_logprobs=drawn)
    for one, reference in ((of_policy, "policy"), (of_penalty, "start")):
        learner = learner_of(tiny_policy, reference=reference)
        learner.reference = None
        rewards, _ = score(learner, one, groups)
        own = plain_logprobs(learner.engine.model, experience).detach()
        torch.testing.assert_close(rewards, 0.5 * (own - drawn), rtol=1e-4, atol=1e-5)


def test_implicit_rewards_are_discounted_with_those_of_tokens_by_hand() -> None:
    given = {
        "rewards": [[0, -0.1, -0.2, 1.0], [0, 0.1, 0, 0]],  # outcomes 1 and 0, and a KL penalty
        "implicit_rewards": [[0, 0.4, -0.6, 0.2], [0, -0.2, 0.8, 0]],
        "values": [[0, 0.5, 0.25, 0.75], [0, 0.2, 0.6, 0]],
    }
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    zeros = torch.zeros(mask.shape)
    tensors = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in given.items()}
    experience = Experience(zeros.int(), mask, mask, zeros, OldLogprobs(zeros, zeros), **tensors)
    added = add_implicit_rewards(experience, 0.5)
    torch.testing.assert_close(added.rewards, torch.tensor([[0, 0.1, -0.5, 1.1], [0, 0, 0.4, 0]], dtype=torch.float64))
    nothing: Any = None
    found = GAE(gamma=0.5, lam=0.5)([], added, nothing)
    # row 0: 1.1 - 0.75 = 0.35, -0.5 + 0.375 - 0.25 + 0.35 / 4, ...; row 1: 0.4 - 0.6 = -0.2, 0.3 - 0.2 - 0.2 / 4
    wanted = torch.tensor([[0, -0.346875, -0.2875, 0.35], [0, 0.05, -0.2, 0]])
    torch.testing.assert_close(found.advantages, wanted)
    assert found.returns is not None
    torch.testing.assert_close(found.returns, (wanted.double() + tensors["values"]) * mask, rtol=0, atol=1e-7)
    to_go = ReinforcePlusPlusAdvantage(gamma=0.5).before_whitening([], added)
    torch.testing.assert_close(to_go, torch.tensor([[0, 0.125, 0.05, 1.1], [0, 0.2, 0.4, 0]]))


class Seeing(GAE):
    """Keeps the last experience that it was asked about."""

    seen: Experience
    groups: list[RolloutGroup]

    def __call__(self, groups: Any, experience: Experience, context: Any) -> Estimate:
        self.groups, self.seen = groups, experience
        return super().__call__(groups, experience, context)


@pytest.mark.parametrize("whitens", [False, True])
def test_a_critic_learns_outcome_penalty_and_weighted_implicit_rewards(
    whitens: bool, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    estimator = Seeing(gamma=0.9, lam=0.8)
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", "", estimator=estimator, num_iterations=2, num_lines=2,
        rollout_num_problems=3, evaluation_every=0, save_every=0, critic=CriticConfig(), whitens_rewards=whitens,
        kl=KLConfig(coefficient=0.05, kind="k1", place="reward"),
        implicit_reward=ImplicitRewardConfig(learning_rate=1e-3, weight=3.0, beta=0.5),
    )  # fmt: skip
    trainer.run()
    seen, mask = estimator.seen, estimator.seen.response_mask
    assert seen.rewards is not None
    assert seen.values is not None
    assert seen.reference_logprobs is not None
    start = load_policy(str(tiny_policy), "eager")
    own, reference = (plain_logprobs(model, seen, PARAMS.temperature).detach()
                      for model in (trainer.update.learners[2].engine.model, start))  # fmt: skip
    scores = [total for group in estimator.groups for total in group.rewards]
    wanted = 3.0 * 0.5 * (own - reference).double() - 0.05 * (seen.old_logprobs - seen.reference_logprobs).double()
    for row, total in enumerate(scores):
        wanted[row, mask[row].nonzero().max()] += total
    if whitens:
        chosen = wanted[mask]
        wanted = ((wanted - chosen.mean()) / chosen.std() + chosen.mean()) * mask
    torch.testing.assert_close(seen.rewards.double(), wanted, rtol=1e-4, atol=2e-4 if whitens else 2e-5)
    assert float((own - reference).abs().max()) > 0.01
    for row in range(len(mask)):
        advantage = after = 0.0
        for t in reversed(mask[row].nonzero().squeeze(1).tolist()):
            value = float(seen.values[row, t])
            advantage = float(seen.rewards[row, t]) + 0.9 * after - value + 0.9 * 0.8 * advantage
            after = value
        first = int(mask[row].nonzero().min())
        found = GAE(0.9, 0.8)(estimator.groups, seen, None).advantages  # type: ignore[arg-type]
        assert float(found[row, first]) == pytest.approx(advantage, abs=1e-5)
    last = read_metrics(tmp_path / "run")[-1]  # those of the penalty are of outcome and penalty alone
    assert last["kl/net_reward"] == pytest.approx(last["rollout/reward"] + last["kl/penalty_in_reward"], abs=1e-6)


def test_pair_accuracy_is_the_share_of_ordered_pairs_within_problems_and_a_tie_is_a_half() -> None:
    scores, outcomes = [3.0, 1.0, 2.0, 5.0, 5.0, 9.0], [True, False, True, True, False, True]
    # problem 1: 3 > 1, 2 > 1; problem 2: 5 = 5; problem 3 alone
    assert pair_accuracy(scores, outcomes, [3, 2, 1]) == pytest.approx(2.5 / 3)
    assert pair_accuracy([1.0, 2.0], [True, True], [2]) == 0.5


def test_outcomes_that_are_all_alike_are_said_once_a_run_of_them(
    tiny_policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A task without golds calls everything wrong, and every token is charged for it."""
    learner, experience = learner_of(tiny_policy), make_experience()
    learner.config = replace(learner.config, learning_rate=1e-3)
    alike = [groups_of([[(place, ids, right) for place, ids, _ in row] for row in ROWS]) for right in (0.0, 1.0)]
    for groups in [alike[0]] * 7:
        score(learner, experience, groups)
    (message,) = [one for one in caplog.messages if "all rollouts of the last" in one]
    assert "all rollouts of the last 5 iterations wrong" in message
    for groups in [groups_of(ROWS), *[alike[1]] * 5]:
        score(learner, experience, groups)
    assert "all rollouts of the last 5 iterations right" in caplog.text


def test_rewards_that_rank_no_better_than_chance_are_said_once_a_fall(caplog: pytest.LogCaptureFixture) -> None:
    watch, mixed = RankWatch("ranked {share:.0f} % over {num}"), ([True, False] * 8, [2] * 8)
    said = [watch.add(accuracy, *mixed) for accuracy in (0.9, 0.5, 0.4, 0.4, 0.2, 0.1, 0.4)]
    assert said == [False] * 4 + [True] + [False] * 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("ranked 48 % over 5")
    assert not any(watch.add(1.0, *mixed) for _ in range(5))
    assert [watch.add(0.0, *mixed) for _ in range(4)] == [False, False, True, False]
    alone = RankWatch("")  # nothing to compare is no chance
    assert not any(alone.add(0.5, [True, True, False], [2, 1]) for _ in range(9))
    few = RankWatch("over {num}")  # one problem with both kinds in an iteration: chance looks like this for long
    assert [few.add(0.4, [True, False, True, True], [2, 2]) for _ in range(31)] == [False] * 29 + [True, False]
    assert caplog.messages[-1] == "over 30"


def test_a_group_outside_the_range_of_accuracies_is_replaced() -> None:
    (group,) = groups_of([[(1, [1], 1.0), (1, [1], 1.0), (1, [1], 1.0), (1, [1], 1.0), (1, [1], 0.0)]])
    assert not is_replaceable(group, [0.0, 1.0])
    assert not is_replaceable(group, [0.2, 0.8])
    assert is_replaceable(group, [0.2, 0.7])
    (agreeing,) = groups_of([[(1, [1], 1.0), (1, [1], 1.0)]])
    assert is_replaceable(agreeing, [0.0, 1.0])


NODE = {"_target_": "espalier.rl.advantages.prime.PRIME"}
RLOO = {"_target_": "espalier.rl.advantages.rloo.RLOO"}
PPO = {"_target_": "espalier.rl.advantages.gae.GAE", "gamma": 1.0, "lam": 1.0}
PLUS_PLUS = {"_target_": "espalier.rl.advantages.reinforce_plus_plus.ReinforcePlusPlusAdvantage"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": NODE}, "reads an implicit reward, and the run has none: set implicit_reward=policy"),
        (
            {"advantage": RLOO, "implicit_reward": ImplicitRewardConfig()},
            "trained for nothing: set implicit_reward=none, or choose advantage=prime, gae or reinforce_plus_plus",
        ),
        (
            {"advantage": PLUS_PLUS | {"has_group_baseline": True}, "implicit_reward": ImplicitRewardConfig()},
            "ReinforcePlusPlusAdvantage takes a baseline without implicit rewards off rewards that have them",
        ),
        (
            {"advantage": NODE, "implicit_reward": ImplicitRewardConfig(weight=5.0)},
            "by advantage.process_weight, and implicit_reward.weight=5 is for gae",
        ),
        ({"advantage": PPO, "implicit_reward": ImplicitRewardConfig(weight=-1.0)}, "weight must be at least 0, got -1"),
        (
            {"advantage": PPO, "implicit_reward": ImplicitRewardConfig(), "estimators": {"prime": NODE}},
            "samples.estimators are compared on one scale, and implicit rewards are added",
        ),
        (
            {
                "advantage": NODE,
                "implicit_reward": ImplicitRewardConfig(update="after"),
                "rollout_num_problems": 4,
                "group_size": 8,
                "minibatch_size": 16,
                "filter": {"num_kept": 6},
            },
            r"minibatch_size \(16\) parts groups of 6 rollouts",
        ),
        ({"advantage": NODE, "implicit_reward": ImplicitRewardConfig(update="later")}, "must be one of before, after"),
        ({"advantage": NODE, "implicit_reward": ImplicitRewardConfig(reference="x")}, "must be one of start, policy"),
        ({"advantage": NODE, "implicit_reward": ImplicitRewardConfig(beta=0.0)}, "beta must be above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        check_implicit_reward(root_config(RLConfig, **settings))


def test_estimators_that_discount_rewards_of_tokens_take_implicit_ones_and_critics_of_shares_do_not() -> None:
    for advantage in (PPO, PLUS_PLUS):
        check_implicit_reward(
            root_config(RLConfig, advantage=advantage, implicit_reward=ImplicitRewardConfig(weight=5.0))
        )
    kept = {"rollout_num_problems": 4, "group_size": 8, "minibatch_size": 12, "filter": {"num_kept": 6}}
    after = ImplicitRewardConfig(update="after")
    check_implicit_reward(root_config(RLConfig, advantage=NODE, implicit_reward=after, **kept))
    further = {"rloo": RLOO, "plain": PPO}
    check_implicit_reward(
        root_config(RLConfig, advantage=NODE, implicit_reward=ImplicitRewardConfig(), estimators=further)
    )

    def check(form: str, implicit: ImplicitRewardConfig | None) -> None:
        critic = CriticConfig(form=form)
        check_critic_range(root_config(RLConfig, advantage=PPO, critic=critic, reward=None, implicit_reward=implicit))

    check("linear", ImplicitRewardConfig())
    check("probability", None)
    with pytest.raises(BadConfig, match="implicit rewards, which have no bound, are added to those of tokens: choose"):
        check("probability", ImplicitRewardConfig())


def test_a_range_of_accuracies_needs_rounds_that_replace() -> None:
    rollout = RolloutConfig(accuracy_range=[0.2, 0.8])
    with pytest.raises(BadConfig, match="dynamic_sampling_rounds=0 replaces none"):
        check_numbers(replace(RLConfig(), rollout=rollout))
    check_numbers(replace(RLConfig(), rollout=replace(rollout, dynamic_sampling_rounds=1)))
    with pytest.raises(BadConfig, match="must be two shares, the lower first"):
        check_numbers(replace(RLConfig(), rollout=replace(rollout, accuracy_range=[0.8, 0.2])))


@pytest.mark.parametrize("settings", [
    {"implicit_reward": ImplicitRewardConfig(learning_rate=1e-3, update="before")},
    pytest.param({"implicit_reward": ImplicitRewardConfig(learning_rate=1e-3, update="after", reference="policy"),
                  "kl": KLConfig(coefficient=0.01)}, marks=pytest.mark.slow),
    {"implicit_reward": ImplicitRewardConfig(learning_rate=1e-3), "estimator": GAE(1.0, 0.95),
     "critic": CriticConfig(learning_rate=1e-3)},
])  # fmt: skip
def test_a_run_with_an_implicit_reward_stopped_and_resumed_ends_with_equal_parameters(
    settings: dict[str, Any], tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    def make(folder: str, dies_at: str = "") -> Any:
        small = {"num_iterations": 3, "num_epochs": 1, "evaluation_every": 0, "save_every": 2, "whitening": "standard"}
        small |= {
            "rollout_num_problems": 3,
            "minibatch_size": 12,
            "dynamic_sampling_rounds": 1,
            "accuracy_range": [0.2, 0.8],
        }
        small |= {"num_lines": 2}
        given = {"estimator": PRIME(), **small, **settings}
        return make_trainer(tiny_policy, task, tokenizer, tmp_path / folder, dies_at, **given)

    whole = make("whole")
    whole.run()
    with pytest.raises(ServerGone):
        make("cut", dies_at="rl-2").run()
    resumed = make("cut")
    resumed.run()
    for one, other in zip(whole.update.learners, resumed.update.learners, strict=True):
        assert torch.equal(weights(one.engine.model), weights(other.engine.model))
    start = weights(load_policy(str(tiny_policy), "eager"))
    assert not torch.equal(weights(whole.update.learners[-1].engine.model), start)
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    first = read_metrics(tmp_path / "whole")[0]
    assert first["implicit_reward/loss"] == pytest.approx(math.log(2), abs=1e-5)  # it begins as its reference
    whole.save_model()
    assert torch.equal(weights(load_policy(str(tmp_path / "whole" / "implicit_reward"))),
                       weights(whole.update.learners[-1].engine.model))  # fmt: skip
    plain = make_trainer(tiny_policy, task, tokenizer, tmp_path / "cut", "", num_iterations=3)
    with pytest.raises(BadCheckpoint, match=f"has a trained {'critic' if 'critic' in settings else 'implicit_reward'}"):
        plain.run()
