"""What a sampling job knows of a search (`search.client.Search`), which stands above it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from espalier.data.records import Problem
from espalier.data.tasks.task import Task
from espalier.sampling.client import Client, SamplingParams


class Searches(Protocol):
    """Built from conf/search/: it makes of a sampler one that answers with what was searched for."""

    tokens_before: int
    """Tokens that were generated for the problems which have their solution already, once it is prepared."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all that was drawn."""

    @property
    def tokens_per_problem(self) -> float:
        """Tokens generated per problem that is done, 0 where none is."""

    def prepare(
        self,
        task: Task,
        tokenizer: Any,
        problems: Mapping[str, Problem],
        params: SamplingParams,
        output: Path,
        finished: set[str],
    ) -> None:
        """Say what is asked for, and which problems have their solution in the output already. Raises BadInput where
        the trees beside it are not theirs, and where `params` ask for several solutions per problem."""

    def by(self, client: Client) -> Client:
        """Return the sampler that searches; `client` draws for it."""

    def counted(self) -> dict[str, int]:
        """Return what the search has cost so far, by name."""
