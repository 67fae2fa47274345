"""With ZeRO-3 a network is cut over the ranks as it is read, and written as it is gathered: what it is, computes and
leaves is what a whole one does."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from benchmarks.gpu.training import Shape, pairs
from benchmarks.processes.forked import run_ranks
from espalier.data.jsonl import write_records
from espalier.models.load import load_reference
from espalier.models.packing_check import packing_of
from espalier.training.deepspeed_engine import loading
from espalier.training.weight_files import join_tensors
from tests.support.slow import slow_unless

SIZES = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}
STATES = {"vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 12,
          "state_size": 16, "n_groups": 1}  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def write(folder: Path, config: PretrainedConfig, **how: str) -> None:
    """A network of random weights, also those that begin as ones or zeros."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for value in model.parameters():
        torch.nn.init.normal_(value, 1.0 if value.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder, **how)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `llama` (scaled rotary frequencies, biases in float32), `qwen2` (tied, biases, bf16, several files),
    `experts`, `states` (a module reads another one's weights), and, said to be tied and not, `apart` (another head),
    `apart turned` (the embedding's own rows in another order) and `apart at the end` (in one number)."""
    folder = tmp_path_factory.mktemp("networks")
    write(folder / "llama", LlamaConfig(**SIZES, rope_parameters=SCALED, attention_bias=True))
    tied = Qwen2Config(**SIZES, tie_word_embeddings=True, dtype=torch.bfloat16)
    write(folder / "qwen2", tied, max_shard_size="20KB")
    assert len(list((folder / "qwen2").glob("*.safetensors"))) > 3
    write(folder / "experts", Qwen3MoeConfig(**SIZES, **EXPERTS))
    write(folder / "states", Mamba2Config(**STATES))
    for name in ("apart", "apart turned", "apart at the end"):
        write(folder / name, LlamaConfig(**SIZES, tie_word_embeddings=True))
        path = folder / name / "model.safetensors"
        weights = load_file(path)
        embedding = weights["model.embed_tokens.weight"]
        other = torch.ones(160, 48) if name == "apart" else embedding.flip(0).contiguous()
        if name == "apart at the end":
            other = embedding.clone()
            other[-1, -1] += 1
        save_file(weights | {"lm_head.weight": other}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    slow_unless(
        lambda case: case == (2, "apart at the end,qwen2"),
        [
            (2, "apart at the end,qwen2"),
            (2, "apart,apart turned,states,llama,experts"),
            (3, "apart,apart at the end,apart turned,states,llama,qwen2,experts"),
        ],
    ),
)
def test_no_rank_holds_a_whole_network_and_all_is_as_with_whole_ones(
    num_ranks: int, names: str, networks: Path, tmp_path: Path
) -> None:
    for path in networks.iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = [str(tmp_path), *names.split(",")]
    codes = run_ranks("tests/support/part_ranks.py", words, tmp_path / "log", num_ranks)
    assert codes == [0] * num_ranks, (tmp_path / "log").read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["online", "precomputed"])
def test_preferences_with_a_cut_reference_are_learnt_as_by_one_process(
    reference: str, tiny_policy: Path, tmp_path: Path
) -> None:
    """In bf16, where the reference is held so: its margins are those of the policy, 0 before the first step."""
    shape = Shape(64, 128, 2, 2, 1, 320, length=48, batch=4, micro=2, num_steps=2, num_warm=0)
    write_records(tmp_path / "pairs.jsonl", pairs(shape))
    settings = f"""-cn train objective=dpo examples=preferences examples.path={tmp_path}/pairs.jsonl max_steps=2
        model.path={tiny_policy} update.batch_size=4 update.micro_batch_size=2 update.learning_rate=0.01 log_every=1
        precision=bf16 reference_logprobs={reference}""".split()
    curves = []
    for name, num_ranks, engine in (("one", 1, "none"), ("cut", 2, "zero3")):
        words = [*settings, f"output_dir={tmp_path}/{name}", f"deepspeed={engine}"]
        codes = run_ranks("trainer_base_ds_mul.py", words, tmp_path / "log", num_ranks)
        assert codes == [0] * num_ranks, (tmp_path / "log").read_text()[-3000:]
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        curves.append([row["train/loss"] for row in rows if "train/loss" in row])
    assert curves[0][0] == curves[1][0] == pytest.approx(math.log(2), abs=1e-6)
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)
    assert "could not be asked" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_whole_reference_is_held_in_bf16_and_says_what_a_float32_one_says(name: str, networks: Path) -> None:
    path = str(networks / name)
    with loading(None, "fp32"):
        whole: Any = load_reference(path)
    with loading(None, "bf16"):
        held: Any = load_reference(path)
    found = {key: value.dtype for key, value in held.named_parameters()}
    assert {value.dtype for value in whole.parameters()} == {torch.float32}
    assert (
        found["model.layers.0.mlp.up_proj.weight"] == found["model.layers.1.self_attn.q_proj.weight"] == torch.bfloat16
    )
    assert found["model.embed_tokens.weight"] == found["model.norm.weight"] == torch.float32
    assert found["model.layers.0.self_attn.q_proj.bias"] == torch.float32
    assert held.get_output_embeddings().weight.dtype == (torch.float32 if name == "qwen2" else torch.bfloat16)
    assert packing_of(held).choice == packing_of(whole).choice == "packed"
    ids = torch.randint(0, 160, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(held(ids).logits, whole(ids).logits)


def test_a_file_put_together_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(300, 5), "a": torch.ones(7, dtype=torch.bfloat16), "c.ä": torch.arange(3),
               "f": torch.tensor([True]), "e": torch.zeros(2, dtype=torch.float64),
               "d": torch.ones(2, dtype=torch.float16), "empty": torch.zeros(0, 3)}  # fmt: skip
    save_file(tensors, tmp_path / "whole", {"format": "pt"})
    pieces = []
    for name, value in tensors.items():
        pieces.append(tmp_path / f"piece {name}")
        save_file({name: value}, pieces[-1], {"format": "pt"})
    join_tensors(pieces, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["joined", "whole"]
