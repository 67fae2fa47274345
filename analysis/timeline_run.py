"""What the page of a run's timeline reads: lines of metrics.jsonl by iteration, events of timeline.jsonl, and what
follows from them: where tokens ended, what each engine did, times without the hours in which no program ran.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput
from espalier.data.timeline import (
    ASKED,
    LANES,
    LEARNER,
    LOST,
    RUN,
    START,
    WAITING,
    TimelineEvent,
    is_of_other_rank,
    rank_lane,
    read_timeline,
)

_MOST_AGES = 4
_AGE = re.compile(r"ledger/trained_age_(\d+)")
_BREAK_SECONDS = 1.0  # what the time between two programs is shown as, at most
_MOST_ROWS = 8
MOST_RANKS = 15  # other than rank 0, whose lanes are drawn from the beginning


@dataclass(frozen=True)
class TimelineRun:
    """`rows`: the line of every iteration in its order; `evaluations`: those of evaluations. `events` of the newest
    iterations, `num_left_out` of earlier ones are not there; `why_no_events`: "" where there are any."""

    rows: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    events: list[TimelineEvent]
    num_left_out: int = 0
    why_no_events: str = ""

    @property
    def steps(self) -> list[int]:
        """The iterations, from 1."""
        return [int(row["step"]) for row in self.rows]

    def column(self, name: str) -> list[float | None]:
        """List a metric by iteration, None where it was not measured."""
        return [row.get(name) for row in self.rows]

    def total(self, name: str) -> float:
        """Sum a metric over the iterations that have it."""
        return sum(row.get(name, 0.0) for row in self.rows)


def read_timeline_run(run_dir: Path, max_events: int) -> TimelineRun:
    """Read a run of main.py, which may still go on. Raises BadInput where it has no line of an iteration."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise BadInput(f"{run_dir}: has no metrics.jsonl: set stage.run_dir to a run of main.py")
    rows: dict[int, dict[str, float]] = {}
    evaluations: list[dict[str, float]] = []
    for place, row in iter_rows(path, leaves_torn=True):
        if not isinstance(row.get("step"), int):
            raise BadInput(f"{place}: 'step' must be a whole number: set stage.run_dir to a run of main.py")
        if "seconds/iteration" in row:
            rows[row["step"]] = row
        elif "eval/accuracy" in row:
            evaluations.append(row)
    if not rows:
        raise BadInput(f"{path}: has no line of an iteration (seconds/iteration): set stage.run_dir to a run of "
                       "main.py")  # fmt: skip
    events, why = _read_events(run_dir / "timeline.jsonl")
    kept = _newest(events, max_events)
    return TimelineRun([rows[step] for step in sorted(rows)], evaluations, kept, len(events) - len(kept), why)


def _read_events(path: Path) -> tuple[list[TimelineEvent], str]:
    if not path.is_file():
        return [], "This run has no timeline.jsonl: it was made before runs wrote one, so only metrics.jsonl is shown."
    events = read_timeline(path)
    return events, "" if events else "timeline.jsonl of this run is empty."


def _newest(events: list[TimelineEvent], most: int) -> list[TimelineEvent]:
    """Return the events of as many of the last iterations as `most` allows."""
    first = 0
    if len(events) > most:
        counts: dict[int, int] = {}
        for event in events:
            counts[event.iteration] = counts.get(event.iteration, 0) + 1
        left = most
        for first in sorted(counts, reverse=True):
            left -= counts[first]
            if left < 0:
                first += 1
                break
    return [event for event in events if event.iteration >= first]


# --- where tokens ended ----------------------------------------------------------------------------------------------


def fates_of(run: TimelineRun) -> dict[str, list[float]]:
    """Return the tokens of each iteration by where they ended, in the order in which they are stacked; nothing where
    the run kept no ledger. What waits is what waited at its end; lost ones never came."""
    if not any("ledger/generated" in row for row in run.rows):
        return {}
    ages = sorted({int(found[1]) for row in run.rows for name in row if (found := _AGE.fullmatch(name))} | {0})
    names = {age: f"trained, age {age}" if age < _MOST_AGES else f"trained, age {_MOST_AGES} or more" for age in ages}
    others = {"agreeing": "agreeing", "filtered": "filtered", "drawn_again": "drawn again after a stop",
              "waiting": "waiting"}  # fmt: skip
    tokens = {name: [0.0] * len(run.rows) for name in [*names.values(), *others.values(), "lost, at least"]}
    for place, row in enumerate(run.rows):
        tokens["lost, at least"][place] = row.get("rollout/lost_tokens", 0.0)
        for age, name in names.items():
            tokens[name][place] += row.get(f"ledger/trained_age_{age}", 0.0)
        for key, name in others.items():
            tokens[name][place] = row.get(f"ledger/{key}", 0.0)
    return {name: values for name, values in tokens.items() if any(values)}


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass
class EngineSums:
    """What an engine did over the events: `nodes` in the order in which it ran on them."""

    nodes: dict[str, None] = field(default_factory=dict)
    requests: int = 0
    samples: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    num_lost: int = 0
    lost_samples: int = 0
    lost_tokens: int = 0


def engine_sums(events: Sequence[TimelineEvent]) -> dict[str, EngineSums]:
    """Return what each engine did, by its name in the order of numbers."""
    sums: dict[str, EngineSums] = {}
    for event in sorted(events, key=lambda event: event.start):
        if event.lane in LANES or is_of_other_rank(event.lane):
            continue
        one = sums.setdefault(event.lane, EngineSums())
        one.nodes[event.node] = None
        if event.name == ASKED:
            one.requests += event.requests
            one.samples += event.samples
            one.tokens += event.tokens
            one.busy_seconds += event.busy_seconds
        elif event.name == LOST:
            one.num_lost += 1
            one.lost_samples += event.samples
            one.lost_tokens += event.tokens
    return {name: sums[name] for name in sorted(sums, key=natural)}


def natural(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by so that engine 10 comes after engine 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# --- ranks -----------------------------------------------------------------------------------------------------------


def seconds_waited_for(events: Sequence[TimelineEvent]) -> dict[str, float]:
    """Return how long others waited for each rank of the learner, all of them together, by its lane; the longest
    first."""
    found: dict[str, float] = {}
    for event in events:
        if event.name.startswith(WAITING):
            lane = rank_lane(int(event.name.removeprefix(WAITING)))
            found[lane] = found.get(lane, 0.0) + event.end - event.start
    return dict(sorted(found.items(), key=lambda row: -row[1]))


def other_ranks(events: Sequence[TimelineEvent]) -> dict[str, str]:
    """Return the machine of each rank but 0 at the end of the events, by its lane in the order of ranks."""
    nodes = {event.lane: event.node for event in events if is_of_other_rank(event.lane)}
    return {lane: nodes[lane] for lane in sorted(nodes, key=natural)}


def folded_ranks(events: Sequence[TimelineEvent]) -> list[str]:
    """Return the lanes of ranks that are not drawn at first: all but the `MOST_RANKS` others waited for longest."""
    lanes, waited = list(other_ranks(events)), seconds_waited_for(events)
    drawn = sorted(lanes, key=lambda lane: -waited.get(lane, 0.0))[:MOST_RANKS]
    return [lane for lane in lanes if lane not in drawn]


# --- the picture -----------------------------------------------------------------------------------------------------


def picture_of(run: TimelineRun) -> dict[str, Any]:
    """Return what the page's script draws: a list for every column of events, in the order of their starts. `lanes` are
    `fixed` ones and then engines; `ranks` and, of these, `folded` say which are of other ranks and which not drawn at
    first. Times are in milliseconds since the first one shown; `breaks`: where a program started again, after which
    iteration, and how many seconds after the one before had ended."""
    events, breaks = without_breaks(run.events)
    events.sort(key=lambda event: event.start)
    events = [event for event in events if event.lane != RUN]
    ranks, folded = list(other_ranks(events)), folded_ranks(events)
    used = {event.lane for event in events}
    engines = sorted(used - {*LANES, *ranks}, key=natural)
    fixed = [lane for name in LANES for lane in (name, *(ranks if name == LEARNER else ())) if lane in used]
    lanes = [*fixed, *engines]
    names = list(dict.fromkeys(event.name for event in events))
    nodes = list(dict.fromkeys(event.node for event in events))
    lane_of, name_of, node_of = ({key: number for number, key in enumerate(found)} for found in (lanes, names, nodes))
    columns: dict[str, list[float]] = {
        "lane": [lane_of[event.lane] for event in events],
        "row": rows_of(events),
        "name": [name_of[event.name] for event in events],
        "node": [node_of[event.node] for event in events],
        "start": [round(1000 * event.start, 1) for event in events],
        "length": [round(1000 * (event.end - event.start), 1) for event in events],
        "iteration": [event.iteration for event in events],
        "busy": [round(event.busy_seconds, 3) for event in events],
    }
    for name in ("requests", "samples", "tokens", "engines"):
        columns[name] = [getattr(event, name) for event in events]
    marks = [[round(1000 * at, 1), iteration, round(seconds, 1)] for at, iteration, seconds in breaks]
    of_ranks = {"ranks": [lane_of[lane] for lane in ranks], "folded": [lane_of[lane] for lane in folded]}
    texts = {"lanes": lanes, "fixed": len(fixed), "names": names, "nodes": nodes}
    return {**texts, **of_ranks, "events": columns, "breaks": marks}


def without_breaks(events: Sequence[TimelineEvent]) -> tuple[list[TimelineEvent], list[tuple[float, int, float]]]:
    """Return the events with times in seconds since the first of them, the hours in which no program ran left out; and
    (time, iterations done, seconds left out or shown) of every start but the first."""
    parts: list[list[TimelineEvent]] = []
    for event in events:
        if not parts or (event.lane, event.name) == (RUN, START):
            parts.append([])
        parts[-1].append(event)
    shown: list[TimelineEvent] = []
    breaks = []
    end = real_end = 0.0
    for number, part in enumerate(parts):
        begin = min(event.start for event in part)
        pause = max(begin - real_end, 0.0) if number else 0.0
        at = end + min(pause, _BREAK_SECONDS)
        if number:
            breaks.append((at, part[0].iteration, pause))
        for event in part:
            changes = {"start": event.start - begin + at, "end": event.end - begin + at}
            shown.append(TimelineEvent(**{**vars(event), **changes}))
        real_end = max(event.end for event in part)
        end = max(event.end for event in shown)
    return shown, breaks


def rows_of(events: Sequence[TimelineEvent]) -> list[float]:
    """Return for events in the order of their starts the row of each within its lane: one below where it overlaps."""
    ends: dict[str, list[float]] = {}
    rows: list[float] = []
    for event in events:
        lane = ends.setdefault(event.lane, [])
        row = next((row for row, end in enumerate(lane) if end <= event.start + 1e-3), len(lane))
        row = min(row, _MOST_ROWS - 1)
        if event.end > event.start:
            lane[row : row + 1] = [event.end]
        rows.append(0 if event.end == event.start else row)
    return rows
