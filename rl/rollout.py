"""Problems → rollout groups, through the sampling client: token ids and log-probs, nothing re-tokenised.

Requests run concurrently, `concurrency` at most, whoever asks; those of an earlier batch go first. A wait has a
deadline: a server that died, or from which nothing came for `stall_seconds`, ends the run.
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from espalier.data.prompts import encode_prompt
from espalier.data.records import BadInput, Completion, Problem, State, Trajectory
from espalier.data.tasks.task import Task
from espalier.rl.begun_completions import Ask, BegunCompletions
from espalier.rl.probes.checks import crashed
from espalier.rl.rollout_checks import Refusal
from espalier.rl.turns import Turns
from espalier.rl.types import Branch, Rollout, RolloutGroup
from espalier.sampling.client import (
    Client,
    NotAnswered,
    Refused,
    Sample,
    SampleRequest,
    SamplingParams,
    ServerGone,
    ShowsLife,
)
from espalier.sampling.engine_work import ShowsWork, WorkSpan
from espalier.sampling.requests import make_completions, make_trajectory, round_id
from espalier.sampling.stall_watch import StallWatch

R = TypeVar("R")


@dataclass(frozen=True)
class Cut:
    """A state on a rollout of `problem` from which others are sampled; `parent`: the rollout's index in its group."""

    problem: Problem
    rollout: Rollout
    parent: int
    state: State


def named_by(asker: str, name: str) -> str:
    """Return the name of what the run itself asks for ("") or somebody else."""
    return f"{asker}/{name}" if asker else name


def version_of(stamp: str) -> int:
    """Return the policy version that an engine is stamped with; -1, older than any, where the stamp is none of ours."""
    return int(stamp) if stamp.isdecimal() else -1


@dataclass
class Sampler:
    """Asks `client` (open, and bound to the running event loop) for rollouts of `task`. `concurrency`: requests under
    way at once, at all engines together. A `turn` is the number of the batch that something is asked for: of what waits
    the smallest goes first."""

    client: Client
    task: Task
    tokenizer: Any
    concurrency: int
    stall_seconds: float
    check_server: Callable[[], None] = lambda: None
    generated_tokens: int = field(init=False, default=0)
    """Tokens that the engine has generated for training so far."""
    completion_tokens: int = field(init=False, default=0)
    """Tokens of completions, and of rollouts that none is trained on, which came for the run's own estimator."""
    _turns: Turns = field(init=False)
    _watch: StallWatch = field(init=False)
    _may_ask: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _num_asked: int = field(init=False, default=0)
    _none_asked: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _idle_since: float = field(init=False, default_factory=time.monotonic)
    _idle_seconds: float = field(init=False, default=0.0)
    begun: BegunCompletions = field(init=False, default_factory=BegunCompletions)
    """Completions that were asked for before `complete` asks."""

    def __post_init__(self) -> None:
        self._turns = Turns(self.concurrency)
        self._watch = StallWatch(self.stall_seconds, lambda: self.check_server(), self._is_working)
        self._may_ask.set()
        self._none_asked.set()

    async def _is_working(self) -> bool:
        return isinstance(self.client, ShowsLife) and await self.client.is_working()

    async def rollout(
        self, problems: Sequence[Problem], params: SamplingParams, name: str, policy_version: int, asker: str = ""
    ) -> list[RolloutGroup]:
        """Return one group a problem, in order; ids are `{name}/{problem}/{k}`, behind `{asker}/` where one is named.
        Raises ServerGone, BadInput (also where the server refuses one)."""
        groups, refused = await self.draw(problems, params, named_by(asker, name), policy_version)
        if refused:
            raise BadInput(f"problem {refused[0].problem_id} cannot be sampled: {refused[0].reason}")
        self._came(asker, [rollout.trajectory for group in groups for rollout in group.rollouts])
        return groups

    async def draw(
        self,
        problems: Sequence[Problem],
        params: SamplingParams,
        name: str,
        policy_version: int | Callable[[], int],
        turn: int = 0,
        is_cost: bool = True,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ) -> tuple[list[RolloutGroup], list[Refusal]]:
        """Return `rollout`, of the problems that the server does not refuse; and the others. `policy_version` is a
        function where it may change before all are asked; `is_cost`: whether the tokens count as generated for
        training; `on_group` gets every group as it is drawn."""
        calls = [partial(self._group, problem, params, name, policy_version, is_cost, on_group) for problem in problems]
        found = await self._all(calls, turn)
        refused = [one for one in found if isinstance(one, Refusal)]
        return [one for one in found if isinstance(one, RolloutGroup)], refused

    async def complete(
        self,
        states: Sequence[State],
        params: Sequence[SamplingParams],
        round_number: int = 0,
        asker: str = "",
        turn: int = 0,
    ) -> list[list[Completion]]:
        """Return the graded completions of every state, in order; ids are those of the offline callers, behind
        `{asker}/` where one is named (an id is a request's seed where `params.is_seeded`).

        Raises ServerGone, BadInput.
        """

        def ask(state: State, one: SamplingParams) -> Ask:
            begun = self.begun.take(turn, state, one) if round_number == 0 and not asker else None
            if begun is not None:
                return begun.wait
            return partial(self._in_turn, turn, partial(self._completions, state, one, round_number, asker))

        return await self._wait_for([ask(*pair) for pair in zip(states, params, strict=True)])

    def begin_completions(self, states: Sequence[State], params: Sequence[SamplingParams], turn: int) -> None:
        """Ask already for what `complete` is going to be asked in its first round of this turn, behind all that waits
        for it; `complete` waits for these answers in place of asking."""
        for state, one in zip(states, params, strict=True):
            call = partial(self._completions, state, one, 0, "")
            self.begun.begin(turn, state, one, partial(self._in_turn, turn, call))

    async def branch(self, cuts: Sequence[Cut], num: int, params: SamplingParams) -> list[list[Rollout]]:
        """Return `num` rollouts from every cut, in order; ids are `{state}/{k}`. They may use what the cut leaves of
        `params.max_tokens`. Raises ServerGone, BadInput."""
        return await self._all([partial(self._branches, cut, num, params) for cut in cuts])

    async def rest(self) -> None:
        """Ask nothing more until `go_on`; return when nothing is asked any more. Raises ServerGone."""
        self._may_ask.clear()
        await self._watch.wait_for([asyncio.create_task(self._none_asked.wait())])

    def go_on(self) -> None:
        """Ask again."""
        self._may_ask.set()

    def take_idle_seconds(self) -> float:
        """Return the seconds since the last call in which nothing was asked."""
        now, idle = time.monotonic(), self._idle_seconds
        if self._num_asked == 0:
            idle += now - self._idle_since
        self._idle_since, self._idle_seconds = now, 0.0
        return idle

    async def take_work(self) -> list[WorkSpan]:
        """Return what the client's engines did since the last call, where it says that."""
        await asyncio.sleep(0)  # who waits for an engine that is gone by now learns it first
        return self.client.take_work() if isinstance(self.client, ShowsWork) else []

    async def _all(self, calls: Sequence[Callable[[], Awaitable[R]]], turn: int = 0) -> list[R]:
        """Return the results in order, each called as its turn comes; whatever is left undone is cancelled."""
        return await self._wait_for([partial(self._in_turn, turn, call) for call in calls])

    async def _in_turn(self, turn: int, call: Callable[[], Awaitable[R]]) -> R:
        async with self._turns.take(turn):
            return await call()

    async def _wait_for(self, calls: Sequence[Callable[[], Coroutine[Any, Any, R]]]) -> list[R]:
        try:
            return await self._watch.wait_for([asyncio.create_task(call()) for call in calls])
        except ServerGone as error:
            raise crashed(error, self.check_server) from None

    def _came(self, asker: str, sampled: Sequence[Trajectory | Completion]) -> None:
        if not asker:
            self.completion_tokens += sum(len(one.response_ids) for one in sampled)

    async def _ask(self, request: SampleRequest, params: SamplingParams, is_cost: bool = True) -> list[Sample]:
        if self._num_asked == 0:
            self._idle_seconds += time.monotonic() - self._idle_since
        self._num_asked += 1
        self._none_asked.clear()
        try:
            samples = await self.client.sample(request, params)
        finally:
            self._num_asked -= 1
            if self._num_asked == 0:
                self._none_asked.set()
                self._idle_since = time.monotonic()
        if is_cost:
            self.generated_tokens += sum(len(sample.token_ids) for sample in samples)
        return samples

    async def _group(
        self,
        problem: Problem,
        params: SamplingParams,
        name: str,
        policy_version: int | Callable[[], int],
        is_cost: bool,
        on_group: Callable[[RolloutGroup], None],
    ) -> RolloutGroup | Refusal:
        prompt = encode_prompt(self.task, self.tokenizer, problem)
        request = SampleRequest(f"{name}/{problem.id}", prompt.text, prompt.ids, problem_id=problem.id)
        await self._may_ask.wait()
        asked_of = policy_version() if callable(policy_version) else policy_version
        try:
            samples = await self._ask(request, params, is_cost)
        except NotAnswered as error:  # to leave it out would favour what is answered soon
            raise ServerGone(f"problem {problem.id}: {error}") from None
        except Refused as error:
            self._watch.saw_result()
            return Refusal(problem.id, str(error))
        self._watch.saw_result()
        # grading can take a second where an answer needs symbolic work: not in the event loop
        make = partial(self._make_rollout, problem, request, asked_of)
        rollouts = await asyncio.to_thread(lambda: [make(k, sample) for k, sample in enumerate(samples)])
        group = RolloutGroup(problem, rollouts, scores=[])
        on_group(group)
        return group

    def _make_rollout(
        self,
        problem: Problem,
        request: SampleRequest,
        policy_version: int,
        index: int,
        answered: Sample,
        branch: Branch | None = None,
    ) -> Rollout:
        if answered.logprobs is None or len(answered.logprobs) != len(answered.token_ids):
            raise BadInput(f"the sampler gave no log-probs for {request.id}: choose a client that does")
        trajectory = make_trajectory(self.task, self.tokenizer, problem, request, index, answered)
        assert trajectory.logprobs is not None
        # what a stop string takes off the end takes its versions with it
        num = len(trajectory.response_ids) - (0 if branch is None else branch.num_tokens)
        starts = tuple((start, version_of(stamp)) for start, stamp in answered.versions if start < max(1, num))
        oldest = min((version for _, version in starts), default=policy_version)
        logprobs, trajectory = array("d", trajectory.logprobs), replace(trajectory, logprobs=None)  # 8 bytes each, once
        return Rollout(trajectory, logprobs, oldest, branch, starts if len(starts) > 1 else ())

    async def _branches(self, cut: Cut, num: int, params: SamplingParams) -> list[Rollout]:
        state, shared = cut.state, cut.rollout.logprobs[: len(cut.state.prefix_ids)]
        left = replace(params, n=num, max_tokens=params.max_tokens - len(shared))
        samples = await self._sample_from(state, state.id, left)
        # the whole response is graded and cut into steps, behind the problem's own prompt
        request = SampleRequest(state.id, state.prompt, state.prompt_ids, problem_id=state.problem_id)
        branch = Branch(cut.parent, len(shared))

        def make(k: int, sample: Sample) -> Rollout:
            whole = replace(
                sample,
                text=state.prefix + sample.text,
                token_ids=[*state.prefix_ids, *sample.token_ids],
                logprobs=None if sample.logprobs is None else [*shared, *sample.logprobs],
            )
            return self._make_rollout(cut.problem, request, cut.rollout.policy_version, k, whole, branch)

        return await asyncio.to_thread(lambda: [make(k, sample) for k, sample in enumerate(samples)])

    async def _completions(
        self, state: State, params: SamplingParams, round_number: int, asker: str
    ) -> list[Completion]:
        request_id = named_by(asker, round_id(state.id, round_number))
        samples = await self._sample_from(state, request_id, params)
        found = await asyncio.to_thread(make_completions, self.task, self.tokenizer, state, request_id, samples)
        self._came(asker, found)
        return found

    async def _sample_from(self, state: State, request_id: str, params: SamplingParams) -> list[Sample]:
        ids = state.prompt_ids + state.prefix_ids
        request = SampleRequest(request_id, state.prompt + state.prefix, ids, problem_id=state.problem_id)
        await self._may_ask.wait()
        try:
            samples = await self._ask(request, params)
        except NotAnswered as error:
            raise ServerGone(f"state {state.id}: {error}") from None
        except Refused as error:
            raise BadInput(f"state {state.id} cannot be completed: {error}") from None
        self._watch.saw_result()
        return samples
