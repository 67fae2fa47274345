"""The budget of a chat API: what may be spent and what is spent, kept beside the output so that a resume goes on.

`X.budget.jsonl` is append-only. Its first line names the model that is asked; before an attempt leaves, its worst case
is written down (`sent`), and afterwards what it came to (`billed`) or that the API does not charge it (`free`). An
attempt with neither line (the run was killed, the connection broke after the request had left) counts with its
worst case: what is counted as spent may be too high, never too low.

The worst case of an attempt: every byte of the messages a token (no byte-level tokenizer makes more of them) and
`OVERHEAD_TOKENS` for the API's own frame, all at the full price, and n answers of `max_tokens`.
"""

import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import cut_torn_tail, iter_rows
from espalier.data.records import BadInput
from espalier.sampling.client import BudgetSpent

OVERHEAD_TOKENS = 64
_PER_MESSAGE = 8
_MILLION = 1_000_000


@dataclass(frozen=True)
class Charge:
    """Tokens of one attempt, or of many; `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )

    def __sub__(self, other: "Charge") -> "Charge":
        return Charge(
            self.prompt_tokens - other.prompt_tokens,
            self.cached_tokens - other.cached_tokens,
            self.completion_tokens - other.completion_tokens,
            self.cost - other.cost,
        )


@dataclass(frozen=True)
class Prices:
    """Money for 1,000,000 tokens, in any one currency; `cached` null: what is read from a cache costs `prompt`."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached"):
            price = getattr(self, name)
            if price is not None and not 0 <= price < math.inf:
                raise BadInput(f"client.{name}_price must be at least 0 (money for 1,000,000 tokens), got {price}")

    def charge(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Charge:
        """Return what so many tokens cost."""
        cached = self.prompt if self.cached is None else self.cached
        cost = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * cached
        cost = (cost + completion_tokens * self.completion) / _MILLION
        return Charge(prompt_tokens, cached_tokens, completion_tokens, cost)

    def worst_case(self, messages: Sequence[Mapping[str, str]], num_samples: int, max_tokens: int) -> Charge:
        """Return the most that a request can cost."""
        size = sum(len(part.encode(errors="surrogatepass")) for row in messages for part in row.values())
        prompt_tokens = size + _PER_MESSAGE * len(messages) + OVERHEAD_TOKENS
        worst = self.charge(prompt_tokens, num_samples * max_tokens)
        dearest = max(self.prompt, self.cached or 0.0)
        return Charge(prompt_tokens, 0, worst.completion_tokens,
                      (prompt_tokens * dearest + worst.completion_tokens * self.completion) / _MILLION)  # fmt: skip


class Budget:
    """Args: `path` of the file, "" keeps it in memory; `asked` is what must not change between two runs of one output
    (the model, the system message); `max_tokens` and `max_cost` cap all runs together, null: no cap."""

    def __init__(
        self, path: str, asked: Mapping[str, str], max_tokens: int | None = None, max_cost: float | None = None
    ):
        self.path = Path(path) if path else None
        self.asked = dict(asked)
        self.max_tokens, self.max_cost = max_tokens, max_cost
        self.spent = Charge()  # billed, and worst cases of attempts whose end is not known
        self.unknown = Charge()  # the part of `spent` that is worst cases
        self.open: dict[int, Charge] = {}
        self.num_attempts = 0
        self.num_billed = 0
        self._file: Any = None
        self._settled = asyncio.Event()

    def begin(self) -> None:
        """Read what is spent already. Raises BadInput where that is of another model or torn in the middle, and where
        it stands under the old name of the file (`X.bill.jsonl`) alone."""
        if self.path is None:
            return
        old = self.path.with_name(f"{self.path.name.removesuffix('.budget.jsonl')}.bill.jsonl")
        if not self.path.exists() and old.is_file():
            raise BadInput(f"{old}: what this output has cost so far, under an old name: rename it to {self.path.name}")
        cut_torn_tail(self.path)
        is_new = not self.path.is_file() or not self.path.stat().st_size
        if not is_new:
            self._read(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="ascii")
        if is_new:
            self._write({"kind": "asked", **self.asked})

    def _read(self, path: Path) -> None:
        charges: dict[int, Charge] = {}
        known: set[int] = set()
        for place, row in iter_rows(path):
            try:
                kind = row.pop("kind")
                if kind == "asked":
                    self._check_asked(row)
                    continue
                number = row.pop("attempt")
                row.pop("id", None)
                if kind == "sent":
                    charges[number] = Charge(**row)
                elif kind in ("billed", "free") and number in charges:
                    charges[number] = Charge(**row)
                    known.add(number)
                    self.num_billed += kind == "billed"
                else:
                    raise ValueError(kind)
            except (KeyError, TypeError, ValueError) as error:
                if isinstance(error, BadInput):
                    raise
                raise BadInput(f"{place}: not a line of a budget: correct it, or choose another output") from None
        self.num_attempts = max(charges, default=0)
        self.spent = sum(charges.values(), Charge())
        self.unknown = sum((charge for number, charge in charges.items() if number not in known), Charge())

    def _check_asked(self, stored: dict[str, Any]) -> None:
        for name, value in self.asked.items():
            if stored.get(name) != value:
                raise BadInput(f"{self.path}: {name} was {stored.get(name)!r}, now {value!r}: choose another output")

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self._file.flush()

    def fits(self, charge: Charge) -> bool:
        """Say whether both caps hold even if everything in flight, and this, comes to its worst case."""
        total = sum(self.open.values(), self.spent) + charge
        tokens_fit = self.max_tokens is None or total.tokens <= self.max_tokens
        return tokens_fit and (self.max_cost is None or total.cost <= self.max_cost * (1 + 1e-12))

    async def reserve(self, request_id: str, worst: Charge) -> int:
        """Return the number of an attempt that may leave now; wait while what is in flight may turn out cheaper.

        Raises BudgetSpent where nothing is in flight and the worst case does not fit.
        """
        while not self.fits(worst):
            if not self.open:
                raise BudgetSpent(f"{self.describe()}: the next request may take {worst.tokens} tokens and cost "
                                  f"{worst.cost:.6g}, which is over {self.caps()}: what was written is kept; raise the "
                                  "cap and run the same command to go on")  # fmt: skip
            self._settled.clear()
            await self._settled.wait()
        self.num_attempts += 1
        self.open[self.num_attempts] = worst
        self._write({"kind": "sent", "attempt": self.num_attempts, "id": request_id, **vars(worst)})
        return self.num_attempts

    def settle(self, number: int, charge: Charge | None) -> None:
        """An attempt came to `charge`; None: nobody knows, its worst case counts."""
        worst = self.open.pop(number)
        self.spent += worst if charge is None else charge
        if charge is None:
            self.unknown += worst
        else:
            is_free = charge == Charge()
            self.num_billed += not is_free
            self._write({"kind": "free" if is_free else "billed", "attempt": number, **vars(charge)})
        self._settled.set()

    def caps(self) -> str:
        """Return the caps in words."""
        parts = [f"client.max_total_tokens={self.max_tokens}"] if self.max_tokens is not None else []
        parts += [f"client.max_cost={self.max_cost:g}"] if self.max_cost is not None else []
        return " and ".join(parts) or "no cap"

    def describe(self) -> str:
        """Return one line with the numbers."""
        line = (f"{self.num_billed} answers billed, {self.spent.prompt_tokens} prompt tokens "
                f"({self.spent.cached_tokens} cached) and {self.spent.completion_tokens} of answers, "
                f"cost {self.spent.cost:.6g}")  # fmt: skip
        if self.unknown.tokens:
            line += f", of these {self.unknown.tokens} tokens ({self.unknown.cost:.6g}) worst cases of lost attempts"
        return line

    def close(self) -> None:
        """Attempts still open have no known end."""
        for number in list(self.open):
            self.settle(number, None)
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
