"""The machine: installed versions, GPU or CPU, ports."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from espalier.checks.check import CheckFailed, Skipped
from espalier.runtime.entrypoint import ROOT
from espalier.sampling.engine_arguments import has_gpu
from espalier.sampling.server import check_port

_OLDEST_PYTHON = (3, 11)


def check_versions(requirements: Path | None = None) -> str:
    """Compare Python and the installed packages with the requirements file that fits this machine.

    Raises CheckFailed where one is missing or outside the range that was run.
    """
    if sys.version_info < _OLDEST_PYTHON:
        raise CheckFailed(f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed")
    path = requirements or ROOT / ("requirements.txt" if has_gpu() else "requirements-cpu.txt")
    wanted = _wanted(path)
    wrong = []
    for package in wanted:
        try:
            version = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package.name} is missing (wanted {package.specifier})")
            continue
        if not package.specifier.contains(version, prereleases=True):
            wrong.append(f"{package.name} is {version} (wanted {package.specifier})")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckFailed(f"{', '.join(wrong[:3])}{more}: run bash scripts/install.sh, or install {path.name}")
    asks = path.name if path.is_file() else "espalier"
    return f"Python {sys.version.split()[0]}, {len(wanted)} packages as {asks} asks"


def _wanted(path: Path) -> list[Requirement]:
    """Return what a requirements file asks for, and the files that it names by `-r`; beside an installed package there
    is none, and the package's own requirements are taken."""
    if not path.is_file():
        return [Requirement(text) for text in importlib.metadata.requires("espalier") or [] if "extra ==" not in text]
    requirements: list[Requirement] = []
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            requirements += _wanted(path.parent / line[3:].strip())
        elif line.strip() and line[0] != "#":
            requirements.append(Requirement(line))
    return requirements


def check_device(precision: str, attention: str, needs_vllm: bool) -> str:
    """Name what computes. Raises CheckFailed where it lacks the precision, the attention kernel or the engine that is
    asked for."""
    import torch

    from espalier.models.precision import has_fast_bf16

    if needs_vllm and importlib.util.find_spec("vllm") is None:
        raise CheckFailed("vllm is not installed, and this config starts an engine: run bash scripts/install.sh")
    if not torch.cuda.is_available():
        if attention not in ("", "auto", "eager", "sdpa"):
            raise CheckFailed(f"model.attention={attention} needs a CUDA GPU, and there is none: set "
                              "model.attention=sdpa")  # fmt: skip
        if precision == "bf16" and not has_fast_bf16("cpu"):
            raise CheckFailed("precision=bf16, which this CPU multiplies far slower than float32: leave "
                              "precision out, or set precision=fp32")  # fmt: skip
        return f"no GPU: {len(os.sched_getaffinity(0))} CPU cores"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if precision == "bf16" and not has_fast_bf16("cuda"):
        raise CheckFailed(
            f"precision=bf16, and {names[0]} has no bfloat16 in hardware: leave precision out, or set precision=fp32"
        )
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise CheckFailed("model.attention=flash_attention_2 and flash-attn is not installed: pip install flash-attn "
                          "--no-build-isolation, or set model.attention=sdpa")  # fmt: skip
    from espalier.models.gpu_attention import kernel_of
    from espalier.models.precision import is_bf16

    found = f"{len(names)} x {names[0]}"
    if attention != "auto":
        return found
    return f"{found}, packed rows by {kernel_of(attention, 'cuda', is_bf16(precision, 'cuda'))}"


def check_server_port(server: Any) -> str:
    """Say that the port a server of our own is to listen on is free.

    Raises Skipped where the config starts no server, and PortInUse where something listens there already.
    """
    if not server or "_target_" not in server:
        raise Skipped("no server of our own")
    port = int(server.get("port", 0) or 0)
    if not port:
        return "a free one is chosen"
    check_port("127.0.0.1", port)
    return f"{port} is free"
