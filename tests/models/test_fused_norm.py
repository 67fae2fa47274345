"""RMSNorm with its own backward pass, against transformers' modules and float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from espalier.models.fused_norm import FusedRMSNorm, fuse_norms
from espalier.models.load import load_policy

SHAPE = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def test_values_and_gradients_are_those_of_the_formula_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, factors = (torch.randn(shape, generator=generator) for shape in ((3, 5, 32), (32,), (3, 5, 32)))
    module = FusedRMSNorm()
    module.weight, module.variance_epsilon, module.is_read_by_linear = torch.nn.Parameter(weight), 1e-5, False
    mine = x.clone().requires_grad_()
    found = module(mine)
    (found * factors).sum().backward()
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    want = exact_weight * exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
    (want * factors).sum().backward()
    assert mine.grad is not None
    assert module.weight.grad is not None
    for one, other in ((found, want), (mine.grad, exact.grad), (module.weight.grad, exact_weight.grad)):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize(("network", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_a_network_computes_what_it_did(network: Any, config: Any, is_bf16: bool) -> None:
    torch.manual_seed(0)
    model = network(config(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **SHAPE))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    found = []
    for is_fused in (False, True):
        model.zero_grad()
        if is_fused:
            fuse_norms(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            logits = model(IDS).logits
        logits.float().square().sum().backward()
        found.append((logits.float(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    kinds = {type(module).__name__ for module in model.modules() if type(module).__name__.endswith("RMSNorm")}
    assert kinds == {"FusedRMSNorm"}
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=2e-2 if is_bf16 else 1e-5)
    for name, want in found[0][1].items():
        largest = float(want.abs().max())
        assert float((found[1][1][name] - want).abs().max()) <= (5e-2 if is_bf16 else 1e-5) * largest, name


def test_norms_of_another_formula_stay_as_they_are() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **SHAPE))
    assert not any(isinstance(module, FusedRMSNorm) for module in fuse_norms(model).modules())


def test_a_loaded_policy_is_saved_as_any_other(tiny_policy: Path, tmp_path: Path) -> None:
    model = load_policy(str(tiny_policy))
    assert sum(isinstance(module, FusedRMSNorm) for module in model.modules()) == 2 * len(model.model.layers) + 1
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
