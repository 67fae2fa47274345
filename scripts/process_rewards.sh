#!/usr/bin/env bash
# Process rewards for any task and policy: sample, cut, complete, value, train the reward model, score.
#
#   bash scripts/process_rewards.sh task=word_arithmetic policy=experiments/quickstart/sft/model run=experiments/mine
#   bash scripts/process_rewards.sh task=gsm8k task.path=FOLDER num_problems=32 policy=... run=...
#
# num_problems=1000, num_samples=8 solutions of each, num_completions=4 of each state; max_tokens= of a response,
#                    max_length= of prompt and response together
# folds=2 (default)  two reward models: $run/prm is trained on all problems but held_out_share (a half), $run/prm_other on
#                    that share; every trajectory is scored by the one that has not seen its problem
# folds=1            one reward model; pairs/process_preferences makes pairs of the held-out problems alone (a tenth)
# steps=cut_points   steps end at tokens sampled with a probability below cut_threshold, after every cuts_per_step of them
# labels=auto     what the reward model learns from: values (of all states), relative (a state is good or not: values,
#                 smoothed, above half of what the problem's prompt is worth), contrast (steps beside the best step from
#                 the same state, along right solutions: where success is rare; not with steps=cut_points or rounds), or
#                 auto: contrast or values, by the share of right trajectories
# smallest_alternative=0.1  labels=contrast: states are completed from which the policy takes another next step with at
#                 least this probability; 0 completes all of them
#                 Under values and relative a reward model is trained on labels of states. Under contrast a policy learns right from
#                 wrong solutions of the same problems, in $run/prm_policy and $run/prm_other_policy: its log-ratio to the
#                 policy before is the reward model (prm/make_log_ratio_reward), whose scale the labels say
# pilot=20        samples that many problems, spread over all, says how many solutions are right, cut or not to be read, with
#                 remedies, and which labels that calls for, and ends; the same command without it keeps them and goes on
# engines=2       samples by so many vLLM engines on GPUs of their own, in place of one server for all stages
# exp=NAME        the experiment that is trained. Without: for a tiny policy the embedded task's own of conf/exp/reward (under
#                 contrast conf/exp/dpo); for others exp/reward/step_values with the preset of the model's size
# deepspeed=zero2 nproc=8   how it is trained: on 8 ranks; deepspeed is chosen by the size where it is not given
# prompt=NAME     another of conf/prompt; by default the tokenizer's chat template where it has one
# sample.*, complete.*, cut.*, prm.*, score.*, server.*   settings of one stage alone: sample.params.temperature=0.7
#                 prm.update.learning_rate=2e-6 prm.lora=lora server.dtype=float32 server.options.max_num_seqs=64
# prm_start=MODEL, other_start=MODEL   not under contrast: what the reward models are trained from, by default the policy
# smallest_reliability=0.2   not under contrast: labels whose reliability is clearly below it end the run before anything is
#                         trained on them (values/label_signal); 0 trains on them anyway
# max_failed_share=0.02   the share of problems, and of states, that may be refused (too long, say): they are listed in
#                         X.failed.jsonl, and left out from there on
# first=N leaves out the first N problems. As part of scripts/iterate.sh: round=K rounds=RUN replay_share=0.1 trains the
# reward model on a share of earlier rounds' values too.
# Safe to run again from the top: finished stages are kept, a broken one goes on where it was.
set -euo pipefail
settings="task policy run num_problems num_samples num_completions max_tokens max_length held_out_share seed exp \
  first rounds round replay_share folds prm_start other_start steps cut_threshold cuts_per_step max_failed_share \
  smallest_reliability labels smallest_alternative deepspeed nproc pilot engines"
prefixes="sample complete cut prm score server task"
task=word_arithmetic policy='' run='' num_problems=1000 num_samples=8 num_completions=4 max_tokens=''
max_length='' held_out_share='' seed=0 exp=''
first=0 rounds='' round=0 replay_share=0.1 folds=2 prm_start='' other_start='' steps=task cut_threshold=0.9 cuts_per_step=1
max_failed_share=0.02 smallest_reliability=0.2 labels=auto smallest_alternative=0.1 deepspeed='' nproc=1
pilot=0 engines=0
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $run ]] || { echo "error: policy=MODEL_FOLDER and run=RUN_DIRECTORY are needed" >&2; exit 2; }
[[ $folds == 1 || $folds == 2 ]] || { echo "error: folds must be 1 or 2, got '$folds'" >&2; exit 2; }
[[ $steps == task || $steps == cut_points ]] || { echo "error: steps must be task or cut_points" >&2; exit 2; }
[[ $labels == auto || $labels == values || $labels == relative || $labels == contrast ]] || {
  echo "error: labels must be auto, values, relative or contrast, got '$labels'" >&2
  exit 2
}
# both read other steps, or other rounds' labels, than those of the task's splitter and of this round
if [[ $labels == contrast && ( $steps == cut_points || -n $rounds ) ]]; then
  echo "error: labels=contrast labels the task's own steps, of one round: leave out steps=cut_points and rounds, or set \
labels=values or labels=relative" >&2
  exit 2
fi
if [[ $labels == auto && ( $steps == cut_points || -n $rounds ) ]]; then labels=values; fi
if [[ $folds == 2 && "${prm_start:+given}" != "${other_start:+given}" ]]; then
  echo "error: give prm_start and other_start, or neither: two reward models of different starts score the two halves" >&2
  exit 2
fi
choose_lengths
choose_sampler
shares=('' 0.1 0.5)
held_out_share=${held_out_share:-${shares[$folds]}}
out=$run/process_rewards
ask=(policy="$policy" task="$task" seed="$seed" params.max_tokens="$max_tokens" \
  max_failed_share="$max_failed_share" "${task_settings[@]}" "${sampler[@]}")
fits sample service_api_caller_v1.py api/vllm/trajectories "${ask[@]}"
fits complete service_api_caller_v1.py api/vllm/completions "${ask[@]}"
fits server service_api_caller_v1.py api/vllm/trajectories
fits cut run_stage.py values/cut_states
fits score run_stage.py prm/score_steps
fits prm trainer_base_ds_mul.py "${exp:-exp/reward/step_values}"
mkdir -p "$out"

sampled=$out/trajectories.jsonl kept=()
if [[ $steps == cut_points ]]; then sampled=$out/sampled.jsonl kept=(params.return_logprobs=true); fi
problems_of "${ask[@]}" "${sample_settings[@]}"
if ((!engines)); then serve "$policy" "$out/server.log" "$max_length" "$sampled" "$out/completions.jsonl"; fi
sampling=("$python" service_api_caller_v1.py -cn api/vllm/trajectories output="$sampled" requests.first="$first" \
  requests.limit="$num_problems" params.n="$num_samples" "${kept[@]}" "${ask[@]}" "${sample_settings[@]}")
if [[ $pilot != 0 ]]; then
  stage pilot "${sampling[@]}" pilot="$pilot"
  if [[ $steps == task ]]; then
    rm -f "$out"/pilot_labels.json "$out"/pilot_labels.meta.json  # of a smaller pilot
    stage foresee_labels "$python" run_stage.py -cn values/choose_labels input="$sampled" output="$out/pilot_labels.json" \
      stage.labels="$labels" stage.of_trajectories=$((num_problems * num_samples))
  fi
  exit 0
fi
stage sample_trajectories "${sampling[@]}" pilot=0
printf '{"task": "%s", "max_length": "%s"}\n' "$task" "$max_length" >"$out/settings.json"  # scripts/preferences.sh goes on by it
if [[ $steps == cut_points ]]; then
  stage split_steps "$python" run_stage.py -cn values/split_steps input="$sampled" output="$out/trajectories.jsonl" \
    stage.policy="$policy" stage.threshold="$cut_threshold" stage.cut_points_per_segment="$cuts_per_step"
fi
stage choose_labels "$python" run_stage.py -cn values/choose_labels input="$out/trajectories.jsonl" \
  output="$out/labels.json" stage.labels="$labels"
labels=$(value_of labels "$out/labels.json")
[[ $labels == values || $labels == relative || $labels == contrast ]] || {
  echo "error: $out/labels.json says no labels: remove it" >&2
  exit 2
}
objective=reward
cut=() estimate=() judged=$out/step_values.jsonl judge=()
if [[ $labels == contrast ]]; then
  # from where the policy is sure of the next step, the next steps that are sampled are all the same
  cut=(stage.solutions=right stage.first_step=0 stage.smallest_alternative="$smallest_alternative" stage.policy="$policy")
  estimate=(stage.estimator=smoothed)
  objective=dpo
  if [[ -n $prm_start$other_start ]]; then
    echo "error: labels=contrast makes its reward models of the policy: leave out prm_start and other_start, or set \
labels=values" >&2
    exit 2
  fi
  for model in "$run"/prm/model "$run"/prm_other/model; do
    if [[ -d $model && ! -f $model/log_ratio_reward.json ]]; then
      echo "error: $model is a reward model with a head, of another recipe: choose another run=, or remove $run/prm, \
$run/prm_other and what was made by them" >&2
      exit 2
    fi
  done
fi
stage cut_states "$python" run_stage.py -cn values/cut_states input="$out/trajectories.jsonl" output="$out/states.jsonl" \
  "${cut[@]}" "${cut_settings[@]}"
stage complete_states "$python" service_api_caller_v1.py -cn api/vllm/completions output="$out/completions.jsonl" \
  requests.states="$out/states.jsonl" params.n="$num_completions" "${ask[@]}" "${complete_settings[@]}"
if [[ $labels == relative ]]; then
  estimate=(stage.estimator=smoothed stage.label=relative stage.threshold=0.5) judge=(stage.target=labels)
fi
free_server
stage estimate_values "$python" run_stage.py -cn values/estimate_values input="$out/completions.jsonl" \
  output="$out/step_values.jsonl" stage.trajectories="$out/trajectories.jsonl" stage.states="$out/states.jsonl" \
  "${estimate[@]}"
values=$out/step_values.jsonl
if [[ $labels == contrast ]]; then
  stage join_completions "$python" run_stage.py -cn values/join_completions input="$out/completions.jsonl" \
    output="$out/solutions.jsonl" stage.states="$out/states.jsonl" stage.policy="$policy" task="$task" "${task_settings[@]}"
  values=$out/labelled_steps.jsonl judged=$out/labelled_steps.jsonl judge=(stage.target=labels)
  stage label_by_contrast "$python" run_stage.py -cn values/label_by_contrast input="$out/solutions.jsonl" \
    output="$values" stage.trajectories="$out/trajectories.jsonl" stage.states="$out/states.jsonl"
else
  stage label_signal "$python" run_stage.py -cn values/label_signal input="$out/step_values.jsonl" \
    output="$out/label_signal.json" stage.smallest_reliability="$smallest_reliability"
fi
if [[ -n $rounds ]]; then
  values=$out/replayed_step_values.jsonl
  stage replay_step_values "$python" run_stage.py -cn rounds/replay_rounds input="$out/step_values.jsonl" output="$values" \
    stage.run_dir="$rounds" stage.round="$round" stage.file=process_rewards/step_values.jsonl stage.kind=StepValues \
    stage.share="$replay_share" seed="$seed"
fi
recipe "$objective" "$policy" "${prm_settings[@]}"
# make_prm NAME PART START [SETTINGS]: a reward model of that part's problems, $run/NAME/model
make_prm() {
  local name=$1 part=$2 start=$3
  shift 3
  if [[ $labels != contrast ]]; then
    train "train_$name" "${recipe[@]}" output_dir="$run/$name" \
      model.path="${start:-$policy}" seed="$seed" examples.path="$values" examples.max_length="$max_length" \
      examples.part="$part" examples.held_out_share="$held_out_share" "$@"
    return
  fi
  stage "build_pairs_of_$name" "$python" run_stage.py -cn pairs/outcome_preferences input="$out/trajectories.jsonl" \
    output="$out/${name}_pairs.jsonl" stage.part="$part" stage.held_out_share="$held_out_share" seed="$seed"
  train "train_${name}_policy" "${recipe[@]}" output_dir="$run/${name}_policy" \
    model.path="$policy" seed="$seed" examples.path="$out/${name}_pairs.jsonl" examples.max_length="$max_length"
  stage "make_$name" "$python" run_stage.py -cn prm/make_log_ratio_reward input="$values" output="$run/$name/model" \
    stage.policy="$run/${name}_policy/model" stage.reference="$policy" stage.part="$part" \
    stage.held_out_share="$held_out_share"
}

make_prm prm train "$prm_start"
scorers=(stage.model="$run/prm/model")
if [[ $folds == 2 ]]; then
  make_prm prm_other held_out "$other_start" eval_examples=null evaluation.every=0
  scorers+=(stage.other_model="$run/prm_other/model")
fi
stage score_steps "$python" run_stage.py -cn prm/score_steps input="$out/trajectories.jsonl" \
  output="$out/step_scores.jsonl" "${scorers[@]}" "${score_settings[@]}"
stage inspect_steps "$python" run_stage.py -cn pages/inspect_steps input="$out/trajectories.jsonl" output="$out/inspect.html" \
  stage.values="$judged" stage.states="$out/states.jsonl" stage.completions="$out/completions.jsonl" \
  stage.scores="$out/step_scores.jsonl"
stage prm_calibration "$python" run_stage.py -cn prm/prm_calibration input="$judged" output="$out/prm.json" \
  stage.scores="$out/step_scores.jsonl" stage.held_out_share="$held_out_share" "${judge[@]}"
