"""The engine of `client=data_parallel_engines`: `tests/support/one_process_engine.py` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.server
def test_an_engine_in_one_process_does_all_that_is_asked_of_it(tiny_policy: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [sys.executable, "-m", "tests.support.one_process_engine", str(tiny_policy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
