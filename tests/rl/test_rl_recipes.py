"""Published settings of reinforcement learning: the experiments hold them, and load with tiny models in their place.

VinePPO: Kazemnejad et al. 2024 (arXiv 2410.01679), 64 problems of 8 rollouts an iteration and two epochs of 16
steps in all. PRIME: Cui et al. 2025 (arXiv 2502.01456). LPR: Jiao et al. 2024 (arXiv 2402.00658). What differs on
purpose stands in docs/reinforcement.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.models.precision import has_fast_bf16
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.engines_from_config import make_client
from espalier.rl.kl import check_kl
from espalier.rl.trainer_from_config import make_trainer
from espalier.runtime.entrypoint import register_schemas
from espalier.runtime.schemas import RLConfig
from espalier.sampling.ray_engines import RayEngines
from tests.support.slow import slow_unless

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
VINE = {
    "params.temperature": 0.6, "params.max_tokens": 1024, "rollout.num_problems": 64, "rollout.group_size": 8,
    "update.num_epochs": 2, "update.minibatch_size": 64, "update.learning_rate": 1e-6, "update.schedule": "linear",
    "update.clip_low": 0.2, "update.clip_high": 0.2, "update.max_grad_norm": 1.0, "update.whitening": "standard",
    "update.max_mean_ratio": 10.0, "update.loss_aggregation": "token", "precision": "auto",
    "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0,
    "kl.coefficient": 1e-4, "kl.kind": "k3", "kl.place": "loss", "kl.max_token": 10.0, "kl.target": 0.0,
    "reward.right": 1.0, "reward.wrong": 0.0, "model.gradient_checkpointing": True,
    "task.template.template": "[MATH_TASK] Problem:\n{question}\n\nSolution:",
    "task.template.stop": ["\n\n\nProblem:"],
}  # fmt: skip
PPO = {
    "advantage.gamma": 1.0, "advantage.lam": 1.0, "critic.learning_rate": 1e-6, "critic.clip_range": 0.2,
    "critic.schedule": "linear", "critic.optimizer.betas": [0.9, 0.999], "critic.model.source": "policy",
}  # fmt: skip
MC = {"advantage.completions_per_state": 9, "advantage.prompt_value": "sampled", "advantage.budget": "fresh",
      "critic": None}  # fmt: skip
MATH = {
    "num_iterations": 1000,
    "update.warmup_steps": 480,
    "task.splits.sizes": {"train": 11500, "dev": 500, "test": 500},
}
GSM8K = {"num_iterations": 650, "update.warmup_steps": 312, "task.splits.sizes": {"train": 7100, "dev": 373}}
CRITIC_MATH, CRITIC_GSM8K = {"critic.warmup_steps": 480}, {"critic.warmup_steps": 312}
RHO, DEEPSEEK = (
    {"server.max_model_len": 2047},
    {"server.max_model_len": 4095, "update.micro_batch_size": 8, "deepspeed.zero_optimization.stage": 2},
)
OFFLOAD = {"deepspeed.zero_optimization.offload_optimizer.device": "cpu"}
TULU = {
    "params.temperature": 1.0, "params.top_p": 1.0, "params.max_tokens": 2048, "client.max_model_len": 4096,
    "rollout.group_size": 1, "rollout.max_staleness": 1, "update.num_epochs": 4, "update.schedule": "linear",
    "update.clip_low": 0.2, "update.clip_high": 0.2, "update.max_grad_norm": 1.0, "update.whitening": "standard",
    "update.whitens_rewards": False, "kl.kind": "k1", "kl.place": "reward", "advantage.gamma": 1.0,
    "advantage.lam": 0.95, "critic.clip_range": 0.2, "critic.loss_coefficient": 0.1, "critic.form": "linear",
    "critic.model.source": "reward_model", "critic.schedule": "linear", "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.01, "critic.optimizer.weight_decay": 0.01, "model.gradient_checkpointing": True,
    "reward.terms.outcome.right": 10.0, "reward.terms.outcome.wrong": 0.0, "reward.non_stop_reward": -10.0,
    "reward.min_tokens": 0, "client.num_engines": 1, "evaluation.num_problems": 32,
    "task.template.is_chat": True,
}  # fmt: skip
LPR = {
    "task._target_": "espalier.data.tasks.logical_reading.LogiQA2",
    "params.temperature": 1.0, "params.max_tokens": 2048,
    "update.clip_low": 0.2, "update.clip_high": 0.2, "update.whitening": "none", "precision": "auto",
}  # fmt: skip

RECIPES: dict[str, dict[str, Any]] = {
    "ppo_rho_math": {**VINE, **PPO, **MATH, **CRITIC_MATH, **RHO, "checkpoints.save_every": 40,
        "checkpoints.export_every": 40},
    "ppo_rho_gsm8k": {**VINE, **PPO, **GSM8K, **CRITIC_GSM8K, **RHO, "checkpoints.save_every": 40,
        "checkpoints.export_every": 40},
    "ppo_deepseek_math": {
        **VINE, **PPO, **MATH, **CRITIC_MATH, **DEEPSEEK, **OFFLOAD,
        "checkpoints.save_every": 30, "checkpoints.export_every": 60,
    },
    "ppo_deepseek_gsm8k": {
        **VINE, **PPO, **GSM8K, **CRITIC_GSM8K, **DEEPSEEK, **OFFLOAD,
        "checkpoints.save_every": 30, "checkpoints.export_every": 60,
    },
    "vineppo_rho_math": {**VINE, **MC, **MATH, **RHO, "advantage.max_step": None, "checkpoints.save_every": 10,
        "checkpoints.export_every": 40},
    "vineppo_rho_gsm8k": {**VINE, **MC, **GSM8K, **RHO, "advantage.max_step": 25, "checkpoints.save_every": 10,
        "checkpoints.export_every": 40},
    "vineppo_deepseek_math": {
        **VINE, **MC, **MATH, **DEEPSEEK, "advantage.max_step": None, "checkpoints.save_every": 10,
        "checkpoints.export_every": 60},
    "vineppo_deepseek_gsm8k": {
        **VINE, **MC, **GSM8K, **DEEPSEEK, "advantage.max_step": 25, "checkpoints.save_every": 10,
        "checkpoints.export_every": 60},
    "ppo_tulu_8b": {
        **TULU, "launcher.num_ranks": 12, "client.options.tensor_parallel_size": 4, "rollout.num_problems": 192,
        "update.minibatch_size": 192, "update.micro_batch_size": 2, "update.learning_rate": 3e-7,
        "critic.learning_rate": 3e-7, "kl.coefficient": 0.05, "num_iterations": 10416, "evaluation.every": 104,
        "checkpoints.save_every": 80, "deepspeed.zero_optimization.stage": 2, "update.warmup_steps": 0},
    "ppo_tulu_8b_one_node": {
        **TULU, "launcher.num_ranks": 7, "client.options.tensor_parallel_size": None, "rollout.num_problems": 224,
        "update.minibatch_size": 224, "update.micro_batch_size": 2, "update.learning_rate": 3e-7,
        "critic.learning_rate": 3e-7, "kl.coefficient": 0.05, "num_iterations": 44642, "evaluation.every": 14880,
        "checkpoints.save_every": 100, "deepspeed.zero_optimization.stage": 3, "update.warmup_steps": 0},
    "ppo_tulu_70b": {
        **TULU, "launcher.num_ranks": 40, "client.options.tensor_parallel_size": 4, "rollout.num_problems": 640,
        "update.minibatch_size": 640, "update.micro_batch_size": 1, "update.learning_rate": 1e-7,
        "critic.learning_rate": 1e-7, "kl.coefficient": 0.07, "num_iterations": 625, "evaluation.every": 208,
        "checkpoints.save_every": 40, "deepspeed.zero_optimization.stage": 3, "update.warmup_steps": 250,
        "critic.warmup_steps": 250},
    "prime_eurus": {
        "params.temperature": 1.0, "params.max_tokens": 3072, "rollout.num_problems": 256, "rollout.group_size": 4,
        "rollout.accuracy_range": [0.2, 0.8], "rollout.dynamic_sampling_rounds": 1, "update.learning_rate": 5e-7,
        "update.whitening": "standard", "update.num_epochs": 1, "kl.coefficient": 0.0, "critic": None,
        "advantage.process_weight": 5.0, "advantage.outcome_weight": 5.0, "advantage.gamma": 1.0,
        "advantage.granularity": "token", "advantage.bounds_returns": True, "implicit_reward.beta": 0.05,
        "implicit_reward.learning_rate": 1e-6, "implicit_reward.max_grad_norm": 10.0,
        "implicit_reward.update": "before",
        "implicit_reward.reference": "start", "evaluation.every": 16, "checkpoints.save_every": 16,
        "deepspeed.zero_optimization.stage": 3},
    # 12,567 problems x 5 passes / 64 = 982 iterations of 2 steps; a tenth of them is warm-up; saved every 100 steps
    "ppo_logiqa": {
        **LPR, "update.learning_rate": 1e-6, "critic.learning_rate": 5e-7, "update.minibatch_size": 64,
        "update.micro_batch_size": 4,
        "update.num_epochs": 2, "num_iterations": 982, "update.warmup_steps": 196, "critic.warmup_steps": 196,
        "kl.coefficient": 0.1, "kl.kind": "k1", "kl.place": "reward", "advantage.gamma": 1.0, "advantage.lam": 0.95,
        "critic.clip_range": 0.2, "reward.limit": 5.0, "reward.offset": 0.0, "optimizer.weight_decay": 0.01,
        "checkpoints.save_every": 50, "rollout.group_size": 1, "server.max_model_len": 4096,
        "critic.model.source": "reward_model_body",
        "critic.form": "linear"},
    "grpo_logiqa": {
        **LPR, "update.learning_rate": 5e-7, "rollout.group_size": 8, "rollout.num_problems": 64,
        "update.num_epochs": 1, "update.micro_batch_size": 2,
        "kl.coefficient": 0.04, "kl.kind": "k3", "kl.place": "loss", "reward.limit": 3.0,
        "advantage._target_": "espalier.rl.advantages.process_grpo.ProcessGRPO", "reward.form": "score",
        "reward.offset": 0.0, "num_iterations": 196, "critic": None},
    "remax_logiqa": {
        **LPR, "reward.right": 1.0, "reward.wrong": -1.0, "kl.place": "reward", "kl.kind": "k1", "update.num_epochs": 1,
        "update.minibatch_size": 64, "rollout.num_problems": 64, "rollout.group_size": 1, "critic": None},
}  # fmt: skip
CALIBRATION = {
    "num_iterations": 1500, "rollout.num_problems": 512, "rollout.group_size": 1, "update.minibatch_size": 512,
    "update.num_epochs": 1, "params.temperature": 0.7, "params.top_p": 1, "params.max_tokens": 300,
    "kl.coefficient": 0.1, "kl.kind": "k1", "kl.place": "reward", "kl.target": 0.0, "kl.cuts_negative": True,
    "advantage.gamma": 1.0, "advantage.lam": 1.0, "update.clip_low": 0.2, "update.clip_high": 0.2,
    "update.whitens_rewards": True, "update.learning_rate": 1e-5, "update.warmup_steps": 5,
    "update.schedule": "linear", "update.max_grad_norm": 1.0,
    "update.whitening": "standard", "update.loss_aggregation": "token", "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-5, "optimizer.weight_decay": 0.0, "critic.optimizer.betas": [0.9, 0.999],
    "critic.optimizer.eps": 1e-5, "critic.optimizer.weight_decay": 0.0, "critic.max_grad_norm": 1.0,
    "evaluation.every": 20, "checkpoints.save_every": 20,
    "critic.learning_rate": 1e-5, "critic.warmup_steps": 5, "critic.schedule": "linear", "critic.clip_range": 0.2,
    "critic.loss_coefficient": 0.1, "critic.model.source": "reward_model_body", "critic.form": "linear",
    "critic.model.head": "zero", "reward.epsilon": 1e-4, "reward.sum_weight": 5.0, "reward.constant": 5.0,
    "reward.forecasts.extractor.max_tokens": 300, "reward.forecasts.extractor.temperature": 0.3,
}  # fmt: skip
"""Band et al. 2024: one optimizer for policy and critic there, two of one schedule here."""
RESTEM = {
    "update.learning_rate": 1e-6, "num_epochs": 8, "update.batch_size": 64, "update.schedule": "linear",
    "update.warmup_share": 0.03,
    "checkpoints.save_every": 500, "objective.temperature": 0.6, "objective.loss_aggregation": "sequence",
    "optimizer.betas": [0.9, 0.999],
}  # fmt: skip
TINY_TASK = {"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 700, "num_dev": 20,
             "num_test": 20, "num_demonstrations": 200, "wrong_way_rate": 0.6, "max_total": 30, "seed": 0}  # fmt: skip


def composed(name: str, *overrides: str) -> DictConfig:
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose(config_name=name, overrides=list(overrides))


def values_of(config: DictConfig, keys: Iterator[str]) -> dict[str, Any]:
    """Resolved values of dotted keys; what the user must give stands in the way of none of them."""
    plain = OmegaConf.create(OmegaConf.to_container(config))
    found = {}
    for key in keys:
        value = OmegaConf.select(plain, key)
        found[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_rl_recipe_has_its_published_values(name: str) -> None:
    wanted = RECIPES[name]
    config = composed(f"exp/ppo/{name}")
    assert values_of(config, iter(wanted)) == wanted
    assert config.params.top_p == 1  # published with less, which the trained log-probs would not know of
    assert config.evaluation.every == wanted.get("evaluation.every", 0)


def test_linguistic_calibration_and_its_baseline_have_their_published_values() -> None:
    for name, reader in (("", "reward.forecasts.forecaster.path"), ("_factuality", "reward.path")):
        config = composed(f"exp/ppo/linguistic_calibration{name}", f"{reader}=E")
        wanted = {key: value for key, value in CALIBRATION.items() if not name or not key.startswith("reward.")}
        assert values_of(config, iter(wanted)) == wanted
        assert config.critic.model.path == "E"
        assert config.evaluation.metric == "reward"


@pytest.mark.parametrize("size", ["rho", "deepseek"])
@pytest.mark.parametrize("task", ["math", "gsm8k"])
def test_a_published_restem_recipe_has_its_published_values(size: str, task: str) -> None:
    config = composed(f"exp/sft/restem_{size}_{task}")
    assert values_of(config, iter(RESTEM)) == RESTEM
    assert config.examples.max_length == {"rho": 2048, "deepseek": 2499}[size]


@pytest.fixture(scope="module")
def tiny_reward_model(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model of one label with the policy's tokenizer."""
    from espalier.models.scalar_head import load_process_reward

    folder = tmp_path_factory.mktemp("reward") / "model"
    load_process_reward(str(tiny_policy), 1).save_pretrained(folder)
    load_tokenizer(str(tiny_policy)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name in ("ppo_tulu_8b", "prime_eurus", "vineppo_rho_math"), RECIPES)
)
def test_a_published_rl_recipe_loads_with_tiny_models(
    name: str, tiny_policy: Path, tiny_reward_model: Path, tmp_path: Path
) -> None:
    overrides = [f"model.path={tiny_policy}", f"output_dir={tmp_path}/run"]
    if name == "ppo_logiqa" or "tulu" in name:
        overrides.append(f"critic.model.path={tiny_reward_model}")
    if name in ("ppo_logiqa", "grpo_logiqa"):
        overrides.append(f"reward.path={tiny_reward_model}")
    config = composed(f"exp/ppo/{name}", *overrides)
    # resolved first: the sampling parameters read the task's stop strings
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    plain.task = TINY_TASK
    plain.deepspeed = None  # engines need a process group, and have tests of their own
    settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RLConfig), plain))
    assert isinstance(settings, RLConfig)
    check_kl(settings.kl)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(tiny_policy))
    server, client = make_client(settings)
    trainer = make_trainer(settings, tokenizer, server, client)
    is_half = isinstance(client, RayEngines) or has_fast_bf16("cpu")  # as the engines
    assert trainer.delivery.sync.dtype == (torch.bfloat16 if is_half else torch.float32)
    assert isinstance(trainer.rollout_source.sampler.task, WordArithmetic)
    num_engines = len(trainer.delivery.sync.engines)
    assert trainer.rollout_source.sampler.concurrency == settings.engine.concurrency * num_engines
    assert len(trainer.problems.train) == 700
    assert (trainer.policy.loss.reference is None) == (settings.kl.coefficient == 0)
    kinds = {"ppo": GAE, "vineppo": VinePPO}
    assert isinstance(trainer.estimator, kinds.get(name.split("_")[0], object))
    assert (len(trainer.update.learners) == 2) == (name.split("_")[0] in ("ppo", "prime"))


@pytest.mark.parametrize("size", ["rho", pytest.param("deepseek", marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", [pytest.param("math", marks=pytest.mark.slow), "gsm8k"])
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_group_baseline_differs_from_the_published_vineppo_run_in_its_estimator_alone(
    size: str, task: str, advantage: str
) -> None:
    given = ["model.path=M", "output_dir=D"]
    published = OmegaConf.to_container(composed(f"exp/ppo/vineppo_{size}_{task}", *given), resolve=True)
    baseline = OmegaConf.to_container(composed(f"exp/ppo/{advantage}_{size}_{task}", *given), resolve=True)
    assert isinstance(published, dict)
    assert isinstance(baseline, dict)
    estimator = {"grpo": "espalier.rl.advantages.grpo.GRPO", "rloo": "espalier.rl.advantages.rloo.RLOO"}
    assert baseline.pop("advantage")["_target_"] == estimator[advantage]
    assert published.pop("advantage")["_target_"].endswith("VinePPO")
    published["checkpoints"] |= {"save_every": {"rho": 40, "deepseek": 30}[size]}  # iterations are cheaper
    assert baseline == published
