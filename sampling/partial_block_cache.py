"""Prompts computed once to the last token: an engine's cache blocks shared even where they are not full.

vLLM's prefix cache serves whole blocks. Each of K samples of one state therefore computes the state's last, unfinished
block anew, 1 to `block_size` tokens, and so does every state that begins inside a block of another: with K = 4 and
blocks of 32 tokens that is more than all else together. Here the engine copies such a block instead (copy on write):
of every prompt it computes what no one computed before, and the last token of every sample, whose logits it needs.

`BlockTable` knows what each block of the cache holds. `PartialBlockCache`, built on demand where vLLM is installed,
brings it into the engine through vLLM's own extension point (a KV connector, `KVConnectorBase_V1` of vLLM 0.32);
conf/engine_options/partial_block_cache.yaml has the flags. The engine counts copied tokens as `prompt_tokens_by_source`
with the source `external_kv_transfer`, and those it computed with `local_compute`.

Why a copy is sound. Blocks are copied before a step's forward pass, all read before any is written, so a source holds
what it held when the step before ended, even where this step gives it to someone else. A block counts from the step
after the one that computes it: a request that would gain from a block of the running step waits for that step. What
is known of a block is forgotten as soon as the scheduler hands it out again, the one that was free longest first (vLLM
itself hands out unfinished ones first), and all of it when the engine's own prefix cache is reset (new weights).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Tokens = tuple[int, ...]
Held = tuple[Tokens, int]  # the tokens of a block, its id


@dataclass(frozen=True)
class Match:
    """A block whose first `length` tokens are those that are asked for."""

    block: int
    length: int


@dataclass
class _Shelf:
    """The blocks that stand after one prefix, sorted by their tokens: the best match is a neighbour."""

    rows: list[Held] = field(default_factory=list)

    def best(self, wanted: Tokens) -> Match | None:
        place = bisect_left(self.rows, (wanted, -1))
        found = [
            Match(block, common_length(tokens, wanted)) for tokens, block in self.rows[max(0, place - 1) : place + 1]
        ]
        best = max(found, key=lambda match: match.length, default=None)
        return best if best is not None and best.length else None


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences share from the start."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


class BlockTable:
    """What the blocks of a cache hold: at most `block_size` tokens each, after a prefix that `parent` names.

    What is `put` is fresh until `settle` and found by `match_fresh` alone; then by `match`.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Tokens]] = {}
        self._shelves: dict[Any, _Shelf] = {}
        self._fresh_shelves: dict[Any, _Shelf] = {}
        self._fresh: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def put(self, block: int, parent: Any, tokens: Tokens) -> None:
        """From the next `settle` on the block holds these tokens, whatever it held before."""
        self.drop(block)
        if tokens:
            self._held[block] = (parent, tokens)
            self._fresh.add(block)
            insort(self._fresh_shelves.setdefault(parent, _Shelf()).rows, (tokens, block))

    def drop(self, block: int) -> None:
        """Nothing is known of the block any more."""
        if block not in self._held:
            return
        parent, tokens = self._held.pop(block)
        shelves = self._fresh_shelves if block in self._fresh else self._shelves
        self._fresh.discard(block)
        rows = shelves[parent].rows
        del rows[bisect_left(rows, (tokens, block))]
        if not rows:
            del shelves[parent]

    def settle(self) -> None:
        """What was put is there."""
        for block in self._fresh:
            parent, tokens = self._held[block]
            insort(self._shelves.setdefault(parent, _Shelf()).rows, (tokens, block))
        self._fresh.clear()
        self._fresh_shelves.clear()

    def clear(self) -> None:
        """Forget everything."""
        for held in (self._held, self._shelves, self._fresh_shelves, self._fresh):
            held.clear()

    def match(self, parent: Any, wanted: Tokens) -> Match | None:
        """Return the settled block after `parent` that shares most of `wanted` from the start; None where none does."""
        return self._best(self._shelves, parent, wanted)

    def match_fresh(self, parent: Any, wanted: Tokens) -> Match | None:
        """Return the same among what is not settled yet."""
        return self._best(self._fresh_shelves, parent, wanted)

    def _best(self, shelves: dict[Any, _Shelf], parent: Any, wanted: Tokens) -> Match | None:
        shelf = shelves.get(parent)
        return shelf.best(wanted) if shelf is not None and wanted else None


@dataclass
class BlockCopies:
    """What a step copies before its forward pass: block `sources[i]` to block `targets[i]`."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class BlockPlanner:
    """The scheduler's side: which tokens a request need not compute, and what is copied for it.

    A request is anything with `request_id`, `all_token_ids`, `num_prompt_tokens`, `block_hashes` (of its full blocks,
    each of the whole prefix) and `lora_request`, `cache_salt`, which keep foreign prefixes apart.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.table = BlockTable()
        self._matches: dict[str, Match] = {}
        self._cached: dict[str, int] = {}
        self._unfinished: dict[str, Any] = {}
        self._copies = BlockCopies()

    def num_shared(self, request: Any, num_cached: int) -> int | None:
        """Return how many tokens after the first `num_cached` (whole blocks) can be copied; None: ask again next
        step."""
        self._matches.pop(request.request_id, None)
        self._cached[request.request_id] = num_cached
        place = num_cached // self.block_size
        end = min(num_cached + self.block_size, request.num_tokens - 1)  # the last one's logits are needed
        wanted = tuple(request.all_token_ids[num_cached:end])
        parent = self._parent(request, place)
        match, fresh = self.table.match(parent, wanted), self.table.match_fresh(parent, wanted)
        if fresh is not None and fresh.length > (match.length if match else 0):
            return None
        if match is None:
            return 0
        self._matches[request.request_id] = match
        return match.length

    def admit(self, request: Any, blocks: Sequence[int], num_shared: int) -> None:
        """The request that was asked about last has its blocks; after this step they hold its tokens."""
        num_cached = self._cached.pop(request.request_id, 0)
        place = num_cached // self.block_size
        match = self._matches.pop(request.request_id, None)
        if num_shared and match is not None:
            self._copies.sources.append(match.block)
            self._copies.targets.append(blocks[place])
        for block in blocks[place:]:
            self.table.drop(block)
        self._put(request, blocks, num_cached, request.num_tokens)
        self._unfinished[request.request_id] = request

    def advance(self, request_id: str, blocks: Sequence[int], num_computed: int, num_scheduled: int) -> None:
        """A step computes tokens `num_computed` .. + `num_scheduled` of a request whose prompt is not done yet."""
        request = self._unfinished.get(request_id)
        if request is None:
            return
        end = num_computed + num_scheduled
        self._put(request, blocks, num_computed, end)
        if end >= request.num_tokens:
            del self._unfinished[request_id]
        else:
            for block in blocks[-(-end // self.block_size) :]:
                self.table.drop(block)

    def is_unfinished(self, request_id: str) -> bool:
        """Say whether a part of the request's prompt is still to be computed."""
        return request_id in self._unfinished

    def hand_out(self, blocks: Iterable[int]) -> None:
        """These blocks were given to a request that goes on: what they held is lost after this step."""
        for block in blocks:
            self.table.drop(block)

    def finish(self, request: Any, blocks: Sequence[int], num_computed: int) -> None:
        """A request has ended; its blocks hold what it generated too."""
        self._matches.pop(request.request_id, None)
        self._cached.pop(request.request_id, None)
        self._unfinished.pop(request.request_id, None)
        self._put(request, blocks, request.num_prompt_tokens, min(num_computed, request.num_tokens - 1))

    def end_step(self) -> BlockCopies:
        """Return the step's copies; what it computes is there from now on."""
        copies, self._copies = self._copies, BlockCopies()
        self.table.settle()
        return copies

    def _put(self, request: Any, blocks: Sequence[int], start: int, end: int) -> None:
        size = self.block_size
        for place in range(start // size, min(len(blocks), -(-end // size))):
            tokens = tuple(request.all_token_ids[place * size : min(end, (place + 1) * size)])
            self.table.put(blocks[place], self._parent(request, place), tokens)

    def _parent(self, request: Any, place: int) -> Any:
        if place and place <= len(request.block_hashes):
            return request.block_hashes[place - 1]
        if place:
            return ("unknown", request.request_id, place)  # matches nothing
        lora = request.lora_request
        return ("first", lora.lora_name if lora is not None else "", request.cache_salt)


def _free_blocks(free: Callable[[Any], None], queue: Any, table: BlockTable, ordered_blocks: Iterable[Any]) -> None:
    """Free blocks as vLLM's `BlockPool` does by `free`, and have those that are not full, which it hands out first,
    wait behind all others where the table knows what they hold: whoever goes on from there comes a moment later."""
    blocks = list(ordered_blocks)
    free(blocks)
    for block in blocks:
        if block.ref_cnt == 0 and block.block_hash is None and block.block_id in table:
            queue.remove(block)
            queue.append(block)


class _InScheduler:
    """`BlockPlanner` in vLLM's scheduler; the methods are those of vLLM's `KVConnectorBase_V1`."""

    _planner: BlockPlanner
    _kv_cache_manager: Any
    _pool: Any
    _cache_map: Any = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        gpu_block_pool.free_blocks = partial(_free_blocks, gpu_block_pool.free_blocks, gpu_block_pool.free_block_queue,
                                             self._planner.table)  # fmt: skip

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._pool.cached_block_hash_to_block is not self._cache_map:  # reset since: new weights
            self._cache_map = self._pool.cached_block_hash_to_block
            self._planner.table.clear()
        if request.skip_reading_prefix_cache:
            return 0, False
        return self._planner.num_shared(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BlockCopies:
        planner, scheduled = self._planner, scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            planner.advance(new.req_id, new.block_ids[0], new.num_computed_tokens, scheduled[new.req_id])
        rows = scheduler_output.scheduled_cached_reqs
        for name, fresh, computed in zip(rows.req_ids, rows.new_block_ids, rows.num_computed_tokens, strict=True):
            if fresh is not None and name not in rows.resumed_req_ids:
                planner.hand_out(fresh[0])
            if planner.is_unfinished(name):
                blocks = self._kv_cache_manager.get_block_ids(name)[0]
                planner.advance(name, blocks, computed, scheduled[name])
        return planner.end_step()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finish(request, block_ids, request.num_computed_tokens)
        return False, None

    def reset_cache(self) -> bool:
        self._planner.table.clear()
        return True


def copy_blocks(cache: Any, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy blocks of a cache [B, ...] to others of it, as if all were read before one is written."""
    if cache.device.type == "cpu" and not set(sources) & set(targets):
        for source, target in zip(sources, targets, strict=True):  # a third of the time of an index, and less
            cache[target].copy_(cache[source])
    else:
        cache[targets] = cache[sources]


class _InWorker:
    """The copies in vLLM's worker; the methods are those of vLLM's `KVConnectorBase_V1`."""

    _num_blocks: int
    _caches: Sequence[Any] = ()
    _get_connector_metadata: Any

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())
        if any(cache.shape[0] != self._num_blocks for cache in self._caches):
            shapes = sorted({tuple(cache.shape) for cache in self._caches})
            raise ValueError(f"a cache of {self._num_blocks} blocks laid out as {shapes} cannot be shared: "
                             "start it with server=own")  # fmt: skip

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        for cache in self._caches if copies.sources else ():
            copy_blocks(cache, copies.sources, copies.targets)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


def __getattr__(name: str) -> Any:
    """Return `PartialBlockCache`, where vLLM asks for it: its base class is vLLM's, which is not imported otherwise."""
    if name != "PartialBlockCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _connector()
    globals()[name] = found
    return found


def _connector() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

    class PartialBlockCache(_InScheduler, _InWorker, KVConnectorBase_V1):
        """What vLLM makes once in its scheduler and once in its worker."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            self._planner = BlockPlanner(vllm_config.cache_config.block_size)
            self._num_blocks = kv_cache_config.num_blocks
            if role == KVConnectorRole.SCHEDULER and len(kv_cache_config.kv_cache_groups) != 1:
                raise ValueError("partly filled blocks are shared for models with one kind of attention layer only: "
                                 "start it with server=own")  # fmt: skip

        @property
        def requires_kv_delivery(self) -> bool:
            return False

    return PartialBlockCache
