"""A running engine that takes new weights: what it must do, and what it may do besides."""

from typing import Protocol, runtime_checkable

from espalier.sampling.weight_chain import Invitation


@runtime_checkable
class LiveEngine(Protocol):
    """One engine that takes new weights while it runs; `name` is in every line about it (a server's address)."""

    @property
    def name(self) -> str:
        """Which engine it is."""

    @property
    def process(self) -> int | None:
        """The number of its present process, another one for each that is started in its place; None: there is none."""

    @property
    def is_coming(self) -> bool:
        """Whether one is being started."""

    @property
    def host(self) -> str:
        """Where it runs, as this machine reaches it."""

    async def worker_ranks(self) -> list[str]:
        """Return the rank of each of its workers within it. Raises ServerGone, StaleWeights."""

    async def join_weights(self, invitation: Invitation, first_rank: int) -> None:
        """Join the trainer's group, its workers from that rank on. Raises ServerGone."""

    async def load(self, key: str, number: int) -> list[dict[str, str]] | None:
        """Serve the weights that the trainer of the group `key` sends next, all of them, from the next request on: its
        delivery `number`.

        A receipt of every worker, name → digest of what it read, or None where there is none to be had.
        """

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of every token but the first, of as many as leave room for one more in its window."""


@runtime_checkable
class StampedEngine(LiveEngine, Protocol):
    """What an engine may know of itself besides."""

    async def stamp(self, version: str) -> None:
        """Remember the version; forgotten when the engine ends."""

    async def served_version(self) -> str:
        """Return the last stamp."""

    async def cached_tokens(self, ids: list[int]) -> int | None:
        """Return how many of a prompt's tokens came from the prefix cache, which then holds it; None where unknown."""


@runtime_checkable
class DrawingEngine(LiveEngine, Protocol):
    """One whose samples without a seed are drawn by a random state of its own."""

    async def keep_random_state(self) -> None:
        """Remember that state."""

    async def put_random_state_back(self) -> None:
        """Draw from now on as if nothing had been drawn since."""


@runtime_checkable
class PausingEngine(LiveEngine, Protocol):
    """One that takes weights in the middle of its requests: they wait, compute what they had anew by the new weights,
    and say which version drew which of their tokens."""

    async def pause(self) -> None:
        """Draw no token until `resume`."""

    async def resume(self) -> None:
        """Go on."""


@runtime_checkable
class SleepingEngine(LiveEngine, Protocol):
    """One that may share its device with the learner: it lets go of its memory while that computes."""

    async def sleep(self) -> None:
        """Let go of weights and cache, where it is one that does; nothing may be asked until it was woken."""

    async def wake(self, part: str) -> None:
        """Take the memory of that part (`sampling.client.WEIGHTS` or `CACHE`) again, where it sleeps."""
