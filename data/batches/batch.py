"""A batch as a model and a loss take it: where its tokens lie (`data.batches.packing`), and what a loss reads there.

Places are numbers into the flattened ids, so that no objective knows the layout.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from espalier.data.batches.packing import Segments


@dataclass
class Batch:
    """`ids`, `attention_mask`, `position_ids`, `segments`: what the model takes (`data.batches.packing.PlacedRows`).

    **Targets** [R] are the response tokens whose log-probs a loss reads: `targets` their ids, `target_rows` the rows
    they belong to, `target_places` where the token *before* each lies, `target_weights` their weights (float32,
    never 0). **Reads** [P] are what a scalar head is read at, the step ends of process rewards and the last tokens of
    outcomes and of both sides of pairs: `read_places`, with `values` and `weights` (float32).

    `num_rows`: a pair takes two, chosen in row 2i and rejected in row 2i + 1. `num_tokens` of all rows, shared
    ones counted in each. `margins` are those of pairs. `row_keys` name the rows by content. `mismatched` holds
    the responses to other prompts.
    """

    example_ids: list[str]
    num_rows: int
    num_tokens: int
    ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    segments: Segments | None
    targets: torch.Tensor
    target_rows: torch.Tensor
    target_places: torch.Tensor
    target_weights: torch.Tensor
    read_places: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    margins: torch.Tensor
    row_keys: list[str]
    mismatched: "Batch | None" = None

    def to(self, device: torch.device) -> Self:
        """Return the same batch on another device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            has_tensors = torch.is_tensor(value) or isinstance(value, Batch)
            moved[field.name] = value.to(device) if has_tensors else value
        return type(self)(**moved)

    def row_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return sums [rows] over the targets [R] of each row."""
        return values.new_zeros(self.num_rows).index_add(0, self.target_rows, values)

    def row_lengths(self) -> torch.Tensor:
        """Return targets of each row [rows]."""
        return torch.bincount(self.target_rows, minlength=self.num_rows)
