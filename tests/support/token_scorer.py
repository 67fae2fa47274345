"""Engines that score without vLLM: what several tests give a stage or a reward to ask."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from espalier.data.steps import TokenRow
from espalier.models.scalar_head import load_process_reward
from espalier.sampling.client import ServerGone

Logits = list[list[list[float]]]


class Engines:
    """A `TokenScorer` that computes in float32 here, one row a batch; `wrong` makes other logits of them. It is gone
    after `num_rows` rows."""

    max_length = 512
    num_engines = 1

    def __init__(self, num_rows: int = 1000, wrong: Callable[[Logits], Logits] = lambda logits: logits):
        self.num_rows, self.wrong = num_rows, wrong
        self.models: list[str] = []
        self.asked: list[str] = []
        self.is_open = False
        self.shift = 0

    def open(self, model: str, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        assert not self.is_open
        self.models.append(model)
        self.is_open = True
        self.network = load_process_reward(model).eval()

    def close(self) -> None:
        self.is_open = False

    def token_logits(
        self, rows: Sequence[TokenRow], batch_tokens: int, on_batch: Callable[[list[int], Logits], None]
    ) -> None:
        assert self.is_open
        for place in reversed(range(len(rows))):
            if len(self.asked) == self.num_rows:
                raise ServerGone("no engine is left of 2")
            row = rows[place]
            self.asked.append(row.name)
            with torch.no_grad():
                logits = self.network(input_ids=torch.tensor([row.ids])).logits[0]
            read = [min(asked + self.shift, len(row.ids) - 1) for asked in row.places]
            on_batch([place], self.wrong([logits[read].tolist()]))
