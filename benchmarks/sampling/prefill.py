"""Prompt tokens that the engine itself computes for completing every state of 200 trajectories, by its own counters.

Two sets of states: short solutions (word_arithmetic by the policy's own steps) and long ones (the same policy made to
go on for 1,000 to 1,200 tokens; a step ends at the first line break from 60 tokens on). Three ways, K = 4 each:

- ours: distinct states in the order of the token tree, n = K in one request, `server=partial_block_cache`;
- whole blocks: the same requests to the plain engine with the same block size;
- every state: each state of each trajectory, distinct or not, in random order, one request a sample, plain engine as
  it comes (prefix cache on); `without_cache` is what that costs where the cache is off, by arithmetic.

The least that an engine which caches whole blocks can compute is `data.prefix_tree.least_prompt_tokens`. Counters are
exact on a busy machine too. The cache is emptied before every measurement.
"""

import asyncio
import json
import math
import random
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import aiohttp
from omegaconf import OmegaConf

from espalier.data.jsonl import write_records
from espalier.data.prefix_tree import least_prompt_tokens, num_distinct_tokens
from espalier.data.records import State, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.cut_states import CutStates
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.requests import CompletionRequests, TrajectoryRequests, make_trajectory
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient
from espalier.values.monte_carlo import states_of

SIBLINGS = 4
SAMPLES = 8
WINDOW = 2048
STEP_TOKENS = 60
IN_FLIGHT = 64
CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "engine_options"
_COMPUTED = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*source="local_compute".*\} ([0-9.e+]+)$', re.MULTILINE)


def engine_options(name: str) -> dict[str, Any]:
    """Return those of conf/engine_options/NAME.yaml, for a server: with the plain ones, and a quiet log."""
    found: dict[str, Any] = {}
    for one in ("plain", name):
        loaded = OmegaConf.to_container(OmegaConf.load(CONF / f"{one}.yaml"))
        assert isinstance(loaded, dict)
        found |= {str(key): value for key, value in loaded.items() if key != "defaults"}
    return found | {"disable_uvicorn_access_log": True}


def with_long_window(model: str, folder: Path) -> str:
    """Return a copy of the policy whose positions reach `WINDOW` tokens: it is only made to go on, not to make
    sense."""
    copy = folder / "long_policy"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": WINDOW}))
    return str(copy)


def computed_tokens(base_url: str) -> int:
    """Return prompt tokens that the engine has computed since its start."""
    page = urllib.request.urlopen(f"{base_url}/metrics", timeout=30).read().decode()
    return int(sum(float(value) for value in _COMPUTED.findall(page)))


def empty_cache(base_url: str) -> None:
    """Forget all prefixes."""
    request = urllib.request.Request(f"{base_url}/reset_prefix_cache", b"", method="POST")
    urllib.request.urlopen(request, timeout=30).read()


async def _ask(base_url: str, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Any]:
    client = VLLMClient(base_url)
    await client.open()
    places = asyncio.Semaphore(IN_FLIGHT)

    async def one(request: SampleRequest) -> Any:
        async with places:
            return await client.sample(request, params)

    try:
        return await asyncio.gather(*map(one, requests))
    finally:
        await client.close()


def ask(base_url: str, requests: Sequence[SampleRequest], params: SamplingParams) -> tuple[list[Any], int]:
    """Return (the samples of every request, the prompt tokens computed for them), from an empty cache."""
    empty_cache(base_url)
    before = computed_tokens(base_url)
    samples = asyncio.run(_ask(base_url, requests, params))
    return samples, computed_tokens(base_url) - before


def short_trajectories(model: str, base_url: str, num_problems: int) -> list[Trajectory]:
    """Return solutions of the first problems."""
    task, tokenizer = WordArithmetic(), load_tokenizer(model)
    source = TrajectoryRequests("train", 0, num_problems)
    requests = source.load(task, tokenizer)
    answers, _ = ask(base_url, requests, SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=128))
    problems = {problem.id: problem for problem in task.problems("train")}
    return [
        make_trajectory(task, tokenizer, problems[request.id], request, k, sample)
        for request, samples in zip(requests, answers, strict=True)
        for k, sample in enumerate(samples)
    ]


async def _go_on(base_url: str, requests: Sequence[SampleRequest]) -> list[Any]:
    """Return `SAMPLES` answers of 1,000 to 1,200 tokens to every request, all at once."""
    timeout = aiohttp.ClientTimeout(total=7200)
    async with aiohttp.ClientSession(base_url, timeout=timeout) as session:

        async def one(number: int, request: SampleRequest) -> Any:
            body = {"model": "policy", "prompt": request.prompt_ids, "n": SAMPLES, "temperature": 1.0,
                    "max_tokens": 1000 + 200 * number // len(requests), "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            async with session.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                return (await response.json())["choices"]

        return await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))


def long_trajectories(model: str, base_url: str, num_problems: int) -> list[Trajectory]:
    """Return what the policy writes where it may not end, for the next problems."""
    tokenizer = load_tokenizer(model)
    requests = TrajectoryRequests("train", num_problems, num_problems).load(WordArithmetic(), tokenizer)
    line_breaks = {token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])}
    answers = asyncio.run(_go_on(base_url, requests))
    rows = zip(requests, answers, strict=True)
    return [_cut_long(request, k, choice["token_ids"], line_breaks)
            for request, choices in rows for k, choice in enumerate(choices)]  # fmt: skip


def _cut_long(request: SampleRequest, index: int, ids: list[int], line_breaks: set[int]) -> Trajectory:
    ends: list[int] = []
    for place, token in enumerate(ids, 1):
        if token in line_breaks and place - (ends[-1] if ends else 0) >= STEP_TOKENS and place < len(ids):
            ends.append(place)
    ends.append(len(ids))
    steps = ["x"] * len(ends)  # the text plays no part
    return Trajectory(f"{request.id}/{index}", request.id, request.prompt, "x" * len(ends), steps, request.prompt_ids,
                      list(ids), ends, "length", "0", None, False)  # fmt: skip


@dataclass
class StateSet:
    """The states of one set of trajectories: all, and the distinct ones as the pipeline asks for them."""

    name: str
    trajectories: list[Trajectory]
    folder: Path
    max_tokens: int

    def __post_init__(self) -> None:
        paths = [str(self.folder / f"{self.name}_{kind}.jsonl") for kind in ("trajectories", "states")]
        write_records(Path(paths[0]), self.trajectories)
        states = list(CutStates().run(paths[0], StageContext(None, Path(paths[1]), 1e9)))
        write_records(Path(paths[1]), states)
        self.source = CompletionRequests(paths[1])
        self.task = WordArithmetic()
        self.requests = self.source.load(self.task, None)
        self.every: list[State] = [state for row in self.trajectories for state in states_of(row)]

    def figures(self, block_size: int) -> dict[str, int]:
        """Return what there is to compute."""
        prompts = [request.prompt_ids for request in self.requests]
        return {
            "trajectories": len(self.trajectories),
            "trajectory_tokens": round(fmean(len(row.response_ids) for row in self.trajectories)),
            "states": len(self.every),
            "distinct_states": len(prompts),
            "distinct_tokens": num_distinct_tokens(prompts),
            "least_whole_blocks": least_prompt_tokens(prompts, SIBLINGS, block_size),
            "without_cache": SIBLINGS * sum(len(state.prompt_ids + state.prefix_ids) for state in self.every),
        }

    def complete(self, base_url: str) -> tuple[int, list[float]]:
        """Return (prompt tokens computed, the value of every distinct state), as the pipeline asks."""
        params = SamplingParams(n=SIBLINGS, temperature=1.0, max_tokens=self.max_tokens)
        answers, computed = ask(base_url, self.requests, params)
        values = []
        for request, samples in zip(self.requests, answers, strict=True):
            gold = self.source._states[request.id].gold
            prefix = self.source._states[request.id].prefix
            rights = [self.task.grade(gold, prefix + sample.text).is_correct for sample in samples]
            values.append(fmean(rights))
        return computed, values

    def complete_every(self, base_url: str) -> int:
        """Return prompt tokens computed where every state is asked, one request a sample, in random order."""
        requests = [
            SampleRequest(f"{state.id}/{k}", "", state.prompt_ids + state.prefix_ids)
            for state in self.every
            for k in range(SIBLINGS)
        ]
        random.Random(0).shuffle(requests)
        _, computed = ask(base_url, requests, SamplingParams(n=1, temperature=1.0, max_tokens=self.max_tokens))
        return computed


def difference(one: list[float], other: list[float]) -> dict[str, float]:
    """Return the mean difference of the values of the same states, and how many standard errors it is."""
    gaps = [a - b for a, b in zip(one, other, strict=True)]
    error = math.sqrt(variance(gaps) / len(gaps)) if len(gaps) > 1 else 0.0
    return {"mean": round(fmean(gaps), 5), "standard_errors": round(fmean(gaps) / error, 2) if error else 0.0}


def measure(model: str, num_problems: int = 25, num_threads: int = 0) -> dict[str, dict[str, Any]]:
    """name of the set -> its figures."""
    found: dict[str, dict[str, Any]] = {}
    values: dict[str, list[list[float]]] = {"short": [], "long": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = with_long_window(model, folder)
        sets: list[StateSet] = []
        shared, plain = engine_options("partial_block_cache"), engine_options("plain")
        block_size = int(shared["block_size"])
        ways = {"ours": shared, "whole_blocks": plain | {"block_size": block_size}, "every_state": plain}
        for way, options in ways.items():
            log = f"{name}/{way}.log"
            with VLLMServer(
                policy, log, max_model_len=WINDOW, has_controls=True, num_threads=num_threads, options=options
            ) as server:
                if not sets:
                    short = short_trajectories(model, server.base_url, num_problems)
                    long = long_trajectories(model, server.base_url, num_problems)
                    sets = [StateSet("short", short, folder, 64), StateSet("long", long, folder, 16)]
                    found = {one.name: one.figures(block_size) for one in sets}
                    print(json.dumps(found), flush=True)
                for one in sets:
                    if way == "every_state":
                        found[one.name][way] = one.complete_every(server.base_url)
                    else:
                        found[one.name][way], measured = one.complete(server.base_url)
                        values[one.name].append(measured)
                    print(f"{one.name}, {way}: {found[one.name][way]} prompt tokens computed", flush=True)
    found["short"]["value_difference"] = difference(*values["short"])
    return found


def figures(found: dict[str, dict[str, Any]], how: str) -> dict[str, dict[str, Any]]:
    """Return the two figures: against the least for whole blocks (the worse of the two sets), against distinct
    tokens."""
    bounds = sorted(row["ours"] / row["least_whole_blocks"] for row in found.values())
    trie = found["long"]["ours"] / found["long"]["distinct_tokens"]
    rows = {
        "prompt_tokens_over_block_bound": (bounds[-1], bounds[0], 1.05),
        "prompt_tokens_over_trie_long": (trie, trie, 1.1),
    }
    return {
        name: {"value": round(value, 4), "low": round(low, 4), "high": round(value, 4), "unit": "ratio", "goal": goal,
               "better": "lower", "met": value <= goal, "how": how}
        for name, (value, low, goal) in rows.items()
    }  # fmt: skip
