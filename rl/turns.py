"""Who may ask the engines next: so many at once, and the batch that is needed first first."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets `room` holders in at once. Of those who wait the smallest turn comes in first, of equal ones who came first:
    so what an iteration waits for is never behind rollouts that are drawn ahead. Of one event loop at a time."""

    def __init__(self, room: int):
        self._free = room
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    @asynccontextmanager
    async def take(self, turn: int) -> AsyncIterator[None]:
        """Hold one of the places within the block."""
        if self._free > 0:  # then nobody waits
            self._free -= 1
        else:
            mine = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (turn, next(self._count), mine))
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # a place had just been given
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            mine = heapq.heappop(self._waiting)[2]
            if not mine.done():
                mine.set_result(None)
                return
        self._free += 1
