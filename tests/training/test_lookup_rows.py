"""A step of the rows that were looked up: the bits of a step of the whole weight, whatever rows and settings are."""

import copy
import math
import mmap
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from espalier.models.load import load_policy
from espalier.training import lookup_rows
from espalier.training.engine import TorchEngine
from espalier.training.lookup_rows import Lookups, Rows, plain_lookups
from espalier.training.memory_of_run import train_setup, weights_of
from espalier.training.memory_plan import Network, Setup, Shape, Work, pass_bytes, step_bytes
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


def engines(model: Callable[[], Scored], *, clip: float = 0.0, **settings: Any) -> list[Any]:
    """Two that keep rows, and last one of whole gradients: its steps are not begun (`start_step`)."""

    def optimizer(one: Scored) -> torch.optim.Optimizer:
        return torch.optim.AdamW(one.parameters(), lr=0.1, **{"weight_decay": 0.0, **settings})

    models = [model() for _ in range(3)]
    first = StepInBackwardEngine(models[0], optimizer(models[0]), torch.device("cpu"))
    return [first, *(TorchEngine(one, optimizer(one), torch.device("cpu"), clip) for one in models[1:])]


def step(made: list[Any], *passes: torch.Tensor, norm: float = 1e-5) -> None:
    norms = []
    for engine in made:
        if engine is not made[-1]:
            engine.start_step(len(passes))
        for ids in passes:
            engine.backward(engine.model(ids))
        norms.append(engine.step(0.05))
    assert norms[:-1] == [pytest.approx(norms[-1], rel=norm)] * (len(made) - 1)


def assert_same(made: list[Any], atol: float = 0.0) -> None:
    for engine in made[:-1]:
        for mine, its in zip(engine.model.parameters(), made[-1].model.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=atol)
            own, state = engine.optimizer.state[mine], made[-1].optimizer.state[its]
            assert own.keys() == state.keys()
            for name, value in state.items():
                torch.testing.assert_close(own[name], value, rtol=0, atol=atol)


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
        engine.optimizer.load_state_dict(copy.deepcopy(made[-1].optimizer.state_dict()))
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
        if engine is not made[-1]:
            engine.start_step(1)
        loss = engine.model(torch.tensor([5])) + engine.model.looked_up.weight.square().sum()
        engine.backward(loss)
        engine.step(0.05)
    assert_same(made)
    step(made, torch.tensor([11]))
    assert_same(made)


@pytest.mark.parametrize("is_tied", [False, True])
def test_passes_of_a_step_are_summed_up_and_clipped_with_the_rest(is_tied: bool) -> None:
    """To the rounding of other orders of sums, in weights of 1 and steps of 0.05."""
    random, made = torch.Generator().manual_seed(2), engines(lambda: Scored(is_tied=is_tied), clip=0.01, fused=True)[1:]
    for _ in range(4):
        step(made, *(torch.randint(SIZE, (4,), generator=random) for _ in range(3)))
        assert_same(made, atol=2e-6)


def test_a_step_that_is_not_finite_or_discarded_leaves_no_row_behind() -> None:
    made = engines(Scored, fused=True)[1:]
    for engine in made:
        engine.start_step(1)
        engine.backward(engine.model(torch.tensor([1, 2])) * float("inf"))
        assert not math.isfinite(engine.step(0.05))
        engine.start_step(1)
        engine.backward(engine.model(torch.tensor([5, 6])))
        engine.discard()
    step(made, torch.tensor([3, 40]))
    assert_same(made)


@pytest.mark.parametrize("setting", [False, True, "selective"])
def test_gradient_checkpointing_leaves_lookups_plain(setting: bool | str, tiny_policy: Path) -> None:
    """Transformers hangs a hook on the embedding with it, which changes nothing where that is trained."""
    model = load_policy(str(tiny_policy), gradient_checkpointing=setting)
    other = TorchEngine(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"), 0.0)
    other.start_step(1)
    model.train()
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.square().sum().backward()
    assert [len(lookups.rows) for lookups in other._lookups.values()] == [1]


def test_a_step_of_whole_gradients_alone_moves_rows_of_later_steps_too() -> None:
    made = engines(Scored, fused=True)[1:]
    step(made, torch.tensor([3, 40]))
    for engine in made:
        engine.start_step(1)
        engine.backward(engine.model.looked_up.weight[11:14].square().sum() + engine.model.score.weight.sum())
        engine.step(0.05)
    assert_same(made)
    step(made, torch.tensor([50]))
    assert_same(made)


def test_what_somebody_else_goes_backward_through_counts_once() -> None:
    made = engines(Scored, clip=0.01, fused=True)[1:]
    for engine in made:
        if engine is not made[-1]:
            engine.start_step(1)
        engine.backward(engine.model(torch.tensor([3, 40])))
        engine.model(torch.tensor([3, 7])).backward()
        engine.model.looked_up.weight[11:14].square().sum().backward()
    assert made[0].step(0.05) == pytest.approx(made[1].step(0.05), rel=1e-6)
    assert_same(made, atol=2e-6)


def test_weight_decay_that_ends_leaves_no_row_standing() -> None:
    """Of Adam, whose weight decay is part of its moments."""
    made = engines(Scored, fused=True)[1:]
    for engine in made:
        engine.optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.1, weight_decay=0.1)
    step(made, torch.tensor([3, 40]))
    for engine in made:
        engine.optimizer.param_groups[0]["weight_decay"] = 0.0
    step(made, torch.tensor([3, 40]))
    assert_same(made)


def test_a_network_that_lost_its_engine_within_a_step_has_gradients_again() -> None:
    """An error came in between; another engine, and a copy, see all of them."""
    ids, made = torch.tensor([3, 40]), engines(Scored, fused=True)[1:]
    made[0].start_step(1)
    copied = copy.deepcopy(made[0].model)
    copied(ids).backward()
    assert copied.looked_up.weight.grad is not None
    again = [TorchEngine(one.model, one.optimizer, one.device, 0.0) for one in made]
    step(again, ids)
    assert_same(again)
    again[0].start_step(0)
    again[0].model(ids).backward()
    assert again[0].model.looked_up.weight.grad is not None


def change_forward(model: Scored) -> None:
    plain = model.looked_up.forward
    model.looked_up.forward = lambda ids: 2.0 * plain(ids)  # type: ignore[method-assign]


def hook_before(model: Scored) -> None:
    model.looked_up.register_forward_hook(lambda module, given, output: 2.0 * output, prepend=True)


@torch.no_grad()
def double(module: torch.nn.Module, given: Any, output: torch.Tensor) -> None:
    output.mul_(2.0)


def hook_in_place(model: Scored) -> None:
    model.looked_up.register_forward_hook(double, prepend=True)


def change_ids(model: Scored) -> None:
    plain = model.looked_up.forward
    model.looked_up.forward = lambda ids: plain(ids // 2)  # type: ignore[method-assign]


def mask_gradient(model: Scored) -> None:
    model.looked_up.weight.register_hook(lambda gradient: gradient * (torch.arange(SIZE) > 20)[:, None])


def watch_gradient(model: Scored) -> None:
    def grow(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2.0)

    model.looked_up.weight.register_post_accumulate_grad_hook(grow)


def replace_weight(model: Scored) -> None:
    model.looked_up.weight = torch.nn.Parameter(model.looked_up.weight.detach().clone())


def move_padding(model: Scored) -> None:
    model.looked_up.padding_idx = -1


CHANGES = [change_forward, change_ids, hook_before, hook_in_place, replace_weight, move_padding, mask_gradient,
           watch_gradient]  # fmt: skip


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_becomes_of_an_embedding_behind_its_engine_is_seen(
    change: Callable[[Scored], None], is_tied: bool
) -> None:
    ids, made = torch.tensor([3, 40, SIZE - 1]), engines(lambda: Scored(is_tied=is_tied), fused=True)[1:]
    for engine in made:
        change(engine.model)
    made[0].start_step(1)
    losses = [engine.model(ids) for engine in made]
    assert torch.equal(*losses)
    for engine, loss in zip(made, losses, strict=True):
        engine.backward(loss)
    if change is replace_weight:
        assert torch.equal(*(engine.model.looked_up.weight.grad for engine in made))
    for engine in made:
        engine.step(0.05)
    assert_same(made) if change is not replace_weight else None


def test_a_step_that_somebody_else_took_is_noticed() -> None:
    made = engines(Scored, fused=True)[1:]
    step(made, torch.tensor([3, 40]))
    for engine in made:
        engine.model(torch.tensor([50, 51])).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    step(made, torch.tensor([7]))
    assert_same(made)


def test_a_network_can_be_pickled_behind_a_step() -> None:
    made = engines(Scored, fused=True)[1:]
    step(made, torch.tensor([3, 40]))
    again = pickle.loads(pickle.dumps(made[0].model))
    again(torch.tensor([3, 40])).backward()
    assert again.looked_up.weight.grad is not None


def test_a_forward_of_its_own_is_no_plain_lookup() -> None:
    model = Scored()
    change_forward(model)
    assert plain_lookups(model) == []


def test_a_network_is_its_users_own_outside_of_steps() -> None:
    """A loop beside the engine, and another engine, see the gradients that they would without it."""
    made = engines(Scored, fused=True)[1:]
    for engine in made:
        engine.model(torch.tensor([3, 40])).backward()
    assert torch.equal(made[0].model.looked_up.weight.grad, made[1].model.looked_up.weight.grad)
    other = TorchEngine(made[0].model, torch.optim.AdamW(made[0].model.parameters()), torch.device("cpu"), 0.0)
    other.start_step(1)
    other.backward(other.model(torch.tensor([3, 40])))
    assert made[0].model.looked_up.weight.grad.count_nonzero() > 0
    other.discard()


def test_moments_that_nobody_moves_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB are two moments of 262,144 rows, of which two move."""
    made = []
    for lazy in (2**24, 2**40):
        monkeypatch.setattr(lookup_rows, "LAZY_BYTES", lazy)
        torch.manual_seed(0)
        weight = torch.nn.Embedding(2**18, WIDTH)
        optimizer = torch.optim.AdamW(weight.parameters(), lr=0.1, weight_decay=0.0, fused=True)
        engine = StepInBackwardEngine(weight, optimizer, torch.device("cpu"))
        for _ in range(2):
            engine.start_step(1)
            engine.backward(weight(torch.tensor([7, 200_000])).square().sum())
            engine.step(0.1)
        state = optimizer.state[weight.weight]
        made.append((sum(own_bytes(state[name]) for name in ("exp_avg", "exp_avg_sq")), state))
    assert made[0][0] <= 2**20 < 63 * 2**20 < made[1][0]
    assert all(torch.equal(value, made[1][1][name]) for name, value in made[0][1].items())


def own_bytes(value: torch.Tensor) -> int:
    """Return how many bytes of memory a tensor takes: of its pages those that are this process's alone, which the page
    of zeros, that all read before they write, is not. (What a process holds in all moves by other things too.)"""
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("no pages to count on this system")
    first, last = value.data_ptr() // mmap.PAGESIZE, (value.data_ptr() + value.nbytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
    return int((entries >> np.uint64(56) & np.uint64(1)).sum()) * mmap.PAGESIZE


def test_the_plan_knows_what_is_stepped_by_rows() -> None:
    """The largest gradient: of a scaled embedding (Gemma's) and of one of odd width it is the whole one."""
    for make, config, width, is_tied, found in (
        (Qwen2ForTokenClassification, Qwen2Config, 32, False, (48 * 32, SIZE * 32, True)),
        (Qwen2ForCausalLM, Qwen2Config, 32, True, (SIZE * 32, 0, True)),
        (Qwen2ForCausalLM, Qwen2Config, 32, False, (SIZE * 32, SIZE * 32, True)),
        (Gemma2ForTokenClassification, Gemma2Config, 32, False, (SIZE * 32, 0, False)),
        (Qwen2ForTokenClassification, Qwen2Config, 24, False, (SIZE * 24, 0, True)),
    ):
        sizes = {"hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "head_dim": width // 2, "vocab_size": SIZE}
        with torch.device("meta"):
            model = make(config(**sizes, tie_word_embeddings=is_tied))
        multiplied, by_rows, adds_rows = found
        assert weights_of(model) == {"largest": SIZE * width, "multiplied": multiplied, "by_rows": by_rows,
                                     "adds_rows": adds_rows}  # fmt: skip


def test_the_plan_of_a_step_by_rows() -> None:
    """One million numbers of a portion, four times, where a vocabulary has a hundred million."""
    shape = Shape(10**8, layers=1, hidden=1000, heads=1, kv_heads=1, head_size=1, mlp=1, vocabulary=10**5, outputs=1)
    setup = Setup((), Work(1, 1), steps_in_backward=True, steps_rows=True)
    network = Network(shape, 10**8, largest=10**8, multiplied=5 * 10**6)
    assert step_bytes(network, setup) == {"gradients": 20 * 10**6}
    assert step_bytes(replace(network, multiplied=10), setup) == {"gradients": 16 * 2**20}
    assert step_bytes(network, replace(setup, steps_rows=False)) == {"gradients": 4 * 10**8}
    assert step_bytes(Network(shape, 10**8), setup) == {"gradients": 4 * 10**8}


def test_the_plan_of_gradients_that_are_rows() -> None:
    """Of one process on a CPU, beside the gradients of all else; where a head shares the weight until they are added
    to its own."""
    shape = Shape(10**8, layers=1, hidden=1000, heads=1, kv_heads=1, head_size=1, mlp=1, vocabulary=10**5, outputs=1,
                  looked_up=10**8)  # fmt: skip
    setup = Setup((), Work(50, 1), is_gpu=False, is_bf16=False, steps_rows=True)
    network = Network(shape, 10**8 + 1000, by_rows=10**8, adds_rows=True)
    rows = 4 * 1000 * 50
    assert step_bytes(network, setup) == {"gradients": 4000 + 2 * 2 * rows + 16 * 2**20}
    assert pass_bytes(network, setup)["gradients"] == 4000 + 2 * 2 * rows
    assert step_bytes(network, replace(setup, steps_rows=False)) == {"gradients": 4 * 10**8 + 4000 + rows}
    assert step_bytes(replace(network, by_rows=0), setup) == {"gradients": 4 * 10**8 + 4000 + rows}
    whole = {"gradients": 8 * 10**8 + 4000}
    for other in ({"is_gpu": True}, {"ranks": 2}, {"has_deepspeed": True}):
        assert step_bytes(network, replace(setup, **other)) == whole
    assert step_bytes(replace(network, adds_rows=False, by_rows=0), setup) == whole


def test_the_plan_of_a_run_asks_its_optimizer(tiny_policy: Path) -> None:
    work, settings = Work(tokens=40, reads=30, passes=1), {"model": {"path": str(tiny_policy)}, "deepspeed": None}
    found = []
    for optimizer in ("torch.optim.AdamW", "torch.optim.Adafactor"):
        config = train_config(**settings, objective={}, optimizer={"_target_": optimizer})
        setup = train_setup(config, work, 1, 1.0, is_gpu=True)
        assert setup.networks[0].largest >= setup.networks[0].multiplied > 0
        found.append(setup.steps_rows)
    assert found == [True, False]
