"""Problems and steps → scores of a published model: one forward pass per solution, read at the places of its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from espalier.data.batches.packing import Layout, in_batches, place_rows
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.models.inputs import model_inputs
from espalier.models.load import positions_of
from espalier.models.logits import one_by_one, reads_at
from espalier.models.logprobs import head_answers, plain_head
from espalier.models.packing_check import packing_of
from espalier.models.precision import AUTO, autocast
from espalier.models.published.reads import Read
from espalier.models.published.table import POLICIES, PublishedPRM
from espalier.models.token_scores import most_scores

_DIGITS = 6


@dataclass(frozen=True)
class Solution:
    """A problem and the steps of a solution, as text. Errors call it by its `name`."""

    name: str
    question: str
    steps: Sequence[str]


@dataclass(frozen=True)
class PublishedScorer:
    """A loaded model, its tokenizer and its row of the table. `precision` of the passes: `models.precision`."""

    model: Any
    tokenizer: Any
    row: PublishedPRM
    precision: str = AUTO

    def read(self, solution: Solution) -> StepTokens:
        """Return the model's row of a solution, without steps where it has none. Raises BadInput, with its name."""
        return read_as(self.row, self.tokenizer, solution)

    def scores(self, solutions: Sequence[Solution], batch_tokens: int = 16384) -> list[list[float]]:
        """Return a score in [0, 1] for every step of every solution, in order. Raises BadInput for one that cannot be
        read or is longer than the model's positions, BadModel for another model."""
        return self.scores_of([self.read(one) for one in solutions], batch_tokens)

    def scores_of(self, rows: Sequence[StepTokens], batch_tokens: int = 16384) -> list[list[float]]:
        """Return `scores` of rows that are laid out already; equal ones are computed once."""
        limit = positions_of(self.model.config)
        for row in rows:
            if (length := len(row.prompt_ids) + len(row.response_ids)) > limit:
                raise BadInput(f"{row.name}: {length} tokens, and the model has {limit} positions: leave it out")
        if self.row.network == POLICIES:
            found: list[list[float]] = self.model.scores(rows, max(1, batch_tokens // 2))
            return found
        keys = [(tuple(row.prompt_ids), tuple(row.response_ids), tuple(row.step_ends)) for row in rows]
        asked = list(dict.fromkeys(key for key in keys if key[2]))
        ids = [[*prompt, *response] for prompt, response, _ in asked]
        places = [[len(prompt) + end - 1 for end in ends] for prompt, _, ends in asked]
        scores: dict[Any, list[float]] = {}
        for batch in in_batches(ids, self._is_packed(ids), batch_tokens):
            read = self._pass([ids[number] for number in batch], [places[number] for number in batch])
            scores |= zip([asked[number] for number in batch], read, strict=True)
        return [scores.get(key, []) for key in keys]

    def _is_packed(self, rows: Sequence[Sequence[int]]) -> bool:
        return packing_of(self.model).choice_for(max(map(len, rows), default=0)) == "packed"

    @torch.inference_mode()
    def _pass(self, rows: Sequence[list[int]], places: Sequence[list[int]]) -> list[list[float]]:
        """Return the scores of a batch at the places of each row."""
        device = next(self.model.parameters()).device
        is_packed = self._is_packed(rows)
        placed = place_rows(rows, Layout("shared" if is_packed else "padded", int(self.tokenizer.pad_token_id)))
        inputs = {name: v.to(device) if torch.is_tensor(v) else v for name, v in model_inputs(placed).items()}
        positions = torch.cat([path[torch.tensor(own)] for path, own in zip(placed.paths, places, strict=True)])
        with autocast(device, self.precision):
            read = read_at(self.model, inputs, positions.to(device), self.row.read, self.tokenizer)
        numbers = iter([round(float(value), _DIGITS) for value in read])
        return [[next(numbers) for _ in own] for own in places]


def read_as(row: PublishedPRM, tokenizer: Any, solution: Solution) -> StepTokens:
    """Return what a model of that row reads of a solution, without steps where it has none. Raises BadInput, with its
    name."""
    if not solution.steps:
        return StepTokens([], [], [], solution.name)
    try:
        return row.layout(tokenizer, solution.question, solution.steps).tokens(solution.name)
    except BadInput as error:
        raise BadInput(f"{solution.name}: {error}") from None


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
        vocabulary = head.weight.shape[0]
        size = most_scores(read_hidden.device.type, vocabulary) // vocabulary
        with torch.autocast(read_hidden.device.type, enabled=False):  # in bf16 two logits differ in coarse steps
            bias = None if head.bias is None else head.bias.float()
            parts = [scores(linear(part.float(), head.weight.float(), bias)) for part in read_hidden.split(size)]
        return torch.cat(parts).unsqueeze(-1)

    with head_answers(head, positions, answer):
        found: torch.Tensor = model(**given).logits.flatten()
    return found
