"""The last layer computed where it is read, against the whole layer: values, gradients, and who takes part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from espalier.models.inputs import network
from espalier.models.last_layer import read_last_layer, reads_of
from espalier.models.load import checkpoint_gradients, load_policy
from espalier.models.logprobs import response_logprobs
from espalier.models.packed_attention import attention_name
from espalier.models.packing_check import packing_of

SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
NETWORKS: list[tuple[Any, Any]] = [
    (LlamaForCausalLM, LlamaConfig),
    (MistralForCausalLM, MistralConfig),
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
]
IDS = torch.randint(0, 97, (2, 10), generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([17, 3, 3, 9])


def make(network_class: Any, config: Any, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return network_class(config(attn_implementation=attention, **SHAPE)).train()


def answer(model: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits at `PLACES`, and the gradients of their weighted sum of squares."""
    model.zero_grad()
    logits = model(IDS, **more).logits.flatten(0, 1).index_select(0, PLACES)
    (logits.square() * torch.arange(1, 5).unsqueeze(1)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", attention_name("eager")])
@pytest.mark.parametrize(("network_class", "config"), NETWORKS)
def test_values_and_gradients_are_those_of_the_whole_layer(network_class: Any, config: Any, attention: str) -> None:
    model = make(network_class, config, attention)
    wanted = answer(model)
    reads = reads_of(read_last_layer(model), PLACES, IDS.numel())
    assert reads["reads"].tolist() == [3, 9, 17]
    assert_equal(answer(model, **reads), wanted)
    assert_equal(answer(model), wanted)


@pytest.mark.parametrize("setting", [True, "selective"])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_so_with_recomputed_layers_and_adapters(has_adapter: bool, setting: bool | str) -> None:
    model = make(LlamaForCausalLM, LlamaConfig)
    if has_adapter:
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj", "up_proj"], init_lora_weights=False))
    wanted = answer(model)
    read_last_layer(network(model))
    checkpoint_gradients(network(model), setting)
    assert_equal(answer(model, **reads_of(network(model), PLACES, IDS.numel())), wanted)


def test_what_is_not_read_is_not_computed() -> None:
    model = read_last_layer(make(LlamaForCausalLM, LlamaConfig))
    sizes = []
    model.base_model.layers[-1].mlp.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[1]))
    answer(model, **reads_of(model, PLACES, IDS.numel()))
    assert sizes == [3]


def test_a_network_of_another_form_and_places_by_the_dozen_go_the_whole_way() -> None:
    other = Gemma2ForCausalLM(Gemma2Config(**SHAPE))
    assert reads_of(read_last_layer(other), PLACES, IDS.numel()) == {}
    model = make(LlamaForCausalLM, LlamaConfig)
    assert reads_of(model, PLACES, IDS.numel()) == {}
    read_last_layer(model)
    assert reads_of(model, torch.arange(15), IDS.numel()) == {}
    assert reads_of(model, PLACES[:0], IDS.numel()) == {}


def test_places_are_rounded_up_to_a_number_that_other_batches_have() -> None:
    model = read_last_layer(make(LlamaForCausalLM, LlamaConfig))
    places = torch.tensor([5, 300, 5, 2])
    reads = reads_of(model, places, 640)["reads"]
    assert sorted(reads.tolist()) == [*range(63), 300]
    assert reads_of(model, places, 640, 636) == {}  # of four tokens that are not spare, three are read


def test_a_loaded_policy_scores_responses_by_it(tiny_policy: Path) -> None:
    model = load_policy(str(tiny_policy), "eager")
    assert packing_of(model).choice == "packed"  # asked of the network at the first pass, by passes of its own
    sizes: list[int] = []
    layer = model.base_model.layers[-1]
    layer.mlp.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[1]))
    mask = torch.ones(2, 10, dtype=torch.long)
    response = torch.zeros(2, 10, dtype=torch.bool)
    response[:, 8:] = True
    found, _ = response_logprobs(model, IDS, mask, response_mask=response)
    whole, _ = response_logprobs(model, IDS, mask)
    assert sizes == [4, 64]  # 18 of 20 tokens are too many to be picked: all are computed, rounded up to 64
    torch.testing.assert_close(found[:, 7:], whole[:, 7:], rtol=0, atol=1e-5)
    assert type(layer).__name__ == "LlamaDecoderLayer"
