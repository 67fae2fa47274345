"""Published trainer settings: the experiments hold the values of their papers' own configs.

LPR: Jiao et al. 2024 (arXiv 2402.00658). VinePPO: Kazemnejad et al. 2024 (arXiv 2410.01679). Implicit process
rewards: Yuan et al. 2024 (arXiv 2412.01981), whose number of processes, warm-up and schedule are not on record, nor
anything of NCA and KTO alone. Linguistic calibration: Band et al. 2024 (arXiv 2404.00474). A batch is written as
micro-batch x accumulation x processes, as it was run.
"""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from espalier.runtime.entrypoint import register_schemas

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
LPR = {"optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-6, "optimizer.weight_decay": 0.0}
VINE = {
    "optimizer.betas": [0.9, 0.999],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0,
    "update.warmup_share": 0.03,
}
VINE_SFT = {**VINE, "objective.loss_aggregation": "sequence", "examples.max_length": 2048, "num_epochs": 2}
VINE_DPO = {**VINE, "objective.penalty": 50.0, "objective.label_smoothing": 0.0, "objective.sft_weight": 0.0,
            "objective.temperature": 0.6, "update.learning_rate": 1e-6, "num_epochs": 3}  # fmt: skip
LPR_DPO = {**LPR, "objective.label_smoothing": 0.0, "objective.sft_weight": 0.0, "examples.max_length": 2048,
           "objective.beta": 0.1, "num_epochs": 2, "update.warmup_steps": 200, "update.warmup_share": 0.0}  # fmt: skip
LPR_MATH = {**LPR, "optimizer.weight_decay": 0.1, "objective.beta": 0.5, "examples.max_length": 1024,
            "num_epochs": 1, "update.warmup_share": 0.06, "update.learning_rate": 1e-6}  # fmt: skip
LPR_PRM = {**LPR, "model.num_labels": 4, "examples.max_length": 4096, "update.learning_rate": 1e-6,
           "update.warmup_steps": 200,
           "update.warmup_share": 0.0, "evaluation.every": 200}  # fmt: skip
OPENRL = {"optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "update.learning_rate": 1e-6,
          "update.warmup_share": 0.1, "update.schedule": "linear", "objective.centring": 0.0,
          "examples.max_length": 2048}  # fmt: skip

IMPLICIT = {"optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "update.learning_rate": 5e-7,
            "num_epochs": 1, "objective.beta": 0.05, "examples.max_length": 8192, "model.gradient_checkpointing": True,
            "update.schedule": "cosine"}  # fmt: skip
CALIBRATION = {"optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0,
               "update.schedule": "cosine", "examples.max_length": 1024}  # fmt: skip
CALIBRATION_SFT = {**CALIBRATION, "num_epochs": 3, "update.warmup_share": 0.03, "model.gradient_checkpointing": True}

# name → (micro-batch, accumulation, processes), ZeRO stage (None: no DeepSpeed), whether it offloads, other values.
RECIPES: dict[str, tuple[tuple[int, int, int], int | None, bool, dict[str, Any]]] = {
    "sft/logiqa_distilled": ((6, 1, 4), 1, True, {
        **LPR, "optimizer.weight_decay": 0.01, "update.learning_rate": 1e-5, "num_epochs": 6,
        "update.warmup_share": 0.01,
        "examples.max_length": 2048, "checkpoints.save_every": 400, "evaluation.every": 400,
        "objective.loss_aggregation": "token"}),
    "sft/reclor_distilled": ((6, 1, 4), 2, False, {
        **LPR, "update.learning_rate": 2e-6, "num_epochs": 3, "update.warmup_share": 0.01,
        "examples.max_length": 2048}),
    "dpo/logiqa_outcome_pairs": ((4, 8, 2), 1, True, {**LPR_DPO, "update.learning_rate": 2e-6,
        "checkpoints.save_every": 400}),
    "dpo/reclor_outcome_pairs": ((4, 4, 4), 1, True, {**LPR_DPO, "update.learning_rate": 1e-6,
        "checkpoints.save_every": 200}),
    "dpo/logiqa_process_pairs": ((4, 4, 4), 1, True, {**LPR_DPO, "update.learning_rate": 2e-6}),
    "dpo/logiqa_process_pairs_round2": ((4, 4, 4), 1, True, {
        **LPR_DPO, "update.learning_rate": 2e-6, "update.warmup_share": 0.05, "checkpoints.save_every": 100}),
    "dpo/reclor_process_pairs": ((4, 4, 4), 1, True, {**LPR_DPO, "update.learning_rate": 1e-6}),
    "dpo/deepseek_math_steps": ((1, 16, 4), 1, False, LPR_MATH),
    "dpo/gemma_question_steps": ((2, 8, 4), 1, False, LPR_MATH),
    "reward/logiqa_step_values": ((4, 4, 4), 1, False, {**LPR_PRM, "num_epochs": 2}),
    "reward/reclor_step_values": ((8, 1, 8), 1, False, {**LPR_PRM, "num_epochs": 4}),
    "reward/openrl_llama_8b": ((2, 8, 4), 2, False, {**OPENRL, "num_epochs": 2}),
    "reward/openrl_llama_8b_head": ((2, 8, 4), 2, False, {
        **OPENRL, "num_epochs": 12, "model.trains": "head", "optimizer.weight_decay": 1e-4}),
    "reward/openrlhf_llama_8b": ((2, 1, 128), 2, False, {
        **OPENRL, "num_epochs": 1, "update.learning_rate": 9e-6, "update.warmup_share": 0.03,
        "update.schedule": "cosine"}),
    "reward/implicit_ce_llama_8b": ((1, 8, 8), 3, False, {
        **IMPLICIT, "objective._target_": "espalier.training.objectives.implicit_ce.ImplicitCrossEntropy",
        "examples.is_distinct": False}),
    "reward/implicit_dpo_llama_8b": ((1, 8, 8), 3, False, {
        **IMPLICIT, "objective._target_": "espalier.training.objectives.dpo.DirectPreference",
        "objective.label_smoothing": 0.0}),
    "reward/implicit_nca_llama_8b": ((1, 8, 8), 3, False, {
        **IMPLICIT, "objective._target_": "espalier.training.objectives.nca.NoiseContrastive",
        "objective.sft_weight": 0.0}),
    "reward/implicit_kto_llama_8b": ((1, 8, 8), 3, False, {
        **IMPLICIT, "objective._target_": "espalier.training.objectives.kto.KahnemanTversky",
        "objective.desirable_weight": 1.0, "objective.undesirable_weight": 1.0, "objective.has_baseline": True,
        "examples.is_distinct": False, "examples.has_mismatched": True}),
    "sft/verifier_llama_8b": ((2, 8, 4), 2, False, {
        "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "update.learning_rate": 1e-6,
        "update.warmup_share": 0.1, "num_epochs": 4, "examples.generate_weight": 0.25,
        "examples.verify.max_length": 2048, "examples.generate.max_length": 2048,
        "objective.loss_aggregation": "token"}),
    "sft/linguistic_calibration": ((4, 2, 4), None, False, {**CALIBRATION_SFT, "update.learning_rate": 5e-6}),
    "sft/linguistic_calibration_distilled": ((4, 2, 4), None, False, {
        **CALIBRATION_SFT, "update.learning_rate": 3e-6}),
    "sft/linguistic_calibration_factuality": ((4, 2, 4), None, False, {
        **CALIBRATION_SFT, "update.learning_rate": 8e-7}),
    "sft/answer_extraction": ((4, 16, 4), None, False, {
        **CALIBRATION_SFT, "update.learning_rate": 5e-6, "num_epochs": 5}),
    # soft labels; 2,000 of 20,000 questions are held out, all answers of a question on one side
    "reward/probability_forecasting": ((2, 32, 4), None, False, {
        **CALIBRATION, "update.learning_rate": 5e-6, "num_epochs": 5, "update.warmup_share": 0.1,
        "model.num_labels": 1, "model.trains": "all", "objective.hard_above": None, "examples.held_out_share": 0.1}),
    "sft/openrl_paragraphs_llama_8b": ((2, 8, 4), 2, False, {
        **VINE_SFT, "update.learning_rate": 5e-5, "checkpoints.save_every": 50}),
    "sft/openrl_answers_llama_8b": ((2, 8, 4), 2, False, {
        **VINE_SFT, "update.learning_rate": 5e-5, "checkpoints.save_every": 50}),
    "reward/openrl_forecasting_llama_8b": ((8, 4, 4), 2, False, {
        **VINE, "update.learning_rate": 1e-6, "update.schedule": "linear", "num_epochs": 4, "examples.max_length": 2048,
        "model.num_labels": 1, "model.trains": "all", "objective.hard_above": None, "checkpoints.save_every": 400}),
    "sft/rho_math": ((8, 8, 1), None, False, {**VINE_SFT, "update.learning_rate": 1e-5, "checkpoints.save_every": 50}),
    "sft/rho_gsm8k": ((8, 8, 1), None, False, {**VINE_SFT, "update.learning_rate": 1e-5, "checkpoints.save_every": 45}),
    "sft/deepseek_math": ((2, 8, 4), 2, False, {**VINE_SFT, "update.learning_rate": 5e-5,
        "checkpoints.save_every": 50}),
    "sft/deepseek_gsm8k": ((2, 8, 4), 2, False, {**VINE_SFT, "update.learning_rate": 5e-5,
        "checkpoints.save_every": 45}),
    "dpo/dpop_rho_math": ((4, 4, 4), 0, False, {**VINE_DPO, "objective.beta": 0.1, "checkpoints.save_every": 500}),
    "dpo/dpop_rho_gsm8k": ((4, 4, 4), 0, False, {**VINE_DPO, "objective.beta": 0.3, "checkpoints.save_every": 500}),
    "dpo/dpop_deepseek_math": ((4, 2, 8), 2, False, {
        **VINE_DPO, "objective.beta": 0.1, "checkpoints.save_every": 450, "examples.max_length": 2499}),
    "dpo/dpop_deepseek_gsm8k": ((4, 2, 8), 2, False, {
        **VINE_DPO, "objective.beta": 0.3, "checkpoints.save_every": 450, "examples.max_length": 2499}),
}  # fmt: skip


def test_a_published_verifier_learns_from_and_votes_by_as_many_as_published() -> None:
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        votes = compose(config_name="api/vllm/verifications_published")
        taught = compose(config_name="stage/problems/verifier_demonstrations")
    assert (votes.params.n, votes.params.temperature, votes.params.max_tokens) == (32, 0.7, 1024)
    assert taught.stage.max_per_problem == 16


def select(node: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        node = node[part]
    return node


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_has_its_published_values(name: str) -> None:
    batch, stage, has_offload, values = RECIPES[name]
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = compose(config_name=f"exp/{name}")
    plain = OmegaConf.to_container(config, resolve=False)
    found = {key: select(plain, key) for key in values}
    assert found == values
    micro, accumulation, processes = batch
    assert (config["update"].micro_batch_size, config["update"].batch_size) == (micro, micro * accumulation * processes)
    zero = OmegaConf.select(config, "deepspeed.zero_optimization")
    assert (None if zero is None else zero.stage) == stage
    assert (zero is not None and "offload_optimizer" in zero) == has_offload
    assert (config["update"].schedule, config.precision, config["update"].max_grad_norm, config.max_steps) == (
        values.get("update.schedule", "linear"),
        "auto",  # bf16 on the GPUs that they are for
        1.0,
        0,
    )
