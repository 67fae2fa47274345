"""Stop tokens by their text → ids of the policy's tokenizer."""

from dataclasses import replace
from typing import Any

from espalier.data.records import BadInput
from espalier.sampling.client import SamplingParams


def with_stop_tokens(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Return the parameters with the id of every stop token. Raises BadInput on a text that is not one token, and on an
    id that the tokenizer does not have."""
    return replace(params, stop_tokens=[_id_of(token, tokenizer) for token in params.stop_tokens])


def _id_of(token: Any, tokenizer: Any) -> int:
    if isinstance(token, int):
        if not 0 <= token < len(tokenizer):
            raise BadInput(f"params.stop_tokens: {token} is no id of a tokenizer of {len(tokenizer)} tokens")
        return token
    known = tokenizer.get_vocab().get(token)
    if known is not None:
        return int(known)
    ids = tokenizer(str(token), add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise BadInput(f"params.stop_tokens: {token!r} is {len(ids)} tokens of the policy's tokenizer, not one: name "
                       "an id, or give the text as a string to stop at (params.stop)")  # fmt: skip
    return int(ids[0])
