"""A server in vLLM's place that knows the problems of a task: it answers with a right solution and with a wrong one by
turns, of which it says its own model's true log-probs. Everything else it does as `RepeatableServer`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from espalier.data.prompts import encode_prompt
from espalier.data.records import Problem
from tests.rl.test_live_servers import FollowingServer

Write = Callable[[Problem, str], str]


class AnsweringServer(FollowingServer):
    """Over HTTP. Of a prompt that it was given (`learn`) samples are right and wrong by turns, beginning with a
    right one for every other prompt; a greedy answer is wrong. Behind a part of a solution comes its rest."""

    def __init__(self, path: str, max_model_len: int):
        super().__init__(path)
        self.max_model_len = max_model_len
        self.solutions: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        self.firsts: dict[tuple[int, ...], int] = {}  # of each prompt that was asked, which solution comes first

    def learn(self, task: Any, problems: Iterable[Problem], write: Write) -> None:
        """Forget what was learnt before. `write(problem, gold)` is a solution of that answer; a wrong one has the
        answer of another problem. Checked is that the task grades them so."""
        self.solutions, self.firsts = {}, {}
        known = list(problems)
        for place, problem in enumerate(known):
            other = next(one for one in [*known[place:], *known] if one.gold != problem.gold)
            right, wrong = write(problem, str(problem.gold)), write(problem, str(other.gold))
            for text, wanted in ((right, True), (wrong, False)):
                assert task.grade(problem.gold, text, len(problem.options)).is_correct == wanted, (problem.id, text)
            prompt = encode_prompt(task, self.tokenizer, problem)
            self.solutions[tuple(prompt.ids)] = (self._ids(right), self._ids(wrong))

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False).input_ids, self.end]

    def sample(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return `n` answers, as vLLM writes them."""
        ids, temperature = list(body["prompt"]), float(body.get("temperature", 1.0))
        rests = self._rests(ids, int(body["max_tokens"]))
        if rests is None:
            return super().sample(body)
        first = self.firsts.setdefault(tuple(ids), len(self.firsts) % 2) if temperature > 0 else 1
        places = [(first + k) % 2 if temperature > 0 else 1 for k in range(int(body.get("n", 1)))]
        return [self._choice(k, *self._with_logprobs(ids, rests[place], temperature)) for k, place in enumerate(places)]

    def _rests(self, ids: list[int], room: int) -> tuple[list[int], list[int]] | None:
        """Return the rest of the right solution and of the wrong one; of that alone, twice, which the ids are part
        of."""
        prompt = next((known for known in self.solutions if tuple(ids[: len(known)]) == known), None)
        if prompt is None:
            return None
        begun = ids[len(prompt) :]
        rests = [one[len(begun) :][:room] for one in self.solutions[prompt] if one[: len(begun)] == begun]
        return (rests[0], rests[-1]) if rests and rests[0] and rests[-1] else None

    @torch.no_grad()
    def _with_logprobs(self, ids: list[int], answer: list[int], temperature: float) -> tuple[list[int], list[float]]:
        logits = self.model(input_ids=torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].float()
        rows = torch.log_softmax(logits / temperature if temperature > 0 else logits, -1)
        return answer, [float(row[token]) for row, token in zip(rows, answer, strict=True)]
