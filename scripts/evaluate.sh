#!/usr/bin/env bash
# Evaluate one policy on held-out problems: greedy, mean of samples, majority vote, best of n by the PRM.
#
#   bash scripts/evaluate.sh policy=experiments/quickstart/dpo/model name=dpo run=experiments/quickstart
#
# until=samples   stop before the process reward model is asked: the samples alone
# prompt=NAME     as in scripts/process_rewards.sh
# engines=2       as in scripts/process_rewards.sh
# greedy.*, sample.*, score.*, evaluate.*, server.*   settings of one stage alone: sample.params.temperature=0.7
# max_failed_share=0.02   the share of problems that may be refused (too long, say): they are in no figure, and counted
set -euo pipefail
settings="task policy name run split num_problems num_samples max_tokens max_length seed max_failed_share until engines"
prefixes="greedy sample score evaluate server task"
task=word_arithmetic policy='' name='' run='' split=test num_problems=1000 num_samples=8 max_tokens=''
max_length='' seed=0 max_failed_share=0.02 until='' engines=0
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
[[ -n $policy && -n $name && -n $run ]] || { echo "error: policy=, name= and run= are needed" >&2; exit 2; }
[[ -z $until || $until == samples ]] || { echo "error: until must be samples, got '$until'" >&2; exit 2; }
if [[ $until == samples ]]; then unread "with until=samples" score evaluate; fi
choose_lengths
choose_sampler
out=$run/evaluation/$name
ask=(policy="$policy" task="$task" seed="$seed" requests.split="$split" requests.limit="$num_problems" \
  params.max_tokens="$max_tokens" max_failed_share="$max_failed_share" "${task_settings[@]}" "${sampler[@]}")
fits greedy service_api_caller_v1.py api/vllm/greedy "${ask[@]}"
fits sample service_api_caller_v1.py api/vllm/trajectories "${ask[@]}"
fits server service_api_caller_v1.py api/vllm/trajectories
fits score run_stage.py prm/score_steps
fits evaluate run_stage.py evaluation/evaluate

problems_of "${ask[@]}"
if ((!engines)); then serve "$policy" "$out/server.log" "$max_length" "$out/greedy.jsonl" "$out/samples.jsonl"; fi
stage "greedy_$name" "$python" service_api_caller_v1.py -cn api/vllm/greedy output="$out/greedy.jsonl" "${ask[@]}" \
  "${greedy_settings[@]}"
stage "sample_$name" "$python" service_api_caller_v1.py -cn api/vllm/trajectories output="$out/samples.jsonl" \
  params.n="$num_samples" "${ask[@]}" "${sample_settings[@]}"
end_server
if [[ $until == samples ]]; then exit; fi
stage "score_$name" "$python" run_stage.py -cn prm/score_steps input="$out/samples.jsonl" output="$out/step_scores.jsonl" \
  stage.model="$run/prm/model" "${score_settings[@]}"
stage "evaluate_$name" "$python" run_stage.py -cn evaluation/evaluate input="$out/samples.jsonl" output="$out/evaluation.json" \
  stage.greedy="$out/greedy.jsonl" stage.scores="$out/step_scores.jsonl" "${evaluate_settings[@]}"
