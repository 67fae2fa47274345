#!/usr/bin/env bash
# Run one benchmark of benchmarks/ and write benchmarks/results/NAME.json.
#
#   bash scripts/bench.sh sampling [throughput] [prefill] [values] [prm] [plan] [--run experiments/quickstart]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
name=${1:-}
if [[ -z $name || ! -f benchmarks/$name.py ]]; then
  echo "error: there is no benchmark '$name': choose one of $(cd benchmarks && ls ./*.py | sed 's|./||; s|\.py||' | grep -v -e result -e __init__ -e forked -e perturb -e prefill -e throughput -e recorded -e prm_budget -e plan_error -e hack_batteries -e hostile_answers | xargs)" >&2
  exit 2
fi
shift
exec "$python" -m "benchmarks.$name" "$@"
