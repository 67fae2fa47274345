"""Checkpoints by pieces: what ranks wrote is what other ranks, or one process, read, bit for bit."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import Optimizer

from espalier.training import piece_files
from espalier.training.engine import TorchEngine
from espalier.training.piece_files import BadCheckpoint, PieceReader
from espalier.training.pieces import (
    Held,
    Span,
    State,
    held_whole,
    persistent_buffers,
    stored_weights,
    trained_shapes,
)

CPU = torch.device("cpu")


def network(seed: int = 0) -> torch.nn.Module:
    """One with a buffer, a number by itself, a matrix whose rows lie apart in memory, and a frozen weight."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model.scale = torch.nn.Parameter(torch.randn(()))  # type: ignore[assignment]
    model.turned = torch.nn.Parameter(torch.randn(3, 2).t())  # type: ignore[assignment]
    model[2].bias.requires_grad_(False)
    return model


def steps(engine: TorchEngine, number: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(number):
        model = engine.model
        loss = (model(torch.randn(5, 3)) * model.scale).square().mean() + model.turned.square().sum()
        engine.backward(loss)
        engine.step(0.05)


def everything(engine: TorchEngine) -> list[torch.Tensor]:
    """Weights, buffers and what the optimizer keeps, in an order of its own."""
    rows = engine.optimizer.state_dict()["state"]
    kept = [torch.as_tensor(rows[index][key]) for index in sorted(rows) for key in sorted(rows[index])]
    return [value.clone() for value in [*engine.model.state_dict().values(), *kept]]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_goes_on_as_torchs_own_state_would(name: str, steps_before: int, tmp_path: Path) -> None:
    def made(seed: int) -> TorchEngine:
        model = network(seed)
        return TorchEngine(model, OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad]), CPU, 0)

    first = made(0)
    steps(first, steps_before, seed=1)
    first.save_state(tmp_path)
    reference = made(0)
    reference.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    reference.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    again = made(5)
    with torch.no_grad():
        again.model[2].bias.copy_(first.model[2].bias)  # frozen: it comes with the model
    steps(again, 3, seed=9)  # what it knows from elsewhere is gone
    again.load_state(tmp_path)
    for one in (first, reference, again):
        steps(one, 2, seed=2)
    for mine, theirs, own in zip(*map(everything, (again, reference, first)), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, own)


def cut(bounds: list[int], values: torch.Tensor | None) -> list[State]:
    """The 16 numbers of `a` and `b` on ranks that hold what lies between neighbouring bounds, and two zeros that fill
    up; moments are the numbers times 100."""
    names = [("a", 0, 10), ("b", 10, 16)]
    found = []
    for low, high in itertools.pairwise(bounds):
        spans = [
            Span(name, max(low, first) - low, max(low, first) - first, min(high, last) - max(low, first), last - first)
            for name, first, last in names if max(low, first) < min(high, last)
        ]  # fmt: skip
        flat = torch.zeros(high - low + 2)
        optimizer = torch.optim.AdamW([flat], lr=0.1)
        if values is not None:
            flat[: high - low] = values[low:high]
            optimizer.state[flat] = {"step": torch.tensor(7.0), "exp_avg": flat * 100, "exp_avg_sq": flat * 100}
        buffers = {"c": torch.zeros(2) if values is None else torch.ones(2)}
        shapes = {"a": [2, 5], "b": [6], "none": [0]}
        found.append(State([Held(flat, spans)], optimizer, shapes, buffers, is_flat=True))
    return found


@pytest.mark.parametrize("bounds", [[0, 16], [0, 4, 12, 16], [0, 10, 16], [0, 1, 2, 3, 9, 11, 16]])
def test_what_two_ranks_wrote_is_read_by_any_number(bounds: list[int], tmp_path: Path) -> None:
    values = torch.arange(16.0)
    for rank, state in enumerate(cut([0, 7, 16], values)):
        state.save(tmp_path, rank, has_buffers=rank == 0)
    assert sorted(PieceReader(tmp_path / "pieces").stored) == [
        "buffers/c", "moments/exp_avg/a", "moments/exp_avg/b", "moments/exp_avg_sq/a", "moments/exp_avg_sq/b",
        "numbers/step/a", "numbers/step/b", "weights/a", "weights/b",
    ]  # fmt: skip
    for state, low, high in zip(cut(bounds, None), bounds, bounds[1:], strict=False):
        state.load(tmp_path)
        flat = state.held[0].tensor
        kept = state.optimizer.state[flat]
        assert flat.tolist() == [*values[low:high].tolist(), 0, 0]
        assert kept["exp_avg"].tolist() == [*(values[low:high] * 100).tolist(), 0, 0]
        assert kept["step"].item() == 7
        assert kept["step"].shape == ()
        assert state.buffers["c"].tolist() == [1, 1]
    found = stored_weights(tmp_path, {"a": torch.Size([2, 5]), "b": torch.Size([6])})
    assert torch.equal(found["a"], values[:10].view(2, 5))
    assert torch.equal(found["b"], values[10:])


def test_a_parameter_that_had_no_gradient_yet_takes_no_moments_from_its_neighbours(tmp_path: Path) -> None:
    """`a` is the first of the flat tensor, and of it one process knew nothing."""
    one, other = torch.nn.Parameter(torch.arange(10.0)), torch.nn.Parameter(torch.arange(10.0, 16.0))
    optimizer = torch.optim.AdamW([one, other])
    optimizer.state[other] = {
        "step": torch.tensor(3.0),
        "exp_avg": other.detach() * 2,
        "exp_avg_sq": other.detach() * 4,
    }
    held = [Held(one, [Span("a", 0, 0, 10, 10)]), Held(other, [Span("b", 0, 0, 6, 6)])]
    State(held, optimizer, {"a": [2, 5], "b": [6], "none": [0]}, {"c": torch.ones(2)}).save(tmp_path, 0)
    (state,) = cut([0, 16], None)
    state.load(tmp_path)
    kept = state.optimizer.state[state.held[0].tensor]
    assert kept["exp_avg"].tolist() == [0.0] * 10 + [20, 22, 24, 26, 28, 30] + [0, 0]
    assert kept["step"].item() == 3


def test_files_are_small_enough_to_be_put_together_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_files, "FILE_BYTES", 40)
    (state,) = cut([0, 16], torch.arange(16.0))
    state.save(tmp_path, 0)
    names = sorted(path.name for path in (tmp_path / "pieces").glob("shard-*"))
    assert len(names) > 3
    assert names[0] == f"shard-00001-model-00001-of-{len(names):05d}.safetensors"
    (again,) = cut([0, 16], None)
    again.load(tmp_path)
    assert torch.equal(again.held[0].tensor[:16], torch.arange(16.0))


def test_a_piece_that_is_larger_than_a_file_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_files, "FILE_BYTES", 12)
    monkeypatch.setattr(piece_files, "MOST_FILES", 100)
    for rank, state in enumerate(cut([0, 9, 16], torch.arange(16.0))):
        state.save(tmp_path, rank, has_buffers=rank == 0)
    files = [load_file(path) for path in (tmp_path / "pieces").glob("shard-*")]
    assert max(value.nbytes for file in files for name, value in file.items() if name.startswith("weights/")) == 12
    assert [*(tmp_path / "pieces").glob("shard-200001-*")]  # third parts of rank 0
    for borders in ([0, 16], [0, 4, 11, 16]):
        found = []
        for start, stop, again in zip(borders, borders[1:], cut(borders, None), strict=False):
            again.load(tmp_path)
            found += again.held[0].tensor[: stop - start].tolist()
        assert found == list(range(16))


def test_a_checkpoint_without_the_pieces_of_a_rank_is_refused(tmp_path: Path) -> None:
    for rank, state in enumerate(cut([0, 7, 16], torch.arange(16.0))):
        state.save(tmp_path, rank, has_buffers=rank == 0)
    (state,) = cut([0, 16], None)
    (tmp_path / "pieces" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="has not all of "):
        state.load(tmp_path)
    assert not state.held[0].tensor.any()


@pytest.mark.parametrize("lost", ["moments/exp_avg/b", "weights/b"])
def test_the_last_piece_of_a_tensor_is_missed_too(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_files, "FILE_BYTES", 1)
    monkeypatch.setattr(piece_files, "MOST_FILES", 100)
    for rank, state in enumerate(cut([0, 12, 16], torch.arange(16.0))):
        state.save(tmp_path, rank, has_buffers=rank == 0)
    for path in (tmp_path / "pieces").glob("shard-00002-*"):
        if lost in load_file(path):
            path.unlink()
    (state,) = cut([0, 16], None)
    with pytest.raises(BadCheckpoint, match=f"has not all of {lost}: choose another one"):
        state.load(tmp_path)


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state,) = cut([0, 16], torch.arange(16.0))
    state.save(tmp_path, 0)
    calls, torchs = [], piece_files.HuggingFaceStorageReader
    read = torchs.read_metadata
    monkeypatch.setattr(torchs, "read_metadata", lambda own: (calls.append(1), read(own))[1])
    state.load(tmp_path)
    assert calls == [1]


def test_a_buffer_of_two_names_is_written_under_both(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    shared = torch.arange(3.0)
    for layer in model:
        layer.register_buffer("table", shared)
    engine = TorchEngine(model, torch.optim.AdamW(model.parameters()), CPU, 0)
    engine.save_state(tmp_path)
    shared.zero_()
    engine.load_state(tmp_path)
    assert shared.tolist() == [0, 1, 2]


def test_what_is_kept_by_the_shape_of_a_matrix_does_not_go_on_in_flat_tensors(tmp_path: Path) -> None:
    matrix = torch.nn.ParameterDict({"w": torch.ones(2, 3)})
    TorchEngine(matrix, torch.optim.Adafactor(matrix.parameters()), CPU, 0).save_state(tmp_path)
    flat = torch.zeros(6)
    state = State([Held(flat, [Span("w", 0, 0, 6, 6)])], torch.optim.Adafactor([flat]), {"w": [2, 3]}, {}, is_flat=True)
    with pytest.raises(BadCheckpoint, match=r"Adafactor keeps other numbers of matrices .*: set deepspeed as it was"):
        state.load(tmp_path)


def test_the_pieces_of_another_network_are_refused_and_change_nothing(tmp_path: Path) -> None:
    def engine(width: int, bias: bool = True, depth: int = 3) -> TorchEngine:
        model = torch.nn.Linear(depth, width, bias=bias)
        return TorchEngine(model, torch.optim.AdamW(model.parameters()), CPU, 0)

    engine(4).save_state(tmp_path)
    others = (engine(5), "weight"), (engine(4, bias=False), "bias"), (engine(3, depth=4), "weight")  # as many numbers
    for other, name in others:
        before = other.model.weight.clone()
        with pytest.raises(BadCheckpoint, match=f"is of another model: {name} does not fit: choose another output_dir"):
            other.load_state(tmp_path)
        assert torch.equal(other.model.weight, before)
    with pytest.raises(BadCheckpoint, match="has no pieces: another version wrote it: go on with that version"):
        engine(4).load_state(tmp_path / "pieces")


def part(model: torch.nn.Module, number: int, of: int) -> State:
    """The state of a network that is one part of a larger one."""
    name = f"part-{number:03d}-of-{of:03d}/"
    optimizer = torch.optim.AdamW(model.parameters())
    return State(held_whole(model), optimizer, trained_shapes(model), persistent_buffers(model), name)


def test_parts_of_layers_become_whole_and_go_on_as_parts_alone(tmp_path: Path) -> None:
    whole = {"column": torch.arange(24.0).view(6, 4), "row": torch.arange(24.0).view(4, 6), "norm": torch.ones(4)}
    cuts = {"column": 0, "row": 1}
    for number in range(2):
        model = torch.nn.ParameterDict({
            name: value.chunk(2, cuts[name])[number].contiguous() if name in cuts else value.clone()
            for name, value in whole.items()
        })  # fmt: skip
        part(model, number, 2).save(tmp_path, number)
    found = stored_weights(tmp_path, {name: value.shape for name, value in whole.items()})
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
    again = torch.nn.ParameterDict({name: torch.zeros_like(value) for name, value in model.items()})
    part(again, 1, 2).load(tmp_path)
    assert torch.equal(again["row"], whole["row"][:, 3:])
    with pytest.raises(BadCheckpoint, match=r"has layers cut into 2, this run cut into 4: set deepspeed\."):
        part(again, 1, 4).load(tmp_path)
    other = torch.nn.ParameterDict({name: torch.zeros_like(value) for name, value in model.items()})
    other["row"] = torch.zeros(2, 6)  # cut along the other side: as many numbers
    with pytest.raises(BadCheckpoint, match="is of another model: row does not fit"):
        part(other, 1, 2).load(tmp_path)
    engine = TorchEngine(again, torch.optim.AdamW(again.parameters()), CPU, 0)
    with pytest.raises(BadCheckpoint, match="has layers cut into 2, this run whole"):
        engine.load_state(tmp_path)


def test_what_no_file_could_hold_by_parameter_is_refused_when_it_is_written(tmp_path: Path) -> None:
    (state,) = cut([0, 16], torch.arange(16.0))
    state.optimizer.state[state.held[0].tensor]["rows"] = torch.ones(4)  # of which parameter?
    with pytest.raises(BadCheckpoint, match=r"rows of a \(Tensor\), which the optimizer keeps, cannot be written"):
        state.save(tmp_path, 0)


@pytest.mark.parametrize("content", ["", '{"is_flat": fal', "[]", '{"is_flat": false}'])
def test_a_layout_that_is_torn_is_named(content: str, tmp_path: Path) -> None:
    (state,) = cut([0, 16], torch.arange(16.0))
    state.save(tmp_path, 0)
    (tmp_path / "pieces" / "layout.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"layout\.json: not a layout of pieces .*: choose checkpoints\.resume="):
        state.load(tmp_path)
    state.save(tmp_path, 0)
    (shard,) = (tmp_path / "pieces").glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:9])
    with pytest.raises(BadCheckpoint, match=r"a file of it cannot be read .*: choose checkpoints\.resume=step-N"):
        state.load(tmp_path)
