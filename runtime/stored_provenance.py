"""What the `X.meta.json` beside a file X says of where the file comes from, as far as it is there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SampledBy:
    """The policy that sampled a file of solutions, a fingerprint of its weights ("" where none is stored), and its
    sampling: `temperature` and `top_p` (None where they are not stored)."""

    policy: str
    weights: str
    temperature: float | None
    top_p: float | None = None


def read_meta(path: Path) -> dict[str, Any]:
    """Return what stands beside a file; empty where nothing does, or something else."""
    beside = path.with_name(path.stem + ".meta.json")
    try:
        meta = json.loads(beside.read_bytes())
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def sampled_by(path: Path) -> SampledBy | None:
    """Return who sampled a file of solutions, None where its provenance does not say."""
    meta = read_meta(path)
    config = meta.get("config", {})
    policy = config.get("policy")
    if not policy or "inputs" not in meta:
        return None
    params = config.get("params") or {}
    numbers = [None if (value := params.get(name)) is None else float(value) for name in ("temperature", "top_p")]
    return SampledBy(policy, str(meta["inputs"].get(policy, "")), *numbers)


def counted_from(path: Path) -> str:
    """Return the hash of the file that a stage made this one of (its `input`), "" where its provenance does not say."""
    meta = read_meta(path)
    return str(meta.get("inputs", {}).get(meta.get("config", {}).get("input"), ""))


def asked_about(path: Path) -> str:
    """Return the hash of the trajectories that a model was asked about in making this file (`requests.trajectories`),
    "" where its provenance does not say."""
    meta = read_meta(path)
    try:
        return str(meta["inputs"][meta["config"]["requests"]["trajectories"]])
    except (LookupError, TypeError):
        return ""


def stage_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the stage that wrote a file, empty where its provenance does not say."""
    settings = read_meta(path).get("config", {}).get("stage")
    return settings if isinstance(settings, dict) else {}
