"""What the configuration of a network says of its rows that short ones cannot show (`models.packing_check`).

Windows that layers do not hand to their attention function, chunks, and rotary embeddings whose frequencies depend on
the longest row of a batch (`longrope`: Phi-3) or on rows of earlier ones (`dynamic`: transformers keeps the frequencies
that a row beyond the positions has made, so that not even a row alone is a function of its tokens; such rows are
refused).
"""

from collections.abc import Sequence
from typing import Any


def other_layers(config: Any) -> str:
    """Return the layers that are no attention, as the configuration calls them."""
    kinds = {str(kind) for kind in getattr(config.get_text_config(), "layer_types", None) or []}
    others = sorted(kind for kind in kinds if not kind.endswith("attention") or "linear" in kind)
    return f": it has layers of kind {', '.join(others)}" if others else ""


def unseen_limit(config: Any, windows: Sequence[int | None]) -> str:
    """Return what keeps a query of a long row from keys, and is in no argument of the attention function; empty:
    nothing."""
    text = config.get_text_config()
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk:
        return f"attention in chunks of {chunk} tokens"
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    is_used = bool(window) and getattr(text, "use_sliding_window", True) is not False
    expected = sum("sliding" in str(kind) for kind in kinds) if kinds else int(is_used)
    seen = sum(given is not None for given in windows)
    return f"a sliding window of {window} tokens that its layers do not hand over" if seen < expected else ""


def _rotary_kinds(text: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of a configuration: one, or one a kind of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def longest_row(config: Any) -> int | None:
    """Return the longest row that a network takes whose rotary frequencies grow with its rows (`dynamic`) and stay
    grown afterwards; None: it has no such limit."""
    text = config.get_text_config()
    grows = any("dynamic" in str(kind.get("rope_type")) for kind in _rotary_kinds(text))
    return int(text.max_position_embeddings) if grows else None


def longest_together(config: Any) -> int | None:
    """Return the longest row that leaves the rotary frequencies of its batch as they are; None: any."""
    text = config.get_text_config()
    lengths = [kind.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
               for kind in _rotary_kinds(text) if kind.get("rope_type") == "longrope"]  # fmt: skip
    return min((int(length) for length in [*lengths, longest_row(config)] if length), default=None)
