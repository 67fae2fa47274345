"""How many bytes a rank holds, and gets from others, of an iteration's rollouts: the figures of docs/reinforcement.md.

2,048 rollouts of 256 problems, prompts of 100 tokens, responses of 500 tokens in the mean and 2,000 at most, four
characters of text per token, 5,000 distinct ids, steps of 25 tokens, log-probs that the engine computed in float32;
GRPO without a critic or a reference. "Before" is the sum of what every rank held: int64 ids and attention mask,
float32 [N, T] for the weights of tokens, float64 [N, T] for the rises of an update, lists of Python numbers, all sent
by pickle, and sums of whole [N, T] tensors.
"""

import gc
import pickle
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from espalier.data.records import Problem, Trajectory
from espalier.rewards.score import Score
from espalier.rl.experience import make_experience, token_rewards
from espalier.rl.learner import UpdateSums
from espalier.rl.old_logprobs import OldLogprobs
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


def as_before(group: RolloutGroup) -> RolloutGroup:
    """With log-probs in a list, the same in the trajectory."""
    rollouts = []
    for rollout in group.rollouts:
        logprobs = list(rollout.logprobs)
        rollouts.append(replace(rollout, logprobs=logprobs, trajectory=replace(rollout.trajectory, logprobs=logprobs)))
    return replace(group, rollouts=rollouts)


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
    before = SLOTS * (8 + 8 + 1 + 5 * 4 + 4 + 8)
    assert before / 1e6 == pytest.approx(211, abs=0.5)


def test_the_rollouts_of_the_ranks_that_do_not_sample() -> None:
    groups = make_groups(256)
    tokens = sum(LENGTHS[:256])
    now, before = packed(groups), pickle.dumps([as_before(group) for group in groups])
    assert unpacked(now) == groups
    assert len(before) / tokens == pytest.approx(24.0, abs=0.3)
    assert len(now) / tokens == pytest.approx(18.4, abs=0.3)
    assert allocated(lambda: pickle.loads(before)) / tokens == pytest.approx(95, abs=2)
    assert allocated(lambda: unpacked(now)) / tokens == pytest.approx(34, abs=2)


def test_what_travels_between_ranks_in_an_iteration() -> None:
    """Bytes that a rank gets: a sum over W ranks brings 2 (W - 1) / W of a tensor in a ring, a gather (W - 1) / W of
    the tokens; rank 0's advantages come whole."""

    def sent(slots: int, tokens: int) -> tuple[float, float]:
        """Megabytes before and now: log-probs, entropies and the rises of an update; advantages."""
        before = 2 * 3 / 4 * slots * (4 + 4 + 8) + slots * 4
        return before / 1e6, (3 / 4 * tokens * (4 + 4) + tokens * 4) / 1e6

    assert sent(SLOTS, TOKENS) == pytest.approx((120.4, 10.2), abs=0.1)
    assert sent(16_384 * 4096, 16_384 * 4096) == pytest.approx((1879, 671), abs=1)
