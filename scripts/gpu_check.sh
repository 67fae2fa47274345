#!/usr/bin/env bash
# Everything that only a GPU can show, under 10 minutes per part: attention kernels, the fused head, training speed and
# MFU of a 1B shape (beside TRL where scripts/install_bench.sh has installed it), a large vocabulary and long rows, PRM
# scoring, delivery of weights, RL on one GPU with sleep.
#
#   bash scripts/gpu_check.sh [--rehearse] [--output FOLDER] [--seconds N] \
#       [attention] [head] [training] [checkpoint] [large] [scoring] [delivery] [rl_smoke]
#
# Writes FOLDER/<part>.json and FOLDER/table.md (FOLDER: experiments/gpu_check), and with a GPU docs/benchmarks.md. On a
# machine without one every part runs the same code on the CPU with small shapes, and the table says that it is no figure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
code=0
"$python" -m benchmarks.gpu.gpu_check "$@" || code=$?
if [[ -f benchmarks/results/gpu_check.json ]]; then bash scripts/pages.sh benchmarks; fi
exit "$code"
