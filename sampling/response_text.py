"""Response tokens → text, as vLLM's own detokenizer makes it, for answers that come as token ids alone.

The text of a response depends on what stands before it (a leading space, half a character), so it is what its tokens
add to the prompt's. Special tokens have no text. A character whose last bytes were never sampled is left out.
"""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_TAIL = 8  # of the prompt: more than the tokens of one character
_BROKEN = "�"


class ResponseText:
    """Args: a fast tokenizer of transformers. Raises TypeError on another kind."""

    def __init__(self, tokenizer: Any):
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(inner, Tokenizer):
            raise TypeError(f"{type(tokenizer).__name__} is no fast tokenizer")
        self._tokenizer = inner

    def __call__(self, prompt_ids: list[int], response_ids: list[int]) -> str:
        """The text that the response (without its end token) adds."""
        tail = prompt_ids[-_TAIL:]
        before = self._tokenizer.decode(tail)
        text = self._tokenizer.decode([*tail, *response_ids])
        if before.endswith(_BROKEN) or text.endswith(_BROKEN) or not text.startswith(before):
            return self._step_by_step(prompt_ids, response_ids)
        return text[len(before) :]

    def _step_by_step(self, prompt_ids: list[int], response_ids: list[int]) -> str:
        """Exact for every tokenizer, and slow."""
        stream = DecodeStream(ids=prompt_ids, skip_special_tokens=True)
        return "".join(stream.step(self._tokenizer, token) or "" for token in response_ids)
