"""The run directory: what it stores, what it refuses, and that nothing is overwritten."""

import inspect
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.runtime.entrypoint import BadConfig, find_component
from espalier.runtime.fingerprints import input_fingerprints
from espalier.runtime.renamed import NOT_AS_BEFORE
from espalier.runtime.run_dir import (
    as_begun,
    changed_keys,
    check_run_dir,
    code_commit,
    is_run_finished,
    open_run_dir,
    same_origin,
    versions,
)
from espalier.runtime.schemas import RLConfig, StageConfig, TrainConfig
from tests.support.root_config import root_config


def config(**changes: Any) -> TrainConfig:
    start = TrainConfig(
        output_dir="out",
        model={"_target_": "espalier.models.load.load_policy", "path": "policy"},
        objective={"_target_": "x"},
        examples={"path": "demos.jsonl"},
        optimizer={"betas": [0.9, 0.95]},
        max_steps=10,
    )
    return root_config(start, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_new_run_stores_its_config_commit_and_versions(tmp_path: Path) -> None:
    folder = open_run_dir(str(tmp_path / "run"), config())
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert stored["model"]["path"] == "policy"
    assert stored["update"]["learning_rate"] == 1e-5
    provenance = yaml.safe_load((folder / "provenance.yaml").read_text())
    assert provenance["versions"] == versions()
    assert provenance["commit"]


def test_a_run_whose_examples_or_weights_have_changed_since_is_neither_finished_nor_gone_on_with(
    tmp_path: Path,
) -> None:
    pairs, policy = tmp_path / "pairs.jsonl", tmp_path / "policy"
    policy.mkdir()
    pairs.write_text("1\n")
    (policy / "model.safetensors").write_bytes(b"old weights")
    made = config(examples={"path": str(pairs)}, model={"path": str(policy)})
    folder = open_run_dir(str(tmp_path / "run"), made)
    (folder / "model").mkdir()
    assert is_run_finished(check_run_dir(str(folder), made), made)
    for path, before, after in (
        (pairs, b"1\n", b"2\n"),
        (policy / "model.safetensors", b"old weights", b"new weights"),
    ):
        path.write_bytes(after)
        with pytest.raises(BadConfig, match=rf"began with {pairs if path == pairs else policy} as it was"):
            check_run_dir(str(folder), made)
        path.write_bytes(before)
    pairs.unlink()
    assert check_run_dir(str(folder), made) == folder, "what is gone cannot be compared"


def test_inputs_of_a_run_are_files_and_weights_that_are_there_but_no_output_and_no_log(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    for name in ("run/model/model.safetensors", "demos.jsonl", "server.log"):
        (tmp_path / name).write_text("x")
    made = config(
        output_dir=str(tmp_path / "run"), model={"path": "x" * 5000, "log": str(tmp_path / "server.log")},
        examples={"path": [str(tmp_path / "demos.jsonl"), str(tmp_path / "run" / "model"), "\0", "hub/name"]},
    )  # fmt: skip
    assert list(input_fingerprints(made)) == [str(tmp_path / "demos.jsonl")]


def test_the_same_config_is_accepted_and_nothing_is_written(tmp_path: Path) -> None:
    folder = open_run_dir(str(tmp_path / "run"), config())
    before = contents(folder)
    assert open_run_dir(str(folder), config()) == folder
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"learning_rate": 0.5}, "update.learning_rate: 1e-05 there, 0.5 now"),
        ({"seed": 3}, "seed: 0 there, 3 now"),
        ({"examples": {"path": "other.jsonl"}}, "examples.path: 'demos.jsonl' there, 'other.jsonl' now"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16: None there"),
        (
            {"deepspeed": {"zero_optimization": {"zero_quantized_weights": True}}},
            "deepspeed.zero_optimization: None there",
        ),
        ({"model": {"path": "policy"}}, "model._target_: 'espalier.models.load.load_policy' there, None now"),
    ],
)
def test_another_config_is_refused_with_the_key_named(changes: Any, text: str, tmp_path: Path) -> None:
    folder = open_run_dir(str(tmp_path / "run"), config())
    before = contents(folder)
    with pytest.raises(ValueError, match=r"choose another output_dir") as error:
        open_run_dir(str(folder), config(**changes))
    assert text in str(error.value)
    assert contents(folder) == before


def test_another_length_of_the_same_run_is_accepted(tmp_path: Path) -> None:
    folder = open_run_dir(str(tmp_path / "run"), config())
    longer = config(max_steps=20, num_epochs=3.0, save_every=5, evaluation_every=7, log_every=1, checkpoints_keep=4)
    assert check_run_dir(str(folder), longer) == folder
    settings = {
        "zero_optimization": {"stage": 2, "zero_quantized_weights": False}, "bf16": {"enabled": False},
        "fp16": {"enabled": False, "loss_scale": 0}, "tensor_parallel": {"autotp_size": 1}, "gradient_clipping": 1.0,
        "wall_clock_breakdown": True, "steps_per_print": 9,
    }  # fmt: skip
    assert check_run_dir(str(folder), config(deepspeed=settings)) == folder
    assert check_run_dir(str(folder), config(deepspeed={})) == folder


def test_a_run_directory_of_before_is_refused_by_a_line_that_names_the_new_key(tmp_path: Path) -> None:
    folder = open_run_dir(str(tmp_path / "run"), config())
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    flat = {**stored, **stored.pop("update"), "eval_every": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump(flat))
    line = (
        "holds a run of an earlier version, whose config has 'batch_size' \\(it is now 'update.batch_size'\\): choose"
    )
    with pytest.raises(BadConfig, match=line):
        check_run_dir(str(folder), config())


def test_a_run_that_wrote_no_metric_of_its_evaluations_went_by_accuracy(tmp_path: Path) -> None:
    folder, made = tmp_path / "run", root_config(RLConfig, output_dir=str(tmp_path / "run"))
    open_run_dir(str(folder), made)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    del stored["evaluation"]["metric"]
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    assert check_run_dir(str(folder), made) == folder
    with pytest.raises(BadConfig, match=r"evaluation\.metric: None there, 'reward' now"):
        check_run_dir(str(folder), root_config(RLConfig, output_dir=str(folder), evaluation_metric="reward"))


def test_other_passes_over_the_rollouts_are_another_run() -> None:
    one, two = ({"update": {"num_epochs": number, "max_skipped": number}, "engine": {"concurrency": number}}
                for number in (1, 2))  # fmt: skip
    assert changed_keys(one, two) == [("update.num_epochs", 1, 2)]


def test_a_nested_key_called_like_a_length_is_not_one() -> None:
    assert changed_keys({"model": {"max_steps": 1}}, {"model": {"max_steps": 2}}) == [("model.max_steps", 1, 2)]
    assert changed_keys({"max_steps": 1}, {"max_steps": 2}) == []


def test_checking_a_run_directory_makes_nothing(tmp_path: Path) -> None:
    check_run_dir(str(tmp_path / "run"), config())
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match="is a file: choose another output_dir"):
        open_run_dir(str(tmp_path / "run"), config())


@pytest.mark.parametrize("name", ["model", "checkpoints", "metrics.jsonl"])
def test_a_folder_of_something_else_is_no_run_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"has no config.yaml\): choose another output_dir"):
        open_run_dir(str(tmp_path), config())


def test_an_empty_folder_becomes_a_run_directory(tmp_path: Path) -> None:
    assert (open_run_dir(str(tmp_path), config()) / "config.yaml").is_file()


def test_same_origin_names_what_differs() -> None:
    made = StageConfig(output="o", input="a.jsonl", seed=1)
    stored = {"config": {**vars(made), "tracking": vars(made.tracking)}, "inputs": {"a.jsonl": "11"}}
    assert same_origin(stored, made, {"a.jsonl": "11"}) == ""
    assert same_origin(stored, made, {"a.jsonl": "22"}) == "its input a.jsonl has changed"
    assert same_origin(stored, replace(made, seed=2), {"a.jsonl": "11"}) == "seed was 1, now 2"
    assert same_origin(stored, replace(made, seed=2), {"a.jsonl": "11"}, ignore=("seed",)) == ""


SCORE_STEPS = {"_target_": "espalier.pipeline.prm.score_steps.ScoreSteps", "model": "m", "layout": "auto"}
NEW_ONES = {"split": "test", "batch_tokens": 16384, "deviations": None, "max_length": 0}


@pytest.mark.parametrize(
    ("new", "difference"),
    [
        (NEW_ONES, ""),
        ({**NEW_ONES, "max_length": 512}, "stage.max_length was None, now 512"),
        ({**NEW_ONES, "max_length": False}, "stage.max_length was None, now False"),
        ({"no_such_setting": 0}, "stage.no_such_setting was None, now 0"),
    ],
)
def test_a_setting_that_there_was_none_of_differs_where_it_is_not_its_default(
    new: dict[str, Any], difference: str
) -> None:
    made = StageConfig(output="o", input="a.jsonl", stage={**SCORE_STEPS, **new})
    stored = {"config": {**vars(made), "tracking": vars(made.tracking), "stage": dict(SCORE_STEPS)}, "inputs": {}}
    assert same_origin(stored, made, {}) == difference
    within = StageConfig(output="o", stage={"_target_": "x", "parts": {"one": {**SCORE_STEPS, **new}}})
    parts = {"_target_": "x", "parts": {"one": dict(SCORE_STEPS)}}
    stored = {"config": {**vars(within), "tracking": vars(within.tracking), "stage": parts}, "inputs": {}}
    assert same_origin(stored, within, {}) == difference.replace("stage.", "stage.parts.one.")


def test_a_default_that_does_otherwise_than_was_done_before_differs() -> None:
    """Responses were read as plain text before there was a choice, and of process reward models too."""
    old = {"_target_": "espalier.pipeline.evaluation.score_responses.ScoreResponses", "model": "m"}
    for new, text in (({"is_chat": None}, "stage.is_chat was no setting, now None"),
                      ({"takes_last_step": False}, "stage.takes_last_step was no setting, now False")):  # fmt: skip
        made = StageConfig(output="o", stage={**old, **new})
        stored = {"config": {**vars(made), "tracking": vars(made.tracking), "stage": dict(old)}, "inputs": {}}
        assert same_origin(stored, made, {}) == text


def test_settings_that_do_otherwise_than_before_are_there() -> None:
    for target, names in NOT_AS_BEFORE.items():
        assert set(names) <= set(inspect.signature(find_component(target)).parameters), target


def test_a_default_that_is_removed_from_a_component_differs() -> None:
    made = StageConfig(output="o", stage=dict(SCORE_STEPS))
    before = {**SCORE_STEPS, "gone": 1}
    stored = {"config": {**vars(made), "tracking": vars(made.tracking), "stage": before}, "inputs": {}}
    assert same_origin(stored, made, {}) == "stage.gone was 1, now None"


def test_a_finished_run_is_not_lengthened_in_silence(tmp_path: Path) -> None:
    folder = open_run_dir(str(tmp_path / "run"), config())
    assert not is_run_finished(folder, config())
    (folder / "model").mkdir()
    assert is_run_finished(folder, config())
    with pytest.raises(BadConfig, match="finished with max_steps=10, now 20"):
        is_run_finished(folder, config(max_steps=20))


@pytest.mark.parametrize("length", ["num_iterations", "stop_after", "stop_after_tokens", "stop_after_seconds"])
def test_a_run_of_reinforcement_learning_goes_on_for_longer_until_it_is_finished(length: str, tmp_path: Path) -> None:
    short, longer = (RLConfig(output_dir="out", **{length: number}) for number in (2, 4))
    folder = open_run_dir(str(tmp_path / "run"), short)
    assert open_run_dir(str(folder), longer) == folder
    (folder / "model").mkdir()
    assert is_run_finished(folder, longer)
    with pytest.raises(BadConfig, match=f"finished with {length}=4, now 2"):
        is_run_finished(folder, short)


def test_how_a_server_is_asked_may_change_and_what_is_asked_may_not() -> None:
    stored = {"client": {"base_url": "http://a:1"}, "params": {"n": 8}}
    assert changed_keys(stored, {**stored, "client": {"base_url": "http://b:2", "prompts_per_request": 8}}) == []
    assert changed_keys(stored, {**stored, "params": {"n": 4}}) == [("params.n", 8, 4)]


def test_a_repository_further_up_is_not_taken_for_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "another's"], check=True)
    (tmp_path / "installed").mkdir()
    monkeypatch.setattr("espalier.runtime.run_dir.ROOT", tmp_path / "installed")
    assert code_commit().split()[0] in ("espalier", "unknown")


def test_a_run_keeps_what_auto_stands_for_as_it_began(tmp_path: Path) -> None:
    """Also where this machine would choose otherwise; a name that is another one is refused."""
    path = str(tmp_path / "run")

    def made(kernel: str, dtype: str, precision: str) -> RLConfig:
        return root_config(RLConfig, output_dir=path, model={"path": "p", "attention": kernel}, precision=precision,
                           server={"_target_": "s", "dtype": dtype})  # fmt: skip

    began = made("sdpa", "float32", "bf16")
    assert as_begun(began) == began, "nothing has begun"
    folder = open_run_dir(path, began)
    again = as_begun(made("auto", "auto", "auto"))
    assert again == began
    before = contents(folder)
    open_run_dir(path, again)
    assert contents(folder) == before
    with pytest.raises(BadConfig, match=r"server\.dtype: 'float32' there, 'bfloat16' now"):
        check_run_dir(path, as_begun(made("auto", "bfloat16", "auto")))


def test_a_run_of_before_that_wrote_down_auto_goes_on(tmp_path: Path) -> None:
    open_run_dir(str(tmp_path / "run"), config(precision="auto"))
    check_run_dir(str(tmp_path / "run"), config(precision="fp32"))


def test_another_kernel_by_name_is_another_run() -> None:
    assert changed_keys({"attention": "eager"}, {"attention": "auto"}) == [("attention", "eager", "auto")]
