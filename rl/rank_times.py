"""What the other ranks of the learner did when: handed to rank 0 once per iteration, and put into its time.

Clocks of machines differ, and `time.monotonic()` begins anywhere. But all ranks meet many times per iteration
(`runtime.peers`), and a meeting ends for all of them when rank 0 says so. By how much its end differs on two clocks is
how far they are apart, but for the way of one message and for how late a rank wakes up. The median over the last
meetings is taken anew every time, so that one late rank does not count, nor clocks that drift.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from espalier.data.timeline import WAITING, TimelineEvent
from espalier.rl.iteration_metrics import IterationMetrics
from espalier.runtime.distributed import gather_over_ranks, is_main_rank, world_size

_SHORTEST_WAIT, _SHORTEST_PHASE = 0.01, 0.001  # of all the time that is handed over
_TOUCH_SECONDS = 1e-4
_COMPARED = ("forward", "update")


@dataclass(frozen=True)
class RankTimes:
    """What a rank hands over: the name of its machine, the seconds in which it computed and did not wait, when the last
    meetings of all ranks ended and what it did, both of its `time.monotonic()`."""

    node: str
    computed_seconds: float
    meetings: tuple[float, ...]
    events: list[TimelineEvent]


def hand_over(metrics: IterationMetrics) -> dict[str, float]:
    """Give rank 0 what this rank did since it was last called; a collective call. Return `ranks/…`; none on one
    process."""
    if world_size() == 1:
        return {}
    seconds = metrics.clock.take_computed(_COMPARED)
    timeline = metrics.timeline
    events = [] if is_main_rank() else in_few(timeline.take_phases())
    ranks = gather_over_ranks(RankTimes(socket.gethostname(), seconds, tuple(timeline.meetings), events))
    if is_main_rank():
        for number, one in enumerate(ranks):
            timeline.add_of_rank(number, one.node, one.events, clock_offset(ranks[0].meetings, one.meetings))
    return slowest([one.computed_seconds for one in ranks])


def clock_offset(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the seconds to be added to another clock's times, from when the same meetings ended by both; 0 of none."""
    return median(here - there for here, there in zip(own, others, strict=True)) if own else 0.0


def slowest(seconds: Sequence[float]) -> dict[str, float]:
    """Return which rank computed longest, and how many times as long as the mean of all."""
    if sum(seconds) <= 0:
        return {}
    most = max(seconds)
    return {"ranks/slowest_over_mean": most / mean(seconds), "ranks/slowest": float(seconds.index(most))}


def in_few(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Return the events of a rank, in their order, as at most some hundreds, however many minibatches there were: a
    short wait is within the phase that it follows, which then says for how long it did not wait, and what is very short
    is left out."""
    whole = events[-1].end - events[0].start if events else 0.0
    kept: list[TimelineEvent] = []
    for event in events:
        seconds, before = event.end - event.start, kept[-1] if kept else None
        is_wait = event.name.startswith(WAITING)
        if before is None or before.iteration != event.iteration or event.start - before.end >= _TOUCH_SECONDS:
            kept.append(event)
        elif is_wait and seconds < _SHORTEST_WAIT * whole and not before.name.startswith(WAITING):
            busy = before.busy_seconds or before.end - before.start
            kept[-1] = replace(before, end=event.end, busy_seconds=busy)
        elif before.name == event.name:
            busy = before.busy_seconds + seconds if before.busy_seconds else 0.0
            kept[-1] = replace(before, end=event.end, busy_seconds=busy)
        else:
            kept.append(event)
    return [event for event in kept if event.end - event.start >= _SHORTEST_PHASE * whole]
