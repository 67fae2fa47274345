"""A search as a sampler: a problem in, the solution that was searched for out, its tree beside.

So whatever samples can search: resume by problem, several servers, Ray engines, stalls and signals are those of any
sampling job (`sampling.job`). A tree is appended to `X.trees.jsonl` before its solution is handed on to X.jsonl, and a
tree whose solution is not there is taken off when the job goes on.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import cut_torn_tail, iter_rows, open_atomic, to_line
from espalier.data.prompts import encode_prompt
from espalier.data.records import BadInput, Problem
from espalier.data.search_tree import SearchTree, reads_gold
from espalier.data.tasks.task import Task
from espalier.rewards.composed import ComposedReward
from espalier.rewards.score import ChecksProblems
from espalier.sampling.client import Client, Refused, Sample, SampleRequest, SamplingParams, ShowsLife
from espalier.sampling.requests import decode
from espalier.search.asks import SearchMethod
from espalier.search.budget import Budget
from espalier.search.driver import search_tree
from espalier.search.expander import Expander, StepCuts
from espalier.search.scorers.completions_scorer import CompletionsScorer
from espalier.search.scorers.held_networks import check_networks
from espalier.search.scorers.scorer import ComputesScores, HoldsNetworks, Scorer
from espalier.search.tree import Node, Tree

log = logging.getLogger(__name__)


@dataclass
class SearchCounts:
    """What searches have cost: problems, requests for samples, tokens of their prompts, generated tokens, scores,
    tokens that scorers were given first."""

    problems: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    scores: int = 0
    scored_tokens: int = 0


class Search:
    """A `sampling.searches.Searches`, and the sampler itself. Args: how (`method`), by which scores (`scorer`), what a
    problem may cost (`budget`), where steps end (`cuts`)."""

    def __init__(self, method: SearchMethod, scorer: Scorer, budget: Budget, cuts: StepCuts):
        self.method, self.scorer, self.budget, self.cuts = method, scorer, budget, cuts
        self.counts = SearchCounts()
        self.trees: Path | None = None
        self.tokens_before = self._problems_before = 0
        self._open: set[Tree] = set()
        self._done = self._seen = 0  # tokens and scores: of trees that are open no more, and of all at the last look
        self._thread = ThreadPoolExecutor(1, "grading")
        self._longest = sys.maxsize  # of prompt and response, that the scorer's networks take
        self._is_warned = False

    def prepare(
        self,
        task: Task,
        tokenizer: Any,
        problems: Mapping[str, Problem],
        params: SamplingParams,
        output: Path,
        finished: set[str],
    ) -> None:
        """Take off the trees of problems that are not finished. Raises BadInput as `keep_trees`, `check_networks` and
        `check_problems`, and where several solutions per problem are asked for."""
        check_one_solution(params)
        check_problems(self.scorer, problems)
        first = next(iter(problems.values()), Problem("", "", ""))
        check_networks(self.scorer, tokenizer, lambda: encode_prompt(task, tokenizer, first).ids)
        self._longest = self.scorer.longest() if isinstance(self.scorer, HoldsNetworks) else sys.maxsize
        self.task, self.tokenizer, self.problems = task, tokenizer, problems
        self.trees = trees_path(output)
        self.tokens_before, self._problems_before = keep_trees(self.trees, finished), len(finished)

    def by(self, client: Client) -> "Search":
        """Return itself; `client` draws."""
        self.client = client
        return self

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self.counts.generated_tokens

    @property
    def tokens_per_problem(self) -> float:
        """Tokens generated per problem that is done, 0 where none is."""
        num = self._problems_before + self.counts.problems
        return (self.tokens_before + self.counts.generated_tokens) / max(num, 1)

    def counted(self) -> dict[str, int]:
        """Return the counts by name."""
        return {f"search_{name}": number for name, number in vars(self.counts).items()}

    async def open(self) -> None:
        """Open whoever draws and the scorer."""
        await self.client.open()
        await self.scorer.open()

    async def close(self) -> None:
        """Close both."""
        try:
            await self.scorer.close()
        finally:
            await self.client.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def is_working(self) -> bool:
        """Say whether anything was drawn or scored since the last call, scores are computed (which may take longer
        than a stall), or whoever draws gives a sign of life."""
        before, self._seen = self._seen, self._done + sum(tree.num_tokens + tree.num_scores for tree in self._open)
        is_scoring = isinstance(self.scorer, ComputesScores) and self.scorer.is_computing
        if is_scoring or self._seen > before:
            return True
        return isinstance(self.client, ShowsLife) and await self.client.is_working()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return the one solution of a problem. Raises BadInput where several are asked for, Refused where the scorer's
        networks have no room behind the prompt, and what drawing and scoring raise."""
        check_one_solution(params)
        problem = self.problems[request.problem_id]
        tree = Tree(
            problem,
            request.prompt,
            request.prompt_ids,
            lambda text: self.task.grade(problem.gold, text, len(problem.options)),
            self.scorer.aggregate,
        )
        longest = self._room(request, params)
        expander = Expander(self.client, request, params, self.task, decode(self.tokenizer), self.cuts, longest)
        self._open.add(tree)
        try:
            found = await search_tree(self.method, tree, expander, self.scorer, self.budget, self._thread)
        finally:
            self._open.remove(tree)
            self._done += tree.num_tokens + tree.num_scores
        self._count(tree, expander)
        names = (type(self.method).__name__, name_of(self.scorer))
        ends = asyncio.get_running_loop().run_in_executor(
            self._thread, tree.record, found.chosen, *names, found.is_cut, found.seconds
        )
        self._write(await ends)
        return [sample_of(found.chosen)]

    def _room(self, request: SampleRequest, params: SamplingParams) -> int | None:
        """Return the tokens of prompt and response that sampler and scorer both take, None where nothing bounds them.
        Warns once where responses may end at the scorer's bound."""
        window = getattr(self.client, "max_model_length", None) or sys.maxsize
        prompt, bound = len(request.prompt_ids), self._longest
        if bound <= prompt:
            raise Refused(f"prompt of {prompt} tokens leaves no room in the scorer's model, which takes {bound}")
        if bound < min(window, prompt + params.max_tokens) and not self._is_warned:
            self._is_warned = True
            log.warning("the scorer's model takes %d tokens of prompt and response: longer responses are cut there, as "
                        "they are at params.max_tokens=%d (problem %s has a prompt of %d)", bound, params.max_tokens,
                        request.problem_id, prompt)  # fmt: skip
        longest = min(window, bound)
        return None if longest == sys.maxsize else longest

    def _count(self, tree: Tree, expander: Expander) -> None:
        counts = self.counts
        counts.problems += 1
        counts.requests += expander.num_requests
        counts.prompt_tokens += expander.prompt_tokens
        counts.generated_tokens += tree.num_tokens
        counts.scores += tree.num_scores
        counts.scored_tokens += tree.num_scored_tokens

    def _write(self, tree: SearchTree) -> None:
        """Append a tree whole, or raise OSError."""
        if self.trees is None:
            return
        with self.trees.open("ab", buffering=0) as file:
            row, start = to_line(tree).encode("ascii"), file.seek(0, os.SEEK_END)
            if file.write(row) != len(row):
                file.truncate(start)
                raise OSError(28, f"no room for {len(row)} bytes", str(self.trees))


def sample_of(node: Node) -> Sample:
    """Return the solution of a node as a sampler returns one: unfinished ones are cut by their length."""
    logprobs = [value for one in node.way() for value in one.logprobs]
    ids = node.response_ids()
    is_whole = len(logprobs) == len(ids) and bool(logprobs)
    return Sample(node.response(), ids, node.ending or "length", logprobs if is_whole else None, node.stop)


def check_one_solution(params: SamplingParams) -> None:
    """Raise BadInput where several solutions per problem are asked for: whoever reads trees takes one per problem, and
    names its responses by the problem."""
    if params.n != 1:
        raise BadInput(f"params.n={params.n}: a search draws as many samples as search.method says and answers each "
                       "problem with one of them: set params.n=1 (run_stage.py -cn values/list_responses lists all "
                       "responses of its trees; another seed= and output= is another search)")  # fmt: skip


def check_problems(scorer: Scorer, problems: Mapping[str, Problem]) -> None:
    """Raise BadInput where the scorer reads the gold answer and a problem has none, since all its states would be worth
    0, or one that its reward could not score."""
    if isinstance(scorer, ChecksProblems):
        scorer.check_problems([*problems.values()])
    if not reads_gold(name_of(scorer)):
        return
    if missing := [name for name, problem in problems.items() if not problem.gold]:
        raise BadInput(f"{len(missing)} of {len(problems)} problems, the first is {missing[0]}, have no gold answer, "
                       f"which {name_of(scorer)} reads: leave them out, or choose "
                       "another scorer@search.scorer")  # fmt: skip


def trees_path(output: Path) -> Path:
    """Return the file of the trees beside that of the solutions."""
    is_suffix = output.suffix == ".jsonl"  # of beam0.5 and beam0.7 the number is none
    return output.with_suffix(".trees.jsonl") if is_suffix else output.with_name(output.name + ".trees.jsonl")


def keep_trees(path: Path, finished: Set[str]) -> int:
    """Take off the trees of problems that are not finished, of a job that goes on; the tokens that were generated for
    the others. Raises BadInput where a finished problem has no tree, or two."""
    if not path.is_file():
        if finished:
            raise BadInput(f"{path} is missing, and {len(finished)} solutions stand beside it: remove them, or choose "
                           "another output")  # fmt: skip
        return 0
    cut_torn_tail(path)
    rows = [row for _, row in iter_rows(path)]
    kept = [row for row in rows if row["problem_id"] in finished]
    if len(kept) != len(finished) or len({row["id"] for row in kept}) != len(kept):
        raise BadInput(f"{path} has {len(kept)} trees of {len(finished)} finished problems: remove both files")
    if len(kept) < len(rows):
        with open_atomic(path) as file:
            file.writelines(map(to_line, kept))
    return sum(row["num_tokens"] for row in kept)


def name_of(scorer: Scorer) -> str:
    """Return what a tree calls its scorer: the class; of a reward the reward's, of a composed one those of its terms,
    joined by "+"."""
    if isinstance(scorer, CompletionsScorer) and scorer.agrees:
        return "CompletionsScorer that agrees"  # with the tree's most frequent answer, and reads no gold
    scored_by: Any = getattr(scorer, "reward", scorer)
    terms = scored_by.terms.values() if isinstance(scored_by, ComposedReward) else [scored_by]
    return "+".join(type(term).__name__ for term in terms)
