"""The engine of `client=data_parallel_engines`, put through everything that reinforcement learning asks of it; run by
tests/sampling/test_one_process_engine.py in a process of its own, which vLLM changes for good.

    python -m tests.support.one_process_engine POLICY
"""

import asyncio
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from espalier.models.load import load_policy
from espalier.rl.delivery import weight_group
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.delivery.weight_update_engine import OwnEngine
from espalier.rl.probes.canary import Canary
from espalier.rl.probes.checks import CACHE, WEIGHTS
from espalier.sampling.client import Refused, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.one_process_engine import OneProcessEngine
from espalier.sampling.weight_stream import WeightSender
from espalier.training.engine import named_weights
from tests.support.pass_logprobs import token_logprobs

PROMPTS = [list(range(5 + k, 30 + 3 * k)) for k in range(6)]


async def same_text_as_vllm(client: OneProcessEngine) -> None:
    """Texts that are decoded here are those that vLLM makes token by token; log-probs are of the sampled tokens."""
    rows = [SampleRequest(str(k), "", ids) for k, ids in enumerate(PROMPTS)]
    greedy = SamplingParams(n=1, temperature=0.0, max_tokens=20, return_logprobs=True)
    own = await asyncio.gather(*(client.sample(row, greedy) for row in rows))
    theirs = await asyncio.gather(*(client.ask(ids, temperature=0.0, max_tokens=20) for ids in PROMPTS))
    engine = OwnEngine(client)
    for prompt, (sample,), found in zip(PROMPTS, own, theirs, strict=True):
        assert (sample.token_ids, sample.text) == (list(found.outputs[0].token_ids), found.outputs[0].text)
        assert sample.finish_reason == found.outputs[0].finish_reason
        again = (await engine.prompt_logprobs(prompt + sample.token_ids))[len(prompt) - 1 :]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        assert torch.allclose(torch.tensor(sample.logprobs), torch.tensor(again), atol=0.05)
    stopped = SamplingParams(n=2, temperature=1.0, max_tokens=20, stop=[own[0][0].text[:1]])
    for sample in await client.sample(rows[0], stopped):
        assert stopped.stop[0] not in sample.text
    whole = own[0][0]
    ends = replace(greedy, stop_tokens=[whole.token_ids[7]])
    (ended,) = await client.sample(rows[0], ends)
    num = whole.token_ids.index(whole.token_ids[7]) + 1
    assert (ended.token_ids, ended.finish_reason, ended.stop) == (whole.token_ids[:num], "stop", "")
    assert ended.logprobs is not None
    assert len(ended.logprobs) == num
    before = await client.ask(PROMPTS[0], temperature=0.0, max_tokens=max(1, num - 1))
    assert ended.text == (before.outputs[0].text if num > 1 else "")  # without the token that ended it
    with pytest.raises(Refused, match="leaves no room"):
        await client.sample(SampleRequest("long", "", [5] * 256), greedy)
    with pytest.raises(Refused, match="out of vocabulary"):
        await client.sample(SampleRequest("strange", "", [100_000] * 16), greedy)


async def whoever_gives_up_leaves_nothing(client: OneProcessEngine) -> None:
    """A cancelled request is taken out of the engine, and the others go on."""
    long = SamplingParams(n=4, temperature=1.0, max_tokens=200)
    asked = [asyncio.create_task(client.sample(SampleRequest(str(k), "", ids), long)) for k, ids in enumerate(PROMPTS)]
    await asyncio.sleep(0.05)
    assert await client.is_working()
    for task in asked[1:]:
        task.cancel()
    await asyncio.gather(*asked[1:], return_exceptions=True)
    assert len(await asked[0]) == 4
    await asyncio.sleep(0.05)
    assert not client.engine.has_unfinished_requests()
    assert not await client.is_working()


async def says_what_it_has_drawn(client: OneProcessEngine) -> None:
    """Tokens of samples that nobody has yet, those that have ended before others of their request included."""
    params = SamplingParams(n=4, temperature=1.0, max_tokens=100)
    alone = SamplingParams(n=1, temperature=1.0, max_tokens=40)
    asked = [asyncio.create_task(client.sample(SampleRequest(f"r{k}", "", ids), alone if k else params))
             for k, ids in enumerate(PROMPTS[:2])]  # fmt: skip
    seen: list[dict[str, int]] = []
    while not all(task.done() for task in asked):
        await asyncio.sleep(0)
        seen.append(client.drawn_so_far())
    for number, task in enumerate(asked):
        totals = [drawn[f"r{number}"] for drawn in seen if f"r{number}" in drawn]
        num = sum(len(sample.token_ids) for sample in task.result())
        assert totals == sorted(totals)
        assert 0 < totals[-1] < num
        assert totals[-1] >= num - 4, "one step before the end"
    assert client.drawn_so_far() == {}


async def follows_the_policy(client: OneProcessEngine, policy: str) -> None:
    """Deliveries, receipts, stamps, the prefix cache, and what is said where one of them is missing."""
    model = load_policy(policy, "eager")
    engine = OwnEngine(client)
    sync = WeightSync(engine, precision="bf16", dtype=torch.bfloat16)
    sync.canaries = [Canary(list(range(5, 45)), start=8)]
    assert await engine.served_version() == "default"
    await sync.prove_delivery(model)
    assert (await sync.sync(model, 0))["canary_gap"] < 0.05
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    assert (await sync.sync(model, 3))["canary_gap"] < 0.05
    await sync.check_version(3)
    with pytest.raises(StaleWeights, match="serves version '3', not 4"):
        await sync.check_version(4)
    await sync.ask_marker()
    assert await engine.cached_tokens(sync.canaries[0].ids[::-1])  # so that an empty cache is told from none

    class KeepsItsCache(OwnEngine):
        async def load(self, key: str, number: int) -> list[dict[str, str]] | None:
            return await self.client.receive_weights(key, number)

    class ReadsNothing(OwnEngine):
        async def load(self, key: str, number: int) -> list[dict[str, str]] | None:
            await self.client.receive_weights(key, number)
            return [{}]

    sync.engines = [KeepsItsCache(client)]
    with pytest.raises(StaleWeights) as told:
        await sync.sync(model, 4)
    assert told.value.fault.kind == CACHE
    sync.engines = [ReadsNothing(client)]
    with pytest.raises(StaleWeights, match="read 0 of") as told:
        await sync.deliver(named_weights(model))
    assert told.value.fault.kind == WEIGHTS


async def a_delivery_comes_once_and_to_its_own_trainer(client: OneProcessEngine, policy: str) -> None:
    """Asked for again it is its receipt; a trainer whose engine another one has taken gets nothing."""
    weights = named_weights(load_policy(policy, "eager"))
    first, second = WeightSync(OwnEngine(client)), WeightSync(OwnEngine(client))
    await first.deliver(weights)
    assert first._group is not None
    key = first._group.stream.invitation.key
    (receipt,) = await client.receive_weights(key, 1)  # at once: nothing is waited for
    assert receipt == first._sent[-1]
    await client.join_weights(first._group.stream.invitation.as_dict(), 1)
    await second.deliver(weights)
    with pytest.raises(ServerGone, match="does not listen to this trainer: another one has taken it"):
        await first.deliver(weights)
    await second.deliver(weights)
    for sync in (first, second):
        sync.close()


async def takes_weights_in_the_middle_of_requests(client: OneProcessEngine, policy: str) -> None:
    """Every token's log-prob is of the version that it says drew it, behind all tokens before it."""
    model, sync = load_policy(policy, "eager"), WeightSync(OwnEngine(client))
    before = {name: value.clone() for name, value in named_weights(model).items()}
    generator = torch.Generator().manual_seed(0)
    after = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in before.items()
    }
    await sync.deliver(before, "1")
    params = SamplingParams(n=4, temperature=1.0, max_tokens=120, return_logprobs=True)
    asked = asyncio.create_task(client.sample(SampleRequest("long", "", PROMPTS[0]), params))
    for _ in range(60):  # steps of the engine
        await asyncio.sleep(0)
    await sync.deliver(after, "2")
    num_mixed = 0
    for sample in await asked:
        starts = [start for start, _ in sample.versions]
        assert [stamp for _, stamp in sample.versions] == ["1", "2"][: len(starts)]
        own, ids = torch.tensor(sample.logprobs), torch.tensor([[*PROMPTS[0], *sample.token_ids]])
        distances = []
        for weights in (before, after):
            model.load_state_dict(weights)
            with torch.no_grad():
                found = token_logprobs(model(input_ids=ids).logits, ids)[0][0, len(PROMPTS[0]) - 1 :]
            distances.append((own - found).abs())
        for start, end, (right, wrong) in zip(
            starts, [*starts[1:], len(own)], (distances, distances[::-1]), strict=False
        ):
            if end - start >= 8:
                assert right[start:end].mean() < 0.05 < 4 * 0.05 < wrong[start:end].mean()
                num_mixed += start > 0
    assert num_mixed >= 1
    await sync.deliver(before)
    sync.close()


async def draws_as_if_nothing_was_asked(client: OneProcessEngine) -> None:
    """Samples without a seed are the same behind others, if the random state is put back, and else are not."""
    engine = OwnEngine(client)
    params = SamplingParams(n=4, temperature=1.0, max_tokens=20)

    async def draw() -> list[list[int]]:
        assert await client.reset_cache()  # what comes from the cache may differ in its last bits
        rows = [await client.sample(SampleRequest(str(k), "", ids), params) for k, ids in enumerate(PROMPTS)]
        return [sample.token_ids for row in rows for sample in row]

    await engine.keep_random_state()
    first, other = await draw(), await draw()
    assert first != other
    await engine.put_random_state_back()
    assert await draw() == first
    seeded = SamplingParams(n=4, temperature=1.0, max_tokens=20, is_seeded=True)
    await engine.put_random_state_back()
    await client.sample(SampleRequest("further", "", PROMPTS[0]), seeded)
    await engine.cached_tokens(PROMPTS[1])
    await engine.put_random_state_back()
    assert await draw() == first


async def a_failure_is_told_to_all(client: OneProcessEngine) -> None:
    """What the engine raises ends every request in one line, and a delivery."""
    with pytest.raises(ServerGone, match=r"the vLLM engine takes no weights: .*'strange'"):
        await WeightSync(OwnEngine(client)).deliver({"strange": torch.ones(3)})
    with pytest.raises(ServerGone, match="an earlier delivery broke off in the middle of a reload"):
        await WeightSync(OwnEngine(client)).deliver({"strange": torch.ones(3)})
    await client.resume()  # a delivery that failed leaves the engine as it is: the run ends

    def fail() -> None:
        raise RuntimeError("no memory\nin two lines")

    client.engine.step = fail
    asked = [client.ask(ids, max_tokens=4) for ids in PROMPTS]
    for found in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(found, ServerGone)
        assert str(found) == "the vLLM engine failed: RuntimeError: no memory in two lines"


async def main(policy: str) -> None:
    """All of it, with one engine."""
    with pytest.raises(ServerGone, match="no vLLM engine can be had for /nowhere"):
        await OneProcessEngine("/nowhere").open()
    options = {"enforce_eager": True, "max_num_seqs": 32, "seed": 7}
    client = OneProcessEngine(policy, max_model_len=256, options=options)
    await client.open()
    weight_group.WeightSender = partial(WeightSender, seconds=5.0)  # type: ignore[misc]  # what is given up is waited for
    assert torch.initial_seed() == 7  # of all that it samples: engines beside one another draw different samples
    assert client._decode is not None
    await same_text_as_vllm(client)
    await whoever_gives_up_leaves_nothing(client)
    await says_what_it_has_drawn(client)
    await follows_the_policy(client, policy)
    await a_delivery_comes_once_and_to_its_own_trainer(client, policy)
    await takes_weights_in_the_middle_of_requests(client, policy)
    await draws_as_if_nothing_was_asked(client)
    await a_failure_is_told_to_all(client)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
