"""Topics that the configs of several programs have."""

from dataclasses import dataclass


@dataclass
class EngineConfig:
    """How the sampler is asked; no answer depends on it."""

    concurrency: int = 64
    """requests that are under way at once, of each server or engine"""
    stall_seconds: float = 180.0
    """seconds without any answer after which the sampler is asked whether it works; without a sign of life the run
    ends with exit code 3"""


@dataclass
class TrackingConfig:
    """Where metrics go beside metrics.jsonl, and how often progress is said."""

    tensorboard: bool = False
    """also write TensorBoard's event files"""
    wandb: str | None = None
    """Weights & Biases, of the extra requirements-wandb.txt: offline or online; null: not at all"""
    project: str = "espalier"
    """the project of Weights & Biases"""
    line_every_seconds: float = 10.0
    """seconds between two plain progress lines, where there is no terminal"""
