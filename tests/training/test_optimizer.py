"""The fused optimizer: AdamW's own formula, equal to the unfused forms, and bit-identical over a resume."""

from pathlib import Path

import pytest
import torch
import yaml

from espalier.training.engine import TorchEngine

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "optimizer" / "adamw.yaml"
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))


def give_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def by_the_formula(num_steps: int) -> list[torch.Tensor]:
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""
    weights = [parameter.detach().double() for parameter in model().parameters()]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    rate, (beta1, beta2), eps, decay = SETTINGS["lr"], SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"]
    fresh = list(model().parameters())
    for step in range(1, num_steps + 1):
        give_gradients(fresh, step)
        for i, parameter in enumerate(fresh):
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            weights[i] *= 1 - rate * decay
            first[i] = beta1 * first[i] + (1 - beta1) * gradient
            second[i] = beta2 * second[i] + (1 - beta2) * gradient**2
            mean, variance = first[i] / (1 - beta1**step), second[i] / (1 - beta2**step)
            weights[i] -= rate * mean / (variance.sqrt() + eps)
    return weights


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind))
def test_adamw_is_its_formula_in_every_form(kind: dict[str, bool]) -> None:
    parameters = list(model().parameters())
    optimizer = torch.optim.AdamW(parameters, **SETTINGS, **kind)
    for step in range(1, 21):
        give_gradients(parameters, step)
        optimizer.step()
    for parameter, expected in zip(parameters, by_the_formula(20), strict=True):
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=2e-6)


def test_the_config_is_fused() -> None:
    assert yaml.safe_load(CONF.read_text())["fused"] is True


def test_fused_steps_are_the_same_bits_after_a_resume(tmp_path: Path) -> None:
    def engine() -> TorchEngine:
        made = model()
        return TorchEngine(made, torch.optim.AdamW(made.parameters(), **SETTINGS, fused=True), torch.device("cpu"), 1.0)

    def steps(which: TorchEngine, first: int, last: int) -> None:
        for step in range(first, last):
            give_gradients(which.parameters, step)
            which.step(0.01)

    straight, stopped, resumed = engine(), engine(), engine()
    steps(straight, 0, 8)
    steps(stopped, 0, 4)
    stopped.save_state(tmp_path)
    resumed.load_state(tmp_path)
    steps(resumed, 4, 8)
    for one, other in zip(straight.parameters, resumed.parameters, strict=True):
        assert torch.equal(one, other)
