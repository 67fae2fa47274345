"""What each engine of a client is asked for and gives, in spans of time, for the timeline of a run."""

import time
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from espalier.data.timeline import ASKED, LOST
from espalier.sampling.client import Sample

_GAP_SECONDS = 0.1  # a shorter pause between two requests does not end a span
_MAX_SPANS = 4
_MAX_KEPT = 64  # where nobody takes them


@dataclass
class WorkSpan:
    """What became of an `engine` on its `node`. `name`: asked, from its first request to its last answer; lost, the
    moment when it was gone; back, the moment when another one was there in its place.

    Times are seconds of `time.monotonic()`; within a span it owed answers for `busy_seconds`. Requests, samples and
    tokens are those that it answered; of a lost one those that it had not, its tokens as it had last said.
    """

    engine: str
    node: str
    name: str
    begun: float
    ended: float
    num_requests: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    busy_seconds: float = 0.0

    def add(self, num_samples: int, num_tokens: int) -> None:
        """Count one more request."""
        self.num_requests += 1
        self.num_samples += num_samples
        self.num_tokens += num_tokens


@runtime_checkable
class ShowsWork(Protocol):
    """A client that says what its engines do."""

    def take_work(self) -> list[WorkSpan]:
        """Return what they did since the last call, in the loop that it is bound to."""


@dataclass
class EngineWork:
    """Counts what one engine does; `node`: where it runs, as this machine reaches it."""

    engine: str
    node: str = ""
    _spans: list[WorkSpan] = field(default_factory=list, init=False)
    _marks: list[WorkSpan] = field(default_factory=list, init=False)
    _num_open: int = field(default=0, init=False)
    _since: float = field(default=0.0, init=False)

    def begin(self) -> None:
        """A request goes to it."""
        now = time.monotonic()
        if self._num_open == 0:
            if not self._spans or now - self._spans[-1].ended > _GAP_SECONDS:
                _join_nearest(self._spans, _MAX_KEPT - 1)
                self._spans.append(WorkSpan(self.engine, self.node, ASKED, now, now))
            self._since = now
        self._num_open += 1

    def end(self, samples: list[Sample] | None) -> None:
        """It has answered a request, or (None) it will not."""
        self._num_open -= 1
        self._count_busy()
        if samples is not None:
            self._spans[-1].add(len(samples), sum(len(sample.token_ids) for sample in samples))

    def mark(self, name: str) -> None:
        """It is lost, or back."""
        now = time.monotonic()
        self._marks.append(WorkSpan(self.engine, self.node, name, now, now))

    def lose(self, num_samples: int, num_tokens: int) -> None:
        """Count a request that it was lost under."""
        if not self._marks:  # the moment itself was taken already
            self.mark(LOST)
        self._marks[-1].add(num_samples, num_tokens)

    def take(self) -> list[WorkSpan]:
        """Return what there was since the last call, at most `_MAX_SPANS` spans beside the marks: of more those with
        the shortest pauses between them are one. Work in progress is cut in two."""
        if self._num_open:
            self._count_busy()
        spans, marks, self._spans, self._marks = self._spans, self._marks, [], []
        if self._num_open:
            self._spans.append(WorkSpan(self.engine, self.node, ASKED, self._since, self._since))
        _join_nearest(spans, _MAX_SPANS)
        return spans + marks

    def _count_busy(self) -> None:
        """Count the time since the last look."""
        now = time.monotonic()
        self._spans[-1].busy_seconds += now - self._since
        self._spans[-1].ended = self._since = now


def _join_nearest(spans: list[WorkSpan], most: int) -> None:
    """Leave `most` of them: those with the shortest pauses between them become one."""
    while len(spans) > most:
        place = min(range(1, len(spans)), key=lambda k: spans[k].begun - spans[k - 1].ended)
        spans[place - 1 : place + 1] = [_joined(spans[place - 1], spans[place])]


def _joined(first: WorkSpan, second: WorkSpan) -> WorkSpan:
    return WorkSpan(
        first.engine,
        second.node,
        first.name,
        first.begun,
        second.ended,
        first.num_requests + second.num_requests,
        first.num_samples + second.num_samples,
        first.num_tokens + second.num_tokens,
        first.busy_seconds + second.busy_seconds,
    )
