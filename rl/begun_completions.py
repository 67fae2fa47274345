"""Completions of states that are asked for before the estimator asks: while other groups are drawn, while the policy is
trained on an earlier batch, or by the run that a checkpoint is of."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from espalier.data.records import Completion, State
from espalier.sampling.client import SamplingParams

Ask = Callable[[], Coroutine[Any, Any, list[Completion]]]


@dataclass(frozen=True)
class Begun:
    """What was asked of one state: `key` is a hash of its tokens, `task` brings the completions; None: `kept` are
    they, from a checkpoint."""

    key: int
    params: SamplingParams
    task: asyncio.Task[list[Completion]] | None
    kept: tuple[Completion, ...] = ()

    @property
    def found(self) -> tuple[Completion, ...]:
        """The completions that have come."""
        if self.task is None:
            return self.kept
        has_come = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return tuple(self.task.result()) if has_come else ()

    @property
    def num_tokens(self) -> int:
        """How many tokens they have."""
        return sum(len(one.response_ids) for one in self.found)

    def is_of(self, state: State, params: SamplingParams) -> bool:
        """Say whether this is what is asked now."""
        return self.key == token_key(state) and self.params == params

    async def wait(self) -> list[Completion]:
        """Return the completions."""
        return list(self.kept) if self.task is None else await self.task


def token_key(state: State) -> int:
    """Return a hash of the state's tokens."""
    return xxhash.xxh3_64_intdigest(array("q", [*state.prompt_ids, *state.prefix_ids]).tobytes())


class BegunCompletions:
    """By the turn (the number of the batch) and the state. Of one event loop."""

    def __init__(self) -> None:
        self.dropped_tokens = 0
        """Of a checkpoint's completions that nobody has asked for."""
        self._of_turn: dict[int, dict[str, Begun]] = {}

    def begin(self, turn: int, state: State, params: SamplingParams, ask: Ask) -> None:
        """Ask now, unless a checkpoint has the answer."""
        of_turn = self._of_turn.setdefault(turn, {})
        kept = of_turn.get(state.id)
        if kept is not None and kept.is_of(state, params):
            return
        self.dropped_tokens += kept.num_tokens if kept is not None else 0
        of_turn[state.id] = Begun(token_key(state), params, asyncio.create_task(ask()))

    def take(self, turn: int, state: State, params: SamplingParams) -> Begun | None:
        """Return what was begun for this question. Raises ValueError where something else was."""
        begun = self._of_turn.get(turn, {}).pop(state.id, None)
        if begun is None or begun.is_of(state, params):
            return begun
        if begun.task is None:
            self.dropped_tokens += begun.num_tokens
            return None
        begun.task.cancel()
        raise ValueError(f"completions of state {state.id} were begun with {begun.params} and are asked for {params}")

    def keep(self, turn: int, state_id: str, key: int, params: SamplingParams, found: Iterable[Completion]) -> None:
        """Take completions from a checkpoint."""
        self._of_turn.setdefault(turn, {})[state_id] = Begun(key, params, None, tuple(found))

    def come_from(self, turn: int) -> list[tuple[int, str, Begun]]:
        """Return (turn, state, what has come) of this turn and later ones."""
        return [
            (number, state_id, begun)
            for number, of_turn in self._of_turn.items()
            for state_id, begun in of_turn.items()
            if number >= turn and begun.found
        ]

    async def stop(self, turn: int) -> None:
        """Cancel what has not come of this turn; what has come stays, for a checkpoint."""
        tasks = [begun.task for begun in self._of_turn.get(turn, {}).values() if begun.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def give_up(self, turn: int) -> int:
        """Cancel what was begun for this turn and never asked for; return how many states that were."""
        await self.stop(turn)
        rows = self._of_turn.pop(turn, {}).values()
        self.dropped_tokens += sum(begun.num_tokens for begun in rows if begun.task is None)
        return sum(begun.task is not None for begun in rows)

    @property
    def waiting_tokens(self) -> int:
        """Count the tokens of completions that have come and were not asked for yet."""
        return sum(begun.num_tokens for of_turn in self._of_turn.values() for begun in of_turn.values())
