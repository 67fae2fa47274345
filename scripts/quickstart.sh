#!/usr/bin/env bash
# From a fresh clone to a better reasoner: installs, then teaches a tiny policy, measures its steps, trains a
# process reward model and two DPO policies, evaluates all three, and writes experiments/quickstart/report.html.
#
#   bash scripts/quickstart.sh [seed=0] [run=experiments/quickstart] [task=word_arithmetic]
#   bash scripts/quickstart.sh task=rule_logic run=experiments/rule_logic
#   bash scripts/quickstart.sh task=long_arithmetic run=experiments/long task.max_operations=16 max_tokens=192
#   bash scripts/quickstart.sh run=experiments/rehearsal configs=exp/debug num_problems=24 num_test=32   minutes
#
# sample.*, complete.*, prm.*, train.* (of DPO), server.*   settings of one stage alone (scripts/process_rewards.sh)
# task.* (task.max_total=12) and prompt=NAME go to every program that asks the task for problems.
# Safe to run again from the top after anything: finished stages are kept.
set -euo pipefail
settings="task run seed num_problems num_test max_tokens configs"
prefixes="sample complete prm train server task"
task=word_arithmetic run=experiments/quickstart seed=0 num_problems=1000 num_test=1000 max_tokens=128 configs=exp
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
ready=() # tasks with settings for all three trainings
for file in conf/"$configs"/sft/*.yaml; do
  name=$(basename "$file" .yaml)
  if [[ -f conf/task/$name.yaml && -f conf/$configs/reward/$name.yaml && -f conf/$configs/dpo/$name.yaml ]]; then
    ready+=("$name")
  fi
done
if [[ " ${ready[*]} " != *" $task "* ]]; then
  printf -v names '%s, ' "${ready[@]:0:${#ready[@]}-1}"
  echo "error: the quick start needs conf/$configs/sft/$task.yaml, and the same in reward/ and dpo/: choose \
task=${names%, } or ${ready[-1]}; docs/data.md says how the policies of other embedded tasks are made" >&2
  exit 2
fi
mkdir -p "$run"
fits sample service_api_caller_v1.py api/vllm/trajectories
fits complete service_api_caller_v1.py api/vllm/completions
fits server service_api_caller_v1.py api/vllm/trajectories
fits prm trainer_base_ds_mul.py "$configs/reward/$task"
fits train trainer_base_ds_mul.py "$configs/dpo/$task"
common=(task="$task" run="$run" seed="$seed")
sft=$run/sft/model

pass_on server task
sampling=(num_problems="$num_test" max_tokens="$max_tokens" "${common[@]}" "${passed[@]}")
asked=$run/evaluation/sft data=$run/process_rewards

stage make_demonstrations "$python" run_stage.py -cn problems/make_demonstrations task="$task" "${task_settings[@]}" \
  output="$run/demonstrations.jsonl"
stage make_policy "$python" run_stage.py -cn training/make_policy input="$run/demonstrations.jsonl" output="$run/base" seed="$seed"
stage train_sft "$python" trainer_base_ds_mul.py -cn "$configs/sft/$task" output_dir="$run/sft" \
  model.path="$run/base" examples.path="$run/demonstrations.jsonl" seed="$seed"
# one server for all that is asked of this policy; process_rewards.sh ends it before it trains
problems_of task="$task" "${task_settings[@]}"
serve "$sft" "$run/server.log" 512 "$asked/greedy.jsonl" "$asked/samples.jsonl" "$data/trajectories.jsonl" \
  "$data/completions.jsonl"
bash scripts/evaluate.sh name=sft policy="$sft" until=samples "${sampling[@]}"
pass_on sample complete prm server task
bash scripts/process_rewards.sh policy="$sft" num_problems="$num_problems" max_tokens="$max_tokens" \
  exp="$configs/reward/$task" "${common[@]}" "${passed[@]}"
end_server
pass_on train
for pairs in outcome process; do
  bash scripts/preferences.sh pairs="$pairs" policy="$sft" exp="$configs/dpo/$task" "${common[@]}" \
    "${passed[@]}"
done
for name in sft dpo process_dpo; do
  bash scripts/evaluate.sh name="$name" policy="$run/$name/model" "${sampling[@]}"
done
stage report "$python" run_stage.py -cn pages/report output="$run/report.html" stage.run_dir="$run"
echo "the report is $run/report.html" >&2
