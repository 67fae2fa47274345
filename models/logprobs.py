"""Token log-probs and entropy under a causal language model, without logits for the whole batch.

The log-prob of a token is read at the token before it. Only where it is asked for is the head computed (not on
prompts), and in chunks (`models.token_scores`). `temperature` divides the logits, as in sampling.

The model is called as a whole (wrappers, ZeRO-3's gathering and adapters work as ever); for the call its head
answers with log-probs in place of logits. A head that is no plain linear layer, or logits that the network changes
behind it (by its settings, or by its own answer: `models.packing_check`), go the long way: logits first.

Rows that change one another even where they are padded are computed one at a time (`models.logits`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from espalier.data.batches.batch import Batch
from espalier.models.inputs import model_inputs, network
from espalier.models.logits import one_by_one, place_before, reads_at
from espalier.models.packing_check import packing_of
from espalier.models.token_scores import TokenScores, chunked_scores

# Settings of networks that change the logits after the head.
_BEHIND_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


def plain_head(model: Any) -> torch.nn.Linear | None:
    """Return the linear layer whose output are the logits; None where something else stands behind it or in its
    place."""
    inner = network(model)
    if not isinstance(inner, PreTrainedModel):
        return None
    head = inner.get_output_embeddings()
    changed = [name for name in _BEHIND_THE_HEAD if getattr(inner.config, name, None) not in (None, 1, 1.0)]
    is_plain = type(head) is torch.nn.Linear and not changed
    return head if is_plain and packing_of(inner).is_head_last else None


@contextmanager
def head_answers(
    head: torch.nn.Linear, positions: torch.Tensor, answer: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Within: the head gives [1, R, K] in place of logits, what `answer` makes [R, K] of the hidden states [R, H] at
    `positions` of the flattened batch."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return answer(hidden.flatten(0, -2).index_select(0, positions)).unsqueeze(0)

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _score_places(
    model: Any, inputs: dict[str, Any], positions: torch.Tensor, targets: torch.Tensor, temperature: float
) -> TokenScores:
    alone = one_by_one(model, inputs)
    if alone:
        return _score_alone(model, alone, inputs["input_ids"].shape[1], positions, targets, temperature)
    head = plain_head(model)
    inputs = inputs | reads_at(model, inputs, positions)
    if head is None:
        logits = model(**inputs).logits.flatten(0, 1).index_select(0, positions)
        return logit_scores(logits, targets, temperature)

    def scores(read: torch.Tensor) -> torch.Tensor:
        found = chunked_scores(read, head.weight, targets, bias=head.bias, temperature=temperature)
        return torch.stack((found.logprobs, found.entropies, found.is_likeliest), dim=-1)

    with head_answers(head, positions, scores):
        logprobs, entropies, likeliest = model(**inputs).logits[0].unbind(-1)
    return TokenScores(logprobs, entropies, likeliest.detach())


def _score_alone(
    model: Any,
    rows: list[dict[str, Any]],
    length: int,
    positions: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
) -> TokenScores:
    """As `_score_places`, row by row; `positions` are those in the padded rows of `length` tokens."""
    stacked = torch.zeros(3, len(positions), device=positions.device)
    for number, row in enumerate(rows):
        mine = (positions // length == number).nonzero().squeeze(1)
        scores = _score_places(model, row, positions[mine] - number * length, targets[mine], temperature)
        parts = torch.stack((scores.logprobs, scores.entropies, scores.is_likeliest))
        stacked = stacked.index_copy(1, mine, parts)
    return TokenScores(stacked[0], stacked[1], stacked[2].detach())


def logit_scores(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> TokenScores:
    """Return scores of `targets` [R] from logits [R, V], in float32."""
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = logs.gather(1, targets.unsqueeze(1)).squeeze(1)
    entropies = -(logs.exp() * logs).sum(-1)
    return TokenScores(logprobs, entropies, (logits.argmax(-1) == targets).float())


def target_scores(model: Any, batch: Batch, temperature: float = 1.0) -> TokenScores:
    """Return scores [R] of a batch's targets by one forward pass."""
    return _score_places(model, model_inputs(batch), batch.target_places, batch.targets, temperature)


def response_logprobs(
    model: Any,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float = 1.0,
    response_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob of ids[:, t] at [:, t-1], entropy of that distribution), both [B, T-1] in float32.

    `ids`, `attention_mask`, `response_mask` [B, T], padded on the right; 0 where there is no token, and where
    `response_mask` (default: everywhere) is false. The rows are packed for the pass where the network allows it.
    """
    wanted = attention_mask.bool() if response_mask is None else response_mask & attention_mask.bool()
    inputs, positions, rows_at, columns_at = place_before(model, ids, attention_mask, wanted)
    scores = _score_places(model, inputs, positions, ids[rows_at, columns_at + 1], temperature)
    shape = (ids.shape[0], ids.shape[1] - 1)
    nothing, places_at = torch.zeros(shape, device=ids.device), (rows_at, columns_at)
    return nothing.index_put(places_at, scores.logprobs), nothing.index_put(places_at, scores.entropies)
