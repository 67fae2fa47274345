#!/usr/bin/env bash
# Evaluate one policy on held-out problems: greedy, mean of samples, majority vote, best of n by the PRM.
#
#   bash scripts/evaluate.sh policy=experiments/quickstart/dpo/model name=dpo run=experiments/quickstart
#
# max_failed_share=0.02   the share of problems that may be refused (too long, say): they are in no figure, and counted
set -euo pipefail
settings="task policy name run split num_problems num_samples max_tokens max_length seed max_failed_share"
task=word_arithmetic policy='' name='' run='' split=test num_problems=1000 num_samples=8 max_tokens=128
max_length=512 seed=0 max_failed_share=0.02
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $name && -n $run ]] || { echo "error: policy=, name= and run= are needed" >&2; exit 2; }
out=$run/evaluation/$name
ask=(policy="$policy" task="$task" seed="$seed" requests.split="$split" requests.limit="$num_problems" \
  params.max_tokens="$max_tokens" server.max_model_len="$max_length" \
  max_failed_share="$max_failed_share" "${extra[@]}")

serve "$policy" "$out/server.log" "$max_length" "$out/greedy.jsonl" "$out/samples.jsonl"
stage "greedy_$name" "$python" service_api_caller_v1.py -cn api/vllm/greedy output="$out/greedy.jsonl" "${ask[@]}"
stage "sample_$name" "$python" service_api_caller_v1.py -cn api/vllm/trajectories output="$out/samples.jsonl" \
  params.n="$num_samples" "${ask[@]}"
end_server
stage "score_$name" "$python" run_stage.py -cn prm/score_steps input="$out/samples.jsonl" output="$out/step_scores.jsonl" \
  stage.model="$run/prm/model"
stage "evaluate_$name" "$python" run_stage.py -cn evaluation/evaluate input="$out/samples.jsonl" output="$out/evaluation.json" \
  stage.greedy="$out/greedy.jsonl" stage.scores="$out/step_scores.jsonl"
