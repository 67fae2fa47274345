"""The doctor: what a check's outcome becomes, what it sees of machine, prompts and resources, and a sound config."""

import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.checks.check import Check, CheckFailed, Finding, Skipped, examine, show
from espalier.checks.checklist import checks_of
from espalier.checks.machine import check_server_port, check_versions
from espalier.checks.resources import (
    Need,
    available_memory,
    check_disk,
    check_memory,
    checkpoint_bytes,
    existing,
    num_parameters,
    trained,
)
from espalier.checks.template import check_template
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, Problem
from espalier.data.tasks.problem_file import ProblemFile
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import RLConfig, SampleConfig, TrainConfig
from espalier.sampling.server import PortInUse
from espalier.training.memory_of_run import model_paths


def raising(error: Exception) -> Callable[[], str]:
    def run() -> str:
        raise error

    return run


def warning() -> str:
    logging.getLogger("rl").warning("two of %d", 3)
    return "fine"


def test_a_check_is_one_line_whatever_becomes_of_it() -> None:
    checks = [
        Check("one", lambda: "all\nwell"),
        Check("two", raising(BadInput("f.jsonl:3: no gold: add it"))),
        Check("three", raising(Skipped("nothing of the kind"))),
        Check("four", raising(KeyError("x"))),
        Check("five", warning),
        Check("six", lambda: "never", is_rehearsal=True),
    ]
    found = list(examine(checks))
    assert [(row.status, row.text) for row in found] == [
        ("ok", "all well"),
        ("BAD", "f.jsonl:3: no gold: add it"),
        ("--", "nothing of the kind"),
        ("BAD", "KeyError: 'x'"),
        ("ok", "fine (warning: two of 3)"),
        ("--", "not tried: a check above failed"),
    ]


def test_a_rehearsal_is_made_where_all_before_it_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(examine([Check("one", lambda: "well"), Check("two", lambda: "made", is_rehearsal=True)]))
    assert [row.status for row in found] == ["ok", "ok"]
    assert show(found) == 0
    assert show([Finding("x", "BAD", "no"), Finding("y", "--", "none")]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["--   y                none", "1 checks, 1 bad"]


def test_a_package_that_is_missing_or_of_another_version_is_named(tmp_path: Path) -> None:
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("# these\npytest>=1\npytest-xdist<1\nno-such-package>=2\n")
    with pytest.raises(CheckFailed, match=r"pytest-xdist is .* \(wanted <1\), no-such-package is missing"):
        check_versions(wanted)
    assert "packages as requirements" in check_versions()


def test_a_port_that_is_taken_is_named() -> None:
    server = {"_target_": "espalier.sampling.server.VLLMServer"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on .* is in use"):
            check_server_port({**server, "port": port})
    assert check_server_port({**server, "port": 0}) == "a free one is chosen"
    with pytest.raises(Skipped):
        check_server_port({})


def test_memory_and_disk_are_counted_from_the_sizes_of_weights(tiny_policy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    number = sum(value.numel() for value in load_file(tiny_policy / "model.safetensors").values())
    assert num_parameters(str(tiny_policy)) == number
    assert trained("it", str(tiny_policy), is_adapter=False, is_divided=False).bytes == 16 * number
    assert trained("it", str(tiny_policy), is_adapter=True, is_divided=False).bytes == 4 * number
    assert trained("it", str(tiny_policy), is_adapter=False, is_divided=True).bytes == 0
    # two kept and the one that is written: weights and two averages each; then the model
    assert checkpoint_bytes(str(tiny_policy), 2) == number * (3 * 12 + 4)
    needs = [Need("the policy", 3 * 2**30), Need("an engine", 2**30)]
    assert "at least 4.00 GiB of memory (the policy 3.00, an engine 1.00), 4.0 GiB are free" in check_memory(
        needs, 4 * 2**30
    )
    with pytest.raises(CheckFailed, match=r"at least 4\.00 GiB"):
        check_memory(needs, 4 * 2**30 - 1)
    assert available_memory() > 2**28
    assert existing(str(tmp_path / "a" / "b")) == tmp_path
    assert "are free" in check_disk(str(tmp_path / "a"), 1)
    with pytest.raises(CheckFailed, match="free space"):
        check_disk(str(tmp_path), 2**60)
    with pytest.raises(Skipped, match="no folder with safetensors"):
        num_parameters("somebody/model")


def test_a_template_that_leaves_out_the_question_is_seen(tokenizer: Any) -> None:
    problems = [Problem(f"p{k}", f"What is {k} + 1?", str(k + 1)) for k in range(3)]
    task = ProblemFile("x", template=PromptTemplate("{question}", is_chat=True), kind="number")
    sound = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = sound
        assert check_template(task, tokenizer, problems).startswith("the tokenizer's chat template")
        tokenizer.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
        with pytest.raises(CheckFailed, match="chat template leaves out the question of problem 'p0'"):
            check_template(task, tokenizer, problems)
        tokenizer.chat_template = None
        with pytest.raises(BadInput, match="has no chat template"):
            check_template(task, tokenizer, problems)
    finally:
        tokenizer.chat_template = before


def test_a_prompt_that_begins_twice_is_seen(tokenizer: Any) -> None:
    class Doubling:
        """Adds its begin token to everything, twice."""

        bos_token, eos_token, bos_token_id, eos_token_id = "<b>", "<e>", 7, 8
        chat_template = None

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoded", (), {"input_ids": [7, 7, *tokenizer(text).input_ids]})()

        def decode(self, ids: list[int], **_: Any) -> str:
            return str(tokenizer.decode(ids[2:]))

    task = WordArithmetic(num_train=20, num_dev=5, num_test=5, num_demonstrations=20)
    with pytest.raises(CheckFailed, match="begins with <b> twice"):
        check_template(task, Doubling(), task.problems("train"))


def test_the_models_of_a_config_are_found_wherever_they_stand() -> None:
    node = {
        "terms": {"a": {"_target_": "x", "path": "P"}, "b": [{"_target_": "y", "path": "Q"}]},
        "path": "no component",
    }
    assert list(model_paths(node)) == ["P", "Q"]


WORDS = {
    RLConfig: ("exp/ppo/ppo_word_arithmetic", ["model.path={policy}", "output_dir={folder}/run"]),
    SampleConfig: ("api/vllm/trajectories", ["policy={policy}", "output={folder}/t.jsonl"]),
    TrainConfig: ("exp/sft/word_arithmetic", ["model.path={policy}", "examples.path={folder}/d.jsonl",
                                              "output_dir={folder}/run"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WORDS)
def test_a_sound_config_passes_every_check_that_loads_nothing(kind: type, tiny_policy: Path, tmp_path: Path) -> None:
    name, words = WORDS[kind]
    (tmp_path / "d.jsonl").write_text('{"id": "d", "prompt": "Mia has 2 pens.\\n", "completion": "#### 2"}\n')
    config = compose_config(kind, name, [word.format(policy=tiny_policy, folder=tmp_path) for word in words])
    found = list(examine(checks_of(config, has_engine=False)))
    assert [row for row in found if row.status == "BAD"] == []
    assert {"memory", "disk", "tokenizer", "stop tokens"} <= {row.name for row in found if row.status == "ok"}
    assert not (tmp_path / "run").exists()
    every = [check.name for check in checks_of(config)]
    assert every[-1] in ("engine", "step")
    assert checks_of(config)[-1].is_rehearsal


def test_a_training_step_is_rehearsed_and_nothing_is_left(tiny_policy: Path, tmp_path: Path) -> None:
    name, words = WORDS[TrainConfig]
    (tmp_path / "d.jsonl").write_text('{"id": "d", "prompt": "Mia has 2 pens.\\n", "completion": "#### 2"}\n')
    words = [word.format(policy=tiny_policy, folder=tmp_path) for word in words]
    config = compose_config(TrainConfig, name, [*words, "update.batch_size=2", "update.micro_batch_size=2"])
    *_, packing, step = examine(checks_of(config))
    assert (packing.status, step.status) == ("ok", "ok"), (packing, step)
    assert "one step of 2 examples: loss " in step.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl"]


@pytest.mark.slow
def test_a_step_with_deepspeed_is_rehearsed_without_a_launcher(tiny_policy: Path, tmp_path: Path) -> None:
    """In a process of its own: DeepSpeed keeps its groups."""
    name, words = WORDS[TrainConfig]
    (tmp_path / "d.jsonl").write_text('{"id": "d", "prompt": "Mia has 2 pens.\\n", "completion": "#### 2"}\n')
    words = [word.format(policy=tiny_policy, folder=tmp_path) for word in words]
    words += ["update.batch_size=2", "update.micro_batch_size=2", "deepspeed=zero2"]
    command = [sys.executable, "doctor.py", "-cn", name, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "one step of 2 examples: loss " in run.stdout
