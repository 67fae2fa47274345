"""Problems and states → requests; samples → records. Graded at once: a record says whether it is right."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from espalier.data.jsonl import read_records
from espalier.data.prompts import PromptTemplate, encode_prompt
from espalier.data.records import BadInput, Completion, Problem, State, Trajectory
from espalier.data.steps import Decoder, check_join
from espalier.data.tasks.task import Task
from espalier.data.token_text import added_text, read_response, read_tokens, steps_on_tokens
from espalier.sampling.client import Sample, SampleRequest
from espalier.sampling.input_checks import check_state_tokens


class RequestSource(Protocol):
    """What is asked, and what is made of the answers."""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return all requests, finished ones included."""

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """Return one record a sample, ids `{request}/{k}`."""

    def inputs(self) -> list[str]:
        """Return files read, for provenance."""


@runtime_checkable
class AsksProblems(Protocol):
    """A source that asks about a split of the task's problems."""

    split: str

    def asked_problems(self, task: Task) -> list[Problem]:
        """Return those that it asks about."""


@lru_cache(maxsize=4)
def decode(tokenizer: Any) -> Decoder:
    """Return the tokenizer's decoder, one for each tokenizer, so that it remembers its tokens."""
    return Decoder(tokenizer)


def messages_of(task: Task, problem: Problem) -> list[dict[str, str]]:
    """Return the prompt as chat turns, where the task has a template."""
    template = getattr(task, "template", None)
    return template.messages(problem) if isinstance(template, PromptTemplate) else []


def read_sample(sample: Sample, prompt_ids: Sequence[int], tokenizer: Any) -> Sample:
    """Return the sample with the text that its tokens have behind the prompt, up to a stop string, without the tokens
    that lie wholly in the stop string; one that holds the end of the text too stays, as it was sampled, and so does the
    first: a response of nothing but a stop string has a token that its reward belongs to.

    An end token is kept and is no part of the text. A sample without token ids (of a chat API) is left as it is.
    Raises BadInput where the sampler reads its tokens otherwise: it has another tokenizer. (White space beside special
    tokens, and bytes that make no character, are read in more ways than one.)
    """
    ids = sample.token_ids
    if not ids:
        return sample
    is_ended = sample.finish_reason == "stop" and not sample.stop
    tokens = read_tokens(prompt_ids, ids[:-1] if is_ended else ids, decode(tokenizer))
    text, num = tokens.text, len(ids)
    if sample.stop and sample.stop in text:
        text = text[: text.index(sample.stop)]
        num = max(1, bisect.bisect_left(tokens.ends, len(text)))
    if text == sample.text and num == len(ids):
        return sample
    if "".join(text.split()) != "".join(sample.text.split()) and "\ufffd" not in decode(tokenizer)(ids):
        raise BadInput(
            f"the sampler reads its tokens as {_start(sample.text, text)}, the policy's tokenizer as "
            f"{_start(text, sample.text)}: serve the policy with its own tokenizer"
        )
    logprobs = sample.logprobs[:num] if sample.logprobs is not None else None
    return replace(sample, text=text, token_ids=ids[:num], logprobs=logprobs)


def _start(text: str, other: str) -> str:
    """Say where a text begins to differ from another, for a message."""
    same = next((k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return f"{text[max(0, same - 10) : same + 20]!r}"


def make_trajectory(
    task: Task, tokenizer: Any, problem: Problem, request: SampleRequest, index: int, answered: Sample
) -> Trajectory:
    """Return a graded trajectory with its steps, whose borders are token ends. A response cut by its length is wrong.

    Without token ids (chat APIs return none) there are no token ends, and steps end where the splitter says. Raises
    BadInput where the sampler has another tokenizer.
    """
    sample, place = read_sample(answered, request.prompt_ids, tokenizer), f"{request.id}/{index}"
    template = getattr(task, "template", None)
    if not sample.token_ids and isinstance(template, PromptTemplate):
        sample = replace(sample, text=template.strip_opening(sample.text))
    steps, ends = task.split_steps(sample.text), list[int]()
    check_join(steps, sample.text, place)
    if sample.token_ids:
        tokens = read_response(request.prompt_ids, sample.token_ids, decode(tokenizer), sample.text, place)
        steps, ends = steps_on_tokens(steps, tokens)
    grade = task.grade(problem.gold, sample.text, len(problem.options))
    return Trajectory(
        id=place,
        problem_id=problem.id,
        prompt=request.prompt,
        response=sample.text,
        steps=steps,
        prompt_ids=request.prompt_ids,
        response_ids=sample.token_ids,
        step_ends=ends,
        finish_reason=sample.finish_reason,
        gold=problem.gold,
        answer=grade.answer,
        is_correct=grade.is_correct and sample.finish_reason == "stop",
        num_options=len(problem.options),
        logprobs=sample.logprobs,
        passage_id=problem.passage_id,
    )


def make_completions(
    task: Task, tokenizer: Any, state: State, request_id: str, samples: list[Sample]
) -> list[Completion]:
    """Return the graded completions of a state; ids `{request}/{k}`.

    What is graded is the text of the state's tokens and the completion's, decoded together; `response` is what follows
    the state's own text in it. Raises BadInput where the state's tokens do not read as its text, or the sampler has
    another tokenizer.
    """
    records = []
    for k, answered in enumerate(samples):
        sample = read_sample(answered, state.prompt_ids + state.prefix_ids, tokenizer)
        whole = _with_prefix(state, sample, tokenizer)
        grade = task.grade(state.gold, whole, state.num_options)
        is_correct = grade.is_correct and sample.finish_reason == "stop"
        records.append(
            Completion(
                f"{request_id}/{k}",
                state.id,
                state.problem_id,
                whole[len(state.prefix) :],
                sample.token_ids,
                sample.finish_reason,
                grade.answer,
                is_correct,
                sample.logprobs,
            )
        )
    return records


def _with_prefix(state: State, sample: Sample, tokenizer: Any) -> str:
    """Return the text of a state's tokens and a completion's together, as far as the completion's own text goes."""
    ids, to_text = sample.token_ids, decode(tokenizer)
    if not ids:
        return state.prefix + sample.text
    behind = len(added_text(state.prompt_ids + state.prefix_ids, ids, to_text)) - len(sample.text)
    text = added_text(state.prompt_ids, state.prefix_ids + ids, to_text)
    whole = text[: len(text) - behind]
    if not whole.startswith(state.prefix):
        raise BadInput(
            f"state '{state.id}': its tokens do not read as its text: with a completion they read "
            f"{_start(whole, state.prefix)}, the text is {_start(state.prefix, whole)}: cut the states again with the "
            "tokenizer of the policy which sampled them"
        )
    return whole


def round_id(state_id: str, number: int) -> str:
    """Return the request id of a state in a round: the state's own id in round 0, `{state}@{round}` afterwards."""
    return f"{state_id}@{number}" if number else state_id


@dataclass
class TrajectoryRequests:
    """Full solutions of a split's problems `first` .. `first + limit - 1` (limit 0: all)."""

    split: str
    first: int = 0
    limit: int = 0
    _read: tuple[Task, list[Problem]] | None = field(default=None, init=False, repr=False)

    def asked_problems(self, task: Task) -> list[Problem]:
        """Return the problems, read once. Raises BadInput where the split has none from `first` on."""
        if self._read is None or self._read[0] is not task:
            problems = task.problems(self.split)[self.first :]
            self._read = task, problems[: self.limit] if self.limit else problems
        if not self._read[1]:
            raise BadInput(f"{task.name}/{self.split} has no problem from {self.first} on")
        return self._read[1]

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request per problem. Raises BadInput where there is none."""
        problems = self.asked_problems(task)
        self.problems = {problem.id: problem for problem in problems}
        prompts = [encode_prompt(task, tokenizer, problem) for problem in problems]
        return [
            SampleRequest(problem.id, prompt.text, prompt.ids, messages_of(task, problem), problem.id)
            for problem, prompt in zip(problems, prompts, strict=True)
        ]

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """Return trajectories."""
        problem = self.problems[request.id]
        return [make_trajectory(task, tokenizer, problem, request, k, sample) for k, sample in enumerate(samples)]

    def inputs(self) -> list[str]:
        """None: the problems are the task's (`asked_problems`)."""
        return []


@dataclass
class CompletionRequests:
    """Continuations of the states in a file. `is_of_any_policy`: they may have been sampled by another policy than the
    one that completes them (values are then the completing policy's), if its tokenizer is the same."""

    states: str
    is_of_any_policy: bool = field(default=False, kw_only=True)

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a state; the prompt is the state's own ids."""
        states = read_records(State, self.states)
        self._states = {state.id: state for state in states}
        return [self.request(state.id, state) for state in states]

    def check_tokens(self, tokenizer: Any) -> None:
        """Raise BadInput where the loaded states hold another tokenizer's ids."""
        check_state_tokens(list(self._states.values()), decode(tokenizer), self.states)

    def request(self, request_id: str, state: State) -> SampleRequest:
        """Return a request for completions of a state."""
        ids = state.prompt_ids + state.prefix_ids
        return SampleRequest(request_id, state.prompt + state.prefix, ids, problem_id=state.problem_id)

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """Return completions, graded on the prefix and the continuation together."""
        return make_completions(task, tokenizer, self._states[request.id], request.id, samples)

    def inputs(self) -> list[str]:
        """Return the states."""
        return [self.states]
