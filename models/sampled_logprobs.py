"""Log-probs of sampled responses under a causal LM, for what reads trajectories from files."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from espalier.data.batches.packing import in_batches
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.models.logprobs import response_logprobs
from espalier.models.packing_check import packing_of


def sampled_logprobs(
    model: Any,
    solutions: Sequence[StepTokens],
    batch_tokens: int = 8192,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[list[float]]:
    """Return the log-probs in nats, at temperature 1, of every response token of every solution under `model`, on its
    device; `batch_tokens` are padded tokens of one forward pass. Solutions with the same ids are read once;
    `on_progress` gets the number of distinct ones done.

    Raises BadInput for one that is longer than the network takes, for one without prompt tokens, behind which its first
    token would be read, and where a log-prob is no finite number.
    """
    for row in solutions:
        if row.response_ids and not row.prompt_ids:
            raise BadInput(f"{row.name} has no prompt tokens, and nothing says how likely its first token is: sample "
                           "it with token ids")  # fmt: skip
    keys = [(tuple(row.prompt_ids), tuple(row.response_ids)) for row in solutions]
    distinct = list(dict.fromkeys(keys))
    if not distinct:
        return []
    model.eval()
    device = next(model.parameters()).device
    rows = [[*prompt, *response] for prompt, response in distinct]
    try:
        packing_of(model).choice_for(max(map(len, rows)))
    except BadInput as error:
        longest = max(solutions, key=lambda row: len(row.prompt_ids) + len(row.response_ids))
        raise BadInput(f"{longest.name}: {error}") from None
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
    for batch in in_batches(rows, False, batch_tokens):
        ids = pad_sequence([torch.tensor(rows[index], device=device) for index in batch], batch_first=True)
        lengths = torch.tensor([len(rows[index]) for index in batch], device=device)
        starts = torch.tensor([len(distinct[index][0]) for index in batch], device=device)
        places = torch.arange(ids.shape[1], device=device)
        mask = places < lengths.unsqueeze(1)
        with torch.inference_mode():
            logprobs = response_logprobs(model, ids, mask, response_mask=places >= starts.unsqueeze(1))[0]
        for index, line in zip(batch, logprobs.tolist(), strict=True):
            prompt, response = distinct[index]
            found[distinct[index]] = line[len(prompt) - 1 : len(prompt) - 1 + len(response)]
            if not all(map(math.isfinite, found[distinct[index]])):
                row = solutions[keys.index(distinct[index])]
                raise BadInput(f"{row.name}: the model gives a token of it a log-prob that is no finite "
                               "number: name the model that sampled it, and look at its weights")  # fmt: skip
        on_progress(len(found))
    return [found[key] for key in keys]
