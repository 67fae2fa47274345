"""What a run trains, saved and resumed as one: the policy, the critic and the moving average where there is one, the KL
coefficient.

In a checkpoint the policy's state stands at the top, as in every training run, the critic's in `critic/`
with the form of its values, the average in `ema.safetensors` and the controller's in `kl.json`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from espalier.rl.critic import Critic
from espalier.rl.ema import MovingAverage
from espalier.rl.kl import KLController
from espalier.rl.policy import Policy
from espalier.runtime.distributed import barrier, is_main_rank
from espalier.training.engine import BadCheckpoint


@dataclass
class Learners:
    """Implements `training.checkpoint.HasState`."""

    policy: Policy
    critic: Critic | None
    kl: KLController
    average: MovingAverage | None = None

    def save_state(self, folder: Path) -> None:
        """All of it; called on every rank."""
        self.policy.engine.save_state(folder)
        if is_main_rank():
            (folder / "kl.json").write_text(json.dumps({"coefficient": self.kl.coefficient}) + "\n")
            if self.average is not None:
                self.average.save(folder)
            if self.critic is not None:
                (folder / "critic").mkdir()
        barrier()
        if self.critic is not None:
            self.critic.save_state(folder / "critic")

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote. Raises BadCheckpoint where one has a critic and the other has none."""
        if (self.critic is not None) != (folder / "critic").is_dir():
            has = "no critic" if self.critic is not None else "a critic"
            raise BadCheckpoint(f"{folder} has {has}: choose another output_dir")
        self.policy.engine.load_state(folder)
        if self.critic is not None:
            self.critic.load_state(folder / "critic")
        if self.average is not None:
            self.average.load(folder, self.policy.weights())
        self.kl.coefficient = float(json.loads((folder / "kl.json").read_text())["coefficient"])
