"""Where DeepSpeed keeps the pieces of parameters that a rank holds (`training.pieces`), by ZeRO stage; how the network
comes to what was read into them; and which of its settings are refused, because they keep something elsewhere.

The optimizer steps flat tensors in float32, each of pieces of several parameters: with stages 1 and 2 a rank's stretch
of all of them (a parameter may begin on one rank and end on the next), with stage 3 a stretch of each of them. Zeros
that fill them up are in no piece.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from espalier.models.in_parts import whole_shape
from espalier.training.pieces import Held, Span


class BadSettings(ValueError):
    """DeepSpeed refuses its JSON, or it cannot be had here."""

    exit_code = 2


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise BadSettings where DeepSpeed's JSON asks for what no checkpoint could be written of, before DeepSpeed reads
    it."""
    zero = settings.get("zero_optimization") or {}
    offloads = {name: zero.get(name) or {} for name in ("offload_optimizer", "offload_param")}
    reasons = {
        "expert_parallel": ((settings.get("expert_parallel") or {}).get("enabled"), "ranks have other experts then"),
        "fp16": ((settings.get("fp16") or {}).get("enabled"), "it has a scale of its own; precision=bf16 needs none"),
        "scheduler": (settings.get("scheduler"), "the learning rate is the run's own (update.learning_rate)"),
        "zero_optimization.zenflow": (zero.get("zenflow"), "it steps in a way of its own"),
    }
    for name, offload in offloads.items():
        place = f"zero_optimization.{name}"
        reasons |= {
            f"{place}.device=nvme": (offload.get("device") == "nvme", "they lie on a disk; cpu can be had"),
            f"{place}.ratio": (float(offload.get("ratio") or 1) < 1, "moments lie in two places"),
            f"{place}.super_offload": (offload.get("super_offload"), "it steps in a way of its own"),
        }
    for name, (is_asked, reason) in reasons.items():
        if is_asked:
            raise BadSettings(f"deepspeed.{name} cannot be had, because no checkpoint could be written: {reason}: "
                              "remove it")  # fmt: skip


def check_optimizer(optimizer: Any, stage: int) -> None:
    """Raise BadSettings where DeepSpeed has made an optimizer that keeps weights or moments where nobody looks."""
    kinds = {0: "Optimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
    kind = kinds.get(stage, "DeepSpeedZeroOptimizer")
    if kind not in {one.__name__ for one in (type(optimizer).__mro__ if stage == 0 else (type(optimizer),))}:
        raise BadSettings(f"DeepSpeed steps with {type(optimizer).__name__}, of which no checkpoint could be written: "
                          "remove deepspeed.bf16 and data_types, and set precision")  # fmt: skip


def held_pieces(zero: Any, stage: int, names: Mapping[int, str]) -> list[Held]:
    """Return what a rank's part of the optimizer `zero` (of ZeRO stage 1, 2 or 3) steps. `names` of parameters by their
    ids."""
    if stage == 3:
        rows = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        found = [Held(flat, [span for one in group if (span := _of_one(zero, one, names))]) for flat, group in rows]
    else:
        flats = enumerate(zero.single_partition_of_fp32_groups)
        found = [Held(flat, list(_of_all(zero, number, names))) for number, flat in flats]
    return [held for held in found if held.spans]  # a rank may have nothing but what fills up


def _of_one(zero: Any, parameter: Any, names: Mapping[int, str]) -> Span | None:
    _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    whole = whole_shape(parameter).numel()
    start = dist.get_rank(parameter.ds_process_group) * length
    own = min(length, whole - start)
    return Span(names[id(parameter)], offset, start, own, whole) if own > 0 else None


def _of_all(zero: Any, number: int, names: Mapping[int, str]) -> Iterator[Span]:
    """Give the pieces of a group of parameters that lie in this rank's stretch, in the order in which DeepSpeed has
    laid them out (with `round_robin_gradients` not the one that a parameter's own `_hp_mapping` knows)."""
    size = zero.single_partition_of_fp32_groups[number].numel()
    low = dist.get_rank(zero.real_dp_process_group[number]) * size
    laid_out = zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number], strict=True)
    for parameter, first in laid_out:
        start, end = max(first, low), min(first + parameter.numel(), low + size)
        if start < end:
            yield Span(names[id(parameter)], start - low, start - first, end - start, parameter.numel())


@torch.no_grad()
def spread(zero: Any, stage: int) -> None:
    """Have the network compute with what was read into the float32 pieces; on every rank."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()  # small parameters may be whole
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()
