#!/usr/bin/env bash
# From a fresh clone to a better reasoner: installs, then teaches a tiny policy, measures its steps, trains a
# process reward model and two DPO policies, evaluates all three, and writes experiments/quickstart/report.html.
#
#   bash scripts/quickstart.sh [seed=0] [run=experiments/quickstart]
#
# Safe to run again from the top after anything: finished stages are kept.
set -euo pipefail
settings="run seed"
run=experiments/quickstart seed=0
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
read_settings "$@"
mkdir -p "$run"
common=(run="$run" seed="$seed")
sft=$run/sft/model

stage make_demonstrations "$python" run_stage.py -cn make_demonstrations output="$run/demonstrations.jsonl"
stage make_policy "$python" run_stage.py -cn make_policy input="$run/demonstrations.jsonl" output="$run/base" seed="$seed"
stage train_sft "$python" trainer_base_ds_mul.py -cn exp/sft/word_arithmetic output_dir="$run/sft" \
  model.path="$run/base" examples.path="$run/demonstrations.jsonl" seed="$seed"
bash scripts/process_rewards.sh policy="$sft" "${common[@]}"
bash scripts/step_dpo.sh pairs=outcome policy="$sft" "${common[@]}"
bash scripts/step_dpo.sh pairs=process policy="$sft" "${common[@]}"
for name in sft dpo process_dpo; do
  bash scripts/evaluate.sh name="$name" policy="$run/$name/model" "${common[@]}"
done
stage report "$python" run_stage.py -cn report output="$run/report.html" stage.run_dir="$run"
echo "the report is $run/report.html" >&2
