"""Token log-probs and entropy under a causal language model, without logits for the whole batch.

The log-prob of a token is read at the token before it. Only where it is asked for is the head computed (not on
prompts), and its float32 softmax never stands for more than `MAX_SCORES` (tokens x vocabulary) at a time: beyond
that, chunks of tokens are computed, forgotten, and computed again in the backward pass (Chen et al. 2016), so that
memory does not grow with the vocabulary. `temperature` divides the logits, as in sampling.

The model is called as a whole (wrappers, ZeRO-3's gathering and adapters work as ever); for the call its head
answers with log-probs in place of logits. A head that is no plain linear layer, or logits that the network changes
behind it (by its settings, or by its own answer: `models.packing_check`), go the long way: logits first.

Rows that change one another even where they are padded are computed one at a time (`one_by_one`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from espalier.data.batches.collate import Batch
from espalier.data.batches.packing import Layout, place_rows
from espalier.models.inputs import model_inputs, network
from espalier.models.last_layer import reads_of
from espalier.models.packed_attention import BadAttention
from espalier.models.packing_check import is_cut, packing_of
from espalier.models.shapes import ROWS, missing

MAX_SCORES = {"cpu": 2**22, "cuda": 2**28}  # tokens x vocabulary in float32 at a time: 16 MiB, 1 GiB
# Settings of networks that change the logits after the head.
_BEHIND_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


@dataclass(frozen=True)
class TokenScores:
    """About tokens [R], in float32: log-prob, entropy of the distribution it was drawn from, and whether it was the
    likeliest (0 or 1). Only log-probs and entropies have a graph."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    is_likeliest: torch.Tensor


class _ChunkedScores(torch.autograd.Function):
    """hidden [R, H], weight [V, H], bias [V] or None, targets [R] → [3, R], see `TokenScores`.

    With z the logits divided by the temperature and p = softmax(z): d log p(target) / dz = onehot - p, and
    d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        max_scores: int,
    ) -> torch.Tensor:
        size = max(1, max_scores // weight.shape[0])
        is_kept = hidden.shape[0] <= size  # one chunk: its softmax stays for the backward pass
        found = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            shares, scores = _scores(hidden[rows], weight, bias, targets[rows], temperature)
            found[:, rows] = scores
        kept = shares if is_kept and hidden.shape[0] else None
        ctx.save_for_backward(hidden, weight, bias, targets, found[1], kept)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, kept = ctx.saved_tensors
        gradient = gradients[0]
        if gradient is None:
            return (None,) * 6
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        has_entropies = bool(gradient[1].any())
        for start in range(0, hidden.shape[0], ctx.size):
            rows = slice(start, start + ctx.size)
            shares = kept
            if shares is None:
                shares, _ = _scores(hidden[rows], weight, bias, targets[rows], ctx.temperature)
            slopes = shares * -gradient[0, rows].unsqueeze(1)
            if has_entropies:
                slopes -= _entropy_slopes(shares, gradient[1, rows], entropies[rows])
            slopes.scatter_add_(1, targets[rows].unsqueeze(1), gradient[0, rows].unsqueeze(1))
            slopes = slopes.div_(ctx.temperature).to(hidden.dtype) if ctx.temperature != 1 else slopes.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[rows] = slopes @ weight
            if for_weight is not None:
                _add_product(for_weight, slopes, hidden[rows])
            if for_bias is not None:
                for_bias += slopes.sum(0)
        given = (for_weight, for_bias)
        weights = (None if value is None else value.to(weight.dtype) for value in given)
        return (for_hidden, *weights, None, None, None)


def _scores(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax [R, V], the three scores [3, R]) of a chunk, in float32."""
    logits = linear(hidden, weight, bias).float()
    if temperature != 1:
        logits = logits / temperature
    highest = logits.max(-1, keepdim=True).values
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    logits = logits - highest
    shares = logits.exp()
    sums = shares.sum(-1, keepdim=True)
    shares /= sums
    logs = sums.squeeze(1).log()
    entropies = logs - torch.linalg.vecdot(shares, logits)
    logprobs = chosen - highest.squeeze(1) - logs
    return shares, torch.stack((logprobs, entropies, (chosen >= highest.squeeze(1)).float()))


def _entropy_slopes(shares: torch.Tensor, gradient: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Minus the entropies' part [R, V] of the gradient."""
    logs = shares.clamp_min(1e-38).log()
    return gradient.unsqueeze(1) * shares * (logs + entropies.unsqueeze(1))


def _add_product(total: torch.Tensor, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
    """total [V, H] += slopesᵀ hidden, summed over chunks in float32 without a second [V, H]."""
    if slopes.dtype == total.dtype:
        total.addmm_(slopes.t(), hidden)
        return
    size = 8192
    for start in range(0, total.shape[0], size):
        rows = slice(start, start + size)
        total[rows] += slopes[:, rows].t() @ hidden


def chunked_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    max_scores: int = 0,
) -> TokenScores:
    """Scores of `targets` [R] from hidden states [R, H] and a head [V, H], in autocast's precision where it is on.

    At most `max_scores` (0: `MAX_SCORES`) numbers, tokens x vocabulary, stand in float32 at a time.
    """
    device = hidden.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    limit = max_scores or MAX_SCORES.get(device, MAX_SCORES["cpu"])
    bias = None if bias is None else bias.to(kind)
    hidden, size = hidden.to(kind), len(targets)
    more = missing(size, ROWS, hidden)
    hidden, targets = pad(hidden, (0, 0, 0, more)), pad(targets, (0, more))
    found = _ChunkedScores.apply(hidden, weight.to(kind), bias, targets, temperature, limit)[:, :size]
    return TokenScores(found[0], found[1], found[2].detach())


def plain_head(model: Any) -> torch.nn.Linear | None:
    """The linear layer whose output are the logits; None where something else stands behind it or in its place."""
    inner = network(model)
    if not isinstance(inner, PreTrainedModel):
        return None
    head = inner.get_output_embeddings()
    changed = [name for name in _BEHIND_THE_HEAD if getattr(inner.config, name, None) not in (None, 1, 1.0)]
    is_plain = type(head) is torch.nn.Linear and not changed
    return head if is_plain and packing_of(inner).is_head_last else None


@contextmanager
def _answering(
    head: torch.nn.Linear, places: torch.Tensor, targets: torch.Tensor, temperature: float
) -> Iterator[None]:
    """Within: the head gives [1, R, 3], the scores of `targets` read at `places` of the flattened batch."""

    def scores(hidden: torch.Tensor) -> torch.Tensor:
        read = hidden.flatten(0, -2).index_select(0, places)
        found = chunked_scores(read, head.weight, targets, bias=head.bias, temperature=temperature)
        return torch.stack((found.logprobs, found.entropies, found.is_likeliest), dim=-1).unsqueeze(0)

    head.forward = scores  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def one_by_one(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The inputs of each row of a padded batch, without its padding, where the network needs them alone; else nothing.
    Raises BadAttention for packed rows that it cannot take, BadInput for a row that it does not."""
    check, segments = packing_of(model), inputs.get("segments")
    if segments is not None:
        if check.choice_for(segments.longest) != "packed":
            raise BadAttention(f"packed rows for {type(network(model)).__name__}: {check.reason or 'too long a row'}: "
                               "set update.layout=auto")  # fmt: skip
        return []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if check.choice_for(ids.shape[1]) != "alone" or len(ids) < 2:  # positions run through the padding too
        return []
    if is_cut(model):
        raise BadAttention(f"{type(network(model)).__name__}: rows have to be computed one at a time, and ranks would "
                           "make unequal numbers of passes with ZeRO-3: set deepspeed=zero2")  # fmt: skip
    lengths = mask.sum(-1).tolist()
    return [{"input_ids": ids[row : row + 1, :size], "attention_mask": mask[row : row + 1, :size]}
            for row, size in enumerate(lengths)]  # fmt: skip


def all_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits [B, T, L] of a whole batch; 0 in the padding of rows that are computed one at a time."""
    alone = one_by_one(model, inputs)
    if not alone:
        found: torch.Tensor = model(**inputs).logits
        return found
    length = inputs["input_ids"].shape[1]
    rows = [model(**row).logits[0] for row in alone]
    return torch.stack([pad(row, (0, 0, 0, length - len(row))) for row in rows])


def _score_places(
    model: Any, inputs: dict[str, Any], places: torch.Tensor, targets: torch.Tensor, temperature: float
) -> TokenScores:
    alone = one_by_one(model, inputs)
    if alone:
        return _score_alone(model, alone, inputs["input_ids"].shape[1], places, targets, temperature)
    head = plain_head(model)
    inputs = inputs | _reads(model, inputs, places)
    if head is None:
        logits = model(**inputs).logits.flatten(0, 1).index_select(0, places)
        return logit_scores(logits, targets, temperature)
    with _answering(head, places, targets, temperature):
        logprobs, entropies, likeliest = model(**inputs).logits[0].unbind(-1)
    return TokenScores(logprobs, entropies, likeliest.detach())


def _reads(model: Any, inputs: dict[str, Any], places: torch.Tensor) -> dict[str, torch.Tensor]:
    segments = inputs.get("segments")
    num_unread = 0 if segments is None else segments.num_unread
    return reads_of(network(model), places, inputs["input_ids"].numel(), num_unread)


def _score_alone(
    model: Any,
    rows: list[dict[str, Any]],
    length: int,
    places: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
) -> TokenScores:
    """As `_score_places`, row by row; `places` are those in the padded rows of `length` tokens."""
    found = torch.zeros(3, len(places), device=places.device)
    for number, row in enumerate(rows):
        mine = (places // length == number).nonzero().squeeze(1)
        scores = _score_places(model, row, places[mine] - number * length, targets[mine], temperature)
        parts = torch.stack((scores.logprobs, scores.entropies, scores.is_likeliest))
        found = found.index_copy(1, mine, parts)
    return TokenScores(found[0], found[1], found[2].detach())


def logit_scores(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> TokenScores:
    """Scores of `targets` [R] from logits [R, V], in float32."""
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = logs.gather(1, targets.unsqueeze(1)).squeeze(1)
    entropies = -(logs.exp() * logs).sum(-1)
    return TokenScores(logprobs, entropies, (logits.argmax(-1) == targets).float())


def target_scores(model: Any, batch: Batch, temperature: float = 1.0) -> TokenScores:
    """Scores [R] of a batch's targets by one forward pass."""
    return _score_places(model, model_inputs(batch), batch.target_places, batch.targets, temperature)


def read_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Logits [P, L] of a scalar head at a batch's reads, by one forward pass."""
    return _logits_at(model, model_inputs(batch), batch.read_places)


def _logits_at(model: Any, inputs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
    """Logits [R, L] at places of the flattened batch."""
    reads = {} if one_by_one(model, inputs) else _reads(model, inputs, places)
    return all_logits(model, inputs | reads).flatten(0, 1).index_select(0, places)


def response_logprobs(
    model: Any,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float = 1.0,
    response_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of ids[:, t] at [:, t-1], entropy of that distribution), both [B, T-1] in float32.

    `ids`, `attention_mask`, `response_mask` [B, T], padded on the right; 0 where there is no token, and where
    `response_mask` (default: everywhere) is false. The rows are packed for the pass where the network allows it.
    """
    wanted = attention_mask.bool() if response_mask is None else response_mask & attention_mask.bool()
    inputs, places, rows_at, columns_at = _before(model, ids, attention_mask, wanted)
    scores = _score_places(model, inputs, places, ids[rows_at, columns_at + 1], temperature)
    shape = (ids.shape[0], ids.shape[1] - 1)
    nothing, places_at = torch.zeros(shape, device=ids.device), (rows_at, columns_at)
    return nothing.index_put(places_at, scores.logprobs), nothing.index_put(places_at, scores.entropies)


def response_values(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """What a scalar head of one output says before ids[:, t], at [:, t-1]: [B, T-1] in float32, arguments and packing
    as of `response_logprobs`."""
    wanted = attention_mask.bool() if response_mask is None else response_mask & attention_mask.bool()
    inputs, places, rows_at, columns_at = _before(model, ids, attention_mask, wanted)
    values = _logits_at(model, inputs, places)[:, 0].float()
    shape = (ids.shape[0], ids.shape[1] - 1)
    return torch.zeros(shape, device=ids.device).index_put((rows_at, columns_at), values)


def _before(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, wanted: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the model's inputs, where in them the token before each wanted one lies [R], rows [R], columns [R] of those
    tokens in [B, T-1])."""
    rows_at, columns_at = wanted[:, 1:].nonzero(as_tuple=True)
    lengths = attention_mask.sum(-1).tolist()
    is_packed = packing_of(model).choice_for(max(lengths, default=0)) == "packed"
    kind = "shared" if is_packed else "padded"
    placed = place_rows([row[:size] for row, size in zip(ids.tolist(), lengths, strict=True)], Layout(kind))
    starts = torch.zeros(ids.shape, dtype=torch.long)
    for row, path in enumerate(placed.paths):
        starts[row, : len(path)] = path
    inputs = {
        name: value.to(ids.device) if torch.is_tensor(value) else value for name, value in model_inputs(placed).items()
    }
    return inputs, starts.to(ids.device)[rows_at, columns_at], rows_at, columns_at


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `response_logprobs`, from the logits [B, T, V] of a pass that has been made."""
    scores = logit_scores(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), temperature)
    shape = (ids.shape[0], ids.shape[1] - 1)
    return scores.logprobs.view(shape), scores.entropies.detach().view(shape)
