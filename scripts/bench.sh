#!/usr/bin/env bash
# Run one benchmark, benchmarks/*/NAME.py, write benchmarks/results/NAME.json and with it docs/benchmarks.md.
#
#   bash scripts/bench.sh sampling [throughput] [prefill] [values] [prm] [plan] [--run experiments/quickstart]
#   bash scripts/bench.sh training                 installs TRL into .venv-bench first
#   bash scripts/bench.sh rl [trl] [loop] [--quick]               installs TRL too
#   bash scripts/bench.sh credit [--tune] [--cells C ...] [--methods M ...] [--seeds S ...] --hours H
#   bash scripts/bench.sh credit_oracle [--task NAME] [--policies NAME=FOLDER ...] [--prm FOLDER] [--quick]
#   bash scripts/bench.sh rare_success [--cells C ...] [--seeds S ...] [--policy CELL=MODEL ...]
#   bash scripts/bench.sh reward_models [--sizes N ...] [--seeds S ...]
#   bash scripts/bench.sh implicit_prm [--cells C ...] [--seeds S ...]
#   bash scripts/bench.sh generative_verifiers [--seeds S ...]
#   bash scripts/bench.sh calibration [--arms A ...] [--seeds S ...]
#   bash scripts/bench.sh seeds                    the four above, three seeds each: what is missing of them
#   bash scripts/bench.sh search [accuracy] [speed] [data] [--cells C ...] [--methods M ...] [--seeds S ...] [--problems N]
#   bash scripts/bench.sh cluster [weights] [throughput overlap driver --policy MODEL]   on two Ray nodes
#   bash scripts/bench.sh sizes [memory] [resume] [peers]  planned memory beside what tensors took; checkpoints on fewer
#                                                  ranks; half a billion parameters beside TRL, which is installed
#   bash scripts/bench.sh shares                   what ZeRO-3's ranks hold while networks are loaded, saved, delivered
#   bash scripts/bench.sh loading                  ZeRO-3's ranks that read their parts of weights, and all of them
#   bash scripts/bench.sh silence [packing] [tokens] [doctor] [clean] [defects]
#   bash scripts/bench.sh road                     all sections with their defaults; or one, with its arguments:
#   bash scripts/bench.sh road processbench [--run experiments/quickstart] [--data FOLDER]
#   bash scripts/bench.sh road prm_scoring [exact] [gaps] [speed] [--layouts L ...] [--solutions N] [--rounds N]
#   bash scripts/bench.sh road prm_seeds [--run experiments/quickstart] [--seeds N]
#   bash scripts/bench.sh road streams [examples] [labels] [--examples N N] [--completions N N]
#   bash scripts/bench.sh road trl                 TRL's trainers on the same rows; installs TRL first
#   bash scripts/bench.sh unchanged BEFORE [AFTER]  the same trainings on two commits, bit for bit
#   bash scripts/bench.sh verifiers [--data FOLDER]   rules of verifiers, and hostile programs in the sandbox
#   bash scripts/bench.sh house                    what the code looks like, counted
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
name=${1:-}
if [[ $name == seeds ]]; then
  if [[ $# != 1 ]]; then echo "error: seeds takes no arguments: run one of its benchmarks" >&2; exit 2; fi
  for one in reward_models implicit_prm generative_verifiers calibration; do bash "$0" "$one"; done
  exit 0
fi
files=(benchmarks/*/"$name.py")
if [[ -z $name || ${#files[@]} != 1 || ! -f ${files[0]} ]]; then
  known=$(for file in benchmarks/*/*.py; do
    one=$(basename "$file" .py)
    if grep -q "bash scripts/bench.sh $one\b" "$file"; then echo "$one"; fi
  done | xargs)
  echo "error: there is no benchmark '$name': choose one of $known" >&2
  exit 2
fi
shift
if [[ $name == training || $name == rl || ($name == sizes && ${1:-peers} == peers) ]]; then
  bash scripts/install_bench.sh
fi
module=${files[0]%.py}
"$python" -m "${module//\//.}" "$@"
if [[ " $* " != *" --help "* && " $* " != *" -h "* ]]; then bash scripts/pages.sh benchmarks; fi
