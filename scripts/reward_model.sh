#!/usr/bin/env bash
# Reinforcement learning from preferences, end to end: preferences -> a Bradley-Terry reward model -> PPO with its reward
# and a critic that begins on its body.
#
#   bash scripts/reward_model.sh policy=experiments/notes/sft/model run=experiments/mine                 shopping_notes
#   bash scripts/reward_model.sh policy=MODEL run=RUN task=gsm8k preferences=PAIRS ppo=exp/ppo/MINE exp=exp/reward/outcome_pairs
#
# preferences=FILE  PreferencePair rows. Without: num_pairs comparisons are drawn from the policy's samples, labelled by the
#                   task's true reward with the noise of a judge, who prefers y to y' with sigmoid(beta (R(y) - R(y')))
# held_out=FILE     pairs that the reward model is judged on; without: those of a tenth of the problems
# head_steps=N      a first phase of N steps that trains the head alone, in a run of its own: $run/head
# kl=0.01           the KL penalty's coefficient in PPO; the reward has standard deviation 1 on the responses of the
#                   held-out pairs: the policy's samples, or with preferences or held_out those of the file
# name=ppo          the PPO run's folder: with another name a further run from the same reward model, as with another kl
# objective.*       settings of the objective: objective.label_smoothing=0.1
# -> $run/reward_model, $run/reward_model.json (accuracy, calibration, scale), $run/$name
# Safe to run again from the top.
set -euo pipefail
settings="task policy run preferences held_out num_problems num_samples num_pairs beta max_tokens max_length seed exp ppo \
  head_steps kl num_iterations objective name"
task=shopping_notes policy='' run='' preferences='' held_out='' num_problems=2400 num_samples=4 num_pairs=2048 beta=4.0
max_tokens=64 max_length=256 seed=0 exp=exp/reward/outcome_pairs_embedded ppo=exp/ppo/rlhf_shopping_notes head_steps=0 kl=0.01
num_iterations=40 objective=bradley_terry name=ppo
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $run ]] || { echo "error: policy=MODEL_FOLDER and run=RUN_DIRECTORY are needed" >&2; exit 2; }
mkdir -p "$run"
choose_objective

if [[ -z $preferences ]]; then
  preferences=$run/preferences.jsonl
  stage sample_trajectories "$python" service_api_caller_v1.py -cn api/vllm/trajectories output="$run/trajectories.jsonl" \
    policy="$policy" task="$task" seed="$seed" requests.limit="$num_problems" params.n="$num_samples" \
    params.max_tokens="$max_tokens" server.max_model_len="$max_length" "${extra[@]}"
  stage draw_comparisons "$python" run_stage.py -cn pairs/draw_comparisons input="$run/trajectories.jsonl" \
    output="$preferences" task="$task" stage.num_pairs="$num_pairs" stage.beta="$beta" seed="$seed" "${extra[@]}"
fi
train=(-cn "$exp" seed="$seed" examples.path="$preferences" examples.max_length="$max_length" "${chosen_objective[@]}")
judged=(examples.path="$preferences" examples.part=held_out) pairs=$preferences
if [[ -n $held_out ]]; then
  train+=(examples.part=all eval_examples.path="$held_out" eval_examples.part=all)
  judged=(examples.path="$held_out" examples.part=all) pairs=$held_out
fi
start=$policy
if ((head_steps > 0)); then
  stage train_head "$python" trainer_base_ds_mul.py "${train[@]}" output_dir="$run/head" model.path="$policy" \
    model.trains=head max_steps="$head_steps"
  start=$run/head/model
fi
stage train_reward_model "$python" trainer_base_ds_mul.py "${train[@]}" output_dir="$run/reward_model" model.path="$start"
stage score_held_out "$python" trainer_base_ds_mul.py "${train[@]}" mode=predict model.path="$start" "${judged[@]}" \
  output_dir="$run/held_out" "predict.checkpoints={reward_model: $run/reward_model/model}"
stage measure_reward_model "$python" run_stage.py -cn evaluation/measure_reward_model \
  input="$run/held_out/reward_model.jsonl" output="$run/reward_model.json" stage.examples="$pairs"
stage "$name" "$python" main.py -cn "$ppo" output_dir="$run/$name" model.path="$policy" task="$task" seed="$seed" \
  num_iterations="$num_iterations" kl.coefficient="$kl" params.max_tokens="$max_tokens" \
  reward.terms.outcome_model.path="$run/reward_model/model" \
  reward.terms.outcome_model.normaliser="$run/reward_model.json" "${extra[@]}"
