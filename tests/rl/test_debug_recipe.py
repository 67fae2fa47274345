"""The rehearsal of the large runs, as docs/scaling.md has it: Ray, one learner with ZeRO-3, one real engine, PPO with a
critic, one version ahead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rl_cases import read_metrics

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(700)
def test_the_rehearsal_runs_to_its_end_one_version_ahead(tiny_policy: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "main.py", "-cn", "exp/debug/ppo/tulu", f"model.path={tiny_policy}",
               "model.attention=eager", f"output_dir={tmp_path}/run"]  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [row for row in read_metrics(tmp_path / "run") if "rollout/reward" in row]
    assert [row["engine/version_lag"] for row in rows] == [0, *[1] * 7]
    assert [row["rollout/num_groups"] for row in rows] == [4] * 8
    for row in rows:
        assert row["kl/net_reward"] == pytest.approx(row["rollout/reward"] + row["kl/penalty_in_reward"], abs=1e-5)
        assert row["update/loss"] == pytest.approx(row["update/surrogate_loss"] + 0.1 * row["update/value_loss"])
    assert {"model", "critic"} <= {folder.name for folder in (tmp_path / "run").iterdir()}
