"""The root dataclasses behind every config: a misspelt or ill-typed key fails before anything runs.

Fields are nested by topic, and each is explained by the text under it, which `--help` prints. Nodes typed `Any` hold
components: a `_target_` and its keyword arguments, for `runtime.entrypoint.build`.
"""

from espalier.runtime.schemas.rl_schema import (
    CriticConfig,
    EMAConfig,
    ImplicitRewardConfig,
    KLConfig,
    ProbesConfig,
    RLCheckpointsConfig,
    RLConfig,
    RLEngineConfig,
    RLEvaluationConfig,
    RLUpdateConfig,
    RolloutConfig,
    SamplesConfig,
)
from espalier.runtime.schemas.sample_schema import SampleConfig
from espalier.runtime.schemas.shared_topics import EngineConfig, TrackingConfig
from espalier.runtime.schemas.stage_schema import StageConfig
from espalier.runtime.schemas.train_schema import (
    PredictConfig,
    TrainCheckpointsConfig,
    TrainConfig,
    TrainEvaluationConfig,
    TrainUpdateConfig,
)

__all__ = [
    "CriticConfig",
    "EMAConfig",
    "EngineConfig",
    "ImplicitRewardConfig",
    "KLConfig",
    "PredictConfig",
    "ProbesConfig",
    "RLCheckpointsConfig",
    "RLConfig",
    "RLEngineConfig",
    "RLEvaluationConfig",
    "RLUpdateConfig",
    "RolloutConfig",
    "SampleConfig",
    "SamplesConfig",
    "StageConfig",
    "TrackingConfig",
    "TrainCheckpointsConfig",
    "TrainConfig",
    "TrainEvaluationConfig",
    "TrainUpdateConfig",
]
