#!/usr/bin/env bash
# Break things on purpose and look for damage; writes benchmarks/results/NAME.json.
#
#   bash scripts/faults.sh sampling [--kills 200]     sampling runs: kills, bad servers, a full disk -> faults.json
#   bash scripts/faults.sh kills [--kills 10]         the whole quick start
#   bash scripts/faults.sh rl [--clean 200]           reinforcement learning with a real engine -> rl_faults.json
#   bash scripts/faults.sh training_kills [--kills 50]
#   bash scripts/faults.sh rl_kills [--kills 20]
#   bash scripts/faults.sh cluster [--times 20]       a run on Ray: engines, nodes, learners -> cluster_faults.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:-}
if compgen -G "benchmarks/*/${name}_faults.py" >/dev/null; then set -- "${name}_faults" "${@:2}"; fi
exec bash scripts/bench.sh "$@"
