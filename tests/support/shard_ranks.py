"""Weights that ZeRO-3 cuts, for `test_sharded_weights.py`: `shard_ranks.py SCENARIO POLICY FOLDER [KEY=VALUE ...]`,
behind a launcher. Rank 0 has the engines."""

import asyncio
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch

from espalier.models.load import load_policy
from espalier.models.merged import adapter_scalings
from espalier.rl.delivery import weight_sync
from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.delivery.sharded_weights import ShardedPolicy, ShardedWeights
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.policy import without_weights
from espalier.rl.probes.canary import Canary
from espalier.rl.training_engines import make_training_engine
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.distributed import is_main_rank, process_group, rank
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.logs import set_up_logging
from espalier.runtime.rank_calls import RankCalls
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import ServerGone
from espalier.sampling.weight_chain import Invitation
from espalier.training import shards
from espalier.training.engine import Engine
from espalier.training.shards import GatheredWeights, Shards
from tests.support.resident_memory import peak_mib
from tests.support.rl_cases import FakeEngine, StreamEnd
from tests.support.whole_copies import WholeCopies, merged_weights

CANARIES = [Canary(list(range(5, 25)), start=8), Canary(list(range(40, 70)), start=10)]
BUCKET_BYTES = 2**16
Held = dict[str, torch.Tensor]


class Keeping(StreamEnd):
    """Keeps what it receives; with `is_lost` it takes one tensor and is gone."""

    def __init__(self, is_lost: bool = False):
        self.is_lost = is_lost
        self.found: Held = {}
        self.num_loads = 0

    async def load(self, key: str, number: int) -> None:
        self.num_loads += 1
        if not self.is_lost:
            self.found = await self.received()
            return
        await asyncio.to_thread(next, self.weights.receive())
        self.process: Any = None
        raise ServerGone("the engine has died")

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        return []


class Counted:
    """deepspeed.zero.GatheredParameters, counting the bytes that are whole at once on this rank."""

    def __init__(self, shards: Shards):
        self.shards, self.live, self.most, self.num_calls = shards, 0, 0, 0
        self.gather, shards._gather = shards._gather, self

    @contextmanager
    def __call__(self, tensors: Sequence[torch.Tensor], **how: Any) -> Iterator[None]:
        self.num_calls += 1
        with self.gather(tensors, **how):
            size = sum(map(self.shards.size, tensors))
            self.live += size
            self.most = max(self.most, self.live)
            yield
        self.live -= size


def whole_weights(engine: Engine, scalings: dict[str, float]) -> Held:
    """Return copies of all weights, gathered at once as nothing else does it, on every rank; adapters merged."""
    module = engine.model.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        copies: dict[int, torch.Tensor] = {}  # tied ones stay one
        found = {
            name: copies.setdefault(value.data_ptr(), value.detach().clone())
            for name, value in module.state_dict().items()
        }
        return merged_weights(found, scalings)


def parts_of(engine: Engine) -> Held:
    """Return copies of what this rank holds of each weight, and of what the optimizer does."""
    assert engine.shards is not None
    kept = {name: getattr(one, "ds_tensor", one).detach().clone() for name, one in engine.shards.tensors.items()}
    flat = getattr(engine.model.optimizer, "fp32_partitioned_groups_flat", [])
    return kept | {f"optimizer {number}": value.detach().clone() for number, value in enumerate(flat)}


def assert_equal(one: Held, other: Held) -> None:
    assert list(one) == list(other), (list(one), list(other))
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def engine_with_own_head(path: Path, stale: Sequence[str] = ()) -> FakeEngine:
    """Keep the head apart from the embeddings, as vLLM does on CPUs."""
    engine = FakeEngine(path, stale)
    engine.model.lm_head.weight = torch.nn.Parameter(engine.model.lm_head.weight.detach().clone())
    return engine


def sync_to(*engines: Any) -> WeightSync:
    sync = WeightSync(engines, precision="fp32", dtype=torch.float32)
    sync.canaries = CANARIES
    return sync


def deliver(weights: PolicyWeights, *engines: Any) -> None:
    with BackgroundLoop() as loop:
        weights.on_all_ranks(lambda: loop.run(sync_to(*engines).deliver(weights)))


def check_delivery(weights: ShardedWeights, whole: Held, path: Path) -> None:
    """What arrives is what there is, twice; no more than a group is whole at once."""
    counted = Counted(weights.policy.weights.shards)
    engine = Keeping()
    for _ in range(2):
        deliver(weights, engine)
        if is_main_rank():
            assert_equal(engine.found, whole)
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in weights.kinds.values()]
    largest = max(map(weights.policy.weights._size, weights.kinds))
    assert counted.live == 0
    assert 0 < counted.most <= max(BUCKET_BYTES, largest) < sum(sizes) / 4
    walked = dict(weights.whole())  # as the moving average does, on every rank
    assert list(walked) == (list(whole) if is_main_rank() else [])


def check_proof(weights: ShardedWeights, engine: Engine, whole: Held, path: Path, is_plain: bool) -> None:
    """The sharded model says of the canaries what whole weights say, and is as it was after the proof."""
    before = parts_of(engine)
    held = WholeCopies(without_weights(load_policy(str(path), "eager"), torch.device("cpu")), whole)
    scales = dict.fromkeys(whole, 0.4)
    pairs: list[tuple[PolicyWeights, WholeCopies]] = [(weights, held)]
    if is_plain:  # noise on what adapters are added to is another one than on their sum
        pairs.append((weights.perturbed(scales, 3), held.perturbed(scales, 3)))
        for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
            pairs.append((pairs[1][0].without_noise(name), pairs[1][1].without_noise(name)))
    for number, (one, other) in enumerate(pairs):
        found, expected = one.scores(CANARIES, "fp32"), other.scores(CANARIES, "fp32")
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=lambda text, n=number: f"{n}: {text}")
        rounded = [part.scores(CANARIES, "fp32", torch.bfloat16).logprobs for part in (one, other)]
        assert not torch.equal(rounded[0], found.logprobs)
    if is_plain:
        deliver(pairs[1][0], taking := Keeping())
        if is_main_rank():
            assert_equal(taking.found, dict(pairs[1][1].items()))
    assert_equal(parts_of(engine), before)
    weight_sync.ENOUGH_TOKENS = len(CANARIES[0].ids) - CANARIES[0].start  # else the second is asked
    with BackgroundLoop() as loop:
        for stale, named in ((None, ""), ("lm_head.weight", "from a stale lm_head.weight")):
            sync = sync_to(engine_with_own_head(path, [stale] if stale else []))
            error = weights.on_all_ranks(lambda sync=sync: loop.run(caught(sync.prove_delivery(weights))))
            assert named in error, error
            assert bool(error) == bool(named), error
            assert_equal(parts_of(engine), before)
        sync = sync_to(engine_with_own_head(path))
        found = weights.on_all_ranks(lambda: loop.run(sync.sync(weights, 0)))
        assert found["canary_gap"] < 1e-4


async def caught(call: Any) -> str:
    try:
        await call
    except Exception as error:
        return str(error)
    return ""


def check_lost(weights: ShardedWeights, whole: Held) -> None:
    """The delivery is made again, whole, to the engine that is left; where none is left the error is rank 0's."""
    left, lost = Keeping(), Keeping(is_lost=True)
    deliver(weights, left, lost)
    if is_main_rank():
        assert lost.process is None
        assert left.num_loads == 2
        assert_equal(left.found, whole)
    deliver(weights, left)
    with BackgroundLoop() as loop:
        gone = weights.on_all_ranks(lambda: loop.run(caught(sync_to(Keeping(is_lost=True)).deliver(weights))))
    assert gone == "no engine is left that weights could be sent to", gone


READER = """
import json, sys
from espalier.sampling.weight_stream import Invitation, WeightReceiver
end = WeightReceiver(Invitation(**json.loads(sys.argv[1])), int(sys.argv[2]))
print("joined", flush=True)
for _ in sys.stdin:
    print(sum(1 for _ in end.receive()), flush=True)
"""


class Reading(StreamEnd):
    """Reads what it is sent, in a process of its own, and keeps nothing."""

    async def join_weights(self, invitation: Invitation, first_rank: int) -> None:
        arguments = ["-c", READER, json.dumps(invitation.as_dict()), str(first_rank)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.reader = await asyncio.create_subprocess_exec(sys.executable, *arguments, **pipes)
        await self._line()

    async def load(self, key: str, number: int) -> None:
        assert self.reader.stdin is not None
        self.reader.stdin.write(b"next\n")
        self.num_read = int(await self._line())

    async def _line(self) -> bytes:
        assert self.reader.stdout is not None
        return await asyncio.wait_for(self.reader.stdout.readline(), 60)


def check_peak(weights: ShardedWeights, path: Path, folder: Path) -> None:
    """Rank 0's resident memory while it delivers and saves, beside what a whole copy takes."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back at once
    num_mib = sum(shape.numel() * dtype.itemsize for shape, dtype in weights.kinds.values()) / 2**20
    largest = max(map(weights.policy.weights._size, weights.kinds)) / 2**20
    weights.policy.groups = weights.policy.weights.groups()
    engine, sync = Reading(), sync_to()
    sync.engines = [engine]
    with BackgroundLoop() as loop:
        found = [peak_mib(lambda: weights.on_all_ranks(lambda: loop.run(sync.deliver(weights)))) for _ in range(3)]
    network = without_weights(load_policy(str(path), "eager"), torch.device("cpu"))
    found.append(peak_mib(lambda: weights.policy.weights.save(network, folder / "saved", 40 * 2**20)))
    if is_main_rank():
        assert engine.num_read == len(weights.kinds)
        engine.reader.kill()
        ctypes.CDLL(None).malloc_trim(0)  # or a copy stands where something else stood
        held = peak_mib(lambda: [torch.ones(shape, dtype=dtype) for shape, dtype in weights.kinds.values()])
        rises = ", ".join(f"{value:.0f}" for value in found)
        print(f"{num_mib:.0f} MiB of weights, the largest {largest:.0f}; rank 0 rises by {rises} in three deliveries "
              f"and for files of 40, by {held:.0f} for a whole copy", file=sys.stderr)  # fmt: skip
        assert max(found) < num_mib / 5
        assert held > 0.6 * num_mib


def check_saved(weights: ShardedWeights, engine: Engine, whole: Held, path: Path, folder: Path) -> None:
    """In one file or several, transformers reads what there was; rank 0 holds one file's weights at most."""
    network = without_weights(load_policy(str(path), "eager"), torch.device("cpu"))
    for name, limit in (("one", 2**31), ("several", 50_000)):
        weights.policy.weights.save(network, folder / name, limit)
        if is_main_rank():
            files = sorted(path.name for path in (folder / name).iterdir())
            assert ("model.safetensors.index.json" in files) == (name == "several")
            assert not any((folder / name / file).is_dir() for file in files)
            read = load_policy(str(folder / name), "eager").state_dict()
            assert_equal({name: read[name] for name in whole}, whole)
    engine.save_model(folder / "engine")


def fail_on_rank_1(policy: ShardedPolicy) -> None:
    """Have a large weight of the second layer be one too many for it."""
    numbers = policy.numbers

    def failing(name: str, start: int, stop: int) -> Any:
        if "layers.1" in name and rank() == 1:
            raise MemoryError("no room for a slice")
        return numbers(name, start, stop)

    policy.numbers = failing  # type: ignore[method-assign]


def main() -> None:
    """One scenario."""
    torch.set_num_threads(1)
    set_up_logging()
    scenario, path, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    fixed = [f"output_dir={folder}", f"model.path={path}", "precision=fp32"]
    config = compose_config(RLConfig, "rl", [*fixed, *sys.argv[4:]])
    with process_group(timeout_seconds=60, is_needed_alone=True):
        torch.manual_seed(0)
        model: Any = load_policy(str(path), "eager")
        trained = build(config.lora).wrap(model) if config.lora else model
        if config.lora:
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.05)
        engine = make_training_engine(config, trained, config.optimizer, 1e-3, 1.0)
        scalings = adapter_scalings(engine.model.module)
        assert engine.shards is not None
        policy = ShardedPolicy(engine, GatheredWeights(engine.shards, scalings))
        policy.groups = policy.weights.groups(BUCKET_BYTES)
        assert len(policy.groups) > 3
        if scenario != "peak":
            shards.GROUP_BYTES = 10_000  # slices end within the ranks' stretches, and one is of both
            assert any(map(policy.weights.is_in_slices, policy.groups)) or config.lora
        weights = ShardedWeights(RankCalls(policy))
        if scenario == "peak":
            check_peak(weights, path, folder)
            return
        whole = whole_weights(engine, scalings)
        if scenario == "delivery":
            check_delivery(weights, whole, path)
            check_proof(weights, engine, whole, path, is_plain=not scalings)
        elif scenario == "lost":
            check_lost(weights, whole)
        elif scenario == "saved":
            check_saved(weights, engine, whole, path, folder)
        elif scenario == "rank_1":
            fail_on_rank_1(policy)
            deliver(weights, Keeping())
    print(f"rank {rank()} is done", file=sys.stderr)


if __name__ == "__main__":
    main()
