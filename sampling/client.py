"""What is asked of a sampler and what comes back. Token ids in and out: nothing is re-tokenised."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

LOOPBACK = "127.0.0.1"
"""This machine, as it is reached from itself."""

WEIGHTS, CACHE = "weights", "kv_cache"
"""What a sleeping engine lets go of, and takes again one after the other: vLLM's names for the parts of its memory."""

MAX_TOP_LOGPROBS = 20
"""What vLLM gives of a place where it is not configured otherwise."""


class Refused(RuntimeError):
    """The server refuses this request for good (too long, ill-formed): the row fails, the run goes on."""


class NotAnswered(Refused):
    """The server answers others but failed this request every time it was tried: the row fails, the run goes on. Unlike
    a prompt that is refused, it may have to do with what is sampled (answers that take too long)."""


class ServerGone(RuntimeError):
    """No server, or one that no longer answers: the run stops with what was written kept."""

    exit_code = 3


class EngineFailed(ServerGone):
    """The engine itself has failed and answers nothing more, though its process may run."""


class EngineAsleep(RuntimeError):
    """It was asked something that it cannot answer: it has neither weights nor a cache."""


class BudgetSpent(RuntimeError):
    """The next request does not fit a cap on tokens or money: requests in flight end, what came is written."""

    exit_code = 5


def one_line(error: Exception) -> str:
    """Return kind and message, whatever lines it had."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class SamplingParams:
    """How to sample: `n` samples per request, `max_tokens` new tokens each.

    `is_seeded` gives every request a seed of its own, a hash of its id (vLLM on CPU dies of seeds as soon
    as a prompt is prefilled in chunks: start it with max_num_batched_tokens=65536 then). `return_logprobs`
    keeps the sampled tokens' log-probs. `stop_tokens`: ids (or tokens by their text, for `with_stop_tokens`) that end a
    response as the end token does: the first is its last token and no part of its text.
    """

    n: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    is_seeded: bool = False
    return_logprobs: bool = False
    stop_tokens: list[Any] = field(default_factory=list)
    top_logprobs: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name, is_good, need in (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
        ):
            if not is_good:
                raise ValueError(f"params.{name} must be {need}, got {getattr(self, name)}")

    @property
    def stop_token_ids(self) -> list[int]:
        """The ids of `stop_tokens`. Raises ValueError where one is a text still."""
        texts = [token for token in self.stop_tokens if not isinstance(token, int)]
        if texts:
            raise ValueError(f"params.stop_tokens: {texts[0]!r} must be an id here")
        return list(self.stop_tokens)


class NextTokenParams(SamplingParams):
    """One token at temperature 1, with the log-probs of the likeliest at its place."""

    top_logprobs = MAX_TOP_LOGPROBS

    def __init__(self) -> None:
        super().__init__(n=1, temperature=1.0, max_tokens=1)


@dataclass(frozen=True)
class SampleRequest:
    """One prompt; its samples become the records `{id}/0` .. `{id}/{n-1}`. `messages` are the same prompt as
    chat turns (`role`, `content`), for chat APIs; empty where the task has no template. Requests of one
    `problem_id` go to one server, whose prefix cache then serves them all; empty: the request is its own."""

    id: str
    prompt: str
    prompt_ids: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)
    problem_id: str = ""

    def seed(self, base: int) -> int:
        """Return a seed that depends on the id and the run's seed alone."""
        return int.from_bytes(hashlib.sha256(f"{base}/{self.id}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Sample:
    """`token_ids` holds the end token if there was one; `text` does not. `logprobs` matches `token_ids`. `stop`: the
    stop string that ended it, "" where an end token or the length did; `text` ends before it, `token_ids` with it.
    `versions`: (first token, stamp) of every version of the weights that drew some, in order; empty where the engine
    does not say. `top_logprobs`: at every place the log-probs of the likeliest tokens by id, where they were asked
    for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    stop: str = ""
    versions: tuple[tuple[int, str], ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()


class Client(Protocol):
    """A sampler. Raises Refused for a request that can never work, ServerGone when nobody answers, BudgetSpent
    where the request would cost more than may be spent."""

    async def open(self) -> None:
        """Connect or load; called once before the first request."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt."""

    async def close(self) -> None:
        """Release what `open` took."""


@runtime_checkable
class ShowsLife(Protocol):
    """A sampler that can be asked for a sign of life while answers are owed."""

    async def is_working(self) -> bool:
        """Say whether it gives one."""


class TakesWeights(Protocol):
    """One engine without a server that can be given new weights; messages call it by its `name`."""

    name: str

    @property
    def process(self) -> int | None:
        """The number of its present process, another one for each that is started in its place; None: there is none."""

    @property
    def is_coming(self) -> bool:
        """Whether one is being started."""

    @property
    def max_model_length(self) -> int:
        """The longest sequence that it takes, in tokens."""

    @property
    def host(self) -> str:
        """Where it runs, as this machine reaches it."""

    async def worker_ranks(self) -> list[str]:
        """Return the rank of each of its workers within it. Raises ServerGone."""

    async def join_weights(self, invitation: dict[str, Any], first_rank: int) -> None:
        """Join the trainer's group (`sampling.weight_stream`), its workers from that rank on. Raises ServerGone."""

    async def receive_weights(self, key: str, number: int) -> list[dict[str, str]]:
        """Serve the weights that the trainer of the group `key` sends next, its delivery `number`; the receipt of every
        worker. Raises ServerGone."""

    async def pause(self) -> None:
        """Draw no token until `resume`; requests are kept."""

    async def resume(self) -> None:
        """Go on."""

    async def sleep(self) -> None:
        """Let go of weights and cache, where it does so between deliveries; what it is asked until it is woken is
        refused."""

    async def wake(self, part: str) -> None:
        """Take the memory of that part (WEIGHTS or CACHE) again, where it sleeps; what was in it is lost."""

    async def reset_cache(self) -> bool:
        """Empty the prefix cache, also of what running requests have in it: they compute that anew; whether it is."""

    async def stamp(self, version: str) -> None:
        """Remember the version of the weights."""

    async def served_version(self) -> str:
        """Return the last stamp."""

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        """Return how many of the prompt's tokens came from the prefix cache, which then holds it; None where
        unknown."""

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of every token but the first, without the prefix cache."""

    async def keep_random_state(self) -> None:
        """Remember the state that unseeded samples are drawn by. Raises ServerGone."""

    async def put_random_state_back(self) -> None:
        """Draw from now on as if nothing had been drawn since. Raises ServerGone."""


class HasEngines(ABC):
    """A sampler (`Client`) with engines of its own, each of which takes new weights."""

    num_engines: int
    follows_policy: bool
    """Whether samples are of the weights that were delivered last: an engine without them gets no request."""
    sleeps: bool
    """Whether engines let go of their memory when `sleep` is called, for somebody who computes on the same devices."""
    num_moved: int
    """Requests so far that were asked of another engine because theirs was gone."""
    num_lost_samples: int
    """Samples so far that engines owed when they were gone."""
    num_lost_tokens: int
    """Tokens that these engines had said, at most a second before, that they had drawn for them."""
    model: str
    log: str
    dtype: str
    max_model_length: int

    @abstractmethod
    def can_sleep(self) -> bool:
        """Say whether there are devices here that an engine can let go of; True where that is known only later."""

    @abstractmethod
    async def open(self) -> None:
        """Start the engines."""

    @abstractmethod
    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt."""

    @abstractmethod
    async def close(self) -> None:
        """End the engines."""

    @abstractmethod
    def own_tasks(self) -> set[asyncio.Task[Any]]:
        """Return what it does in the background and `close` brings to an end."""

    @abstractmethod
    def engine(self, number: int) -> TakesWeights:
        """Return engine `number`, which takes weights once the client is open."""
