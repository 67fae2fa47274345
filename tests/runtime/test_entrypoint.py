"""A program's start: argv, one line for what the user got wrong, exit codes, what a config may build."""

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import ConfigCompositionException

from espalier.data.batches.loader import Loader
from espalier.data.records import BadInput
from espalier.runtime.config_errors import describe_config_error
from espalier.runtime.entrypoint import (
    CONF,
    ROOT,
    BadConfig,
    _normalise_argv,
    build,
    check_component,
    compose_config,
    entrypoint,
)
from espalier.runtime.errors import exit_code_of, line_of
from espalier.runtime.renamed import RENAMED, new_name
from espalier.runtime.schemas import RLConfig, SampleConfig, StageConfig, TrainConfig

GIVEN = ["output_dir=out", "model.path=m", "examples.path=e"]


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What starting a program changes is put back."""
    for name in ("HYDRA_FULL_ERROR", "LOCAL_RANK", "ESPALIER_OWNER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Start a program in this process with these arguments; its exit code."""

    def run(
        *arguments: str,
        main: Any = lambda config: None,
        schema: type = TrainConfig,
        name: str = "train",
        folder: str = "",
    ) -> int:
        monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
        with pytest.raises(SystemExit) as stop:
            entrypoint(schema, config_name=name, config_folder=folder)(main)()
        return int(stop.value.code or 0)

    return run


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing else may have been printed."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_a_config_arrives_typed_with_its_overrides(start: Any) -> None:
    seen: list[TrainConfig] = []
    assert start(*GIVEN, "update.learning_rate=0.5", "tracking.tensorboard=true", main=seen.append) == 0
    assert isinstance(seen[0], TrainConfig)
    assert (seen[0].update.learning_rate, seen[0].output_dir) == (0.5, "out")
    assert seen[0].tracking.tensorboard is True


def test_the_return_value_is_the_exit_code(start: Any) -> None:
    assert start(*GIVEN, main=lambda config: 1) == 1


def test_an_option_of_vllm_s_that_no_config_names_is_added() -> None:
    words, key = ["policy=m", "output=o"], "server.options.distributed_executor_backend"
    with pytest.raises(ConfigCompositionException) as caught:
        compose_config(SampleConfig, "api/vllm/trajectories", [*words, f"{key}=mp"])
    assert f"an option of vLLM's that no config names is added by +{key}=…" in describe_config_error(caught.value)
    found = compose_config(SampleConfig, "api/vllm/trajectories", [*words, f"+{key}=mp"])
    assert found.server["options"]["distributed_executor_backend"] == "mp"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["learningrate=1"], "there is no key 'learningrate': did you mean 'update.learning_rate'?"),
        (["tracking.tensorbord=true"], "there is no key 'tracking.tensorbord': did you mean 'tracking.tensorboard'?"),
        (["model.pth=x"], "there is no key 'model.pth': did you mean 'model.path'?"),
        (
            ["update.learning_rate=fast"],
            "update.learning_rate: Value 'fast' of type 'str' could not be converted to Float",
        ),
        (["update.learning_rate=[1"], "cannot read 'update.learning_rate=[1'"),
        (["-cn", "nosuch"], f"there is no config 'nosuch' in {CONF}: name a file there, without .yaml"),
        (["-cn", "exp/sft/word_arithmetik"], "did you mean exp/sft/word_arithmetic?"),
        (["-cn", "exp/sft"], "exp/sft is a folder of configs: the choices are"),
        (["-cp", "conf/nosuch", "-cn", "x"], "-cp conf/nosuch: no such folder"),
        (["-cn"], "-cn needs a value"),
        (["--max_steps=3"], "there is no flag --max_steps: settings are written key=value, without dashes"),
        (["model=nosuch"], "there is no model/nosuch: the choices are"),
        (["objective=dpoo"], "there is no objective/dpoo: did you mean 'dpo'?"),
        (["nosuch=x"], "there is no key 'nosuch'"),
        ([], "output_dir has no value: add output_dir=... to the command"),
        (
            ["output_dir=x", "model.path=m"],
            "examples.path has no value: add examples.path=... to the command",
        ),
        (["-cn", "stage/values/cut_states", "output=x"], "this program needs a TrainConfig: choose another -cn"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*arguments) == 2
    assert text in error_line(capsys)


def test_an_unknown_task_names_those_there_are(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-cn", "problems/make_demonstrations", "output=x", "task=nosuch"]
    assert start(*arguments, schema=StageConfig, folder="stage") == 2
    line = error_line(capsys)
    assert "there is no task/nosuch: the choices are" in line
    assert "word_arithmetic" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: [/train, _self_]\nlearningrate: 1\n",
            "In 'mine': there is no key 'learningrate': did you mean",
        ),
        (
            "defaults: [/train, {override /model: nosuch}, _self_]\n",
            "there is no model/nosuch: the choices are",
        ),
        ("defaults: [/train, {override /nosuch: x}, _self_]\n", "In 'mine': Could not override 'nosuch'"),
        ("defaults: [/train, _self_]\nseed: [1\nmax_steps: 2\n", "mine.yaml:4: expected ',' or ']'"),
        ("seed: 1\nseed: 2\n", "mine.yaml:3: found duplicate key seed"),
        (
            "defaults: [/train, _self_]\noutput_dir: ${nosuch}\n",
            "output_dir: Interpolation key 'nosuch' not found",
        ),
        ("seed: 1\n", "this program needs a TrainConfig: choose another -cn"),
    ],
)
def test_a_mistake_in_a_yaml_is_one_line_and_exit_code_2(
    text: str, message: str, start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\n" + text)
    assert start("-cp", str(tmp_path), "-cn", "mine", "model.path=m" if "train" in text else "seed=3") == 2
    assert message in error_line(capsys)


def test_an_error_that_states_its_code_is_one_line(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def main(config: TrainConfig) -> None:
        raise BadInput("problems.jsonl:17: gold must be str, got 42")

    assert start(*GIVEN, main=main) == 2
    assert error_line(capsys) == "error: problems.jsonl:17: gold must be str, got 42\n"


def test_a_full_disk_is_exit_code_4(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def main(config: TrainConfig) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/model")

    assert start(*GIVEN, main=main) == 4
    assert error_line(capsys).startswith("error: out/model: No space left on device: free space")


def test_a_path_that_cannot_be_what_it_is_to_be_is_named_in_one_line(tmp_path: Path) -> None:
    """A file where a folder is needed, and a folder where a file is."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for make, said in (
        (lambda: (tmp_path / "file" / "x" / "y").mkdir(parents=True), "file/x/y: Not a directory: choose another path"),
        (lambda: (tmp_path / "file").mkdir(parents=True), "file: File exists: choose another path"),
        (lambda: (tmp_path / "folder").write_text("x"), "folder: Is a directory: choose another path"),
    ):
        with pytest.raises(OSError, match="Errno") as raised:
            make()
        assert exit_code_of(raised.value) == 2
        assert said in line_of(raised.value)
    assert exit_code_of(FileExistsError("a lock of ours")) is None  # names no path: nobody's setting


def test_an_interrupt_is_exit_code_130_and_a_signal_143(start: Any) -> None:
    def interrupt(config: TrainConfig) -> None:
        raise KeyboardInterrupt

    def terminate(config: TrainConfig) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert start(*GIVEN, main=interrupt) == 130
    assert start(*GIVEN, main=terminate) == 143


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(config: TrainConfig) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sys, "argv", ["program.py", *GIVEN])
    with pytest.raises(ZeroDivisionError):
        entrypoint(TrainConfig, config_name="train")(main)()


def test_other_ranks_of_a_machine_say_nothing(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert start("learningrate=1") == 2
    assert capsys.readouterr().err == ""


UNREAD = """
import os, sys
from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.schemas import TrainConfig

@entrypoint(TrainConfig, config_name="train", is_on_ranks=True)
def main(config):
    sys.stdin.readline()
    for stream in (sys.stdout, sys.stderr):
        print("a step", file=stream, flush=True)
    open(os.path.join(config.output_dir, "saved"), "w").close()
main()
"""


@pytest.mark.parametrize("launcher", ["ray", ""])
def test_a_rank_saves_where_the_actor_that_reads_what_it_prints_is_gone(launcher: str, tmp_path: Path) -> None:
    settings = [f"output_dir={tmp_path}", "model.path=m", "examples.path=e"]
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD, *settings],
        env=os.environ | {"ESPALIER_LAUNCHER": launcher},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for stream in (process.stdout, process.stderr):
        assert stream
        stream.close()
    assert process.stdin
    process.stdin.write(b"go on\n")
    process.stdin.close()
    code = process.wait(60)
    assert (code == 0) == (launcher == "ray"), "behind any other pipe a program ends with it"
    assert (tmp_path / "saved").is_file() == (launcher == "ray")


def test_argv_is_flags_then_overrides_without_local_rank() -> None:
    given = ["seed=1", "--local_rank=0", "-cn", "exp/dpo/x", "max_steps=2", "--local-rank", "3", "+new.key=1"]
    found = _normalise_argv(given, CONF)
    assert found[:4] == ["--config-path", str(CONF), "-cn", "exp/dpo/x"]
    assert found[-3:] == ["seed=1", "max_steps=2", "+new.key=1"]
    assert not any("local" in word for word in found)
    assert "hydra.output_subdir=null" in found


@pytest.mark.parametrize("words", [["-cp", "conf/exp/sft"], ["-cp=conf/exp/sft"], ["--config-path", "conf/exp/sft"]])
def test_a_config_path_is_found_from_the_root_and_conf_is_searched_too(words: list[str]) -> None:
    found = _normalise_argv(words, CONF)
    assert found[:4] == ["--config-path", str(CONF / "exp/sft"), "--config-dir", str(CONF)]


def test_build_makes_the_component_with_what_the_code_adds() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = build({"_target_": "torch.optim.SGD", "momentum": 0.5}, params=[weight], lr=0.1)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "torch.load",
        "torch.optim_of_mine.run",
        "espalier.runtime.entrypoint.os.system",
        "espalier.runtime.run_dir.subprocess.run",
        "espalier.runtime.entrypoint.instantiate",
        "espalier.data.jsonl.Path",
    ],
)
def test_a_config_can_build_nothing_but_our_own_and_optimizers(target: str) -> None:
    with pytest.raises(BadConfig, match=r"is not admitted|does not exist"):
        build({"_target_": target, "command": "true"})
    with pytest.raises(BadConfig, match=r"is not admitted|does not exist"):
        build({"_target_": "torch.optim.SGD", "params": [{"_target_": target}]})


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            {"_target_": "espalier.data.batches.loader.Loder"},
            "_target_ 'espalier.data.batches.loader.Loder' does not exist",
        ),
        ({"_target_": "espalier.data.nosuch.Loader"}, "_target_ 'espalier.data.nosuch.Loader' does not exist"),
        (
            {"_target_": "data.batches.loader.Loader"},
            "_target_ 'data.batches.loader.Loader' is now 'espalier.data.batches.loader.Loader'",
        ),
        (
            {"_target_": "torch.optim.SGD", "params": [], "momentun": 0.5},
            "no setting 'momentun': did you mean 'momentum'",
        ),
        ({"_target_": "torch.optim.SGD"}, "missing a required argument: 'params'"),
        ({"path": "x"}, "a component needs a _target_"),
        (None, "a component needs a _target_"),
    ],
)
def test_a_component_that_cannot_be_built_is_explained(node: Any, text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        build(node)


LOADER = {"_target_": "espalier.data.batches.loader.Loader", "examples": [], "batch_size": 4, "micro_batch_size": 2,
          "seed": 0}  # fmt: skip
SGD = {"_target_": "torch.optim.SGD", "params": []}
LAYOUT = {"_target_": "espalier.pipeline.evaluation.score_responses.ScoreResponses", "model": "m"}
SPLIT = {"_target_": "espalier.pipeline.values.split_steps.SplitSteps", "policy": "m"}


@pytest.mark.parametrize(
    ("node", "values", "text"),
    [
        (LOADER, {"batch_size": 3.5}, "batch_size must be a whole number, got 3.5"),
        (LOADER, {"batch_size": 4.0}, "batch_size must be a whole number, got 4.0"),
        (LOADER, {"seed": True}, "seed must be a whole number, got true"),
        (LOADER, {"seed": "no"}, "seed must be a whole number, got 'no'"),
        (LAYOUT, {"is_chat": 1}, "is_chat must be true or false or null, got 1"),
        (LAYOUT, {"is_reference_free": 0.0}, "is_reference_free must be true or false, got 0.0"),
        (SPLIT, {"threshold": False}, "threshold must be a number, got false"),
        (SPLIT, {"num_segments": 2.5}, "num_segments must be a whole number or null, got 2.5"),
        (SGD, {"momentum": True}, "momentum must be a number, got true"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(node: Any, values: dict[str, Any], text: str) -> None:
    for checked in ({**node, **values}, {**SGD, "params": [{**node, **values}]}):  # also within another component
        with pytest.raises(BadConfig, match=rf"^config: {node['_target_']}: {text}$"):
            build(checked)


def test_a_whole_number_is_a_number_and_what_has_no_value_is_not_checked() -> None:
    for node in ({**SPLIT, "num_segments": None, "threshold": 1}, {**LOADER, "seed": "???"}):
        check_component(node)


def test_what_a_component_refuses_keeps_its_own_error() -> None:
    node = {
        "_target_": "espalier.data.batches.loader.Loader",
        "examples": [],
        "batch_size": 5,
        "micro_batch_size": 2,
        "seed": 0,
    }
    with pytest.raises(BadInput, match="batch_size 5 is not a multiple"):
        build(node)
    assert Loader([], batch_size=4, micro_batch_size=2, seed=0).batch_size == 4


def run_program(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_misspelt_key_ends_a_real_program_in_one_line(tmp_path: Path) -> None:
    done = run_program(str(ROOT / "trainer_base_ds_mul.py"), "learningrate=1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: config: there is no key 'learningrate': did you mean 'update.learning_rate'?\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_program_works_from_another_folder_with_overrides_on_both_sides(tmp_path: Path) -> None:
    words = ["output=here/problems.jsonl", "--local_rank=0", "-cp", "conf/stage", "-cn", "problems/list_problems"]
    small = ["task=word_arithmetic", "task.num_train=10"]
    done = run_program(str(ROOT / "run_stage.py"), *words, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "here" / "problems.jsonl").read_text().splitlines()) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["advantage=group_relative"], "there is no advantage/group_relative: it is now 'grpo'"),
        (["learning_rate=1"], "there is no key 'learning_rate': it is now 'update.learning_rate'"),
        (["importance_cap=2"], "there is no key 'importance_cap': it is now 'update.tis_cap'"),
        (["rollout.eval_every=2"], "there is no key 'rollout.eval_every': it is now 'evaluation.every'"),
        (["num_in_flight=3"], "there is no key 'num_in_flight': it is now 'engine.concurrency'"),
        (["advantage=vineppo", "advantage.cut_points.threshold=0.8"],
         "there is no key 'advantage.cut_points': its settings are those of advantage=spo now"),
        (["-cn", "exp/ppo/group_relative_word_arithmetic"], "it is now exp/ppo/grpo_word_arithmetic"),
    ],
)  # fmt: skip
def test_a_name_of_before_says_the_new_one(
    words: list[str], line: str, start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*words, "model.path=M", "output_dir=D", schema=RLConfig, name="rl") == 2
    assert line in error_line(capsys)


@pytest.mark.parametrize("words", [
    ["-cn", "exp/ppo/vineppo_word_arithmetic", "size=ppo/1.5b"],
    ["-cn", "exp/ppo/vineppo_word_arithmetic", "+size=ppo/1.5b"],
    ["-cn", "exp/ppo/vineppo_word_arithmetic", "size=[ppo/7b,ppo/lora]"],
])  # fmt: skip
def test_a_size_of_an_experiment_without_sizes_names_those_that_have_them(
    words: list[str], start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*words, "model.path=M", "output_dir=D", schema=RLConfig, name="rl") == 2
    line = error_line(capsys)
    assert line.startswith("error: config: size= is for the experiments on data of your own")
    names = re.findall(r"exp/\w+/\w+", line)
    assert names == ["exp/dpo/preference_pairs", "exp/ppo/grpo_problem_file", "exp/ppo/ppo_outcome_model",
                     "exp/reward/outcome_pairs", "exp/reward/step_values", "exp/sft/demonstrations"]  # fmt: skip


def test_a_size_that_there_is_not_is_named(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-cn", "exp/ppo/grpo_problem_file", "size=ppo/9b", "model.path=M", "output_dir=D"]
    assert start(*words, schema=RLConfig, name="rl") == 2
    assert "there is no size/ppo/9b: " in error_line(capsys)


def test_a_stage_without_its_folder_says_the_name_with_it(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("-cn", "cut_states", "output=x", schema=StageConfig, folder="stage") == 2
    assert error_line(capsys) == "error: config: there is no config 'cut_states': it is now values/cut_states\n"


def test_defaults_that_name_a_stage_without_its_folder_say_the_name_with_it(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\ndefaults: [/stage/cut_states, _self_]\n")
    assert start("-cp", str(tmp_path), "-cn", "mine", "output=x", schema=StageConfig, folder="stage") == 2
    assert error_line(capsys).endswith(": there is no stage/cut_states: it is now /stage/values/cut_states\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["main.py", "critic.learning_rate=1"], "a setting does not fit this config (AssertionError: "),
        (["run_stage.py", "-cn", "problems/list_problems", "task=null"], "a setting does not fit this config (Value"),
        (["run_stage.py", "input=a.jsonl", "output=b.jsonl"], "name a config: -cn FOLDER/NAME of "),
        (["run_stage.py", "-cn", "values/cut_states", "output=b.jsonl"], "the file to read is not named: add input=FI"),
        (["run_stage.py", "-cn", "values/step_statistics", "task=word_arithmetic", "input=a.jsonl", "output=b.json"],
         "a.jsonl: no such file: check the path, or run the stage that writes it"),
    ],
)  # fmt: skip
def test_what_hydra_has_no_words_for_ends_in_one_line(words: list[str], line: str, tmp_path: Path) -> None:
    program, *settings = words
    command = [sys.executable, str(ROOT / program), *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1


def test_a_target_whose_module_has_moved_says_where_it_is() -> None:
    moved = "does not exist: it is now 'espalier.pipeline.values.cut_states.CutStates'"
    with pytest.raises(BadConfig, match=moved):
        build({"_target_": "espalier.pipeline.cut_states.CutStates"})
    with pytest.raises(BadConfig, match="has no attribute 'CutSteps'"):
        build({"_target_": "espalier.pipeline.values.cut_states.CutSteps"})


def test_every_new_name_is_there() -> None:
    """What an old name is said to be now is a config, a key or an option."""
    paths = list((ROOT / "conf").rglob("*.yaml"))
    known = {path.stem for path in paths} | set(re.findall(r"^ *(\w+):", "\n".join(p.read_text() for p in paths), re.M))
    topics = [(f"{topic.name}.", topic.type) for kind in (RLConfig, TrainConfig, SampleConfig)
              for topic in dataclasses.fields(kind) if dataclasses.is_dataclass(topic.type)]  # fmt: skip
    known |= {f"{prefix}{field.name}" for prefix, kind in topics for field in dataclasses.fields(kind)}
    assert not {new_name(old) for old in RENAMED} - known
    assert not set(RENAMED) & {path.stem for path in paths}


def test_a_config_folder_beside_the_user_comes_before_one_of_the_same_name_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "conf" / "exp" / "dpo"
    own.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(own) in _normalise_argv(["-cp", "conf/exp/dpo", "-cn", "x"], CONF)
    assert str(CONF / "exp" / "sft") in _normalise_argv(["-cp", "conf/exp/sft", "-cn", "x"], CONF)
