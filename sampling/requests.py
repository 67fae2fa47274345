"""Problems and states → requests; samples → records. Graded at once: a record says whether it is right."""

import bisect
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from data.jsonl import read_records
from data.prompts import PromptTemplate, encode_prompt
from data.records import BadInput, Completion, Problem, State, Trajectory
from data.steps import Decoder, check_join, token_step_ends
from data.tasks.task import Task
from sampling.client import Sample, SampleRequest
from sampling.input_checks import check_state_tokens


class RequestSource(Protocol):
    """What is asked, and what is made of the answers."""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """All requests, finished ones included."""

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """One record a sample, ids `{request}/{k}`."""

    def inputs(self) -> list[str]:
        """Files read, for provenance."""


@lru_cache(maxsize=4)
def decode(tokenizer: Any) -> Decoder:
    """The tokenizer's decoder, one for each tokenizer, so that it remembers its tokens."""
    return Decoder(tokenizer)


def messages_of(task: Task, problem: Problem) -> list[dict[str, str]]:
    """The prompt as chat turns, where the task has a template."""
    template = getattr(task, "template", None)
    return template.messages(problem) if isinstance(template, PromptTemplate) else []


def cut_at_text(sample: Sample, tokenizer: Any) -> Sample:
    """The sample without the tokens of a stop string, which vLLM takes off the text alone.

    A token that holds the end of the text and the beginning of the stop string stays.
    """
    ids = sample.token_ids
    if sample.finish_reason != "stop" or not ids or ids[-1] == tokenizer.eos_token_id:
        return sample
    to_text = decode(tokenizer)
    if not to_text(ids).startswith(sample.text) or to_text(ids) == sample.text:
        return sample
    kept = bisect.bisect_left(range(len(ids)), len(sample.text), key=lambda count: len(to_text(ids[:count])))
    logprobs = sample.logprobs[:kept] if sample.logprobs is not None else None
    return replace(sample, token_ids=ids[:kept], logprobs=logprobs)


def make_trajectory(
    task: Task, tokenizer: Any, problem: Problem, request: SampleRequest, index: int, sample: Sample
) -> Trajectory:
    """A graded trajectory with its steps and their token ends. A response cut by its length is wrong.

    Without token ids (chat APIs return none) there are no token ends either.
    """
    sample = cut_at_text(sample, tokenizer)
    template = getattr(task, "template", None)
    if not sample.token_ids and isinstance(template, PromptTemplate):
        sample = replace(sample, text=template.strip_opening(sample.text))
    steps = task.split_steps(sample.text)
    check_join(steps, sample.text, f"{request.id}/{index}")
    ends = token_step_ends(steps, request.prompt_ids, sample.token_ids, decode(tokenizer)) if sample.token_ids else []
    grade = task.grade(problem.gold, sample.text, len(problem.options))
    return Trajectory(
        id=f"{request.id}/{index}",
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
    )


def make_completions(
    task: Task, tokenizer: Any, state: State, request_id: str, samples: list[Sample]
) -> list[Completion]:
    """The graded completions of a state, each graded together with the state's prefix; ids `{request}/{k}`."""
    records = []
    for k, answered in enumerate(samples):
        sample = cut_at_text(answered, tokenizer)
        grade = task.grade(state.gold, state.prefix + sample.text, state.num_options)
        is_correct = grade.is_correct and sample.finish_reason == "stop"
        records.append(
            Completion(
                f"{request_id}/{k}",
                state.id,
                state.problem_id,
                sample.text,
                sample.token_ids,
                sample.finish_reason,
                grade.answer,
                is_correct,
                sample.logprobs,
            )
        )
    return records


@dataclass
class TrajectoryRequests:
    """Full solutions of a split's problems `first` .. `first + limit - 1` (limit 0: all)."""

    split: str
    first: int = 0
    limit: int = 0

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """One request a problem."""
        problems = task.problems(self.split)[self.first :]
        problems = problems[: self.limit] if self.limit else problems
        if not problems:
            raise BadInput(f"{task.name}/{self.split} has no problem from {self.first} on")
        self._problems = {problem.id: problem for problem in problems}
        prompts = [encode_prompt(task, tokenizer, problem) for problem in problems]
        return [
            SampleRequest(problem.id, prompt.text, prompt.ids, messages_of(task, problem), problem.id)
            for problem, prompt in zip(problems, prompts, strict=True)
        ]

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """Trajectories."""
        problem = self._problems[request.id]
        return [make_trajectory(task, tokenizer, problem, request, k, sample) for k, sample in enumerate(samples)]

    def inputs(self) -> list[str]:
        """None: the task makes or reads the problems."""
        return []


@dataclass
class CompletionRequests:
    """Continuations of the states in a file. `is_of_any_policy`: they may have been sampled by another policy than the
    one that completes them (values are then the completing policy's), if its tokenizer is the same."""

    states: str
    is_of_any_policy: bool = field(default=False, kw_only=True)

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """One request a state; the prompt is the state's own ids."""
        states = read_records(State, self.states)
        self._states = {state.id: state for state in states}
        return [self.request(state.id, state) for state in states]

    def check_tokens(self, tokenizer: Any) -> None:
        """Raise BadInput where the loaded states hold another tokenizer's ids."""
        check_state_tokens(list(self._states.values()), decode(tokenizer), self.states)

    def request(self, request_id: str, state: State) -> SampleRequest:
        """A request for completions of a state."""
        ids = state.prompt_ids + state.prefix_ids
        return SampleRequest(request_id, state.prompt + state.prefix, ids, problem_id=state.problem_id)

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[Any]:
        """Completions, graded on the prefix and the continuation together."""
        return make_completions(task, tokenizer, self._states[request.id], request.id, samples)

    def inputs(self) -> list[str]:
        """The states."""
        return [self.states]
