"""A step of the rows that were looked up: the bits of a step of the whole weight, whatever rows and settings are."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from benchmarks.processes.sides import status_bytes
from espalier.training import lookup_rows
from espalier.training.engine import TorchEngine
from espalier.training.lookup_rows import Lookups, Rows
from espalier.training.memory_of_run import largest_weights, train_setup
from espalier.training.memory_plan import Network, Setup, Shape, Work, step_bytes
from espalier.training.step_in_backward import StepInBackwardEngine
from tests.training.test_training import train_config

SIZE, WIDTH = 60, 32


class Scored(torch.nn.Module):
    """A network whose embedding no head shares; it looks up three times."""

    def __init__(self, padding: int | None = None, width: int = WIDTH, is_tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.looked_up = torch.nn.Embedding(SIZE, width, padding_idx=padding)
        self.score = torch.nn.Linear(width, SIZE if is_tied else 1)
        if is_tied:
            self.score.weight = self.looked_up.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.looked_up(ids) * self.looked_up(ids.flip(0) // 2) + self.looked_up(ids // 3)
        return self.score(values).tanh().square().sum()


def engines(model: Callable[[], Scored], **settings: Any) -> list[Any]:
    def optimizer(one: Scored) -> torch.optim.Optimizer:
        return torch.optim.AdamW(one.parameters(), lr=0.1, **{"weight_decay": 0.0, **settings})

    one, other = model(), model()
    return [StepInBackwardEngine(one, optimizer(one), torch.device("cpu")),
            TorchEngine(other, optimizer(other), torch.device("cpu"), 0.0)]  # fmt: skip


def step(made: list[Any], ids: torch.Tensor) -> None:
    norms = []
    for engine in made:
        engine.backward(engine.model(ids))
        norms.append(engine.step(0.05))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def assert_same(made: list[Any]) -> None:
    one, other = ([*engine.model.parameters()] for engine in made)
    for mine, its in zip(one, other, strict=True):
        assert torch.equal(mine, its)
        own, state = made[0].optimizer.state[mine], made[1].optimizer.state[its]
        assert own.keys() == state.keys()
        assert [name for name, value in state.items() if not torch.equal(own[name], value)] == []


SETTINGS = [{"fused": True}, {"foreach": True}, {"fused": True, "weight_decay": 0.1}, {"fused": True, "amsgrad": True},
            {"fused": True, "maximize": True}, {"foreach": True, "capturable": False, "amsgrad": True}]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("portion", [WIDTH, 7 * WIDTH, 2**20])
def test_every_bit_is_that_of_the_whole_weight(
    settings: dict[str, Any], portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_rows, "PORTION", portion)
    random, made = torch.Generator().manual_seed(1), engines(Scored, **settings)
    for number in range(6):  # rows with gaps, rows that come and go, and all of them in the end
        ids = torch.randint(SIZE, (5,), generator=random) if number < 5 else torch.arange(SIZE)
        step(made, ids)
        assert_same(made)


def test_rows_that_never_moved_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = engines(Scored, fused=True), []
    plain = Rows.add_to

    def add_to(self: Rows, gradient: torch.Tensor, at: slice | torch.Tensor) -> None:
        seen.append(len(gradient))
        plain(self, gradient, at)

    monkeypatch.setattr(Rows, "add_to", add_to)
    step(made, torch.tensor([40, 50]))
    step(made, torch.tensor([40, 50]))
    assert set(seen) == {6}  # 40, 50, 25, 20, 13 and 16 of sixty
    assert_same(made)


def test_a_state_that_was_read_says_which_rows_have_moved() -> None:
    made = engines(Scored, fused=True)
    step(made, torch.tensor([3, 40]))
    again = engines(Scored, fused=True)
    for engine, before in zip(again, made, strict=True):
        engine.model.load_state_dict(before.model.state_dict())
        engine.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    step(again, torch.tensor([7]))
    assert_same(again)
    for engine in again:  # into an engine that has stepped already
        engine.optimizer.load_state_dict(copy.deepcopy(made[1].optimizer.state_dict()))
    step(again, torch.tensor([9]))
    assert_same(again)


@pytest.mark.parametrize(("width", "settings"), [(20, {}), (WIDTH, {"eps": 0.0})])
def test_what_would_differ_is_stepped_whole(width: int, settings: dict[str, Any]) -> None:
    made = engines(lambda: Scored(width=width), fused=True, **settings)
    assert not Lookups(made[0].model.looked_up.weight).can_step(made[0].optimizer)
    step(made, torch.tensor([3, 40]))
    if not settings:  # 0 / 0 otherwise, on both sides
        assert_same(made)
    model = Scored()
    lookups = Lookups(model.looked_up.weight)
    assert not lookups.can_step(torch.optim.Adafactor(model.parameters()))
    assert not lookups.can_step(torch.optim.Adagrad(model.parameters()))
    assert lookups.can_step(torch.optim.Adam([{"params": [model.score.weight]}, {"params": [model.looked_up.weight]}]))


def test_the_mask_is_that_of_the_state_that_is_there() -> None:
    made, again = engines(Scored, fused=True), engines(Scored, fused=True)
    step(made, torch.tensor([3, 40]))
    step(again, torch.tensor([7, 8]))
    for engine, before in zip(again, made, strict=True):
        engine.model.load_state_dict(before.model.state_dict())
        engine.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    step(again, torch.tensor([9]))
    assert_same(again)


def test_a_weight_that_is_not_row_major_is_stepped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_rows, "PORTION", 4 * WIDTH)

    def model() -> Scored:
        made = Scored()
        made.looked_up.weight = torch.nn.Parameter(made.looked_up.weight.detach().t().contiguous().t())
        return made

    made = engines(model, fused=True, weight_decay=0.1)
    step(made, torch.tensor([3, 40]))
    assert_same(made)


def test_lookups_are_added_to_a_shared_head_as_autograd_adds_them() -> None:
    made = engines(lambda: Scored(is_tied=True), fused=True)
    for ids in ([3, 40, 41, 40, 3], [1, 2, 3, 4, 5], [9, 9, 9, 3, 6]):
        step(made, torch.tensor(ids))
        assert_same(made)


def test_nothing_but_padding_moves_nothing_and_counts_as_a_step() -> None:
    made = engines(lambda: Scored(padding=0), fused=True)
    step(made, torch.tensor([0, 0]))
    assert_same(made)
    step(made, torch.tensor([0, 8]))
    assert_same(made)


def test_a_gradient_of_the_whole_weight_in_between_moves_every_row() -> None:
    made = engines(Scored, fused=True)
    step(made, torch.tensor([3, 40]))
    for engine in made:
        loss = engine.model(torch.tensor([5])) + engine.model.looked_up.weight.square().sum()
        engine.backward(loss)
        engine.step(0.05)
    assert_same(made)
    step(made, torch.tensor([11]))
    assert_same(made)


def test_moments_that_nobody_moves_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB are two moments of 262,144 rows, of which two move."""
    made = []
    for lazy in (2**24, 2**40):
        monkeypatch.setattr(lookup_rows, "LAZY_BYTES", lazy)
        torch.manual_seed(0)
        weight = torch.nn.Embedding(2**18, WIDTH)
        optimizer = torch.optim.AdamW(weight.parameters(), lr=0.1, weight_decay=0.0, fused=True)
        engine = StepInBackwardEngine(weight, optimizer, torch.device("cpu"))
        before = status_bytes("RssAnon")
        for _ in range(2):
            engine.backward(weight(torch.tensor([7, 200_000])).square().sum())
            engine.step(0.1)
        made.append((status_bytes("RssAnon") - before, optimizer.state[weight.weight]))
    assert made[0][0] < 8 * 2**20 < 60 * 2**20 < made[1][0]
    assert all(torch.equal(value, made[1][1][name]) for name, value in made[0][1].items())


def test_the_plan_knows_what_is_stepped_by_rows() -> None:
    """The largest gradient: of a scaled embedding (Gemma's) and of one of odd width it is the whole one."""
    for make, config, width, is_whole in (
        (Qwen2ForTokenClassification, Qwen2Config, 32, False),
        (Qwen2ForCausalLM, Qwen2Config, 32, True),
        (Gemma2ForTokenClassification, Gemma2Config, 32, True),
        (Qwen2ForTokenClassification, Qwen2Config, 24, True),
    ):
        sizes = {"hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        with torch.device("meta"):
            model = make(config(**sizes, num_key_value_heads=2, head_dim=width // 2, vocab_size=SIZE))
        assert largest_weights(model) == (SIZE * width, SIZE * width if is_whole else 48 * width)


def test_the_plan_of_a_step_by_rows() -> None:
    """One million numbers of a portion, four times, where a vocabulary has a hundred million."""
    shape = Shape(10**8, layers=1, hidden=1000, heads=1, kv_heads=1, head_size=1, mlp=1, vocabulary=10**5, outputs=1)
    setup = Setup((), Work(1, 1), steps_in_backward=True, steps_rows=True)
    network = Network(shape, 10**8, largest=10**8, multiplied=5 * 10**6)
    assert step_bytes(network, setup) == {"gradients": 20 * 10**6}
    assert step_bytes(replace(network, multiplied=10), setup) == {"gradients": 16 * 2**20}
    assert step_bytes(network, replace(setup, steps_rows=False)) == {"gradients": 4 * 10**8}
    assert step_bytes(Network(shape, 10**8), setup) == {"gradients": 4 * 10**8}


def test_the_plan_of_a_run_asks_its_optimizer(tiny_policy: Path) -> None:
    work, settings = Work(tokens=40, reads=30, passes=1), {"model": {"path": str(tiny_policy)}, "deepspeed": None}
    found = []
    for optimizer in ("torch.optim.AdamW", "torch.optim.Adafactor"):
        config = train_config(**settings, objective={}, optimizer={"_target_": optimizer})
        setup = train_setup(config, work, 1, 1.0, is_gpu=True)
        assert setup.networks[0].largest >= setup.networks[0].multiplied > 0
        found.append(setup.steps_rows)
    assert found == [True, False]
