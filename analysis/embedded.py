"""Data inside a page: packed so that a page of 100,000 completions stays small and opens at once.

A block is JSON, compressed (gzip) and written in base64: no text of a model is in the page as such, so none can
end an element or begin one. The script unpacks a block when a trajectory in it is opened, not before; browsers have
known how since 2023 (DecompressionStream), also for a page opened from disk.

Trajectories of one problem are in one block with the completions of their states, each state once.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.analysis.flags import KINDS, Suspicion, largest_gap, largest_jump, widest
from espalier.analysis.inspected import Inspected
from espalier.analysis.markup import Markup, printable, tag
from espalier.data.records import Completion
from espalier.pipeline.values.step_statistics import impossible_patterns
from espalier.values.monte_carlo import StateKey

BLOCK_CHARACTERS = 400_000


def pack(value: Any) -> str:
    """JSON → gzip → base64; the same bytes for the same value."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")


def block(name: str, packed: str) -> Markup:
    """Return an element that holds a block; browsers neither run nor show it."""
    return tag("script", Markup(packed), type="application/gzip", id=name)


@dataclass(frozen=True)
class Cap:
    """What is left out of a page; 0 is no cap. Texts are cut after `max_characters`. Trajectories beyond
    `max_megabytes` are shown without their completions."""

    max_trajectories: int
    max_completions: int
    max_characters: int
    max_megabytes: float

    def cut(self, text: str) -> str:
        """Return the text as a page can show it, or its beginning and how much is missing."""
        text = printable(text)
        if not self.max_characters or len(text) <= self.max_characters:
            return text
        return f"{text[: self.max_characters]} … ({len(text) - self.max_characters:,} more characters)"


@dataclass
class Embedded:
    """Blocks of trajectories, and the index that finds, filters and sorts them (a list for every column)."""

    cap: Cap
    blocks: list[str] = field(default_factory=list)
    index: dict[str, list[Any]] = field(default_factory=dict)
    num_completions: int = 0
    num_left_out: int = 0
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _states: dict[StateKey, list[Any]] = field(default_factory=dict)
    _numbers: dict[StateKey, int] = field(default_factory=dict)
    _size: int = 0

    def add(
        self,
        row: Inspected,
        found: Sequence[Suspicion],
        completions: Mapping[StateKey, Sequence[Completion]],
        is_new_problem: bool,
    ) -> None:
        """One more trajectory; a problem begins a new block where the last one is full."""
        if is_new_problem and self._size > BLOCK_CHARACTERS:
            self.close_block()
        detail = self._detail(row, found, completions)
        self._add_to_index(row, found)
        self._rows.append(detail)
        self._size += len(row.trajectory.prompt) + len(row.trajectory.response)

    def close_block(self) -> None:
        """Pack what has been added since the last block."""
        if self._rows:
            self.blocks.append(pack({"rows": self._rows, "states": list(self._states.values())}))
        self._rows, self._states, self._numbers, self._size = [], {}, {}, 0

    @property
    def num_bytes(self) -> int:
        """Of the blocks that are closed."""
        return sum(map(len, self.blocks))

    def _is_full(self) -> bool:
        """Say whether there is no room for more completions."""
        return 0 < self.cap.max_megabytes * 1e6 <= self.num_bytes

    def _state(self, key: StateKey, completions: Mapping[StateKey, Sequence[Completion]]) -> int | None:
        """Return the number of a state's completions in this block."""
        if key not in completions:
            return None
        if key not in self._numbers:
            rows = completions[key]
            kept = rows[: self.cap.max_completions] if self.cap.max_completions else rows
            kept = [] if self._is_full() else kept
            self._numbers[key] = len(self._states)
            self._states[key] = [
                [int(one.is_correct), self.cap.cut(one.response), _shown(one.answer), printable(one.finish_reason)]
                for one in kept
            ]
            self._size += sum(len(one.response) for one in kept)
            self.num_completions += len(kept)
            self.num_left_out += len(rows) - len(kept)
        return self._numbers[key]

    def _detail(
        self, row: Inspected, found: Sequence[Suspicion], completions: Mapping[StateKey, Sequence[Completion]]
    ) -> dict[str, Any]:
        one, steps = row.trajectory, row.steps
        states = [self._state(key, completions) for key in row.states] or [None] * len(one.steps)
        nothing: list[float | None] = [None] * len(one.steps)
        table = zip(
            map(self.cap.cut, one.steps),
            map(_rounded, steps.values),
            map(_rounded, steps.low),
            map(_rounded, steps.high),
            steps.num_correct,
            steps.num_completions,
            map(_rounded, steps.labels),
            map(_rounded, steps.weights),
            map(_rounded, row.scores or nothing),
            map(_rounded, row.verdicts or nothing),
            [*states[1:], None],
            strict=True,
        )
        return {
            "prompt": self.cap.cut(one.prompt),
            "gold": self.cap.cut(one.gold if isinstance(one.gold, str) else " | ".join(map(str, one.gold))),
            "answer": _shown(one.answer),
            "finish": printable(one.finish_reason),
            "promptValue": _rounded(steps.prompt_value),
            "promptState": states[0] if states else None,
            "why": [[list(KINDS).index(one.kind), one.step, self.cap.cut(one.why)] for one in found],
            "steps": [list(line) for line in table] if one.steps else [],
        }

    def _add_to_index(self, row: Inspected, found: Sequence[Suspicion]) -> None:
        kinds = list(KINDS)
        chances = [pattern["chance"] for pattern in impossible_patterns(row.steps)]
        columns = {
            "id": printable(row.trajectory.id),
            "right": int(row.trajectory.is_correct),
            "kinds": sum(1 << kinds.index(kind) for kind in {one.kind for one in found}),
            "steps": len(row.trajectory.steps),
            "length": row.length,
            "values": [_rounded(value) for value in row.steps.values],
            "chance": min(chances, default=2.0),
            "jump": _rounded(abs(largest_jump(row.steps.values)[1])),
            "width": _rounded(widest(row)[1]),
            "prm": _rounded(abs(largest_gap(row.targets(), row.scores)[1])),
            "judge": _rounded(abs(largest_gap(row.targets(), row.verdicts)[1])),
            "block": len(self.blocks),
            "place": len(self._rows),
        }
        for name, value in columns.items():
            self.index.setdefault(name, []).append(value)


def _rounded(value: float | None) -> float | None:
    """Round to three decimals: more than a completion is worth."""
    return None if value is None else round(value, 3)


def _shown(answer: str | None) -> str | None:
    return None if answer is None else printable(answer)
