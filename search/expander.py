"""Steps drawn from nodes: siblings in one request, prompts as token ids, cut at the ends of steps in token space.

A sample is drawn until its first step is whole: where the task's splitter (`Task.split_steps`) sees another one behind
it, where `step_stop` ended the sample and whatever follows would begin another step, or where the response ended. A
sample that holds no whole step (a blank line, half a formula, a chunk of `step_tokens` tokens) is drawn on from where
it is, equal ones in one request. What was drawn behind the first step begins one of the next samples from there at the
same temperature: nothing is drawn twice. Such a sample is the policy's behind a step that ended; one that is drawn anew
does not know that it did. White space behind a stop string is of the next step, wherever the splitter counts it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from espalier.data.records import BadInput
from espalier.data.steps import Decoder
from espalier.data.tasks.task import Task
from espalier.data.token_text import TokenText, read_tokens, steps_on_tokens
from espalier.sampling.client import Client, Sample, SampleRequest, SamplingParams
from espalier.search.asks import Draw
from espalier.search.tree import Node


@dataclass(frozen=True)
class StepCuts:
    """Where samples are stopped: at `step_stop`, a string that ends a step ("" : none), and after `step_tokens` tokens
    (0: the room of the response). Raises BadInput on fewer."""

    step_stop: str = "\n"
    step_tokens: int = 0

    def __post_init__(self) -> None:
        if self.step_tokens < 0:
            raise BadInput(f"search.cuts.step_tokens must be at least 0 (0: no limit), got {self.step_tokens}")


@dataclass(frozen=True)
class _Begun:
    """Tokens drawn behind a node, and how the last sample of them ended."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop: str

    def and_then(self, sample: Sample) -> "_Begun":
        logprobs = [*self.logprobs, *(sample.logprobs or [])]
        return _Begun([*self.ids, *sample.token_ids], logprobs, sample.finish_reason, sample.stop)

    def without(self, num: int) -> "_Begun":
        return replace(self, ids=self.ids[num:], logprobs=self.logprobs[num:])


_MORE = "A"  # what any step may begin with
_NOTHING = _Begun([], [], "", "")


@dataclass
class Expander:
    """Draws for one problem, `request`. `is_cut` says whether the budget is spent: whole responses that are drawn step
    by step (`is_stepwise`) then stay as they are. `longest`: tokens of prompt and response that the sampler takes, None
    where it does not say. `_ahead`: by node and temperature, what samples drew behind it."""

    client: Client
    request: SampleRequest
    params: SamplingParams
    task: Task
    decode: Decoder
    cuts: StepCuts
    longest: int | None
    is_stepwise: bool = False
    is_cut: Callable[[], bool] = lambda: False
    has_cut: bool = False
    num_requests: int = 0
    prompt_tokens: int = 0
    _ahead: dict[tuple[Node, float | None], list[_Begun]] = field(default_factory=dict, repr=False)

    async def draw(self, draws: Sequence[Draw]) -> list[list[Node]]:
        """Return what `asks.Expand` asks for. Raises Refused where the prompt itself is, ServerGone.

        Whole responses are kept as completions of their nodes, unless the budget cut one of them: those that are
        finished before the others are the short ones.
        """
        drawn = list(await asyncio.gather(*map(self._draw, draws)))
        if all(end.is_finished for draw, ends in zip(draws, drawn, strict=True) if draw.is_whole for end in ends):
            for draw, ends in zip(draws, drawn, strict=True):
                is_policy = draw.temperature is None and draw.opening is None and not draw.depends_on_others
                if draw.is_whole and is_policy and not draw.node.is_finished:
                    draw.node.completions += ends
        return drawn

    async def _draw(self, draw: Draw) -> list[Node]:
        if draw.node.is_finished:
            return [draw.node] * draw.n
        if not draw.is_whole:
            return await self._steps(draw)
        if not self.is_stepwise and draw.opening is None:
            samples = await self._ask(draw.node, _NOTHING, draw.n, draw.temperature, "", 0)
            return [self._whole(draw.node, _NOTHING.and_then(sample)) for sample in samples]
        first = await self._steps(draw)
        return list(await asyncio.gather(*(self._to_the_end(node, draw.temperature) for node in first)))

    async def _to_the_end(self, node: Node, temperature: float | None) -> Node:
        while not node.is_finished and not self.is_cut():
            (node,) = await self._steps(Draw(node, 1, temperature=temperature))
        self.has_cut = self.has_cut or not node.is_finished
        return node

    async def _steps(self, draw: Draw) -> list[Node]:
        """Return the ends of one step of each sample of a draw."""
        num, temperature = draw.opening or (self.cuts.step_tokens, draw.temperature)
        ahead = [] if draw.opening else self._ahead.setdefault((draw.node, draw.temperature), [])
        begun, ahead[: draw.n] = ahead[: draw.n], []
        if missing := draw.n - len(begun):
            samples = await self._ask(draw.node, _NOTHING, missing, temperature, self.cuts.step_stop, num)
            begun += [_NOTHING.and_then(sample) for sample in samples]
        found = await self._to_borders(draw, begun)
        for node, rest in found if not draw.opening else ():  # in the order of the samples, which no text has a part in
            if rest.ids:
                self._ahead.setdefault((node, draw.temperature), []).append(rest)
        return [node for node, _ in found]

    async def _to_borders(self, draw: Draw, begun: Sequence[_Begun]) -> list[tuple[Node, _Begun]]:
        """Return of each where its first step ends, and what was drawn behind it; equal ones that hold no whole step
        are drawn on in one request."""
        places: dict[tuple[tuple[int, ...], str, str], list[int]] = {}
        for place, one in enumerate(begun):
            places.setdefault((tuple(one.ids), one.finish_reason, one.stop), []).append(place)
        ends = await asyncio.gather(*(self._to_border(draw, [begun[k] for k in equal]) for equal in places.values()))
        found = dict(zip(chain(*places.values()), chain(*ends), strict=True))
        return [found[place] for place in range(len(begun))]

    async def _to_border(self, draw: Draw, equal: Sequence[_Begun]) -> list[tuple[Node, _Begun]]:
        node, first = draw.node, equal[0]
        tokens = self._read(node, first)
        ending, stop = self._ending(node, first, tokens)
        end = self._first_end(node, first, tokens, bool(ending))
        if end is None:
            cuts = self.cuts
            samples = await self._ask(node, first, len(equal), draw.temperature, cuts.step_stop, cuts.step_tokens)
            return await self._to_borders(draw, [one.and_then(more) for one, more in zip(equal, samples, strict=True)])
        how = (ending, stop) if end == len(tokens.ends) - 1 else ("", "")
        return [(self._add(node, one, tokens, end, *how), one.without(end - node.num_tokens)) for one in equal]

    def _whole(self, node: Node, begun: _Begun) -> Node:
        """Add every step of a response; the last node."""
        tokens = self._read(node, begun)
        ending, stop = self._ending(node, begun, tokens)
        last = len(tokens.ends) - 1
        inner = [end for end in self._step_ends(tokens, stop) if node.num_tokens < end < last]
        for end in inner:
            num = end - node.num_tokens
            node, begun = self._add(node, begun, tokens, end, "", ""), begun.without(num)
        return self._add(node, begun, tokens, last, ending, stop)

    def _read(self, node: Node, begun: _Begun) -> TokenText:
        """Return the text of the whole response; an end token reads as nothing."""
        is_ended = begun.finish_reason == "stop" and not begun.stop
        ids = [*node.response_ids(), *begun.ids]
        tokens = read_tokens(self.request.prompt_ids, ids[:-1] if is_ended else ids, self.decode)
        if is_ended:
            return TokenText(tokens.text, [*tokens.ends, tokens.ends[-1]], [*tokens.is_border, True])
        return tokens

    def _ending(self, node: Node, begun: _Begun, tokens: TokenText) -> tuple[str, str]:
        """Return how the response ended with these tokens ("" where it goes on), and the stop string that ended it. One
        that begins before the sample is seen here alone: the engine may have gone on to an end token."""
        places = [(tokens.text.find(stop), stop) for stop in self.params.stop if stop in tokens.text]
        if places:
            return "stop", min(places)[1]
        if begun.finish_reason == "stop" and not begun.stop:
            return "stop", ""
        return ("length", "") if self._room(node, begun) < 1 else ("", "")

    def _step_ends(self, tokens: TokenText, stop: str) -> list[int]:
        text = tokens.text[: tokens.text.index(stop)] if stop else tokens.text
        steps = self.task.split_steps(text)
        shorter = TokenText(text, [min(end, len(text)) for end in tokens.ends], tokens.is_border)
        return steps_on_tokens(steps, shorter)[1] if steps else []

    def _first_end(self, node: Node, begun: _Begun, tokens: TokenText, is_ended: bool) -> int | None:
        """Return after how many response tokens the first step behind the node is whole; None where it is not yet."""
        last, before = len(tokens.ends) - 1, tokens.ends[node.num_tokens]
        stop = self._ending(node, begun, tokens)[1] if is_ended else ""
        ends = [end for end in self._step_ends(tokens, stop) if end > node.num_tokens]
        if ends and ends[0] < last and tokens.text[before : tokens.ends[ends[0]]].strip():
            return ends[0]
        if is_ended:
            return last
        is_stopped = bool(begun.stop) and begun.stop == self.cuts.step_stop
        return last if is_stopped and tokens.text[before:].strip() and self._is_whole(tokens.text) else None

    def _is_whole(self, text: str) -> bool:
        """Say whether what comes behind a text begins another step."""
        return len(self.task.split_steps(text + _MORE)) > len(self.task.split_steps(text))

    def _add(self, node: Node, begun: _Begun, tokens: TokenText, end: int, ending: str, stop: str) -> Node:
        num = end - node.num_tokens
        text = tokens.text[tokens.ends[node.num_tokens] : tokens.ends[end]]
        return node.tree.add(node, begun.ids[:num], text, ending, stop, begun.logprobs[:num])

    def _room(self, node: Node, begun: _Begun) -> int:
        """Return how many more tokens the response may have."""
        num = node.num_tokens + len(begun.ids)
        room = self.params.max_tokens - num
        return room if self.longest is None else min(room, self.longest - len(self.request.prompt_ids) - num)

    async def _ask(
        self, node: Node, begun: _Begun, n: int, temperature: float | None, step_stop: str, step_tokens: int
    ) -> list[Sample]:
        """Return samples behind a node and what was begun there; the tree pays for their tokens. Raises BadInput where
        the sampler gives no token ids."""
        ids = [*self.request.prompt_ids, *node.response_ids(), *begun.ids]
        room = max(1, self._room(node, begun))
        stops = [*self.params.stop, *([step_stop] if step_stop and step_stop not in self.params.stop else [])]
        params = replace(
            self.params,
            n=n,
            temperature=self.params.temperature if temperature is None else temperature,
            max_tokens=min(room, step_tokens) if step_tokens else room,
            stop=stops,
        )
        name = f"{self.request.id}:{self.num_requests}"
        self.num_requests += 1
        self.prompt_tokens += len(ids)
        samples = await self.client.sample(SampleRequest(name, "", ids, problem_id=self.request.problem_id), params)
        if not all(sample.token_ids for sample in samples):
            raise BadInput("the sampler gives no token ids, of which a search is made (a chat API has none): ask a "
                           "vLLM server or engines (client=vllm, offline, data_parallel_engines)")  # fmt: skip
        node.tree.num_tokens += sum(len(sample.token_ids) for sample in samples)
        return samples
