"""Evaluation mode for a while."""

import pytest
import torch

from espalier.models.evaluating import evaluating


def test_every_part_has_its_own_mode_again_an_error_or_not() -> None:
    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Sequential(torch.nn.Dropout(0.5)))
    net[1].eval()  # which a user keeps so
    for fails in (False, True):
        try:
            with evaluating(net):
                assert not any(module.training for module in net.modules())
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert [module.training for module in net.modules()] == [True, True, False, False]


@pytest.mark.parametrize("mode", [True, False])
def test_a_network_is_left_in_its_mode(mode: bool) -> None:
    net = torch.nn.Linear(1, 1).train(mode)
    with evaluating(net):
        pass
    assert net.training is mode
