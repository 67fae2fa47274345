#!/usr/bin/env bash
# Rounds: policy k -> samples -> values -> reward model k+1 -> pairs, or right solutions -> policy k+1.
#
#   bash scripts/iterate.sh method=process_dpo policy=experiments/quickstart/sft/model run=experiments/rounds
#
# method=process_dpo    pairs ranked by a process reward model of this round; DPO goes on from policy k
# method=dpo_positive   right over wrong solutions, 64 pairs a problem; DPO goes on from policy k
# method=restem         right solutions; SFT starts again from the first policy; RestEM's choice of checkpoint
#
# start_from=sft|last   what is trained each round: the first policy again, or policy k
# candidates=all|last   which checkpoints are evaluated on `split`: the start and all, or the end alone
# rule=first_non_improvement|best|last   which of them is policy k+1
# prm_replay, policy_replay   the shares of every earlier round's step values, and of its pairs or solutions
# prm_from=policy|last  what the reward model starts from: policy k, or the reward model of the round before
# objective=NAME        another of conf/objective/ for training (dpo_positive has its own); objective.penalty=50 and
#                       the like are its settings
# steps=cut_points      process_dpo: states at improbable tokens (scripts/process_rewards.sh)
# engines=2             as in scripts/process_rewards.sh; they evaluate each round's policies too
# smallest_reliability=0.2   process_dpo: labels less reliable than that are refused (scripts/process_rewards.sh)
# largest_wrong_share=0.4   process_dpo: pairs of which clearly more are in the wrong order end the run before training
#                       (scripts/preferences.sh)
# max_failed_share=0.02 the share of requests that may be refused (scripts/process_rewards.sh)
# exp=NAME, reward_exp=NAME   the experiments of the policy and of the reward model; without: by task and model's size
#                       (scripts/process_rewards.sh), as deepspeed=, nproc= and prompt=
# sample.*, complete.*, cut.*, prm.*, score.*, server.*, build.*, train.*, evaluate.*   settings of one stage alone, in
#                       every round: train.update.learning_rate=1e-6
# stride=N              every round takes N problems further on; 0 the same ones again
#
# Round k is in $run/round<k>, its policy in $run/round<k>/policy, the manifest in $run/rounds.json.
# Safe to run again from the top, also with more rounds: finished stages are kept, a broken one goes on where it was.
set -euo pipefail
settings="method task policy run num_rounds num_problems stride num_samples num_completions max_tokens max_length \
  held_out_share folds seed build exp reward_exp start_from candidates rule metric prm_replay policy_replay prm_from \
  split num_dev num_dev_samples dev_temperature objective steps cut_threshold cuts_per_step max_failed_share \
  smallest_reliability largest_wrong_share deepspeed nproc engines"
prefixes="sample complete cut prm score server build train evaluate task"
method=process_dpo task=word_arithmetic policy='' run='' num_rounds=2 num_problems=1000 stride=0 num_samples=8
num_completions=4 max_tokens='' max_length='' held_out_share='' folds=2 seed=0 build='' exp='' start_from='' candidates=''
reward_exp='' rule='' metric=mean prm_replay=0.1 policy_replay=0.0 prm_from=policy
split=dev num_dev=200 num_dev_samples=16 dev_temperature=0.35 objective='' steps=task cut_threshold=0.9 cuts_per_step=1
max_failed_share=0.02 smallest_reliability=0.2 largest_wrong_share=0.4 deepspeed='' nproc=1 engines=0
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $run ]] || { echo "error: policy=MODEL_FOLDER and run=RUN_DIRECTORY are needed" >&2; exit 2; }
kind=PreferencePair
case $method in
process_dpo) defaults=(pairs/process_preferences dpo last last last) ;;
dpo_positive)
  defaults=(pairs/dpo_positive_preferences dpo last last last)
  objective=${objective:-dpo_positive}
  ;;
restem)
  defaults=(problems/restem_demonstrations restem sft all first_non_improvement)
  kind=Demonstration
  ;;
*) echo "error: method must be process_dpo, dpo_positive or restem, got '$method'" >&2; exit 2 ;;
esac
if [[ $method != process_dpo ]]; then unread "with method=$method" complete cut prm score; fi
choose_objective
build=${build:-${defaults[0]}} start_from=${start_from:-${defaults[2]}}
candidates=${candidates:-${defaults[3]}} rule=${rule:-${defaults[4]}}
[[ $start_from == sft || $start_from == last ]] || { echo "error: start_from must be sft or last" >&2; exit 2; }
[[ $prm_from == policy || $prm_from == last ]] || { echo "error: prm_from must be policy or last" >&2; exit 2; }
choose_lengths
choose_sampler
ask=(task="$task" params.max_tokens="$max_tokens" max_failed_share="$max_failed_share" "${task_settings[@]}")
fits sample service_api_caller_v1.py api/vllm/trajectories "${ask[@]}"
fits complete service_api_caller_v1.py api/vllm/completions "${ask[@]}"
fits server service_api_caller_v1.py api/vllm/trajectories
fits cut run_stage.py values/cut_states
fits score run_stage.py prm/score_steps
fits prm trainer_base_ds_mul.py "${reward_exp:-exp/reward/step_values}"
fits build run_stage.py "$build"
fits train trainer_base_ds_mul.py "${exp:-exp/dpo/preference_pairs}" "${chosen_objective[@]}"
evaluator=(client.max_model_len="$max_length")
if ((engines)); then evaluator=("${sampler[@]}"); fi
fits evaluate vllm_inference.py api/vllm/evaluate "${ask[@]}" "${evaluator[@]}"
pass_on sample complete cut prm score server task
recipe "${defaults[1]}" "$policy" "${chosen_objective[@]}" "${train_settings[@]}"
mkdir -p "$run"
first_policy=$policy last_prm=$policy last_other=$policy

for ((round = 0; round < num_rounds; round++)); do
  out=$run/round$round data=$run/round$round/process_rewards round_seed=$((seed * 1000 + round))
  first=$((round * stride)) examples=$run/round$round/examples.jsonl
  declare -A starts=([sft]=$first_policy [last]=$policy) prm_starts=([policy]=$policy [last]=$last_prm)
  declare -A other_starts=([policy]=$policy [last]=$last_other)
  start=${starts[$start_from]} known=()
  printf '\n==== round %d of %d: %s\n' $((round + 1)) "$num_rounds" "$policy" >&2

  if [[ $method == process_dpo ]]; then
    bash scripts/process_rewards.sh task="$task" policy="$policy" run="$out" num_problems="$num_problems" \
      first="$first" num_samples="$num_samples" num_completions="$num_completions" max_tokens="$max_tokens" \
      max_length="$max_length" held_out_share="$held_out_share" seed="$round_seed" exp="$reward_exp" rounds="$run" \
      round="$round" replay_share="$prm_replay" prm_start="${prm_starts[$prm_from]}" \
      folds="$folds" other_start="${other_starts[$prm_from]}" steps="$steps" \
      cut_threshold="$cut_threshold" cuts_per_step="$cuts_per_step" max_failed_share="$max_failed_share" \
      smallest_reliability="$smallest_reliability" deepspeed="$deepspeed" nproc="$nproc" engines="$engines" \
      "${passed[@]}"
    known=(stage.scores="$data/step_scores.jsonl")
    last_prm=$out/prm/model last_other=$out/prm_other/model
  else
    stage sample_trajectories "$python" service_api_caller_v1.py -cn api/vllm/trajectories policy="$policy" \
      output="$data/trajectories.jsonl" seed="$round_seed" requests.first="$first" requests.limit="$num_problems" \
      params.n="$num_samples" "${ask[@]}" "${sampler[@]}" "${sample_settings[@]}"
  fi
  stage "${build##*/}" "$python" run_stage.py -cn "$build" input="$data/trajectories.jsonl" output="$examples" \
    seed="$round_seed" "${known[@]}" "${build_settings[@]}"
  if [[ $method == process_dpo ]]; then
    stage check_pairs "$python" run_stage.py -cn pairs/check_pairs input="$examples" output="$out/examples.check.json" \
      stage.values="$data/step_values.jsonl" "${known[@]}" stage.largest_wrong_share="$largest_wrong_share"
  fi
  stage replay_examples "$python" run_stage.py -cn rounds/replay_rounds input="$examples" output="$out/replayed.jsonl" \
    stage.run_dir="$run" stage.round="$round" stage.file=examples.jsonl stage.kind="$kind" \
    stage.share="$policy_replay" seed="$round_seed"
  train train_policy "${recipe[@]}" output_dir="$out/train" model.path="$start" \
    seed="$round_seed" examples.path="$out/replayed.jsonl" examples.max_length="$max_length" checkpoints.keep=1000
  stage export_checkpoints "$python" run_stage.py -cn training/export_checkpoints output="$out/candidates" \
    stage.run_dir="$out/train" stage.which="$candidates"
  stage evaluate_candidates "$python" vllm_inference.py -cn api/vllm/evaluate policies="$out/candidates/*" \
    output="$out/selection" seed="$seed" requests.split="$split" requests.limit="$num_dev" params.n="$num_dev_samples" \
    params.temperature="$dev_temperature" "${ask[@]}" "${evaluator[@]}" "${evaluate_settings[@]}"
  stage choose_checkpoint "$python" run_stage.py -cn rounds/choose_checkpoint input="$out/selection/policies.json" \
    output="$out/policy" stage.candidates="$out/candidates" stage.rule="$rule" stage.metric="$metric"
  stage record_round "$python" run_stage.py -cn rounds/record_round input="$out/selection/policies.json" \
    output="$out/round.json" stage.folder="$out" stage.round="$round" stage.policy_before="$policy" \
    stage.start="$start" stage.settings="{method: $method, build: $build, exp: ${recipe[1]}, objective: '$objective', start_from: $start_from, \
candidates: $candidates, rule: $rule, prm_from: $prm_from, prm_replay: $prm_replay, policy_replay: $policy_replay}"
  policy=$out/policy
done
echo "the manifest is $run/rounds.json, the last policy $policy" >&2
