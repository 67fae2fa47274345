"""What a part of the GPU check finds: rows of a table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`value` None: it was not measured, and `note` says why."""

    figure: str
    value: float | None
    unit: str = ""
    note: str = ""
