"""How many bytes a rank holds, and gets from rank 0, of an iteration's rollouts: the figures of docs/reinforcement.md.

2,048 rollouts of 256 problems on 4 ranks, prompts of 100 tokens, responses of 500 tokens in the mean and 2,000 at most,
four characters of text per token, 5,000 distinct ids, steps of 25 tokens, log-probs that the engine computed in
float32; GRPO without a critic or a reference, one minibatch. "Before" all ranks held all rollouts and all tensors.
"""

import gc
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from espalier.data.records import Problem, Trajectory
from espalier.rewards.score import Score
from espalier.rl import row_shares
from espalier.rl.experience import make_experience, token_rewards
from espalier.rl.learner import UpdateSums
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.row_parts import OLD, RowPart
from espalier.rl.row_shares import MOST_TOKENS, cuts_of_ranks
from espalier.rl.types import Experience, Rollout, RolloutGroup
from espalier.runtime.answers import packed, unpacked
from tests.rl.test_row_shares import ragged_lengths

NUM, PROMPT = 2048, 100
LENGTHS = ragged_lengths(NUM)
TOKENS = sum(LENGTHS)
SLOTS = NUM * (PROMPT + max(LENGTHS))


def make_rollout(row: int) -> Rollout:
    length = LENGTHS[row]
    draws = torch.Generator().manual_seed(row)
    ids = torch.randint(100_000, 105_000, (length,), generator=draws).tolist()
    logprobs = (-torch.rand(length, generator=draws)).tolist()
    ends = [*range(25, length, 25), length]
    steps = ["step" * (end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    name, prompt_ids = f"rl-0/p{row // 8}/{row % 8}", [1000 + row // 8] * PROMPT
    trajectory = Trajectory(
        name, f"p{row // 8}", "word" * PROMPT, "".join(steps), steps, prompt_ids, ids, ends, "stop", "1", "1", True
    )
    return Rollout(trajectory, array("d", logprobs), 0)


def make_groups(num: int) -> list[RolloutGroup]:
    return [
        RolloutGroup(Problem(f"p{start // 8}", "word" * PROMPT, "1"), [make_rollout(start + k) for k in range(8)],
                     [Score(float(k % 2), [], {"outcome": float(k % 2)}) for k in range(8)])
        for start in range(0, num, 8)
    ]  # fmt: skip


def tensor_bytes(experience: Experience) -> int:
    held = [getattr(experience, field.name) for field in fields(experience)]
    held += [experience.old_logprobs, experience.entropies]
    return sum(tensor.numel() * tensor.element_size() for tensor in held if isinstance(tensor, torch.Tensor))


def allocated(read: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    kept = read()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept
    return size


def test_the_tensors_of_an_experience() -> None:
    groups = make_groups(NUM)
    experience, _ = make_experience(groups, None, pad_id=0, micro_batch_size=1, precision="fp32", temperature=1.0)
    shape = experience.ids.shape
    assert shape.numel() == SLOTS
    known = OldLogprobs(torch.zeros(shape), torch.zeros(shape))
    rewards = token_rewards(groups, experience.response_mask)
    experience = replace(experience, old=known, rewards=rewards, advantages=torch.zeros(shape))
    sums = UpdateSums(experience.response_mask)
    update = sum(value.numel() * 8 for value in vars(sums).values()
                 if isinstance(value, torch.Tensor) and value.dtype == torch.float64)  # fmt: skip
    assert update == 8
    assert tensor_bytes(experience) == SLOTS * 26
    assert tensor_bytes(experience) / 1e6 == pytest.approx(112, abs=0.5)


def test_the_rollouts_of_the_ranks_that_do_not_sample_before() -> None:
    groups = make_groups(256)
    tokens = sum(LENGTHS[:256])
    sent = packed(groups)
    assert unpacked(sent) == groups
    assert len(sent) / tokens == pytest.approx(18.4, abs=0.3)
    assert allocated(lambda: unpacked(sent)) / tokens == pytest.approx(34, abs=2)


def held_bytes(part: RowPart) -> int:
    """As they came, and as tensors [R, T']."""
    rows = part.experience()
    flat = [part.numbers, part.lengths, part.ids, part.is_response, *part.values.values()]
    padded = [rows.ids, rows.attention_mask, rows.response_mask, rows.advantages, rows.old_logprobs]
    return sum(tensor.nbytes for tensor in (*flat, *padded) if tensor is not None)


def test_what_a_rank_gets_and_holds_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups(NUM)
    experience, _ = make_experience(groups, None, pad_id=0, micro_batch_size=1, precision="fp32", temperature=1.0)
    monkeypatch.setattr(row_shares, "world_size", lambda: 4)
    masks = (experience.ids, experience.attention_mask, experience.response_mask)
    assert int(masks[1].sum()) < MOST_TOKENS, "one portion"
    cuts = cuts_of_ranks(*masks[:2], torch.arange(NUM), True, 8)
    known = torch.rand(masks[0].shape) * masks[2]
    found = {}
    for name, values in (("scores", {}), ("update", {"advantages": known, OLD: known})):
        parts = [RowPart.of(masks, values, own, 0) for own in cuts]
        found[name] = [max(len(packed(part)) for part in parts) / 1e6, max(map(held_bytes, parts)) / 1e6]
    assert found["scores"] == pytest.approx([1.6, 8.4], abs=0.1)
    assert found["update"] == pytest.approx([3.6, 19.5], abs=0.1)
    # log-probs and entropies of its own response tokens go back
    back = max(int(masks[2][torch.cat([rows for rows, _ in own])].sum()) for own in cuts) * 8
    assert back / 1e6 == pytest.approx(2.0, abs=0.1)


def test_the_figures_of_16384_full_rollouts_on_12_ranks() -> None:
    shape = (48, 4096)
    ids, whole = torch.randint(100_000, 105_000, shape).int(), torch.ones(shape, dtype=torch.bool)
    masks, known = (ids, whole, whole), {"advantages": torch.rand(shape), OLD: torch.rand(shape)}
    cuts = [(torch.arange(start, start + 8), 4096) for start in range(0, 48, 8)]
    scores, update = RowPart.of(masks, {}, cuts, 0), RowPart.of(masks, known, cuts, 0)
    tokens = ids.numel()
    assert held_bytes(update) / tokens * MOST_TOKENS / 12 / 1e6 == pytest.approx(9.4, abs=0.1)
    every = 16_384 * 4096
    sent = len(packed(scores)) + len(packed(update))
    assert sent / tokens * every / 1e9 == pytest.approx(1.2, abs=0.05)
    # before: tensors of 26 bytes and objects of 34 per token on every rank; what was sent to each is 18 and 10 of them
    assert (26 + 34) * every / 1e9 == pytest.approx(4.0, abs=0.05)
