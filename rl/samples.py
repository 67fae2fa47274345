"""The samples table: some rollouts of an iteration with the value and the advantage of every step.

`<run>/samples/iteration-000012.jsonl` holds `data.records.SampledRollout` rows; a file that exists is complete, and
an iteration that is done again after a resume writes it again.
"""

from collections.abc import Sequence
from pathlib import Path

from espalier.data.jsonl import write_records
from espalier.data.records import SampledRollout
from espalier.rl.types import Estimate, Experience, Rollout, RolloutGroup


def samples_path(run_dir: Path, iteration: int) -> Path:
    """Say where the rollouts of iteration `iteration` (from 1) stand."""
    return run_dir / "samples" / f"iteration-{iteration:06d}.jsonl"


def write_samples(
    run_dir: Path,
    iteration: int,
    groups: Sequence[RolloutGroup],
    experience: Experience,
    estimate: Estimate,
    num_problems: int,
) -> None:
    """The first rollout of each of the first `num_problems` groups. `iteration` counts from 1."""
    rows, first = [], 0
    for group in groups[:num_problems]:
        rows.append(_row(group, first, iteration, experience, estimate))
        first += len(group.rollouts)
    path = samples_path(run_dir, iteration)
    path.parent.mkdir(exist_ok=True)
    write_records(path, rows)


def _row(group: RolloutGroup, row: int, iteration: int, experience: Experience, estimate: Estimate) -> SampledRollout:
    rollout, score = group.rollouts[0], group.scores[0]
    trajectory = rollout.trajectory
    assert experience.advantages is not None
    start = len(trajectory.prompt_ids)
    advantages = experience.advantages[row, start : start + len(trajectory.response_ids)]
    starts = [0, *trajectory.step_ends[:-1]][: len(trajectory.step_ends)]
    spans = zip(starts, trajectory.step_ends, strict=True)
    return SampledRollout(
        id=trajectory.id,
        problem_id=trajectory.problem_id,
        iteration=iteration,
        policy_version=rollout.policy_version,
        prompt=trajectory.prompt,
        steps=trajectory.steps,
        step_values=values_at_step_starts(rollout, row, experience, estimate),
        step_advantages=[round(float(advantages[begin:end].mean()), 6) for begin, end in spans],
        step_rewards=[round(value, 6) for value in score.steps],
        reward=round(score.total, 6),
        reward_parts={name: round(value, 6) for name, value in score.parts.items()},
        num_tokens=len(trajectory.response_ids),
        finish_reason=trajectory.finish_reason,
        gold=trajectory.gold,
        answer=trajectory.answer,
        is_correct=trajectory.is_correct,
    )


def values_at_step_starts(rollout: Rollout, row: int, experience: Experience, estimate: Estimate) -> list[float]:
    """Return the value of the state that each step starts from: the estimator's, or the critic's at the step's first
    token.

    Empty where nothing values states, or where the estimator cut other steps than the trajectory's.
    """
    trajectory = rollout.trajectory
    num_steps = len(trajectory.step_ends)
    if estimate.state_values and len(estimate.state_values[row]) == num_steps + 1:
        return [round(value, 6) for value in estimate.state_values[row][:-1]]
    if experience.values is None or num_steps == 0:
        return []
    starts = [len(trajectory.prompt_ids) + begin for begin in [0, *trajectory.step_ends[:-1]]]
    return [round(float(value), 6) for value in experience.values[row, starts]]
