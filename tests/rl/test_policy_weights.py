"""Weights that are made one at a time, beside whole copies of them: the same bits, and no room for a copy."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from espalier.models.load import load_policy
from espalier.models.lora import Lora
from espalier.models.merged import adapter_scalings
from espalier.rl.delivery.policy_weights import HeldWeights
from espalier.rl.policy import without_weights
from espalier.rl.probes import kept_pass
from espalier.rl.probes.canary import Canary, Scores, representatives
from espalier.training.engine import named_weights
from tests.support.whole_copies import WholeCopies, merged_weights

CANARIES = [Canary(list(range(5, 25)), start=8), Canary(list(range(40, 70)), start=10)]
SIZES: dict[str, Any] = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
                         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied, with biases": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


def network_of(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager")


def assert_same_scores(found: Scores, expected: Scores, where: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), where


def assert_same(found: Any, expected: WholeCopies) -> None:
    """Every weight, in its order, and what it makes of the canaries, bit for bit."""
    items, whole = dict(found.items()), dict(expected.items())
    assert list(items) == list(whole) == list(found.kinds)
    for name, value in items.items():
        assert (value.shape, value.dtype) == found.kinds[name] == (whole[name].shape, whole[name].dtype)
        assert torch.equal(value, whole[name]), name
    for precision, dtype in (("fp32", None), ("bf16", None), ("fp32", torch.bfloat16)):
        assert_same_scores(
            found.scores(CANARIES, precision, dtype), expected.scores(CANARIES, precision, dtype), precision
        )


@pytest.mark.parametrize("kind", CONFIGS)
def test_noise_that_is_put_on_one_weight_at_a_time_is_that_of_a_whole_copy(kind: str) -> None:
    model = network_of(kind)
    before = {name: value.clone() for name, value in named_weights(model).items()}
    kinds = {name: type(part) for name, part in model.named_modules()}
    held, whole = HeldWeights(model, named_weights(model)), WholeCopies(model, named_weights(model))
    assert_same(held, whole)
    scales = {name: 0.4 + 0.01 * number for number, name in enumerate(before)}
    perturbed, copies = held.perturbed(scales, 3), whole.perturbed(scales, 3)
    assert_same(perturbed, copies)
    assert not torch.equal(perturbed.scores(CANARIES, "fp32").logprobs, held.scores(CANARIES, "fp32").logprobs)
    for name in representatives(before):
        stale = perturbed.without_noise(name)
        different = [other for other, value in stale.items() if not torch.equal(value, dict(copies.items())[other])]
        assert different == [name]
        assert torch.equal(dict(stale.items())[name], before[name])
        expected = copies.without_noise(name)
        for canaries in (CANARIES, CANARIES[:1]):  # the second was not asked of the copy without it
            assert_same_scores(stale.scores(canaries, "fp32"), expected.scores(canaries, "fp32"), name)
    assert_same(held, whole)
    assert all(torch.equal(value, before[name]) for name, value in named_weights(model).items())
    assert kinds == {name: type(part) for name, part in model.named_modules()}
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_pass_without_one_weights_noise_begins_behind_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network_of("llama")
    computed: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *given, number=number: computed.append(number))
        layer.mlp.register_forward_pre_hook(lambda *given, number=number: computed.append(-number - 1))
    held = HeldWeights(model, named_weights(model))
    scales = dict.fromkeys(named_weights(model), 0.4)

    def mlps(perturbed: HeldWeights, name: str) -> list[int]:
        """The layers whose MLP is computed for that name."""
        computed.clear()
        perturbed.without_noise(name).scores(CANARIES, "fp32")
        return [-number - 1 for number in computed if number < 0]

    perturbed = held.perturbed(scales, 0)
    assert mlps(perturbed, "lm_head.weight") == [0, 1, 2], "no pass is known yet"
    perturbed.scores(CANARIES, "fp32")
    assert mlps(perturbed, "model.embed_tokens.weight") == [0, 1, 2]
    assert mlps(perturbed, "model.layers.1.mlp.up_proj.weight") == [1, 2]
    assert mlps(perturbed, "model.layers.2.input_layernorm.weight") == [2]
    assert mlps(perturbed, "model.norm.weight") == mlps(perturbed, "lm_head.weight") == []
    # behind the embedding and one layer, 2 x 30 tokens of 32 numbers each, and rotary tables of [1, 30, 16] twice
    monkeypatch.setattr(kept_pass, "MOST_BYTES", 4 * (2 * 2 * 30 * 32 + 2 * 30 * 16))
    small = held.perturbed(scales, 0)
    small.scores(CANARIES, "fp32")
    assert mlps(small, "lm_head.weight") == [1, 2]


@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "tied, with biases"])
def test_weights_that_are_merged_when_their_turn_comes_are_those_that_are_merged_at_once(
    kind: str, is_dora: bool
) -> None:
    model = Lora(rank=4, alpha=8.0, is_dora=is_dora).wrap(network_of(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    tensors, scalings = named_weights(model), adapter_scalings(model)
    before = {name: value.clone() for name, value in tensors.items()}
    network = without_weights(network_of(kind), torch.device("cpu"))
    held, whole = HeldWeights(network, tensors, scalings), WholeCopies(network, merged_weights(tensors, scalings))
    assert list(held.kinds) == list(network.state_dict())
    assert_same(held, whole)
    scales = dict.fromkeys(held.kinds, 0.4)
    perturbed, copies = held.perturbed(scales, 7), whole.perturbed(scales, 7)
    assert_same(perturbed, copies)
    name = "model.layers.1.mlp.up_proj.weight"
    assert_same(perturbed.without_noise(name), copies.without_noise(name))
    assert all(torch.equal(value, before[name]) for name, value in named_weights(model).items())


def test_a_weight_is_made_when_it_is_asked_for_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network_of("llama")
    weights = HeldWeights(model, named_weights(model)).perturbed(dict.fromkeys(named_weights(model), 0.4), 0)
    made: list[str] = []
    own = HeldWeights._weight
    monkeypatch.setattr(HeldWeights, "_weight", lambda self, name, *more: made.append(name) or own(self, name, *more))
    assert made == []
    walk: Iterator[Any] = iter(weights.items())
    assert next(walk)[0] == made[-1] == "model.embed_tokens.weight"
    assert next(walk)[0] == made[-1]
    assert len(made) == 2


@pytest.mark.slow
def test_no_copy_of_the_policy_is_held(tiny_policy: Path, tmp_path: Path) -> None:
    config = load_policy(str(tiny_policy)).config
    settings = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4000,
                "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rises = {}
    for kind in ("noise", "adapters", "whole"):
        command = [sys.executable, "-m", "tests.support.whole_copies", kind, str(tmp_path)]
        rises[kind], num_mib = map(int, subprocess.run(command, check=True, capture_output=True).stdout.split())
    assert num_mib > 180
    assert rises["whole"] > 0.8 * num_mib
    assert max(rises["noise"], rises["adapters"]) < num_mib / 3, rises  # the largest weights have 12 MiB
