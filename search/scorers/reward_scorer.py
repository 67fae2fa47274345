"""Any reward of rewards/ as a score of a state, read as the solution so far: an outcome reward model, verifiers, the
graded answer."""

import sys
from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from espalier.data.records import Problem, Trajectory
from espalier.models.load import positions_of
from espalier.rewards.score import ChecksProblems, HoldsEngines, HoldsModels, Reward, scores_of
from espalier.search.expander import Expander
from espalier.search.scorers.held_networks import warn_of_cpu
from espalier.search.scorers.scorer import Batches
from espalier.search.tree import Node, Tree


class RewardScorer:
    """`reward`, built from conf/reward/ or written out: the score is its total. A state that can go on is scored as a
    response that was cut there."""

    aggregate = "last"

    def __init__(self, reward: Reward):
        self.reward = reward
        self._batches = Batches[Trajectory, float](self._compute)

    @property
    def is_computing(self) -> bool:
        """Whether scores are under way."""
        return self._batches.is_computing

    def models(self) -> dict[str, str]:
        """Return the folders of the reward's networks; rewards themselves refuse models of other ends when they are
        built."""
        return {str(network.config.name_or_path): "" for network in self._networks()}

    def longest(self) -> int:
        """Return what the shortest network of the reward takes."""
        return min((positions_of(network.config) for network in self._networks()), default=sys.maxsize)

    def _networks(self) -> list[Any]:
        return list(self.reward.networks().values()) if isinstance(self.reward, HoldsModels) else []

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Ask the reward."""
        if isinstance(self.reward, ChecksProblems):
            self.reward.check_problems(problems)

    async def open(self) -> None:
        """The reward is loaded when it is built. Warns of networks that score on the CPU beside a GPU."""
        models: list[Any] = [network for network in self._networks() if isinstance(network, Module)]
        warn_of_cpu(str(model.config.name_or_path) for model in models)

    def _compute(self, rows: list[Trajectory]) -> list[float]:
        return [score.total for score in scores_of(rows, self.reward)]

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return the rewards. Raises what the reward raises."""
        return await self._batches.ask([node.tree.trajectory(node) for node in nodes])

    def forget(self, tree: Tree) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """End the reward's engines, where it has some."""
        self._batches.close()
        if isinstance(self.reward, HoldsEngines):
            self.reward.close()
