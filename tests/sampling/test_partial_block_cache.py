"""Blocks shared where they are not full, in an engine of dictionaries: what every sample reads must be its own prompt.

The stand-in schedules as vLLM does (whole blocks by hash, at once within a step; blocks freed in order and handed out
again while what they hold is known), computes nothing but writes down which token stands in which slot of which block.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.data.prefix_tree import num_distinct_tokens
from espalier.sampling.partial_block_cache import BlockPlanner, BlockTable, Match, common_length, copy_blocks


def test_the_block_that_shares_most_is_found() -> None:
    table = BlockTable()
    table.put(1, "p", (1, 2, 3))
    table.put(2, "p", (1, 2, 4, 5))
    table.put(3, "q", (1, 2, 4, 6))
    assert table.match("p", (1, 2, 4, 6)) is None, "nothing is there before the step ends"
    assert table.match_fresh("p", (1, 2, 4, 6)) == Match(2, 3)
    table.settle()
    assert table.match("p", (1, 2, 4, 6)) == Match(2, 3)
    assert table.match_fresh("p", (1, 2, 4, 6)) is None
    assert table.match("q", (1, 2, 4, 6)) == Match(3, 4)
    assert table.match("p", (9,)) is None
    table.drop(2)
    assert table.match("p", (1, 2, 4, 6)) == Match(1, 2)
    table.put(1, "q", (7,))
    assert (table.match("p", (1,)), len(table)) == (None, 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_table_against_a_search_through_all_blocks(seed: int) -> None:
    rng = random.Random(seed)
    table, held = BlockTable(), {}
    for _ in range(200):
        block, parent = rng.randrange(12), rng.choice("ab")
        tokens = tuple(rng.randrange(3) for _ in range(rng.randint(0, 5)))
        table.put(block, parent, tokens)
        held[block] = (parent, tokens)
        if rng.random() < 0.3:
            gone = rng.randrange(12)
            table.drop(gone)
            held.pop(gone, None)
        table.settle()
        wanted = tuple(rng.randrange(3) for _ in range(5))
        best = max((common_length(row, wanted) for name, row in held.values() if name == parent), default=0)
        found = table.match(parent, wanted)
        assert (found.length if found else 0) == best
        if found:
            assert held[found.block][1][:best] == wanted[:best]


@dataclass
class Engine:
    """Blocks, a queue, and one step at a time; `computed` counts prompt tokens."""

    num_blocks: int
    size: int
    budget: int
    max_running: int
    computed: int = 0
    longest_wait: int = 0
    slots: dict[int, list[int | None]] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planner = BlockPlanner(self.size)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.hashes: dict[Any, int] = {}
        self.uses = [0] * self.num_blocks

    def request(self, name: str, tokens: list[int], num_new: int) -> Any:
        return SimpleNamespace(request_id=name, all_token_ids=list(tokens), num_prompt_tokens=len(tokens), blocks=[],
                               num_tokens=len(tokens), done=0, left=num_new, waited=0, lora_request=None,
                               cache_salt=None, block_hashes=self.hash_all(tokens))  # fmt: skip

    def hash_all(self, tokens: list[int]) -> list[Any]:
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.hashes = {key: held for key, held in self.hashes.items() if held != block}
        self.uses[block] = 1
        return block

    def cached(self, request: Any) -> list[int]:
        found = []
        for key in request.block_hashes[: (request.num_tokens - 1) // self.size]:
            if key not in self.hashes:
                break
            found.append(self.hashes[key])
        return found

    def step(self, waiting: list[Any]) -> None:
        budget, scheduled, fresh = self.budget, {}, {}
        for request in self.running:
            count = min(budget, request.num_tokens - request.done)
            scheduled[request.request_id], budget = count, budget - count
            fresh[request.request_id] = self.grow(request, request.done + count)
        admitted = []
        for request in list(waiting):
            local = self.cached(request)
            need = -(-request.num_tokens // self.size) - len(local)
            if (
                not budget
                or len(self.running) + len(admitted) >= self.max_running
                or need > len(self.free) - len(local)
            ):
                break
            shared = self.planner.num_shared(request, len(local) * self.size)
            if shared is None:
                request.waited += 1
                self.longest_wait = max(self.longest_wait, request.waited)
                continue
            waiting.remove(request)
            for block in local:
                self.free.pop(block, None)
                self.uses[block] += 1
            request.blocks, request.done = list(local), len(local) * self.size + shared
            count = min(budget, request.num_tokens - request.done)
            assert count >= 1, "the last token is always computed"
            budget, scheduled[request.request_id] = budget - count, count
            self.grow(request, request.done + count)
            self.planner.admit(request, request.blocks, shared)
            admitted.append(request)
            self.hash(request, request.done + count)
        for request in admitted:
            self.planner.advance(request.request_id, request.blocks, request.done, scheduled[request.request_id])
        for request in self.running:
            self.planner.hand_out(fresh[request.request_id])
            if self.planner.is_unfinished(request.request_id):
                self.planner.advance(request.request_id, request.blocks, request.done, scheduled[request.request_id])
        self.running += admitted
        self.forward(scheduled)

    def grow(self, request: Any, end: int) -> list[int]:
        fresh = []
        while len(request.blocks) * self.size < end:
            fresh.append(self.take())
            request.blocks.append(fresh[-1])
        self.hash(request, end)
        return fresh

    def hash(self, request: Any, end: int) -> None:
        for place, key in enumerate(request.block_hashes[: end // self.size]):
            self.hashes.setdefault(key, request.blocks[place])

    def forward(self, scheduled: dict[str, int]) -> None:
        copies = self.planner.end_step()
        read = [list(self.slots[block]) for block in copies.sources]
        self.slots.update(zip(copies.targets, read, strict=True))
        for request in list(self.running):
            end = request.done + scheduled[request.request_id]
            self.computed += max(0, min(end, request.num_prompt_tokens) - request.done)
            for place in range(request.done, end):
                slot = self.slots.setdefault(request.blocks[place // self.size], [None] * self.size)
                slot[place % self.size] = request.all_token_ids[place]
            request.done = end
        for request in list(self.running):
            read_back = [self.slots[request.blocks[p // self.size]][p % self.size] for p in range(request.done)]
            assert read_back == request.all_token_ids[: request.done], "a sample reads another's tokens"
            if request.done == request.num_tokens:
                request.left -= 1
                request.all_token_ids.append(random.Random(f"{request.request_id} {request.left}").randrange(3))
                request.num_tokens += 1
                request.block_hashes = self.hash_all(request.all_token_ids)
                if not request.left:
                    self.end(request)

    def end(self, request: Any) -> None:
        self.running.remove(request)
        self.planner.finish(request, request.blocks, request.done)
        for block in reversed(request.blocks):
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free[block] = None

    def run(self, waiting: list[Any]) -> None:
        steps = 0
        while waiting or self.running:
            self.step(waiting)
            steps += 1
            assert steps < 10_000, "the engine is stuck"


def states(rng: random.Random, number: int) -> list[list[int]]:
    """Prefixes of a few random texts, as states are."""
    texts = [[0, 1, 2, 0, 1] + [rng.randrange(3) for _ in range(rng.randint(5, 30))] for _ in range(4)]
    return sorted(text[: rng.randint(3, len(text))] for text in rng.choices(texts, k=number))


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_reads_its_own_prompt_however_blocks_are_reused(seed: int) -> None:
    """Few blocks, small steps, prompts computed in parts: sources are handed out again all the time."""
    rng = random.Random(seed)
    size = rng.choice([2, 4, 8])
    engine = Engine(rng.choice([60, 90, 200]), size, rng.choice([5, 16, 100]), rng.choice([1, 4, 16]))
    waiting = [engine.request(f"{number}/{k}", tokens, rng.randint(1, 6))
               for number, tokens in enumerate(states(rng, 25)) for k in range(3)]  # fmt: skip
    engine.run(waiting)
    assert sorted(engine.free) == list(range(engine.num_blocks))


@pytest.mark.parametrize("seed", range(10))
def test_with_room_each_distinct_token_is_computed_once_and_the_last_one_of_every_sample(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(5000, 8, 1000, 50)
    prompts = [list(row) for row in dict.fromkeys(map(tuple, states(rng, 40)))]
    waiting = [engine.request(f"{number}/{k}", tokens, 20) for number, tokens in enumerate(prompts) for k in range(4)]
    engine.run(waiting)
    distinct = num_distinct_tokens(prompts)
    assert engine.computed <= distinct + 4 * len(prompts), "one token a sample at most beside the distinct ones"
    assert engine.longest_wait <= 8 * 2, "a request waits for blocks that are being computed, not for ever"


def test_prefixes_of_other_adapters_are_not_shared() -> None:
    planner = BlockPlanner(4)
    engine = Engine(10, 4, 100, 10)
    one, other = engine.request("one", [1, 2, 3], 1), engine.request("other", [1, 2, 3], 1)
    other.lora_request = SimpleNamespace(lora_name="an adapter")
    assert planner.num_shared(one, 0) == 0
    planner.admit(one, [0], 0)
    planner.advance("one", [0], 0, 3)
    planner.end_step()
    assert planner.num_shared(other, 0) == 0
    assert planner.num_shared(engine.request("third", [1, 2, 3], 1), 0) == 2, "the last token is computed"


def test_the_module_offers_one_thing_to_the_engine() -> None:
    import espalier.sampling.partial_block_cache as module

    with pytest.raises(AttributeError, match="has no attribute 'Connector'"):
        _ = module.Connector


@pytest.mark.parametrize(("sources", "targets"), [([0, 1, 1], [3, 4, 2]), ([0, 3, 4], [3, 4, 0])])
def test_blocks_are_copied_as_if_all_were_read_before_one_is_written(sources: list[int], targets: list[int]) -> None:
    cache = torch.arange(5 * 6).reshape(5, 2, 3)
    expected = cache.clone()
    expected[targets] = cache[sources]
    copy_blocks(cache, sources, targets)
    assert torch.equal(cache, expected)
