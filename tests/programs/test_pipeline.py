"""The quick start in miniature, as its users run it, with real vLLM servers; a chat API; prompts that are refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.forked import exit_code, start_program
from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import read_records
from espalier.data.records import Completion, PreferencePair, State, StepScores, StepValues, Trajectory

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["task.num_train=64", "task.num_demonstrations=2000", "task.max_total=12", "task.num_test=8", "task.num_dev=8"]
POLICIES = ("sft", "dpo", "process_dpo")


def run(*words: str, code: int = 0) -> str:
    """Run a command from the repository root, with one thread: another test runs beside it; its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_quick_start_runs_end_to_end_and_again_for_nothing(tmp_path: Path) -> None:
    """In miniature: every stage by its own program, three vLLM servers, a policy that is right now and then. What runs
    again is one script of each kind: samplers, stages and trainings, with what the quick start gives them."""
    run_dir = tmp_path / "run"
    words = ["bash", "scripts/quickstart.sh", f"run={run_dir}", "configs=exp/debug", "num_problems=8", "num_test=8"]
    printed = run(*words, *SMALL)
    assert printed.rstrip().endswith(f"the report is {run_dir}/report.html")

    data = run_dir / "process_rewards"
    trajectories = read_records(Trajectory, data / "trajectories.jsonl")
    states = {state.id: state for state in read_records(State, data / "states.jsonl")}
    completions = read_records(Completion, data / "completions.jsonl")
    values = read_records(StepValues, data / "step_values.jsonl")
    scores = read_records(StepScores, data / "step_scores.jsonl")
    assert len(trajectories) == 8 * 8
    assert len(completions) == 4 * len(states)
    assert [row.id for row in values] == [row.id for row in scores] == [row.id for row in trajectories]
    by_state: dict[str, list[bool]] = {}
    for completion in completions:
        by_state.setdefault(completion.state_id, []).append(completion.is_correct)
    first = next(row for row in values if f"{row.id}#1" in states)
    assert first.values[0] == sum(by_state[f"{first.id}#1"]) / 4
    assert f"{len(trajectories)} trajectories and {len(completions)} completions" in (data / "inspect.html").read_text()
    for name in ("outcome", "process"):
        assert read_records(PreferencePair, run_dir / "pairs" / f"{name}.jsonl")

    summary = json.loads((run_dir / "summary.json").read_text())
    assert tuple(summary["accuracy"]) == POLICIES
    for name in POLICIES:
        evaluation, accuracy = run_dir / "evaluation" / name, summary["accuracy"][name]
        for figure, file, number in (("greedy", "greedy", 1), ("mean", "samples", 8)):
            graded = [row.is_correct for row in read_records(Trajectory, evaluation / f"{file}.jsonl")]
            assert len(graded) == 8 * number
            assert accuracy[figure]["mean"] == pytest.approx(sum(graded) / len(graded), abs=1e-5)
    page = re.sub(r"<[^>]+>", " ", (run_dir / "report.html").read_text())
    means = [f"{100 * summary['accuracy'][name]['mean']['mean']:.1f}" for name in POLICIES]
    assert re.search(r"mean of samples\s+" + r"\s+\[[^]]*\]\s+".join(map(re.escape, means)), page)
    stages = [json.loads(line) for line in (run_dir / "seconds.jsonl").read_text().splitlines()]
    assert {row["exit_code"] for row in stages} == {0}
    assert [line for line in printed.splitlines() if line.startswith("== serve ")] == [
        f"== serve {run_dir}/{name}/model" for name in POLICIES
    ]

    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*.jsonl") if path.name != "seconds.jsonl"}
    common = ["task=word_arithmetic", f"run={run_dir}", "seed=0"]
    run("bash", "scripts/process_rewards.sh", f"policy={run_dir}/sft/model", "num_problems=8", "max_tokens=128",
        "exp=exp/debug/reward/word_arithmetic", *common, *SMALL)  # fmt: skip
    run("bash", "scripts/preferences.sh", "pairs=process", f"policy={run_dir}/sft/model",
        "exp=exp/debug/dpo/word_arithmetic", *common)  # fmt: skip
    again = run("bash", "scripts/evaluate.sh", "name=dpo", f"policy={run_dir}/dpo/model", "num_problems=8",
                "max_tokens=128", *common, *SMALL)  # fmt: skip
    assert "== serve" not in again
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*.jsonl") if path.name != "seconds.jsonl"}
    assert before == after

    weights = run_dir / "process_dpo" / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    words = ["bash", "scripts/evaluate.sh", "name=process_dpo", f"run={run_dir}", f"policy={weights.parent}"]
    assert f"its input {weights.parent} has changed" in run(*words, "num_problems=8", *SMALL, code=2)


SERVED = """
source scripts/environment.sh
python={fake}
serve M {folder}/server.log 512 {folder}/a.jsonl
bash -c 'echo "stages ask ${{ESPALIER_SERVER:-none}}"'
first=${{server:-}}
end_server
if [[ -n $first ]] && kill -0 $first 2>/dev/null; then echo "left behind"; fi
echo "then ${{ESPALIER_SERVER:-none}}"
"""


@pytest.mark.parametrize(("fake", "code", "said"), [
    ("echo http://127.0.0.1:7; exec sleep 60", 0, ["stages ask http://127.0.0.1:7", "then none"]),
    ("echo 'error: no such model folder' >&2; exit 2", 2, ["error: no such model folder"]),
    ("exit 0", 3, []),
])  # fmt: skip
def test_a_script_has_one_server_for_its_stages_and_ends_with_it(
    fake: str, code: int, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "fake.sh").write_text(f"#!/usr/bin/env bash\n{fake}\n")
    (tmp_path / "fake.sh").chmod(0o755)
    script = SERVED.format(fake=tmp_path / "fake.sh", folder=tmp_path)
    printed = run("bash", "-c", f"set -euo pipefail; {script}", code=code)
    assert [line for line in printed.splitlines() if line and not line.startswith("== serve")] == said


def test_where_everything_is_sampled_or_a_server_is_named_no_server_is_started(tmp_path: Path) -> None:
    script = "set -euo pipefail; " + SERVED.format(fake="/bin/false", folder=tmp_path)
    (tmp_path / "a.meta.json").write_text('{\n "is_complete": true\n}')
    assert run("bash", "-c", script).split("\n")[:2] == ["stages ask none", "then none"]
    (tmp_path / "a.meta.json").write_text('{\n "is_complete": false\n}')
    assert "stages ask http://x" in run("env", "ESPALIER_SERVER=http://x", "bash", "-c", script)
    run("bash", "-c", script, code=1)


@pytest.mark.server
def test_the_chat_caller_asks_an_openai_compatible_server(real_server: Any, tiny_policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "teacher.jsonl"
    environment = {**os.environ, "ESPALIER_TEST_KEY": "sk-secret-123"}
    command = [sys.executable, "openai_api_caller_v1.py", f"policy={tiny_policy}", *SMALL, f"output={output}",
               "client.model=policy", "client.key_variable=ESPALIER_TEST_KEY",
               f"client.base_url={real_server.base_url}/v1", "requests.limit=3", "params.n=2",
               "params.max_tokens=16"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_records(Trajectory, output)
    assert [row.id.split("/")[1] for row in rows].count("0") == 3
    assert len(rows) == 6
    written = output.read_text() + output.with_suffix(".meta.json").read_text() + done.stdout + done.stderr
    assert "sk-secret-123" not in written
    assert json.loads(output.with_suffix(".meta.json").read_text())["is_complete"]


def test_a_missing_key_is_named_and_nothing_is_written(tmp_path: Path, tiny_policy: Path) -> None:
    output, log = tmp_path / "teacher.jsonl", tmp_path / "log"
    words = [f"policy={tiny_policy}", f"output={output}", "client.model=m", "client.key_variable=ESPALIER_NO_SUCH_KEY",
             "requests.limit=2"]  # fmt: skip
    assert exit_code(start_program("openai_api_caller_v1.py", words, log)) == 2
    assert "error: the environment variable ESPALIER_NO_SUCH_KEY is not set" in log.read_text()
    assert not output.exists() or not output.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["labels=best"], "labels must be auto, values, relative or contrast, got 'best'"),
     (["labels=contrast", "steps=cut_points"], "leave out steps=cut_points")],
)  # fmt: skip
def test_labels_that_cannot_be_made_are_refused_before_anything_is_sampled(
    words: list[str], said: str, tmp_path: Path
) -> None:
    printed = run("bash", "scripts/process_rewards.sh", "policy=none", f"run={tmp_path}/run", *words, code=2)
    assert said in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(1800)
def test_reward_models_by_contrast_are_policies_that_pairs_of_their_half_have_taught(tmp_path: Path) -> None:
    first, run_dir = tmp_path / "first", tmp_path / "run"
    run("bash", "scripts/quickstart.sh", f"run={first}", "configs=exp/debug", "num_problems=8", "num_test=8", *SMALL)
    run("bash", "scripts/process_rewards.sh", "labels=contrast", f"policy={first}/sft/model", f"run={run_dir}",
        "num_problems=64", "num_samples=8", "exp=exp/debug/dpo/word_arithmetic", *SMALL)  # fmt: skip
    seen = {}
    for name in ("prm", "prm_policy", "prm_other", "prm_other_policy"):
        seen[name] = set(json.loads((run_dir / name / "model" / "training_problems.json").read_text())["problems"])
        assert seen[name]
    assert seen["prm_policy"] <= seen["prm"]
    assert seen["prm_other_policy"] <= seen["prm_other"]
    assert not seen["prm"] & seen["prm_other"]
    assert not any(row.is_seen for row in read_records(StepScores, run_dir / "process_rewards" / "step_scores.jsonl"))


@pytest.mark.slow
def test_the_script_goes_on_without_prompts_that_are_refused_and_again_for_nothing(
    tiny_policy: Path, tmp_path: Path
) -> None:
    """A server in vLLM's place answers some prompts of problems and of states with 400, always."""
    words = ["--tokenizer", f"{tiny_policy}/tokenizer.json", "--refused-share", "0.03"]
    serve = [sys.executable, "-m", "benchmarks.processes.answering_server", *words]
    with subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            words = ["env", f"ESPALIER_SERVER={address}", "bash", "scripts/process_rewards.sh", f"policy={tiny_policy}",
                     f"run={tmp_path}/run", "num_problems=60", "num_samples=2", "num_completions=2", "max_length=4096",
                     "exp=exp/debug/reward/word_arithmetic", "task.num_train=60", "smallest_reliability=0"]  # fmt: skip
            assert "max_failed_share=0" in run(*words, "max_failed_share=0.01", code=1)
            printed = run(*words, "max_failed_share=0.1")
        finally:
            server.kill()
    data = tmp_path / "run" / "process_rewards"
    problems, states = read_failed(data / "trajectories.jsonl"), read_failed(data / "completions.jsonl")
    assert 1 <= len(problems) < 6
    assert states
    trajectories = read_records(Trajectory, data / "trajectories.jsonl")
    assert len(trajectories) == 2 * (60 - len(problems))
    assert not problems.keys() & {row.problem_id for row in trajectories}
    values = read_records(StepValues, data / "step_values.jsonl")
    gone = {state.trajectory_id for state in read_records(State, data / "states.jsonl") if state.id in states}
    assert gone
    assert gone <= {row.id for row in values if None in row.values}, "the steps into them have no value, which is not 0"
    assert f"trajectories_with_unlabelled_steps {sum(None in row.values for row in values)}" in printed
    assert len(read_records(StepScores, data / "step_scores.jsonl")) == len(trajectories)
    assert "is complete" in run(*words, "max_failed_share=0.1"), "no server is left to ask, and none is needed"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(1800)
def test_preferences_become_a_reward_model_and_a_policy_by_one_script(tmp_path: Path) -> None:
    """With the true reward's own comparisons, a first phase of the head alone, and PPO whose critic begins on it."""
    notes, small = ["task=shopping_notes"], ["task.num_train=80", "task.num_dev=8"]
    rows, base, run_dir = tmp_path / "rows.jsonl", tmp_path / "base", tmp_path / "run"
    run(sys.executable, "run_stage.py", "-cn", "problems/make_demonstrations", *notes,
        f"output={rows}")  # fmt: skip
    run(sys.executable, "run_stage.py", "-cn", "training/make_policy", f"input={rows}",
        f"output={base}", "stage.hidden_size=96", "stage.num_layers=2", "stage.num_heads=3")  # fmt: skip
    run(sys.executable, "trainer_base_ds_mul.py", "-cn", "exp/sft/shopping_notes",
        f"model.path={base}", f"examples.path={rows}", f"output_dir={tmp_path}/sft", "max_steps=60")  # fmt: skip
    words = ["bash", "scripts/reward_model.sh", f"policy={tmp_path}/sft/model", f"run={run_dir}", *small,
             "num_problems=80", "num_pairs=64", "head_steps=4", "num_iterations=2", "train.num_epochs=1",
             "ppo.evaluation.every=0"]  # fmt: skip
    run(*words)
    judged = json.loads((run_dir / "reward_model.json").read_text())
    assert 0 < judged["accuracy"]["mean"] <= 1
    assert judged["reward"]["std"] > 0
    metrics = [json.loads(line) for line in (run_dir / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert sum("reward/true" in row for row in metrics) == 2
    assert all(0 < row["kl/per_response"] < 50 for row in metrics[1:] if "kl/per_response" in row)
    assert (run_dir / "ppo" / "model" / "model.safetensors").is_file()
    before = (run_dir / "ppo" / "metrics.jsonl").read_bytes()
    run(*words)  # for nothing
    assert (run_dir / "ppo" / "metrics.jsonl").read_bytes() == before
