"""Completions in rounds: what is asked next depends on what came back, and a run can stop and go on anywhere.

A round is a list of requests, the same n samples each. `X.rounds.jsonl` beside the output X holds the ids of every
round that was begun, one line a round, written and synced before its first request leaves. A resume reads the rounds
from it instead of deciding again, asks what they lack, and only then decides on the next; so what was asked never
depends on where a run was stopped, nor on rows that were refused once and answered later.

Request ids: round 0 asks under the state's own id, round r under `{state}@{r}`; rows are `{request}/{k}` as ever.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from espalier.data.jsonl import cut_torn_tail, iter_rows, to_line
from espalier.data.records import BadInput, Completion, State, parse_record
from espalier.data.tasks.task import Task
from espalier.sampling.client import Client, Sample, SampleRequest, SamplingParams
from espalier.sampling.requests import CompletionRequests, make_completions, round_id
from espalier.sampling.runner import Runner, Tally


@runtime_checkable
class RoundSource(Protocol):
    """A `sampling.requests.RequestSource` whose `load` gives the first round."""

    def next_round(self, number: int, rows: Sequence[Completion], num_samples: int) -> list[str]:
        """Return the request ids of round `number` (from 1), [] where nothing is left to ask.

        `rows` are those that came since the last call; `num_samples` samples are asked a request. Must depend on
        all rows so far alone, not on how they were split over calls.
        """

    def requests(self, request_ids: Sequence[str]) -> list[SampleRequest]:
        """Return the requests of these ids. Raises KeyError on one that is not ours."""


@dataclass
class RoundCompletions(CompletionRequests):
    """Completions of the states in a file, in rounds; `choose` says which states of which round.

    Subclasses give `first_states` and `choose`.
    """

    _by_request: dict[str, State] = field(default_factory=dict, init=False, repr=False)

    def first_states(self) -> list[str]:
        """Return the ids of the states of round 0."""
        raise NotImplementedError

    def choose(self, number: int, rows: Sequence[Completion], num_samples: int) -> list[str]:
        """Return the ids of the states of round `number`, from 1."""
        raise NotImplementedError

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return the requests of round 0."""
        super().load(task, tokenizer)
        return self.requests(self.first_states())

    def next_round(self, number: int, rows: Sequence[Completion], num_samples: int) -> list[str]:
        """Return the request ids of a round."""
        return [round_id(state_id, number) for state_id in self.choose(number, rows, num_samples)]

    def requests(self, request_ids: Sequence[str]) -> list[SampleRequest]:
        """Return requests of states in any round."""
        found = []
        for request_id in request_ids:
            state = self._states[request_id if request_id in self._states else request_id.rpartition("@")[0]]
            self._by_request[request_id] = state
            found.append(self.request(request_id, state))
        return found

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """Return completions of the request's state."""
        return make_completions(task, tokenizer, self._by_request[request.id], request.id, samples)


class Rounds:
    """The rounds of one output file."""

    def __init__(self, source: RoundSource, output: Path, num_samples: int):
        self.source = source
        self.output = output
        self.path = output.with_suffix(".rounds.jsonl")
        self.num_samples = num_samples
        self.number = 0
        self._offset = 0

    def begin(self, first: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Return all requests of the rounds that were begun, the first one at least, which `first` holds.

        Raises BadInput on a journal that is not of this run.
        """
        if not self.output.exists():
            self.path.unlink(missing_ok=True)
        cut_torn_tail(self.path)
        rounds = [(place, row.get("requests")) for place, row in iter_rows(self.path)] if self.path.is_file() else []
        if not rounds:
            self._note([request.id for request in first])
            return list(first)
        self.number = len(rounds) - 1
        requests: list[SampleRequest] = []
        for place, ids in rounds:
            try:
                requests += self.source.requests(ids)  # type: ignore[arg-type]
            except (KeyError, TypeError, AttributeError):
                raise BadInput(f"{place}: these requests are not of this run: remove {self.path} and {self.output}") from None  # fmt: skip  # noqa: E501
        return requests

    def advance(self) -> list[SampleRequest]:
        """Return the next round's requests, noted in the journal; [] where the source has nothing left to ask."""
        ids = self.source.next_round(self.number + 1, self._new_rows(), self.num_samples)
        if not ids:
            return []
        self.number += 1
        self._note(ids)
        return self.source.requests(ids)

    def _new_rows(self) -> list[Completion]:
        """Return the rows that were written since the last call."""
        if not self.output.exists():
            return []
        with self.output.open("rb") as file:
            file.seek(self._offset)
            lines = file.readlines()
            self._offset = file.tell()
        return [parse_record(Completion, json.loads(line), str(self.output)) for line in lines if line.strip()]

    def _note(self, ids: Sequence[str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(to_line({"round": self.number, "requests": list(ids)}).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())

    def go_on(self, requests: list[SampleRequest], finished: set[str]) -> list[SampleRequest]:
        """Return `requests`, and the next round's where all of them are finished: what a resume has to ask."""
        return requests + self.advance() if all(request.id in finished for request in requests) else requests


class _HeldOpen:
    """A client that stays open from round to round."""

    def __init__(self, client: Client):
        self.client = client
        self.is_open = False

    async def open(self) -> None:
        if not self.is_open:
            await self.client.open()
            self.is_open = True

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        return await self.client.sample(request, params)

    async def close(self) -> None:
        """Closed by `run_rounds`."""


async def run_rounds(
    runner: Runner,
    rounds: Rounds,
    requests: list[SampleRequest],
    finished: set[str],
    on_round: Callable[[int], None] = lambda total: None,
) -> Tally:
    """Ask round after round until the source has nothing left; the tally of all of them, which is the runner's too.

    `requests` are those of the rounds begun so far. `on_round` gets the number of requests known so far.
    A refused request is asked again by the next run, not by this one. Raises what `Runner.run` raises.
    """
    total = Tally(before=len(finished))
    client, show = runner.client, runner.on_progress
    held = _HeldOpen(client)
    runner.client = held

    def on_progress(done: int, fields: dict[str, float]) -> None:
        show(done, {**fields, "tokens": total.tokens + fields["tokens"]})

    runner.on_progress = on_progress
    settled = set(finished)
    try:
        while True:
            on_round(len(requests))
            try:
                await runner.run(requests, settled)
            finally:
                total.add(runner.tally)
            settled.update(request.id for request in requests)
            fresh = rounds.advance()
            if not fresh:
                return total
            requests = requests + fresh
    finally:
        runner.client, runner.on_progress, runner.tally = client, show, total
        if held.is_open:
            await client.close()
