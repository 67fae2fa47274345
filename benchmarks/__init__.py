"""Figures with a command behind each: `bash scripts/bench.sh NAME` writes benchmarks/results/NAME.json."""
