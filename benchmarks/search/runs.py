"""One searched block of problems, as a record: how right, for how many tokens, in how long."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.sampling.prefill import computed_tokens, empty_cache
from espalier.data.jsonl import read_records, write_json
from espalier.data.search_tree import SearchTree
from espalier.models.tokenizer import load_tokenizer
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.client import SamplingParams
from espalier.sampling.vllm_client import VLLMClient
from espalier.search.client import Search, trees_path
from espalier.search.scorers.scorer import Scorer

R = TypeVar("R")

IN_FLIGHT = 64  # problems


@dataclass(frozen=True)
class SearchRun:
    """What is run: problems `first` .. `first + number - 1` of a task's test split."""

    cell: str
    task: tuple[str, ...]
    policy: str
    method: str
    scorer: str
    size: int
    seed: int
    number: int
    max_tokens: int
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.cell}-{self.method}-{self.scorer}-{self.size}-{self.seed}"


@dataclass(frozen=True)
class SearchRecord:
    """What came of it. `accuracy` is a share; tokens are per problem; `prompt_tokens` are those that the engine
    computed, by its own counter, `distinct_tokens` those of the trees, over all problems; `scored_tokens` what the
    scorer was given first."""

    cell: str
    method: str
    scorer: str
    size: int
    seed: int
    accuracy: float
    tokens: float
    seconds: float
    problems: int
    prompt_tokens: int
    distinct_tokens: int
    scored_tokens: int


_EXACT: dict[tuple[str, str], Scorer] = {}
"""By policy and cell: the exact scorer, whose values of a problem are computed once for all methods."""


def run_search(run: SearchRun, url: str, folder: Path) -> SearchRecord:
    """Search the block with the server at `url`; its trees stay in `folder`."""
    output = folder / f"{run.name}.jsonl"
    trees_path(output).unlink(missing_ok=True)
    asked = [*run.task, f"policy={run.policy}", f"output={output}", f"requests.first={run.seed * run.number}",
             f"requests.limit={run.number}", f"params.max_tokens={run.max_tokens}", f"seed={run.seed}",
             *run.settings]  # fmt: skip
    config = compose_config(SampleConfig, "api/vllm/search", asked)
    tokenizer, task, source = load_tokenizer(run.policy), build(config.task), build(config.requests)
    requests = source.load(task, tokenizer)
    search: Search = build(config.search)
    if run.scorer == "exact":
        search.scorer = _EXACT.setdefault((run.policy, run.cell), search.scorer)
    params: SamplingParams = build(config.params)
    search.prepare(task, tokenizer, source.problems, params, output, set())
    empty_cache(url)
    before = computed_tokens(url)
    seconds, samples = asyncio.run(_search(search.by(VLLMClient(url)), requests, params))
    computed = computed_tokens(url) - before
    right = [source.records(task, tokenizer, request, found)[0].is_correct
             for request, found in zip(requests, samples, strict=True)]  # fmt: skip
    trees = read_records(SearchTree, trees_path(output))
    return SearchRecord(run.cell, run.method, run.scorer, run.size, run.seed, sum(right) / len(right),
                        search.counts.generated_tokens / len(right), round(seconds, 3), len(right), computed,
                        sum(map(distinct_tokens, trees)), search.counts.scored_tokens)  # fmt: skip


async def _search(search: Search, requests: Sequence[Any], params: SamplingParams) -> tuple[float, list[Any]]:
    """Return (seconds without the loading, the solutions)."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def one(request: Any) -> Any:
        async with places:
            return await search.sample(request, params)

    await search.open()
    try:
        began = time.monotonic()
        samples = await asyncio.gather(*map(one, requests))
        return time.monotonic() - began, samples
    finally:
        await search.close()


def distinct_tokens(tree: SearchTree) -> int:
    """Return the tokens of a tree: the prompt's, and of every node its step's."""
    return len(tree.prompt_ids) + sum(map(len, tree.step_ids))


def keep(record: Any, path: Path) -> None:
    """Write a record, a dataclass."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(record))


def read_one(path: Path, kind: type[R]) -> R:
    """Return a record that was kept."""
    return kind(**json.loads(path.read_text()))


def read(folder: Path, kind: type[R]) -> list[R]:
    """Return all records of a folder."""
    return [read_one(path, kind) for path in sorted(folder.glob("*.json"))]
