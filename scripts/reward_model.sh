#!/usr/bin/env bash
# Reinforcement learning from preferences, end to end: preferences -> a Bradley-Terry reward model -> PPO with its reward
# and a critic that begins on its body.
#
#   bash scripts/reward_model.sh policy=experiments/notes/sft/model run=experiments/mine                 shopping_notes
#   bash scripts/reward_model.sh policy=MODEL run=RUN task=problem_file task.path=FOLDER preferences=PAIRS nproc=8
#
# preferences=FILE  PreferencePair rows. Without: num_pairs comparisons are drawn from the policy's samples, labelled by the
#                   task's true reward with the noise of a judge, who prefers y to y' with sigmoid(beta (R(y) - R(y')))
# held_out=FILE     pairs that the reward model is judged on; without: those of a tenth of the problems
# head_steps=N      a first phase of N steps that trains the head alone, in a run of its own: $run/head
# exp=NAME, ppo=NAME  the experiments of the reward model and of PPO. Without: for a tiny policy of task=shopping_notes its
#                   own; for others exp/reward/outcome_pairs and exp/ppo/ppo_outcome_model with the presets of the size
# kl=C, num_iterations=N   the KL penalty's coefficient and the iterations of PPO; without: the experiment's. The reward has
#                   standard deviation 1 on the responses of the held-out pairs: the policy's samples, or with preferences
#                   or held_out those of the file
# name=ppo          the PPO run's folder: with another name a further run from the same reward model, as with another kl
# deepspeed=zero2 nproc=8, prompt=NAME   as in scripts/process_rewards.sh; PPO with ppo.layout= or ppo.launcher= starts its
#                   own ranks
# sample.*, train.*, ppo.*, server.*   settings of one stage alone: train.update.learning_rate=9e-6 ppo.update.clip_high=0.28
# objective.*       settings of the objective: objective.label_smoothing=0.1
# -> $run/reward_model, $run/reward_model.json (accuracy, calibration, scale), $run/$name
# Safe to run again from the top.
set -euo pipefail
settings="task policy run preferences held_out num_problems num_samples num_pairs beta max_tokens max_length seed exp ppo \
  head_steps kl num_iterations objective name deepspeed nproc"
prefixes="sample train ppo server task"
task=shopping_notes policy='' run='' preferences='' held_out='' num_problems=2400 num_samples=4 num_pairs=2048 beta=4.0
max_tokens='' max_length='' seed=0 exp='' ppo='' head_steps=0 kl=''
num_iterations='' objective=bradley_terry name=ppo deepspeed='' nproc=1
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $run ]] || { echo "error: policy=MODEL_FOLDER and run=RUN_DIRECTORY are needed" >&2; exit 2; }
if [[ -n $preferences ]]; then unread "with preferences=" sample; fi
choose_objective
if [[ $task == shopping_notes ]]; then max_tokens=${max_tokens:-64} max_length=${max_length:-256}; fi
choose_lengths
fits sample service_api_caller_v1.py api/vllm/trajectories "${task_settings[@]}"
fits server service_api_caller_v1.py api/vllm/trajectories
fits train trainer_base_ds_mul.py "${exp:-exp/reward/outcome_pairs}" "${chosen_objective[@]}"
fits ppo main.py "${ppo:-exp/ppo/ppo_outcome_model}"
exp=$ppo recipe ppo "$policy" "${ppo_settings[@]}"
learn=("${recipe[@]:0:${#recipe[@]}-${#ppo_settings[@]}}")
if [[ " ${learn[*]} " == *" exp/ppo/ppo_outcome_model "* ]]; then learn+=(server.max_model_len="$max_length"); fi
if [[ -n $num_iterations ]]; then learn+=(num_iterations="$num_iterations"); fi
if [[ -n $kl ]]; then learn+=(kl.coefficient="$kl"); fi
recipe outcome "$policy" "${chosen_objective[@]}" "${train_settings[@]}"
mkdir -p "$run"

if [[ -z $preferences ]]; then
  preferences=$run/preferences.jsonl
  stage sample_trajectories "$python" service_api_caller_v1.py -cn api/vllm/trajectories output="$run/trajectories.jsonl" \
    policy="$policy" task="$task" seed="$seed" requests.limit="$num_problems" params.n="$num_samples" \
    params.max_tokens="$max_tokens" server.max_model_len="$max_length" "${task_settings[@]}" "${server_settings[@]}" \
    "${sample_settings[@]}"
  stage draw_comparisons "$python" run_stage.py -cn pairs/draw_comparisons input="$run/trajectories.jsonl" \
    output="$preferences" task="$task" stage.num_pairs="$num_pairs" stage.beta="$beta" seed="$seed" "${task_settings[@]}"
fi
train=("${recipe[@]}" seed="$seed" examples.path="$preferences" examples.max_length="$max_length")
judged=(examples.path="$preferences" examples.part=held_out) pairs=$preferences
if [[ -n $held_out ]]; then
  train+=(examples.part=all eval_examples.path="$held_out" eval_examples.part=all)
  judged=(examples.path="$held_out" examples.part=all) pairs=$held_out
fi
start=$policy
if ((head_steps > 0)); then
  train train_head "${train[@]}" output_dir="$run/head" model.path="$policy" \
    model.trains=head max_steps="$head_steps"
  start=$run/head/model
fi
train train_reward_model "${train[@]}" output_dir="$run/reward_model" model.path="$start"
train score_held_out "${train[@]}" mode=predict model.path="$start" "${judged[@]}" \
  output_dir="$run/held_out" "predict.checkpoints={reward_model: $run/reward_model/model}"
stage measure_reward_model "$python" run_stage.py -cn evaluation/measure_reward_model \
  input="$run/held_out/reward_model.jsonl" output="$run/reward_model.json" stage.examples="$pairs"
if [[ " ${ppo_settings[*]}" =~ \ (layout|launcher)= ]]; then nproc=1; fi
on_ranks "$name" main.py "${learn[@]}" output_dir="$run/$name" model.path="$policy" task="$task" seed="$seed" \
  params.max_tokens="$max_tokens" reward.terms.outcome_model.path="$run/reward_model/model" \
  reward.terms.outcome_model.normaliser="$run/reward_model.json" "${task_settings[@]}" "${server_settings[@]}" \
  "${ppo_settings[@]}"
