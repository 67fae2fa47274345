"""Names of before and what they are now, for this version alone: an old key, option, stage or experiment ends with one
line that says the new one. Group options and files are named without their folder.
"""

RENAMED = {
    # keys
    "loss_normaliser": "loss_aggregation",
    "reduction": "loss_aggregation",
    "importance_cap": "tis_cap",
    "max_resamplings": "dynamic_sampling_rounds",
    "num_in_flight": "concurrency",
    "bill": "budget",
    "has_logprobs": "return_logprobs",
    "is_checkpointing_gradients": "gradient_checkpointing",
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
    # stages
    "evaluate_judging": "evaluate_prm_benchmarks",
    "evaluate_prm": "prm_calibration",
    # experiments
    "group_relative_word_arithmetic": "grpo_word_arithmetic",
    "group_relative_logiqa": "grpo_logiqa",
    "unpaired_trajectories": "kto_trajectories",
    "positive_word_arithmetic": "dpop_word_arithmetic",
    "positive_rho_gsm8k": "dpop_rho_gsm8k",
    "positive_rho_math": "dpop_rho_math",
    "positive_deepseek_gsm8k": "dpop_deepseek_gsm8k",
    "positive_deepseek_math": "dpop_deepseek_math",
    "logiqa_process_pairs_again": "logiqa_process_pairs_round2",
}
