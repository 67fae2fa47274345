"""A process reward model's score of a state, read at the last token of its last step.

Only what is new is computed: with `engines` by their prefix cache (`sampling.engine_scorer`), else by the keys and
values that `search.scorers.cached_model` keeps of every tree. A log-ratio reward (two policies, no head) scores whole
texts.
"""

from collections.abc import Sequence
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.data.training_layout import STEPS
from espalier.models.load import load_config, positions_of
from espalier.models.log_ratio_reward import is_log_ratio_reward
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.aggregate import check_aggregate
from espalier.rewards.engine_scores import EngineScoredModel
from espalier.rewards.process import score_step_tokens
from espalier.search.expander import Expander
from espalier.search.scorers.cached_model import CachedScoredModel
from espalier.search.scorers.held_networks import warn_of_cpu
from espalier.search.scorers.scorer import Batches
from espalier.search.tree import Node, Tree


def rows_of(nodes: Sequence[Node]) -> list[tuple[StepTokens, list[Node]]]:
    """Return the longest ways through nodes of one tree as token rows, each asked at the ends of the nodes on it that
    no row before is asked at; every node is in one row."""
    left = set(nodes)
    rows: list[tuple[StepTokens, list[Node]]] = []
    for node in sorted(nodes, key=lambda one: -one.num_tokens):
        if node in left:
            asked = [one for one in node.way() if one in left]
            left.difference_update(asked)
            ends = [one.num_tokens for one in asked]
            name = f"node {node.number} of problem '{node.tree.problem.id}'"
            rows.append((StepTokens(node.tree.prompt_ids, node.response_ids(), ends, name), asked))
    return rows


class ProcessScorer:
    """`path`: a reward model's folder. With `engines` (a `sampling.engine_scorer.EngineScorer`) these score.
    `batch_tokens` bounds the padded size of a forward pass. Raises BadAggregate."""

    def __init__(
        self,
        path: str,
        aggregate: str = "last",
        batch_tokens: int = 16384,
        engines: Any = None,
    ):
        check_aggregate(aggregate)
        self.path, self.aggregate, self.batch_tokens = path, aggregate, batch_tokens
        self.engines = engines
        self.model: Any = None
        self._batches = Batches[StepTokens, list[float]](self._compute)

    async def open(self) -> None:
        """Load the model; engines start with the first scores."""
        if self.engines is not None:
            self.model = EngineScoredModel(self.path, self.engines)
            return
        warn_of_cpu([self.path], "scorer@search.scorer=process_by_engines scores on a GPU (how: docs/search.md)")
        if is_log_ratio_reward(self.path):
            self.model = load_process_reward(self.path).requires_grad_(False)
        else:
            self.model = CachedScoredModel(load_process_reward(self.path))

    @property
    def is_computing(self) -> bool:
        """Whether scores are under way."""
        return self._batches.is_computing

    def models(self) -> dict[str, str]:
        """Return the one folder."""
        return {self.path: STEPS}

    def longest(self) -> int:
        """Return what the network takes, and the engines, where these score."""
        limit = positions_of(load_config(self.path))
        return limit if self.engines is None else min(limit, self.engines.max_length)

    def _compute(self, rows: list[StepTokens]) -> list[list[float]]:
        limit = positions_of(load_config(self.path))
        for row in rows:
            if (length := len(row.prompt_ids) + len(row.response_ids)) > limit:
                raise BadInput(f"{row.name} has {length} tokens, and the reward model {self.path} takes {limit}: set "
                               "params.max_tokens so that prompt and response fit into both models")  # fmt: skip
        return score_step_tokens(self.model, rows, pad_id=0, batch_tokens=self.batch_tokens)

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return scores in [0, 1]. Raises BadInput on a state longer than the model takes, ServerGone."""
        rows = rows_of(nodes)
        found = await self._batches.ask([row for row, _ in rows])
        scores = {node: score for (_, asked), row in zip(rows, found, strict=True)
                  for node, score in zip(asked, row, strict=True)}  # fmt: skip
        return [scores[node] for node in nodes]

    def forget(self, tree: Tree) -> None:
        """Drop the keys and values of its states."""
        if isinstance(self.model, CachedScoredModel):
            self.model.forget(tree.prompt_ids)

    async def close(self) -> None:
        """End the engines, where they score."""
        self._batches.close()
        if isinstance(self.model, EngineScoredModel):
            self.model.close()
