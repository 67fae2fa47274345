"""What a whole run computes in: one answer for all of its ranks and all of its starts, kept in its config.yaml."""

import dataclasses
import logging
from typing import Any, TypeVar

from espalier.models.precision import AUTO, BF16, FP32, has_fast_bf16, warn_of_slow_bf16
from espalier.runtime.distributed import device, from_main_rank, gather_over_ranks
from espalier.runtime.schemas import RLConfig, TrainConfig

log = logging.getLogger("train")
Config = TypeVar("Config", TrainConfig, RLConfig)


def settle_precision(config: Config) -> Config:
    """Return the config with what is computed in place of `auto`; to be called by all ranks of the run, in its group.

    All ranks compute in bfloat16 where each of them multiplies it fast, and in float32 where one does not. Engines of
    the run's own do what is fast on rank 0's machine, which starts them.
    """
    fast = gather_over_ranks(has_fast_bf16(device().type))
    precision = from_main_rank(lambda: config.precision)  # which alone may see the folder of a run that goes on
    if precision == AUTO:
        precision = BF16 if all(fast) else FP32
        log.info("computing in %s%s", precision, "" if all(fast) else ": bfloat16 is slow on " + (
            f"this {device().type}" if not any(fast) else f"{fast.count(False)} of {len(fast)} ranks"))  # fmt: skip
    elif precision == BF16:
        warn_of_slow_bf16(device())
    changes: dict[str, Any] = {"precision": precision}
    for name in ("server", "client"):
        node = getattr(config, name, None)
        if isinstance(node, dict) and node.get("dtype") == AUTO:
            changes[name] = {**node, "dtype": "bfloat16" if fast[0] else "float32"}
    return dataclasses.replace(config, **changes)
