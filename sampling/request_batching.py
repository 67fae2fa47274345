"""Prompts that are asked for at about the same moment, for the same kind of answer, leave in one HTTP request.

vLLM's `/v1/completions` takes a list of prompts. For short answers (completions of states) most of the time of a
request is not the engine's but that of the two ends of the connection, which is paid once for all prompts in it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from espalier.sampling.client import Refused
from espalier.sampling.completion_api import Transient

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
Asked = tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]


_MANY_GOOD = 32


class Gathering:
    """`ask` posts one body to a path. A prompt waits for at most `num_prompts` - 1 others, and `seconds` at most.

    A refused list tells nothing of which prompt is at fault: each is asked again alone, lists become half as long, and
    grow again when many were answered.
    """

    def __init__(self, ask: Ask, num_prompts: int, seconds: float = 0.002):
        self._ask_one = ask
        self.num_prompts = self.most = num_prompts
        self.num_good = 0
        self.seconds = seconds
        self._waiting: dict[str, list[Asked]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, path: str, body: dict[str, Any], is_alone: bool = False) -> dict[str, Any]:
        """Return the answer to `body` as if it had been asked alone, which `is_alone` has it be: after a failure, that
        may have been another prompt's. Raises what `ask` raises."""
        if is_alone or self.num_prompts < 2 or "seed" in body or not isinstance(body.get("prompt"), list):
            answer = await self._ask_one(path, body)
            self._count_good()
            return answer
        return await self._ask_in_list(path, body)

    async def _ask_in_list(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        kind = json.dumps([path, {name: value for name, value in body.items() if name != "prompt"}])
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        waiting = self._waiting.setdefault(kind, [])
        waiting.append((body, answer))
        if len(waiting) >= self.num_prompts:
            self._send(path, kind)
        elif len(waiting) == 1:
            loop.call_later(self.seconds, self._send_late, path, kind, waiting)
        sampled = await answer
        self._count_good()
        return sampled

    def _send_late(self, path: str, kind: str, waiting: list[Asked]) -> None:
        if self._waiting.get(kind) is waiting:
            self._send(path, kind)

    def _send(self, path: str, kind: str) -> None:
        asked = [(body, answer) for body, answer in self._waiting.pop(kind) if not answer.done()]
        if asked:
            task = asyncio.get_running_loop().create_task(self._answer(path, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            for _, answer in asked:
                answer.add_done_callback(lambda _: all(a.done() for _, a in asked) and task.cancel())

    async def _answer(self, path: str, asked: list[Asked]) -> None:
        """Settle every future, whatever happens."""
        bodies, answers = [body for body, _ in asked], [answer for _, answer in asked]
        try:
            for answer, outcome in zip(answers, await self._ask_together(path, bodies), strict=True):
                if answer.done():
                    continue
                if isinstance(outcome, Exception):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
        except Exception as error:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
        finally:
            for answer in answers:
                answer.cancel()  # those that were not settled: this task itself was cancelled

    async def _ask_together(self, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any] | Exception]:
        if len(bodies) == 1:
            return [await self._ask_one(path, bodies[0])]
        try:
            answer = await self._ask_one(path, {**bodies[0], "prompt": [body["prompt"] for body in bodies]})
        except Refused:
            return await self._ask_each(path, bodies)
        return _parts(answer, bodies)

    async def _ask_each(self, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any] | Exception]:
        self.num_prompts, self.num_good = max(1, self.num_prompts // 2), 0
        outcomes: list[dict[str, Any] | Exception] = []
        for answer in await asyncio.gather(*(self._ask_one(path, body) for body in bodies), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            outcomes.append(answer)
        if not any(isinstance(answer, Exception) for answer in outcomes):
            self.num_prompts = self.most = 1  # it was the list that was refused
        return outcomes

    def _count_good(self) -> None:
        self.num_good += 1
        if self.num_good % _MANY_GOOD == 0:
            self.num_prompts = min(self.most, 2 * self.num_prompts)

    async def close(self) -> None:
        """Let go of what was asked."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._waiting.values():
            for _, answer in waiting:
                answer.cancel()
        self._waiting = {}


def _parts(answer: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any] | Exception]:
    """Return the answer to every prompt: its choices, counted from 0. Raises Transient where they are not all there, or
    are another prompt's."""
    num_samples = bodies[0].get("n", 1)
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(num_samples * len(bodies))):
            raise Transient(f"{len(choices)} samples of {num_samples * len(bodies)}")
        parts: list[dict[str, Any] | Exception] = []
        for number, body in enumerate(bodies):
            own = choices[number * num_samples : (number + 1) * num_samples]
            if any(choice.get("prompt_token_ids", body["prompt"]) != body["prompt"] for choice in own):
                raise Transient("the answer has another prompt's samples")
            numbered = [{**choice, "index": index} for index, choice in enumerate(own)]
            parts.append({**answer, "choices": numbered})
    except (KeyError, TypeError, AttributeError) as error:
        raise Transient(f"the answer is not one of a list of prompts ({error!r})") from None
    return parts
