"""Memory and disk that a config needs at the very least, and what the machine has free.

Lower bounds, from the sizes in the headers of the weight files: weights, gradients and Adam's two averages in float32,
an engine's weights and its cache. Activations, logits and fragmentation come on top, so a config that does not pass
cannot run, and one that does may still be too large.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.checks.check import CheckFailed, Skipped

_GIB = 2**30
_TRAINED = 16  # bytes a parameter: weight, gradient and two averages of Adam in float32
_FROZEN = 4


@dataclass(frozen=True)
class Need:
    """`what` needs `bytes` at least."""

    what: str
    bytes: int


def num_parameters(path: str) -> int:
    """Count those of a model folder, from the headers of its weight files.

    Raises Skipped for a hub name, and CheckFailed where a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise Skipped(f"{path} is no folder with safetensors: its size is not known")
    total = 0
    for file in files:
        try:
            with safe_open(str(file), "pt") as weights:
                total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise CheckFailed(f"{file} is damaged or incomplete ({error}): copy it again") from None
    return total


def trained(what: str, path: str, *, is_adapter: bool, is_divided: bool) -> Need:
    """Of a model that is trained. With adapters only its weights are certain; where DeepSpeed divides it over ranks or
    moves it away, nothing is."""
    each = 0 if is_divided else _FROZEN if is_adapter else _TRAINED
    return Need(what, each * num_parameters(path))


def frozen(what: str, path: str, *, is_divided: bool = False) -> Need:
    """Of a model that is only read: a reference, a reward model; nothing is certain where DeepSpeed divides it over
    ranks or moves it away."""
    return Need(what, 0 if is_divided else _FROZEN * num_parameters(path))


def served(path: str, num_engines: int, kv_cache_gib: float, dtype: str = "bfloat16") -> Need:
    """Of vLLM engines in this machine's memory: weights in `dtype`, and the cache."""
    each = 4 if dtype in ("float32", "float") else 2
    return Need(f"{num_engines} engine{'s' if num_engines > 1 else ''} with a cache of {kv_cache_gib:g} GiB each",
                int(num_engines * (each * num_parameters(path) + kv_cache_gib * _GIB)))  # fmt: skip


def available_memory() -> int:
    """Return bytes that this process may still take: the machine's, or less where a container limits it."""
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(info["MemAvailable"].split()[0]) * 1024
    return min([left, *(limit - used for limit, used in _cgroups())])


def whole_memory() -> int:
    """Return the bytes that this machine has, or its container may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _cgroups())])


def _cgroups() -> Iterator[tuple[int, int]]:
    """Yield what a container may take, and has taken."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max"
            yield int(Path(limit).read_text()), int(Path(used).read_text())


def check_memory(needs: Sequence[Need], available: int, where: str = "memory") -> str:
    """Raise CheckFailed where the needs are more than there is."""
    total = sum(need.bytes for need in needs)
    parts = ", ".join(f"{need.what} {need.bytes / _GIB:.2f}" for need in needs)
    line = f"at least {total / _GIB:.2f} GiB of {where} ({parts}), {available / _GIB:.1f} GiB are free"
    if total > available:
        raise CheckFailed(f"{line}: a smaller model, cache or number of engines, adapters (lora=lora), "
                          "or more machines")  # fmt: skip
    return line


def existing(folder: str) -> Path:
    """Return the folder, or the nearest above it that exists."""
    path = Path(folder).resolve()
    while not path.exists():
        path = path.parent
    return path if path.is_dir() else path.parent


def check_disk(folder: str, needed: int) -> str:
    """Raise CheckFailed where the folder's file system has less than `needed` bytes, or takes no file."""
    place = existing(folder)
    free = shutil.disk_usage(place).free
    line = f"{folder}: at least {needed / _GIB:.2f} GiB are written, {free / _GIB:.1f} GiB are free"
    if free < needed:
        raise CheckFailed(f"{line}: free space, keep fewer checkpoints, or choose another folder")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 2**20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckFailed(f"{place} takes no file of 1 MiB ({error.strerror}): free space, or choose another "
                          "folder") from None  # fmt: skip
    return line


def checkpoint_bytes(path: str, num_kept: int) -> int:
    """Of `num_kept` checkpoints, the one that is being written, and the model at the end, in float32."""
    return num_parameters(path) * ((num_kept + 1) * (_TRAINED - _FROZEN) + _FROZEN)


def setting_of(node: Any, name: str, default: Any) -> Any:
    """Return a setting of a component's node, or the default where it has none."""
    return node.get(name, default) if node else default
