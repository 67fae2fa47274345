"""What an iteration measures on its way: the seconds of its phases, and numbers by their names in docs/metrics.md."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from espalier.data.timeline import waiting_for
from espalier.rl.timeline import Timeline

_SHORTEST_WAIT = 0.01  # seconds of one that is a part of its own


class Clock:
    """Seconds of phases. A phase that begins within another one pauses it: every second counts once, for the
    innermost. `on_part` hears of every part of a phase, and of waits for other ranks between and in them: its name,
    begin and end, of `time.monotonic()`."""

    def __init__(self, on_part: Callable[[str, float, float], None] | None = None) -> None:
        self._on_part = on_part
        self._seconds: dict[str, float] = {}
        self._computed: dict[str, float] = {}
        self._called: str | None = None
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block for this phase."""
        self._count(time.monotonic())
        self._open.append(name)
        try:
            yield
        finally:
            self._count(time.monotonic())
            self._open.pop()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as computed by this rank (`take_computed`), for the phase `name` ("": none)
        unless a phase is open."""
        self._called, begun = name, time.monotonic()
        try:
            with self.phase(name) if name and not self._open else nullcontext():
                yield
        finally:
            self._add_computed(time.monotonic() - begun)
            self._called = None

    def _add_computed(self, seconds: float) -> None:
        if self._called is not None:
            self._computed[self._called] = self._computed.get(self._called, 0.0) + seconds

    def wait(self, rank: int, begun: float, ended: float) -> None:
        """Take note that this rank waited for others until `rank`, the last one, came. What phase it was in keeps the
        seconds."""
        self._add_computed(begun - ended)
        if self._on_part is None or ended - begun < _SHORTEST_WAIT:
            return
        if self._open:
            self._count(begun)
            self._seconds[self._open[-1]] += ended - begun
            self._since = ended
        self._on_part(waiting_for(rank), begun, ended)

    @property
    def current(self) -> str:
        """Name the innermost phase, "" outside all."""
        return self._open[-1] if self._open else ""

    def has(self, name: str) -> bool:
        """Say whether this phase has ended since its seconds were last taken."""
        return name in self._seconds

    def take(self, name: str = "") -> dict[str, float]:
        """Return `seconds/{phase}` of one phase ("": of all), which count from 0 again."""
        names = [name] if name else list(self._seconds)
        return {f"seconds/{phase}": self._seconds.pop(phase) for phase in names}

    def take_computed(self, names: Iterable[str]) -> float:
        """Return how long this rank computed in calls of all ranks within these phases, without its waits for others
        there; all phases count from 0 again."""
        computed, self._computed = self._computed, {}
        return sum(computed.get(name, 0.0) for name in names)

    def move(self, name: str, other: str, seconds: float) -> None:
        """Count so many seconds of the phase `name`, at most all of them, for `other` instead."""
        moved = min(seconds, self._seconds.get(name, 0.0))
        self._seconds[name] = self._seconds.get(name, 0.0) - moved
        self._seconds[other] = self._seconds.get(other, 0.0) + moved

    def _count(self, now: float) -> None:
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._since
            if self._on_part is not None:
                self._on_part(self._open[-1], self._since, now)
        self._since = now


@dataclass
class IterationMetrics:
    """What is measured until it is taken: what comes between two iterations belongs to the later one. Phases of `clock`
    are events of `timeline`, where that is open."""

    timeline: Timeline = field(default_factory=Timeline)
    clock: Clock = field(init=False)
    _values: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.timeline.add_phase)

    def wait(self, rank: int, begun: float, ended: float) -> None:
        """Take note of a wait of this rank for others, of whom `rank` came last."""
        self.clock.wait(rank, begun, ended)
        self.timeline.meetings.append(ended)

    def add(self, values: Mapping[str, float], prefix: str = "") -> None:
        """Keep `values` as `{prefix}{name}`."""
        self._values |= {f"{prefix}{name}": value for name, value in values.items()}

    def take(self) -> dict[str, float]:
        """Return all of it, seconds too, and begin anew."""
        values, self._values = self._values, {}
        return values | self.clock.take()
