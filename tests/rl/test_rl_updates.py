"""Updates: every term's step is its gradient, whatever the micro-batches; which groups are drawn again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from espalier.data.records import Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models import token_scores
from espalier.models.load import load_policy
from espalier.models.logprobs import response_logprobs
from espalier.models.scalar_head import load_critic
from espalier.rewards.score import Score
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.remax import ReMaxAdvantage
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.critic import Critic
from espalier.rl.experience import policy_logits
from espalier.rl.iteration_metrics import Clock
from espalier.rl.kl import full_divergence
from espalier.rl.metrics import agrees
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.policy import Policy
from espalier.rl.problem_order import draw_problems
from espalier.rl.training_engines import has_noise, without_dropout
from espalier.rl.types import Estimate, Experience
from espalier.rl.update import Update, steps_per_iteration
from espalier.runtime.schemas import CriticConfig, KLConfig, RLConfig
from espalier.training.engine import TorchEngine
from tests.support.pass_logprobs import token_logprobs
from tests.support.rl_cases import make_trainer, make_update, read_metrics
from tests.support.root_config import root_config


def make_experience(model: Any) -> Experience:
    """Four ragged rollouts; old log-probs are the model's own."""
    lengths = [(3, 4), (5, 1), (2, 7), (4, 2)]
    total = max(sum(row) for row in lengths)
    ids = torch.randint(5, 300, (4, total), generator=torch.Generator().manual_seed(0))
    places = torch.arange(total)
    attention = torch.stack([places < a + b for a, b in lengths]).long()
    mask = torch.stack([(places >= a) & (places < a + b) for a, b in lengths])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits
        old = torch.nn.functional.pad(token_logprobs(logits, ids)[0], (1, 0)) * mask
    zeros = torch.zeros(4, total)
    advantages = torch.tensor([[1.0], [-2.0], [0.5], [0.0]]) * mask
    return Experience(ids, attention, mask, old, OldLogprobs(old, zeros), advantages=advantages)


def moved(model: Any, experience: Experience, reference: Any = None, **changes: Any) -> torch.Tensor:
    """The model's parameters minus what they were: plain gradient descent at rate 1."""
    before = flat(model)
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    settings: dict[str, Any] = {"precision": "fp32", "minibatch_size": 4, "micro_batch_size": 4, "learning_rate": 1.0}
    config = root_config(RLConfig, **{**settings, **changes})
    make_update(engine, config, reference)(experience, 0)
    return flat(model) - before


def flat(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def slope(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def noisy(path: Path) -> Any:
    model: Any = load_policy(str(path), "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_a_full_penaltys_step_is_the_gradient_of_the_exact_divergence(tiny_policy: Path) -> None:
    reference: Any = load_policy(str(tiny_policy), "eager")
    model = noisy(tiny_policy)
    experience = replace(make_experience(model), advantages=torch.zeros(4, 9), reference_logprobs=torch.zeros(4, 9))
    given = (experience.ids, experience.attention_mask)
    with torch.no_grad():
        fixed = policy_logits(reference, *given)
    exact = full_divergence(policy_logits(model, *given), fixed, 1.0)[experience.response_mask].mean()
    expected = -0.5 * slope(model, exact)
    found = moved(model, experience, reference, kl=KLConfig(coefficient=0.5, kind="full"), micro_batch_size=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


class Rates:
    """An engine in whose place only the learning rates of its steps are kept."""

    def __init__(self, model: Any):
        self.model, self.device, self.rates = model, torch.device("cpu"), list[float]()

    def start_step(self, num_micro_batches: int) -> None: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def discard(self) -> None:
        self.rates.append(0.0)  # a minibatch that is left out

    def step(self, rate: float) -> float:
        self.rates.append(rate)
        return 0.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 4 iterations of 2 epochs of 2 minibatches, the first iteration the critic's alone: 12 steps, 2 of them warm-up
        ({"schedule": "linear", "warmup_steps": 2}, [6, 12, 12, 10.8, 9.6, 8.4, 7.2, 6, 4.8, 3.6, 2.4, 1.2]),
        ({"schedule": "constant", "warmup_steps": 3}, [4, 8, *[12] * 10]),
        ({"schedule": "linear", "num_epochs": 1, "minibatch_size": 3}, [12, 10, 8, 6, 4, 2]),
        ({"schedule": "linear", "num_epochs": 1, "minibatch_size": 4}, [12, 8, 4]),
        # a minibatch whose ratio ran away is left out; the schedule goes on all the same
        ({"schedule": "linear", "num_epochs": 1, "minibatch_size": 4, "max_mean_ratio": 1e-9}, [0, 0, 0]),
    ],
)
def test_the_policys_schedule_reaches_its_end_after_the_critics_warm_up(
    changes: dict[str, Any], expected: list[float], tiny_policy: Path
) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    experience = make_experience(model)
    experience = replace(experience, values=experience.advantages, returns=experience.advantages)
    settings: dict[str, Any] = {"precision": "fp32", "rollout_num_problems": 2, "group_size": 2, "num_iterations": 4,
                                "num_epochs": 2, "minibatch_size": 2, "learning_rate": 12.0}  # fmt: skip
    warming_up = CriticConfig(num_warmup_iterations=1, learning_rate=8.0, schedule="linear")
    config = root_config(RLConfig, **{**settings, **changes}, critic=warming_up)
    engine: Any = Rates(model)
    fitted: Any = Rates(load_critic(str(tiny_policy), "policy", "eager"))
    critic = Critic(fitted, warming_up, "fp32", 4, num_steps=4 * steps_per_iteration(config))
    reported = []
    for iteration in range(4):  # every iteration by an update of its own, as after a resume
        (policy,) = make_update(engine, config).learners
        update = Update(config, [policy, critic])
        reported.append(update(experience, iteration).get("learning_rate"))
    assert engine.rates == pytest.approx(expected)
    assert reported[0] is None
    number = len(fitted.rates)  # the critic is trained in every iteration
    assert fitted.rates == pytest.approx([8 * (number - step) / number for step in range(number)])


def test_the_schedule_stays_where_an_iteration_has_fewer_rollouts(tiny_policy: Path) -> None:
    model: Any = load_policy(str(tiny_policy), "eager")
    whole = make_experience(model)
    config = root_config(RLConfig, precision="fp32", rollout_num_problems=2, group_size=2, num_iterations=3,
                         minibatch_size=2,
                      learning_rate=12.0, warmup_steps=3, schedule="linear")  # fmt: skip
    assert whole.advantages is not None
    old = OldLogprobs(whole.old_logprobs[:2], whole.entropies[:2])
    half = Experience(whole.ids[:2], whole.attention_mask[:2], whole.response_mask[:2], whole.rollout_logprobs[:2], old,
                      advantages=whole.advantages[:2])  # fmt: skip
    engine: Any = Rates(model)
    for iteration, experience in enumerate([whole, half, whole]):
        make_update(engine, config)(experience, iteration)
    assert engine.rates == [4.0, 8.0, 12.0, 8.0, 4.0]  # of 4, 8, 12, 12, 8, 4: the fourth step is not made


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coefficient=0.0001, kind="full")])
def test_an_entropy_bonus_step_is_the_gradient_of_the_entropy(kl: KLConfig, tiny_policy: Path) -> None:
    model = noisy(tiny_policy)
    experience = replace(make_experience(model), advantages=torch.zeros(4, 9))
    if kl.coefficient:  # against itself: a divergence of 0, and no gradient
        experience = replace(experience, reference_logprobs=torch.zeros(4, 9))
    shares = torch.log_softmax(policy_logits(model, experience.ids, experience.attention_mask), dim=-1)
    entropy = -(shares.exp() * shares).sum(-1)[experience.response_mask].mean()
    expected = 0.1 * slope(model, entropy)
    found = moved(model, experience, noisy(tiny_policy), entropy_bonus=0.1, micro_batch_size=1, kl=kl)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


class Sizes(TorchDispatchMode):
    """Keeps the largest number of scores, tokens x vocabulary, that stands in one tensor."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.vocabulary, self.head, self.largest, self.largest_scores = vocabulary, (hidden, vocabulary), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
                if value.shape[-1:] == (self.vocabulary,) and value.shape != self.head:
                    self.largest_scores = max(self.largest_scores, value.numel())
        return found


@pytest.mark.parametrize("max_scores", [320 * 3, 2**22])
def test_an_entropy_bonus_is_computed_in_chunks_with_the_value_and_gradient_of_the_whole(
    max_scores: int, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(token_scores.MAX_SCORES, "cpu", max_scores)
    monkeypatch.setattr(token_scores, "LEAST_TOKENS", 1)
    model = noisy(tiny_policy)
    assert model.config.vocab_size == 320
    ids = torch.randint(5, 300, (8, 120), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(120).expand(8, 120) >= 10
    old = response_logprobs(model, ids, torch.ones_like(ids))[0].detach()
    old, zeros = torch.nn.functional.pad(old, (1, 0)) * mask, torch.zeros(8, 120)
    experience = Experience(ids, torch.ones_like(ids), mask, old, OldLogprobs(old, zeros), advantages=0.5 * mask)
    logits = policy_logits(model, ids, experience.attention_mask) / 0.8
    shares = torch.log_softmax(logits.double(), dim=-1)
    entropy = -(shares.exp() * shares).sum(-1)[mask].mean()
    chosen = shares.gather(-1, ids[..., None]).squeeze(-1)
    loss = -(0.5 * torch.exp(chosen - chosen.detach()) * mask).sum() / mask.sum() - 0.1 * entropy
    expected = -slope(model, loss)
    # ratios are 1: the old log-probs are those at the sampling temperature
    experience = replace(experience, old=OldLogprobs(chosen.detach().float() * mask, zeros))
    before = flat(model)
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    config = root_config(
        RLConfig, precision="fp32", minibatch_size=8, micro_batch_size=8, learning_rate=1.0, entropy_bonus=0.1
    )
    with Sizes(320, model.config.hidden_size) as sizes:
        found = make_update(engine, config, temperature=0.8, max_tokens=128)(experience, 0)
    torch.testing.assert_close(flat(model) - before, expected, rtol=0, atol=1e-6)
    assert found["entropy_bonus"] == pytest.approx(0.1 * float(entropy.detach()), abs=1e-6)
    assert found["ratio"] == pytest.approx(1, abs=1e-5)
    if max_scores < 880 * 320:  # of 880 response tokens
        assert sizes.largest_scores <= max_scores
        assert sizes.largest < 880 * 320  # nor under another shape: the largest are activations


@pytest.mark.parametrize(
    ("normaliser", "divisors"),
    [("token", [14, 14, 14, 14]), ("sequence", [16, 4, 28, 8]), ("constant", [64, 64, 64, 64])],
)
def test_normalisers_divide_each_rollouts_loss_by_what_they_say(
    normaliser: str, divisors: list[int], tiny_policy: Path
) -> None:
    # at ratio 1 the surrogate's gradient is that of -A log pi; lengths are 4, 1, 7, 2 and max_tokens is 16
    for micro_batch_size in (4, 1):
        model = noisy(tiny_policy)
        experience = make_experience(model)
        assert experience.advantages is not None
        logits = model(input_ids=experience.ids, attention_mask=experience.attention_mask).logits
        per_token = token_logprobs(logits, experience.ids)[0] * experience.advantages[:, 1:]
        expected = slope(model, (per_token.sum(-1) / torch.tensor(divisors)).sum())
        found = moved(model, experience, loss_aggregation=normaliser, micro_batch_size=micro_batch_size)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_truncated_importance_sampling_weighs_tokens_by_the_engines_policy(tiny_policy: Path) -> None:
    model = noisy(tiny_policy)
    experience = make_experience(model)
    plain = moved(noisy(tiny_policy), experience)
    # the engine drew every token with half, or a tenth, of the trainer's probability: weights 2, and 2 again (capped)
    for share in (0.5, 0.1):
        other = replace(experience, rollout_logprobs=experience.old_logprobs + torch.log(torch.tensor(share)))
        torch.testing.assert_close(moved(noisy(tiny_policy), other, tis_cap=2.0), 2 * plain, rtol=0, atol=2e-6)


def test_tokens_that_are_driven_off_the_engines_policy_count_nothing_and_others_by_their_whole_ratio(
    tiny_policy: Path,
) -> None:
    """DPPO's loss is the sum of M r A, with r of the present policy and the one that drew; at the first step its
    gradient is that of r log pi, M left out."""
    model = noisy(tiny_policy)
    experience = make_experience(model)
    assert experience.advantages is not None
    generator = torch.Generator().manual_seed(0)
    shift = 1.5 * torch.randn(experience.old_logprobs.shape, generator=generator) * experience.response_mask
    drawn_by = (experience.old_logprobs + shift).clamp(max=-1e-4)
    limit = 0.001
    pi, mu, advantages = (tensor[:, 1:].double() for tensor in (
        experience.old_logprobs.exp(), drawn_by.exp(), experience.advantages))  # fmt: skip
    is_out = ((pi - mu).abs() > limit) & (((advantages > 0) & (pi > mu)) | ((advantages < 0) & (pi < mu)))
    counted = experience.response_mask[:, 1:].bool()
    assert 0 < int((is_out & counted).sum()) < int(counted.sum())
    factors = ((~is_out) * pi / mu * advantages * counted).float()
    logits = model(input_ids=experience.ids, attention_mask=experience.attention_mask).logits
    expected = slope(model, (token_logprobs(logits, experience.ids)[0] * factors).sum() / counted.sum())
    found = moved(noisy(tiny_policy), replace(experience, rollout_logprobs=drawn_by), correction="divergence",
                  divergence_limit=limit, tis_cap=1e6, clip_low=1.0, clip_high=1e6)  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    plain = moved(noisy(tiny_policy), replace(experience, rollout_logprobs=drawn_by), tis_cap=1e6)
    assert float((found - plain).abs().max()) > 1e-3


def unscored(known: Experience, asked: list[list[int]]) -> Experience:
    """The same experience before anybody has scored it; the rows of every pass of its own are added to `asked`."""
    scores = torch.stack((known.old_logprobs, known.entropies))

    def score(rows: torch.Tensor) -> Sequence[torch.Tensor]:
        asked.append(rows.tolist())
        return list(torch.zeros(scores.shape).index_copy(1, rows, scores[:, rows]))

    return replace(known, old=OldLogprobs.to_score(known.ids.shape, score, Clock()))


def one_pass_update(model: Any) -> Update:
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), 1e9)
    config = root_config(
        RLConfig, precision="fp32", minibatch_size=4, micro_batch_size=2, learning_rate=1.0, tis_cap=2.0
    )
    return make_update(engine, config)


def test_the_only_pass_gives_the_old_log_probs_before_the_step(tiny_policy: Path) -> None:
    model, other = noisy(tiny_policy), noisy(tiny_policy)
    experience = make_experience(other)
    rollout_logprobs = experience.old_logprobs + 0.3 * experience.response_mask  # so that importance weights count
    known = replace(experience, rollout_logprobs=rollout_logprobs)
    expected = moved(other, known, tis_cap=2.0, micro_batch_size=2)

    before, asked, seen = flat(model), list[list[int]](), []
    unknown, update = unscored(known, asked), one_pass_update(model)
    (policy,) = update.learners
    assert isinstance(policy, Policy)

    class Comparison:
        is_compared = False

        def compare(self, experience: Experience) -> dict[str, float]:
            self.is_compared = True
            seen.append((flat(model), experience.old_logprobs.clone()))
            return {"engine/gap_bias": 0.0}

    policy.watch = Comparison()  # type: ignore[assignment]
    found = update(unknown, 0)
    ((weights, logprobs),) = seen
    assert torch.equal(weights, before)
    assert asked == [[3]]  # has no gradient: scored apart
    assert unknown.old.in_own_pass.tolist() == [False, False, False, True]
    torch.testing.assert_close(logprobs, known.old_logprobs, rtol=0, atol=1e-5)
    assert unknown.entropies[:3].sum() > 0
    assert found["ratio"] == 1
    torch.testing.assert_close(flat(model) - before, expected, rtol=0, atol=1e-6)


def test_log_probs_that_are_read_before_the_only_pass_are_scored_then_and_trained_on(tiny_policy: Path) -> None:
    model, other = noisy(tiny_policy), noisy(tiny_policy)
    known = make_experience(other)
    expected = moved(other, known, micro_batch_size=2)
    before, asked = flat(model), list[list[int]]()
    unknown = unscored(known, asked)
    assert torch.equal(unknown.old_logprobs, known.old_logprobs)
    assert torch.equal(unknown.entropies, known.entropies)
    one_pass_update(model)(unknown, 0)
    assert asked == [[0, 1, 2, 3]]
    torch.testing.assert_close(flat(model) - before, expected, rtol=0, atol=1e-6)


class ReadingGRPO(GRPO):
    """Reads the old policy's log-probs, as an estimator of a KL penalty of its own would."""

    def __call__(self, groups: Any, experience: Experience, live: Any) -> Estimate:
        estimate = super().__call__(groups, experience, live)
        mean = float(experience.old_logprobs[experience.response_mask].mean())
        return replace(estimate, metrics={"old_logprob": mean, "entropy": float(experience.entropies.sum())})


@pytest.mark.slow
def test_an_estimator_reads_the_same_log_probs_whether_the_update_needs_a_pass_of_their_own_or_not(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    """Minibatches of 24 are one pass, of 12 are two; in neither an estimator sees anything that is no number."""
    rows = []
    for size in (24, 12):
        settings: dict[str, Any] = {"num_epochs": 1, "minibatch_size": size, "num_iterations": 1, "evaluation_every": 0}
        estimator = ReadingGRPO(divide_by_std=True)
        run_dir = tmp_path / str(size)
        trainer = make_trainer(tiny_policy, task, tokenizer, run_dir, "", estimator, **settings)
        assert trainer.policy.makes_one_pass(24) == (size == 24)
        trainer.run()
        rows += read_metrics(run_dir)
    one, two = rows
    assert one["estimate/old_logprob"] == two["estimate/old_logprob"] < -1
    assert one["estimate/entropy"] == two["estimate/entropy"] > 0
    assert one["forward/tokens"] == two["forward/tokens"] > 0  # the pass was made when they were read
    assert one["engine/gap_mean"] == two["engine/gap_mean"]


@pytest.mark.parametrize(
    "changes", [{"num_epochs": 2}, {"minibatch_size": 3}, {"entropy_bonus": 0.1}, {"kl": KLConfig(coefficient=0.1)}]
)
def test_what_needs_earlier_log_probs_makes_more_than_one_pass(tiny_policy: Path, changes: dict[str, Any]) -> None:
    engine: Any = None
    config = root_config(RLConfig, **{"minibatch_size": 4, **changes})
    (policy,) = make_update(engine, config).learners
    assert isinstance(policy, Policy)
    assert not policy.makes_one_pass(4)


@pytest.mark.parametrize(
    ("estimator", "may_wait"),
    [(GRPO(divide_by_std=True), True), (VinePPO(completions_per_state=2), False),
     (ReMaxAdvantage(), False)],
)  # fmt: skip
def test_what_samples_more_is_compared_with_the_engine_first(
    estimator: Any, may_wait: bool, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    one_pass = {"num_epochs": 1, "minibatch_size": 24}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", estimator, **one_pass)
    assert trainer.policy.may_wait == may_wait


def test_noise_of_training_is_switched_off_or_known() -> None:
    loud = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    assert has_noise(loud)
    without_dropout(loud)
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(loud.train()(input_ids=ids).logits, loud.eval()(input_ids=ids).logits)
    quiet = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))  # fmt: skip
    assert not has_noise(quiet)
    jittery = MixtralForCausalLM(MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2, router_jitter_noise=0.5,
    ))  # fmt: skip
    assert has_noise(jittery)
    without_dropout(jittery)
    assert torch.equal(jittery.train()(input_ids=ids).logits, jittery.eval()(input_ids=ids).logits)


def test_a_run_learns_the_same_in_one_pass_as_in_two(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    for number in (1, 2):
        settings = {"num_epochs": 1, "minibatch_size": 24, "num_iterations": 2, "evaluation_every": 0}
        trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / str(number), "", **settings)
        if number == 2:
            monkeypatch.setattr(trainer.policy, "makes_one_pass", lambda _: False)
        trainer.run()
        whole.append((flat(trainer.policy.engine.model), read_metrics(tmp_path / str(number))))
    (one, rows), (two, others) = whole
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    assert rows[0].keys() == others[0].keys()
    for row, other in zip(rows, others, strict=True):
        assert 0 < row.pop("forward/tokens") < other.pop("forward/tokens")
        assert row == pytest.approx(other, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("setting", [True, "selective"])
def test_checkpointed_gradients_are_the_same_gradients(setting: bool | str, tiny_policy: Path) -> None:
    plain: Any = load_policy(str(tiny_policy), "eager")
    saving: Any = load_policy(str(tiny_policy), "eager", gradient_checkpointing=setting)
    experience = make_experience(plain)
    torch.testing.assert_close(moved(saving, experience), moved(plain, experience), rtol=0, atol=1e-7)


def test_later_rounds_draw_other_problems(task: WordArithmetic) -> None:
    problems = task.problems("train")
    rounds = [draw_problems(problems, 60, 1, 3, number) for number in range(5)]
    assert rounds[0] == draw_problems(problems, 60, 1, 3)
    names = [problem.id for drawn in rounds for problem in drawn]
    assert len(names) == len(set(names)) == len(problems) == 200
    assert [len(drawn) for drawn in rounds] == [60, 60, 60, 20, 0]


def test_groups_that_agree_are_replaced_and_counted(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", dynamic_sampling_rounds=8)
    with trainer.loop:
        groups, again = trainer.rollout_source(0), trainer.rollout_source(0)
    drawn = trainer.metrics.take()
    assert [group.problem for group in groups] == [group.problem for group in again]
    assert len(groups) == 6
    assert drawn["rollout/num_groups"] > 6
    # of all that were drawn, as the reward is: those that agree are mostly wrong
    assert drawn["rollout/drawn_accuracy"] == pytest.approx(drawn["rollout/reward"])
    kept = [rollout.trajectory.is_correct for group in groups for rollout in group.rollouts]
    assert drawn["rollout/drawn_accuracy"] < sum(kept) / len(kept)
    # 4 answers of 9 possible ones: most groups have no right one at all
    assert drawn["rollout/zero_variance"] > 0.4
    assert drawn["rollout/trained_zero_variance"] == sum(map(agrees, groups)) / 6 < drawn["rollout/zero_variance"]
    assert agrees(replace(groups[0], scores=[Score(0.5)] * 4))
    assert isinstance(groups[0].problem, Problem)
