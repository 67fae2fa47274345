"""A reinforcement-learning run that gets SIGTERM or SIGINT: when it ends, what it saves, and how it goes on."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes.forked import exit_code, run_ranks, start_ranks
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.advantages.spo import SPO
from espalier.rl.trainer import Trainer
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.training import checkpoint
from espalier.training.checkpoint import checkpoints
from tests.support.rl_cases import FakeClient, make_trainer, read_metrics

FEW: dict[str, Any] = {"num_iterations": 4, "rollout_num_problems": 3, "num_epochs": 1, "minibatch_size": 6,
                       "evaluation_num_problems": 3, "save_every": 0}  # fmt: skip


class Signalled(FakeClient):
    """Signals its own process at the first request whose id begins so, and then does not answer for a minute."""

    at, number = "", 0

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        if self.number and request.id.startswith(self.at):
            number, self.number = self.number, 0
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        return await super().sample(request, params)


def made(policy: Path, task: WordArithmetic, tokenizer: Any, run: Path, at: str = "", number: int = 0) -> Trainer:
    estimator = SPO(completions_per_state=2, num_segments=2, masks_other_tokens=False)
    trainer = make_trainer(policy, task, tokenizer, run, "", estimator, num_lines=2, **FEW)
    client = Signalled(tokenizer, num_lines=2)
    client.at, client.number = at, number
    trainer.rollout_source.sampler.client = client
    return trainer


@pytest.fixture
def make(tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path) -> Any:
    """A trainer of the run `cut`."""
    return partial(made, tiny_policy, task, tokenizer, tmp_path / "cut")


@pytest.fixture(scope="module")
def whole(tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The run that nobody signals, after its end."""
    trainer = made(tiny_policy, task, tokenizer, tmp_path_factory.mktemp("whole") / "run")
    trainer.run()
    return trainer


def assert_ends_as(run: Trainer, whole: Trainer) -> None:
    pairs = [trainer.policy.engine.model.state_dict() for trainer in (whole, run)]
    assert all(torch.equal(value, pairs[1][name]) for name, value in pairs[0].items())
    assert read_metrics(run.run_dir) == read_metrics(whole.run_dir)


@pytest.mark.parametrize(("at", "number", "step", "is_due"), [
    ("dev-0/", signal.SIGTERM, 0, False),  # nothing is trained yet
    pytest.param("rl-0/", signal.SIGTERM, 0, False, marks=pytest.mark.slow),
    ("rl-2/", signal.SIGTERM, 2, False),
    pytest.param("rl-2/", signal.SIGINT, 2, False, marks=pytest.mark.slow),
    ("#rl-2/", signal.SIGTERM, 2, False),  # completions of its states
    ("dev-2/", signal.SIGTERM, 2, True),
    pytest.param("dev-4/", signal.SIGTERM, 4, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_saves_what_is_learnt_at_once_and_the_run_goes_on_to_the_same_bits(
    at: str, number: int, step: int, is_due: bool, make: Any, whole: Trainer
) -> None:
    cut = make(at, number)
    if at.startswith("#"):
        _signal_at_completions(cut, at[1:], number)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        cut.run()
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is handler
    found = checkpoints(cut.run_dir)
    assert [path.name for path in found] == [f"step-{step:08d}"] * (step > 0)
    assert all(checkpoint.read_state(path).is_evaluation_due is is_due for path in found)
    again = make()
    again.run()
    assert_ends_as(again, whole)


def _signal_at_completions(trainer: Trainer, name: str, number: int) -> None:
    estimator: Any = trainer.estimator

    def signals(groups: Any, experience: Any, context: Any) -> Any:
        if groups[0].rollouts[0].trajectory.id.startswith(name):
            os.kill(os.getpid(), number)
        return estimator(groups, experience, context)

    signals.samples_more = True  # type: ignore[attr-defined]
    trainer.estimator = signals  # type: ignore[assignment]


def test_a_signal_in_an_update_saves_at_the_iterations_end(make: Any, whole: Trainer) -> None:
    cut = make()
    policy, step = cut.policy, cut.policy.step

    def signals(experience: Any, rows: Any, number: int, sums: Any) -> Any:
        if number == 2:  # the first of iteration 1, from 0
            os.kill(os.getpid(), signal.SIGTERM)
        return step(experience, rows, number, sums)

    policy.step = signals
    with pytest.raises(SystemExit) as ended:
        cut.run()
    assert ended.value.code == 143
    assert [path.name for path in checkpoints(cut.run_dir)] == ["step-00000002"]
    again = make()
    again.run()
    assert_ends_as(again, whole)


def test_a_kill_between_an_evaluations_row_and_its_checkpoint_leaves_one_row(make: Any, whole: Trainer) -> None:
    with pytest.raises(SystemExit):
        make("dev-2/", signal.SIGTERM).run()  # leaves it due
    killed = make()

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    killed._save = dies
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    again = make()
    again.run()
    assert_ends_as(again, whole)


def test_a_signal_to_one_rank_of_two_saves_one_checkpoint(tiny_policy: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    settings = [str(tiny_policy), str(run)]
    pids = start_ranks("tests/support/rl_ranks.py", [*settings, "stopped"], log, 2)
    assert [exit_code(pid) for pid in pids] == [143, 143], log.read_text()[-3000:]
    assert [path.name for path in checkpoints(run)] == ["step-00000002"]
    assert run_ranks("tests/support/rl_ranks.py", settings, log, 2) == [0, 0], log.read_text()[-3000:]
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
