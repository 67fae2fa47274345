"""All eight stages and the evaluation, as their users run them: the shell scripts against a real vLLM server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import Completion, PreferencePair, State, StepScores, StepValues, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.tiny import build_tiny

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "task.num_train=400",
    "task.num_demonstrations=2000",
    "task.max_total=12",
    "task.num_test=16",
    "task.num_dev=16",
]


def run(*words: str, code: int = 0) -> str:
    """Run a command from the repository root; its output."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy taught just enough that some of its answers are right."""
    folder = tmp_path_factory.mktemp("policy")
    task = WordArithmetic(num_train=400, num_demonstrations=2000, max_total=12, num_test=16, num_dev=16)
    demonstrations = task.demonstrations("train")
    write_records(folder / "demonstrations.jsonl", demonstrations)
    texts = [row.prompt + row.completion for row in demonstrations]
    build_tiny(
        folder / "base", texts, hidden_size=64, num_layers=2, num_heads=2, vocab_size=360, max_length=512, seed=0
    )
    run(sys.executable, "trainer_base_ds_mul.py", "-cn", "exp/sft/word_arithmetic", f"model.path={folder}/base",
        f"examples.path={folder}/demonstrations.jsonl", f"output_dir={folder}/sft", "max_steps=220", "batch_size=32",
        "micro_batch_size=32", "learning_rate=3e-3", "save_every=0")  # fmt: skip
    return folder / "sft" / "model"


@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_eight_stages_run_end_to_end_and_again_for_nothing(policy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    everything = (
        f"bash scripts/process_rewards.sh policy={policy} run={run_dir} num_problems=24 num_samples=4 "
        f"num_completions=2 exp=exp/debug/reward/word_arithmetic {' '.join(SMALL)} && "
        f"bash scripts/preferences.sh pairs=outcome policy={policy} run={run_dir} exp=exp/debug/dpo/word_arithmetic && "
        f"bash scripts/preferences.sh pairs=process policy={policy} run={run_dir} exp=exp/debug/dpo/word_arithmetic"
    )
    server = [
        sys.executable,
        "-m",
        "espalier.sampling.server",
        "--model",
        str(policy),
        "--log",
        str(tmp_path / "server.log"),
    ]
    run(*server, "--", "bash", "-euc", everything)

    data = run_dir / "process_rewards"
    trajectories = read_records(Trajectory, data / "trajectories.jsonl")
    states = {state.id: state for state in read_records(State, data / "states.jsonl")}
    completions = read_records(Completion, data / "completions.jsonl")
    values = read_records(StepValues, data / "step_values.jsonl")
    scores = read_records(StepScores, data / "step_scores.jsonl")
    assert len(trajectories) == 24 * 4
    assert len(completions) == 2 * len(states)
    assert [row.id for row in values] == [row.id for row in scores] == [row.id for row in trajectories]
    assert any(t.is_correct for t in trajectories)
    by_state: dict[str, list[bool]] = {}
    for completion in completions:
        by_state.setdefault(completion.state_id, []).append(completion.is_correct)
    first = next(row for row in values if f"{row.id}#1" in states)
    assert first.values[0] == sum(by_state[f"{first.id}#1"]) / 2
    assert read_records(PreferencePair, run_dir / "pairs" / "outcome.jsonl")
    assert f"{len(trajectories)} trajectories and {len(completions)} completions" in (data / "inspect.html").read_text()
    assert (run_dir / "process_dpo" / "model" / "model.safetensors").is_file()
    assert (run_dir / "dpo" / "model" / "model.safetensors").is_file()

    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*.jsonl") if path.name != "seconds.jsonl"}
    run("bash", "-euc", everything)  # no server: nothing is left to ask
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*.jsonl") if path.name != "seconds.jsonl"}
    assert before == after


@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_chat_caller_asks_an_openai_compatible_server(policy: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    )
    script = tmp_path / "serve.py"
    script.write_text(
        "import os, subprocess, sys\nfrom espalier.sampling.server import VLLMServer\n"
        f"with VLLMServer({str(policy)!r}, {str(tmp_path / 'server.log')!r}, options={{'enforce_eager': True, "
        f"'chat_template': {str(template)!r}}}) as server:\n"
        "    sys.exit(subprocess.call([*sys.argv[1:], f'client.base_url={server.base_url}/v1']))\n"
    )
    output = tmp_path / "teacher.jsonl"
    environment = {**os.environ, "ESPALIER_TEST_KEY": "sk-secret-123", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), sys.executable, "openai_api_caller_v1.py", f"policy={policy}", *SMALL,
               f"output={output}", "client.model=policy", "client.key_variable=ESPALIER_TEST_KEY",
               "requests.limit=6", "params.n=2", "params.max_tokens=64"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_records(Trajectory, output)
    assert [row.id.split("/")[1] for row in rows].count("0") == 6
    assert len(rows) == 12
    written = output.read_text() + output.with_suffix(".meta.json").read_text() + done.stdout + done.stderr
    assert "sk-secret-123" not in written
    assert json.loads(output.with_suffix(".meta.json").read_text())["is_complete"]


def test_a_missing_key_is_named_and_nothing_is_written(tmp_path: Path, policy: Path) -> None:
    output = tmp_path / "teacher.jsonl"
    printed = run(sys.executable, "openai_api_caller_v1.py", f"policy={policy}", f"output={output}", "client.model=m",
                  "client.key_variable=ESPALIER_NO_SUCH_KEY", "requests.limit=2", code=2)  # fmt: skip
    assert "error: the environment variable ESPALIER_NO_SUCH_KEY is not set" in printed
    assert not output.exists() or not output.read_text()


@pytest.mark.slow
def test_the_script_goes_on_without_prompts_that_are_refused_and_again_for_nothing(
    tiny_policy: Path, tmp_path: Path
) -> None:
    """A server in vLLM's place answers some prompts of problems and of states with 400, always."""
    serve = [sys.executable, "-m", "benchmarks.answering_server", "--tokenizer", f"{tiny_policy}/tokenizer.json",
             "--refused-share", "0.03"]  # fmt: skip
    with subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            words = ["env", f"ESPALIER_SERVER={address}", "bash", "scripts/process_rewards.sh", f"policy={tiny_policy}",
                     f"run={tmp_path}/run", "num_problems=60", "num_samples=2", "num_completions=2", "max_length=4096",
                     "exp=exp/debug/reward/word_arithmetic", "task.num_train=60"]  # fmt: skip
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
    assert not gone & {row.id for row in values}
    assert len(read_records(StepScores, data / "step_scores.jsonl")) == len(trajectories)
    assert f"{len(trajectories) - len(values)} of {len(trajectories)} trajectories pass through a state" in printed
    assert "is complete" in run(*words, "max_failed_share=0.1"), "no server is left to ask, and none is needed"
