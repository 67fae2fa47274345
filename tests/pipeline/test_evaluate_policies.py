"""Two policies compared by hand and by counting; many evaluated one after the other, also when some fail."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import BadInput, Problem
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.pipeline.evaluation.compare_policies import ComparePolicies, mcnemar_p
from espalier.pipeline.evaluation.evaluation_table import read_evaluations
from espalier.pipeline.evaluation.intervals import interval
from espalier.pipeline.stage import StageContext, run_stage
from espalier.runtime.entrypoint import build
from espalier.runtime.schemas import SampleConfig, StageConfig
from espalier.sampling.checkpoints import (
    KeptClient,
    MissingSamples,
    PolicyCheckpoint,
    close_kept,
    find_policy_checkpoints,
    is_evaluated,
    name_of,
    run_alone,
    run_each,
    sample_checkpoint,
    sampling_jobs,
)
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.sampling.job_record import asked_inputs
from tests.support.root_config import root_config

ROOT = Path(__file__).resolve().parent.parent.parent


def write_evaluation(path: Path, problems: list[str], **per_problem: Any) -> str:
    path.write_text(json.dumps({"problems": problems, "per_problem": per_problem}))
    return str(path)


def compared(policy: str, baseline: str) -> dict[str, Any]:
    return ComparePolicies(baseline).run(policy, StageContext(None, Path("unused"), 10.0))


# --- McNemar ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), list(itertools.product(range(6), repeat=2)))
def test_the_exact_p_value_counts_every_way_the_coins_can_fall(one: int, other: int) -> None:
    ways = list(itertools.product((0, 1), repeat=one + other))
    gap = abs(one - other)
    as_unequal = sum(abs(2 * sum(way) - len(way)) >= gap for way in ways)
    assert mcnemar_p(one, other) == pytest.approx(as_unequal / len(ways))


def test_p_values_by_hand_and_of_many_problems() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(1, 8) == pytest.approx(2 * (1 + 9) / 512)
    assert mcnemar_p(2500, 2500) == 1.0
    assert mcnemar_p(0, 2000) == 0.0
    assert mcnemar_p(470, 530) == pytest.approx(0.062, abs=0.001)


# --- differences --------------------------------------------------------------------------------------------


def test_differences_by_hand_joined_by_problem(tmp_path: Path) -> None:
    policy = write_evaluation(
        tmp_path / "a.json", ["p", "q", "r"], greedy=[1, 1, 0], mean=[0.5, 0.75, 0.0], a=[1, 1, 1]
    )
    baseline = write_evaluation(tmp_path / "b.json", ["r", "p", "q"], greedy=[1, 0, 0], mean=[0.0, 0.5, 0.25])
    found = compared(policy, baseline)
    assert found["difference"] == {"greedy": interval([1, 1, -1]), "mean": interval([0.0, 0.5, 0.0])}
    assert found["mcnemar"] == {"greedy": {"only_policy": 2, "only_baseline": 1, "p": 1.0}}
    assert (found["only_in_one"], found["num_problems"]) == (["a"], 3)
    assert (found["policy"]["greedy"]["mean"], found["baseline"]["greedy"]["mean"]) == (0.66667, 0.33333)
    row = found["table"]["rows"][0]
    assert (row["metric"], row["policy"], row["baseline"], row["mean"], row["p"]) == (
        "greedy", 0.66667, 0.33333, 0.33333, 1.0,
    )  # fmt: skip
    assert "| greedy | 66.7 % | 33.3 % | +33.3 |" in found["table"]["markdown"]


def test_the_interval_of_a_difference_is_the_paired_bootstraps(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    ours, theirs = rng.random((2, 40)).round(3)
    names = [f"p{i}" for i in range(40)]
    policy = write_evaluation(tmp_path / "a.json", names, mean=list(ours))
    found = compared(policy, write_evaluation(tmp_path / "b.json", names, mean=list(theirs)))["difference"]["mean"]
    drawn = np.random.default_rng(0)
    means = []
    for _ in range(20):
        places = drawn.integers(0, 40, (500, 40))
        means += [ours[row].mean() - theirs[row].mean() for row in places]
    low, high = np.quantile(means, [0.025, 0.975])
    assert (found["mean"], found["low"], found["high"]) == pytest.approx(
        ((ours - theirs).mean(), low, high), abs=1.1e-5
    )


def test_a_policy_does_not_differ_from_itself(tmp_path: Path) -> None:
    policy = write_evaluation(tmp_path / "a.json", ["p", "q"], greedy=[1, 0])
    found = compared(policy, policy)
    assert found["difference"]["greedy"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 2}
    assert found["mcnemar"]["greedy"]["p"] == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.json: not JSON"),
        ("[1]", "holds no problems and per_problem: give the output of run_stage.py -cn evaluation/evaluate"),
        ('{"problems": [], "per_problem": {}}', "no problem in it has a published answer"),
        ('{"problems": ["p", "p"], "per_problem": {"greedy": [1, 1]}}', "a problem stands twice"),
        ('{"problems": ["p"], "per_problem": {"greedy": [1, 1]}}', "per_problem.greedy must be 1 shares"),
        ('{"problems": ["p"], "per_problem": {"greedy": ["1"]}}', "per_problem.greedy must be 1 shares"),
        ('{"problems": ["p"], "per_problem": {"greedy": [NaN]}}', "per_problem.greedy must be 1 shares"),
        ('{"problems": ["q"], "per_problem": {"greedy": [1]}}', "do not hold the same problems .'p' is only in one, 2"),
        ('{"problems": ["p"], "per_problem": {"mean": [1]}}', "have no metric in common"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    baseline = write_evaluation(tmp_path / "b.json", ["p"], greedy=[1])
    with pytest.raises(BadInput, match=message) as caught:
        compared(str(tmp_path / "a.json"), baseline)
    assert "\n" not in str(caught.value)


def test_a_folder_in_the_place_of_an_evaluation_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file: evaluate the policy first"):
        compared(str(tmp_path), str(tmp_path))


# --- which policies -----------------------------------------------------------------------------------------


def make_folders(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/model", "a"), ("runs/a/model/", "runs-a"), ("/x/runs/a/checkpoints/step-10", "a-step-10"),
     ("org/model-7b", "org-model-7b"), ("./../model", "model"), ("my runs/a=b", "my-runs-a-b")],
)  # fmt: skip
def test_a_name_depends_on_the_path_alone(path: str, name: str) -> None:
    assert name_of(path) == name


def test_lists_patterns_and_mappings_are_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folders(tmp_path, "runs/a-2/model", "runs/a-10/model", "b")
    (tmp_path / "runs" / "notes.txt").write_text("")

    def found(policies: Any) -> list[tuple[str, str]]:
        return [(row.name, row.path) for row in find_policy_checkpoints(policies, "out")]

    assert found("runs/*") == [("runs-a-2", "runs/a-2/model"), ("runs-a-10", "runs/a-10/model")]
    assert found(["b", "runs/*/model", "b"]) == [
        ("b", "b"), ("runs-a-2", "runs/a-2/model"), ("runs-a-10", "runs/a-10/model"),
    ]  # fmt: skip
    assert found({"one": "b", "two": "nowhere"}) == [("one", "b"), ("two", "nowhere")]
    assert find_policy_checkpoints("b", "out")[0].file("greedy.jsonl") == Path("out/b/greedy.jsonl")


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([], "no policy to evaluate"),
        ({}, "no policy to evaluate"),
        ([3], "must be model folders"),
        ([""], "must be model folders"),
        (3, "must be model folders"),
        ("nowhere/*", r"no folder matches nowhere/\*"),
        (["x/a/model", "x/a"], "x/a/model and x/a would both be 'x-a': give names"),
        ({"../x": "a"}, "'../x' must be letters, digits"),
        ({"x": None}, "name a folder, got None"),
    ],
)
def test_policies_that_make_no_sense_are_refused(policies: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_policy_checkpoints(policies, "out")


CONFIG = SampleConfig(
    output="out",
    policy="",
    policies=["a"],
    task={"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic"},
    requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "test"},
    params={
        "_target_": "espalier.sampling.client.SamplingParams",
        "n": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 64,
    },
    client={"_target_": "espalier.sampling.offline_client.OfflineClient", "model": "", "max_model_len": 256},
    server={},
)


def test_a_policy_is_asked_greedily_and_as_configured() -> None:
    greedy, samples = sampling_jobs(CONFIG, find_policy_checkpoints(["a/model"], "out")[0])
    assert (greedy.output, samples.output) == ("out/a/greedy.jsonl", "out/a/samples.jsonl")
    assert (greedy.params["n"], greedy.params["temperature"], greedy.params["top_p"]) == (1, 0.0, 1.0)
    assert samples.params == CONFIG.params
    for job in (greedy, samples):
        assert (job.policy, job.policies, job.client["model"], job.server) == ("a/model", None, "a/model", None)


class Engine:
    """Counts how often it is loaded and closed; returns one sample, whatever is asked."""

    model = "m"

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        return [Sample("x", [1], "stop")]

    async def close(self) -> None:
        self.calls.append("close")


def test_an_engine_is_loaded_once_for_both_jobs_and_closed_at_the_end() -> None:
    engine, other = Engine(), Engine()

    async def job(client: KeptClient) -> None:
        await client.open()
        assert await client.sample(SampleRequest("p", "", [1]), SamplingParams(1, 0.0, 8))
        await client.close()

    asyncio.run(job(KeptClient(engine, seed=3)))
    asyncio.run(job(KeptClient(other, seed=3)))
    assert (engine.calls, other.calls) == (["open"], [])
    close_kept()
    assert (engine.calls, KeptClient.kept) == (["open", "close"], {})


def test_an_engine_that_returns_too_few_samples_is_no_engine() -> None:
    async def job(client: KeptClient) -> None:
        await client.open()
        await client.sample(SampleRequest("p", "", [1]), SamplingParams(2, 1.0, 8))

    with pytest.raises(MissingSamples, match="the engine returned 1 of 2 samples of 'p'"):
        asyncio.run(job(KeptClient(Engine())))
    close_kept()


def is_done(config: SampleConfig, checkpoint: PolicyCheckpoint) -> bool:
    """As the program asks it, with the problems as they are now."""
    return is_evaluated(config, checkpoint, asked_inputs(config, build(config.requests), build(config.task)))


def test_a_policy_is_sampled_evaluated_and_then_known_as_done(
    tiny_policy: Path, completion_server: Any, tmp_path: Path
) -> None:
    checkpoint = find_policy_checkpoints({"one": str(tiny_policy)}, str(tmp_path / "out"))[0]
    tokenizer = load_tokenizer(str(tiny_policy))
    text = "2 + 3 = 5\n#### 5"

    def answer(prompt_ids: list[int], index: int) -> tuple[str, list[int]]:
        return text, [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    with completion_server(max_model_len=512, answer=answer) as server:
        client = {"_target_": "espalier.sampling.vllm_client.VLLMClient", "base_url": server.base_url, "model": None}
        task = {**CONFIG.task, "num_train": 20, "num_dev": 5, "num_test": 5}
        config = replace(CONFIG, client=client, task=task, requests={**CONFIG.requests, "first": 1, "limit": 3})
        assert sample_checkpoint(config, checkpoint, load_tokenizer, check_model_folder) == 0
    assert len(server.prompts) == 6
    assert sorted(body["n"] for body in server.bodies) == [1, 8]
    assert [row.id for row in read_records(Problem, checkpoint.file("problems.jsonl"))] == [
        "wa-test-1", "wa-test-2", "wa-test-3",
    ]  # fmt: skip
    assert not is_done(config, checkpoint)
    greedy, problems, samples = (str(checkpoint.file(f"{name}.jsonl")) for name in ("greedy", "problems", "samples"))
    stage = {"_target_": "espalier.pipeline.evaluation.evaluate.Evaluate", "greedy": greedy, "problems": problems}
    output = str(checkpoint.file("evaluation.json"))
    assert run_stage(build(stage), None, StageConfig(output=output, input=samples, stage=stage)) == 0
    assert is_done(config, checkpoint)
    assert is_done(root_config(config, concurrency=3), checkpoint)
    assert not is_done(replace(config, params={**config.params, "n": 4}), checkpoint)
    assert json.loads(Path(output).read_text())["num_samples"] == 8
    lines = Path(samples).read_text()
    Path(samples).write_text(lines[: lines.rindex("{")])
    assert not is_done(config, checkpoint)


def test_an_evaluation_of_problems_that_have_changed_since_is_not_taken_for_done(
    tiny_policy: Path, completion_server: Any, tmp_path: Path
) -> None:
    checkpoint = find_policy_checkpoints({"one": str(tiny_policy)}, str(tmp_path / "out"))[0]
    tokenizer = load_tokenizer(str(tiny_policy))
    ids = [*tokenizer("#### 5").input_ids, tokenizer.eos_token_id]
    asked = tmp_path / "asked.jsonl"
    write_records(asked, [Problem("a", "2 + 3?", "5")])
    with completion_server(max_model_len=512, answer=lambda prompt_ids, index: ("#### 5", ids)) as server:
        client = {"_target_": "espalier.sampling.vllm_client.VLLMClient", "base_url": server.base_url}
        task = {"_target_": "espalier.data.tasks.problem_file.ProblemFile", "path": str(asked), "kind": "marked_number"}
        config = replace(CONFIG, client=client, task=task)
        assert sample_checkpoint(config, checkpoint, load_tokenizer, check_model_folder) == 0
    write_json(checkpoint.file("evaluation.json"), {})
    write_json(checkpoint.file("evaluation.meta.json"), {"inputs": {}})
    assert is_done(config, checkpoint)
    write_records(asked, [Problem("a", "2 + 3?", "6")])
    assert not is_done(config, checkpoint)


def test_only_full_solutions_are_evaluated(tmp_path: Path) -> None:
    config = replace(CONFIG, requests={"_target_": "espalier.sampling.requests.CompletionRequests", "states": "s"})
    with pytest.raises(BadInput, match="choose requests=trajectories"):
        sample_checkpoint(config, find_policy_checkpoints("a", str(tmp_path))[0], load_tokenizer, check_model_folder)


def test_a_policy_without_files_is_not_evaluated(tmp_path: Path) -> None:
    checkpoint = find_policy_checkpoints({"a": str(tmp_path)}, str(tmp_path))[0]
    assert not is_done(CONFIG, checkpoint)
    checkpoint.folder.mkdir()
    checkpoint.file("greedy.meta.json").write_text("[1")
    assert not is_done(CONFIG, checkpoint)


# --- each in a process of its own ---------------------------------------------------------------------------


def stand_in(tmp_path: Path, program: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(program)
    return str(path)


def test_a_process_of_its_own_gets_the_whole_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = stand_in(tmp_path, "import sys; print(open(sys.argv[2] + '/' + sys.argv[4] + '.yaml').read())")
    checkpoint = find_policy_checkpoints({"one": "a/model"}, str(tmp_path))[0]
    config = replace(CONFIG, params={**CONFIG.params, "stop": ["${seed}"]})
    assert run_alone(program, config, checkpoint) == ""
    told = capfd.readouterr().err
    assert checkpoint.file("evaluate.log").read_text() == told
    assert told.startswith("defaults:\n- sample_schema\n- _self_\n")
    assert "policy: a/model\npolicies:\n  one: a/model\n" in told
    assert "\\${seed}" in told


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('error: no weights there'); exit(2)", "no weights there"),
        ("exit(1)", "some requests were refused: see "),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: see "),
    ],
)
def test_what_went_wrong_is_told(program: str, reason: str, tmp_path: Path) -> None:
    checkpoint = find_policy_checkpoints({"one": "a"}, str(tmp_path))[0]
    assert run_alone(stand_in(tmp_path, program), CONFIG, checkpoint).startswith(reason)


def test_what_a_policy_started_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    )
    checkpoint = find_policy_checkpoints({"one": "a"}, str(tmp_path))[0]
    assert run_alone(stand_in(tmp_path, program), CONFIG, checkpoint) == ""
    pid = int(checkpoint.file("evaluate.log").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def run_program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "vllm_inference.py"), "-cn", "api/vllm/evaluate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_one_that_fails_does_not_stop_the_rest_and_what_is_done_is_skipped() -> None:
    checkpoints = find_policy_checkpoints({name: name for name in "abc"}, "out")
    ran = []

    def run(checkpoint: PolicyCheckpoint) -> str:
        ran.append(checkpoint.name)
        return "gone" if checkpoint.name == "a" else ""

    assert run_each(checkpoints, lambda checkpoint: checkpoint.name == "b", run) == {"a": "gone"}
    assert ran == ["a", "c"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["policies=nowhere/*", "output=OUT"], "error: policies: no folder matches nowhere/*"),
        (["policies=[a]", "policy=b", "output=OUT"], "error: policy= and policies= name different policies"),
        (["policies=[a]", "output=FILE"], "is a file: policies are evaluated into a folder"),
        (["policies=[a]", "output=OUT", "pilot=5"], "error: pilot=5: a policy is evaluated on all problems"),
    ],
)
def test_the_program_refuses_in_one_line(words: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [w.replace("OUT", str(tmp_path / "out")).replace("FILE", str(tmp_path / "file")) for w in words]
    done = run_program(*words)
    assert done.returncode == 2
    assert line in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_policies_that_fail_are_listed_and_do_not_stop_the_rest(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    done = run_program(f"policies={{one: {tmp_path}/nowhere, two: {tmp_path}/empty}}", f"output={out}")
    assert done.returncode == 1
    assert "one failed: " in done.stderr
    assert "two failed: " in done.stderr
    assert "Traceback" not in done.stderr
    summary = json.loads((out / "policies.json").read_text())
    assert summary["policies"] == {}
    assert "no such model folder" in summary["failed"]["one"]
    assert "no config.json there" in summary["failed"]["two"]
    assert "two failed: " in (out / "policies.md").read_text()


def test_many_policies_make_one_table(tmp_path: Path) -> None:
    figures = {"mean": interval([1.0, 0.0]), "greedy": interval([1.0, 1.0])}
    row = {"accuracy": figures, "pass_at_k": {}, "responses": {}, "num_problems": 2}
    (tmp_path / "a.json").write_text(json.dumps(row))
    (tmp_path / "b.json").write_text(json.dumps({**row, "accuracy": {"mean": figures["mean"]}}))
    paths = {name: str(tmp_path / f"{name}.json") for name in "ab"}
    assert read_evaluations(paths, {"c": "gone"})["table"]["markdown"] == (
        "| policy | mean | greedy |\n|---|---:|---:|\n"
        "| a | 50.0 [0.0, 100.0] | 100.0 [100.0, 100.0] |\n| b | 50.0 [0.0, 100.0] | none |\n"
        "\nc failed: gone\n"
    )
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(BadInput, match=r"a.json: not an evaluation .*: remove it"):
        read_evaluations(paths, {})


@pytest.mark.slow
@pytest.mark.server
def test_two_policies_are_evaluated_with_a_real_engine_and_then_skipped(tiny_policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [f"policies={{one: {tiny_policy}, gone: {tmp_path}/gone}}", f"output={out}", "params.n=2",
             "params.max_tokens=16", "requests.limit=4", "task.num_test=20", "client.max_model_len=256"]  # fmt: skip
    first = run_program(*words)
    assert first.returncode == 1, first.stderr
    found = json.loads((out / "one" / "evaluation.json").read_text())
    assert (found["num_problems"], found["num_samples"]) == (4, 2)
    assert {"greedy", "mean", "majority_2"} == set(found["accuracy"])
    assert len((out / "one" / "evaluation.predictions.jsonl").read_text().splitlines()) == 4
    assert first.stderr.count("Loading weights") <= 2
    began = time.monotonic()
    second = run_program(*words)
    assert "one is evaluated (1 of 2)" in second.stderr
    assert time.monotonic() - began < 60
    assert list(json.loads((out / "policies.json").read_text())["policies"]) == ["one"]


def test_a_program_that_is_stopped_takes_its_processes_along(tmp_path: Path) -> None:
    program = stand_in(tmp_path, "import time; print('here', flush=True); time.sleep(60)")
    script = (
        "import sys, signal\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from espalier.sampling.checkpoints import find_policy_checkpoints, run_alone\n"
        "from espalier.runtime.schemas import SampleConfig\n"
        "signal.signal(signal.SIGTERM, lambda n, f: sys.exit(128 + n))\n"
        "config = SampleConfig(output='x', policy='', task={}, requests={}, params={}, client={})\n"
        f"run_alone({program!r}, config, find_policy_checkpoints({{'one': 'a'}}, {str(tmp_path)!r})[0])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    command = f"{program}".encode()
    running = [
        p for p in Path("/proc").glob("[0-9]*/cmdline") if command in _read(p) and int(p.parent.name) != os.getpid()
    ]
    assert running == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
