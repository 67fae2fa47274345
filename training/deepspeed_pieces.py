"""Where DeepSpeed keeps the pieces of parameters that a rank holds (`training.pieces`), by ZeRO stage.

The optimizer steps flat tensors in float32, each of pieces of several parameters: with stages 1 and 2 a rank's stretch
of all of them (a parameter may begin on one rank and end on the next), with stage 3 a stretch of each of them. Zeros
that fill them up are in no piece.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from espalier.models.in_parts import whole_shape
from espalier.training.pieces import Held, Span


def held_pieces(zero: Any, stage: int, names: Mapping[int, str]) -> list[Held]:
    """Return what a rank's part of the optimizer `zero` (of ZeRO stage 1, 2 or 3) steps. `names` of parameters by their
    ids."""
    if stage == 3:
        rows = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        found = [Held(flat, [span for one in group if (span := _stretch(zero, one, names))]) for flat, group in rows]
    else:
        rows = zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
        found = [
            Held(flat, [_fragment(one, names) for one in group if one._hp_mapping is not None]) for flat, group in rows
        ]
    return [held for held in found if held.spans]  # a rank may have nothing but what fills up


def _stretch(zero: Any, parameter: Any, names: Mapping[int, str]) -> Span | None:
    _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    whole = whole_shape(parameter).numel()
    start = dist.get_rank(parameter.ds_process_group) * length
    own = min(length, whole - start)
    return Span(names[id(parameter)], offset, start, own, whole) if own > 0 else None


def _fragment(parameter: Any, names: Mapping[int, str]) -> Span:
    own, flat = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
    return Span(names[id(parameter)], flat.start, own.start, own.numel, parameter.numel())


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
