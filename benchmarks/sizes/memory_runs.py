"""Runs whose memory is compared with their plan: real programs and a real update, each rank in a process of its own.

Trainings are `trainer_base_ds_mul.py` as a user starts it, watched at its steps. Reinforcement learning is
`rl.update.Update` over the learners that main.py builds, on random rollouts as long as the engine's window that share
no prompt; no engine runs, whose memory is none of the learner's. Step 1 warms up, step 2 notes the process, step 3
counts tensors (`benchmarks.sizes.tensor_memory`).
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks.gpu.training import OBJECTIVES, Shape
from benchmarks.processes.forked import exit_code, start, start_ranks
from benchmarks.processes.sides import peak_rss
from benchmarks.sizes.tensor_memory import measured, reset_peak_rss
from espalier.data.jsonl import write_records
from espalier.data.records import Problem, Trajectory
from espalier.rewards.score import Score
from espalier.rl.experience import make_experience
from espalier.rl.kl import KLController
from espalier.rl.memory_of_run import rl_setup
from espalier.rl.policy import Policy
from espalier.rl.policy_loss import PolicyLoss
from espalier.rl.trainer_from_config import make_critic
from espalier.rl.training_engines import make_training_engine, start_policy
from espalier.rl.types import Experience, Rollout, RolloutGroup
from espalier.rl.update import Update
from espalier.runtime.distributed import world_size
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import RLConfig
from espalier.training.explain import largest_work
from espalier.training.loop import Loop
from espalier.training.memory_of_run import train_setup
from espalier.training.memory_plan import Setup, memory_plan

WARM, PROCESS, TENSORS = range(3)


# A step is one pass, and its only one.
IN_BACKWARD = ("update.step_in_backward=true", "update.max_grad_norm=0", "update.micro_batch_size=${update.batch_size}")


@dataclass(frozen=True)
class Case:
    """`settings` on top of those that all runs of a kind have; `kind`: an objective of training_gpu, or rl."""

    name: str
    kind: str
    ranks: int = 1
    settings: tuple[str, ...] = ()


CASES = (
    Case("SFT, fp32", "sft"),
    Case("SFT, bf16", "sft", settings=("precision=bf16",)),
    Case("SFT, gradient checkpointing", "sft", settings=("model.gradient_checkpointing=true",)),
    Case("SFT, selective checkpointing", "sft", settings=("model.gradient_checkpointing=selective",)),
    Case("SFT, steps in the backward pass", "sft", settings=IN_BACKWARD),
    Case("SFT, LoRA", "sft", settings=("lora=lora",)),
    Case("SFT, ZeRO-2, 2 ranks", "sft", 2, ("deepspeed=zero2",)),
    Case("SFT, ZeRO-3, 4 ranks", "sft", 4, ("deepspeed=zero3",)),
    Case("SFT, ZeRO-3, bf16, 4 ranks", "sft", 4, ("deepspeed=zero3", "precision=bf16")),
    Case("DPO", "dpo"),
    Case("DPO, bf16, a reference beside it", "dpo", settings=("precision=bf16", "reference_logprobs=online")),
    Case("PRM", "prm"),
    Case("PRM, steps in the backward pass", "prm", settings=IN_BACKWARD),
    Case("GRPO", "rl", settings=("kl.coefficient=0.05",)),
    Case("GRPO, bf16", "rl", settings=("kl.coefficient=0.05", "precision=bf16")),
    Case("PPO with a critic", "rl", settings=("critic=scratch", "advantage=gae", "kl.coefficient=0.05")),
)


def noted(setup: Setup, step: int, found: dict[str, Any], work: Any) -> Any:
    """Do `work`, of step `step`, and note in `found` what it takes and what is planned."""
    if step == PROCESS:
        reset_peak_rss()
        started = process_time()
        answer = work()
        found |= {"process": peak_rss(), "cpu_seconds": process_time() - started}
        return answer
    if step != TENSORS:
        return work()
    with measured() as peak:
        answer = work()
    plan = memory_plan(setup)
    found |= {"measured": peak.bytes, "before": peak.before, "planned": plan.peak.bytes + plan.host_bytes,
              "parts": plan.peak.parts}  # fmt: skip
    return answer


def watch_training(report: Path) -> None:
    """Have every step of a training that this process or a child of it runs noted in `report`, and its rank's number
    behind that."""
    own, found = Loop.train_step, {"begin": reset_peak_rss()}

    def train_step(self: Loop, step: int) -> dict[str, float]:
        config = self.config
        num_read = self.max_steps * config.update.batch_size / len(self.loader.examples)
        work = largest_work([self.loader], self.max_steps, config.update.layout)
        setup = train_setup(config, work, world_size(), num_read, is_gpu=False)
        values: dict[str, float] = noted(setup, step, found, lambda: own(self, step))
        if step == TENSORS:
            path = report.with_name(f"{report.name}.{os.environ.get('RANK', '0')}")
            path.write_text(json.dumps(found))
        return values

    Loop.train_step = train_step  # type: ignore[method-assign]


def run_training(case: Case, shape: Shape, folder: Path, report: Path) -> None:
    """Run the program on the case's ranks. Raises SystemExit where one fails."""
    groups, make = OBJECTIVES[case.kind]
    examples = folder / f"{case.kind}.jsonl"
    write_records(examples, make(shape))
    settings = f"""-cn train {groups} model.path={folder}/model examples.path={examples} max_steps=3 precision=fp32
        output_dir={report}.run examples.max_length={shape.length} update.batch_size={shape.batch}
        update.micro_batch_size={min(shape.micro, shape.batch // case.ranks)} log_every=1""".split()
    log = report.with_name(f"{report.name}.log")
    watched = start(lambda: _ranks(case, [*settings, *case.settings], report, log))
    if exit_code(watched):
        raise SystemExit(f"error: {case.name}: {log.read_text()[-2000:]}")


def _ranks(case: Case, settings: list[str], report: Path, log: Path) -> None:
    watch_training(report)
    codes = [exit_code(pid) for pid in start_ranks("trainer_base_ds_mul.py", settings, log, case.ranks)]
    if any(codes):
        raise SystemExit(1)


def rollout_groups(shape: Shape, vocabulary: int, prompt: int) -> list[RolloutGroup]:
    """Return random rollouts that fill the length, of `prompt` tokens of a problem each."""
    draws, groups = torch.Generator().manual_seed(0), []
    for number in range(shape.batch):
        ids = torch.randint(5, vocabulary, (shape.length,), generator=draws).tolist()
        answer = ids[prompt:]
        trajectory = Trajectory(f"{number}/0", str(number), "", "", [], ids[:prompt], answer, [], "stop", gold="1",
                                answer="1", is_correct=True)  # fmt: skip
        rollout = Rollout(trajectory, [-1.0] * len(answer), 0)
        groups.append(RolloutGroup(Problem(str(number), "", "1"), [rollout], [Score(1.0)]))
    return groups


def run_rl(case: Case, shape: Shape, folder: Path, report: Path) -> None:
    """Update policy and critic three times, in a child."""
    if exit_code(start(lambda: _update(case, shape, folder, report))):
        raise SystemExit(f"error: {case.name} failed: its last words stand above")


def _update(case: Case, shape: Shape, folder: Path, report: Path) -> None:
    found = {"begin": reset_peak_rss()}
    fixed = [f"model.path={folder}/model", "output_dir=unused", f"update.micro_batch_size={shape.micro}",
             f"update.minibatch_size={shape.batch}", f"rollout.num_problems={shape.batch}", "rollout.group_size=1",
             f"server.max_model_len={shape.length}", f"params.max_tokens={3 * shape.length // 4}",
             "precision=fp32"]  # fmt: skip
    config = compose_config(RLConfig, "rl", [*fixed, *case.settings])
    rates = (config.update.learning_rate, config.update.max_grad_norm)
    engine = make_training_engine(config, build(config.model), config.optimizer, *rates)
    kl = KLController(config.kl.coefficient, 0.0, 1)
    loss = PolicyLoss(engine, config, 1.0, kl, start_policy(config, engine))
    learners: list[Any] = [Policy(loss, 3 * shape.length // 4), *filter(None, [make_critic(config)])]
    experience = _experience(rollout_groups(shape, shape.vocab_size, shape.length // 4), learners, config)
    setup = rl_setup(config, 1, is_gpu=False)
    for step in range(3):
        noted(setup, step, found, lambda step=step: Update(config, learners)(experience, step))
    report.with_name(f"{report.name}.0").write_text(json.dumps(found))


def _experience(groups: list[RolloutGroup], learners: list[Any], config: RLConfig) -> Experience:
    experience, scorer = make_experience(
        groups, learners[0].engine.model, pad_id=0, precision=config.precision, temperature=1.0,
        micro_batch_size=config.update.micro_batch_size,
    )  # fmt: skip
    experience.old.score()
    for learner in learners:
        experience = learner.score(groups, experience, scorer)
    mask = experience.response_mask
    draws = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    returns = 0.5 * mask if len(learners) > 1 else None
    return replace(experience, advantages=draws * mask, returns=returns)


def measure(case: Case, shape: Shape, folder: Path) -> list[dict[str, Any]]:
    """Return what each rank found: bytes `planned`, `measured` (tensors), `process` (beside its imports)."""
    report = folder / f"report-{CASES.index(case)}"
    (run_rl if case.kind == "rl" else run_training)(case, shape, folder, report)
    rows = [json.loads(report.with_name(f"{report.name}.{rank}").read_text()) for rank in range(case.ranks)]
    return [row | {"process": row["process"] - row["begin"]} for row in rows]
