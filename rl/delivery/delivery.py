"""The policy's way to the engines as an iteration sees it. `send`, `make_room` and `prove_now` are called on every
rank, all else on rank 0, which alone asks engines.

What a delivery's proof says is measured by the iteration that samples from it (`prove`, `take_proof`).
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import Problem, Trajectory
from espalier.data.timeline import DELIVERY
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.rl.policy import Policy
from espalier.rl.probes.canary import Canary, few_canaries
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_checks import check_refused
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import barrier, from_main_rank
from espalier.sampling.client import SamplingParams

log = logging.getLogger(__name__)


@dataclass
class Delivery:
    """`policy` computes what is delivered; `loop` is rank 0's, on which every await of the run happens. `sleeps`:
    whether the engines share their devices with the ranks. Implements `rl.probes.watch.Engines`."""

    sync: WeightSync
    policy: Policy
    loop: BackgroundLoop
    metrics: IterationMetrics
    sleeps: bool = False
    is_awake: bool = field(default=True, init=False)
    """Whether the engines can be asked, as rank 0 knows."""
    _proof: dict[str, float] = field(default_factory=dict, init=False)
    _proving: asyncio.Task[dict[str, float]] | None = field(default=None, init=False)

    @property
    def computes_in(self) -> torch.dtype:
        """The engines' dtype; the coarsest of the usual ones where it is unknown."""
        return self.sync.computes_in

    def is_received(self) -> bool:
        """Say whether the engines read the last delivery as it was sent."""
        return self.sync.is_received

    def logprobs_of(self, rows: list[list[int]]) -> list[list[list[float]]]:
        """Return every engine's log-probs of every token but the first of each row, without its prefix cache."""
        return [found for _, found in self.loop.run(self.sync.logprobs_of(rows))]

    def send(self, weights: PolicyWeights, version: int) -> None:
        """Look at the weights of a new version and deliver them. Raises ProbeFailed on a step that is too large,
        StaleWeights."""
        with self.metrics.clock.phase("probes"):
            moved = weights.on_all_ranks(lambda: self.sync.look(weights, version))
        self.metrics.add(moved, "engine/")
        begun = time.monotonic()
        with self.metrics.clock.phase("weight_sync"):
            self.make_room()
            serving, waking = weights.on_all_ranks(lambda: self.loop.run(self._send(weights)))
        self.is_awake = True
        self.metrics.timeline.add(DELIVERY, f"version {version}", begun, time.monotonic(), engines=serving)
        if self.sleeps:
            self.metrics.clock.move("weight_sync", "engine_wake", waking)
        self.metrics.add({"serving": float(serving)}, "engine/")

    def sleep(self) -> None:
        """Have engines that share their devices with the ranks let go of their memory: nothing is asked of them before
        the next `send`. Nothing where they sleep already, or do not. Raises ServerGone."""
        if not self.sleeps or not self.is_awake:
            return
        with self.metrics.clock.phase("engine_sleep"):
            self.loop.run(self.sync.sleep())
        self.is_awake = False

    def make_room(self) -> None:
        """Give the memory that this rank holds and does not use back to its GPU, on every rank, where engines share
        it."""
        if not self.sleeps:
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        barrier()  # rank 0 wakes them all

    def prove_now(self) -> None:
        """Prove the last delivery before anything else comes of it. Raises StaleWeights, ProbeFailed."""
        with self.metrics.clock.phase("weight_sync"):
            from_main_rank(lambda: self.loop.run(self.prove()))

    def ask_marker(self) -> None:
        """Have every engine cache a prompt that must not be cached any more after the next delivery."""
        self.loop.run(self.ask_marker_now())

    @contextmanager
    def kept_random_state(self) -> Iterator[None]:
        """Have every engine draw behind the block as if nothing had been asked within it."""
        self.loop.run(self.sync.keep_random_state())
        yield
        self.loop.run(self.sync.put_random_state_back())

    async def ask_marker_now(self) -> None:
        """`ask_marker`; nothing while a proof looks for that prompt in the caches: the next delivery
        asks then."""
        if self._proving is None:
            await self.sync.ask_marker()

    async def _send(self, weights: PolicyWeights) -> tuple[int, float]:
        """Return (how many engines serve them, the seconds in which they were woken)."""
        before = self.sync.wake_seconds
        if self._proving is not None:  # the engines are asked by the weights of before
            await self.prove()
            await self.sync.ask_marker()
        await self.sync.send(weights)
        return self.sync.num_serving, self.sync.wake_seconds - before

    def begin_proof(self) -> None:
        """In the loop: ask for the proof of the last delivery, first in the engines' line; `prove`
        waits for it, and the next delivery does."""
        if self._proving is None:
            self._proving = asyncio.create_task(self.sync.prove())

    async def prove(self) -> None:
        """Prove the last delivery, if it was not. Raises StaleWeights, ProbeFailed."""
        self.begin_proof()
        proving = self._proving
        assert proving is not None
        try:
            self._proof |= await proving
        finally:
            self._proving = None

    def take_proof(self) -> dict[str, float]:
        """Return what the proofs since the last call measured."""
        found, self._proof = self._proof, {}
        return {f"engine/{name}": value for name, value in found.items()}

    async def start(
        self, version: int, weights: PolicyWeights, canaries: list[Canary], seed: int, num_rollouts: int
    ) -> None:
        """Prove on all canaries that deliveries reach the whole engine, and serve the policy of this
        version; every delivery from now on is proven on few of them (`few_canaries`). Raises StaleWeights,
        ProbeFailed."""
        started = time.monotonic()
        self.sync.canaries = canaries
        await self.sync.prove_delivery(weights, seed)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # of weights with noise
        self.sync.canaries = few_canaries(canaries, num_rollouts)
        self._proof |= await self.sync.sync(weights, version)
        ended, serving = time.monotonic(), self.sync.num_serving
        self.metrics.timeline.add(DELIVERY, f"version {version}", started, ended, engines=serving)
        log.info("the engine serves policy version %d (%.1f s)", version, ended - started)


async def sample_canaries(
    path: Path,
    problems: Sequence[Problem],
    sampler: Sampler,
    params: SamplingParams,
    sync: WeightSync,
    version: int,
    weights: PolicyWeights,
) -> list[Canary]:
    """Read the responses of the first policy to `problems` from `path`, or sample them once a run from `weights`:
    resumed, a run is compared on the same ones."""
    if not path.is_file():
        await sync.deliver(weights)  # a running engine may serve anything
        groups, refused = await sampler.draw(problems, replace(params, n=1), "canary", version, is_cost=False)
        check_refused(refused, len(groups) + len(refused), 1.0)  # fewer canaries prove a delivery too
        write_records(path, [group.rollouts[0].trajectory for group in groups])
    window: int | None = getattr(sampler.client, "max_model_length", None)
    room = None if window is None else window - 1  # an engine reads what leaves room for a token
    sampled = read_records(Trajectory, path)
    return [Canary((t.prompt_ids + t.response_ids)[:room], len(t.prompt_ids)) for t in sampled]
