"""The samples table: some rollouts of an iteration with the value and the advantage of every step.

`<run>/samples/iteration-000012.jsonl` holds `data.records.SampledRollout` rows; a file that exists is complete, and
an iteration that is done again after a resume writes it again. `evaluation-000012.jsonl` holds the solutions of an
evaluation after that iteration, as the programs that sample write them.

Further estimators (`samples.estimators`) are asked about the groups that are written down, and about nothing else.
Nothing is trained with their answers, and the engines' random state is put back behind them (`rl.iteration`): a run
with them ends with the same bits as one without.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from espalier.data.jsonl import write_records
from espalier.data.records import SampledRollout
from espalier.rl.estimator_context import AdvantageEstimator, EstimatorContext
from espalier.rl.types import Estimate, Experience, Rollout, RolloutGroup
from espalier.runtime.distributed import device
from espalier.runtime.schemas import SamplesConfig


def samples_path(run_dir: Path, iteration: int) -> Path:
    """Say where the rollouts of iteration `iteration` (from 1) stand."""
    return run_dir / "samples" / f"iteration-{iteration:06d}.jsonl"


def evaluation_path(run_dir: Path, version: int) -> Path:
    """Say where what was drawn in the evaluation of the policy of `version` stands."""
    return run_dir / "samples" / f"evaluation-{version:06d}.jsonl"


def forget_evaluated(run_dir: Path, first: int) -> None:
    """Remove evaluations of policies behind `first`, where a run goes on: it may not evaluate there again."""
    for path in run_dir.glob("samples/evaluation-*.jsonl"):
        if int(path.stem.rpartition("-")[2]) > first:
            path.unlink()


def write_evaluated(run_dir: Path, version: int, groups: Sequence[RolloutGroup], config: SamplesConfig) -> None:
    """Write what an evaluation of the policy of `version` drew (`data.records.Trajectory`), of as many problems and
    rollouts as of an iteration."""
    written = [group.rollouts[: config.rollouts_per_problem or None] for group in groups[: config.num_problems]]
    path = evaluation_path(run_dir, version)
    path.parent.mkdir(exist_ok=True)
    write_records(path, [rollout.trajectory for rollouts in written for rollout in rollouts])


@dataclass(frozen=True)
class StepCredit:
    """What an estimator says of the S steps of a rollout: the value of the state that each starts from (empty where it
    values none), and the mean advantage of its tokens."""

    values: list[float]
    advantages: list[float]


@dataclass
class RolloutLog:
    """What a run writes down of its iterations. `estimators`: the further ones by their names."""

    run_dir: Path
    config: SamplesConfig
    estimators: Mapping[str, AdvantageEstimator]

    def is_due(self, done: int) -> bool:
        """Say whether the rollouts of iteration `done` (from 1) are written down."""
        return self.config.every > 0 and self.config.num_problems > 0 and done % self.config.every == 0

    def ask(
        self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext
    ) -> dict[str, list[StepCredit]]:
        """Return by the name of every further estimator one answer per rollout of the groups that are written down,
        from before the update.

        Each gets these groups and copies of their rows alone, samples of its own, and the random state is put back:
        what is learnt does not depend on what is asked here.
        """
        written = groups[: self.config.num_problems]
        rollouts = [rollout for group in written for rollout in group.rollouts]
        found = {}
        for name, estimator in self.estimators.items():
            rows = first_rows(experience, len(rollouts))
            context.asker = name
            with kept_random_state():
                estimate = estimator(written, rows, context)
            values = rows.values if estimator.needs_critic else None
            rows = replace(rows, values=values, advantages=estimate.advantages)
            found[name] = [step_credit(rollout, row, rows, estimate) for row, rollout in enumerate(rollouts)]
        return found

    def write(
        self,
        done: int,
        groups: Sequence[RolloutGroup],
        experience: Experience,
        estimate: Estimate,
        further: Mapping[str, Sequence[StepCredit]],
    ) -> None:
        """Write down the rollouts of iteration `done` (from 1); on rank 0 alone."""
        config = self.config
        write_samples(
            self.run_dir, done, groups, experience, estimate, config.num_problems, config.rollouts_per_problem, further
        )


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put torch's random state back at the end of the block, the device's too."""
    with torch.random.fork_rng(devices=[device()] if device().type == "cuda" else []):
        yield


def first_rows(experience: Experience, num: int) -> Experience:
    """Return copies of the first `num` rows of all tensors, without advantages and returns: nothing that is done to
    them reaches the experience."""

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[:num].clone()

    return Experience(
        experience.ids[:num].clone(),
        experience.attention_mask[:num].clone(),
        experience.response_mask[:num].clone(),
        experience.rollout_logprobs[:num].clone(),
        experience.old.first(num),
        reference_logprobs=cut(experience.reference_logprobs),
        rewards=cut(experience.rewards),
        implicit_rewards=cut(experience.implicit_rewards),
        values=cut(experience.values),
    )


def write_samples(
    run_dir: Path,
    iteration: int,
    groups: Sequence[RolloutGroup],
    experience: Experience,
    estimate: Estimate,
    num_problems: int,
    rollouts_per_problem: int = 1,
    further: Mapping[str, Sequence[StepCredit]] | None = None,
) -> None:
    """Write the first `rollouts_per_problem` rollouts (0: all) of each of the first `num_problems` groups.

    `iteration` counts from 1; `further` holds by an estimator's name one answer per rollout of these groups, those that
    are not written included.
    """
    rows, first = [], 0
    for group in groups[:num_problems]:
        for place in range(min(rollouts_per_problem or len(group.rollouts), len(group.rollouts))):
            row = first + place
            own = step_credit(group.rollouts[place], row, experience, estimate)
            rows.append(
                _row(group, place, iteration, own, {name: found[row] for name, found in (further or {}).items()})
            )
        first += len(group.rollouts)
    path = samples_path(run_dir, iteration)
    path.parent.mkdir(exist_ok=True)
    write_records(path, rows)


def _row(
    group: RolloutGroup, place: int, iteration: int, own: StepCredit, further: Mapping[str, StepCredit]
) -> SampledRollout:
    rollout, score = group.rollouts[place], group.scores[place]
    trajectory = rollout.trajectory
    return SampledRollout(
        id=trajectory.id,
        problem_id=trajectory.problem_id,
        iteration=iteration,
        policy_version=rollout.policy_version,
        prompt=trajectory.prompt,
        steps=trajectory.steps,
        step_values=own.values,
        step_advantages=own.advantages,
        step_rewards=[round(value, 6) for value in score.steps],
        reward=round(score.total, 6),
        reward_parts={name: round(value, 6) for name, value in score.parts.items()},
        num_tokens=len(trajectory.response_ids),
        finish_reason=trajectory.finish_reason,
        gold=trajectory.gold,
        answer=trajectory.answer,
        is_correct=trajectory.is_correct,
        estimator_values={name: credit.values for name, credit in further.items()},
        estimator_advantages={name: credit.advantages for name, credit in further.items()},
        reward_answers={answer: round(value, 6) for answer, value in score.answers.items()},
    )


def step_credit(rollout: Rollout, row: int, experience: Experience, estimate: Estimate) -> StepCredit:
    """Return what row `row` of the experience, with its advantages, says of the rollout's steps."""
    assert experience.advantages is not None
    trajectory = rollout.trajectory
    start = len(trajectory.prompt_ids)
    advantages = experience.advantages[row, start : start + len(trajectory.response_ids)]
    starts = [0, *trajectory.step_ends[:-1]][: len(trajectory.step_ends)]
    spans = zip(starts, trajectory.step_ends, strict=True)
    means = [round(float(advantages[begin:end].mean()), 6) for begin, end in spans]
    return StepCredit(values_at_step_starts(rollout, row, experience, estimate), means)


def values_at_step_starts(rollout: Rollout, row: int, experience: Experience, estimate: Estimate) -> list[float]:
    """Return the value of the state that each step starts from: the estimator's, or the critic's at the step's first
    token.

    Empty where nothing values states, or where the estimator cut other steps than the trajectory's.
    """
    trajectory = rollout.trajectory
    num_steps = len(trajectory.step_ends)
    is_same = not estimate.value_ends or estimate.value_ends[row] == trajectory.step_ends
    if is_same and estimate.state_values and len(estimate.state_values[row]) == num_steps + 1:
        return [round(value, 6) for value in estimate.state_values[row][:-1]]
    if experience.values is None or num_steps == 0:
        return []
    starts = [len(trajectory.prompt_ids) + begin for begin in [0, *trajectory.step_ends[:-1]]]
    return [round(float(value), 6) for value in experience.values[row, starts]]
