"""timeline.jsonl of a run of reinforcement learning: who did what in an iteration, from when to when.

Lines are appended as iterations end. A run that goes on from a checkpoint makes some iterations again: its first line
says from which on (lane `run`, name `start`), and reading leaves out what stood of them before.
"""

import dataclasses
from pathlib import Path

from espalier.data.jsonl import iter_rows, to_line
from espalier.data.records import parse_record

RUN, ITERATION, LEARNER, DRAWING, DELIVERY = "run", "iteration", "learner", "drawing", "delivery"
LANES = (RUN, ITERATION, LEARNER, DRAWING, DELIVERY)
START = "start"
WAITING = "waiting for rank "
ASKED, LOST, BACK = "asked", "lost", "back"
"""Names of an engine's events."""


def rank_lane(rank: int) -> str:
    """Return the name of the lane of a rank of the learner."""
    return f"{LEARNER} {rank}" if rank else LEARNER


def is_of_other_rank(lane: str) -> bool:
    """Say whether a lane is that of a rank of the learner other than 0."""
    return lane.startswith(f"{LEARNER} ")


def waiting_for(rank: int) -> str:
    """Return the name of the event of a wait until `rank`, the last one, came."""
    return f"{WAITING}{rank}"


@dataclasses.dataclass(frozen=True)
class TimelineEvent:
    """Something that took time in a run of reinforcement learning (rl/timeline.py); fields that are 0 or empty are left
    out of the line."""

    iteration: int
    """of what is drawn: the iteration that trains on it; else the one in which it was, from 1, to which evaluation and
    saving behind it belong; 0 before the first; of a start: how many were done"""
    lane: str
    """who: run, iteration, learner (rank 0), `learner 3` (another rank), drawing (a batch of rollouts), delivery (of
    weights), or an engine's name"""
    name: str
    """what: start; a phase ([metrics](metrics.md#time)); of a learner `waiting for rank 3`, the last that came;
    `batch 3`; `version 3`; of an engine asked (from its first request to its last answer), lost or back"""
    start: float
    """seconds since 1970"""
    end: float
    """seconds since 1970; of a moment as `start`"""
    node: str = ""
    """of an engine: where it ran, as rank 0 reached it; of another rank: the name of its machine"""
    requests: int = 0
    """answered; drawn; of a lost engine: those that it owed"""
    samples: int = 0
    """their samples"""
    tokens: int = 0
    """tokens of these samples; of a lost engine: those that it had said it had drawn, at most a second before"""
    busy_seconds: float = 0.0
    """of an engine: how long of the time it owed answers; of a phase of another rank with short waits in it: how long
    it did not wait"""
    engines: int = 0
    """of a delivery: how many engines took it"""


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TimelineEvent)}


def event_line(event: TimelineEvent) -> str:
    """Return the event as a line of JSON, without what is 0 or empty; times in tenths of milliseconds."""
    row = {name: value for name, value in vars(event).items() if value != _DEFAULTS[name]}
    return to_line({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})


def read_timeline(path: Path) -> list[TimelineEvent]:
    """Return the events of a run, every iteration as it was made last. A last line that does not end, of a run that is
    being made or was killed, is left out. Raises BadInput on another bad line."""
    events: list[TimelineEvent] = []
    for place, row in iter_rows(path, leaves_torn=True):
        event = parse_record(TimelineEvent, row, place)
        if (event.lane, event.name) == (RUN, START):
            events = [one for one in events if one.iteration <= event.iteration]
        events.append(event)
    return events
