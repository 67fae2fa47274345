#!/usr/bin/env bash
# Preference learning from a run of process_rewards.sh: build pairs, then train the policy on them with DPO.
#
#   bash scripts/preferences.sh pairs=process policy=experiments/quickstart/sft/model run=experiments/mine
#
# task=, max_length=   those of that run, where they are not given
# pairs=outcome   correct over incorrect                                  -> $run/dpo
# pairs=process   process DPO: ranked by the process reward model         -> $run/process_dpo
# pairs=step      step-DPO: two next steps from one shared state          -> $run/step_dpo
# pairs=partial   partial solutions by their values                       -> $run/partial_dpo
# pairs=dpo_positive   correct over incorrect, 64 per problem             -> $run/dpo_positive, by the objective of that name
# largest_wrong_share=0.4   pairs of which clearly more are in the wrong order end the run before training
#                 (pairs/check_pairs); 1 trains on them anyway
# objective=NAME  another of conf/objective/; its settings are objective.beta=0.1 and the like
# exp=NAME, deepspeed=, nproc=   as in scripts/process_rewards.sh; without exp, exp/dpo/preference_pairs by the model's size
# pair.*, train.* settings of one stage alone: pair.stage.max_pairs=8 train.update.learning_rate=1e-6 train.lora=lora
# Safe to run again from the top.
set -euo pipefail
settings="task policy run pairs max_length seed exp objective largest_wrong_share deepspeed nproc"
prefixes="pair train"
task='' policy='' run='' pairs=process max_length='' seed=0 exp='' objective='' largest_wrong_share=0.4
max_tokens=none deepspeed='' nproc=1
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $run ]] || { echo "error: policy=MODEL_FOLDER and run=RUN_DIRECTORY are needed" >&2; exit 2; }
data=$run/process_rewards
task=${task:-$(value_of task "$data/settings.json")} max_length=${max_length:-$(value_of max_length "$data/settings.json")}
[[ -n $task ]] || {
  echo "error: $data/settings.json: no such file: run scripts/process_rewards.sh first; of a run of an earlier version \
give task= and max_length= as they were given there" >&2
  exit 2
}
choose_lengths
scores=() values=$data/step_values.jsonl solutions=$data/trajectories.jsonl steps=(stage.values="$values") errors=()
kind=$(value_of labels "$data/labels.json")
if [[ $kind == contrast || $kind == relative ]]; then
  # the scores say where a solution leaves the right way; under contrast step pairs are of the completions too
  if [[ $kind == contrast ]]; then values=$data/labelled_steps.jsonl; fi
  errors=(stage.cut_wrong_below=0.5 stage.max_rejected=4 stage.max_pairs=8)
  steps=(stage.labels="$values" stage.chosen=solution)
  if [[ $kind == contrast && $pairs == step ]]; then solutions=$data/solutions.jsonl; fi
fi
case $pairs in
outcome) name=dpo known=(seed="$seed") ;;
process) name=process_dpo scores=(stage.scores="$data/step_scores.jsonl") known=(seed="$seed" "${scores[@]}" "${errors[@]}") ;;
step) name=step_dpo known=(seed="$seed" "${steps[@]}") ;;
partial) name=partial_dpo known=(seed="$seed" stage.values="$data/step_values.jsonl") ;;
dpo_positive) name=dpo_positive known=(seed="$seed") objective=${objective:-dpo_positive} ;;
*) echo "error: pairs must be outcome, process, step, partial or dpo_positive, got '$pairs'" >&2; exit 2 ;;
esac

choose_objective
fits pair run_stage.py "pairs/${pairs}_preferences"
fits train trainer_base_ds_mul.py "${exp:-exp/dpo/preference_pairs}"
recipe dpo "$policy" "${chosen_objective[@]}" "${train_settings[@]}"

stage "build_${pairs}_pairs" "$python" run_stage.py -cn "pairs/${pairs}_preferences" input="$solutions" \
  output="$run/pairs/$pairs.jsonl" "${known[@]}" "${pair_settings[@]}"
stage "check_${pairs}_pairs" "$python" run_stage.py -cn pairs/check_pairs input="$run/pairs/$pairs.jsonl" \
  output="$run/pairs/$pairs.check.json" stage.values="$values" "${scores[@]}" \
  stage.largest_wrong_share="$largest_wrong_share"
train "train_$name" "${recipe[@]}" output_dir="$run/$name" model.path="$policy" seed="$seed" \
  examples.path="$run/pairs/$pairs.jsonl" examples.max_length="$max_length"
