"""One searched block of problems, as a record: how right, for how many tokens, in how long."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.sampling.prefill import computed_tokens, empty_cache
from benchmarks.search.origin import UNKNOWN, Origin, origin
from espalier.data.jsonl import open_atomic, read_records
from espalier.data.records import BadInput
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
    """What is run: problems `seed * number` .. of a task's test split, `number` of them. Of the weights: digests."""

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
    policy_weights: str
    reward_model_weights: str = ""

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.cell}-{self.method}-{self.scorer}-{self.size}-{self.seed}"


@dataclass(frozen=True)
class ProblemRow:
    """One problem of a record: generated `tokens`, `seconds` beside the others in flight, and `own_share`, the share of
    right ones among whole responses that the policy drew from the prompt, None where it drew none."""

    problem: str
    is_right: bool
    tokens: int
    seconds: float
    own_share: float | None


@dataclass(frozen=True)
class SearchRecord:
    """What came of it. `accuracy` is a share; tokens are per problem; `prompt_tokens` are those that the engine
    computed, by its own counter, `distinct_tokens` those of the trees, over all problems; `scored_tokens` what the
    scorer was given first. Older records have no `rows` and no `origin`."""

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
    origin: Origin = UNKNOWN
    rows: list[ProblemRow] = field(default_factory=list)


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
                        sum(map(distinct_tokens, trees)), search.counts.scored_tokens,
                        origin(run.policy_weights, run.reward_model_weights),
                        sorted(map(problem_row, trees), key=lambda row: row.problem))  # fmt: skip


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


def problem_row(tree: SearchTree) -> ProblemRow:
    """Return the row of a tree's problem."""
    drawn = tree.completions[0] if tree.completions else []
    share = sum(bool(tree.is_correct[end]) for end in drawn) / len(drawn) if drawn else None
    return ProblemRow(tree.problem_id, bool(tree.is_correct[tree.chosen]), tree.num_tokens, tree.seconds, share)


def distinct_tokens(tree: SearchTree) -> int:
    """Return the tokens of a tree: the prompt's, and of every node its step's."""
    return len(tree.prompt_ids) + sum(map(len, tree.step_ids))


def keep(record: Any, path: Path) -> None:
    """Write a record, a dataclass; rows of problems as lists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    row = asdict(record)
    if "rows" in row:
        row["rows"] = [list(one.values()) for one in row["rows"]]
    with open_atomic(path) as file:
        file.write(json.dumps(row) + "\n")


def read_one(path: Path, kind: type[R]) -> R:
    """Return a record that was kept. Raises BadInput on a file that is none."""
    try:
        row = json.loads(path.read_text())
        if "origin" in row:
            row["origin"] = Origin(**row["origin"])
        if "rows" in row:
            row["rows"] = [ProblemRow(*one) for one in row["rows"]]
        return kind(**row)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path}: not a record of this benchmark ({error}): move it away and run it again") from None


def read(folder: Path, kind: type[R]) -> list[R]:
    """Return all records of a folder."""
    return [read_one(path, kind) for path in sorted(folder.glob("*.json"))]
