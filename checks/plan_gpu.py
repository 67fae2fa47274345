"""The memory plan of an experiment of main.py, before it is run: `checks.gpu_plan` with the numbers of its model folder
and its config.

Reads configurations and the headers of weight files, no weights.
"""

import logging
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from espalier.checks.check import CheckFailed
from espalier.checks.gpu_plan import GIB, GpuPlan, Sharing, gpu_plan, lines_of, remedies, shape_of, verdict
from espalier.checks.resources import model_paths, num_parameters, setting_of
from espalier.data.records import BadInput
from espalier.models.load import load_config
from espalier.rl.combinations import reads_start
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig

log = logging.getLogger("stage")


class Context(Protocol):
    """What the stage needs of its context."""

    counts: dict[str, Any]


def sharing_of(config: RLConfig) -> Sharing:
    """Return how a run uses its GPU. Raises Skipped where the size of one of its networks is not known."""
    options = setting_of(config.client, "options", {}) or {}
    policy = str(config.model["path"])
    frozen = [num_parameters(path) for path in model_paths([config.reward, config.advantage])]
    if reads_start(config) and not config.lora:
        frozen.append(num_parameters(policy))
    sees_all = setting_of(config.client, "gpus_each", None) == 0
    return Sharing(
        engine=engine_name(config.deepspeed),
        has_adapters=bool(config.lora),
        critic=sum(num_parameters(str(one.model["path"])) for one in (config.critic, config.implicit_reward) if one),
        frozen=sum(frozen),
        micro_batch=config.update.micro_batch_size,
        row=int(setting_of(config.client, "max_model_len", 512)),
        has_checkpointing=bool(setting_of(config.model, "gradient_checkpointing", False)),
        is_eager=setting_of(config.model, "attention", "") == "eager",
        is_bf16=config.precision == "bf16",
        sleeps=config.engine.sleeps,
        num_engines=int(setting_of(config.client, "num_engines", 1)) if sees_all else 1,
        cut=int(options.get("tensor_parallel_size") or 1),
        utilization=float(options.get("gpu_memory_utilization") or Sharing.utilization),
    )


def engine_name(settings: Any) -> str:
    """Return what conf/deepspeed calls a JSON of these settings."""
    if not settings:
        return "none"
    zero = settings.get("zero_optimization") or {}
    is_offloaded = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    return f"zero{zero.get('stage', 0)}{'_offload' if is_offloaded else ''}"


def plan_of(config: RLConfig, total: int) -> tuple[GpuPlan, Sharing]:
    """Return (the plan of a run on a GPU of `total` bytes, 0 where that is unknown, and what it was made of). Raises
    Skipped where the policy is no folder, BadInput where its network has no such plan."""
    policy = str(config.model["path"])
    sharing = sharing_of(config)
    return gpu_plan(shape_of(load_config(policy), num_parameters(policy)), sharing, total), sharing


def check_plan(plan: GpuPlan, sharing: Sharing) -> str:
    """Return the verdict; warn where estimates go beyond the GPU. Raises CheckFailed where what is certain does, or the
    engine's share holds not one row."""
    line = verdict(plan)
    if not plan.total:
        return line
    if max(phase.certain_bytes for phase in plan.phases) > plan.total:
        raise CheckFailed(f"{line}: set {remedies(plan, sharing)}")
    if plan.cache_tokens < sharing.row:
        raise CheckFailed(f"{line}; an engine's share of {sharing.utilization:g} leaves a cache of "
                          f"{max(0, plan.cache_tokens)} tokens, and a row has up to {sharing.row}: raise "
                          "client.options.gpu_memory_utilization, or lower client.max_model_len")  # fmt: skip
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
        plan, sharing = plan_of(self.config, int(self.gpu_gib * GIB) or gpu_bytes())
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


def gpu_bytes() -> int:
    """Return the memory of this machine's first GPU, 0 where there is none."""
    import torch

    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0
