"""Problems and steps → scores of a published model: one forward pass per solution, read at the places of its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from espalier.data.batches.packing import Layout, in_batches, place_rows
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.models.inputs import model_inputs
from espalier.models.logits import one_by_one, reads_at
from espalier.models.logprobs import head_answers, plain_head
from espalier.models.packing_check import packing_of
from espalier.models.published.layouts import Reading
from espalier.models.published.reads import Read
from espalier.models.published.table import POLICIES, PublishedPRM
from espalier.models.token_scores import MAX_SCORES

_DIGITS = 6


@dataclass(frozen=True)
class Solution:
    """A problem and the steps of a solution, as text. Errors call it by its `name`."""

    name: str
    question: str
    steps: Sequence[str]


@dataclass(frozen=True)
class PublishedScorer:
    """A loaded model, its tokenizer and its row of the table. `dtype` of the passes: bfloat16, or float32."""

    model: Any
    tokenizer: Any
    row: PublishedPRM
    dtype: torch.dtype = torch.bfloat16

    def read(self, solution: Solution) -> Reading:
        """Return the model's row of a solution with a step at least. Raises BadInput, with the solution's name."""
        try:
            return self.row.layout(self.tokenizer, solution.question, solution.steps)
        except BadInput as error:
            raise BadInput(f"{solution.name}: {error}") from None

    def scores(
        self,
        solutions: Sequence[Solution],
        batch_tokens: int = 16384,
        on_progress: Callable[[int], None] = lambda done: None,
        on_too_long: Callable[[str], None] | None = None,
    ) -> list[list[float]]:
        """Return a score in [0, 1] for every step of every solution, in order; `on_progress` gets the number of
        solutions done. Raises BadInput for one that cannot be read, BadModel for another model. One that is longer than
        the model's positions is refused too, or, with `on_too_long`, said to it and left without scores."""
        readings = [self.read(one) if one.steps else Reading([], []) for one in solutions]
        readings = [self._fitting(*pair, on_too_long) for pair in zip(solutions, readings, strict=True)]
        if self.row.network == POLICIES:
            rows = [
                StepTokens(r.ids[: r.start], r.ids[r.start :], [place + 1 - r.start for place in r.places], one.name)
                for r, one in zip(readings, solutions, strict=True)
            ]
            found: list[list[float]] = self.model.scores(rows, max(1, batch_tokens // 2), on_progress)
            return found
        scores: dict[int, list[float]] = {index: [] for index, r in enumerate(readings) if not r.places}
        asked = [index for index, r in enumerate(readings) if r.places]
        for batch in in_batches([readings[index].ids for index in asked], self._is_packed(readings), batch_tokens):
            places = [asked[number] for number in batch]
            scores |= zip(places, self._pass([readings[place] for place in places]), strict=True)
            on_progress(len(scores))
        return [scores[index] for index in range(len(solutions))]

    def _is_packed(self, readings: Sequence[Reading]) -> bool:
        longest = max((len(reading.ids) for reading in readings), default=0)
        return packing_of(self.model).choice_for(longest) == "packed"

    def _fitting(self, one: Solution, reading: Reading, on_too_long: Callable[[str], None] | None) -> Reading:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is None or len(reading.ids) <= limit:
            return reading
        message = f"{one.name}: {len(reading.ids)} tokens, and the model has {limit} positions"
        if on_too_long is None:
            raise BadInput(f"{message}: leave it out")
        on_too_long(message)
        return Reading([], [])

    @torch.inference_mode()
    def _pass(self, readings: Sequence[Reading]) -> list[list[float]]:
        """Return the scores of a batch."""
        device = next(self.model.parameters()).device
        rows = [reading.ids for reading in readings]
        is_packed = self._is_packed(readings)
        placed = place_rows(rows, Layout("shared" if is_packed else "padded", int(self.tokenizer.pad_token_id)))
        inputs = {name: v.to(device) if torch.is_tensor(v) else v for name, v in model_inputs(placed).items()}
        positions = torch.cat(
            [path[torch.tensor(r.places)] for path, r in zip(placed.paths, readings, strict=True)]
        ).to(device)  # fmt: skip
        with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            read = read_at(self.model, inputs, positions, self.row.read, self.tokenizer)
        numbers = iter([round(float(value), _DIGITS) for value in read])
        return [[next(numbers) for _ in reading.places] for reading in readings]


def read_at(model: Any, inputs: dict[str, Any], positions: torch.Tensor, read: Read, tokenizer: Any) -> torch.Tensor:
    """Return scores [R] at positions of the flattened batch. Of a causal LM logits are made there alone, and of a part
    of the positions at a time."""

    def scores(logits: torch.Tensor) -> torch.Tensor:
        return read.scores(logits.float(), tokenizer)

    alone, length = one_by_one(model, inputs), inputs["input_ids"].shape[1]
    if alone:  # rows come in order, and so do their positions
        parts = [
            scores(model(**row).logits[0].index_select(0, positions[positions // length == number] % length))
            for number, row in enumerate(alone)
        ]
        return torch.cat(parts)
    head = plain_head(model)
    given = inputs | reads_at(model, inputs, positions)
    if head is None:
        return scores(model(**given).logits.flatten(0, 1).index_select(0, positions))

    def answer(read_hidden: torch.Tensor) -> torch.Tensor:
        size = max(1, MAX_SCORES[read_hidden.device.type] // head.weight.shape[0])
        with torch.autocast(read_hidden.device.type, enabled=False):  # in bf16 two logits differ in coarse steps
            bias = None if head.bias is None else head.bias.float()
            parts = [scores(linear(part.float(), head.weight.float(), bias)) for part in read_hidden.split(size)]
        return torch.cat(parts).unsqueeze(-1)

    with head_answers(head, positions, answer):
        found: torch.Tensor = model(**given).logits.flatten()
    return found
