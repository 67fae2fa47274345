"""Shared blocks in vLLM itself: the same answers as a plain engine gives, for fewer prompt tokens."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sampling.prefill import computed_tokens, engine_options
from espalier.data.prefix_tree import least_prompt_tokens
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient

COPIES = 3


def prompts() -> list[list[int]]:
    """Prefixes of five random texts that begin alike, of 20 to 120 tokens."""
    rng = random.Random(0)
    head = [rng.randrange(5, 300) for _ in range(18)]
    texts = [head + [rng.randrange(5, 300) for _ in range(102)] for _ in range(5)]
    return sorted(text[:end] for text in texts for end in range(20, 121, 11))


async def _greedy(base_url: str, rows: list[list[int]]) -> list[list[Sample]]:
    """Every prompt `COPIES` times, all at once, one token each: the log-prob of the likeliest token."""
    client = VLLMClient(base_url)
    await client.open()
    params = SamplingParams(n=1, temperature=0.0, max_tokens=1, return_logprobs=True)
    try:
        asked = [
            client.sample(SampleRequest(f"{k}/{n}", "", row), params)
            for n, row in enumerate(rows)
            for k in range(COPIES)
        ]
        return list(await asyncio.gather(*asked))
    finally:
        await client.close()


@pytest.mark.server
@pytest.mark.slow
def test_shared_blocks_answer_as_whole_ones_do_for_less_than_whole_blocks_can(
    tiny_policy: Path, real_server: Any, tmp_path: Path
) -> None:
    rows = prompts()
    want = asyncio.run(_greedy(real_server.base_url, rows))
    with VLLMServer(
        str(tiny_policy), str(tmp_path / "log"), max_model_len=256, options=engine_options("partial_block_cache")
    ) as server:
        before = computed_tokens(server.base_url)
        found = asyncio.run(_greedy(server.base_url, rows))
        computed = computed_tokens(server.base_url) - before
    for one, other in zip(found, want, strict=True):
        assert one[0].logprobs is not None
        assert other[0].logprobs is not None
        assert one[0].logprobs[0] == pytest.approx(other[0].logprobs[0], abs=0.05), "bf16 noise alone"
    same = sum(one[0].token_ids == other[0].token_ids for one, other in zip(found, want, strict=True))
    assert same >= 0.95 * len(found), "a near tie may fall either way"
    # not the least of all: a sample of one token is over before its copies look for its block
    assert computed < 0.75 * least_prompt_tokens(rows, COPIES, int(engine_options("partial_block_cache")["block_size"]))
