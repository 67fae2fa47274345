"""The weights of a policy that ZeRO-3 cuts, on two gloo ranks: what engines and files get of them is what there is, no
rank holds them whole, and whatever fails leaves no rank waiting."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.processes.forked import run_ranks
from espalier.models.load import load_policy
from espalier.training.shards import groups_of, layer_of

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


def test_groups_keep_to_their_limit_and_hold_layers_together() -> None:
    sizes = {"embed": 3, "layers.0.q": 2, "layers.0.k": 2, "layers.1.q": 2, "layers.1.k": 2, "norm": 1, "head": 9}
    assert groups_of(sizes, 5) == [["embed", "layers.0.q"], ["layers.0.k", "layers.1.q"], ["layers.1.k", "norm"],
                                   ["head"]]  # fmt: skip
    layers = [["embed"], ["layers.0.q", "layers.0.k"], ["layers.1.q", "layers.1.k", "norm"], ["head"]]
    assert groups_of(sizes, 5, layer_of) == layers
    assert layer_of("model.layers.12.mlp.experts.3.up") == "model.layers.12"
    assert groups_of({}, 5) == []
