"""Processes that benchmarks and tests start: servers in vLLM's place, forked programs, kills, sides that take turns."""
