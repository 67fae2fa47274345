"""What an iteration measures on its way: the seconds of its phases, and numbers by their names in docs/metrics.md."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from espalier.rl.timeline import Timeline


class Clock:
    """Seconds of phases. A phase that begins within another one pauses it: every second counts once, for the
    innermost. `on_part` hears of every part of a phase: its name, begin and end, of `time.monotonic()`."""

    def __init__(self, on_part: Callable[[str, float, float], None] | None = None) -> None:
        self._on_part = on_part
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block for this phase."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def has(self, name: str) -> bool:
        """Say whether this phase has ended since its seconds were last taken."""
        return name in self._seconds

    def take(self, name: str = "") -> dict[str, float]:
        """Return `seconds/{phase}` of one phase ("": of all), which count from 0 again."""
        names = [name] if name else list(self._seconds)
        return {f"seconds/{phase}": self._seconds.pop(phase) for phase in names}

    def move(self, name: str, other: str, seconds: float) -> None:
        """Count so many seconds of the phase `name`, at most all of them, for `other` instead."""
        moved = min(seconds, self._seconds.get(name, 0.0))
        self._seconds[name] = self._seconds.get(name, 0.0) - moved
        self._seconds[other] = self._seconds.get(other, 0.0) + moved

    def _count(self) -> None:
        now = time.monotonic()
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

    def add(self, values: Mapping[str, float], prefix: str = "") -> None:
        """Keep `values` as `{prefix}{name}`."""
        self._values |= {f"{prefix}{name}": value for name, value in values.items()}

    def take(self) -> dict[str, float]:
        """Return all of it, seconds too, and begin anew."""
        values, self._values = self._values, {}
        return values | self.clock.take()
