"""What the tests of search share: a sampler whose distribution is a table of solutions, the task of that table, and
searches of it. All that a search finds can be counted over the table."""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.answers.grade import Gold, Grade
from espalier.data.records import Demonstration, Problem
from espalier.data.splitters import split_lines
from espalier.data.steps import Decoder
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.search.asks import SearchMethod
from espalier.search.budget import Budget
from espalier.search.driver import Searched, search_tree
from espalier.search.expander import Expander, StepCuts
from espalier.search.tree import Node, Tree

Ids = tuple[int, ...]

# Solutions of three lines at most, two of which are right; what they begin with they share.
SOLUTIONS = {
    "a\nb\n# 1": 0.30,
    "a\nb\n# 2": 0.05,
    "a\nc\n# 2": 0.15,
    "d\nb\n# 2": 0.10,
    "d\nd\n# 1": 0.05,
    "d\n# 3": 0.25,
    "e\nb\nf\n# 2": 0.10,
}


class LastNumber:
    """A task whose answer stands behind the last #."""

    name = "last_number"
    split_steps = staticmethod(split_lines)

    def problems(self, split: str) -> list[Problem]:
        return []

    def demonstrations(self, split: str) -> list[Demonstration]:
        return []

    def prompt(self, problem: Problem) -> str:
        return problem.question

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        answer = response.rpartition("#")[2].strip() if "#" in response else None
        return Grade(answer, answer == gold)


@dataclass
class TableSampler:
    """A `Client` that draws from the table: a language model over the tokens of its solutions, each with an end token.

    `computed` are the prompt tokens that an engine with a perfect prefix cache has computed: those that no request or
    sample before held in that place, and the last one of every sample.
    """

    tokenizer: Any
    solutions: Mapping[str, float]
    seed: int = 0
    max_model_length: int | None = None
    seconds: float = 0.0
    requests: list[tuple[Ids, SamplingParams]] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        self.decode = Decoder(self.tokenizer)
        self.end = int(self.tokenizer.eos_token_id)
        self.table = {(*self.encode(text), self.end): share for text, share in self.solutions.items()}
        self.next: dict[Ids, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for ids, share in self.table.items():
            for k, token in enumerate(ids):
                self.next[ids[:k]][token] += share
        self.known: set[Ids] = set()
        self.rng = random.Random(self.seed)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def response_of(self, prompt: Sequence[int]) -> Ids:
        """What the response begins with: the problem's prompt is its first three tokens."""
        return tuple(prompt[3:])

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        await asyncio.sleep(self.seconds * self.rng.random())
        prompt = tuple(request.prompt_ids)
        assert self.max_model_length is None or len(prompt) < self.max_model_length
        self.requests.append((prompt, params))
        samples = [self.draw(self.response_of(prompt), params) for _ in range(params.n)]
        self.computed += sum(prompt[: k + 1] not in self.known for k in range(len(prompt) - 1)) + params.n
        for sample in samples:
            whole = (*prompt, *sample.token_ids)
            self.known.update(whole[: k + 1] for k in range(len(whole) - 1))
        return samples

    def draw(self, state: Ids, params: SamplingParams) -> Sample:
        drawn: list[int] = []
        while True:
            shares = self.next[(*state, *drawn)]
            assert shares, f"no solution begins with {self.decode([*state, *drawn])!r}"
            if params.temperature == 0:
                token = max(shares, key=lambda one: (shares[one], -one))
            else:
                (token,) = self.rng.choices(list(shares), list(shares.values()))
            drawn.append(token)
            logprobs = [-1.0] * len(drawn) if params.return_logprobs else None
            if token == self.end:
                return Sample(self.decode(drawn[:-1]), drawn, "stop", logprobs)
            text = self.decode(drawn)
            places = [(text.find(stop), stop) for stop in params.stop if stop in text]
            if places:
                place, stop = min(places)
                return Sample(text[:place], drawn, "stop", logprobs, stop)
            if len(drawn) == params.max_tokens:
                return Sample(text, drawn, "length", logprobs)

    def mass(self, state: Ids) -> float:
        """The probability that a response begins with these tokens."""
        return math.fsum(share for ids, share in self.table.items() if ids[: len(state)] == state)

    def value(self, state: Ids, gold: str) -> float:
        """The share of right answers among the responses that begin with these tokens, over the whole table."""
        right = [share for ids, share in self.table.items()
                 if ids[: len(state)] == state and self.decode(ids[:-1]).endswith(f"# {gold}")]  # fmt: skip
        return math.fsum(right) / self.mass(state)


@dataclass
class TableScorer:
    """The true value of every state by the table: the exact scorer, written anew."""

    sampler: TableSampler
    gold: str
    aggregate: str = "last"
    asked: list[list[Node]] = field(default_factory=list)

    async def open(self) -> None:
        pass

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        self.asked.append(list(nodes))
        return [self.sampler.value(tuple(node.response_ids()), self.gold) for node in nodes]

    def forget(self, tree: Tree) -> None:
        pass

    async def close(self) -> None:
        pass


def searched(
    sampler: TableSampler,
    method: SearchMethod,
    scorer: Any,
    gold: str = "1",
    budget: Budget | None = None,
    cuts: StepCuts | None = None,
    **params: Any,
) -> tuple[Tree, Searched, Expander]:
    """Search one problem of the table."""
    task = LastNumber()
    problem = Problem("p", "a a a", gold)
    prompt_ids = (sampler.encode("abc") * 3)[:3]
    tree = Tree(problem, sampler.decode(prompt_ids), prompt_ids, lambda text: task.grade(gold, text), scorer.aggregate)
    given: dict[str, Any] = {"n": 1, "temperature": 1.0, "max_tokens": 64} | params
    longest = sampler.max_model_length
    request = SampleRequest("p", tree.prompt, prompt_ids, problem_id="p")
    expander = Expander(sampler, request, SamplingParams(**given), task, sampler.decode, cuts or StepCuts(), longest)
    found = asyncio.run(search_tree(method, tree, expander, scorer, budget or Budget()))
    return tree, found, expander
