"""Who comes in next."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from espalier.rl.turns import Turns


async def holds(turns: Turns, turn: int, name: str, order: list[str]) -> None:
    async with turns.take(turn):
        order.append(name)
        await asyncio.sleep(0)


async def begun(*coroutines: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(one) for one in coroutines]
    await asyncio.sleep(0)
    return tasks


def test_the_smallest_turn_comes_in_first_and_of_equal_ones_who_came_first() -> None:
    async def run() -> list[str]:
        turns, order = Turns(1), list[str]()
        names = [(0, "held"), (2, "late"), (1, "a"), (2, "later"), (1, "b"), (0, "now")]
        await asyncio.gather(*await begun(*(holds(turns, turn, name, order) for turn, name in names)))
        return order

    assert asyncio.run(run()) == ["held", "now", "a", "b", "late", "later"]


@pytest.mark.parametrize("room", [1, 3])
def test_no_place_is_lost_with_who_is_cancelled_or_fails(room: int) -> None:
    async def run() -> None:
        turns, order = Turns(room), list[str]()

        async def fails() -> None:
            async with turns.take(0):
                raise ZeroDivisionError

        held = [await begun(holds(turns, 0, "held", order)) for _ in range(room)]
        waiting, given = await begun(holds(turns, 1, "waiting", order)), await begun(holds(turns, 0, "given", order))
        waiting[0].cancel()
        for (task,) in held:
            await task  # by whose end `given` has its place
        given[0].cancel()
        await asyncio.gather(waiting[0], given[0], return_exceptions=True)
        await asyncio.gather(*(fails() for _ in range(2 * room)), return_exceptions=True)
        most, now = 0, 0

        async def counts() -> None:
            nonlocal most, now
            async with turns.take(0):
                now += 1
                most = max(most, now)
                await asyncio.sleep(0)
                now -= 1

        await asyncio.wait_for(asyncio.gather(*(counts() for _ in range(3 * room))), 10)
        assert most == room

    asyncio.run(run())
