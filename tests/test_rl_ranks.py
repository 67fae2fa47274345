"""Two gloo ranks of a PPO run with a critic equal one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rl_cases import read_metrics
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent


def run(policy: Path, run_dir: Path, num_ranks: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    program = [str(ROOT / "tests" / "rl_ranks.py"), str(policy), str(run_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, *(launcher if num_ranks > 1 else []), *program],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_of_ppo_equal_one(tiny_policy: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        run(tiny_policy, tmp_path / f"{number}", number)
    for folder in ("model", "critic"):
        first, second = (load_file(tmp_path / f"{n}" / folder / "model.safetensors") for n in (1, 2))
        apart = {name: float((first[name] - second[name]).abs().max()) for name in first}
        assert max(apart.values()) < 1e-5, apart
    one, two = read_metrics(tmp_path / "1"), read_metrics(tmp_path / "2")
    assert len(one) == len(two) == 2
    for alone, together in zip(one, two, strict=True):
        assert alone == pytest.approx(together, abs=1e-5)
