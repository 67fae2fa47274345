"""QLoRA where bitsandbytes is: 4- and 8-bit bases train, resume and merge to what was trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.root_config import root_config

pytest.importorskip("bitsandbytes", reason="no bitsandbytes: pip install bitsandbytes")

from espalier.data.batches.loader import Loader
from espalier.data.examples.token_examples import TokenExample
from espalier.models.load import load_policy
from espalier.models.lora import Lora, base_of_adapter, merge_adapter, write_bits
from espalier.models.precision import autocast
from espalier.models.quantised import round_weights
from espalier.models.scalar_head import load_process_reward
from espalier.models.without_adapters import PolicyWithoutAdapters
from espalier.runtime.schemas import TrainConfig
from espalier.training import checkpoint
from espalier.training.engine import TorchEngine, trained_tensors
from espalier.training.loop import Loop
from espalier.training.objectives.sft import SupervisedFineTuning

IDS = torch.tensor([[5, 9, 30, 31, 7], [3, 4, 80, 90, 100]])
BITS = [4, 8]
EXAMPLES = [TokenExample(f"d{i}", [2 + (i + 3 * k) % 200 for k in range(6 + i % 5)], 2 + i % 3)
            for i in range(16)]  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def adapted(policy: Path, bits: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    return Lora(**{"rank": 4, "alpha": 8.0, "bits": bits, **settings}).wrap(load_policy(str(policy)))


def make_loop(model: Any, run_dir: Path, max_steps: int, precision: str = "fp32") -> Loop:
    settings: dict[str, Any] = {"output_dir": "", "model": {}, "objective": {}, "examples": {}, "optimizer": {}}
    config = root_config(TrainConfig, **settings, precision=precision, batch_size=8, micro_batch_size=4,
                         max_steps=max_steps,
                         learning_rate=1e-2, warmup_steps=1, schedule="constant", log_every=1)  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = TorchEngine(model, torch.optim.AdamW(trained, lr=1e-2), torch.device("cpu"), 1.0)
    run_dir.mkdir(exist_ok=True)
    return Loop(config, engine, SupervisedFineTuning(), Loader(EXAMPLES, 8, 4, 0), None, 0, run_dir)


@pytest.mark.parametrize("bits", BITS)
def test_linear_layers_are_stored_in_few_bits_and_heads_are_not(bits: int, tiny_policy: Path) -> None:
    model = adapted(tiny_policy, bits)
    whole = load_policy(str(tiny_policy))
    stored = dict(model.named_parameters())
    for name, value in whole.named_parameters():
        mine = stored.get(f"base_model.model.{name}")
        if mine is None:
            mine = stored[f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"]
            assert mine.numel() * mine.element_size() * 8 == bits * value.numel()
        else:
            assert mine.dtype == torch.float32
        assert not mine.requires_grad


@pytest.mark.parametrize("bits", BITS)
def test_at_step_0_the_model_is_its_rounded_base_and_near_the_base(bits: int, tiny_policy: Path) -> None:
    model, whole = adapted(tiny_policy, bits), load_policy(str(tiny_policy))
    rounded = round_weights(load_policy(str(tiny_policy)), bits)
    found = logits(model)
    # 8-bit products round their inputs too.
    torch.testing.assert_close(found, logits(rounded), rtol=0, atol={4: 1e-5, 8: 0.02}[bits])
    distance = float((found - logits(whole)).abs().max())
    assert 0 < distance < {4: 0.2, 8: 0.03}[bits]
    assert torch.equal(PolicyWithoutAdapters(model)(input_ids=IDS).logits, found)


@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_and_only_adapters_move(precision: str, is_dora: bool, tiny_policy: Path, tmp_path: Path) -> None:
    model = adapted(tiny_policy, 4, is_dora=is_dora)
    before = {name: value.clone() for name, value in model.named_parameters()}
    make_loop(model, tmp_path, 6, precision).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert len(moved) == 2 * 7 * (3 if is_dora else 2)
    assert all("lora_" in name for name in moved)


def test_bf16_computes_in_bf16(tiny_policy: Path) -> None:
    model = adapted(tiny_policy, 4).eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad(), autocast(torch.device("cpu"), "bf16"):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16
    assert layer(torch.randn(2, 64)).dtype == torch.float32


@pytest.mark.parametrize("bits", BITS)
def test_a_checkpoint_holds_only_the_adapters_and_resumes_bit_for_bit(
    bits: int, tiny_policy: Path, tmp_path: Path
) -> None:
    straight = make_loop(adapted(tiny_policy, bits), tmp_path / "straight", 4)
    straight.run()
    assert all("lora_" in name for name in trained_tensors(straight.engine.model))
    first = make_loop(adapted(tiny_policy, bits), tmp_path / "stopped", 4)
    for step in range(2):
        first.train_step(step)
    checkpoint.save(tmp_path / "stopped", first.engine, checkpoint.TrainState(2, "x"), 1)
    second = make_loop(adapted(tiny_policy, bits), tmp_path / "stopped", 4)
    assert checkpoint.resume(tmp_path / "stopped", second.engine, "x") == 2
    for step in range(2, 4):
        second.train_step(step)
    for name, value in trained_tensors(straight.engine.model).items():
        assert torch.equal(value, trained_tensors(second.engine.model)[name]), name


@pytest.mark.parametrize("bits", BITS)
def test_merged_equals_unmerged(bits: int, tiny_policy: Path, tmp_path: Path) -> None:
    model = adapted(tiny_policy, bits)
    make_loop(model, tmp_path / "run", 3).run()
    model.save_pretrained(tmp_path / "adapter")
    write_bits(tmp_path / "adapter", bits)
    merged = merge_adapter(tmp_path / "adapter", lambda: base_of_adapter(tmp_path / "adapter"))
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol={4: 1e-4, 8: 0.05}[bits])
    assert float((logits(merged) - logits(load_policy(str(tiny_policy)))).abs().max()) > 0.2
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}


def test_a_scalar_head_over_a_quantised_body_is_whole_and_trained(tiny_policy: Path) -> None:
    model = Lora(rank=4, bits=4).wrap(load_process_reward(str(tiny_policy), 3))
    head = model.base_model.model.score.modules_to_save.default
    assert type(head) is torch.nn.Linear
    assert head.weight.requires_grad
    assert float(logits(model).abs().max()) == 0  # a fresh head
