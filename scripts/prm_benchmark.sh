#!/usr/bin/env bash
# A process reward model on a published file of judged steps: import, score, table, beside the step's index alone.
#
#   bash scripts/prm_benchmark.sh prm=peiyi9979/math-shepherd-mistral-7b-prm file=processbench/gsm8k.json run=RUN
#   bash scripts/prm_benchmark.sh prm=experiments/quickstart/prm/model read_as=task task=word_arithmetic file=F run=RUN
#
# read_as=auto  how the model reads a solution: the row of models/published/table.py that its name or config says; a row's
#              name; or task, for a model that was trained here, behind the prompt of task=NAME
# format=processbench  of the file: prm800k, math_shepherd, math_aps, processbench, prmbench, bigbench_mistake, trl
# import.*, score.*, evaluate.*   settings of one stage alone
# threshold=null  a number in [0, 1], or null: chosen on tune_share of the problems
set -euo pipefail
settings="prm file run format read_as task threshold tune_share batch_tokens"
prefixes="import score evaluate"
prm='' file='' run='' format=processbench read_as=auto task=null threshold=null tune_share=0.2 batch_tokens=16384
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $prm && -n $file && -n $run ]] || { echo "error: prm=, file= and run= are needed" >&2; exit 2; }
fits import run_stage.py prm/import_steps
fits score run_stage.py prm/score_solutions
fits evaluate run_stage.py prm/evaluate_prm_benchmarks
mkdir -p "$run"
stage import "$python" run_stage.py -cn prm/import_steps input="$file" output="$run/solutions.jsonl" stage.format="$format" "${import_settings[@]}"
stage score "$python" run_stage.py -cn prm/score_solutions input="$run/solutions.jsonl" output="$run/step_scores.jsonl" \
  task="$task" stage.model="$prm" stage.layout="$read_as" stage.batch_tokens="$batch_tokens" "${extra[@]}" "${score_settings[@]}"
stage evaluate "$python" run_stage.py -cn prm/evaluate_prm_benchmarks input="$run/solutions.jsonl" \
  output="$run/prm_benchmark.json" stage.scores="$run/step_scores.jsonl" stage.threshold="$threshold" \
  stage.tune_share="$tune_share" "${evaluate_settings[@]}"
