#!/usr/bin/env bash
# Step scorers on judged solutions and on samples: scores, every evaluation, and one page of all of it, RUN/scorers.html.
#
#   bash scripts/prm_benchmark.sh prm=peiyi9979/math-shepherd-mistral-7b-prm file=processbench/gsm8k.json run=RUN
#   bash scripts/prm_benchmark.sh prm=experiments/quickstart/prm/model,RANDOM task=word_arithmetic file=F run=RUN
#
# prm=A,B      folders or hub names, a column each; their files are in RUN/1, RUN/2, ...
# read_as=auto  how a model reads a solution: the row of models/published/table.py that its name or config says; a row's
#              name; tokens or task, for a model that was trained here (task: behind the prompt of task=NAME)
# file=, format=processbench  judged solutions: prm800k, math_shepherd, math_aps, processbench, prmbench, bigbench_mistake,
#              trl; they give first errors, step scores, pairs, AUC of inner and last steps, calibration
# threshold=null  a number in [0, 1], or null: chosen on tune_share of the problems
# samples=     trajectories of task=NAME split=SPLIT, several per problem: best of n and votes by the scores
# step_values=  values of the same trajectories: calibration against them
# import.*, score.*, evaluate.*, choose.*, calibrate.*   settings of one stage alone
# engines=0    by so many vLLM engines, for solutions of at most max_length tokens; 0: by transformers
set -euo pipefail
settings="prm file run format read_as task split threshold tune_share batch_tokens samples step_values held_out_share
  engines max_length"
prefixes="import score evaluate choose calibrate"
prm='' file='' run='' format=processbench read_as=auto task='' split=test threshold=null tune_share=0.2
batch_tokens=16384 samples='' step_values='' held_out_share=1.0 engines=0 max_length=4096
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $prm && -n $run && -n $file$samples ]] || { echo "error: prm=, run=, and file= or samples= are needed" >&2; exit 2; }
[[ -z $step_values || -n $samples ]] || { echo "error: step_values= are read with samples=: give these too" >&2; exit 2; }
if [[ -z $file ]]; then unread "without file=" import evaluate; fi
if [[ -z $samples ]]; then unread "without samples=" choose calibrate; fi
if [[ -z $step_values ]]; then unread "without step_values=" calibrate; fi
fits import run_stage.py prm/import_steps
fits score run_stage.py prm/score_steps
fits evaluate run_stage.py prm/evaluate_prm_benchmarks
fits choose run_stage.py evaluation/evaluate
fits calibrate run_stage.py prm/prm_calibration
mkdir -p "$run"
if [[ -n $file ]]; then
  stage import "$python" run_stage.py -cn prm/import_steps input="$file" output="$run/solutions.jsonl" \
    stage.format="$format" "${import_settings[@]}"
fi
IFS=, read -ra models <<<"$prm"
folders=()
for one in "${models[@]}"; do
  own=$run/$((${#folders[@]} + 1))
  folders+=("$own")
  how=(stage.model="$one" stage.layout="$read_as" stage.split="$split" stage.batch_tokens="$batch_tokens")
  if [[ -n $task ]]; then how+=(task="$task"); fi
  if ((engines)); then
    how+=(client=data_parallel_engines client.num_engines="$engines" client.max_model_len="$max_length")
  fi
  if [[ -n $file ]]; then
    stage "score_$one" "$python" run_stage.py -cn prm/score_steps input="$run/solutions.jsonl" \
      output="$own/step_scores.jsonl" "${how[@]}" "${extra[@]}" "${score_settings[@]}"
    stage "evaluate_$one" "$python" run_stage.py -cn prm/evaluate_prm_benchmarks input="$run/solutions.jsonl" \
      output="$own/prm_benchmark.json" stage.scores="$own/step_scores.jsonl" stage.threshold="$threshold" \
      stage.tune_share="$tune_share" "${evaluate_settings[@]}"
  fi
  if [[ -n $samples ]]; then
    stage "score_samples_$one" "$python" run_stage.py -cn prm/score_steps input="$samples" \
      output="$own/sample_scores.jsonl" "${how[@]}" "${extra[@]}" "${score_settings[@]}"
    stage "choose_$one" "$python" run_stage.py -cn evaluation/evaluate input="$samples" output="$own/evaluation.json" \
      stage.scores="$own/sample_scores.jsonl" "${choose_settings[@]}"
  fi
  if [[ -n $samples && -n $step_values ]]; then
    stage "calibrate_$one" "$python" run_stage.py -cn prm/prm_calibration input="$step_values" output="$own/prm.json" \
      stage.scores="$own/sample_scores.jsonl" stage.held_out_share="$held_out_share" \
      "${calibrate_settings[@]}"
  fi
done
stage show "$python" run_stage.py -cn pages/show_scorers output="$run/scorers.html" \
  stage.folders="[$(IFS=,; echo "${folders[*]}")]"
echo "$run/scorers.html"
