"""Token log-probs and entropy of given ids under a causal language model.

Logits at position t-1 give the log-prob of token t. `temperature` divides the logits, as in sampling.
"""

from typing import Any

import torch


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, chunk_tokens: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob of ids[:, t] at [:, t-1], entropy of that distribution), both [B, T-1] in float32.

    `logits` [B, T, V], `ids` [B, T]. The float32 softmax is made for `chunk_tokens` tokens at a time, so
    that no [B, T, V] stands in float32.
    """
    batch, length, vocabulary = logits.shape
    flat = logits[:, :-1].reshape(-1, vocabulary)
    targets = ids[:, 1:].reshape(-1)
    logprobs, entropies = [], []
    for start in range(0, flat.shape[0], chunk_tokens):
        chunk = torch.log_softmax(flat[start : start + chunk_tokens].float() / temperature, dim=-1)
        logprobs.append(chunk.gather(1, targets[start : start + chunk_tokens, None]).squeeze(1))
        with torch.no_grad():
            entropies.append(-(chunk.exp() * chunk).sum(-1))
    shape = (batch, length - 1)
    return torch.cat(logprobs).view(shape), torch.cat(entropies).view(shape)


def response_logprobs(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of a forward pass of `model`; [B, T-1] each, the prompt's tokens included."""
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    return token_logprobs(logits, ids, temperature)
