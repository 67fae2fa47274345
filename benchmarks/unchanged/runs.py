"""The runs whose ends are compared: seven trainings on fixed datasets and eight of reinforcement learning.

Sizes are the smallest that reach every kind of code: a policy of 0.2M parameters that has learnt the form of an answer,
so that some rewards are 1 and some are 0; a few steps each; fixed seeds; float32, or bfloat16 where a run says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.unchanged.datasets import TASK
from benchmarks.unchanged.names import setting_in

TRAINER, RL = "trainer_base_ds_mul.py", "main.py"


@dataclass(frozen=True)
class Run:
    """One training: its program, and settings in which `{policy}`, `{prm}`, `{data}` and the like become places."""

    name: str
    program: str
    settings: str

    def command(self, tree: Path, places: Mapping[str, str]) -> list[str]:
        """Return the settings by the names of the tree."""
        return [setting_in(tree, setting).format(**places) for setting in self.settings.split()]

    @property
    def folder(self) -> str:
        """The name of its run directory."""
        return self.name.lower().replace(" ", "_").replace("+", "p")


_BASE = "-cn train model.attention=eager update.warmup_steps=2 log_every=1 seed=3"
_FEW = (
    f"{_BASE} update.batch_size=12 update.micro_batch_size=6 max_steps=6 update.learning_rate=0.001 "
    "model.path={policy}"
)
_EXACT = "precision=fp32"

SFT = Run("SFT", TRAINER, f"""{_BASE} {_EXACT} model.path={{tiny}} +examples@eval_examples=demonstrations
    examples.path={{data}}/demonstrations.jsonl eval_examples.path={{data}}/held_out.jsonl update.batch_size=32
    update.micro_batch_size=16 max_steps=200 update.learning_rate=0.003 evaluation.every=50""")  # fmt: skip
PRM = Run("PRM", TRAINER, f"""{_FEW} {_EXACT} model=process_reward objective=process_reward examples=step_values
    examples.path={{data}}/step_values.jsonl""")  # fmt: skip
FIXED = (
    Run("DPO", TRAINER, f"""{_FEW} precision=bf16 objective=dpo objective.sft_weight=0.5 examples=preferences
        examples.path={{data}}/pairs.jsonl"""),
    Run("step-DPO", TRAINER, f"""{_FEW} {_EXACT} objective=dpo examples=preferences
        examples.path={{data}}/step_pairs.jsonl"""),
    Run("KTO", TRAINER, f"""{_FEW} {_EXACT} objective=kto examples=trajectory_outcomes examples.has_mismatched=true
        examples.balanced_classes=2 examples.path={{data}}/trajectories.jsonl"""),
    Run("ORM", TRAINER, f"""{_FEW} {_EXACT} model=outcome_reward model.num_labels=2 objective=outcome_reward
        examples=trajectory_outcomes examples.path={{data}}/trajectories.jsonl"""),
    Run("ORM of pairs", TRAINER, f"""{_FEW} {_EXACT} model=outcome_reward objective=bradley_terry
        objective.centring=0.01 examples=preferences examples.path={{data}}/pairs.jsonl"""),
)  # fmt: skip

_TASK = " ".join(f"task.{name}={value}" for name, value in TASK.items())
_RL = f"""-cn rl model.path={{policy}} model.attention=eager server=none client.base_url={{server}} {_TASK} seed=3
    precision=fp32 params.max_tokens=40 num_iterations=3 rollout.num_problems=6 rollout.group_size=4
    update.minibatch_size=12 update.micro_batch_size=6 update.learning_rate=0.001 update.schedule=linear
    update.warmup_steps=1 evaluation.every=3 evaluation.num_problems=8 samples.num_problems=2"""
ONLINE = (
    # one request at a time: how many problems are asked ahead depends on what finishes first
    Run("GRPO", RL, f"{_RL} advantage=grpo rollout.dynamic_sampling_rounds=1 engine.concurrency=1 kl=loss"),
    Run("RLOO", RL, f"""{_RL} advantage=rloo reward=outcome_and_form reward.terms.length.free_tokens=16
        update.loss_aggregation=sequence"""),
    Run("PPO", RL, f"{_RL} advantage=gae critic=policy critic.learning_rate=0.001 kl=adaptive update.num_epochs=2"),
    Run("VinePPO", RL, f"{_RL} advantage=vineppo advantage.completions_per_state=3 update.whitening=standard"),
    Run("SPO", RL, f"""{_RL} advantage=spo advantage.completions_per_state=2
        advantage.cut_points_per_segment=1"""),
    Run("ReMax", RL, f"{_RL} advantage=remax update.entropy_bonus=0.01"),
    Run("REINFORCE++", RL, f"{_RL} advantage=reinforce_plus_plus advantage.has_group_baseline=true kl=reward"),
    Run("process values", RL, f"{_RL} advantage=process_values advantage.form=value advantage.path={{prm}}"),
)  # fmt: skip
