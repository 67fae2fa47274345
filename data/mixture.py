"""How much of each source goes into a mixture, and which of its rows: pure functions of names, sizes and a seed.

An amount is a share of the source where it is written with a dot (0.5: half of the rows, 1.0: each once, 2.5: each
twice and half of them a third time), a number of rows where it is a whole number (1 is *one row*). Rows that are drawn
only in part are drawn without replacement by (seed, name), so that no other source changes them.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from espalier.data.records import BadInput

_FEW, _MANY = 10, 100


@dataclass(frozen=True)
class Source:
    """One source of a mixture: a local file (`path`: JSON lines, JSON, Parquet) or a data set of the hub (`hub`, with
    its `config` and a pinned `revision`), its `split`, and how much of it."""

    name: str
    amount: float | int
    path: str = ""
    hub: str = ""
    config: str = ""
    revision: str = ""
    split: str = "train"
    verifier: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_share(self) -> bool:
        """Whether the amount is a share of the rows, not a number of them."""
        return isinstance(self.amount, float)


def read_source(node: Any) -> Source:
    """Return a source of a config. Raises BadInput, naming the key, on what is none."""
    if not isinstance(node, Mapping):
        raise BadInput(f"stage.sources: a source has name, amount and path or hub, got {str(node)[:60]!r}")
    known = {one.name for one in fields(Source)}
    place = f"stage.sources, '{node.get('name', '?')}'"
    for key in node:
        if key not in known:
            raise BadInput(f"{place}: there is no key '{key}': it has {', '.join(sorted(known))}")
    for key in ("name", "amount"):
        if node.get(key) in (None, ""):
            raise BadInput(f"{place}: {key} is missing")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", str(node["name"])):
        raise BadInput(f"{place}: a name has letters, digits, '.', '_' and '-': it begins the ids")
    if bool(node.get("path")) == bool(node.get("hub")):
        raise BadInput(f"{place}: give either path (a file) or hub (a data set's name)")
    amount = node["amount"]
    if isinstance(amount, bool) or not isinstance(amount, int | float) or amount <= 0:
        raise BadInput(f"{place}: amount must be a share (0.5, 1.0) or a number of rows (200), got {amount!r}")
    return Source(**{str(key): value for key, value in node.items()})


def draw_rows(source: Source, num_rows: int, seed: int) -> list[int]:
    """Return indices of rows, in file order, each repetition behind the one before; as many as the amount says.

    Raises BadInput where that is none.
    """
    wanted = round(source.amount * num_rows) if source.is_share else int(source.amount)
    if wanted < 1 or num_rows < 1:
        raise BadInput(f"stage.sources, '{source.name}': {source.amount} of {num_rows} rows is none")
    repeats, rest = divmod(wanted, num_rows)
    drawn = random.Random(f"mixture/{seed}/{source.name}").sample(range(num_rows), rest)
    return [*range(num_rows)] * repeats + sorted(drawn)


def amount_warning(source: Source, num_rows: int) -> str:
    """Return a line about a whole number that was probably meant as a share, "" where there is none to say."""
    if source.is_share or source.amount > _FEW or num_rows <= _MANY:
        return ""
    return (f"source '{source.name}': amount {source.amount} takes {source.amount} of {num_rows} rows; "
            f"{float(source.amount)} would be {source.amount} times all")  # fmt: skip
