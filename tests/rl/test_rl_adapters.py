"""Adapters and the moving average in reinforcement learning: what is delivered, compared with, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import BadModel, load_policy
from espalier.models.lora import Lora, merge_adapter
from espalier.models.merged import adapter_scalings
from espalier.models.without_adapters import PolicyWithoutAdapters
from espalier.rl.delivery.policy_weights import HeldWeights
from espalier.rl.ema import MovingAverage
from espalier.rl.experience import policy_logits
from espalier.rl.kl import full_divergence
from espalier.rl.policy import without_weights
from espalier.rl.trainer import Trainer
from espalier.rl.training_engines import check_engines
from espalier.runtime.base_model import base_of_adapter_folder
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.schemas import EMAConfig, KLConfig, RLConfig
from espalier.sampling.client import ServerGone
from espalier.training.engine import BadCheckpoint, named_weights
from tests.support.rl_cases import make_trainer, on_repeatable, read_metrics
from tests.support.root_config import root_config


@pytest.fixture(scope="module")
def server(tiny_policy: Path) -> RepeatableServer:
    return RepeatableServer(str(tiny_policy), max_model_len=512)


def shaken(model: Any) -> Any:
    """Every trained weight moved, as after training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("is_dora", [False, True])
def test_merged_weights_are_those_of_pefts_merge_and_leave_the_model_as_it_was(
    is_dora: bool, tiny_policy: Path
) -> None:
    model = shaken(Lora(rank=4, alpha=8.0, is_dora=is_dora).wrap(load_policy(str(tiny_policy))))
    before = {name: value.clone() for name, value in named_weights(model).items()}
    found = dict(HeldWeights(None, named_weights(model), adapter_scalings(model)).items())
    assert all(torch.equal(value, before[name]) for name, value in named_weights(model).items())
    base = load_policy(str(tiny_policy)).state_dict()
    assert found.keys() == base.keys()
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
    expected = model.merge_and_unload(safe_merge=True).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_an_adapter_on_a_layer_that_is_not_linear_is_refused(tiny_policy: Path) -> None:
    with pytest.raises(BadModel, match=r"the adapter of model.embed_tokens cannot be delivered: it is no plain linear"):
        adapter_scalings(Lora(targets=["embed_tokens"]).wrap(load_policy(str(tiny_policy))))


def test_a_network_without_weights_computes_what_the_weights_put_in_say(tiny_policy: Path) -> None:
    model = shaken(load_policy(str(tiny_policy), "eager"))
    empty = without_weights(model, torch.device("cpu"))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    ids = torch.tensor([[5, 9, 30, 31, 7]])
    with torch.no_grad():
        found = torch.func.functional_call(empty, named_weights(model), kwargs={"input_ids": ids}, tie_weights=False)
        assert torch.equal(found.logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora": {"bits": 4}}, "lora.bits: rounded weights cannot be delivered to the sampler: set lora=lora"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout: a ratio of 1 must mean an unchanged policy: set lora.dropout=0"),
        ({"ema": EMAConfig(decay=1.0)}, r"ema.decay must be in \[0, 1\) \(0: no average\), got 1"),
    ],
)
def test_what_cannot_be_had_together_is_refused_in_one_line(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        check_engines(root_config(RLConfig, output_dir="", model={}, **settings))


@torch.no_grad()
def divergence_from_reference(trainer: Trainer) -> float:
    """KL(policy, reference) over whole distributions, the mean of a fixed row's tokens, in nats."""
    given = (torch.tensor([[5, 9, 30, 31, 7, 80, 90]]), torch.ones(1, 7, dtype=torch.long))
    trainer.policy.engine.model.eval()
    models = (trainer.policy.engine.model, trainer.policy.loss.reference)
    policy, reference = (policy_logits(model, *given)[:, 1:] for model in models)
    return float(full_divergence(policy, reference, 1.0).mean())


LORA = {"_target_": "espalier.models.lora.Lora", "rank": 4, "alpha": 8.0}
SMALL: dict[str, Any] = {
    "num_iterations": 3, "rollout_num_problems": 3, "num_epochs": 1, "minibatch_size": 6, "save_every": 1,
    "evaluation_every": 0,
    "export_every": 1, "learning_rate": 1e-2, "warmup_steps": 0, "kl": KLConfig(coefficient=0.01, kind="k3"),
    "ema": EMAConfig(decay=0.75),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_a_policy_leaves_its_reference_is_served_averaged_and_resumed(
    lora: Any, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, server: RepeatableServer, tmp_path: Path
) -> None:
    def make(name: str, dies_at: str = "") -> Trainer:
        trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / name, "", lora=lora, **SMALL)
        return on_repeatable(trainer, server, dies_at)

    whole = make("whole")
    assert divergence_from_reference(whole) == 0
    base = {name: value.clone() for name, value in load_policy(str(tiny_policy)).state_dict().items()}
    whole.run()
    run = tmp_path / "whole"
    start = model_fingerprint(str(tiny_policy))
    (run / "config.yaml").write_text(f"model: {{path: {tiny_policy}}}\n")  # as main.py leaves them
    (run / "provenance.yaml").write_text(f"inputs: {{{tiny_policy}: '{start}'}}\n")
    whole.save_model()

    # the reference: the base, which the policy shares with it, and from which it has gone
    rows = read_metrics(run)
    assert rows[0]["kl/per_token"] == 0
    assert min(abs(row["kl/per_token"]) for row in rows[1:]) > 1e-4
    assert divergence_from_reference(whole) > 1e-3
    if lora is not None:
        assert isinstance(whole.policy.loss.reference, PolicyWithoutAdapters)
        trained = named_weights(whole.policy.engine.model)
        frozen = [(name, value) for name, value in trained.items() if ".lora_" not in name]
        plain = [name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name, _ in frozen]
        assert sorted(plain) == sorted(base)
        assert all(torch.equal(value, base[name]) for (_, value), name in zip(frozen, plain, strict=True))

    # what is served and saved: full weights
    last = load_file(run / "model" / "model.safetensors")
    assert last.keys() == base.keys()
    assert max(row["engine/canary_gap"] for row in rows) < 1e-5
    assert all(torch.equal(value, server.model.state_dict()[name]) for name, value in last.items())
    if lora is not None:
        assert base_of_adapter_folder(run / "adapter") == start
        merged = merge_adapter(run / "adapter", lambda: load_policy(str(tiny_policy))).state_dict()
        for name, value in merged.items():
            torch.testing.assert_close(last[name], value, rtol=1e-6, atol=1e-7)

    # the average: by the formula, in float64, from the policies as they were exported
    average = {name: value.double() for name, value in base.items()}
    for number in (1, 2, 3):
        policy = load_file(run / "policies" / f"iteration-{number:06d}" / "model.safetensors")
        average = {name: 0.75 * value + 0.25 * policy[name].double() for name, value in average.items()}
    saved = load_file(run / "model_ema" / "model.safetensors")
    for name, expected in average.items():
        torch.testing.assert_close(saved[name].double(), expected, rtol=1e-6, atol=1e-7)
    moved = "model.layers.0.mlp.up_proj.weight"
    assert float((saved[moved] - last[moved]).abs().max()) > 1e-3

    # cut in every iteration, and resumed
    for iteration in (0, 1, 2):
        with pytest.raises(ServerGone):
            make("cut", f"rl-{iteration}").run()
    cut = make("cut")
    cut.run()
    cut.save_model()
    assert read_metrics(tmp_path / "cut") == rows
    for folder in ("model", "model_ema"):
        other = load_file(tmp_path / "cut" / folder / "model.safetensors")
        assert all(
            torch.equal(value, other[name]) for name, value in load_file(run / folder / "model.safetensors").items()
        )


def test_the_average_has_tensors_of_its_own_and_tied_weights_stay_one() -> None:
    shared = torch.ones(3)
    weights = {"embed": shared, "head": shared, "other": torch.zeros(2)}
    average = MovingAverage(0.9)
    average.start(HeldWeights(None, weights))
    with torch.no_grad():
        shared.fill_(11.0)
    average.update(HeldWeights(None, weights))
    found = average.weights()
    assert found["embed"] is found["head"]
    assert found["embed"].data_ptr() != shared.data_ptr()
    torch.testing.assert_close(found["head"], torch.full((3,), 2.0))  # 0.9 * 1 + 0.1 * 11, once
    assert torch.equal(shared, torch.full((3,), 11.0))


def test_an_average_of_another_policy_is_refused(tmp_path: Path) -> None:
    average = MovingAverage(0.9)
    average.start(HeldWeights(None, {"a": torch.ones(3)}))
    average.save(tmp_path)
    for weights in ({"a": torch.ones(4)}, {"b": torch.ones(3)}):
        with pytest.raises(BadCheckpoint, match="has no average of this policy's weights: choose another output_dir"):
            MovingAverage(0.9).load(tmp_path, HeldWeights(None, weights))
