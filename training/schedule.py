"""The learning rate of a step: one schedule, of training on fixed data and of reinforcement learning."""

import math
from collections.abc import Callable

from espalier.data.records import BadInput

# The learning rate after the warm-up, as a share of the highest, at a share of the steps left.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def check_schedule(schedule: str, key: str = "update.schedule") -> None:
    """Raise BadInput where there is no such schedule; `key` is where the config names it."""
    if schedule not in SCHEDULES:
        raise BadInput(f"{key} must be one of {', '.join(SCHEDULES)}, got '{schedule}'")


def learning_rate(step: int, peak: float, warmup_steps: int, schedule: str = "constant", num_steps: int = 0) -> float:
    """Rise to `peak` over `warmup_steps` optimizer steps, then stay, or fall to 0 at `num_steps` in a line or along a
    cosine. `step` counts from 0. Raises BadInput on an unknown schedule."""
    check_schedule(schedule)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * SCHEDULES[schedule](min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)))
