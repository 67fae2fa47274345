"""The learning rate of a step: one schedule, of training on fixed data and of reinforcement learning."""

import math
from collections.abc import Callable

from espalier.data.records import BadInput
from espalier.runtime.schemas import TrainConfig

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
    """Return rise to `peak` over `warmup_steps` optimizer steps, then stay, or fall to 0 at `num_steps` in a line or
    along a cosine. `step` counts from 0. Raises BadInput on an unknown schedule."""
    check_schedule(schedule)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * SCHEDULES[schedule](min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)))


def rate_at(step: int, max_steps: int, config: TrainConfig) -> float:
    """Return the learning rate of a step (from 0) of `max_steps`. Raises BadInput on settings that make none."""
    if not 0 <= config.update.warmup_share < 1:
        raise BadInput(f"update.warmup_share must be in [0, 1), got {config.update.warmup_share}")
    warmup = num_warmup_steps(config, max_steps)
    return learning_rate(step, config.update.learning_rate, warmup, config.update.schedule, max_steps)


def num_steps(config: TrainConfig, num_examples: int) -> int:
    """Return optimizer steps of a whole run: `max_steps`, or as many as `num_epochs` passes over the examples take."""
    if config.max_steps > 0:
        return config.max_steps
    return max(1, math.ceil(num_examples * config.num_epochs / config.update.batch_size))


def num_warmup_steps(config: TrainConfig, max_steps: int) -> int:
    """Return `warmup_share` of all steps, rounded down, or else `warmup_steps`."""
    return int(config.update.warmup_share * max_steps) if config.update.warmup_share > 0 else config.update.warmup_steps
