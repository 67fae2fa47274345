"""Engines that score: the head's logits of token rows, by the engines of `client=data_parallel_engines` or
`client=ray_engines`, for programs that run no event loop.

Rows go in batches, two under way for each engine, so that none waits for the caller; a batch goes to the engine that
owes the fewest rows, and to another one where its engine is lost (`sampling.engine_pool`). Neighbours stay together:
the solutions of one problem share what the prefix cache holds of it. The engines' events have a thread of their own.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import TokenRow
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import Refused
from espalier.sampling.engine_pool import EnginePool

_UNDER_WAY = 2
_BATCHES_EACH = 4  # at least, where there are rows enough: engines end at about the same time


def row_batches(rows: Sequence[TokenRow], batch_tokens: int, num_engines: int) -> list[list[int]]:
    """Cut rows, in their order, into batches of at most `batch_tokens` tokens (a longer row is one alone), so small
    that every engine gets several; the places of each batch's rows."""
    total = sum(len(row.ids) for row in rows)
    limit = max(1, min(batch_tokens, -(-total // (_BATCHES_EACH * num_engines))))
    batches: list[list[int]] = []
    left = 0
    for place, row in enumerate(rows):
        if not batches or len(row.ids) > left:
            batches.append([])
            left = limit
        batches[-1].append(place)
        left -= len(row.ids)
    return batches


class EngineScorer:
    """Args: `client`, an engine pool, not opened; its log is `log` where it names none. Raises BadInput on a client
    without engines of its own."""

    def __init__(self, client: Any, log: str):
        if not isinstance(client, EnginePool):
            raise BadInput("this client has no engines that score: choose client=data_parallel_engines or "
                           "client=ray_engines")  # fmt: skip
        if client.model:
            raise BadInput(f"client.model={client.model}: the engines load what stage.model names: leave it out")
        self.client = client
        self.client.log = client.log or log
        self.client.scores_tokens = True
        self._options = dict(self.client.options)
        self._loop = BackgroundLoop()

    @property
    def max_length(self) -> int:
        """The longest row that an engine takes, in tokens."""
        return self.client.max_model_length

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        return self.client.num_engines

    def open(self, model: str, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Start the engines with this model and its own `options`, before which the client's go. Raises CannotStart;
        none stays behind then."""
        self.client.model = model
        self.client.options = {**options, **self._options}
        self._loop.run(self.client.open())

    def token_logits(
        self,
        rows: Sequence[TokenRow],
        batch_tokens: int,
        on_batch: Callable[[list[int], list[list[list[float]]]], None],
    ) -> None:
        """Give `on_batch`, as batches are done, the places of their rows and the logits [L] at each of their asked
        places. Raises BadInput on a row that the engine refuses, ServerGone where no engine is left, and what
        `on_batch` raises."""
        self._loop.run(self._ask_all(rows, row_batches(rows, batch_tokens, self.num_engines), on_batch))

    def close(self) -> None:
        """End the engines."""
        try:
            self._loop.run(self.client.close())
        finally:
            self._loop.close()

    async def _ask_all(
        self,
        rows: Sequence[TokenRow],
        batches: Sequence[list[int]],
        on_batch: Callable[[list[int], list[list[list[float]]]], None],
    ) -> None:
        waiting = deque(batches)

        async def work() -> None:
            while waiting:
                places = waiting.popleft()
                try:
                    found = await self.client.token_logits([rows[place] for place in places])
                except Refused as error:
                    raise BadInput(f"an engine refuses a row: {error}") from None
                on_batch(places, found)

        workers = [asyncio.create_task(work()) for _ in range(min(len(batches), _UNDER_WAY * self.num_engines))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
