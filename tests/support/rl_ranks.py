"""A small RL run for `test_rl_ranks.py`: `rl_ranks.py POLICY RUN_DIR [one_pass [asking | further] | vineppo |
prm_value | prime] [KEY=VALUE ...]`, alone or behind a launcher: PPO, VinePPO, a process reward model trained along, an
implicit one, or with
`stopped` PPO whose rank 1 gets SIGTERM in the update of the second iteration and must not end before rank 0 has
closed its engine, or with
`one_pass` GRPO, whose update makes the only pass, unless it is `asking`: that reads the old policy's log-probs first,
and asks the sampler for more; with `further` that is asked about samples alone. With `slow` rank 1 takes longer, and
its clocks are those of another machine; with `killed` all ranks die in the third update. Its sampler answers by the
request alone, so that no rounding changes what is learnt from; the engine that is asked for log-probs serves what was
delivered. Keys are those of main.py."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.rl import row_shares
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.online_process_values import OnlineProcessValueAdvantage
from espalier.rl.advantages.prime import PRIME
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.row_parts import RowPart
from espalier.rl.trainer import Trainer
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.distributed import process_group, rank
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import CriticConfig, ImplicitRewardConfig, KLConfig, RLConfig
from tests.support.rl_cases import make_trainer, on_repeatable


class AskingGRPO(GRPO):
    """Reads the old log-probs, and has the first problem answered and scored once more; on rank 0 alone."""

    def __call__(self, groups: Any, experience: Any, context: Any) -> Estimate:
        assert rank() == 0
        estimate = super().__call__(groups, experience, context)
        mean = float(experience.old_logprobs[experience.response_mask].mean())
        (group,) = context.rollout([groups[0].problem], context.params, "more")
        (again,) = context.score([group.rollouts[0].trajectory])
        assert again == group.scores[0]
        return replace(estimate, metrics={"old_logprob": mean, "more_reward": sum(group.rewards)})


def at_step(trainer: Trainer, number: int, do: Callable[[], None]) -> None:
    """On this rank, when it begins the step `number` of the policy, from 0."""
    start, begun = trainer.policy.engine.start_step, list[int]()

    def starts(num_passes: int) -> None:
        if len(begun) == number:
            do()
        begun.append(num_passes)
        start(num_passes)

    trainer.policy.engine.start_step = starts  # type: ignore[method-assign]


SLOWER = 0.3  # seconds per backward pass
TIMES = "times_of_rank_1"
"""When its steps began, by rank 0's clock: in the run's folder."""


def slow_down(trainer: Trainer, true_time: Callable[[], float]) -> None:
    """Each of this rank's backward passes of the policy."""
    engine = trainer.policy.engine
    backward, start = engine.backward, engine.start_step

    def slow(loss: torch.Tensor) -> None:
        time.sleep(SLOWER)
        backward(loss)

    def timed(num_passes: int) -> None:
        with (trainer.run_dir / TIMES).open("a") as file:
            file.write(f"{true_time()!r}\n")
        start(num_passes)

    engine.backward, engine.start_step = slow, timed  # type: ignore[method-assign]


def held(*kinds: type) -> list[Any]:
    """What this process has of them."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, kinds)]


def of_another_machine() -> None:
    """Have this process's clocks differ from those of others."""
    since_start, since_1970 = time.monotonic, time.time
    time.monotonic = lambda: since_start() + 1000.0
    time.time = lambda: since_1970() - 500.0


def run_stopped(trainer: Trainer) -> None:
    """Rank 0 takes a second to close the client; no rank may end earlier."""
    closed = trainer.run_dir / "closed"

    async def close() -> None:
        await asyncio.sleep(1)
        closed.touch()

    trainer.rollout_source.sampler.client.close = close  # type: ignore[method-assign]
    if rank() == 1:
        at_step(trainer, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))  # of the second iteration
    try:
        trainer.run()
    finally:
        assert closed.exists()


def main() -> None:
    """Three iterations with a critic, a KL penalty and whitening, or of another estimator; models at the end."""
    torch.set_num_threads(1)
    policy, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
    fixed = ["optimizer.eps=1e-4", f"output_dir={run_dir}", f"model.path={policy}"]  # noise is no direction to Adam
    is_one_pass = "one_pass" in sys.argv
    given = compose_config(RLConfig, "rl", [*fixed, *(word for word in sys.argv[3:] if "=" in word)])
    true_time = time.time
    if "slow" in sys.argv and rank() == 1:
        of_another_machine()
    task = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)
    tokenizer = load_tokenizer(str(policy))
    with process_group(timeout_seconds=120, is_needed_alone=bool(given.deepspeed)):
        kind: dict[str, Any] = {"minibatch_size": 12, "estimator": (AskingGRPO if "asking" in sys.argv else GRPO)(True)}
        if "vineppo" in sys.argv:
            kind = {"minibatch_size": 6, "estimator": VinePPO(completions_per_state=2, prompt_value="sampled")}
        elif "prm_value" in sys.argv:
            kind = {"minibatch_size": 6, "num_lines": 2}
            kind |= {"estimator": OnlineProcessValueAdvantage(completions_per_refresh=6, completions_per_state=2)}
            likelihood = {"form": "probability", "loss": "cross_entropy", "clip_range": 0.0}
            kind |= {"critic": CriticConfig(learning_rate=1e-3, **likelihood)}
        elif "prime" in sys.argv:
            kind = {"minibatch_size": 6, "num_lines": 2, "estimator": PRIME(granularity="step")}
            kind |= {"implicit_reward": ImplicitRewardConfig(learning_rate=1e-3)}
        elif not is_one_pass:
            kind = {"minibatch_size": 6, "estimator": GAE(gamma=1.0, lam=0.95)}
            kind |= {"critic": CriticConfig(learning_rate=1e-3), "kl": KLConfig(coefficient=0.05, kind="k3")}
            row_shares.MOST_TOKENS = 60  # rows of a rank come in several parts
        if "epochs" in sys.argv:
            kind |= {"kl": given.kl}
        if "odd" in sys.argv:  # rank 0 has a row more, alone in a pass
            kind |= {"minibatch_size": 9, "group_size": 3, "micro_batch_size": 1, "precision": given.precision}
            kind |= {"kl": given.kl}
        kind["further"] = {"asking": AskingGRPO(True)} if "further" in sys.argv else {}
        trainer = make_trainer(
            policy, task, tokenizer, run_dir, "", whitening="none" if is_one_pass else "standard", **kind,
            loss_aggregation="sequence", num_iterations=3, rollout_num_problems=3, evaluation_every=0,
            num_epochs=2 if "epochs" in sys.argv else 1,
            save_every=1,
            warmup_steps=1, max_mean_ratio=1.01, optimizer=given.optimizer, deepspeed=given.deepspeed,
            lora=given.lora, ema=given.ema, micro_batch_tokens=given.update.micro_batch_tokens,
        )  # fmt: skip
        client = trainer.rollout_source.sampler.client
        on_repeatable(trainer, RepeatableServer(str(policy), max_model_len=512))
        trainer.rollout_source.sampler.client = client
        assert trainer.policy.makes_one_pass(12) == is_one_pass
        reference = trainer.policy.loss.reference
        if reference is not None and not given.lora:
            is_cut = (given.deepspeed or {}).get("zero_optimization", {}).get("stage") == 3
            assert {hasattr(weight, "ds_id") for weight in reference.parameters()} == {is_cut}
        if "slow" in sys.argv and rank() == 1:
            slow_down(trainer, true_time)
        if "killed" in sys.argv:
            at_step(trainer, 5, lambda: os.kill(os.getpid(), signal.SIGKILL))  # of the third iteration
        if "stopped" in sys.argv:
            run_stopped(trainer)
        else:
            trainer.run()
        assert rank() == 0 or not held(Experience, RolloutGroup, RowPart)
        trainer.save_model()


if __name__ == "__main__":
    main()
