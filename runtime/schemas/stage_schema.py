"""The config of run_stage.py."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from espalier.runtime.schemas.shared_topics import TrackingConfig


@dataclass
class StageConfig:
    """`run_stage.py`: one offline stage, JSONL in and JSONL (or one document) out."""

    output: str = MISSING
    """the file to write; one that exists is complete and is not made again"""
    input: str = ""
    """the file to read; empty for a stage that reads none"""
    seed: int = 0
    """of every random draw of the stage"""
    task: Any = None
    """the task of the problems, as `task=gsm8k`; null for a stage that needs none"""
    client: Any = None
    """engines that score, as `client=data_parallel_engines`, for a stage that can ask them (prm/score_steps); null:
    the stage computes in its own process"""
    stage: Any = MISSING
    """the stage itself, which the config file names; its settings are `stage.NAME`"""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
