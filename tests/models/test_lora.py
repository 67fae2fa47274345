"""Adapters: the base at step 0, only they are trained, merged equals unmerged; DPO's reference without a copy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import PairExample, TokenExample
from espalier.models.load import BadModel, load_policy, load_reference
from espalier.models.lora import Lora, base_of_adapter, merge_adapter
from espalier.models.precision import autocast
from espalier.models.scalar_head import load_process_reward
from espalier.models.without_adapters import PolicyWithoutAdapters
from espalier.runtime.schemas import TrainConfig
from espalier.training import checkpoint
from espalier.training.engine import TorchEngine, load_weights, trained_tensors
from espalier.training.loop import Loop
from espalier.training.objectives.dpo import DirectPreference
from espalier.training.objectives.sft import SupervisedFineTuning
from espalier.training.piece_files import PieceReader
from espalier.training.reference_logprobs import FILE, weights_digest
from tests.support.root_config import root_config

IDS = torch.tensor([[5, 9, 30, 31, 7], [3, 4, 80, 90, 100]])
KINDS = [pytest.param(False, id="lora"), pytest.param(True, id="dora")]
LOADERS = {"policy": load_policy, "process reward": lambda path: load_process_reward(path, 3)}


def ids(start: int, length: int) -> list[int]:
    return [2 + (start + 3 * i) % 200 for i in range(length)]


EXAMPLES = [TokenExample(f"d{i}", ids(i, 6 + i % 5), 2 + i % 3) for i in range(16)]
PAIRS = [PairExample(f"p{i}", ids(i, 3), ids(i + 50, 2 + i % 4), ids(i + 90, 5)) for i in range(16)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def adapted(policy: Path, model: str = "policy", **settings: Any) -> Any:
    torch.manual_seed(0)
    return Lora(**{"rank": 4, "alpha": 8.0, **settings}).wrap(LOADERS[model](str(policy)))


def shaken(model: Any) -> Any:
    """Every trained weight moved, as after training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def make_loop(model: Any, objective: Any, examples: list[Any], run_dir: Path, max_steps: int = 4) -> Loop:
    settings: dict[str, Any] = {"output_dir": "", "model": {}, "objective": {}, "examples": {}, "optimizer": {}}
    config = root_config(TrainConfig, **settings, precision="fp32", batch_size=8, micro_batch_size=4,
                         max_steps=max_steps,
                         learning_rate=1e-2, warmup_steps=1, log_every=1, save_every=2)  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = TorchEngine(model, torch.optim.AdamW(trained, lr=1e-2), torch.device("cpu"), 1.0)
    run_dir.mkdir(exist_ok=True)
    return Loop(config, engine, objective, Loader(examples, 8, 4, 0), None, Layout(), run_dir)


@pytest.mark.parametrize("is_dora", KINDS)
@pytest.mark.parametrize("kind", LOADERS)
def test_at_step_0_the_model_is_its_base(kind: str, is_dora: bool, tiny_policy: Path) -> None:
    base = LOADERS[kind](str(tiny_policy))
    assert torch.equal(logits(adapted(tiny_policy, kind, is_dora=is_dora)), logits(base))


@pytest.mark.parametrize("is_dora", KINDS)
def test_only_adapters_are_trained(is_dora: bool, tiny_policy: Path, tmp_path: Path) -> None:
    model = adapted(tiny_policy, is_dora=is_dora)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_loop(model, SupervisedFineTuning(), EXAMPLES, tmp_path).run()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    # 7 linear layers (q, k, v, o, gate, up, down) in each of 2 blocks, with A and B, in DoRA a magnitude too.
    assert len(moved) == 2 * 7 * (3 if is_dora else 2)
    assert all("lora_" in name for name in moved)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_a_scalar_head_is_trained_whole(tiny_policy: Path) -> None:
    model = adapted(tiny_policy, "process reward")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        "base_model.model.score.modules_to_save.default.weight",
        "base_model.model.score.modules_to_save.default.bias",
    }


@pytest.mark.parametrize("is_dora", KINDS)
@pytest.mark.parametrize("kind", LOADERS)
def test_merged_equals_unmerged(kind: str, is_dora: bool, tiny_policy: Path, tmp_path: Path) -> None:
    model = shaken(adapted(tiny_policy, kind, is_dora=is_dora))
    model.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(tmp_path / "adapter", lambda: base_of_adapter(tmp_path / "adapter"))
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert float((logits(merged) - logits(LOADERS[kind](str(tiny_policy)))).abs().max()) > 0.1
    merged.save_pretrained(tmp_path / "model")
    again = load_policy if kind == "policy" else load_process_reward
    assert torch.equal(logits(again(str(tmp_path / "model"))), logits(merged))


@pytest.mark.parametrize("is_dora", KINDS)
def test_the_reference_is_the_policy_with_its_adapters_off(is_dora: bool, tiny_policy: Path) -> None:
    model = shaken(adapted(tiny_policy, is_dora=is_dora, dropout=0.5)).train()
    reference = PolicyWithoutAdapters(model)
    found = reference(input_ids=IDS).logits
    assert torch.equal(found, logits(load_reference(str(tiny_policy))))
    assert not found.requires_grad
    assert model.training
    assert not torch.equal(logits(model), found)  # on again
    with pytest.raises(AttributeError):  # nothing of the policy can be reached with its adapters on
        reference.lm_head  # noqa: B018


def test_a_dpo_margin_is_exactly_0_at_step_0_and_that_against_a_copy_later(tiny_policy: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("off", "copy"):
        model = adapted(tiny_policy)
        reference = PolicyWithoutAdapters(model) if name == "off" else load_reference(str(tiny_policy))
        make_loop(model, DirectPreference(reference), PAIRS, tmp_path / name).run()
        runs.append([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    for off, copy in zip(*runs, strict=True):
        for key in ("train/margin", "train/loss", "train/grad_norm"):
            assert off[key] == pytest.approx(copy[key], abs=1e-6)
    assert runs[0][0]["train/margin"] == 0
    assert runs[0][-1]["train/margin"] > 0


def run_until_step_4(loop: Loop) -> None:
    """As a run that is killed in its fourth step, with a checkpoint of two."""
    run_step = loop.train_step

    def stop_in_step_4(step: int) -> dict[str, float]:
        if step == 3:
            raise KeyboardInterrupt
        return run_step(step)

    loop.train_step = stop_in_step_4  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.run()


@pytest.mark.parametrize("is_dora", KINDS)
def test_a_resumed_run_asks_the_reference_no_more_and_ends_bit_for_bit_alike(
    is_dora: bool, tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference is the base: trained adapters are no part of what its stored sums are known by."""

    def preference_loop(name: str) -> tuple[Loop, list[int]]:
        model = adapted(tiny_policy, is_dora=is_dora, dropout=0.3)
        calls: list[int] = []

        class Counted(PolicyWithoutAdapters):
            def __call__(self, *arguments: Any, **named: Any) -> Any:
                calls.append(1)
                return super().__call__(*arguments, **named)

        return make_loop(model, DirectPreference(Counted(model)), PAIRS, tmp_path / name), calls

    straight, calls = preference_loop("straight")
    straight.run()
    assert len(calls) == 4, "16 pairs by 4, once"
    run_until_step_4(preference_loop("stopped")[0])
    sums = (tmp_path / "stopped" / FILE).read_bytes()
    resumed, calls = preference_loop("stopped")
    with caplog.at_level("WARNING"):
        resumed.run()
    assert calls == []
    assert "computed again" not in caplog.text
    assert (tmp_path / "stopped" / FILE).read_bytes() == sums == (tmp_path / "straight" / FILE).read_bytes()
    for name, value in trained_tensors(straight.engine.model).items():
        assert torch.equal(value, trained_tensors(resumed.engine.model)[name]), name


def test_the_reference_of_a_trained_policy_is_known_by_its_base_alone(tiny_policy: Path) -> None:
    model = adapted(tiny_policy, is_dora=True)
    reference = PolicyWithoutAdapters(model)
    fresh = weights_digest(reference)
    assert weights_digest(PolicyWithoutAdapters(shaken(model))) == fresh
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if name.endswith("base_layer.weight")).add_(1.0)
    assert weights_digest(reference) != fresh


def test_a_checkpoint_holds_only_what_is_trained_and_resumes_bit_for_bit(tiny_policy: Path, tmp_path: Path) -> None:
    straight = make_loop(adapted(tiny_policy, dropout=0.3), SupervisedFineTuning(), EXAMPLES, tmp_path / "straight")
    straight.run()
    stopped = make_loop(adapted(tiny_policy, dropout=0.3), SupervisedFineTuning(), EXAMPLES, tmp_path / "stopped")
    run_until_step_4(stopped)
    folder = checkpoint.checkpoints(tmp_path / "stopped")[-1]
    names = {name.split("/", 1)[1] for name in PieceReader(folder / "pieces").stored if name.startswith("weights/")}
    assert names == trained_tensors(stopped.engine.model).keys()
    assert all("lora_" in name for name in names)
    resumed = make_loop(adapted(tiny_policy, dropout=0.3), SupervisedFineTuning(), EXAMPLES, tmp_path / "stopped")
    resumed.run()
    for name, value in trained_tensors(straight.engine.model).items():
        assert torch.equal(value, trained_tensors(resumed.engine.model)[name]), name


def test_weights_of_a_model_without_adapters_are_refused(tiny_policy: Path) -> None:
    with pytest.raises(checkpoint.BadCheckpoint, match=r"run is of another model: .*lora_A.* does not fit"):
        load_weights(adapted(tiny_policy), trained_tensors(load_policy(str(tiny_policy))), "run")


def test_settings_that_cannot_work_are_refused(tiny_policy: Path) -> None:
    with pytest.raises(BadModel, match="rank must be at least 1, alpha above 0 and dropout in"):
        Lora(rank=0)
    with pytest.raises(BadModel, match=r"lora.targets \['query'\] is not in the model: its layers are down_proj"):
        adapted(tiny_policy, targets=["query"])
    with pytest.raises(BadModel, match=r"lora.bits must be 0, 4 or 8, got 3"):
        Lora(bits=3)


def tied(policy: Path) -> Any:
    """The policy with one tensor as embeddings and head."""
    model = load_policy(str(policy))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_shared_weight_is_refused_as_a_merge_would_change_both_layers(
    layer: str, tiny_policy: Path, tmp_path: Path
) -> None:
    told = rf"lora.targets: \S*{layer} shares its weight with another layer, which a merge would change too: leave"
    with pytest.raises(BadModel, match=told):
        Lora(targets=["q_proj", layer]).wrap(tied(tiny_policy))
    adapted(tiny_policy, targets=["q_proj", layer]).save_pretrained(tmp_path)
    merge_adapter(tmp_path, lambda: load_policy(str(tiny_policy)))
    with pytest.raises(BadModel, match=f"cannot merge it with .*{told}"):
        merge_adapter(tmp_path, lambda: tied(tiny_policy))
    config = tied(tiny_policy).config
    with torch.device("meta"):  # as the memory plan has it
        empty = AutoModelForCausalLM.from_config(config)
    with pytest.raises(BadModel, match=told):
        Lora(targets=[layer]).wrap(empty)


def test_a_quantised_base_without_bitsandbytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        BadModel, match=r"QLoRA \(lora.bits=4\) cannot run: .*pip install bitsandbytes, or set lora.bits"
    ):
        Lora(bits=4)


def test_a_bad_adapter_is_refused_in_the_users_words(tiny_policy: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    with pytest.raises(BadModel, match=r"no adapter_config.json there: an adapter folder is needed"):
        base_of_adapter(tiny_policy)
    adapted(tiny_policy).save_pretrained(adapter)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(BadModel, match="cannot merge it with"):
        merge_adapter(adapter, lambda: base_of_adapter(adapter))
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(BadModel, match=r"adapter_config.json cannot be read"):
        base_of_adapter(adapter)
    shutil.rmtree(adapter)
    adapted(tiny_policy).save_pretrained(adapter)
    with pytest.raises(BadModel, match="no such model folder"):
        base_of_adapter(adapter, str(tmp_path / "nosuch"))


@pytest.mark.parametrize("kind", LOADERS)
def test_checkpointed_gradients_are_the_same(kind: str, tiny_policy: Path) -> None:
    found = []
    for setting in (False, True, "selective"):
        load: Any = load_policy if kind == "policy" else lambda path, **more: load_process_reward(path, 3, **more)
        model = load(str(tiny_policy), gradient_checkpointing=setting).train()
        if kind == "process reward":
            torch.nn.init.ones_(model.score.weight)  # a fresh head is zero: no gradient would pass it
        model(input_ids=IDS).logits.square().mean().backward()
        assert model.is_gradient_checkpointing is bool(setting)
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(float(gradient.abs().sum()) > 0 for gradient in found[0])
    for one, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointed_gradients_save_fewer_activations(precision: str, tiny_policy: Path) -> None:
    saved, gradients = [], []
    for is_on in (False, True):
        model = load_policy(str(tiny_policy), gradient_checkpointing=is_on).train()
        own = {parameter.data_ptr() for parameter in model.parameters()}
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, own: set[int] = own, sizes: list[int] = sizes) -> torch.Tensor:
            if tensor.data_ptr() not in own:
                sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, autocast(torch.device("cpu"), precision):
            loss = model(input_ids=IDS.repeat(1, 8)).logits.float().square().mean()
        saved.append(sum(sizes))
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert saved[1] < 0.5 * saved[0], saved
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_checkpointed_gradients_is_the_same_run(precision: str, tiny_policy: Path, tmp_path: Path) -> None:
    curves = []
    for setting in (False, True, "selective"):
        model = load_policy(str(tiny_policy), gradient_checkpointing=setting)
        loop = make_loop(model, SupervisedFineTuning(), EXAMPLES, tmp_path / str(setting))
        loop.config.precision = precision
        loop.run()
        rows = [json.loads(line) for line in (tmp_path / str(setting) / "metrics.jsonl").read_text().splitlines()]
        curves.append([row["train/loss"] for row in rows])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-6)
    assert len(curves[0]) == 4
