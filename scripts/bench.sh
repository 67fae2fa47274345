#!/usr/bin/env bash
# Run one benchmark of benchmarks/, write benchmarks/results/NAME.json and with it docs/benchmarks.md.
#
#   bash scripts/bench.sh sampling [throughput] [prefill] [values] [prm] [plan] [--run experiments/quickstart]
#   bash scripts/bench.sh training                 installs TRL into .venv-bench first
#   bash scripts/bench.sh rl [trl] [loop] [credit] [--quick]       installs TRL too
#   bash scripts/bench.sh silence [packing] [tokens] [doctor] [clean] [defects]
#   bash scripts/bench.sh unchanged BEFORE [AFTER]  the same trainings on two commits, bit for bit
#   bash scripts/bench.sh house                    what the code looks like, counted
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
name=${1:-}
if [[ -z $name || ! -f benchmarks/$name.py ]]; then
  echo "error: there is no benchmark '$name': choose one of $(cd benchmarks && for file in *.py; do grep -q "bash scripts/bench.sh ${file%.py}\b" "$file" && echo "${file%.py}"; done | xargs)" >&2
  exit 2
fi
shift
if [[ $name == training || $name == rl ]]; then bash scripts/install_bench.sh; fi
"$python" -m "benchmarks.$name" "$@"
bash scripts/pages.sh benchmarks
