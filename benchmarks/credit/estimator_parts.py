"""What a row of the credit benchmark is made of: an estimator, with the reward, the tree of rollouts and the critic
that its run would have."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from espalier.data.records import BadInput
from espalier.models.packing_check import packs_rows
from espalier.rewards.score import Reward
from espalier.rl.combinations import check_combinations
from espalier.rl.critic import critic_values
from espalier.rl.estimator_context import AdvantageEstimator
from espalier.rl.experience import RowScorer
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.runtime.entrypoint import BadConfig, build, compose_config
from espalier.runtime.schemas import RLConfig

ROWS = Path(__file__).with_name("estimators.yaml")
CONFIGS = Path(__file__).parents[2] / "conf" / "advantage"


@dataclass(frozen=True)
class Row:
    """An estimator of the benchmark: a config of conf/advantage/ and what differs in it, in a run of `config`. `prm` is
    the key of the run's config that names a process reward model, where it needs one."""

    name: str
    advantage: str
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = "exp/ppo/grpo_word_arithmetic"
    prm: str = ""


@dataclass(frozen=True)
class CriticValues:
    """A value network of this form, as it was trained."""

    network: Any
    form: str

    def __call__(self, scorer: RowScorer) -> torch.Tensor:
        """Return the values [N, T] of the states that tokens are chosen in."""
        network = self.network.eval()

        def read(ids: torch.Tensor, mask: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor]:
            return (critic_values(network, ids, mask, self.form, chosen),)

        return scorer(network, 1, read, packs_rows(network))[0]


@dataclass(frozen=True)
class EstimatorParts:
    """An estimator and what it reads. `tree`, with `group_size` first rollouts: it samples rollouts of its own."""

    estimator: AdvantageEstimator
    reward: Reward
    tree: TreeRollouts | None = None
    group_size: int = 0
    critic: CriticValues | None = None


def read_rows() -> list[Row]:
    """Return the rows of estimators.yaml, then every other config of conf/advantage/."""
    named = [Row(**row) for row in yaml.safe_load(ROWS.read_text())]
    known = {row.advantage for row in named}
    return [*named, *(Row(path.stem, path.stem) for path in sorted(CONFIGS.glob("*.yaml")) if path.stem not in known)]


def config_of(row: Row, task: tuple[str, ...], policy: Path, prm: Path | None) -> RLConfig | str:
    """Return the config of a run with this estimator, or why it cannot be run here; `task` are the settings that say
    the task."""
    words = [*task, f"advantage={row.advantage}", f"model.path={policy}", "output_dir=none", "server=none",
             *(f"advantage.{name}={value}" for name, value in row.settings.items())]  # fmt: skip
    if row.prm:
        if prm is None:
            return "needs a process reward model: --prm FOLDER"
        words.append(f"{row.prm}={prm}")
    try:
        config = compose_config(RLConfig, row.config, words)
        check_combinations(config)
    except (BadConfig, BadInput) as error:
        return str(error)
    if config.critic is not None and not row.prm:
        return "its critic is trained along with the policy: a fresh one has nothing to say"
    if config.implicit_reward is not None:
        return "its implicit reward is trained along with the policy: a fresh one says nothing, and the rest is rloo"
    return config


def parts_of(config: RLConfig) -> EstimatorParts:
    """Build the parts of a run."""
    rollout, critic = config.rollout, config.critic
    return EstimatorParts(
        estimator=build(config.advantage),
        reward=build(config.reward),
        tree=TreeRollouts(rollout.branches, rollout.segment_steps) if rollout.branches else None,
        group_size=rollout.group_size,
        critic=None if critic is None else CriticValues(build(critic.model), critic.form),
    )
