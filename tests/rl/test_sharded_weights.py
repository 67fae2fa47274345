"""The weights of a policy that ZeRO-3 cuts, on two gloo ranks: what engines and files get of them is what there is, no
rank holds them whole, and whatever fails leaves no rank waiting."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.processes.forked import run_ranks
from espalier.models.load import load_policy
from espalier.training import shards
from espalier.training.shards import Shards, groups_of, layer_of
from espalier.training.weight_files import grown

CUT = "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0"  # the smallest weights too
ADAPTERS = ("lora=dora", "lora.rank=4")


@pytest.fixture(scope="module")
def tied_policy(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same kind of network with one matrix for embeddings and head."""
    folder = tmp_path_factory.mktemp("tied")
    config = AutoConfig.from_pretrained(tiny_policy, tie_word_embeddings=True)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    loaded: Any = load_policy(str(folder))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    return folder


def ranks(scenario: str, policy: Path, folder: Path, *settings: str) -> tuple[list[int], str]:
    """Return exit codes and what all ranks printed."""
    log = folder / "log"
    words = [scenario, str(policy), str(folder), "deepspeed=zero3", *settings]
    codes = run_ranks("tests/support/shard_ranks.py", words, log, 2)
    return codes, log.read_text()


@pytest.mark.parametrize(
    ("is_tied", "settings"),
    [(True, (CUT,)), (False, ()), (False, (CUT, *ADAPTERS))],
    ids=["tied", "small weights whole", "adapters"],
)  # fmt: skip
@pytest.mark.slow
def test_engines_get_what_there_is_and_the_sharded_model_proves_it(
    is_tied: bool, settings: tuple[str, ...], tiny_policy: Path, tied_policy: Path, tmp_path: Path
) -> None:
    codes, printed = ranks("delivery", tied_policy if is_tied else tiny_policy, tmp_path, *settings)
    assert codes == [0, 0], printed[-3000:]


@pytest.mark.slow
def test_an_engine_that_is_lost_in_the_middle_of_a_delivery_leaves_no_rank_waiting(
    tied_policy: Path, tmp_path: Path
) -> None:
    codes, printed = ranks("lost", tied_policy, tmp_path, CUT)
    assert codes == [0, 0], printed[-3000:]


@pytest.mark.slow
def test_a_rank_that_fails_in_the_middle_of_a_delivery_ends_the_others(tiny_policy: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    codes, printed = ranks("rank_1", tiny_policy, tmp_path, CUT)
    assert 0 not in codes
    assert "no room for a slice" in printed
    assert time.monotonic() - started < 120


@pytest.mark.parametrize(
    ("is_tied", "more"), [(True, ()), pytest.param(False, ADAPTERS, marks=pytest.mark.slow)], ids=["tied", "adapters"]
)
def test_saved_in_several_files_they_are_what_there_is(
    is_tied: bool, more: tuple[str, ...], tiny_policy: Path, tied_policy: Path, tmp_path: Path
) -> None:
    codes, printed = ranks("saved", tied_policy if is_tied else tiny_policy, tmp_path, CUT, *more)
    assert codes == [0, 0], printed[-3000:]
    saved = {path.name for path in (tmp_path / "engine").iterdir()}
    assert ("adapter_model.safetensors" if more else "model.safetensors") in saved


@pytest.mark.slow
def test_rank_0_does_not_come_near_a_whole_copy(tiny_policy: Path, tmp_path: Path) -> None:
    settings = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4000}
    config = AutoConfig.from_pretrained(tiny_policy, num_attention_heads=12, num_key_value_heads=12, head_dim=64,
                                        **settings)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "large")
    codes, printed = ranks("peak", tmp_path / "large", tmp_path, CUT)
    assert codes == [0, 0], printed[-3000:]
    assert "rank 0 rises by" in printed


@pytest.mark.parametrize(("size", "num_ranks"), [(10, 4), (3, 4), (5, 4), (9, 8), (8, 2), (1, 3)])
def test_a_slice_is_put_together_from_the_ranks_that_hold_it(
    size: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slice, seen from every rank, the last of which hold padding."""
    whole, length = torch.arange(float(size)), -(-size // num_ranks)
    padded = torch.full((length * num_ranks,), float("nan"))
    padded[:size] = whole
    monkeypatch.setattr(shards, "world_size", lambda: num_ranks)
    for me in range(num_ranks):
        tensor = torch.nn.Parameter(torch.empty(0))
        tensor.ds_shape, tensor.ds_tensor = (size,), padded[me * length : (me + 1) * length].clone()
        tensor.ds_tensor.ds_numel = length
        held = Shards(torch.nn.Linear(1, 1))
        assert held.has_stretches(tensor)
        for start, stop in ((a, b) for a in range(size) for b in range(a + 1, size + 1)):
            place = start

            def send(owner: int, part: torch.Tensor, me: int = me) -> None:
                nonlocal place
                values = padded[place : place + len(part)]
                assert owner == place // length == (place + len(part) - 1) // length
                if owner == me:
                    assert torch.equal(part, values)
                part.copy_(values)
                place += len(part)

            monkeypatch.setattr(shards, "rank", lambda me=me: me)
            monkeypatch.setattr(shards, "send_from", send)
            assert held.numbers(tensor, start, stop).tolist() == whole[start:stop].tolist()
            assert place == stop


def test_what_a_rank_does_not_hold_as_it_is_has_no_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "world_size", lambda: 2)

    def cut(part: torch.Tensor, numbers: int = 4, **more: object) -> torch.nn.Parameter:
        tensor = torch.nn.Parameter(torch.empty(0))
        tensor.ds_shape, tensor.ds_tensor, part.ds_numel = (8,), part, numbers  # type: ignore[attr-defined]
        for name, value in more.items():
            setattr(part, name, value)
        return tensor

    held = Shards(torch.nn.Linear(1, 1))
    assert held.has_stretches(cut(torch.zeros(4)))
    assert not held.has_stretches(torch.zeros(8)), "it is whole"
    assert not held.has_stretches(cut(torch.zeros(4, dtype=torch.bfloat16))), "it is rounded"
    assert not held.has_stretches(cut(torch.zeros(4, dtype=torch.int8))), "it is quantised"
    assert not held.has_stretches(cut(torch.zeros(4), ds_quant_scale=torch.ones(1)))
    assert not held.has_stretches(cut(torch.zeros(0))), "it lies on an NVMe"
    assert not held.has_stretches(cut(torch.zeros(8), numbers=8)), "each of two nodes holds all of it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_grows_to_the_one_that_safetensors_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    path, value = tmp_path / "model.safetensors", torch.arange(15).view(3, 5).to(dtype)
    one = torch.zeros(1, dtype=dtype)
    save_file({"a": one, "b": one.clone()}, path, metadata={"format": "pt"})
    with grown(path, value.shape) as write:
        for part in value.reshape(-1).split(4):
            write(part.contiguous().view(torch.uint8).numpy().data)
    save_file({"a": value, "b": value.clone()}, tmp_path / "whole", metadata={"format": "pt"})
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    save_file({"a": one}, path)
    with pytest.raises(ValueError, match="4 bytes came of a tensor of"), grown(path, value.shape) as write:
        write(b"1234")
    save_file({}, path)
    with grown(path, value.shape) as write:  # transformers leaves it out
        write(b"1234")
    assert load_file(path) == {}


def test_groups_keep_to_their_limit_and_hold_layers_together() -> None:
    sizes = {"embed": 3, "layers.0.q": 2, "layers.0.k": 2, "layers.1.q": 2, "layers.1.k": 2, "norm": 1, "head": 9}
    assert groups_of(sizes, 5) == [["embed", "layers.0.q"], ["layers.0.k", "layers.1.q"], ["layers.1.k", "norm"],
                                   ["head"]]  # fmt: skip
    layers = [["embed"], ["layers.0.q", "layers.0.k"], ["layers.1.q", "layers.1.k", "norm"], ["head"]]
    assert groups_of(sizes, 5, layer_of) == layers
    assert layer_of("model.layers.12.mlp.experts.3.up") == "model.layers.12"
    assert groups_of({}, 5) == []
