"""The shell pipelines: settings of one stage by its prefix, recipes, one server for the stages that ask one policy."""

import inspect
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from espalier.checks.recipe import NEUTRAL
from espalier.runtime.entrypoint import find_component
from tests.runtime.test_configs import CONF, compose_config
from tests.support.scripts import ROOT, Script

# Every stage's prefix, a setting, and what the stage must get (config, setting); `policy=a run=b` go before.
PASSED = {
    "process_rewards.sh": {
        "sample.params.temperature=0.7": ("api/vllm/trajectories", "params.temperature=0.7"),
        "complete.params.top_p=0.9": ("api/vllm/completions", "params.top_p=0.9"),
        "cut.stage.keep_ratio=0.5": ("values/cut_states", "stage.keep_ratio=0.5"),
        "prm.update.learning_rate=2e-6": ("exp/reward/gsm8k", "update.learning_rate=2e-6"),
        "score.stage.batch_tokens=512": ("prm/score_steps", "stage.batch_tokens=512"),
        "server.dtype=float32": ("api/vllm/completions", "server.dtype=float32"),
        "+server.options.tensor_parallel_size=2": ("api/vllm/completions", "+server.options.tensor_parallel_size=2"),
        "prompt=math_minerva": ("api/vllm/trajectories", "prompt@task.template=math_minerva"),
        "deepspeed=zero2": ("exp/reward/gsm8k", "deepspeed=zero2"),
        "max_tokens=99": ("api/vllm/trajectories", "params.max_tokens=99"),
    },
    "preferences.sh": {
        "pair.stage.max_pairs=8": ("pairs/process_preferences", "stage.max_pairs=8"),
        "train.lora=lora": ("exp/dpo/gsm8k", "lora=lora"),
        "objective.beta=0.3": ("exp/dpo/gsm8k", "objective.beta=0.3"),
    },
    "evaluate.sh": {
        "greedy.params.max_tokens=7": ("api/vllm/greedy", "params.max_tokens=7"),
        "sample.params.temperature=0.7": ("api/vllm/trajectories", "params.temperature=0.7"),
        "score.stage.batch_tokens=512": ("prm/score_steps", "stage.batch_tokens=512"),
        "evaluate.stage.scores=x": ("evaluation/evaluate", "stage.scores=x"),
        "server.dtype=float32": ("api/vllm/greedy", "server.dtype=float32"),
    },
    "reward_model.sh": {
        "sample.params.temperature=0.7": ("api/vllm/trajectories", "params.temperature=0.7"),
        "train.update.learning_rate=9e-6": ("exp/reward/outcome_pairs", "update.learning_rate=9e-6"),
        "ppo.update.clip_high=0.28": ("exp/ppo/rlhf_shopping_notes", "update.clip_high=0.28"),
    },
    "iterate.sh": {
        "sample.params.temperature=0.7": ("api/vllm/trajectories", "params.temperature=0.7"),
        "complete.params.top_p=0.9": ("api/vllm/completions", "params.top_p=0.9"),
        "+complete.params.seed=3": ("api/vllm/completions", "+params.seed=3"),
        "+server.options.tensor_parallel_size=2": ("api/vllm/trajectories", "+server.options.tensor_parallel_size=2"),
        "prm.update.learning_rate=2e-6": ("exp/reward/gsm8k", "update.learning_rate=2e-6"),
        "build.stage.max_pairs=8": ("pairs/process_preferences", "stage.max_pairs=8"),
        "train.update.learning_rate=9e-7": ("exp/dpo/gsm8k", "update.learning_rate=9e-7"),
        "evaluate.client.kv_cache_gib=2": ("api/vllm/evaluate", "client.kv_cache_gib=2"),
        "prompt=math_minerva": ("api/vllm/completions", "prompt@task.template=math_minerva"),
        "task.path=x": ("api/vllm/trajectories", "task.path=x"),
    },
    "quickstart.sh": {
        "sample.params.temperature=0.7": ("api/vllm/trajectories", "params.temperature=0.7"),
        "prm.update.learning_rate=2e-6": ("exp/reward/word_arithmetic", "update.learning_rate=2e-6"),
        "train.update.learning_rate=9e-7": ("exp/dpo/word_arithmetic", "update.learning_rate=9e-7"),
        "server.dtype=float32": ("api/vllm/completions", "server.dtype=float32"),
        "prompt=math_minerva": ("api/vllm/greedy", "prompt@task.template=math_minerva"),
        "task.max_total=12": ("problems/make_demonstrations", "task.max_total=12"),
    },
}  # fmt: skip
GIVEN = {
    "evaluate.sh": ["name=x"],
    "reward_model.sh": ["exp=exp/reward/outcome_pairs", "ppo=exp/ppo/rlhf_shopping_notes"],
    "iterate.sh": ["num_rounds=1"],
}


def stages(commands: Sequence[Sequence[str]]) -> list[list[str]]:
    """The commands that run a stage: without those that only ask whether settings fit."""
    return [list(command) for command in commands if "--help" not in command]


def named(commands: Sequence[Sequence[str]], config: str) -> list[list[str]]:
    return [command for command in stages(commands) if config in command]


@pytest.mark.parametrize("name", PASSED)
def test_a_setting_goes_to_the_stage_of_its_prefix_and_to_no_other(name: str, script: Script) -> None:
    (script.checkout / "b").mkdir()
    common = ["run=b"] if name == "quickstart.sh" else ["policy=a", "run=b", "task=gsm8k", *GIVEN.get(name, [])]
    if name == "quickstart.sh":
        (script.checkout / "conf").symlink_to(ROOT / "conf")
    commands = script(*common, *PASSED[name], name=name)
    for given, (config, setting) in PASSED[name].items():
        found = named(commands, config)
        assert found, config
        assert any(setting in command for command in found), given
        if re.match(r"(sample|complete|cut|prm|score|pair|train|build|ppo|evaluate|greedy)\.", given):
            others = [command for command in stages(commands) if setting in command and config not in command]
            assert not others, others


def test_a_setting_that_no_stage_takes_ends_with_one_line_before_anything_is_run(tmp_path: Path) -> None:
    """By the real programs' own check of their settings."""
    cases = [
        ("process_rewards.sh", "smaple.params.top_p=1", r"error: there is no setting 'smaple\.params\.top_p'; "
         r"the settings are: task policy .*, sample\.\*, complete\.\*, .*server\.\*, task\.\*, prompt"),
        ("process_rewards.sh", "sample.params.temprature=1", r"error: sample\.\*: config: .*temprature.*"),
        ("process_rewards.sh", "server.max_modellen=1", r"error: server\.\*: config: .*max_modellen.*"),
        ("preferences.sh", "train.update.learning_rat=1", r"error: train\.\*: config: .*learning_rat'.*"),
        ("preferences.sh", "nproc", r"error: 'nproc' is not key=value; .*"),
        ("preferences.sh", "prompt=chat", r"error: no stage of this script asks the task, so prompt= does nothing: .*"),
    ]  # fmt: skip
    for name, setting, said in cases:
        command = ["bash", f"scripts/{name}", f"policy={tmp_path}", f"run={tmp_path}/run", "max_length=99",
                   "task=gsm8k", *(["max_tokens=9"] if name == "process_rewards.sh" else []), setting]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(said, done.stderr.strip()), done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", [pytest.param([], marks=pytest.mark.slow), ["task=word_arithmetic"]])
def test_a_published_reward_model_is_measured_with_and_without_a_task(task: list[str], script: Script) -> None:
    (script.checkout / "b").mkdir()
    commands = stages(script("prm=a", "file=f", "samples=s", "run=b", *task, name="prm_benchmark.sh"))
    assert len(commands) == 6
    for command in commands:
        compose_config(CONF / "stage", command[command.index("-cn") + 1], *command[command.index("-cn") + 2 :])
    for command in named(commands, "prm/score_steps"):
        assert [word for word in command if word.startswith("task=")] == task


def test_pairs_are_scored_by_steps_or_as_a_whole(script: Script) -> None:
    (script.checkout / "b").mkdir()
    given = ["split.stage.by=paragraphs", "whole.stage.is_chat=true"]
    commands = stages(script("prm=x,y", "read_as=qwen,whole", "pairs=f", "run=b", *given, name="prm_benchmark.sh"))
    configs = [command[command.index("-cn") + 1] for command in commands]
    assert configs == [
        "evaluation/import_comparisons", "prm/split_responses", "prm/score_steps", "prm/evaluate_prm_benchmarks",
        "evaluation/score_responses", "evaluation/evaluate_reward_model", "pages/show_scorers",
    ]  # fmt: skip
    for command, config in zip(commands, configs, strict=True):
        compose_config(CONF / "stage", config, *command[command.index("-cn") + 2 :])
    assert "stage.by=paragraphs" in commands[1]
    assert {"stage.model=x", "stage.layout=qwen", "output=b/1/pair_scores.jsonl"} <= set(commands[2])
    assert {"stage.model=y", "stage.is_chat=true", "output=b/2/response_scores.jsonl"} <= set(commands[4])


def test_judged_solutions_and_pairs_are_files_or_data_sets_of_the_hub(script: Script) -> None:
    (script.checkout / "b").mkdir()
    (script.checkout / "folder").mkdir()
    for named_source, read in {
        "file.json": {"input=file.json"}, "data/file.jsonl": {"input=data/file.jsonl"},
        "Qwen/ProcessBench": {"input=", "stage.hub=Qwen/ProcessBench"}, "folder": {"input=", "stage.hub=folder"},
    }.items():  # fmt: skip
        for key, config in (("file", "prm/import_steps"), ("pairs", "evaluation/import_comparisons")):
            (command,) = named(script("prm=a", f"{key}={named_source}", "run=b", name="prm_benchmark.sh"), config)
            assert {word for word in command if word.startswith(("input=", "stage.hub="))} == read


def test_a_model_of_whole_responses_chooses_among_samples_and_engines_score_its_pairs(script: Script) -> None:
    (script.checkout / "b").mkdir()
    given = [
        "prm=x,y",
        "read_as=qwen,whole",
        "pairs=f",
        "samples=s",
        "step_values=v",
        "engines=2",
        "task=gsm8k",
        "run=b",
    ]
    commands = stages(script(*given, name="prm_benchmark.sh"))
    own = [command for command in commands if any("b/2/" in word for word in command)]
    configs = [command[command.index("-cn") + 1] for command in own]
    assert configs == ["evaluation/score_responses", "evaluation/evaluate_reward_model", "prm/score_steps",
                       "evaluation/evaluate"]  # fmt: skip
    assert all({"client=data_parallel_engines", "client.num_engines=2"} <= {*command} for command in (own[0], own[2]))
    assert {"stage.layout=whole", "stage.model=y", "input=s", "task=gsm8k"} <= {*own[2]}
    for command, config in zip(own, configs, strict=True):
        compose_config(CONF / "stage", config, *command[command.index("-cn") + 2 :])


@pytest.mark.parametrize(("name", "given"), [
    ("iterate.sh", "method=restem prm.update.learning_rate=1e-6"),
    ("iterate.sh", "method=dpo_positive complete.params.n=2"),
    ("evaluate.sh", "name=x until=samples evaluate.stage.scores=x"),
    ("reward_model.sh", "preferences=F exp=E ppo=P sample.params.n=2"),
    ("prm_benchmark.sh", "prm=a file=F choose.stage.seed=1"),
    ("prm_benchmark.sh", "prm=a samples=F evaluate.stage.tune_share=0.1"),
    ("prm_benchmark.sh", "prm=a samples=F calibrate.stage.bins=3"),
    ("prm_benchmark.sh", "prm=a file=F step_values=V"),
    ("prm_benchmark.sh", "prm=a file=F split.stage.by=math"),
    ("prm_benchmark.sh", "prm=a pairs=F whole.stage.is_chat=true"),
    ("prm_benchmark.sh", "prm=a file=F read_as=whole"),
    ("prm_benchmark.sh", "prm=a samples=F read_as=whole whole.stage.is_chat=true"),
    ("prm_benchmark.sh", "prm=a pairs=F read_as=whole prompt=chat"),
    ("prm_benchmark.sh", "prm=a pairs=F read_as=whole score.stage.batch_tokens=8"),
    ("prm_benchmark.sh", "prm=a pairs=F read_as=whole split.stage.by=math"),
    ("preferences.sh", "prompt=chat"),
    ("preferences.sh", "task.path=x"),
    ("process_rewards.sh", "engines=2 server.dtype=float32"),
    ("iterate.sh", "engines=2 server.dtype=float32"),
    ("evaluate.sh", "name=x engines=2 +server.options.tensor_parallel_size=2"),
    ("prm_benchmark.sh", "prm=a,b,c pairs=F read_as=qwen,whole"),
])  # fmt: skip
def test_a_setting_of_a_stage_that_is_not_run_is_refused(name: str, given: str, script: Script) -> None:
    policy = [] if name == "prm_benchmark.sh" else ["policy=a"]
    assert script(*policy, "run=b", "task=gsm8k", *given.split(), name=name, code=2) == []


@pytest.mark.parametrize("method", ["process_dpo", "restem"])
def test_rounds_sample_and_evaluate_by_engines_of_their_own(method: str, script: Script) -> None:
    commands = stages(script("policy=a", "run=b", "task=gsm8k", "num_rounds=1", f"method={method}", "engines=2"))
    sampling = [command for command in commands if any(word.startswith("api/vllm/") for word in command)]
    assert [command[2] for command in sampling] == {
        "process_dpo": ["api/vllm/trajectories", "api/vllm/completions", "api/vllm/evaluate"],
        "restem": ["api/vllm/trajectories", "api/vllm/evaluate"],
    }[method]
    for command in sampling:
        assert {"client=data_parallel_engines", "client.num_engines=2", "client.max_model_len=2048"} <= {*command}
        compose_config(CONF, command[2], *command[3:])
    assert script.servers("policy=a", "run=b", "task=gsm8k", "num_rounds=1", f"method={method}", "engines=2",
                          name="iterate.sh") == []  # fmt: skip


def test_a_pilot_ends_the_script_behind_its_sampling_and_the_run_after_it_has_none(script: Script) -> None:
    given = ["policy=a", "run=b", "task=gsm8k"]
    pilot = stages(script(*given, "pilot=20", name="process_rewards.sh"))
    sampling, labels = [command for command in pilot if "-cn" in command]
    assert labels[2:4] == ["values/choose_labels", "input=b/process_rewards/trajectories.jsonl"]
    assert labels[4:] == ["output=b/process_rewards/pilot_labels.json", "stage.labels=auto",
                          "stage.of_trajectories=8000"]  # fmt: skip
    assert sampling[2] == "api/vllm/trajectories"
    assert "pilot=20" in sampling
    (whole,) = named(script(*given, name="process_rewards.sh"), "api/vllm/trajectories")
    assert {*sampling} - {*whole} == {"pilot=20"}
    cut = stages(script(*given, "pilot=20", "steps=cut_points", name="process_rewards.sh"))
    assert [command[2] for command in cut if "-cn" in command] == ["api/vllm/trajectories"]
    assert script(*given, "sample.pilot=20", name="process_rewards.sh", code=2) == []


def test_relative_labels_train_a_reward_model_and_their_pairs_end_where_its_scores_say(script: Script) -> None:
    data = script.checkout / "b" / "process_rewards"
    data.mkdir(parents=True)
    (data / "labels.json").write_text('{"labels": "relative", "accuracy": 0.1}')
    given = ["policy=a", f"run={script.checkout}/b", "task=gsm8k"]
    commands = stages(script(*given, "labels=relative", name="process_rewards.sh"))
    (estimate,) = named(commands, "values/estimate_values")
    assert {"stage.estimator=smoothed", "stage.label=relative", "stage.threshold=0.5"} <= {*estimate}
    compose_config(CONF / "stage", "values/estimate_values", *estimate[estimate.index("-cn") + 2 :])
    assert named(commands, "values/label_signal")
    assert not named(commands, "values/label_by_contrast")
    (judged,) = named(commands, "prm/prm_calibration")
    assert "stage.target=labels" in judged
    assert any(f"examples.path={data}/step_values.jsonl" in command for command in commands)
    (pairs,) = named(script(*given, "pairs=step", name="preferences.sh"), "pairs/step_preferences")
    assert {f"input={data}/trajectories.jsonl", f"stage.labels={data}/step_values.jsonl", "stage.chosen=solution"} <= {
        *pairs
    }
    (pairs,) = named(script(*given, "pairs=process", name="preferences.sh"), "pairs/process_preferences")
    assert "stage.cut_wrong_below=0.5" in pairs


def test_pairs_are_trained_with_the_task_and_the_window_that_their_solutions_were_sampled_in(script: Script) -> None:
    given = ["policy=a", f"run={script.checkout}/b"]
    script(*given, "task=gsm8k", "max_length=4096", name="process_rewards.sh")
    for more, window in (([], 4096), (["max_length=1024"], 1024)):
        train = stages(script(*given, *more, name="preferences.sh"))[-1]
        assert "exp/dpo/gsm8k" in train
        assert f"examples.max_length={window}" in train
    script(*given, "task=math", name="process_rewards.sh")
    train = stages(script(*given, name="preferences.sh"))[-1]
    assert {"exp/dpo/math", "examples.max_length=2048"} <= {*train}
    assert script("policy=a", "run=c", name="preferences.sh", code=2) == []  # no such run


def test_solutions_are_sampled_by_engines_in_place_of_a_server(script: Script) -> None:
    given = ["policy=a", "run=b", "task=gsm8k", "engines=2"]
    for name, more, configs in (
        ("process_rewards.sh", [], ["api/vllm/trajectories", "api/vllm/completions"]),
        ("evaluate.sh", ["name=x"], ["api/vllm/greedy", "api/vllm/trajectories"]),
    ):
        assert script.servers(*given, *more, name=name) == []
        commands = script(*given, *more, name=name)
        for config in configs:
            (command,) = named(commands, config)
            assert not any(word.startswith("server.") for word in command)
            composed = compose_config(CONF, config, *command[command.index("-cn") + 2 :])
            assert composed.client["_target_"].endswith(".DataParallelEngines")
            assert (composed.client["num_engines"], composed.client["max_model_len"]) == (2, 2048)


@pytest.mark.parametrize(("name", "more"), [
    ("process_rewards.sh", ["sample.requests.split=dev"]), ("evaluate.sh", ["name=x", "split=dev"])
])  # fmt: skip
def test_a_server_knows_the_problems_that_it_will_be_asked(name: str, more: list[str], script: Script) -> None:
    given = ["policy=a", "run=b", "task=problem_file", "task.path=F", "task.kind=number", *more]
    (server,) = script.servers(*given, name=name)
    assert {"task=problem_file", "task.path=F", "task.kind=number", "requests.split=dev"} <= {*server}


def test_a_server_is_not_started_for_problems_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "How much is 3 + 4?", "gld": 7}\n')
    command = [".venv/bin/python", "-m", "espalier.sampling.server", f"policy={tmp_path}", f"output={tmp_path}/log",
               "task=problem_file", f"task.path={tmp_path}", "task.kind=number"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"{tmp_path}/train.jsonl:1: the row has no answer" in done.stderr


def test_lengths_of_the_embedded_tasks_are_taken_for_no_other_by_scripts_and_programs(script: Script) -> None:
    for task, (tokens, window) in {"word_arithmetic": (128, 512), "long_arithmetic_rare": (128, 512),
                                   "gsm8k": (1024, 2048), "problem_file": (1024, 2048)}.items():  # fmt: skip
        commands = script("policy=a", "run=b", f"task={task}", name="process_rewards.sh")
        (sample,) = named(commands, "api/vllm/trajectories")
        assert {f"params.max_tokens={tokens}", f"server.max_model_len={window}"} <= set(sample)
        trains = [command for command in stages(commands) if command[0] == "trainer_base_ds_mul.py"]
        assert all(f"examples.max_length={window}" in command for command in trains)
        by_server = compose_config(CONF, "api/vllm/trajectories", f"task={task}")
        in_process = compose_config(CONF, "api/vllm/evaluate", f"task={task}")
        engines = compose_config(CONF, "rl", f"task={task}", "client=data_parallel_engines", "server=none")
        assert [config.params.max_tokens for config in (by_server, in_process, engines)] == [tokens] * 3
        windows = [by_server.server, in_process.client, engines.client]
        assert [node.max_model_len for node in windows] == [window] * 3


def test_the_embedded_tasks_are_those_that_read_no_file() -> None:
    listed = re.search(r'^embedded="([^"]*)"', (ROOT / "scripts" / "environment.sh").read_text(), re.MULTILINE)
    assert listed
    tasks = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / "task").glob("*.yaml")}

    def target(name: str) -> str:
        """Its own, or that of the task that it stands on."""
        found: str = tasks[name].get("_target_") or target(tasks[name]["defaults"][0])
        return found

    made = {name for name in tasks if "path" not in inspect.signature(find_component(target(name))).parameters}
    assert set(listed[1].split()) == made


def test_training_runs_on_as_many_ranks_as_are_asked_for(script: Script) -> None:
    (script.checkout / "b").mkdir()
    (_, _, train) = script("policy=a", "run=b", "nproc=2", "task=gsm8k", name="preferences.sh")
    assert train[:3] == ["launch.py", "--nproc_per_node=2", "trainer_base_ds_mul.py"]


def test_a_reward_model_and_its_ppo_are_trained_by_recipes_on_all_ranks(script: Script) -> None:
    (script.checkout / "b").mkdir()
    given = ["policy=a", "run=b", "task=gsm8k", "preferences=p", "held_out=h", "nproc=2", "ppo.update.clip_high=0.28",
             "deepspeed=zero2"]  # fmt: skip
    commands = stages(script(*given, name="reward_model.sh"))
    by_launch = [command for command in commands if command[0] == "launch.py"]
    assert [command[command.index("-cn") + 1] for command in by_launch] == [
        *["exp/outcome/outcome_pairs_gsm8k"] * 2, "exp/ppo/rlhf_gsm8k"
    ]  # fmt: skip
    for command, kind in zip(by_launch, ("outcome", "outcome", "ppo"), strict=True):
        compose_config(CONF, f"exp/{NEUTRAL[kind]}", *command[command.index("-cn") + 2 :])
    ppo = by_launch[-1]
    assert ppo[2] == "main.py"
    assert {"deepspeed=zero2", "params.max_tokens=1024", "reward.terms.outcome_model.path=b/reward_model/model"} <= {
        *ppo
    }
    assert [word for word in ppo if word.startswith(("kl.", "num_iterations", "update."))] == ["update.clip_high=0.28"]
    neutral = stages(script(*given, "ppo=exp/ppo/ppo_outcome_model", "max_tokens=96", "max_length=256",
                            name="reward_model.sh"))[-1]  # fmt: skip
    assert {"params.max_tokens=96", "server.max_model_len=256"} <= {*neutral}  # PPO samples in the same window
    own_ranks = stages(script(*given, "ppo.layout=one_node", "kl=0.1", name="reward_model.sh"))[-1]
    assert own_ranks[0] == "main.py"
    assert {"layout=one_node", "kl.coefficient=0.1"} <= {*own_ranks}


def test_the_quick_start_asks_its_first_policy_through_one_server_that_ends_before_training(script: Script) -> None:
    (script.checkout / "conf").symlink_to(ROOT / "conf")
    servers = script.servers("run=b", "server.dtype=float32", name="quickstart.sh")
    policies = [next(word for word in command if word.startswith("policy=")) for command in servers]
    assert policies == ["policy=b/sft/model", "policy=b/sft/model", "policy=b/dpo/model", "policy=b/process_dpo/model"]
    assert all("server.dtype=float32" in command for command in servers)


def test_a_script_that_is_stopped_leaves_no_server_behind(tmp_path: Path) -> None:
    """By SIGINT, SIGTERM and SIGKILL alike: the server watches the script, as every program of ours does."""
    folder = tmp_path / "own"
    folder.mkdir()
    words = f"""set -euo pipefail
source scripts/environment.sh
server_settings=() problems=()
python={folder}/python
serve M {folder}/server.log 512 {folder}/a.jsonl
sleep 60 &
echo $server > {folder}/pid
wait
"""
    (folder / "python").write_text(
        f"#!/usr/bin/env bash\necho http://127.0.0.1:7\nexec {ROOT}/.venv/bin/python -c "
        "'from espalier.runtime.process_lifetime import die_with_owner\nimport time\ndie_with_owner(0.1)\n"
        "time.sleep(60)'\n"
    )
    (folder / "python").chmod(0o755)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        (folder / "pid").unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "ESPALIER_OWNER"}
        # Tests that were started in a shell's background ignore SIGINT, and so would a script of theirs.
        with subprocess.Popen(
            ["bash", "-c", words], cwd=ROOT, env=environment, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as running:  # fmt: skip
            deadline = time.monotonic() + 30
            while not (folder / "pid").exists() or not (folder / "pid").read_text().strip():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server = int((folder / "pid").read_text())
            time.sleep(0.5)  # until the script waits
            os.kill(running.pid, number)
            if number == signal.SIGINT:
                os.killpg(running.pid, number)  # as a terminal does
            running.wait(20)
        while Path(f"/proc/{server}").exists() and "Z" not in Path(f"/proc/{server}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline + 30, f"the server is left behind after {number.name}"
            time.sleep(0.1)
