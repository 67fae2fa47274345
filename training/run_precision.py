"""What a whole run computes in: one answer for all of its ranks and all of its starts, kept in its config.yaml."""

import dataclasses
import logging
from pathlib import Path
from typing import TypeVar

from espalier.models.precision import AUTO, BF16, FP32, has_fast_bf16, warn_of_slow_bf16
from espalier.runtime.distributed import device, from_main_rank, gather_over_ranks
from espalier.runtime.run_dir import stored_config
from espalier.runtime.schemas import RLConfig, TrainConfig

log = logging.getLogger("train")
Config = TypeVar("Config", TrainConfig, RLConfig)


def settle_precision(config: Config, run_dir: Path | None = None) -> Config:
    """Return the config with `bf16` or `fp32` in place of `auto`; to be called by all ranks of the run, in its group.

    A run that has begun goes on in what it began with, on whatever machine. Else all ranks compute in bfloat16 where
    each of them multiplies it fast, and in float32 where one does not.
    """
    began = from_main_rank(lambda: stored_config(run_dir).get("precision", AUTO) if run_dir else AUTO)
    fast = gather_over_ranks(has_fast_bf16(device().type))
    if config.precision != AUTO:
        settled = config.precision
    elif began != AUTO:
        settled = began
    else:
        settled = BF16 if all(fast) else FP32
        log.info("computing in %s%s", settled, "" if all(fast) else ": bfloat16 is slow on " + (
            f"this {device().type}" if not any(fast) else f"{fast.count(False)} of {len(fast)} ranks"))  # fmt: skip
    if settled == BF16:
        warn_of_slow_bf16(device(), "the run began with it" if config.precision == AUTO else "")
    return dataclasses.replace(config, precision=settled)
