"""The most probable next lines of a response, with their exact probabilities under a network.

From a state the next line is spelled token by token, over the whole vocabulary. After each token the least probable
beginnings are given up, together less than `line_mass` of a line's probability; every other line is found. All states
of a call go through the network together, and what their beginnings have in common is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from espalier.data.records import BadInput
from espalier.data.steps import Decoder
from espalier.models.evaluating import evaluating
from espalier.values.exact.cached_rows import CachedRows, check_cache, join_rows

_BATCH_STATES = 96
# What one token may always give up of a line's allowed loss: too little to be looked at one by one.
_NEGLIGIBLE = 1e-3
# Of what may still be given up of a line, what one token may use up: so that later tokens have about the same.
_SHARE = 1 / 8


@dataclass(frozen=True)
class Line:
    """A line that may follow, or what is left of the response: its tokens and their probability.

    `ending`: "line" after a newline, "end" after an end token, "cut" where the response has no room for another token.
    """

    ids: tuple[int, ...]
    probability: float
    ending: str


@dataclass(frozen=True)
class LineStart:
    """A state that lines begin in: all its tokens, and how many may follow."""

    ids: tuple[int, ...]
    room: int


@dataclass
class _Partials:
    """Beginnings of lines, P of them, and the logits [P, V] behind each."""

    state: np.ndarray
    mass: np.ndarray
    ids: list[tuple[int, ...]]
    is_blank: np.ndarray
    logits: torch.Tensor
    rows: CachedRows


class LineSearch:
    """Finds lines under `network` (a transformers model), which it calls in evaluation mode and float32.

    `max_width`: beginnings of one state that are followed beside one another, at most; where it is reached, more than
    `line_mass` may be given up. Raises BadInput on settings out of range, and where the network's cache is not exact.
    """

    def __init__(
        self,
        network: Any,
        decode: Decoder,
        end_ids: Sequence[int],
        temperature: float,
        line_mass: float,
        max_width: int,
    ):
        if not 0 < line_mass < 1:
            raise BadInput(f"line_mass must be between 0 and 1, got {line_mass:g}")
        if max_width < 1 or temperature <= 0:
            raise BadInput(f"max_width must be at least 1 and temperature above 0, got {max_width} and "
                           f"{temperature:g}")  # fmt: skip
        self.network, self.temperature = network, temperature
        self.line_mass, self.max_width = line_mass, max_width
        pieces = [decode.piece(token) for token in range(int(network.config.vocab_size))]
        self._is_end = np.isin(np.arange(len(pieces)), list(end_ids))
        self._has_newline = np.array(["\n" in piece for piece in pieces])
        self._is_blank = np.array([not piece.strip() for piece in pieces])
        self._kept: dict[tuple[int, ...], tuple[CachedRows, int]] = {}
        self._checked = 0  # the longest row for which kept keys and values were found to be right

    def __call__(self, starts: Sequence[LineStart]) -> list[list[Line]]:
        """Return the lines that may follow each state, the most probable first.

        The keys and values of these states are kept for the next call.
        """
        order = sorted(range(len(starts)), key=lambda number: len(starts[number].ids))
        lines: list[list[Line]] = [[] for _ in starts]
        kept: dict[tuple[int, ...], tuple[CachedRows, int]] = {}
        with evaluating(self.network):
            for first in range(0, len(order), _BATCH_STATES):
                batch = order[first : first + _BATCH_STATES]
                for number, found in zip(batch, self._search([starts[n] for n in batch], kept), strict=True):
                    lines[number] = sorted(found, key=lambda line: -line.probability)
        self._kept = kept
        return lines

    def forget(self) -> None:
        """Let go of the kept keys and values."""
        self._kept = {}

    def _search(
        self, starts: Sequence[LineStart], kept: dict[tuple[int, ...], tuple[CachedRows, int]]
    ) -> list[list[Line]]:
        longest = max(len(start.ids) + start.room for start in starts)
        if longest > self._checked:
            check_cache(self.network, starts[0].ids, longest)
            self._checked = longest
        logits, rows = self._read([start.ids for start in starts])
        kept |= {start.ids: (rows, number) for number, start in enumerate(starts)}
        num = len(starts)
        partials = _Partials(np.arange(num), np.ones(num), [()] * num, np.ones(num, dtype=bool), logits, rows)
        rooms = np.array([start.room for start in starts])
        lost = np.zeros(num)
        lines: list[list[Line]] = [[] for _ in starts]
        while True:
            row, token, mass = self._likely(partials, lost)
            going = []
            for at, (r, t) in enumerate(zip(row.tolist(), token.tolist(), strict=True)):
                state, ids = int(partials.state[r]), (*partials.ids[r], t)
                is_line = self._has_newline[t] and not (partials.is_blank[r] and self._is_blank[t])
                if self._is_end[t] or is_line or len(ids) >= rooms[state]:
                    ending = "end" if self._is_end[t] else "cut" if len(ids) >= rooms[state] else "line"
                    lines[state].append(Line(ids, float(mass[at]), ending))
                else:
                    going.append(at)
            if not going:
                return lines
            row, token, mass = row[going], token[going], mass[going]
            logits, rows = partials.rows.pick(torch.from_numpy(row)).extend(self.network, token[:, None].tolist())
            ids_of = [(*partials.ids[r], t) for r, t in zip(row.tolist(), token.tolist(), strict=True)]
            blank = partials.is_blank[row] & self._is_blank[token]
            partials = _Partials(partials.state[row], mass, ids_of, blank, logits, rows)

    def _likely(self, partials: _Partials, lost: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row, token, probability so far) of the next tokens that are followed; adds to `lost`, of every state,
        what is not."""
        probs = torch.softmax(partials.logits.double() / self.temperature, dim=-1).cpu().numpy()
        masses = partials.mass[:, None] * probs
        allowed = np.maximum((self.line_mass - lost) * _SHARE, self.line_mass * _NEGLIGIBLE)
        looked_at = allowed / np.maximum(1, np.bincount(partials.state, minlength=len(lost))) / probs.shape[1]
        row, token = np.nonzero(masses > looked_at[partials.state][:, None])  # the others are together within `allowed`
        mass, state = masses[row, token], partials.state[row]
        before = np.bincount(partials.state, partials.mass, len(lost))
        order = np.lexsort((mass, state))  # of every state the least probable first
        row, token, mass, state = row[order], token[order], mass[order], state[order]
        sums, counts = np.cumsum(mass), np.bincount(state, minlength=len(lost))
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        sums -= np.concatenate([[0.0], sums])[starts][state]
        allowed -= before - np.bincount(state, mass, len(lost))
        rank = counts[state] - 1 - (np.arange(len(mass)) - starts[state])  # 0: the most probable
        is_kept = (sums > allowed[state]) & (rank < self.max_width)
        row, token, mass, state = row[is_kept], token[is_kept], mass[is_kept], state[is_kept]
        lost += before - np.bincount(state, mass, len(lost))
        return row, token, mass

    def _read(self, prefixes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, CachedRows]:
        """Return (logits [N, V] behind the prefixes, their rows), from the longest beginnings that are kept."""
        lengths = sorted({len(ids) for ids in self._kept}, reverse=True)
        known = [next((n for n in lengths if n < len(ids) and ids[:n] in self._kept), 0) for ids in prefixes]
        by_source: dict[int, tuple[CachedRows | None, list[int], list[int]]] = {}  # (rows, which of them, for whom)
        for own, (ids, num) in enumerate(zip(prefixes, known, strict=True)):
            rows, number = self._kept[ids[:num]] if num else (None, 0)
            _, numbers, owners = by_source.setdefault(id(rows), (rows, [], []))
            numbers.append(number)
            owners.append(own)
        parts = [CachedRows.empty(len(numbers)) if rows is None else rows.pick(torch.tensor(numbers))
                 for rows, numbers, _ in by_source.values()]  # fmt: skip
        order = torch.tensor([own for _, _, owners in by_source.values() for own in owners]).argsort()
        joined = join_rows(parts).pick(order)
        return joined.extend(self.network, [ids[num:] for ids, num in zip(prefixes, known, strict=True)])
