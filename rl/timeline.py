"""What a run does when: events of the learner, of drawing, of deliveries and of engines, for timeline.jsonl.

They come from two threads (the learner's and the event loop's) with times of `time.monotonic()`. Nothing is kept before
`open`. Rank 0 writes; the other ranks collect their phases for it (`rl.rank_times`).
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from espalier.data.jsonl import cut_torn_tail
from espalier.data.timeline import ITERATION, LEARNER, RUN, START, TimelineEvent, event_line, rank_lane
from espalier.sampling.engine_work import WorkSpan

_NAME = "timeline.jsonl"
_SHORTEST_SECONDS = 1e-4  # of a phase, and between two phases of one name
_NUM_MEETINGS = 16


class Timeline:
    """Collects events until `write` appends them to timeline.jsonl."""

    def __init__(self) -> None:
        self.iteration = 0
        self.meetings: deque[float] = deque(maxlen=_NUM_MEETINGS)
        """When the last meetings of all ranks ended, of `time.monotonic()`."""
        self._is_open = False
        self._path: Path | None = None
        self._offset = 0.0  # from time.monotonic() to the seconds since 1970, the same for all of a process
        self._events: deque[TimelineEvent] = deque()
        self._phase: TimelineEvent | None = None

    def open(self, run_dir: Path | None, first: int) -> None:
        """Collect from now on; `first`: how many iterations are done. Without a `run_dir` nothing is written, and only
        phases are collected, until they are taken."""
        self.iteration, self._is_open = first, True
        if run_dir is None:
            return
        self._path = run_dir / _NAME
        cut_torn_tail(self._path)
        now = time.monotonic()
        self._offset = time.time() - now
        self.add(RUN, START, now, now)
        self.write([])

    def begin(self, iteration: int) -> None:
        """What comes now belongs to this iteration (from 1), unless it says otherwise."""
        self.iteration = iteration

    def add(
        self, lane: str, name: str, begun: float, ended: float, iteration: int | None = None, **numbers: int
    ) -> None:
        """Add an event; `numbers` are further fields of it."""
        if self._path is not None:
            self._events.append(self._event(lane, name, begun, ended, iteration, **numbers))

    def add_phase(self, name: str, begun: float, ended: float) -> None:
        """Add a part of a phase of the learner; one that goes on is one event."""
        if not self._is_open:
            return
        event, before = self._event(LEARNER, name, begun, ended), self._phase
        if (
            before is not None
            and (before.name, before.iteration) == (name, event.iteration)
            and event.start - before.end < _SHORTEST_SECONDS
        ):
            self._phase = replace(before, end=event.end)
            return
        self._end_phase()
        self._phase = event

    def end_iteration(self, begun: float, ended: float) -> None:
        """Add the iteration that began last, as a whole."""
        self.add(ITERATION, f"iteration {self.iteration}", begun, ended)

    def take_phases(self) -> list[TimelineEvent]:
        """Return the phases so far, with times of `time.monotonic()`, where nothing is written; none from now on."""
        self._end_phase()
        events = list(self._events)
        self._events.clear()
        return events

    def add_of_rank(self, rank: int, node: str, events: Iterable[TimelineEvent], offset: float) -> None:
        """Add the phases of another rank, whose `time.monotonic()` lacks `offset` seconds to be this one's."""
        for event in events:
            start, end = (at + offset + self._offset for at in (event.start, event.end))
            self._events.append(replace(event, lane=rank_lane(rank), node=node, start=start, end=end))

    def write(self, spans: Iterable[WorkSpan]) -> None:
        """Append what there is, and what engines did."""
        self._end_phase()
        if self._path is None:
            return
        lines = []
        while self._events:
            lines.append(event_line(self._events.popleft()))
        for span in spans:
            event = self._event(span.engine, span.name, span.begun, span.ended)
            lines.append(event_line(replace(
                event, node=span.node, requests=span.num_requests, samples=span.num_samples, tokens=span.num_tokens,
                busy_seconds=span.busy_seconds,
            )))  # fmt: skip
        if lines:
            with self._path.open("a", encoding="ascii") as file:
                file.write("".join(lines))

    def _event(
        self, lane: str, name: str, begun: float, ended: float, iteration: int | None = None, **numbers: int
    ) -> TimelineEvent:
        number = self.iteration if iteration is None else iteration
        return TimelineEvent(number, lane, name, begun + self._offset, ended + self._offset, "", **numbers)

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None and phase.end - phase.start >= _SHORTEST_SECONDS:
            self._events.append(phase)
