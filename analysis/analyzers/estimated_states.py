"""States with a reference value and what estimators say of them, joined from files: what value error and action
ranking are measured on.

The reference is StepValues of many completions (the published system: 256), an estimator's file StepValues of fewer or
other ones, or StepScores of a process reward model, of the same trajectories, or the folder of a critic, which reads
them now. A distinct state (a problem and the
tokens so far) counts once. Terminal states are left out: their value is the outcome, which everybody reads. So are
states that one of the estimators does not value, so that all are measured on the same ones, and problems that a scorer
was trained on. The estimates' completions must not be those of the reference: then the error is too small. Where the
provenance of both says that they are, the stage refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, StepScores, StepValues
from espalier.data.steps import check_ends
from espalier.pipeline.evaluation.evaluation_inputs import named_paths
from espalier.pipeline.prm.seen_problems import note_unknown
from espalier.pipeline.stage import StageContext
from espalier.runtime.stored_provenance import counted_from
from espalier.values.monte_carlo import StateKey, state_key

Estimates = dict[str, list[float | None]]  # trajectory id → a value for every step


@dataclass(frozen=True)
class EstimatedState:
    """The state after step `step` (from 1) of a trajectory of `num_steps`, and its `parent`, the state one step before.

    `value` is the reference's, `num_correct` of `num_completions` its completions of that very state, `estimates` each
    estimator's value by name.
    """

    problem_id: str
    parent: StateKey
    step: int
    num_steps: int
    value: float
    num_correct: int
    num_completions: int
    estimates: Mapping[str, float]


def named_estimates(value: Any, reference: str) -> dict[str, str]:
    """Return estimator → file. Raises BadInput where there is none, or one is the reference itself ("": there is none)
    or made of its completions."""
    paths = {name or "estimate": path for name, path in named_paths(value, "stage.estimates").items()}
    if not paths:
        raise BadInput(
            "stage.estimates names no file: give StepValues, StepScores or the folder of a critic, "
            "stage.estimates={prm: FILE}"
        )
    for path in paths.values() if reference else ():
        if Path(path).resolve() == Path(reference).resolve():
            raise BadInput(f"stage.estimates: {path} is the input itself: give values of other completions")
        source = counted_from(Path(reference))
        if source and source == counted_from(Path(path)):
            raise BadInput(f"stage.estimates: {path} was made of the same completions as {reference}, so that its "
                           "error would be too small: give values of other completions")  # fmt: skip
    return paths


def estimate_files(paths: Mapping[str, str]) -> list[str]:
    """List the files behind the estimators: those themselves, the weights of a critic."""
    return [file for path in paths.values() for file in (_critic_files(path) if Path(path).is_dir() else [path])]


def _critic_files(folder: str) -> list[str]:
    from espalier.analysis.analyzers.model_folders import weight_files

    return weight_files(folder)


def read_estimates(path: str, rows: Sequence[StepValues], context: StageContext, name: str) -> Estimates:
    """Read StepValues or StepScores, or let the critic in a folder value the states of `rows`. Rows of problems that a
    scorer was trained on are left out; those of which scores do not say it are counted by the estimator's `name`, with
    a warning. Raises BadInput on an empty file and on a model that is no critic."""
    if Path(path).is_dir():
        return _critic_estimates(path, rows)
    first = next(iter_rows(path), None)
    if first is None:
        raise BadInput(f"{path}: empty: run the stage that writes it")
    if "scores" not in first[1]:
        return {row.id: row.values for row in read_records(StepValues, path)}
    scored = read_records(StepScores, path)
    unseen: Estimates = {row.id: [*row.scores] for row in scored if not row.is_seen}
    note_unknown({row.problem_id for row in rows}, path, context, name)
    leave_out(path, len(scored) - len(unseen), len(scored), "trajectories", "are of problems the scorer was trained on")
    return unseen


def _critic_estimates(folder: str, rows: Sequence[StepValues]) -> Estimates:
    from espalier.analysis.analyzers.critic_estimates import critic_values_at
    from espalier.analysis.analyzers.model_folders import check_tokens
    from espalier.models.load import load_config
    from espalier.models.scalar_head import critic_form

    if critic_form(load_config(folder)) is None:
        raise BadInput(f"{folder} is no critic that a run has saved: score the steps with prm/score_steps, "
                       "and name the file")  # fmt: skip
    if getattr(load_config(folder), "values_scaled_rewards", False):
        raise BadInput(f"{folder} values rewards that its run has scaled, or added implicit ones or the cost of a KL "
                       "penalty to, and no chances of success: train with update.reward_scaling=none, "
                       "update.whitens_rewards=false, implicit_reward=none and kl.place=loss")  # fmt: skip
    check_tokens(folder, rows)
    ids = [[*row.prompt_ids, *row.response_ids] for row in rows]
    lengths = [[len(row.prompt_ids) + end for end in row.step_ends] for row in rows]
    values = critic_values_at(folder, ids, lengths)
    return {row.id: [*found] for row, found in zip(rows, values, strict=True)}


def estimated_states(reference: str, paths: Mapping[str, str], context: StageContext) -> dict[StateKey, EstimatedState]:
    """Return the distinct states that the reference and every estimator values.

    Raises BadInput where there is none, and where an estimate has other steps than the reference.
    """
    rows = read_records(StepValues, reference)
    for row in rows:
        check_ends(row.steps, row.step_ends, row.id)
    estimates = {name: read_estimates(path, rows, context, name) for name, path in paths.items()}
    states: dict[StateKey, EstimatedState] = {}
    num_inner, num_unknown = 0, 0
    for row in rows:
        given = {name: values[row.id] for name, values in estimates.items() if row.id in values}
        for name, values in given.items():
            if len(values) != len(row.steps):
                raise BadInput(f"{paths[name]}: trajectory '{row.id}' has {len(values)} values and {len(row.steps)} "
                               f"steps in {reference}: estimate these trajectories")  # fmt: skip
        parent = state_key(row.problem_id, [])
        for step, value in enumerate(row.values[:-1], 1):
            key = state_key(row.problem_id, row.response_ids[: row.step_ends[step - 1]])
            found = {name: one for name, values in given.items() if (one := values[step - 1]) is not None}
            num_inner += 1
            if value is None or len(found) < len(paths):
                num_unknown += 1
            else:
                counts = row.num_correct[step - 1], row.num_completions[step - 1]
                state = EstimatedState(row.problem_id, parent, step, len(row.steps), value, *counts, found)
                states.setdefault(key, state)
            parent = key
    leave_out(reference, num_unknown, num_inner, "states", "are not valued by the reference and every estimator")
    if not states:
        raise BadInput(f"{reference}: none of its {num_inner} inner states is valued by it and every one of "
                       f"{', '.join(paths.values())}: give files of the same trajectories")  # fmt: skip
    return states
