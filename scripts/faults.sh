#!/usr/bin/env bash
# Break things on purpose and look for damage; writes benchmarks/results/NAME.json.
#
#   bash scripts/faults.sh kills [--kills 10]
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/bench.sh" "$@"
