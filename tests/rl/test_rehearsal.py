"""A whole run over nodes, as a cluster would have it: PPO with a critic, two ranks with ZeRO-2 and two vLLM engines on
two Ray nodes (raylets of this machine), one version ahead; a rank is killed, then all of it, and it goes on again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.runtime.process_lifetime import is_running

ROOT = Path(__file__).resolve().parent.parent.parent
ITERATIONS = 12


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A head without room, and two nodes with room for a rank and an engine each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=2)
    yield made
    made.shutdown()


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row for row in rows if "rollout/reward" in row]


def processes_of(run: Path) -> dict[int, str]:
    """Return rank ("" of the launcher) of every process that this run's command started, by its number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"output_dir={run}" in command:
            ranks = [word.removeprefix("RANK=") for word in variables if word.startswith("RANK=")]
            found[int(folder.name)] = "".join(ranks)
    return found


def wait_for(what: Callable[[], Any], process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(1500)
def test_a_run_on_two_nodes_comes_back_by_itself_and_when_it_is_started_again(
    nodes: Any, tiny_policy: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    command = [
        sys.executable, "main.py", "-cn", "rl", f"model.path={tiny_policy}", "advantage=gae", "critic=policy",
        "deepspeed=zero2", "server=none", "client=ray_engines", f"client.address={nodes.address}",
        "client.placement=STRICT_SPREAD", "launcher=ray", f"launcher.address={nodes.address}", "launcher.num_ranks=2",
        "launcher.placement=STRICT_SPREAD", "rollout.max_staleness=1", "task.num_train=200", "task.num_dev=20",
        "task.num_test=20", "task.num_demonstrations=200", "params.max_tokens=16", f"num_iterations={ITERATIONS}",
        "rollout.num_problems=4", "rollout.group_size=4", "update.minibatch_size=8", "update.micro_batch_size=4",
        "update.learning_rate=1e-4", "checkpoints.save_every=2", f"output_dir={run}",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)

    process = start()
    wait_for(lambda: len(rows_of(run)) >= 3, process, log)
    (rank,) = [number for number, found in processes_of(run).items() if found == "1"]
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: "started again" in log.read_text(), process, log)
    wait_for(lambda: len(rows_of(run)) >= 7, process, log)
    started = processes_of(run)
    process.kill()
    end = time.monotonic() + 60
    while any(map(is_running, started)):
        assert time.monotonic() < end, f"of {started} some are left"
        time.sleep(0.1)
    assert start().wait(600) == 0, log.read_text()[-3000:]
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(1, ITERATIONS + 1))
    for row in rows:
        trained = sum(value for name, value in row.items() if name.startswith("ledger/trained_age_"))
        assert trained + row["ledger/filtered"] == row["rollout/drawn_tokens"]
        assert row["engine/serving"] == 2
    assert list((run / "model").glob("*.safetensors"))
    assert list((run / "critic").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", ["data_parallel_engines", "ray_engines"])
def test_every_worker_of_a_tensor_parallel_engine_takes_its_part_of_the_policy(
    client: str, tiny_policy: Path, tmp_path: Path
) -> None:
    """An engine of two workers, one version ahead: neither the proof at the start nor the fixed responses of every
    delivery find a part that stays behind. No answer is right: it is the entropy's bonus that moves the policy."""
    run, log = tmp_path / "run", tmp_path / "log"
    command = [
        sys.executable, "main.py", "-cn", "rl", f"model.path={tiny_policy}", "server=none", f"client={client}",
        "client.num_engines=1", "+client.options.tensor_parallel_size=2", "rollout.max_staleness=1",
        "task.num_train=200", "task.num_dev=20", "task.num_test=20", "task.num_demonstrations=200",
        "params.max_tokens=16", "num_iterations=3", "rollout.num_problems=4", "rollout.group_size=4",
        "update.minibatch_size=8", "update.learning_rate=1e-3", "update.warmup_steps=0",
        "update.entropy_bonus=1", "evaluation.every=0", f"output_dir={run}",
        *(["client.cpus_each=2"] if client == "ray_engines" else []),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("wb") as file:
        code = subprocess.run(
            command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file, timeout=500
        ).returncode
    assert code == 0, log.read_text()[-3000:]
    assert "delivery reaches all" in log.read_text()
    (engine_log,) = run.glob("engine*.log")
    assert "world_size=2" in engine_log.read_text()
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["engine/policy_moved"] > 0.001 for row in rows)
    gaps = [row["engine/canary_gap"] for row in rows if "engine/canary_gap" in row]
    assert len(gaps) >= 2
    assert max(gaps) < 0.005
