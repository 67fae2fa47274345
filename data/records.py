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

Token ids travel with the text from the sampler to the trainer; nothing is ever re-tokenised. A field without a text
under it means what the field of that name means in a class above. docs/formats.md is made of these texts.
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
    """A question with its gold answer."""

    id: str
    """unique within the task: `wa-train-17`"""
    question: str
    """the question itself"""
    gold: Gold
    """the right answer; a list where any of several is right; `""` where the published row has none"""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    """what only the task reads; "subject" and "level" in it are what accuracy is broken down by"""
    context: str = ""
    """the passage or the premises"""
    options: list[str] = dataclasses.field(default_factory=list)
    """of a choice, without their letters; `gold` is then a letter ("A" is the first)"""
    passage_id: str = ""
    """what several problems share, a passage or a story: they stay on one side of every split; `""`: nothing"""


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, as text (TRL's prompt-completion layout). Where the response judges a
    solution, as a verifier's do, `problem_id` and `judged` are those of the solution; else they are empty."""

    id: str
    """unique in the file"""
    prompt: str
    """the whole prompt, as the model reads it"""
    completion: str
    """the response"""
    problem_id: str = ""
    """the problem's id"""
    judged: str = ""
    """the solution that is judged, all of it also where only its first steps are asked about"""


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One sampled solution. A token belongs to the step it begins in, and so does its text."""

    id: str
    """`{problem}/{sample}`"""
    problem_id: str
    """the problem's id"""
    prompt: str
    """the prompt's text"""
    response: str
    """the response's text; where the last token reaches into a stop string, the text ends before it does"""
    steps: list[str]
    """the response cut into steps: joined they are `response`"""
    prompt_ids: list[int]
    """token ids that were sent"""
    response_ids: list[int]
    """token ids that were sampled, the end token included"""
    step_ends: list[int]
    """number of response tokens up to and including each step: `response_ids[:step_ends[i]]` are i + 1 steps"""
    finish_reason: str
    """stop: it ended by itself; length: it was cut"""
    gold: Gold
    answer: str | None
    """the extracted answer, null where there is none to read"""
    is_correct: bool
    """whether the answer is right"""
    num_options: int = 0
    """number of options of a choice, else 0"""
    logprobs: list[float] | None = None
    """the sampler's log-probs of `response_ids` in nats, before temperature and top_p unless the engine is set
    otherwise; null where they were not kept"""
    passage_id: str = ""
    """the problem's"""


@dataclasses.dataclass(frozen=True)
class State:
    """An intermediate state: a problem and the first steps of the trajectory that reached it."""

    id: str
    """`{trajectory}#{step}`"""
    problem_id: str
    trajectory_id: str
    """the first trajectory that reached it"""
    step: int
    """number of steps in the prefix"""
    prompt: str
    prefix: str
    """what `prefix_ids` read as behind the prompt"""
    prompt_ids: list[int]
    prefix_ids: list[int]
    """token ids of the steps"""
    gold: Gold
    num_options: int = 0
    passage_id: str = ""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continuation sampled from a state."""

    id: str
    """`{state}/{sample}`; `{state}@{round}/{sample}` of a later round"""
    state_id: str
    """the state it continues"""
    problem_id: str
    response: str
    """what follows the state's prefix in the text of all tokens"""
    response_ids: list[int]
    finish_reason: str
    answer: str | None
    """the answer of prefix and response together, null where there is none to read"""
    is_correct: bool
    logprobs: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class SampledRollout:
    """A rollout of reinforcement learning as its iteration saw it, for reading (rl/samples.py)."""

    id: str
    """the rollout's id"""
    problem_id: str
    iteration: int
    """from 1"""
    policy_version: int
    """number of iterations behind the policy that drew it"""
    prompt: str
    steps: list[str]
    """the response cut into steps"""
    step_values: list[float]
    """value of the state that each step starts from; empty where nothing values states"""
    step_advantages: list[float]
    """mean over each step's tokens of the advantage they were trained with, after whitening"""
    step_rewards: list[float]
    """process rewards; empty without"""
    reward: float
    """the total"""
    reward_parts: dict[str, float]
    """its parts, unweighted"""
    num_tokens: int
    """response tokens"""
    finish_reason: str
    gold: Gold
    answer: str | None
    is_correct: bool
    estimator_values: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """by the name of a further estimator (`samples.estimators`) what `step_values` are of the run's own"""
    estimator_advantages: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """by its name each step's advantage, before whitening; it is not trained with"""
    reward_answers: dict[str, float] = dataclasses.field(default_factory=dict)
    """answer → the probability that the reward took from the response for it; empty where it scores no probabilities"""


@dataclasses.dataclass(frozen=True)
class StepValues:
    """The estimated value of the state after every step of a trajectory, and the labels that a process reward model
    learns; the lists of numbers have one entry per step.

    The last state is terminal: its value is the outcome itself, counted as one completion."""

    id: str
    """the trajectory's id"""
    problem_id: str
    prompt: str
    steps: list[str]
    prompt_ids: list[int]
    response_ids: list[int]
    step_ends: list[int]
    values: list[float | None]
    """value of the state that each step leads to; null where nothing is known of it"""
    num_correct: list[int]
    """right completions of that very state"""
    num_completions: list[int]
    """completions of that very state"""
    is_correct: bool
    labels: list[float | None] = dataclasses.field(default_factory=list)
    """the target of each step in [0, 1], null where it has none; left out: the values"""
    weights: list[float] = dataclasses.field(default_factory=list)
    """how much each label counts, in [0, 1]; left out: 1, and 0 where there is no label"""
    low: list[float] = dataclasses.field(default_factory=list)
    """lower end of the value's 95 % interval; left out: Wilson's of the counts"""
    high: list[float] = dataclasses.field(default_factory=list)
    """upper end of that interval"""
    prompt_value: float | None = None
    """share of the problem's trajectories that are right"""
    passage_id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.labels or list(self.values))
        object.__setattr__(self, "weights", self.weights or [float(label is not None) for label in self.labels])
        for name in ("values", "num_correct", "num_completions", "labels", "weights", "low", "high"):
            number = len(getattr(self, name))
            if number != len(self.steps) and (number or name not in ("low", "high")):
                raise BadInput(f"'{self.id}' has {len(self.steps)} steps and {number} {name}: give one per step")


@dataclasses.dataclass(frozen=True)
class AnnotatedSolution:
    """A solution whose steps somebody judged: a published process-supervision row."""

    id: str
    """from the published row"""
    problem_id: str
    question: str
    """the problem's text"""
    steps: list[str]
    """the solution cut into steps"""
    labels: list[float | None]
    """how good each step is: 1 right, 0 wrong, a Monte-Carlo value between; null where nobody judged it"""
    first_error: int | None
    """index of the first wrong step from 0; -1 where all are right; null where it is not known"""
    is_correct: bool | None
    """whether the final answer is right; null where it is not known"""
    gold: str = ""
    """the right answer, where it is published"""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    """what else the published row says, enough to write it back"""


@dataclasses.dataclass(frozen=True)
class StepScores:
    """A process reward model's scores of the steps of a trajectory."""

    id: str
    """the trajectory's id"""
    problem_id: str
    scores: list[float]
    """of each step, in [0, 1]; empty where the scorer gave none that can be read"""
    is_seen: bool | None = None
    """whether the model was trained on this problem; null where its folder does not say, or by ids of another kind"""


@dataclasses.dataclass(frozen=True)
class PreferencePair:
    """`chosen` is preferred over `rejected` as a continuation of `prompt` (TRL's explicit-prompt layout). A step pair
    has no format of its own: its prompt ends mid-solution."""

    id: str
    """`{trajectory}>{trajectory}`"""
    problem_id: str
    kind: str
    """outcome (right over wrong), process (ranked by step scores), step, and the like"""
    prompt: str
    """what both sides continue"""
    chosen: str
    """the preferred text"""
    rejected: str
    """the other text"""
    prompt_ids: list[int]
    chosen_ids: list[int]
    """token ids of the preferred side"""
    rejected_ids: list[int]
    """token ids of the other side"""
    chosen_score: float
    """what the preferred side was ranked by"""
    rejected_score: float
    """what the other side was ranked by"""
    passage_id: str = ""


@cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Field name → (type, is required)."""
    hints = typing.get_type_hints(kind)
    is_required = {f.name: f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(kind)}
    return {name: (hints[name], required) for name, required in is_required.items()}


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a JSON value is of the annotated type; an int is a float, a bool is not an int."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in args)
    if hint in (list[int], list[str]):  # the long lists: one pass in C
        return isinstance(value, list) and set(map(type, value)) <= {args[0]}
    if hint == list[float]:
        return isinstance(value, list) and set(map(type, value)) <= {float, int}
    if origin is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if hint in (float, int):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def parse_record(kind: type[R], row: Mapping[str, Any], place: str) -> R:
    """Return a record from a JSON object; `place` (`file:line`) opens every message.

    Raises BadInput on an unknown, missing or ill-typed field, and where the kind's own check does.
    """
    fields = _fields(kind)  # type: ignore[arg-type]
    if unknown := [name for name in row if name not in fields]:
        raise BadInput(f"{place}: {kind.__name__} has no field '{unknown[0]}' (it has {', '.join(fields)}): correct "
                       "the row, or name the file that holds such rows")  # fmt: skip
    for name, (hint, is_required) in fields.items():
        if name not in row:
            if is_required:
                raise BadInput(f"{place}: {kind.__name__} lacks the field '{name}': correct the row, or name the "
                               "file that holds such rows")  # fmt: skip
            continue
        if not _fits(row[name], hint):
            want = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
            raise BadInput(f"{place}: {name} must be {want}, got {str(row[name])[:60]!r}")
    try:
        return kind(**row)
    except BadInput as error:
        raise BadInput(f"{place}: {error}") from None
