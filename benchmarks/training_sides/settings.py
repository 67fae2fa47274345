"""What every side of a kind has in common: examples a step, learning rate (constant), AdamW's betas, beta of DPO.

Process rewards have eight trajectories a step, TRL's own default for a device: its PRMTrainer adds up the means of
accumulated micro-batches (four of them give four times the loss and the gradient), so that with accumulation it would
not do the same work.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`batch_size` examples (pairs, trajectories) a step."""

    batch_size: int
    learning_rate: float


SETTINGS = {"sft": Settings(32, 1e-3), "dpo": Settings(16, 1e-4), "prm": Settings(8, 3e-4)}
BETAS = (0.9, 0.999)
DPO_BETA = 0.1
