"""Names of before and what they are now, for this version alone: an old key, option, stage or experiment ends with one
line that says the new one. Group options and files are named without their folder. Where the new name of one program is
the old one of another, the first that the program has counts.
"""

from collections.abc import Container, Mapping

# Settings of a component whose default does otherwise than the component did before it had them: a file that was made
# before is not what it would be made now. Whoever adds a setting asks: does its default do what was done without it?
NOT_AS_BEFORE: Mapping[str, tuple[str, ...]] = {
    # plain text before; a process reward model was read as an outcome model before
    "espalier.pipeline.evaluation.score_responses.ScoreResponses": ("is_chat", "takes_last_step"),
    # pairs of problems that the reward model was trained on were made before
    "espalier.pipeline.pairs.build_preferences.ProcessPreferences": ("excludes_seen",),
}

RENAMED = {
    # keys, by topic now
    "num_problems": "rollout.num_problems",
    "group_size": "rollout.group_size",
    "dynamic_sampling_rounds": "rollout.dynamic_sampling_rounds",
    "max_refused_share": "rollout.max_refused_share",
    "num_epochs": "update.num_epochs",
    "batch_size": "update.batch_size",
    "minibatch_size": "update.minibatch_size",
    "micro_batch_size": "update.micro_batch_size",
    "micro_batch_tokens": "update.micro_batch_tokens",
    "layout": "update.layout",
    "learning_rate": "update.learning_rate",
    "warmup_steps": "update.warmup_steps",
    "warmup_share": "update.warmup_share",
    "schedule": "update.schedule",
    "max_grad_norm": "update.max_grad_norm",
    "on_nonfinite": "update.on_nonfinite",
    "max_skipped": "update.max_skipped",
    "clip_low": "update.clip_low",
    "clip_high": "update.clip_high",
    "dual_clip": "update.dual_clip",
    "entropy_bonus": "update.entropy_bonus",
    "max_mean_ratio": "update.max_mean_ratio",
    "tis_cap": "update.tis_cap",
    "loss_aggregation": "update.loss_aggregation",
    "whitening": "update.whitening",
    "eval_every": "evaluation.every",
    "num_eval_problems": "evaluation.num_problems",
    "patience": "evaluation.patience",
    "save_every": "checkpoints.save_every",
    "keep_checkpoints": "checkpoints.keep",
    "keep_best": "checkpoints.keep_best",
    "best_metric": "checkpoints.best_metric",
    "best_is": "checkpoints.best_is",
    "resume": "checkpoints.resume",
    "export_every": "checkpoints.export_every",
    "samples_every": "samples.every",
    "num_samples": "samples.num_problems",
    "concurrency": "engine.concurrency",
    "stall_seconds": "engine.stall_seconds",
    # keys
    "loss_normaliser": "loss_aggregation",
    "reduction": "loss_aggregation",
    "importance_cap": "tis_cap",
    "max_resamplings": "dynamic_sampling_rounds",
    "num_in_flight": "concurrency",
    "bill": "budget",
    "has_logprobs": "return_logprobs",
    "is_checkpointing_gradients": "gradient_checkpointing",
    "labels": "values",
    # advantage=
    "generalized": "gae",
    "group_relative": "grpo",
    "leave_one_out": "rloo",
    "monte_carlo": "vineppo",
    "cut_points": "spo",
    # client=, server=, examples=
    "local_engines": "data_parallel_engines",
    "local_engines_shared_blocks": "data_parallel_engines_partial_block_cache",
    "shared_blocks": "partial_block_cache",
    "labelled_steps": "annotated_solutions",
    "step_labels": "step_values",
    # stages
    "evaluate_judging": "evaluate_prm_benchmarks",
    "evaluate_prm": "prm_calibration",
    "label_steps": "estimate_values",
    "smoothed_labels": "smoothed_values",
    "score_solutions": "score_steps",
    # experiments
    "group_relative_word_arithmetic": "grpo_word_arithmetic",
    "group_relative_logiqa": "grpo_logiqa",
    "unpaired_trajectories": "kto_trajectories",
    "positive_word_arithmetic": "dpop_word_arithmetic",
    "positive_rho_gsm8k": "dpop_rho_gsm8k",
    "positive_rho_math": "dpop_rho_math",
    "positive_deepseek_gsm8k": "dpop_deepseek_gsm8k",
    "positive_deepseek_math": "dpop_deepseek_math",
    "word_arithmetic_labels": "word_arithmetic",
    "logiqa_process_pairs_again": "logiqa_process_pairs_round2",
}
# Keys of before, by their full name, whose settings stand elsewhere now.
MOVED = {"advantage.cut_points": "its settings are those of advantage=spo now, as advantage.threshold"}


def new_name(old: str, names: Container[str] | None = None) -> str:
    """Return what a name of before is called now, over several renamings: the first of `names` (none given: the last of
    all); "" where there is none."""
    name = RENAMED.get(old, "")
    while name and (name not in names if names is not None else name in RENAMED):
        name = RENAMED.get(name, "")
    return name
