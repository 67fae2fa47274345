"""The engine in the trainer's process: `tests/in_process_engine.py` and a run of main.py, each in a process of its own;
what does not go with it is refused in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rl_cases import read_metrics

from espalier.data.records import BadInput
from espalier.rl.assembly import check_client
from espalier.runtime.entrypoint import BadConfig, compose_config
from espalier.runtime.schemas import RLConfig, SampleConfig
from espalier.sampling.offline_client import OfflineClient
from espalier.sampling.server import VLLMServer

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=ROOT,
                          env=environment, check=False)  # fmt: skip


@pytest.mark.server
def test_the_engine_in_this_process_does_all_that_is_asked_of_it(tiny_policy: Path, tmp_path: Path) -> None:
    done = run("-m", "tests.in_process_engine", str(tiny_policy), str(tmp_path / "engine.log"))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.server
def test_a_run_with_its_engine_in_its_process_follows_the_policy(tiny_policy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run(
        *("main.py", "-cn", "exp/ppo/group_relative_word_arithmetic", "client=in_process_shared_blocks", "server=none"),
        *(f"model.path={tiny_policy}", f"output_dir={run_dir}", "num_iterations=2", "num_problems=8"),
        *("minibatch_size=64", "params.max_tokens=16", "eval_every=2", "num_eval_problems=8"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "delivery reaches all" in done.stderr
    assert "INFO" not in done.stderr
    assert "receive_weights" in (run_dir / "engine.log").read_text()
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert all(0 <= row["engine/canary_gap"] < 0.1 for row in rows if "rollout/reward" in row)
    assert (run_dir / "model" / "model.safetensors").is_file()
    assert not (run_dir / "server.log").exists()


@pytest.mark.parametrize(
    ("is_one_process", "has_server", "has_deepspeed", "num_ranks", "told"),
    [
        (True, True, False, 1, "has its engines itself: set server=none"),
        (False, False, False, 1, "client=offline takes no weights"),
        (True, False, True, 1, "take DeepSpeed's process group for its own"),
        (True, False, False, 2, "beside one rank: several share client=local_engines"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    is_one_process: bool,
    has_server: bool,
    has_deepspeed: bool,
    num_ranks: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    server = VLLMServer("m", "log") if has_server else None
    with pytest.raises(BadConfig, match=told):
        check_client(OfflineClient("m", is_one_process=is_one_process), server, has_deepspeed)


def test_it_goes_alone_and_on_one_device() -> None:
    check_client(OfflineClient("m", is_one_process=True), None)
    two = OfflineClient("m", is_one_process=True, options={"tensor_parallel_size": 2})
    with pytest.raises(BadInput, match=r"client\.options\.tensor_parallel_size: an engine without a server has one"):
        check_client(two, None)


def test_the_window_that_a_run_asks_of_its_server_is_the_engines() -> None:
    here = ["client=in_process", "server=none", "model.path=m", "output_dir=o"]
    asked = compose_config(RLConfig, "exp/ppo/ppo_rho_math", [*here, "critic.model.path=m"])
    assert asked.client["max_model_len"] == asked.server["max_model_len"] > 512
    plain = compose_config(RLConfig, "exp/ppo/group_relative_word_arithmetic", here)
    assert (plain.client["max_model_len"], plain.client["dtype"]) == (512, "bfloat16")
    own = compose_config(RLConfig, "exp/ppo/ppo_rho_math", ["client=local_engines", *here[1:], "critic.model.path=m"])
    assert own.client["max_model_len"] == asked.server["max_model_len"]
    assert own.client["options"]["logprobs_mode"] == "processed_logprobs"
    offline = compose_config(
        SampleConfig, "api/vllm/trajectories_in_process", ["client=local_engines", "policy=m", "output=o"]
    )
    assert offline.client["options"]["logprobs_mode"] == "raw_logprobs"  # as every other client
    assert offline.client["model"] == "m"
