"""With ZeRO-3 a rank reads of a folder what it keeps: the numbers are those of weights that were read whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from benchmarks.processes.forked import run_ranks
from benchmarks.sizes.tensor_memory import own_pages
from espalier.models.file_slices import Unread, box_around, sample_of_files, with_only
from espalier.models.in_parts import loaded_in_parts
from espalier.models.load import BadModel, load_policy
from tests.support.slow import slow_unless
from tests.training.test_cut_loading import EXPERTS, SIZES, write

MIB = 2**20
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}  # fmt: skip


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `llama` (untied), `qwen2` (tied, bf16, several files), `renamed` (a network without a head, so that the
    names of its files lack a prefix), `experts` (joined when they are read), `buffers` (experts and a buffer that is
    saved), `pickled` and `wide` (an embedding of 64 MiB that is nearly all)."""
    folder = tmp_path_factory.mktemp("networks")
    write(folder / "llama", LlamaConfig(**SIZES, attention_bias=True))
    write(folder / "qwen2", Qwen2Config(**SIZES, tie_word_embeddings=True, dtype=torch.bfloat16), max_shard_size="20KB")
    headless = LlamaConfig(**SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(headless).model.save_pretrained(folder / "renamed")
    write(folder / "experts", Qwen3MoeConfig(**SIZES, **EXPERTS))
    write(folder / "buffers", DeepseekV3Config(**SIZES | LATENT, num_experts_per_tok=2, moe_intermediate_size=24))
    write(folder / "pickled", LlamaConfig(**SIZES))
    pickled = folder / "pickled" / "model.safetensors"
    torch.save(weights_of(pickled.parent), pickled.parent / "pytorch_model.bin")
    pickled.unlink()
    write(folder / "wide", LlamaConfig(**SIZES | {"vocab_size": 2**17, "hidden_size": 128}, tie_word_embeddings=True))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder, by their names in its files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("num_ranks", slow_unless(lambda ranks: ranks == 4, [2, 4]))
def test_a_rank_reads_its_share_of_what_is_not_joined_and_keeps_what_it_would_of_the_whole(
    num_ranks: int, networks: Path, tmp_path: Path
) -> None:
    """All sizes are multiples of 4, so that a share is exactly that."""
    for path in networks.iterdir():
        (tmp_path / path.name).symlink_to(path)
    names = sorted(path.name for path in networks.iterdir())
    codes = run_ranks("tests/support/slice_ranks.py", [str(tmp_path), *names], tmp_path / "log", num_ranks)
    assert codes == [0] * num_ranks, (tmp_path / "log").read_text()[-3000:]
    for rank in range(num_ranks):
        read = json.loads((tmp_path / f"read {rank}.json").read_text())
        for name in names:
            sizes = {key: value.nbytes for key, value in weights_of(networks / name).items()}
            is_whole = {key: ".experts." in key or key.endswith("correction_bias") for key in sizes}
            expected = {key: size if is_whole[key] else size // num_ranks for key, size in sizes.items()}
            assert dict(read[name]["bytes"]) == expected, name
            assert len(read[name]["bytes"]) == len(expected), name  # once
        largest = max(size for _, size in read["wide"]["bytes"])
        assert largest == 64 * MIB // num_ranks
        if num_ranks == 4:  # the pages of the file, those in which they are cut, and what is kept: three shares
            assert read["wide"]["rise"] < 60 * MIB


@pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 4, 5), (1, 6, 2), (2, 1, 1, 3)])
def test_the_box_around_a_stretch_holds_it_and_whole_rows_of_one_dimension_at_most(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel()):
        for stop in range(start + 1, whole.numel() + 1):
            index, before = box_around(shape, start, stop)
            box = whole[index].reshape(-1)
            assert box[0] == before
            assert torch.equal(box[start - before : stop - before], torch.arange(start, stop))
            row = whole[tuple(one.start for one in index)].numel()
            assert len(box) < stop - start + 2 * row


def test_a_tensor_with_only_some_numbers_takes_memory_for_those_alone() -> None:
    before = own_pages()
    tensor = with_only(torch.ones(MIB // 4), 1000, torch.Size((4096, 16384)), torch.float32)
    assert own_pages() - before < 8 * MIB
    assert tensor.shape == (4096, 16384)
    flat = tensor.view(-1)
    assert flat[999:1001].tolist() == [0, 1]
    assert flat[1000 + MIB // 4 - 1 :][:2].tolist() == [1, 0]


@pytest.fixture
def unread(tmp_path: Path) -> tuple[Unread, torch.Tensor]:
    """A weight [6, 4] in bf16 of a file that nothing was read of, and what it is."""
    value = torch.randn(6, 4).bfloat16()
    save_file({"w": value}, tmp_path / "x.safetensors")
    return Unread(safe_open(tmp_path / "x.safetensors", "pt").get_slice("w"), torch.bfloat16), value


def test_a_weight_stays_unread_where_it_is_made_a_parameter_of_another_kind(unread: tuple[Unread, Any]) -> None:
    weight, value = unread
    parameter = torch.nn.Parameter(weight[...].to(device="cpu", dtype=torch.float32))
    assert isinstance(parameter, Unread)
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == ((6, 4), torch.float32, True)
    assert torch.equal(parameter.numbers(5, 11), value.float().view(-1)[5:11])
    assert parameter.numbers(24, 24).shape == (0,)


def test_a_weight_that_is_computed_with_is_read(unread: tuple[Unread, torch.Tensor]) -> None:
    weight, value = unread
    for found, expected in (
        (torch.stack([weight, weight]), torch.stack([value, value])),
        (weight.transpose(0, 1).contiguous(), value.T),
        (weight.to(torch.float16).to(torch.float32), value.half().float()),
        (weight.float()[1:3], value.float()[1:3]),
    ):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)


def test_nobody_writes_to_a_weight_that_was_not_read(unread: tuple[Unread, torch.Tensor]) -> None:
    with pytest.raises(TypeError, match="cannot be written to"):
        unread[0].zero_()


class ApartNode:
    """A cutter of two ranks, of which the other one read this."""

    reads_parts = True

    def __init__(self, other: str) -> None:
        self.other = other

    def of_all_ranks(self, value: str) -> list[str]:
        return [self.other, value]


def test_a_node_whose_folder_holds_other_weights_is_named(networks: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(networks / "llama", copy)
    sample = sample_of_files(str(networks / "llama"))
    assert sample_of_files(str(copy)) == sample
    weights = {name: value * 1.001 for name, value in weights_of(copy).items()}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert sample_of_files(str(copy)) != sample
    cutter: Any = ApartNode(sample)
    with (
        loaded_in_parts(cutter),
        pytest.raises(BadModel, match="copy: rank 1 has other weights there"),
    ):
        load_policy(str(copy))
