"""The file formats: one frozen dataclass for each kind of JSONL line.

A file's kind is a class of this module; reading a file validates every line against it and names the
file, the line and the field that is wrong. Ids are derived from one another, never random, so that
stages join by id, resume by set difference and shard by hash:

    problem            `wa-train-17`
    trajectory         `{problem}/{sample}`
    state              `{trajectory}#{step}`     the prompt and the first `step` steps of the trajectory
    completion         `{state}/{sample}`
    preference pair    `{trajectory}>{trajectory}`    `~2` behind it: repeated; `@round3`: taken from an earlier round
                       `{trajectory}#{steps}>...`    a pair whose prompt ends mid-solution

A completion that a later round of an adaptive run asked for is `{state}@{round}/{sample}`.

Token ids travel with the text from the sampler to the trainer; nothing is ever re-tokenised.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from espalier.data.answers.grade import Gold

R = TypeVar("R")


class BadInput(ValueError):
    """The user's file or value is wrong; the message names the place and what would be right."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question with its gold answer; `gold` "" where the published row has none, a list where any of
    several answers is right. `options` are those of a choice, without their letters; `gold` is then a letter
    ("A" is the first). `context` is the passage or the premises. `info` holds what only the task itself reads,
    and under "subject" and "level" what accuracy is broken down by."""

    id: str
    question: str
    gold: Gold
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: str = ""
    options: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate (TRL's prompt-completion layout), as text."""

    id: str
    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One sampled solution. `"".join(steps) == response`; `step_ends[i]` counts the response tokens up
    to and including step i, so `response_ids[:step_ends[i]]` are the first i + 1 steps, and read as them behind the
    prompt: a token belongs to the step it begins in, its text too. The last step holds the end-of-sequence token if
    there is one; where its last token goes over into a stop string, the text ends before the token does. `answer`
    is None where none could be extracted. `logprobs`, kept when asked, are the sampler's own log-probs of
    `response_ids`, one a token (nats; of the model before temperature and top_p, unless the engine is set
    otherwise); None where they were not kept."""

    id: str
    problem_id: str
    prompt: str
    response: str
    steps: list[str]
    prompt_ids: list[int]
    response_ids: list[int]
    step_ends: list[int]
    finish_reason: str
    gold: Gold
    answer: str | None
    is_correct: bool
    num_options: int = 0
    logprobs: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """An intermediate state: a problem and a prefix of `step` steps of the trajectory that reached it; `prefix` is
    what `prefix_ids` read as behind the prompt."""

    id: str
    problem_id: str
    trajectory_id: str
    step: int
    prompt: str
    prefix: str
    prompt_ids: list[int]
    prefix_ids: list[int]
    gold: Gold
    num_options: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continuation sampled from a state; `response` is what follows the state's prefix in the text of all
    tokens. `logprobs`, kept when asked, are those of `response_ids`, as in Trajectory."""

    id: str
    state_id: str
    problem_id: str
    response: str
    response_ids: list[int]
    finish_reason: str
    answer: str | None
    is_correct: bool
    logprobs: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class SampledRollout:
    """A rollout of reinforcement learning as its iteration saw it, for reading (rl/samples.py).

    `iteration` counts from 1; `policy_version` is the number of iterations behind the policy that drew it.
    `step_values[i]` is the value of the state that step i starts from (empty where nothing values states),
    `step_advantages[i]` the mean over the step's tokens of the advantage they were trained with (after whitening),
    `step_rewards` are process rewards (empty without). `reward` is the total, `reward_parts` its parts, unweighted.
    """

    id: str
    problem_id: str
    iteration: int
    policy_version: int
    prompt: str
    steps: list[str]
    step_values: list[float]
    step_advantages: list[float]
    step_rewards: list[float]
    reward: float
    reward_parts: dict[str, float]
    num_tokens: int
    finish_reason: str
    gold: Gold
    answer: str | None
    is_correct: bool


@dataclasses.dataclass(frozen=True)
class StepValues:
    """The Monte-Carlo value of the state after every step of a trajectory.

    `values[i]` = `num_correct[i]` / `num_completions[i]` is the value of the state that step i leads to.
    The last state is terminal: its value is the outcome itself, counted as one completion.
    """

    id: str
    problem_id: str
    prompt: str
    steps: list[str]
    prompt_ids: list[int]
    response_ids: list[int]
    step_ends: list[int]
    values: list[float]
    num_correct: list[int]
    num_completions: list[int]
    is_correct: bool


@dataclasses.dataclass(frozen=True)
class LabelledSteps:
    """A solution whose steps somebody judged: a published process-supervision row.

    `labels[i]` in [0, 1] says how good step i is (1 right, 0 wrong, a Monte-Carlo value between), None where
    nobody judged it. `first_error` is the 0-based index of the first wrong step, -1 where every step is right,
    None where that is not known. `is_correct` says whether the final answer is right, None where not known.
    `info` holds what else the published row says, enough to write it back.
    """

    id: str
    problem_id: str
    question: str
    steps: list[str]
    labels: list[float | None]
    first_error: int | None
    is_correct: bool | None
    gold: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepScores:
    """A process reward model's score of every step of a trajectory, each in [0, 1].

    `is_seen`: whether the model was trained on this problem; None where its folder does not say.
    """

    id: str
    problem_id: str
    scores: list[float]
    is_seen: bool | None = None


@dataclasses.dataclass(frozen=True)
class PreferencePair:
    """`chosen` is preferred over `rejected` as a continuation of `prompt` (TRL's explicit-prompt layout).

    A step pair has no format of its own: its prompt ends mid-solution. `kind` is "outcome" (correct over
    incorrect), "process" (ranked by step scores) or "step".
    """

    id: str
    problem_id: str
    kind: str
    prompt: str
    chosen: str
    rejected: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_score: float
    rejected_score: float


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Field name → (type, is required)."""
    hints = typing.get_type_hints(kind)
    return {
        f.name: (
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(kind)
    }


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the annotated type; an int is a float, a bool is not an int."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in args)
    if hint is types.NoneType:
        return value is None
    if hint in (list[int], list[str]):  # the long lists: one pass in C
        return isinstance(value, list) and set(map(type, value)) <= {args[0]}
    if hint == list[float]:
        return isinstance(value, list) and set(map(type, value)) <= {float, int}
    if origin is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def parse_record(kind: type[R], row: Mapping[str, Any], place: str) -> R:
    """A record from a JSON object; `place` (`file:line`) opens every message.

    Raises BadInput on an unknown, missing or ill-typed field.
    """
    fields = _fields(kind)  # type: ignore[arg-type]
    for name in row:
        if name not in fields:
            raise BadInput(f"{place}: {kind.__name__} has no field '{name}' (it has {', '.join(fields)})")
    for name, (hint, is_required) in fields.items():
        if name not in row:
            if is_required:
                raise BadInput(f"{place}: {kind.__name__} lacks the field '{name}'")
            continue
        if not _fits(row[name], hint):
            want = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
            raise BadInput(f"{place}: {name} must be {want}, got {str(row[name])[:60]!r}")
    return kind(**row)
