"""What a reinforcement-learning run amounts to, before it is run: rollouts, steps, epochs, evaluations, devices.

    python run_stage.py -cn training/explain_rl stage.experiment=exp/ppo/ppo_tulu_8b stage.num_problems=29946 \\
        'stage.overrides="model.path=M task.path=F task.kind=K critic.model.path=R"' output=explain.json

Reads the configuration, and the task's problems where their number is not given: no weights. Says what memory a learner
needs, part by part (rl.memory_of_run), and refuses a run that the GPU here, or stage.memory_gib, cannot hold.
"""

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from espalier.data.records import BadInput
from espalier.rl.combinations import check_combinations
from espalier.rl.memory_of_run import passes_per_step, rl_setup, window_of
from espalier.rl.update import critic_iterations, most_rollouts, steps_per_iteration
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import RLConfig
from espalier.training.memory_of_run import check_memory_gib, explain_memory, micro_batch_of

log = logging.getLogger("stage")


class Context(Protocol):
    """What the stage needs of its context."""

    counts: dict[str, Any]


@dataclass(frozen=True)
class RunSize:
    """Counts of a run whose every group is there: a refused problem or a filtered rollout makes it less."""

    iterations: int
    rollouts_per_iteration: int
    """that are trained on, at most"""
    rollouts: int
    """of all iterations"""
    completions_per_state: int
    """at most, that the estimator has made of every inner state of a rollout beside these (VinePPO): with n steps (of
    SPO segments) a rollout has n - 1; 0: of none, or of some alone"""
    minibatches_per_epoch: int
    passes_per_rank_and_step: int
    """forward and backward passes of the rank with the most rows, of full windows with update.micro_batch_tokens: what
    others call gradient accumulation"""
    steps_per_iteration: int
    steps: int
    """of the policy's optimizer; its schedule ends with the last one"""
    warmup_steps: int
    critic_steps: int
    """0 without a critic"""
    iterations_per_epoch: float
    """over all problems"""
    epochs: float
    evaluations: int
    checkpoints: int
    ranks: int
    engines: int
    """of the run's own; 0: servers"""
    devices_per_engine: int


def run_size(config: RLConfig, num_problems: int, num_ranks: int = 1) -> RunSize:
    """Compute it from the config alone; `num_ranks` counts where no launcher of the config says it. Raises BadInput
    where there are fewer problems than an iteration takes."""
    rollout, update, total = config.rollout, config.update, config.num_iterations
    if config.stop_after > 0:
        total = min(total, config.stop_after)
    if num_problems < rollout.num_problems:
        raise BadInput(f"rollout.num_problems={rollout.num_problems} of {num_problems} problems: lower it")
    ranks = int(config.launcher["num_ranks"]) if config.launcher else num_ranks
    per_iteration, per_step = most_rollouts(config), steps_per_iteration(config)
    critic_alone = min(critic_iterations(config), total)
    per_epoch = num_problems / rollout.num_problems
    client = config.client or {}
    return RunSize(
        iterations=total,
        rollouts_per_iteration=per_iteration,
        rollouts=total * per_iteration,
        completions_per_state=_completions_per_state(config.advantage),
        minibatches_per_epoch=math.ceil(per_iteration / update.minibatch_size),
        passes_per_rank_and_step=passes_per_step(config, ranks),
        steps_per_iteration=per_step,
        steps=(total - critic_alone) * per_step,
        warmup_steps=update.warmup_steps,
        critic_steps=total * per_step if config.critic is not None else 0,
        iterations_per_epoch=per_epoch,
        epochs=total / per_epoch,
        evaluations=len(_evaluated(config.evaluation.every, total)),
        checkpoints=len([k for k in _multiples(config.checkpoints.save_every, total) if k < total]),
        ranks=ranks,
        engines=int(client.get("num_engines") or 0),
        devices_per_engine=int((client.get("options") or {}).get("tensor_parallel_size") or 1),
    )


def _completions_per_state(estimator: Any) -> int:
    if not isinstance(estimator, Mapping) or "completions_per_refresh" in estimator:  # none, or of some states alone
        return 0
    first, most = (int(estimator.get(name) or 0) for name in ("completions_per_state", "max_completions"))
    round_size = int(estimator.get("round_completions") or 1)  # one that has begun is made whole
    return first + math.ceil(max(0, most - first) / round_size) * round_size


def _multiples(every: int, total: int) -> Sequence[int]:
    return range(every, total + 1, every) if every > 0 else ()


def _evaluated(every: int, total: int) -> list[int]:
    """List the versions that are evaluated: the first, every `every`-th, the last."""
    return sorted({0, *_multiples(every, total), total}) if every > 0 else []


@dataclass(frozen=True)
class ExplainRL:
    """`experiment`: a config of `main.py`, as behind -cn; `overrides`: key=value, as on its command line, in one text
    with blanks between them or in a list. `num_problems`: of training; 0: those of the task. `num_ranks`: processes of
    the run, where it has no `launcher` that says it. `memory_gib`: what the learner may take of a rank's GPU (0: all
    of the one that is here, else it computes on a CPU): a run that needs more is refused.
    """

    experiment: str
    overrides: str | list[str] = ""
    num_problems: int = 0
    num_ranks: int = 1
    memory_gib: float = 0.0

    def __post_init__(self) -> None:
        check_memory_gib(self.memory_gib)
        if self.num_ranks < 1 or self.num_problems < 0:
            raise BadInput("stage.num_ranks must be at least 1 and stage.num_problems at least 0, got "
                           f"{self.num_ranks} and {self.num_problems}")  # fmt: skip

    @cached_property
    def config(self) -> RLConfig:
        """The experiment's own config."""
        overrides = shlex.split(self.overrides) if isinstance(self.overrides, str) else self.overrides
        return compose_config(RLConfig, self.experiment, overrides, unused=("output_dir",))

    def inputs(self) -> list[str]:
        """Return no file: tasks find their own."""
        return []

    def run(self, input_path: str, context: Context) -> dict[str, Any]:
        """Return one JSON document, and log a line for each part of it. Raises BadInput where an input is given, and
        where settings contradict each other."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads an experiment: leave input empty")
        check_combinations(self.config)
        num_problems = self.num_problems or len(list(build(self.config.task).problems("train")))
        size = run_size(self.config, num_problems, self.num_ranks)
        for line in describe(size, self.config, num_problems):
            log.info("%s", line)
        context.counts.update(iterations=size.iterations, rollouts=size.rollouts, steps=size.steps)
        batch = micro_batch_of(self.config.update, window_of(self.config))
        memory = explain_memory(lambda is_gpu: rl_setup(self.config, size.ranks, is_gpu), batch, self.memory_gib)
        return {"experiment": self.experiment, "num_problems": num_problems, **asdict(size), "memory": memory}


def describe(size: RunSize, config: RLConfig, num_problems: int) -> list[str]:
    """Return the document as lines to read."""
    epochs, engines = config.update.num_epochs, f"{size.engines}, each of {size.devices_per_engine} devices"
    of_states = 7 * size.completions_per_state * size.rollouts_per_iteration
    completions = (
        f"completions beside the rollouts: at most {size.completions_per_state} of every inner state: of "
        f"rollouts of 8 steps or segments {of_states:,} in an iteration"
    )
    return [
        f"an iteration: {size.rollouts_per_iteration:,} rollouts of {config.rollout.num_problems:,} problems, "
        f"{size.steps_per_iteration} steps ({epochs} epochs of {size.minibatches_per_epoch}), each of "
        f"{size.passes_per_rank_and_step} passes per rank",
        f"the run: {size.iterations:,} iterations, {size.rollouts:,} rollouts, {size.steps:,} steps, of which "
        f"{size.warmup_steps:,} are warm-up, then {config.update.schedule}",
        *([completions] if of_states else []),
        f"problems: {num_problems:,}, all of them in {size.iterations_per_epoch:.1f} iterations; {size.epochs:.1f} "
        f"epochs (rollout.order={config.rollout.order})",
        f"evaluations: {size.evaluations}; checkpoints: {size.checkpoints}",
        f"learners: {size.ranks}; engines: {engines if size.engines else 'a server or servers'}",
    ]
