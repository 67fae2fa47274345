"""vLLM's own counters, read from a server's `/metrics` (the Prometheus text format).

A server started with `disable_log_stats` counts nothing and shows none of them.
"""

import re
from dataclasses import dataclass
from typing import Self

_NAMES = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "cache_queries": "vllm:prefix_cache_queries_total",
    "cache_hits": "vllm:prefix_cache_hits_total",
}
_LINE = re.compile(r"^(vllm:\w+?)(?:\{[^}\n]*\})? ([0-9.eE+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class EngineCounters:
    """Tokens since the server's start, or between two readings: of prompts, generated, and of prompts looked up in
    the prefix cache and found there."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    def __add__(self, other: Self) -> "EngineCounters":
        return EngineCounters(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: Self) -> "EngineCounters":
        return EngineCounters(*(getattr(self, name) - getattr(other, name) for name in _NAMES))

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache, 0 where none was looked up."""
        return self.cache_hits / self.cache_queries if self.cache_queries else 0.0


def parse_counters(text: str) -> EngineCounters | None:
    """Return the counters of a `/metrics` page, summed over engines; None where it shows none of vLLM's."""
    counters = [(name, float(value)) for name, value in _LINE.findall(text)]
    if not any(name in _NAMES.values() for name, _ in counters):
        return None
    return EngineCounters(*(int(sum(v for name, v in counters if name == wanted)) for wanted in _NAMES.values()))
