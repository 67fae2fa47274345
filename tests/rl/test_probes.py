"""The probes of reinforcement learning: planted faults are named, clean rollouts raise nothing."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import BadModel, load_policy
from espalier.rewards.score import Score
from espalier.rl.combinations import check_clusters, check_correction
from espalier.rl.delivery import policy_weights
from espalier.rl.delivery.delivery import sample_canaries
from espalier.rl.delivery.receipts import StaleWeights, check_receipt
from espalier.rl.delivery.start_proof import scratch_copy
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.experience import make_experience
from espalier.rl.group_scores import score
from espalier.rl.losses import clipped_surrogate, importance_weights
from espalier.rl.probes.canary import Canary, Unproven, canary_scores, serves_old, step_kl
from espalier.rl.probes.checks import (
    BOS,
    CACHE,
    CRASH,
    KL,
    PAD,
    REMEDIES,
    REWARD,
    SHIFT,
    STOP,
    TEMPERATURE,
    TOP_P,
    UNKNOWN,
    UNUSED,
    VERSION,
    WEIGHTS,
    ExpectedRow,
    ProbeFailed,
    check_layout,
    crossed,
    measure_gap,
    surprise,
)
from espalier.rl.probes.diagnosis import AskEngine, LogprobMismatch, _asked_again, truncated_logprobs
from espalier.rl.probes.watch import Watch
from espalier.rl.rollout import Sampler
from espalier.rl.training_engines import check_experts
from espalier.rl.types import Experience, Rollout, RolloutGroup
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import ProbesConfig, RLConfig
from espalier.sampling.client import SampleRequest, SamplingParams, ServerGone
from espalier.sampling.weight_digest import digest
from espalier.training.engine import named_weights
from tests.support.rl_cases import PARAMS, FakeClient, FakeEngine, make_trainer, read_metrics
from tests.support.root_config import root_config

ROOT = Path(__file__).resolve().parent.parent.parent


# --- measures ---------------------------------------------------------------------------------------------------


NO_TOKENS = torch.zeros(1, 1)
NO_ROUNDING = measure_gap(NO_TOKENS, NO_TOKENS, NO_TOKENS.bool())


def test_a_gap_by_hand_on_four_tokens() -> None:
    # trainer - engine: 0.1, -0.3, 0.2 and 0; the fifth is masked
    engine = torch.tensor([[-1.0, -1.0, -2.0], [-1.0, -1.0, -9.0]], dtype=torch.float64)
    trainer = torch.tensor([[-0.9, -1.3, -1.8], [-1.0, -5.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = measure_gap(engine, trainer, mask)
    assert found.tokens == 4
    assert found.mean == pytest.approx(0.15)
    assert found.bias == pytest.approx(0.0)
    assert found.p99 == found.largest == pytest.approx(0.3)
    assert found.largest_sequence == pytest.approx(0.0, abs=1e-12)
    ratios = [math.exp(x) for x in (0.1, -0.3, 0.2, 0.0)]
    assert found.k3 == pytest.approx((sum(ratios) - 4) / 4)
    assert found.outside == 0.5  # exp(-0.3) = 0.74 and exp(0.2) = 1.22
    assert found.effective == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)))
    assert found.bias_error == pytest.approx(math.sqrt((0.01 + 0.09 + 0.04) / 4 / 4))


def test_a_log_prob_that_is_no_number_crosses_every_limit() -> None:
    mask = torch.tensor([[True, True]])
    found = measure_gap(torch.tensor([[-1.0, float("nan")]]), torch.zeros(1, 2), mask)
    assert len(crossed(found, NO_ROUNDING)) == 3
    assert len(crossed(found, NO_ROUNDING, max_gap=9.0)) == 1


def test_a_bias_counts_beyond_what_few_tokens_make_by_chance() -> None:
    few = torch.tensor([[0.02, -0.01, 0.03, -0.02]])  # mean 0.005, standard error 0.01
    mask = torch.ones(1, 4, dtype=torch.bool)
    rounding = replace(NO_ROUNDING, mean=0.005, k3=4e-4)
    assert crossed(measure_gap(torch.zeros(1, 4), few, mask), rounding) == []
    many = few.repeat(1, 1000) + 0.005
    found = crossed(measure_gap(torch.zeros(1, 4000), many, torch.ones(1, 4000, dtype=torch.bool)), rounding)
    assert [reason.split()[0] for reason in found] == ["bias"]


def test_a_difference_is_held_against_what_rounding_makes_of_this_policy() -> None:
    """0.1 nats per token: twenty times what rounding makes of one policy, twice what it makes of another."""
    mask = torch.ones(1, 4000, dtype=torch.bool)
    gap = measure_gap(torch.zeros(1, 4000), torch.tensor([[0.1, -0.1]]).repeat(1, 2000), mask)
    quiet, sharp = replace(NO_ROUNDING, mean=0.005, k3=2e-5), replace(NO_ROUNDING, mean=0.05, k3=2e-3)
    assert [reason.split()[0] for reason in crossed(gap, quiet)] == ["mean", "k3"]
    assert crossed(gap, sharp) == []
    assert [len(crossed(gap, sharp, max_gap=limit)) for limit in (0.09, 0.11)] == [1, 0]


def test_no_tokens_have_no_gap() -> None:
    empty = torch.zeros(2, 3)
    assert crossed(measure_gap(empty, empty, torch.zeros(2, 3, dtype=torch.bool)), NO_ROUNDING) == []


def drawn(top_p: float, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs, entropies, mask) of 4,000 tokens drawn from softmax(z / temperature) cut at `top_p`, scored by
    softmax(z)."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(4000, 30, generator=generator)
    shares = torch.softmax(logits / temperature, -1)
    ordered, order = shares.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    ids = order.gather(-1, torch.multinomial(ordered, 1, generator=generator))
    logs = torch.log_softmax(logits, -1)
    mask = torch.ones(1, 4000, dtype=torch.bool)
    return logs.gather(-1, ids).T, -(logs.exp() * logs).sum(-1)[None], mask


def test_tokens_drawn_as_their_log_probs_say_surprise_by_their_entropy() -> None:
    assert abs(surprise(*drawn(1.0))[1]) < 3


@pytest.mark.parametrize(("top_p", "temperature", "sign"), [(0.9, 1.0, -1), (1.0, 0.7, -1), (1.0, 1.3, 1)])
def test_tokens_drawn_otherwise_do_not(top_p: float, temperature: float, sign: int) -> None:
    mean, errors = surprise(*drawn(top_p, temperature))
    assert errors * sign > 6
    assert mean * sign > 0.02


def test_rare_tokens_that_were_not_drawn_are_no_surprise() -> None:
    """Of 400 tokens at 0.99, none of the other kind: that happens to one sample in 56, and their scatter is 0."""
    logprobs, mask = torch.full((1, 400), math.log(0.99)), torch.ones(1, 400, dtype=torch.bool)
    entropy = -0.99 * math.log(0.99) - 0.01 * math.log(0.01)
    entropies, variance = torch.full((1, 400), entropy), 0.99 * 0.01 * math.log(99) ** 2
    mean, errors = surprise(logprobs, entropies, mask)
    assert mean < -0.02
    assert errors < -6
    _, errors = surprise(logprobs, entropies, mask, torch.full((1, 400), variance))
    assert errors == pytest.approx((-math.log(0.99) - entropy) / math.sqrt(variance / 400), rel=1e-4)
    assert errors > -3


# --- the tensors themselves -------------------------------------------------------------------------------------

END = 1


def layout_fault(
    spoil: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    prompt: tuple[int, ...] = (7, 5, 6),
    finish_reason: str = "stop",
    response: tuple[int, ...] = (8, 9, END),
) -> str:
    """The kind of fault that is seen; rows are `prompt` and response, and one that is two tokens longer."""
    rows = [ExpectedRow(prompt, response, finish_reason), ExpectedRow((7, 4, 4, 4), (8, 8, 9, END), "stop")]
    width = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    tensors = {name: torch.zeros(2, width, dtype=torch.long) for name in ("ids", "attention_mask", "response_mask")}
    for number, row in enumerate(rows):
        length = len(row.prompt_ids) + len(row.response_ids)
        tensors["ids"][number, :length] = torch.tensor([*row.prompt_ids, *row.response_ids])
        tensors["attention_mask"][number, :length] = 1
        tensors["response_mask"][number, len(row.prompt_ids) : length] = 1
    spoil(tensors)
    mask = tensors["response_mask"].bool()
    fault = check_layout(rows, tensors["ids"], tensors["attention_mask"], mask,
                         end_ids=[END], bos_id=7, has_stop_strings=False)  # fmt: skip
    return fault.kind if fault else ""


def rolled(*names: str, by: int = 1) -> Callable[[dict[str, torch.Tensor]], None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name][0] = torch.roll(tensors[name][0], by)

    return spoil


def test_rows_as_they_should_be_have_no_fault() -> None:
    assert layout_fault() == ""
    assert layout_fault(finish_reason="length", response=(8, 9)) == ""


def test_padding_on_the_left_is_named() -> None:
    assert layout_fault(rolled("ids", "attention_mask", "response_mask", by=2)) == PAD
    assert layout_fault(rolled("ids", "attention_mask", by=2)) == PAD


def test_an_end_token_outside_the_mask_is_named() -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["response_mask"][0, 5] = 0

    assert layout_fault(spoil) == STOP


def test_an_end_token_that_was_thrown_away_is_named() -> None:
    assert layout_fault(response=(8, 9)) == STOP


def test_a_mask_without_the_last_token_is_named_for_a_response_that_was_cut_too() -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["response_mask"][0, 4] = 0

    assert layout_fault(spoil, finish_reason="length", response=(8, 9)) == STOP


@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_that_is_off_by_one_is_named(by: int) -> None:
    assert layout_fault(rolled("response_mask", by=by)) == SHIFT


def test_a_prompt_that_begins_twice_is_named() -> None:
    assert layout_fault(prompt=(7, 7, 5)) == BOS


def test_a_row_with_a_token_before_the_sampled_prompt_is_named() -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name][0] = torch.roll(tensors[name][0], 1)
        tensors["ids"][0, 0], tensors["attention_mask"][0, 0] = 7, 1

    assert layout_fault(spoil) == BOS


# --- the engine's log-probs, spoilt one way at a time --------------------------------------------------------------


class Tokens:
    """A tokenizer as far as the probes ask it."""

    bos_token_id, cls_token_id, eos_token_id = 3, None, 1


def rollout_logprobs(
    model: Any, prompt: list[int], response: list[int], temperature: float = 1.0, top_p: float = 1.0, noise: float = 0.0
) -> list[float]:
    """What an engine would say of the response: transformers' logits of this row alone, in float32."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    found = truncated_logprobs(logits, torch.tensor(response), top_p)
    generator = torch.Generator().manual_seed(len(prompt))
    return (found + noise * torch.randn(found.shape, generator=generator)).tolist()


def sharp_policy(path: Path) -> Any:
    """The tiny policy with a head that prefers some tokens clearly, as a trained one does."""
    model: Any = load_policy(str(path), "eager")
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model


DRAWN: dict[float, list[tuple[list[int], list[int]]]] = {}


def drawn_rollouts(model: Any, temperature: float) -> list[tuple[list[int], list[int]]]:
    """Ten prompts with responses of 20 to 29 tokens from the sharp policy, drawn once for each temperature."""
    if temperature not in DRAWN:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(5, 300, (4 + number % 5,), generator=generator).tolist() for number in range(10)]
        DRAWN[temperature] = []
        for number, prompt in enumerate(prompts):
            found = model.generate(
                torch.tensor([prompt]), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                max_new_tokens=20 + number, suppress_tokens=[END], pad_token_id=0,
            )  # fmt: skip
            DRAWN[temperature].append((prompt, found[0, len(prompt) :].tolist()))
    return DRAWN[temperature]


@dataclass
class Answering:
    """Engines whose answers are given."""

    logprobs_of: AskEngine
    has_received: bool
    is_awake: bool = True
    computes_in: torch.dtype = torch.bfloat16

    def is_received(self) -> bool:
        return self.has_received


def look(
    model: Any,
    say: Callable[[list[int], list[int]], list[float]],
    ask: AskEngine | None = None,
    spoil: Callable[[Experience], Experience] = lambda experience: experience,
    temperature: float = 1.0,
    is_received: bool = False,
    is_awake: bool = True,
    computes_in: torch.dtype = torch.bfloat16,
    num_looks: int = 1,
    **limits: Any,
) -> dict[str, float]:
    """The probes' metrics of rollouts drawn from the model, the last look's; raises ProbeFailed. `say`: the engine's
    log-probs."""
    rollouts = []
    for prompt, response in drawn_rollouts(model, temperature):
        logprobs = say(prompt, response)
        trajectory = Trajectory("p/0", "p", "", "", [], prompt, response, [], "length", gold="1", answer="1",
                                is_correct=True)  # fmt: skip
        rollouts.append(Rollout(trajectory, logprobs, policy_version=2))
    groups = [RolloutGroup(Problem("p", "", "1"), rollouts, [])]
    experience, _ = make_experience(groups, model, pad_id=0, micro_batch_size=8, precision="fp32",
                                    temperature=temperature)  # fmt: skip
    config = RLConfig(precision="fp32", probes=ProbesConfig(**limits))
    params = SamplingParams(n=4, temperature=temperature, max_tokens=32, return_logprobs=True)
    engines = Answering(ask, is_received, is_awake, computes_in) if ask is not None else None
    watch, experience = Watch(config, model, params, Tokens(), engines), spoil(experience)
    for _ in range(num_looks):
        found = watch.look(groups, experience, version=2) | watch.compare(experience)
    return found


def test_a_pass_without_rounding_is_computed_as_the_training_engine_has_it(tiny_policy: Path) -> None:
    """DeepSpeed sets a precision of its own: plain autocast would leave its pass in bf16, with a rounding of 0."""
    asked: list[str] = []

    def computing_in(precision: str) -> Any:
        asked.append(precision)
        return nullcontext()

    model = load_policy(str(tiny_policy))
    watch = Watch(RLConfig(precision="bf16"), model, PARAMS, Tokens(), computing_in=computing_in)
    rows = torch.full((2, 5), 7)
    watch._rescore(rows, torch.ones_like(rows), 1.0, 1.0, "fp32")
    watch._rescore(rows, torch.ones_like(rows), 1.0, 1.0)
    assert asked == ["fp32", "bf16"]


def test_canaries_leave_room_in_the_engines_window_for_a_token(tmp_path: Path) -> None:
    whole, short = ([*range(7, 7 + size)] for size in (12, 6))
    rows = [Trajectory(f"p/{k}", "p", "", "", [], ids[:4], ids[4:], [], "length", "1", None, False)
            for k, ids in enumerate((whole, short))]  # fmt: skip
    write_records(tmp_path / "canaries.jsonl", rows)
    sampler: Any = SimpleNamespace(client=SimpleNamespace(max_model_length=12))
    nobody: Any = None
    arguments = (tmp_path / "canaries.jsonl", [], sampler, PARAMS, nobody, 0, nobody)
    assert asyncio.run(sample_canaries(*arguments)) == [Canary(whole[:11], 4), Canary(short, 4)]
    sampler.client.max_model_length = None
    assert asyncio.run(sample_canaries(*arguments)) == [Canary(whole, 4), Canary(short, 4)]


def test_a_server_that_does_not_say_what_it_had_cached_is_named_once(
    caplog: pytest.LogCaptureFixture, tiny_policy: Path
) -> None:
    class Silent(FakeEngine):
        async def stamp(self, version: str) -> None: ...

        async def served_version(self) -> str:
            return ""

        async def cached_tokens(self, ids: list[int]) -> int | None:
            return None

    sync = WeightSync(Silent(tiny_policy))
    sync.canaries = [Canary([7, 8, 9], 2)]
    with caplog.at_level(logging.WARNING):
        assert [set(asyncio.run(sync._cached()).values()) for _ in range(2)] == [{0}, {0}]
    assert [record.getMessage().count("--enable-prompt-tokens-details") for record in caplog.records] == [1]


def test_no_delivery_is_proven_by_canaries_without_a_response() -> None:
    weights: Any = None
    for canaries in ([], [Canary([7, 8], 2)]):
        with pytest.raises(StaleWeights, match="the canaries have no response"):
            scratch_copy(weights, canaries, torch.float32, 0)


@pytest.mark.parametrize(("more", "line"), [
    ({"model_type": "mixtral", "num_local_experts": 8}, "mixtral is held under other names"),
    ({"model_type": "qwen3_moe", "num_experts": 64}, "has experts, and vLLM on CPUs computes otherwise"),
    ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "has experts, and vLLM on CPUs"),
])  # fmt: skip
def test_networks_whose_experts_engines_do_not_take_are_refused(
    more: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier.rl.training_engines.device", lambda: torch.device("cpu"))
    config = SimpleNamespace(**more)
    config.get_text_config = lambda: config
    model: Any = torch.nn.Identity()
    model.config = config
    with pytest.raises(BadModel, match=f"^M:? ?{line}"):
        check_experts(model, "M")


def test_a_network_without_experts_is_taken(tiny_policy: Path) -> None:
    check_experts(load_policy(str(tiny_policy)), str(tiny_policy))


def test_rows_that_an_engine_reads_in_part_are_compared_as_far() -> None:
    ids, mask = torch.full((2, 5), 7), torch.ones(2, 5, dtype=torch.bool)
    response = mask & (torch.arange(5) > 1)
    case = LogprobMismatch(ids, mask, response, torch.zeros(2, 5), torch.zeros(2, 5), 1.0, [])
    scored = torch.full((2, 5), -2.0)
    again = _asked_again(case, lambda *_: scored, lambda rows: [[[-2.0] * 4, [-2.5] * 3]])
    assert again == pytest.approx((0.5 + 0.5) / 5)  # of the second row two of three tokens


def kind_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ProbeFailed) as caught:
        look(*arguments, **options)
    assert caught.value.exit_code == 1
    assert str(caught.value).startswith(caught.value.fault.kind)
    assert REMEDIES[caught.value.fault.kind] in str(caught.value)
    return caught.value.fault.kind


def test_clean_rollouts_with_the_noise_of_bf16_pass(tiny_policy: Path) -> None:
    model = sharp_policy(tiny_policy)
    found = look(model, lambda prompt, response: rollout_logprobs(model, prompt, response, noise=0.02))
    assert found["engine/version_lag"] == 0
    assert found["engine/gap_k3"] == pytest.approx(2e-4, rel=0.5)  # half the noise's variance
    assert abs(found["engine/gap_bias"]) < 5e-3


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.3, marks=pytest.mark.slow)])
def test_an_engine_that_says_raw_log_probs_is_named(tiny_policy: Path, temperature: float) -> None:
    model = sharp_policy(tiny_policy)
    say = lambda prompt, response: rollout_logprobs(model, prompt, response)  # noqa: E731
    assert kind_of(model, say, temperature=temperature) == TEMPERATURE


def test_a_trainer_that_forgets_the_temperature_is_named(tiny_policy: Path) -> None:
    model = sharp_policy(tiny_policy)
    say = lambda prompt, response: rollout_logprobs(model, prompt, response, temperature=0.7)  # noqa: E731
    assert kind_of(model, say) == TEMPERATURE


@pytest.mark.parametrize("top_p", [0.8, 0.9, 0.95])
def test_an_engine_that_cuts_at_top_p_is_named(tiny_policy: Path, top_p: float) -> None:
    model = sharp_policy(tiny_policy)
    say = lambda prompt, response: rollout_logprobs(model, prompt, response, top_p=top_p)  # noqa: E731
    assert kind_of(model, say) == TOP_P


@pytest.mark.parametrize("by", [-1, 1])
def test_log_probs_of_the_neighbouring_token_are_named(tiny_policy: Path, by: int) -> None:
    model = sharp_policy(tiny_policy)

    def say(prompt: list[int], response: list[int]) -> list[float]:
        found = rollout_logprobs(model, prompt, response)
        return [*found[by:], *found[:by]]

    assert kind_of(model, say) == SHIFT


def test_what_rounding_made_of_the_looks_before_is_kept_with_a_checkpoint(tiny_policy: Path, tmp_path: Path) -> None:
    """A resumed run says the same of rounding as one that was not stopped; what was not learnt from is looked at
    again."""
    model = sharp_policy(tiny_policy)

    def of_look(watch: Watch, shift: float) -> float:
        rows = torch.full((6, 4), -1.0)
        experience = cast(Any, SimpleNamespace(old_logprobs=rows, response_mask=torch.ones(6, 4, dtype=torch.bool)))
        return watch._pooled(experience, slice(0, 6), rows - shift).mean

    config = RLConfig(precision="bf16")
    straight, stopped, resumed = (Watch(config, model, PARAMS, Tokens()) for _ in range(3))
    for watch in (straight, stopped):
        of_look(watch, 0.1)
        of_look(watch, 0.3)
        watch.keep()
    of_look(stopped, 9.0)  # the signal comes before anything is learnt from it
    stopped.save(tmp_path)
    resumed.load(tmp_path)
    assert of_look(resumed, 0.2) == of_look(straight, 0.2) == pytest.approx(0.2)
    fresh = Watch(config, model, PARAMS, Tokens())
    fresh.save(tmp_path)
    fresh.load(tmp_path)
    assert fresh._roundings == []
    other = Watch(RLConfig(precision="fp32"), model, PARAMS, Tokens())
    stopped.save(tmp_path)
    other.load(tmp_path)
    assert other._roundings == []  # of another arithmetic
    (tmp_path / "before").mkdir()
    fresh.load(tmp_path / "before")  # a checkpoint of a version that kept none


def test_a_bos_that_the_engine_adds_is_named(tiny_policy: Path) -> None:
    model = sharp_policy(tiny_policy)
    assert kind_of(model, lambda prompt, response: rollout_logprobs(model, [3, *prompt], response)) == BOS


def test_an_engine_with_other_weights_is_named_and_not_taken_for_its_cache(tiny_policy: Path) -> None:
    model, stale = sharp_policy(tiny_policy), sharp_policy(tiny_policy)
    with torch.no_grad():
        for value in stale.parameters():
            value.add_(0.3 * value.std() * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))

    def ask_from(engine: Any) -> AskEngine:
        return lambda rows: [[rollout_logprobs(engine, row[:1], row[1:]) for row in rows]]

    say = lambda prompt, response: rollout_logprobs(stale, prompt, response)  # noqa: E731
    assert kind_of(model, say, ask_from(stale)) == WEIGHTS
    assert kind_of(model, say, ask_from(model)) == CACHE
    both = lambda rows: ask_from(model)(rows) + ask_from(stale)(rows)  # noqa: E731
    assert kind_of(model, say, both) == WEIGHTS  # one engine of two
    assert kind_of(model, say) == UNKNOWN
    assert kind_of(model, say, ask_from(stale), is_received=True) == UNKNOWN  # receipts say that it has the weights


def test_an_engine_that_sleeps_is_not_asked_again_which_the_diagnosis_says(tiny_policy: Path) -> None:
    model, other = sharp_policy(tiny_policy), sharp_policy(tiny_policy)
    with torch.no_grad():
        for value in other.parameters():
            value.add_(0.3 * value.std() * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))

    def asked(rows: list[list[int]]) -> list[list[list[float]]]:
        raise AssertionError("it sleeps")

    say = lambda prompt, response: rollout_logprobs(other, prompt, response)  # noqa: E731
    with pytest.raises(ProbeFailed, match=r"the engines sleep and were not asked again: engine\.sleeps=false would"):
        look(model, say, asked, is_awake=False)


def test_a_warning_leaves_the_run_alone(tiny_policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = sharp_policy(tiny_policy)
    say = lambda prompt, response: rollout_logprobs(model, prompt, response, temperature=0.7)  # noqa: E731
    found = look(model, say, on_fault="warn")
    assert TEMPERATURE in caplog.text
    assert found["engine/ratios_outside"] > 0.05


def test_where_both_sides_compute_in_float32_no_pass_measures_rounding(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, passes, rescore = sharp_policy(tiny_policy), [], Watch._rescore

    def counted(self: Watch, *arguments: Any) -> torch.Tensor:
        passes.append(arguments)
        return rescore(self, *arguments)

    monkeypatch.setattr(Watch, "_rescore", counted)

    def say(prompt: list[int], response: list[int]) -> list[float]:
        return rollout_logprobs(model, prompt, response)

    for dtype, number in ((torch.float32, 0), (torch.bfloat16, 1)):
        passes.clear()
        found = look(model, say, ask=lambda rows: [], computes_in=dtype)
        assert [len(rows) for rows, *_ in passes] == [10] * number
        assert (found["engine/rounding"] > 0) == bool(number)
    with pytest.raises(ProbeFailed):
        look(model, lambda *row: [value - 0.1 for value in say(*row)], lambda rows: [], is_awake=False,
             computes_in=torch.float32)  # fmt: skip


def test_what_rounding_makes_is_known_by_few_rollouts_once_there_were_many(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten rollouts a look: the second knows twenty, and from then on two are added to what is known. The limit
    stays, and so does what is clean; where these cross it, as many as ever are looked at."""
    model, rescore = sharp_policy(tiny_policy), Watch._rescore
    sizes: list[int] = []
    old: list[torch.Tensor] = []

    def keep(experience: Experience) -> Experience:
        old[:] = [experience.old_logprobs]
        return experience

    def counted(self: Watch, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(len(ids))
        # of two rollouts rounding happens to move nothing
        return rescore(self, ids, *arguments) if len(ids) == 10 else old[0][[0, 5], : ids.shape[1]]

    monkeypatch.setattr(Watch, "_rescore", counted)

    def say(prompt: list[int], response: list[int]) -> list[float]:
        return rollout_logprobs(model, prompt, response, noise=0.01)

    first = look(model, say, lambda rows: [], keep)
    last = look(model, say, lambda rows: [], keep, num_looks=4)
    assert sizes == [10, *(10, 10, 2, 2)]

    def far(prompt: list[int], response: list[int]) -> list[float]:
        return [value - 0.1 for value in say(prompt, response)]

    look(model, far, lambda rows: [], keep, is_awake=False, num_looks=3, on_fault="warn")
    assert sizes[-2:] == [2, 10]
    assert last["engine/rounding"] == pytest.approx(first["engine/rounding"], rel=0.3)


def test_rollouts_of_another_version_are_named(tiny_policy: Path, task: WordArithmetic) -> None:
    model = sharp_policy(tiny_policy)
    rollout = Rollout(
        Trajectory("p/0", "p", "", "", [], [5], [6], [], "length", gold="1", answer="1", is_correct=True),
        rollout_logprobs(model, [5], [6]),
        policy_version=4,
    )
    groups = [RolloutGroup(Problem("p", "", "1"), [rollout], [])]
    experience, _ = make_experience(groups, model, pad_id=0, micro_batch_size=1, precision="fp32", temperature=1)
    watch = Watch(RLConfig(precision="fp32"), model, PARAMS, Tokens())
    with pytest.raises(ProbeFailed, match="version 4 are to train version 5") as caught:
        watch.look(groups, experience, version=5)
    assert caught.value.fault.kind == VERSION
    assert watch.look(groups, experience, version=4)["engine/version_lag"] == 0


# --- rewards, steps, crashes -----------------------------------------------------------------------------------------


def rewarded(outcome: float, steps: list[float]) -> str:
    trajectory = Trajectory("p/0", "p", "", "", [], [5], [6], [], "stop", gold="1", answer="1", is_correct=True)
    groups = [RolloutGroup(Problem("p", "", "1"), [Rollout(trajectory, [-1.0], 0)], [])]
    with pytest.raises(ProbeFailed) as caught:
        score(groups, lambda trajectories: [Score(outcome, steps, {"model": outcome})])
    return str(caught.value)


@pytest.mark.parametrize(
    ("outcome", "steps"),
    [(math.nan, []), (math.inf, []), (1.0, [0.5, math.nan]), (math.inf, [-math.inf])],
)
def test_a_reward_that_is_no_number_is_named_with_its_trajectory(outcome: float, steps: list[float]) -> None:
    assert rewarded(outcome, steps).startswith(f"{REWARD}: the reward of trajectory p/0 is ")


def test_a_policy_that_runs_away_is_named(tiny_policy: Path) -> None:
    watch = Watch(RLConfig(probes=ProbesConfig(max_update_kl=0.5)), None, PARAMS, Tokens())
    watch.check_update(0.4)
    watch.check_kl(2.9)
    watch.check_update(0.7, luckiest=0.25)
    for check, value in ((watch.check_update, 0.6), (watch.check_update, math.nan), (watch.check_kl, 3.1)):
        with pytest.raises(ProbeFailed, match="nats per token, the limit") as caught:
            check(value)
        assert caught.value.fault.kind == KL


def test_a_misspelt_reaction_is_refused() -> None:
    with pytest.raises(BadInput, match="on_fault must be stop or warn"):
        Watch(RLConfig(probes=ProbesConfig(on_fault="ignore")), None, PARAMS, Tokens())


@pytest.mark.slow
def test_a_crash_in_mid_rollout_shows_the_logs_end_and_leaves_the_checkpoint(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", dies_at="")
    sample, is_dead = trainer.rollout_source.sampler.client.sample, []

    async def die(request: SampleRequest, params: SamplingParams) -> Any:
        if request.id.startswith("rl-3/"):
            is_dead.append(True)
            raise ServerGone("connection refused")
        return await sample(request, params)

    def check() -> None:
        if is_dead:
            raise ServerGone("the vLLM server died (exit code 0)\nthe end of server.log:\n  | out of memory")

    trainer.rollout_source.sampler.client.sample = die  # type: ignore[method-assign]
    trainer.rollout_source.sampler.check_server = check
    with pytest.raises(ServerGone) as caught:
        trainer.run()
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert message.startswith(f"{CRASH}: the vLLM server died")
    assert "| out of memory" in message
    assert message.endswith("the same command goes on from the last checkpoint")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    "one_pass", [{}, pytest.param({"num_epochs": 1, "minibatch_size": 24}, marks=pytest.mark.slow)]
)
def test_what_a_probe_stops_has_saved_nothing(
    one_pass: dict[str, int], tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"probes": ProbesConfig(), **one_pass}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", dies_at="", **settings)
    assert trainer.policy.makes_one_pass(24) == bool(one_pass)
    before = {name: value.clone() for name, value in trainer.policy.engine.model.state_dict().items()}
    with pytest.raises(ProbeFailed):  # this sampler says -1 of every token
        trainer.run()
    assert all(torch.equal(value, before[name]) for name, value in trainer.policy.engine.model.state_dict().items())
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]


# --- deliveries ------------------------------------------------------------------------------------------------------

SENT = {"embed": "a", "norm": "b", "head": "c"}


@pytest.mark.parametrize(
    ("receipt", "told"),
    [
        ({}, "read 0 of 3 tensors as they were sent; not embed, norm, head"),
        ({"embed": "a", "norm": "b"}, "read 2 of 3 tensors as they were sent; not head"),
        ({"embed": "a", "norm": "old", "head": "c"}, "2 of 3 tensors as they were sent; not norm, which is 1 version"),
        ({"embed": "x", "norm": "y", "head": "z"}, "not embed, norm, head, which are 2 versions old"),
    ],
)  # fmt: skip
def test_a_receipt_names_what_was_not_read_as_sent(receipt: dict[str, str], told: str) -> None:
    earlier = [{"embed": "x", "norm": "y", "head": "z"}, {"embed": "p", "norm": "old", "head": "q"}]
    with pytest.raises(StaleWeights) as caught:
        check_receipt(SENT, receipt, earlier)
    assert told in str(caught.value)
    assert caught.value.fault.kind == WEIGHTS


def test_a_receipt_of_all_that_was_sent_is_good() -> None:
    check_receipt(SENT, {**SENT, "more": "d"}, [])


def test_a_digest_is_of_the_bytes_and_sees_one_bit() -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert digest(one) == digest(one.T.contiguous().T) != digest(one.T)
    flipped = one.clone().view(torch.int32)
    flipped[0, 0] ^= 1
    assert digest(flipped.view(torch.float32)) != digest(one)


def test_a_sync_delivers_in_its_engines_dtype(tiny_policy: Path) -> None:
    engine = KnowingEngine(tiny_policy)
    sync = WeightSync(engine, precision="fp32", dtype=torch.bfloat16)
    asyncio.run(sync.deliver(named_weights(load_policy(str(tiny_policy)))))
    assert {value.dtype for value in engine.before.values()} == {torch.bfloat16}


class KnowingEngine(FakeEngine):
    """Receipts, stamps and a prefix cache; `keeps_cache` does not empty it, `late` serves the delivery before, and
    `pretends` to serve the new one; it computes in `dtype`."""

    def __init__(
        self,
        path: Path,
        keeps_cache: bool = False,
        late: bool = False,
        pretends: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(path)
        self.model, self.pretends = self.model.to(dtype), pretends
        self.version, self.is_cached = "default", False
        self.keeps_cache, self.late = keeps_cache, late
        self.before: dict[str, torch.Tensor] = {}

    async def load(self, key: str, number: int) -> list[dict[str, str]]:  # type: ignore[override]
        weights = await self.received()
        read = self.before if self.late and self.before else weights
        self.before = weights
        self.model.load_state_dict(read)
        self.is_cached = self.is_cached and self.keeps_cache
        said = weights if self.pretends else read
        return [{name: digest(value) for name, value in said.items()}]

    async def stamp(self, version: str) -> None:
        self.version = version

    async def served_version(self) -> str:
        return self.version

    async def cached_tokens(self, ids: list[int]) -> int:
        was_cached, self.is_cached = self.is_cached, True
        return len(ids) if was_cached else 0


def knowing_sync(engine: KnowingEngine, max_step: float = 0.0) -> WeightSync:
    sync = WeightSync(engine, precision="fp32", max_step=max_step)
    sync.canaries = [Canary(list(range(5, 25)), start=8)]
    return sync


def moved(model: Any, size: float) -> Any:
    with torch.no_grad():
        for value in model.parameters():
            value.add_(size * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_an_engine_one_step_behind_is_named_however_small_the_step(tiny_policy: Path) -> None:
    sync, model = knowing_sync(KnowingEngine(tiny_policy, late=True)), load_policy(str(tiny_policy))
    asyncio.run(sync.sync(model, 0))
    with pytest.raises(StaleWeights, match="which are 1 version old"):
        asyncio.run(sync.sync(moved(model, 1e-6), 1))


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 1), (torch.bfloat16, 2), (None, 2)])
def test_a_version_is_looked_at_in_one_pass_where_rounding_changes_nothing(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, number: int
) -> None:
    passes = []

    def counted(*arguments: Any) -> Any:
        passes.append(arguments)
        return canary_scores(*arguments)

    monkeypatch.setattr(policy_weights, "canary_scores", counted)
    sync = WeightSync(KnowingEngine(tiny_policy), precision="fp32", dtype=dtype)
    sync.canaries = [Canary(list(range(5, 25)), start=8)]
    sync.look(load_policy(str(tiny_policy)), 0)
    assert len(passes) == number


def test_rounding_is_not_taken_for_a_delivery_that_failed(tiny_policy: Path) -> None:
    """A sharp policy, responses that have become unlikely, bfloat16 on both sides: 0.14 nats of right weights."""
    engine = KnowingEngine(tiny_policy, dtype=torch.bfloat16)
    sync, model = WeightSync(engine, precision="bf16", dtype=torch.bfloat16), load_policy(str(tiny_policy), "eager")
    sync.canaries = [Canary(list(range(5, 125)), start=8)]
    with torch.no_grad():
        model.lm_head.weight.mul_(120)
    found = asyncio.run(sync.sync(model, 0))
    assert found["canary_gap"] > 0.1
    assert 0.5 < found["canary_gap"] / found["canary_rounding"] < 2
    found = asyncio.run(sync.sync(moved(model, 1e-3), 1))  # and the next one is not nearer to this one
    assert found["policy_moved"] > 0


def test_an_engine_that_read_all_of_it_and_computes_otherwise_is_not_said_to_lack_weights(
    tiny_policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Colder(KnowingEngine):
        async def prompt_logprobs(self, ids: list[int]) -> list[float]:
            return [value - 0.1 for value in await super().prompt_logprobs(ids)]

    sync, model = knowing_sync(Colder(tiny_policy)), load_policy(str(tiny_policy))
    with pytest.raises(ProbeFailed, match="the engine read every tensor as it was sent, and its log-probs") as caught:
        asyncio.run(sync.sync(model, 0))
    assert caught.value.fault.kind == UNKNOWN
    sync.stops = False
    assert asyncio.run(sync.sync(model, 1))["canary_gap"] == pytest.approx(0.1, abs=0.01)
    assert UNKNOWN in caplog.text
    own = WeightSync(Colder(tiny_policy), max_logprob_gap=0.2, precision="fp32")
    own.canaries = sync.canaries
    assert asyncio.run(own.sync(model, 0))["canary_gap"] == pytest.approx(0.1, abs=0.01)


def test_one_small_measure_of_rounding_is_no_limit_beside_those_of_the_versions_before(tiny_policy: Path) -> None:
    """Versions 106 to 110 of a clean PPO run: what rounding made of them, and the engine's distance under the last."""
    sync = knowing_sync(KnowingEngine(tiny_policy))
    sync.is_received = True
    new = torch.zeros(4)
    last = Unproven(110, new, torch.ones(4), new + 0.0074, None)
    sync._roundings.extend([0.0795, 0.0314, 0.0168, 0.0074])
    assert sync._fault("an engine", new + 0.0486, last, 0.0486) is None
    fault = sync._fault("an engine", new + 0.2, last, 0.2)
    assert fault is not None
    assert fault.kind == UNKNOWN
    sync._roundings.clear()
    assert sync._fault("an engine", new + 0.0486, last, 0.0486) is not None  # of the first version alone


def test_an_engine_that_says_it_read_what_it_does_not_use_is_named(tiny_policy: Path) -> None:
    sync = knowing_sync(KnowingEngine(tiny_policy, late=True, pretends=True))
    model = load_policy(str(tiny_policy))
    asyncio.run(sync.sync(model, 0))
    with pytest.raises(StaleWeights, match="computes as the version before") as caught:
        asyncio.run(sync.sync(moved(model, 0.03), 1))
    assert caught.value.fault.kind == UNUSED


def test_a_single_unlikely_token_does_not_say_that_an_engine_computes_as_the_version_before() -> None:
    """Of version 107 of a clean PPO run what differed most, of 395 tokens: (new, engine - new, old - new, rounding).
    The first one alone made 84 % of the distance."""
    rows = [
        (-7.394, 0.0935, 0.0936, -0.0156),
        (-7.69, 0.0467, 0.0312, 0.0312),
        (-6.69, -0.0312, -0.0623, -0.0312),
        (-8.926, 0.0156, 0.0312, 0.0002),
        (-0.017, -0.0017, -0.0004, -0.0012),
        (-0.016, -0.0004, -0.0054, -0.0001),
    ]
    new, engine, old, rounding = (torch.cat([column, torch.zeros(389)]) for column in torch.tensor(rows).T)
    sent = Unproven(107, new, torch.zeros(395), new + rounding, new + old)
    assert not serves_old(new + engine, sent)
    everywhere = 0.05 * torch.randn(395, generator=torch.Generator().manual_seed(0))
    stale = Unproven(108, new, torch.zeros(395), new + rounding, new + everywhere)
    assert serves_old(new + everywhere + rounding, stale)
    assert not serves_old(new + rounding, stale)


def test_a_step_is_measured_over_whole_distributions_and_not_on_unlikely_tokens() -> None:
    """From 0.9, 0.1 - e, e = 1e-6 to e = 1e-9: the third token falls by 6.9 nats, the policy hardly moves. From
    0.5, 0.5 to 0.9, 0.1: 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1) = 0.5108."""
    before, after = torch.tensor([[0.9, 0.1 - 1e-6, 1e-6]]).log(), torch.tensor([[0.9, 0.1 - 1e-9, 1e-9]]).log()
    assert 0 < step_kl(before, after) < 1e-5
    wide, narrow = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert step_kl(wide, narrow) == pytest.approx(0.5108, abs=1e-4)
    assert step_kl(torch.cat([wide, wide]), torch.cat([wide, narrow])) == pytest.approx(0.5108 / 2, abs=1e-4)
    none = torch.tensor([[0.0, -math.inf]])
    assert step_kl(none, none) == 0
    assert step_kl(wide, none) == math.inf


def test_a_cache_that_outlives_a_delivery_is_named(tiny_policy: Path) -> None:
    sync = knowing_sync(KnowingEngine(tiny_policy, keeps_cache=True))
    with pytest.raises(StaleWeights, match="has 20 cached tokens after it") as caught:
        asyncio.run(sync.sync(load_policy(str(tiny_policy)), 0))
    assert caught.value.fault.kind == CACHE


def test_an_engine_is_stamped_when_all_is_proven_and_asked_for_its_stamp(tiny_policy: Path) -> None:
    engine = KnowingEngine(tiny_policy)
    sync = knowing_sync(engine)
    asyncio.run(sync.sync(load_policy(str(tiny_policy)), 3))
    asyncio.run(sync.check_version(3))
    engine.version = "default"  # restarted
    with pytest.raises(StaleWeights, match="serves version 'default', not 3") as caught:
        asyncio.run(sync.check_version(3))
    assert caught.value.fault.kind == VERSION


def test_a_step_that_is_too_large_is_named_and_not_delivered(tiny_policy: Path) -> None:
    engine = KnowingEngine(tiny_policy)
    sync, model = knowing_sync(engine, max_step=1.0), load_policy(str(tiny_policy))
    asyncio.run(sync.sync(model, 0))
    assert asyncio.run(sync.sync(moved(model, 1e-4), 1))["policy_moved"] < 0.01
    served = {name: value.clone() for name, value in engine.before.items()}
    with pytest.raises(ProbeFailed, match="from the one before") as caught:
        asyncio.run(sync.sync(moved(model, 1.0), 2))
    assert caught.value.fault.kind == KL
    assert engine.version == "1"
    assert all(torch.equal(value, served[name]) for name, value in engine.before.items())


# --- truncated importance sampling ------------------------------------------------------------------------------------


def test_weights_make_a_mean_over_the_engines_samples_one_over_the_trainers() -> None:
    # three actions with values 1, 5, 2; pi_old / pi_engine = 5/6, 4/3, 1: below the cap, so nothing is truncated
    engine, old = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.4, 0.1])
    values, wanted = torch.tensor([1.0, 5.0, 2.0]), 0.5 * 1 + 0.4 * 5 + 0.1 * 2
    actions = torch.multinomial(engine, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    weights, _ = importance_weights(
        old.log()[actions], engine.log()[actions], torch.ones_like(actions, dtype=torch.bool), cap=2.0
    )
    found = weights * values[actions]
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - wanted) < 3 * error
    assert abs(float(values[actions].mean()) - wanted) > 30 * error  # without weights it is off


def test_more_tokens_are_capped_the_lower_the_cap() -> None:
    generator = torch.Generator().manual_seed(0)
    old, engine = torch.randn(2, 5000, generator=generator)
    mask = torch.ones(5000, dtype=torch.bool)
    shares = [float(importance_weights(old, engine, mask, cap)[1].float().mean()) for cap in (1.0, 2.0, 4.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.5, abs=0.03)


def test_equal_policies_have_weights_of_exactly_one_and_an_equal_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3, 7, generator=generator)
    new, advantages = old + 0.1 * torch.randn(3, 7, generator=generator), torch.randn(3, 7, generator=generator)
    mask = torch.rand(3, 7, generator=generator) > 0.3
    weights, _ = importance_weights(old, old, mask, cap=2.0)
    assert torch.equal(weights, torch.ones(3, 7))
    plain = clipped_surrogate(new, old, advantages, mask, 0.2, 0.2, weights=torch.ones(3, 7))
    assert clipped_surrogate(new, old, advantages, mask, 0.2, 0.2, weights=weights) == plain


def test_padding_that_is_no_number_never_enters() -> None:
    old, engine = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-1.5, math.nan]])
    mask = torch.tensor([[True, False]])
    weights, _ = importance_weights(old, engine, mask, cap=2.0)
    total, _ = clipped_surrogate(old, old, torch.ones(1, 2), mask, 0.2, 0.2, weights=weights)
    assert float(total) == pytest.approx(-math.exp(0.5))


@pytest.mark.slow
def test_an_update_says_how_its_tokens_were_weighed(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", dies_at="", tis_cap=2.0, num_iterations=1, evaluation_every=0
    )
    trainer.run()
    (row,) = read_metrics(tmp_path / "run")
    assert row["update/importance_capped"] == 0  # the sampler says -1 of tokens of about -5.8
    assert 0 < row["update/importance_weight"] < 0.1


def test_a_cap_below_one_is_refused(tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tis_cap must be at least 1"):
        make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", dies_at="", tis_cap=0.5)


@pytest.mark.parametrize(("settings", "what"), [
    ({"tis_floor": 1.5}, "tis_floor must be from 0 to 1"),
    ({"correction": "icepop"}, "correction must be one of clamp, mask, divergence, none, got 'icepop'"),
    ({"correction": "divergence", "divergence_limit": 1.0}, "divergence_limit must be between 0 and 1, got 1"),
    ({"tis_level": "response"}, "tis_level must be one of token, sequence, got 'response'"),
])  # fmt: skip
def test_bounds_of_a_ratio_that_do_not_exist_are_refused(
    settings: dict[str, Any], what: str, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=what):
        make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", dies_at="", tis_cap=2.0, **settings)


@pytest.mark.parametrize(
    ("settings", "weight"),
    [pytest.param({"tis_floor": 0.5}, 0.5, marks=pytest.mark.slow), ({"correction": "mask", "tis_floor": 0.5}, 0)],
)
def test_an_update_weighs_by_the_bounds_that_are_set(
    settings: dict[str, Any], weight: float, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    """This sampler says -1 of tokens of about -5.8: every ratio is below 0.5."""
    more = {"tis_cap": 2.0, "num_iterations": 1, "evaluation_every": 0, **settings}
    make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", dies_at="", **more).run()
    (row,) = read_metrics(tmp_path / "run")
    assert row["update/importance_capped"] == 1
    assert row["update/importance_weight"] == pytest.approx(weight)


def test_bounds_of_a_ratio_that_is_not_taken_are_refused() -> None:
    bounds: list[dict[str, Any]] = [{"tis_floor": 0.5}, {"tis_level": "sequence"}, {"correction": "mask"}]
    for one in bounds:
        check_correction(root_config(RLConfig, output_dir="", tis_cap=2.0, **one))
        with pytest.raises(BadConfig, match=r"update\.tis_cap=0 corrects nothing"):
            check_correction(root_config(RLConfig, output_dir="", tis_cap=0.0, **one))


def test_engines_on_another_cluster_than_the_ranks_are_refused() -> None:
    def check(ranks: str, engines: dict[str, str]) -> None:
        config = root_config(RLConfig, output_dir="")
        config.launcher, config.client = {"address": ranks}, engines
        check_clusters(config)

    for ranks, engines in (("auto", {"address": "auto"}), ("", {"address": ""}), ("auto", {"base_url": "http://x"})):
        check(ranks, engines)
    with pytest.raises(BadConfig, match=r"set client\.address=head:6379 too"):
        check("head:6379", {"address": ""})


def test_a_sampler_without_a_server_is_not_asked_for_one(task: WordArithmetic, tokenizer: Any) -> None:
    sampler = Sampler(FakeClient(tokenizer, dies_at="rl-0"), task, tokenizer, concurrency=4, stall_seconds=60)
    with pytest.raises(ServerGone, match=f"{CRASH}: the server has died"):
        asyncio.run(sampler.rollout(task.problems("train")[:2], replace(PARAMS, n=1), "rl-0", 0))
