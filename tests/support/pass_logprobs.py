"""Log-probs of the tokens of a pass, for tests that make the pass themselves."""

import torch

from espalier.models.logprobs import logit_scores


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `models.logprobs.response_logprobs`, from the logits [B, T, V] of a pass that has been made."""
    scores = logit_scores(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), temperature)
    shape = (ids.shape[0], ids.shape[1] - 1)
    return scores.logprobs.view(shape), scores.entropies.detach().view(shape)
