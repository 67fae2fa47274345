"""Step beam search as public tools do it, in as few lines as it takes: every beam is sent again as text at each step,
its whole text is scored again, and one problem is searched after the other.

The beams of a problem are asked for at once, which is what public tools do too. It is given the same server, policy,
reward model, width and siblings as the product.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from espalier.data.records import Problem
from espalier.data.steps import StepTokens
from espalier.data.tasks.task import Task
from espalier.rewards.process import score_step_tokens


@dataclass(frozen=True)
class PublicSearch:
    """`url` of a vLLM server; the reward model is a network in this process. `max_tokens` of a response."""

    url: str
    tokenizer: Any
    reward_model: Any
    task: Task
    width: int
    siblings: int
    max_tokens: int

    async def run(self, problems: Sequence[Problem]) -> tuple[list[bool], int]:
        """Search every problem in turn: (whether its answer is right, tokens that were scored)."""
        right: list[bool] = []
        num_scored = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            for problem in problems:
                text, scored = await self._search(session, problem)
                num_scored += scored
                right.append(self.task.grade(problem.gold, text, len(problem.options)).is_correct)
        return right, num_scored

    async def _search(self, session: aiohttp.ClientSession, problem: Problem) -> tuple[str, int]:
        prompt = self.task.prompt(problem)
        beams, ended, num_scored, room = [""], list[tuple[float, str]](), 0, self.width
        while beams and room:
            each = self.siblings * (self.width if beams == [""] else 1)
            asked = [self._step(session, prompt + beam) for beam in beams for _ in range(each)]
            steps = await asyncio.gather(*asked)
            parents = [beam for beam in beams for _ in range(each)]
            texts = {parent + step: is_last for parent, (step, is_last) in zip(parents, steps, strict=True)}
            scores, scored = self._scores(prompt, list(texts))
            num_scored += scored
            best = sorted(zip(scores, texts, strict=True), reverse=True)[:room]
            ended += [(score, text) for score, text in best if self._is_over(text, texts[text])]
            beams = [text for _, text in best if not self._is_over(text, texts[text])]
            room = self.width - len(ended)
        return (max(ended)[1] if ended else ""), num_scored

    def _is_over(self, text: str, is_last: bool) -> bool:
        return is_last or len(self.tokenizer(text, add_special_tokens=False).input_ids) >= self.max_tokens

    async def _step(self, session: aiohttp.ClientSession, text: str) -> tuple[str, bool]:
        """Return the next step as text, and whether the response ends with it."""
        body = {"prompt": text, "max_tokens": self.max_tokens, "temperature": 1.0, "stop": ["\n"],
                "include_stop_str_in_output": True}  # fmt: skip
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            choice = (await answer.json())["choices"][0]
        return choice["text"], choice["finish_reason"] == "length" or choice["stop_reason"] is None

    def _scores(self, prompt: str, texts: Sequence[str]) -> tuple[list[float], int]:
        """Return the score behind the last step of every text, each computed whole, and the tokens that took."""
        start = list(self.tokenizer(prompt).input_ids)
        rows = []
        for text in texts:
            ids = list(self.tokenizer(text, add_special_tokens=False).input_ids) or [self.tokenizer.eos_token_id]
            rows.append(StepTokens(start, ids, [len(ids)]))
        found = score_step_tokens(self.reward_model, rows, pad_id=0)
        return [row[-1] for row in found], sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
