#!/usr/bin/env bash
# Step scorers on judged solutions, samples and preference pairs: scores, every evaluation, and one page of all of it,
# RUN/scorers.html.
#
#   bash scripts/prm_benchmark.sh prm=peiyi9979/math-shepherd-mistral-7b-prm file=processbench/gsm8k.json run=RUN
#   bash scripts/prm_benchmark.sh prm=experiments/quickstart/prm/model,RANDOM task=word_arithmetic file=F run=RUN
#   bash scripts/prm_benchmark.sh prm=Qwen/Qwen2.5-Math-PRM-7B,ORM read_as=auto,whole pairs=pairs.jsonl run=RUN
#
# prm=A,B      folders or hub names, a column each; their files are in RUN/1, RUN/2, ...
# read_as=auto  how a model reads a solution: the row of models/published/table.py that its name or config says; a row's
#              name; tokens or task, for a model that was trained here (task: behind the prompt of task=NAME); whole, for
#              an outcome reward model, which reads responses of pairs= and samples= as a whole; A,B: one for each model
# file=, format=processbench  judged solutions: prm800k, math_shepherd, math_aps, processbench, prmbench, bigbench_mistake,
#              trl; they give first errors, step scores, pairs, AUC of inner and last steps, calibration
#              file= and pairs= are files of JSON lines, JSON or Parquet, folders of Parquet files, or names of data sets
#              of the hub: file=Qwen/ProcessBench import.stage.split=gsm8k, pairs=OWNER/NAME compare.stage.split=test
# threshold=null  a number in [0, 1], or null: chosen on tune_share of the problems
# samples=     trajectories of task=NAME split=SPLIT, several per problem: best of n and votes by the scores
# pairs=, pairs_format=pairs  preferences: rows of prompt, chosen, rejected (texts, or lists of messages; UltraFeedback;
#              our own PreferencePair), or reward_bench, llmbar: pair accuracy; steps are lines, split.stage.by=paragraphs
# step_values=  values of the same trajectories: calibration against them
# import.*, compare.*, split.*, score.*, whole.*, evaluate.*, choose.*, calibrate.*   settings of one stage alone: imports of
#              file and pairs, steps of pairs, scores of steps and of whole responses, evaluations
# engines=0    by so many vLLM engines, for solutions of at most max_length tokens; 0: by transformers
set -euo pipefail
settings="prm file run format read_as task split threshold tune_share batch_tokens samples step_values held_out_share
  engines max_length pairs pairs_format"
prefixes="import compare split score whole evaluate choose calibrate task"
prm='' file='' run='' format=processbench read_as=auto task='' split=test threshold=null tune_share=0.2
batch_tokens=16384 samples='' step_values='' held_out_share=1.0 engines=0 max_length=4096
pairs='' pairs_format=pairs
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
if [[ -z $prm || -z $run || -z $file$samples$pairs ]]; then
  echo "error: prm=, run=, and file=, samples= or pairs= are needed" >&2
  exit 2
fi
[[ -z $step_values || -n $samples ]] || { echo "error: step_values= are read with samples=: give these too" >&2; exit 2; }
IFS=, read -ra models <<<"$prm"
IFS=, read -ra ways <<<"$read_as"
if ((${#ways[@]} == 1)); then
  for ((place = 1; place < ${#models[@]}; place++)); do ways+=("$read_as"); done
elif ((${#ways[@]} != ${#models[@]})); then
  echo "error: read_as= names ${#ways[@]} layouts for ${#models[@]} models: give one for all, or one for each" >&2
  exit 2
fi
if [[ ,$read_as, == *,whole,* && -z $pairs$samples ]]; then
  echo "error: read_as=whole scores responses and no steps: give pairs= or samples=" >&2
  exit 2
fi
if [[ -z $file ]]; then unread "without file=" import; fi
if [[ -z $file$pairs ]]; then unread "without file= or pairs=" evaluate; fi
if [[ -z $pairs ]]; then unread "without pairs=" compare split; fi
if [[ $read_as == whole ]]; then unread "with read_as=whole" split; fi
if [[ $read_as == whole && -z $samples ]]; then unread "with read_as=whole and without samples=" score task; fi
if [[ ,$read_as, != *,whole,* || -z $pairs ]]; then unread "without read_as=whole and pairs=" whole; fi
if [[ -z $samples ]]; then unread "without samples=" choose calibrate; fi
if [[ -z $step_values ]]; then unread "without step_values=" calibrate; fi
fits import run_stage.py prm/import_steps
fits compare run_stage.py evaluation/import_comparisons
fits split run_stage.py prm/split_responses
fits score run_stage.py prm/score_steps
fits whole run_stage.py evaluation/score_responses
fits evaluate run_stage.py prm/evaluate_prm_benchmarks
fits choose run_stage.py evaluation/evaluate
fits calibrate run_stage.py prm/prm_calibration
mkdir -p "$run"
# read_from SOURCE: $source, the arguments of an import that reads this file, folder or data set of the hub
read_from() {
  if [[ -d $1 || ( ! -e $1 && $1 =~ ^[^/.]+/[^/]+$ && ! $1 =~ \.(jsonl?|parquet|gz)$ ) ]]; then
    source=(input= stage.hub="$1")
  else
    source=(input="$1")
  fi
}
if [[ -n $file ]]; then
  read_from "$file"
  stage import "$python" run_stage.py -cn prm/import_steps "${source[@]}" output="$run/solutions.jsonl" \
    stage.format="$format" "${import_settings[@]}"
fi
if [[ -n $pairs ]]; then
  read_from "$pairs"
  stage compare "$python" run_stage.py -cn evaluation/import_comparisons "${source[@]}" output="$run/pairs.jsonl" \
    stage.layout="$pairs_format" "${compare_settings[@]}"
  if [[ $read_as != whole ]]; then
    stage split "$python" run_stage.py -cn prm/split_responses input="$run/pairs.jsonl" \
      output="$run/pair_solutions.jsonl" "${split_settings[@]}"
  fi
fi
folders=()
for one in "${models[@]}"; do
  way=${ways[${#folders[@]}]} own=$run/$((${#folders[@]} + 1))
  folders+=("$own")
  how=(stage.model="$one" stage.layout="$way" stage.split="$split" stage.batch_tokens="$batch_tokens")
  if [[ -n $task ]]; then how+=(task="$task"); fi
  by=()
  if ((engines)); then
    by=(client=data_parallel_engines client.num_engines="$engines" client.max_model_len="$max_length")
  fi
  how+=("${by[@]}")
  if [[ -n $pairs && $way == whole ]]; then
    stage "score_pairs_$one" "$python" run_stage.py -cn evaluation/score_responses input="$run/pairs.jsonl" \
      output="$own/response_scores.jsonl" stage.model="$one" stage.batch_tokens="$batch_tokens" "${by[@]}" \
      "${whole_settings[@]}"
    stage "evaluate_pairs_$one" "$python" run_stage.py -cn evaluation/evaluate_reward_model input="$run/pairs.jsonl" \
      output="$own/pairs.json" stage.scores="$own/response_scores.jsonl"
  fi
  if [[ -n $file && $way != whole ]]; then
    stage "score_$one" "$python" run_stage.py -cn prm/score_steps input="$run/solutions.jsonl" \
      output="$own/step_scores.jsonl" "${how[@]}" "${task_settings[@]}" "${score_settings[@]}"
    stage "evaluate_$one" "$python" run_stage.py -cn prm/evaluate_prm_benchmarks input="$run/solutions.jsonl" \
      output="$own/prm_benchmark.json" stage.scores="$own/step_scores.jsonl" stage.threshold="$threshold" \
      stage.tune_share="$tune_share" "${evaluate_settings[@]}"
  fi
  if [[ -n $pairs && $way != whole ]]; then
    stage "score_pairs_$one" "$python" run_stage.py -cn prm/score_steps input="$run/pair_solutions.jsonl" \
      output="$own/pair_scores.jsonl" "${how[@]}" "${task_settings[@]}" "${score_settings[@]}"
    stage "evaluate_pairs_$one" "$python" run_stage.py -cn prm/evaluate_prm_benchmarks \
      input="$run/pair_solutions.jsonl" output="$own/pairs.json" stage.scores="$own/pair_scores.jsonl" \
      "${evaluate_settings[@]}"
  fi
  if [[ -n $samples ]]; then
    stage "score_samples_$one" "$python" run_stage.py -cn prm/score_steps input="$samples" \
      output="$own/sample_scores.jsonl" "${how[@]}" "${task_settings[@]}" "${score_settings[@]}"
    stage "choose_$one" "$python" run_stage.py -cn evaluation/evaluate input="$samples" output="$own/evaluation.json" \
      stage.scores="$own/sample_scores.jsonl" "${choose_settings[@]}"
  fi
  if [[ -n $samples && -n $step_values && $way != whole ]]; then
    stage "calibrate_$one" "$python" run_stage.py -cn prm/prm_calibration input="$step_values" output="$own/prm.json" \
      stage.scores="$own/sample_scores.jsonl" stage.held_out_share="$held_out_share" \
      "${calibrate_settings[@]}"
  fi
done
stage show "$python" run_stage.py -cn pages/show_scorers output="$run/scorers.html" \
  stage.folders="[$(IFS=,; echo "${folders[*]}")]"
echo "$run/scorers.html"
