"""Offline stages, each a pure function on records; run_stage.py runs one."""
