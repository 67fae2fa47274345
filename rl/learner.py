"""What an iteration trains: a list of learners, the policy first, each with a network and an optimizer of its own.

In a checkpoint the policy's state stands at the top, as in every training run, that of another learner in its folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from espalier.rl.experience import RowScorer
from espalier.rl.row_parts import positions
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.distributed import barrier, is_main_rank
from espalier.runtime.manifest import write_folder
from espalier.training.engine import BadCheckpoint, Engine
from espalier.training.sums import Sums, finish_metrics

LEARNER_FOLDERS = ("critic", "implicit_reward")
"""Of the learners that a run may have beside its policy."""


class RowSums(Sums):
    """What passes over some rows of a minibatch add to, on the rank that makes them. `keeps_rises`: the k3 of every
    token that became likelier; else the largest is enough."""

    def __init__(self, keeps_rises: bool = False):
        super().__init__()
        self.largest_ratio = self.ratio_sum = 0.0
        self.num_counted = 0
        """Tokens."""
        self.keeps_rises = keeps_rises
        self.rises = torch.zeros(0, dtype=torch.float64)
        """Of the response tokens [tokens], or the largest one."""

    def add_rises(self, rises: torch.Tensor, mask: torch.Tensor) -> None:
        """Add those of a micro-batch, [R, length], at the tokens of `mask`."""
        found = rises[mask].double().cpu()
        self.rises = torch.cat([self.rises, found])
        if not self.keeps_rises and len(self.rises):  # not a number stays one
            self.rises = self.rises.max().reshape(1)


class UpdateSums(Sums):
    """What the steps of one update of `num_epochs` add to, over the rollouts of one experience with its
    `response_mask` [N, T]; on rank 0, which has it of all ranks."""

    def __init__(self, response_mask: torch.Tensor, num_epochs: int = 1):
        super().__init__()
        self.largest_ratio = 0.0
        self.num_counted = 0
        """Tokens of all epochs."""
        self._ends = response_mask.sum(-1).cumsum(0)
        self._sizes = response_mask.sum(-1)
        # several epochs: the k3 of every response token [tokens] that became likelier; else the largest is enough
        num = int(self._sizes.sum()) if num_epochs > 1 else 1
        self._rises = torch.zeros(num, dtype=torch.float64)
        self._num_epochs = num_epochs

    def merge(self, part: RowSums, rows: torch.Tensor) -> None:
        """Add what a rank measured in passes over `rows` [R]. A row is added once per epoch."""
        self.add(part.rows)
        self.largest_ratio = max(self.largest_ratio, part.largest_ratio)
        self.num_counted += part.num_counted
        if self._num_epochs == 1:
            self._rises = torch.cat([self._rises, part.rises]).max().reshape(1)
        else:
            sizes = self._sizes[rows]
            self._rises[positions(self._ends[rows] - sizes, sizes)] += part.rises

    def means(self) -> dict[str, float]:
        """Return means, 0 of what nobody has counted. `kl_luckiest` is what the luckiest token alone makes of the mean
        `kl_old`: one that was drawn by luck and became likely has a ratio of thousands."""
        counted = {name: total / max(count, 1e-12) for name, (total, count) in self.rows.items()}
        largest = float(self._rises.max()) if self._rises.numel() else 0.0
        found = finish_metrics(counted) | {"ratio_max": self.largest_ratio}
        return found | {"kl_luckiest": largest / max(1.0, float(self.num_counted))}


class Learner(Protocol):
    """One network that is trained on every experience. `score`, `check` and `step` are rank 0's, which has all ranks
    compute (`rl.row_parts`); every other call is made on every rank."""

    engine: Engine
    folder: str
    """Of its state in a checkpoint; "" is the top, the policy's."""
    kept_in: str
    """Folder of a run with the networks of single iterations (`checkpoints.export_every`)."""
    fits_returns: bool
    """Whether it learns the estimator's returns."""
    learns_in_score: bool
    """Whether `score` takes steps already."""

    def score(self, groups: Sequence[RolloutGroup], experience: Experience, scorer: RowScorer) -> Experience:
        """Return the experience with what this network says of it before the policy's update."""

    def check(self, experience: Experience, estimate: Estimate) -> None:
        """Raise BadInput where it cannot learn what the estimator asks of it."""

    def step(self, experience: Experience, rows: torch.Tensor, number: int, sums: UpdateSums) -> dict[str, float]:
        """Take the optimizer step `number` (of the run, from 0) on the rollouts `rows` [R]; its learning rate by its
        name in the metrics, nothing where this learner has no turn. Raises NotFinite."""

    def save_state(self, folder: Path) -> None:
        """Write all that a resume needs."""

    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote. Raises BadCheckpoint."""

    def save_model(self, folder: Path) -> None:
        """Write its network as it is into a standard folder."""

    def export(self, tokenizer: Any, run_dir: Path) -> None:
        """Write its model folders at the end of a run."""


class Remembers(Protocol):
    """What a run knows from its iterations so far. Rank 0's counts; others have what was loaded."""

    def save(self, folder: Path) -> None:
        """Write it; called on rank 0."""

    def load(self, folder: Path) -> None:
        """What `save` wrote; called on every rank. Raises BadCheckpoint."""


@dataclass
class RunState:
    """The state of all learners and of what remembers the iterations before, saved and resumed as one; implements
    `training.checkpoint.HasState`."""

    learners: Sequence[Learner]
    memories: Sequence[Remembers] = ()

    def save_state(self, folder: Path) -> None:
        """All of it; called on every rank."""
        for learner in self.learners:
            if is_main_rank():
                (folder / learner.folder).mkdir(exist_ok=True)
            barrier()
            learner.save_state(folder / learner.folder)
        if is_main_rank():
            for memory in self.memories:
                memory.save(folder)

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote. Raises BadCheckpoint where one has a critic, say, and the other has none."""
        own = {learner.folder for learner in self.learners}
        for name in LEARNER_FOLDERS:
            if (name in own) != (folder / name).is_dir():
                has = "no" if name in own else "a trained"
                raise BadCheckpoint(f"{folder} has {has} {name}: choose another output_dir")
        for learner in self.learners:
            learner.load_state(folder / learner.folder)
        for memory in self.memories:
            memory.load(folder)


def write_model(save: Callable[[Path], None], tokenizer: Any, folder: Path) -> None:
    """Write a standard model folder with its tokenizer, complete or absent; `save` is called on every rank."""

    def write(partial: Path) -> None:
        save(partial)
        if is_main_rank():
            tokenizer.save_pretrained(partial)

    write_folder(folder, write)
