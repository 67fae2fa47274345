"""What every side of a kind has in common: examples a step, learning rate (constant), AdamW's betas, beta of DPO.

Process rewards have eight trajectories a step, TRL's own default for a device: its PRMTrainer adds up the means of
accumulated micro-batches (four of them give four times the loss and the gradient), so that with accumulation it would
not do the same work.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """`batch_size` examples (pairs, trajectories) a step."""

    batch_size: int
    learning_rate: float


SETTINGS = {"sft": Settings(32, 1e-3), "dpo": Settings(16, 1e-4), "prm": Settings(8, 3e-4)}
BETAS = (0.9, 0.999)
DPO_BETA = 0.1
# What `benchmarks.training.tune_peer` tries beside `peer.BEST`, all of it exact. Packing (bfd) is not there: its
# steps hold as many examples as fit, not as many as were asked for.
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {},
        {"attention": "eager"},
        {"micro": 4},
        {"micro": 16},
        {"micro": 32},
        {"micro": 4, "padding_free": True, "max_length": None},
        {"train_sampling_strategy": "batch_rebalance"},
    ],
    "dpo": [{}, {"attention": "eager"}, {"micro": 4}, {"micro": 16}],
    "prm": [{}, {"attention": "eager"}],
}
