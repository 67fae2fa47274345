"""What every side of a kind has in common: examples a step, learning rate (constant), precision, AdamW's betas, beta of
DPO. They lie beside the data (`settings.json`), where all sides read them.

Process rewards have eight trajectories a step, TRL's own default for a device: its PRMTrainer adds up the means of
accumulated micro-batches (four of them give four times the loss and the gradient), so that with accumulation it would
not do the same work.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """`batch_size` examples (pairs, trajectories) a step; `precision` bf16 (autocast over float32 weights) or fp32."""

    batch_size: int
    learning_rate: float
    precision: str = "bf16"


SETTINGS = {"sft": Settings(32, 1e-3), "dpo": Settings(16, 1e-4), "prm": Settings(8, 3e-4)}
BETAS = (0.9, 0.999)
DPO_BETA = 0.1
# What `benchmarks.training.tune_peer` tries beside `peer.BEST`, all of it exact. Packing (bfd) is not there: its
# steps hold as many examples as fit, not as many as were asked for.
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {},
        {"attention": "eager"},
        {"micro": 4},
        {"micro": 16},
        {"micro": 32},
        {"micro": 4, "padding_free": True, "max_length": None},
        {"train_sampling_strategy": "batch_rebalance"},
    ],
    "dpo": [{}, {"attention": "eager"}, {"micro": 4}, {"micro": 16}],
    "prm": [{}, {"attention": "eager"}],
}


def write_settings(folder: Path, settings: Mapping[str, Settings]) -> None:
    """Write kind → settings beside the data."""
    (folder / "settings.json").write_text(json.dumps({kind: asdict(one) for kind, one in settings.items()}))


def read_settings(folder: Path, kind: str) -> Settings:
    """Return those of a kind."""
    return Settings(**json.loads((folder / "settings.json").read_text())[kind])
