"""Where several engines on one machine compute: which GPUs and how many cores each of them gets.

GPUs are those that this program may use itself: a scheduler that gives it 4 and 5 says so in CUDA_VISIBLE_DEVICES, and
the engines get these and no others.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.data.records import BadInput
from espalier.sampling.engine_arguments import num_devices

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the GPUs that this program may use, as CUDA_VISIBLE_DEVICES names them (numbers or UUIDs)."""
    named = os.environ.get(_VARIABLE)
    if named is None:
        import torch

        return [str(number) for number in range(torch.cuda.device_count())]
    names = []
    for name in map(str.strip, named.split(",")):
        if not name or name.startswith("-"):  # CUDA reads no further
            break
        names.append(name)
    return names


def deal_gpus(
    num_engines: int, num_each: int | None, gpus: Sequence[int | str], options: Mapping[str, Any]
) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES is for each engine; "" where it sees all that this program sees.

    Each gets `num_each` GPUs in order: of all that are visible, or of `gpus`, which are counted among these from 0 (as
    torch counts them) or named by UUID. None: as many as the engine's `options` need, where a GPU is visible at all; 0:
    none is dealt out. Raises BadInput where there are fewer.
    """
    visible = visible_gpus()
    if num_each == 0 and gpus:
        raise BadInput("client.gpus_each=0 lets every engine see all GPUs, and client.gpus names some: leave one out")
    if num_each == 0 or (num_each is None and not gpus and not visible):
        return [""] * num_engines
    each = num_each or num_devices(options)
    pool = [_named(gpu, visible) for gpu in gpus] or visible
    if len(pool) < num_engines * each:
        had = f"client.gpus names {len(pool)}" if gpus else _seen(visible)
        raise BadInput(
            f"{num_engines} engines of {each} GPU{'s' * (each > 1)} each need {num_engines * each}, and {had}: start "
            f"fewer, or set client.gpus_each=0 for engines that all see all GPUs"
        )
    return [",".join(pool[number * each : (number + 1) * each]) for number in range(num_engines)]


def _seen(visible: Sequence[str]) -> str:
    variable = os.environ.get(_VARIABLE)
    why = "" if variable is None else f" ({_VARIABLE}={variable})"
    return f"{len(visible)} {'is' if len(visible) == 1 else 'are'} visible{why}"


def _named(gpu: int | str, visible: Sequence[str]) -> str:
    name = str(gpu)
    if name.isdecimal() and int(name) < len(visible):
        return visible[int(name)]
    if not name.isdecimal() and (name in visible or _VARIABLE not in os.environ):
        return name
    raise BadInput(f"client.gpus: there is no GPU {name}: {_seen(visible)}, counted from 0")


def share_of_cores(num_engines: int) -> int:
    """Return how many threads each of several engines gets, of the cores that this program may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_engines)


def core_list(first: int, number: int) -> str:
    """Return `number` cores from the `first` on ("0-3", "4,6"), counted among those that this program may use; plain
    numbers where it may use fewer."""
    own = sorted(os.sched_getaffinity(0))[first : first + number]
    if len(own) < number or own == list(range(first, first + number)):
        return f"{first}-{first + number - 1}"
    return ",".join(map(str, own))
