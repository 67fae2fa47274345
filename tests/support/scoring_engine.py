"""A real engine that scores, held against transformers on the same rows; run by tests/sampling/test_engine_scorer.py in
a process of its own, which vLLM changes for good.

    python -m tests.support.scoring_engine POLICY NUM_LABELS
"""

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from espalier.data.steps import StepTokens, TokenRow
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.engine_scores import read_scores, token_row
from espalier.rewards.process import score_step_tokens
from espalier.sampling.client import Refused
from espalier.sampling.one_process_engine import OneProcessEngine


def reward_model(policy: str, folder: Path, num_labels: int) -> str:
    """Write the policy's body with a random head, steep enough that scores differ."""
    model = load_process_reward(policy, num_labels)
    head = model.get_parameter("score.weight")
    torch.nn.init.normal_(head, std=0.5, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(policy) / name).read_bytes())
    return str(folder)


def solutions() -> list[StepTokens]:
    """Four prompts of 90 to 120 tokens, each with four solutions of three steps that begin alike."""
    draw = random.Random(0)
    found = []
    for problem in range(4):
        prompt = [draw.randrange(5, 300) for _ in range(90 + 10 * problem)]
        start = [draw.randrange(5, 300) for _ in range(40)]
        for k in range(4):
            response = [*start, *(draw.randrange(5, 300) for _ in range(20 + k))]
            found.append(StepTokens(prompt, response, [40, 50, len(response)], f"{problem}/{k}"))
    return found


async def main(policy: str, num_labels: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = reward_model(policy, Path(folder), int(num_labels))
        rows = solutions()
        model = load_process_reward(path)
        expected = score_step_tokens(model, rows, pad_id=0)
        assert max(max(row) for row in expected) - min(min(row) for row in expected) > 0.3
        # rows are cut into chunks, and the cache's blocks are shorter than a prompt
        options = {"enforce_eager": True, "max_num_seqs": 32, "block_size": 32, "max_num_batched_tokens": 100}
        client = OneProcessEngine(path, max_model_len=256, options=options, scores_tokens=True)
        await client.open()
        asked = [token_row(row) for row in rows]
        for _ in range(2):  # the second time the prefix cache holds everything
            found = [read_scores(logits) for logits in await client.logits_of_rows(asked)]
            for own, wanted in zip(found, expected, strict=True):
                assert own == pytest.approx(wanted, abs=0.05)
        last = [TokenRow(row.name, row.ids, row.places[-1:]) for row in asked]
        cached = [
            (await client._pooled(row.ids, reads_cache=True)).num_cached_tokens for row in last
        ]  # and is read where the asked place is behind it
        assert min(cached) >= 96
        for logits, wanted in zip(await client.logits_of_rows(last), expected, strict=True):
            assert read_scores(logits) == pytest.approx(wanted[-1:], abs=0.05)
        with pytest.raises(Refused, match="long: "):
            await client.logits_of_rows([TokenRow("long", [5] * 300, [299])])
        with pytest.raises(Refused, match=r"strange: .*out of vocabulary"):
            await client.logits_of_rows([*asked, TokenRow("strange", [100_000] * 20, [19])])
        assert [len(row) for row in await client.logits_of_rows(asked[:2])] == [3, 3]
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
