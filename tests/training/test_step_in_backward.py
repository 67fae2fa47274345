"""Steps in the backward pass: the same weights as plain torch's, no more than one gradient at a time, and refused where
a step needs all of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from espalier.data.records import BadInput
from espalier.training import step_in_backward
from espalier.training.engine import TorchEngine
from espalier.training.loop import Loop
from espalier.training.memory_of_run import MicroBatch, changes, train_setup
from espalier.training.memory_plan import Work, memory_plan
from espalier.training.step_in_backward import StepInBackwardEngine, check_step_in_backward
from espalier.training.sums import NotFinite
from tests.training.test_training import KINDS, make_loop, metric_rows, train_config, weights

ONE_PASS: dict[str, Any] = {"micro_batch_size": 8, "max_grad_norm": 0.0, "step_in_backward": True}


def in_backward(policy: Path, run_dir: Path, kind: str = "sft", **changes: Any) -> Loop:
    def make(model: Any, optimizer: Any, device: torch.device, max_grad_norm: float) -> StepInBackwardEngine:
        assert max_grad_norm == 0
        return StepInBackwardEngine(model, optimizer, device)

    run_dir.mkdir(exist_ok=True)
    return make_loop(policy, run_dir, kind, make, **{**ONE_PASS, **changes})


def moments(loop: Loop) -> list[torch.Tensor]:
    state = loop.engine.optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    return [state[place][key] for place in sorted(state) for key in sorted(state[place])]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_moments_are_those_of_plain_torch_bit_for_bit(kind: str, tiny_policy: Path, tmp_path: Path) -> None:
    one = in_backward(tiny_policy, tmp_path / "one", kind)
    other = make_loop(tiny_policy, tmp_path / "other", kind, micro_batch_size=8, max_grad_norm=0.0)
    start = weights(one)
    (tmp_path / "other").mkdir()
    for loop in (one, other):
        loop.run()
    found, wanted = weights(one), weights(other)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert any(not torch.equal(found[name], start[name]) for name in start)
    assert_same(moments(one), moments(other))
    for mine, its in zip(metric_rows(tmp_path / "one"), metric_rows(tmp_path / "other"), strict=True):
        assert mine.pop("train/grad_norm") == pytest.approx(its.pop("train/grad_norm"), rel=1e-5)
        assert mine == its


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("padding", [None, 3])
def test_lookups_of_a_network_with_and_without_a_head_of_its_own(
    is_tied: bool, padding: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_in_backward, "LARGE", 100)  # room is made on the way
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 40, "tie_word_embeddings": is_tied, "pad_token_id": padding}
    config = Qwen2Config(**shape, **more)
    ids = torch.tensor([[3, 5, 5, 9, 3, 5, 11, 39, 5, 3, 7, 9]])
    found: list[dict[str, torch.Tensor]] = []
    for kind in (StepInBackwardEngine, TorchEngine):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
        engine = kind(model, optimizer, torch.device("cpu"), *(() if kind is StepInBackwardEngine else (0.0,)))
        for number in range(3):
            engine.model.eval()
            with torch.no_grad():
                model(ids)
            engine.model.train()
            engine.backward(model(ids[:, number:], labels=ids[:, number:]).loss)
            engine.step(0.1)
        found.append(model.state_dict())
    assert [name for name, value in found[0].items() if not torch.equal(value, found[1][name])] == []


def test_what_a_hook_makes_of_a_lookup_is_kept() -> None:
    found = []
    for kind in (StepInBackwardEngine, TorchEngine):
        model = torch.nn.Embedding(4, 2)
        torch.nn.init.ones_(model.weight)
        model.register_forward_hook(lambda _, given, output: output * 3)  # as noise on embeddings is added
        more = () if kind is StepInBackwardEngine else (0.0,)
        engine = kind(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), *more)
        engine.backward(model(torch.tensor([1, 1, 2])).sum())
        engine.step(0.5)
        engine.backward(model(input=torch.tensor([1, 3])).sum())
        engine.step(0.5)
        found.append(model.weight.detach())
    assert torch.equal(*found)
    assert found[0][1, 0] == 1 - 0.5 * 3 * 3


def test_an_optimizer_that_counts_its_calls_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            super().step(closure)

    model = torch.nn.Linear(2, 2)
    engine = StepInBackwardEngine(model, Counting(model.parameters(), lr=1.0), torch.device("cpu"))
    engine.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match="Counting counts steps in its groups"):
        engine.step(1.0)


def test_a_tied_weight_is_updated_once_with_the_sum_of_its_gradients() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.weight[ids] @ self.weight.T).sum()

    found = []
    for engine in (StepInBackwardEngine, TorchEngine):
        model = Tied()
        more = () if engine is StepInBackwardEngine else (0.0,)
        made = engine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"), *more)
        made.backward(model(torch.tensor([0, 2, 2])))
        norm = made.step(learning_rate=0.5)
        found.append((norm, model.weight.detach()))
    assert found[0][0] == pytest.approx(found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_no_more_than_one_gradient_is_held_and_none_behind_a_step(tiny_policy: Path, tmp_path: Path) -> None:
    loop, held = in_backward(tiny_policy, tmp_path), []
    assert isinstance(loop.engine, StepInBackwardEngine)
    parameters = loop.engine.parameters
    for parameter in parameters:  # behind the engine's own
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(one.grad is not None for one in parameters))
        )
    loop.train_step(0)
    assert held == [0] * len(parameters)


def test_a_run_that_is_cut_goes_on_bit_for_bit_and_either_way(tiny_policy: Path, tmp_path: Path) -> None:
    whole = in_backward(tiny_policy, tmp_path / "whole")
    whole.run()
    in_backward(tiny_policy, tmp_path / "cut", max_steps=6, save_every=3).run()
    newest = max((tmp_path / "cut" / "checkpoints").iterdir())
    assert newest.name == "step-00000003"  # as after a kill behind it
    again = make_loop(tiny_policy, tmp_path / "cut", micro_batch_size=8, max_grad_norm=0.0)
    again.run()
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(again).items())


def test_a_loss_that_is_not_finite_moves_nothing_and_a_gradient_that_is_not_ends_the_run(
    tiny_policy: Path, tmp_path: Path
) -> None:
    loop = in_backward(tiny_policy, tmp_path)
    loss, before = loop.objective.loss, weights(loop)

    def spoilt(factor: Any) -> Any:
        def call(model: Any, batch: Any) -> Any:
            found = loss(model, batch)
            return type(found)(factor(found.total), found.metrics)

        return call

    loop.objective.loss = spoilt(lambda total: total * math.nan)  # type: ignore[method-assign]
    with pytest.raises(NotFinite, match="the loss is nan"):
        loop.train_step(0)
    assert all(torch.equal(value, before[name]) for name, value in weights(loop).items())
    loop.engine.discard()
    loop.objective.loss = spoilt(lambda total: total + torch.sqrt(total * 0))  # type: ignore[method-assign]
    with pytest.raises(NotFinite, match="the gradient norm is nan"):
        loop.train_step(0)


def test_a_gradient_in_parts_and_a_second_pass_are_errors() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    engine = StepInBackwardEngine(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="a step without a pass"):
        engine.step(1.0)

    class TwoParts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                model.weight.sum().backward()
            return gradients[0]

    engine.backward(TwoParts.apply(model.weight.sum()))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"the gradient of a weight of shape \(1, 2\) came in parts"):
        engine.step(1.0)
    engine.backward(model.weight.sum())
    with pytest.raises(RuntimeError, match="more than one pass"):
        engine.backward(model.weight.sum())


@pytest.mark.parametrize(("settings", "num_ranks", "line"), [
    ({}, 2, "is of one process: use deepspeed=zero2 in its place"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}}}, 1, "is of plain torch: set deepspeed=none"),
    ({"max_grad_norm": 1.0}, 1, "cannot clip, .*: set update.max_grad_norm=0"),
    ({"on_nonfinite": "skip"}, 1, "cannot take a step back .*: set update.on_nonfinite=stop"),
    ({"micro_batch_tokens": 512}, 1, "needs a step to be one pass: set update.micro_batch_tokens=0"),
    ({"micro_batch_size": 4}, 1, "needs a step to be one pass: set update.micro_batch_size=8"),
])  # fmt: skip
def test_what_needs_all_gradients_is_refused(settings: dict[str, Any], num_ranks: int, line: str) -> None:
    config = train_config(**{**ONE_PASS, **settings})
    with pytest.raises(BadInput, match=f"update.step_in_backward=true {line}"):
        check_step_in_backward(config, num_ranks)
    config.update.step_in_backward = False
    check_step_in_backward(config, num_ranks)


def test_the_plan_holds_one_gradient_and_offers_what_can_be_had_with_it(tiny_policy: Path) -> None:
    settings = {"model": {"path": str(tiny_policy)}, "objective": {}, "deepspeed": None}
    work = Work(tokens=40, reads=30, passes=1)
    setup = train_setup(train_config(**settings, **ONE_PASS), work, 1, 1.0, is_gpu=True)
    plain = train_setup(train_config(**settings, micro_batch_size=8), work, 1, 1.0, is_gpu=True)
    shape = setup.networks[0].shape
    last, its = (memory_plan(one).phases[-1].parts["gradients"] for one in (setup, plain))
    assert (last, its) == (4 * shape.hidden * max(shape.vocabulary, shape.mlp), 4 * shape.parameters)
    offered = {change.setting.partition("=")[0] for change in changes(setup, MicroBatch(8))}
    assert offered <= {"precision", "model.gradient_checkpointing"}
