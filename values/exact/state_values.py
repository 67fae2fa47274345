"""True values of the states of trajectories under a policy network, on a task that can be enumerated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.steps import Decoder
from espalier.data.tasks.enumerable import EnumerableTask
from espalier.data.tasks.task import Task
from espalier.models.inputs import network
from espalier.models.packing_check import is_cut
from espalier.values.exact.decision_values import ExactValue, evaluate_policy, shares_leaving
from espalier.values.exact.line_decisions import Ids, LineDecisions
from espalier.values.exact.line_search import LineSearch
from espalier.values.exact.merge_error import NO_MERGES, MergeError, measure_merges

Question = tuple[str, Ids]  # problem id, prompt tokens

_CHUNK = 8  # problems that are solved together: what is kept of their states is in memory at once


@dataclass(frozen=True)
class ExactSettings:
    """How far the policy's ways are followed. Raises BadInput on numbers out of range (where they are used)."""

    max_tokens: int
    """The longest response, as of the sampler."""
    temperature: float = 1.0
    line_mass: float = 5e-3
    """Of every next line less than this probability is given up."""
    state_mass: float = 1e-3
    """A state that is reached from the asked ones with less probability is not followed."""
    max_width: int = 16
    """Beginnings of a line that are followed from one state beside one another, at most."""
    merges: bool = True
    """Whether prefixes of equal position are one state; without it every prefix is its own: exact, for few steps."""
    merge_pairs: int = 0
    """Pairs of merged prefixes that are compared, for `ExactValues.merge_error`, per eight problems."""


@dataclass(frozen=True)
class ExactValues:
    """`values[i]` are V_0 .. V_S of trajectory i, whose V_S is its outcome; `num_states` were followed; `outside` is
    the probability, at least, with which a solution leaves the task's grammar: the mean over the questions."""

    values: list[list[ExactValue]]
    num_states: int
    merge_error: MergeError
    outside: float


def enumerable(task: Task) -> EnumerableTask:
    """Return the task. Raises BadInput where it does not know the position of a solution."""
    if not callable(getattr(task, "position", None)):
        raise BadInput(f"exact values need a task that can be enumerated, and {task.name} has no `position` "
                       "(data/tasks/enumerable.py): choose task=word_arithmetic or another estimator")  # fmt: skip
    return task  # type: ignore[return-value]


def exact_values(
    policy: Any,
    tokenizer: Any,
    task: Task,
    problems: Mapping[str, Problem],
    trajectories: Sequence[Trajectory],
    settings: ExactSettings,
) -> ExactValues:
    """Return the values of all states of the trajectories (by their `step_ends`) under `policy`; `problems` by id.

    Raises BadInput for a task that cannot be enumerated, a trajectory of another problem, without token ids or of more
    than `max_tokens`, and a network whose weights lie in parts on several ranks.
    """
    if is_cut(policy):
        raise BadInput("exact values need the whole network on one rank: set deepspeed=none or zero2")
    if foreign := [row for row in trajectories if row.problem_id not in problems]:
        raise BadInput(f"trajectory '{foreign[0].id}': its problem '{foreign[0].problem_id}' is not among the "
                       f"{len(problems)} that are given: give those of the split that was sampled")  # fmt: skip
    decode, limits = Decoder(tokenizer), (settings.temperature, settings.line_mass, settings.max_width)
    search = LineSearch(network(policy), decode, end_ids_of(policy, tokenizer), *limits)
    asked = asked_prefixes(trajectories, settings.max_tokens)
    questions = list(asked)
    found: dict[tuple[Question, Ids], ExactValue] = {}
    num_states, errors, outside = 0, [], []
    for first in range(0, len(questions), _CHUNK):
        chunk = questions[first : first + _CHUNK]
        named = [(problems[identity], prompt) for identity, prompt in chunk]
        decisions = LineDecisions(enumerable(task), named, decode, search, settings.max_tokens, settings.merges)
        states = {(question, ids): decisions.state((number, ids), is_asked=True)
                  for number, question in enumerate(chunk) for ids in asked[question]}  # fmt: skip
        nodes = evaluate_policy(list(states.values()), decisions, settings.state_mass)
        found |= {place: nodes[state.node].value for place, state in states.items()}
        num_states += sum(node.transitions is not None for node in nodes.values())
        errors.append(measure_merges(nodes, decisions, settings.merge_pairs, first))
        shares = shares_leaving(nodes, decisions.leaves_grammar)
        outside += [shares[state.node] for (_, ids), state in states.items() if not ids]
        search.forget()
    rows = []
    for trajectory in trajectories:
        outcome = float(trajectory.is_correct)
        own = [found[question_of(trajectory), ids] for ids in state_prefixes(trajectory)]
        rows.append([*own, ExactValue(outcome, outcome)])
    return ExactValues(rows, num_states, mean_error(errors), sum(outside) / max(1, len(outside)))


def question_of(trajectory: Trajectory) -> Question:
    """Return what states are of: the problem as it was asked."""
    return trajectory.problem_id, tuple(trajectory.prompt_ids)


def asked_prefixes(trajectories: Sequence[Trajectory], max_tokens: int) -> dict[Question, dict[Ids, None]]:
    """Return the distinct prefixes of every question, in order. Raises BadInput as `exact_values`."""
    asked: dict[Question, dict[Ids, None]] = {}
    for trajectory in trajectories:
        if len(trajectory.response_ids) > max_tokens:
            raise BadInput(f"trajectory '{trajectory.id}' has {len(trajectory.response_ids)} tokens: exact values need "
                           f"the max_tokens that it was sampled with, got {max_tokens}")  # fmt: skip
        prefixes = asked.setdefault(question_of(trajectory), {})
        prefixes |= dict.fromkeys(state_prefixes(trajectory))
    return asked


def state_prefixes(trajectory: Trajectory) -> list[Ids]:
    """Return the response tokens before each of its S steps. Raises BadInput for a trajectory without token ids."""
    if not trajectory.response_ids and trajectory.response:
        raise BadInput(f"trajectory '{trajectory.id}' has no token ids: exact values need them")
    starts = [0, *trajectory.step_ends[:-1]][: len(trajectory.steps)]
    return [tuple(trajectory.response_ids[:start]) for start in starts]


def end_ids_of(policy: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: those of the network's generation settings, and the tokenizer's."""
    ids = getattr(getattr(network(policy), "generation_config", None), "eos_token_id", None)
    own = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return sorted({*own, int(tokenizer.eos_token_id)})


def mean_error(errors: Sequence[MergeError]) -> MergeError:
    """Return the error over all pairs."""
    num = sum(error.num_pairs for error in errors)
    if not num:
        return NO_MERGES
    return MergeError(
        num,
        sum(error.total_variation * error.num_pairs for error in errors) / num,
        max(error.most for error in errors),
        sum(error.value_gap * error.num_pairs for error in errors) / num,
    )
