"""The memory plan of an experiment of main.py, before it is run: `checks.gpu_plan` with the numbers of its model folder
and its config.

Reads configurations, no weights.
"""

import logging
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from espalier.checks.check import CheckFailed
from espalier.checks.gpu_plan import GpuPlan, Sharing, gpu_plan, lines_of, remedies, verdict
from espalier.checks.resources import setting_of
from espalier.data.records import BadInput
from espalier.rl.memory_of_run import rl_setup, window_of
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig
from espalier.sampling.placement import visible_gpus
from espalier.training.memory_of_run import device_bytes, micro_batch_of
from espalier.training.memory_plan import GIB

log = logging.getLogger("stage")


class Context(Protocol):
    """What the stage needs of its context."""

    counts: dict[str, Any]


def sharing_of(config: RLConfig) -> Sharing:
    """Return how a run uses its GPU. Raises BadInput where one of its networks has no plan."""
    has_server = bool(setting_of(config.server, "_target_", ""))
    owner, node = ("server", config.server) if has_server else ("client", config.client)
    options = setting_of(node, "options", {}) or {}
    return Sharing(
        rl_setup(config, 1, is_gpu=True),
        micro_batch=micro_batch_of(config.update, window_of(config)),
        row=window_of(config),
        sleeps=config.engine.sleeps,
        num_engines=_num_engines(config, has_server),
        cut=int(options.get("tensor_parallel_size") or 1),
        utilization=_utilization(options),
        owner=owner,
        names_share="gpu_memory_utilization" in options,
        beside=tuple(_engines_beside([config.reward, config.advantage, config.filter])),
    )


def _num_engines(config: RLConfig, has_server: bool) -> int:
    """Return how many of the policy's engines have the GPU of the learner, the first one: a server that is started, or
    a client's own, all of them where they see all GPUs, else one; 0 where they have others, or are not the run's."""
    if has_server:
        devices = str(config.server.get("devices") or "")
        return int(not devices or first_gpu() in devices.split(","))
    on_ray = str(config.client.get("_target_", "")).endswith(".RayEngines")
    if "base_url" in config.client or on_ray or not _is_here(config.client):
        return 0
    return int(config.client.get("num_engines", 1)) if config.client.get("gpus_each", 1) == 0 else 1


def first_gpu() -> str:
    """Return the learner's, as CUDA_VISIBLE_DEVICES names it; "0" where there is none."""
    return next(iter(visible_gpus()), "0")


def _is_here(client: Mapping[str, Any]) -> bool:
    """Say whether engines have the first GPU among theirs."""
    return not client.get("gpus") or "0" in map(str, client["gpus"])


def _utilization(options: Mapping[str, Any]) -> float:
    return float(options.get("gpu_memory_utilization") or Sharing.utilization)


def _engines_beside(node: Any) -> Iterator[float]:
    """Yield what each engine of a component below the node takes of the only GPU, as the policy's does: all of a
    client's where they see all GPUs, else the first; not those of other GPUs (`gpus`), nor Ray's."""
    if isinstance(node, Mapping):
        if _is_here(node) and str(node.get("_target_", "")).endswith(".DataParallelEngines"):
            number = int(node.get("num_engines", 1)) if node.get("gpus_each") == 0 else 1
            yield from [_utilization(node.get("options") or {})] * number
        for value in node.values():
            yield from _engines_beside(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _engines_beside(value)


def plan_of(config: RLConfig, total: int) -> tuple[GpuPlan, Sharing]:
    """Return (the plan of a run on a GPU of `total` bytes, 0 where that is unknown, and what it was made of). Raises
    BadInput where a network has no such plan."""
    sharing = sharing_of(config)
    return gpu_plan(sharing, total), sharing


def check_plan(plan: GpuPlan, sharing: Sharing) -> str:
    """Return the verdict; warn where estimates go beyond the GPU. Raises CheckFailed where what is certain does, or the
    engine's share holds not one row."""
    line = verdict(plan)
    if not plan.total:
        return line
    if max(phase.certain_bytes for phase in plan.phases) > plan.total:
        raise CheckFailed(f"{line}: set {remedies(plan, sharing)}")
    if sharing.num_engines and plan.cache_tokens < sharing.row:
        raise CheckFailed(f"{line}; an engine's share of {sharing.utilization:g} leaves a cache of "
                          f"{max(0, plan.cache_tokens)} tokens, and a row has up to {sharing.row}: raise "
                          f"{sharing.share}, or lower {sharing.owner}.max_model_len")  # fmt: skip
    if plan.peak.bytes > plan.total:
        log.warning("by estimate it does not fit: set %s", remedies(plan, sharing))
    return line


@dataclass(frozen=True)
class PlanGpu:
    """`experiment`: a config of main.py, as behind -cn; `overrides`: key=value, as on its command line, in one text
    with blanks between them or in a list. `gpu_gib`: the memory of the GPU in GiB (0: what is here, else unknown)."""

    experiment: str
    overrides: str | list[str] = ""
    gpu_gib: float = 0.0

    def __post_init__(self) -> None:
        if not self.gpu_gib >= 0:
            raise BadInput(f"stage.gpu_gib must be at least 0 (0: the GPU that is here), got {self.gpu_gib:g}")

    @cached_property
    def config(self) -> RLConfig:
        """The experiment's own config."""
        overrides = shlex.split(self.overrides) if isinstance(self.overrides, str) else self.overrides
        return compose_config(RLConfig, self.experiment, overrides, unused=("output_dir",))

    def inputs(self) -> list[str]:
        """Return nothing: what it reads is a config."""
        return []

    def run(self, input_path: str, context: Context) -> dict[str, Any]:
        """Return one JSON document, and log a line for each part of it. Raises BadInput where an input is given."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads an experiment: leave input empty")
        plan, sharing = plan_of(self.config, int(self.gpu_gib * GIB) or device_bytes())
        for line in lines_of(plan):
            log.info("%s", line)
        fits = None if not plan.total else plan.peak.bytes <= plan.total
        if fits is False:
            log.warning("it does not fit: set %s", remedies(plan, sharing))
        context.counts.update(phases=len(plan.phases))
        return {
            "experiment": self.experiment,
            "gpu_bytes": plan.total or None,
            "fits": fits,
            "phases": {phase.name: {"bytes": phase.bytes, "certain_bytes": phase.certain_bytes, "parts": phase.parts}
                       for phase in plan.phases},
            "cache_bytes": plan.cache or None,
            "cache_tokens": plan.cache_tokens or None,
            "largest_gpu_memory_utilization": plan.largest_share or None,
        }  # fmt: skip
