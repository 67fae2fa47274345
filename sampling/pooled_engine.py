"""One engine of several (`sampling.engine_pool`), as it takes new weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from espalier.sampling.engine_pool import EnginePool


class PooledEngine:
    """Engine `number` of a pool: a `sampling.client.TakesWeights` that messages call by its `name`."""

    def __init__(self, client: "EnginePool", number: int, name: str):
        self.client = client
        self.number = number
        self.name = name

    @property
    def max_model_length(self) -> int:
        """The longest sequence that it takes, in tokens."""
        return self.client.max_model_length

    @property
    def process(self) -> int | None:
        """The number of its present process; None: there is none."""
        return self.client.process_of(self.number)

    @property
    def is_coming(self) -> bool:
        """Whether one is being started."""
        return self.client.is_coming(self.number)

    @property
    def host(self) -> str:
        """Where it runs, as this machine reaches it."""
        return self.client.host_of(self.number)

    async def worker_ranks(self) -> list[str]:
        """Return the rank of each of its workers within it. Raises ServerGone."""
        found: list[str] = await self.client.ask(self.number, "worker_ranks")
        return found

    async def join_weights(self, invitation: dict[str, Any], first_rank: int) -> None:
        """Join the trainer's group. Raises ServerGone."""
        await self.client.ask(self.number, "join_weights", invitation, first_rank)

    async def receive_weights(self, key: str, number: int) -> list[dict[str, str]]:
        """Serve delivery `number` of the trainer of the group `key`; the receipt of every worker. Raises ServerGone."""
        found: list[dict[str, str]] = await self.client.ask(self.number, "receive_weights", key, number)
        return found

    async def pause(self) -> None:
        """Draw no token until `resume`. Raises ServerGone."""
        await self.client.ask(self.number, "pause")

    async def resume(self) -> None:
        """Go on. Raises ServerGone."""
        await self.client.ask(self.number, "resume")

    async def sleep(self) -> None:
        """Let go of its memory, where engines do that. Raises ServerGone."""
        await self.client.sleep(self.number)

    async def wake(self, part: str) -> None:
        """Take the memory of that part again. Raises ServerGone."""
        await self.client.wake(self.number, part)

    async def reset_cache(self) -> bool:
        """Empty the prefix cache; whether it is."""
        return bool(await self.client.ask(self.number, "reset_cache"))

    async def stamp(self, version: str) -> None:
        """Remember the version of the weights."""
        await self.client.ask(self.number, "stamp", version)

    async def served_version(self) -> str:
        """Return the last stamp."""
        return str(await self.client.ask(self.number, "served_version"))

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        """Return how many of the prompt's tokens came from the prefix cache; None where the engine does not say."""
        found: int | None = await self.client.ask(self.number, "cached_tokens", prompt)
        return found

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of every token but the first, without the prefix cache."""
        found: list[float] = await self.client.ask(self.number, "prompt_logprobs", ids)
        return found

    async def keep_random_state(self) -> None:
        """Remember the state that unseeded samples are drawn by. Raises ServerGone."""
        await self.client.ask(self.number, "keep_random_state")

    async def put_random_state_back(self) -> None:
        """Draw from now on as if nothing had been drawn since. Raises ServerGone."""
        await self.client.ask(self.number, "put_random_state_back")
