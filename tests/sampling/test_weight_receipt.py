"""What is mixed into vLLM's worker, without vLLM."""

import numpy as np
import pytest
import torch

from espalier.sampling.weight_receipt import KeepsRandomState


class Worker(KeepsRandomState):
    """On a CPU."""

    device = torch.device("cpu")


def drawn() -> list[float]:
    """As the first model runner draws, and as the second one, which makes seeds of requests by NumPy."""
    return [*torch.rand(2).tolist(), float(np.random.randint(-(2**63), 2**63 - 1))]


def test_a_worker_draws_the_same_again_by_torch_and_by_numpy_once_its_random_state_is_put_back() -> None:
    worker = Worker()
    worker.keep_random_state()
    first, other = drawn(), drawn()
    assert first != other
    worker.put_random_state_back()
    assert drawn() == first
    worker.put_random_state_back()
    assert drawn() == first


def test_a_random_state_that_was_not_kept_cannot_be_put_back() -> None:
    with pytest.raises(RuntimeError, match="no random state was kept"):
        Worker().put_random_state_back()
