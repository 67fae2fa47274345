"""The comparison of two commits: names that changed, and what counts as the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.unchanged.compare import compare_runs, different_metrics, is_same
from benchmarks.unchanged.datasets import KINDS, TASK
from benchmarks.unchanged.names import Rename, metrics_after, name_in, setting_in
from benchmarks.unchanged.runs import FIXED, ONLINE, PRM, SFT
from espalier.data import records
from espalier.data.tasks.word_arithmetic import WordArithmetic

NAMES = (
    Rename("color=red", "color=crimson", "conf/color/crimson.yaml"),
    Rename("num_rounds", "repeats", "settings.py: repeats"),
    Rename("params", "rollout.params", "settings.py: rollout"),
)


@pytest.fixture
def renamed_tree(tmp_path: Path) -> Path:
    """A tree that has the new names."""
    (tmp_path / "conf/color").mkdir(parents=True)
    (tmp_path / "conf/color/crimson.yaml").touch()
    (tmp_path / "settings.py").write_text("repeats: int = 0\nrollout: Rollout\n")
    return tmp_path


@pytest.mark.parametrize(("setting", "new"), [
    ("color=red", "color=crimson"),
    ("color=blue", "color=blue"),
    ("num_rounds=2", "repeats=2"),
    ("params.max_tokens=40", "rollout.params.max_tokens=40"),
    ("+params=greedy", "+rollout.params=greedy"),
    ("-cn", "-cn"),
])  # fmt: skip
def test_a_setting_is_renamed_where_the_tree_has_the_new_name(renamed_tree: Path, setting: str, new: str) -> None:
    assert setting_in(renamed_tree, setting, NAMES) == new


def test_a_tree_without_the_new_name_is_asked_by_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("num_rounds: int = 0\n")
    assert setting_in(tmp_path, "num_rounds=2", NAMES) == "num_rounds=2"
    assert name_in(tmp_path, "color=red", NAMES) == "color=red"


def test_a_run_may_be_written_with_the_new_names(renamed_tree: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    assert setting_in(renamed_tree, "color=crimson", NAMES) == "color=crimson"
    assert setting_in(empty, "color=crimson", NAMES) == "color=red"
    assert setting_in(empty, "rollout.params.max_tokens=40", NAMES) == "params.max_tokens=40"


def test_a_name_that_changed_twice_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    names = (Rename("a", "b", "settings.py: b"), Rename("b", "c", "settings.py: c"))
    for text, held in (("a", "a"), ("b", "b"), ("b c", "c")):
        (tmp_path / "settings.py").write_text(text)
        assert [name_in(tmp_path, name, names) for name in "abc"] == [held] * 3


def test_a_metric_is_compared_under_its_new_name() -> None:
    assert metrics_after({"a": 1.0, "b": 2.0}, {"a": "c"}) == {"c": 1.0, "b": 2.0}


def test_every_kind_of_training_is_among_the_runs() -> None:
    names = {run.name for run in (SFT, PRM, *FIXED, *ONLINE)}
    assert names >= {"SFT", "DPO", "step-DPO", "KTO", "ORM", "PRM", "GRPO", "RLOO", "PPO", "VinePPO", "ReMax"}
    assert len({run.folder for run in (SFT, PRM, *FIXED, *ONLINE)}) == len(names)


def test_bits_are_compared_and_not_numbers() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert is_same(nan, nan.clone())
    assert not is_same(zero, -zero)
    assert not is_same(zero, zero.double())
    assert not is_same(zero, zero[None])
    assert is_same(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16))


def test_a_metric_that_went_missing_is_a_difference_and_a_new_one_is_not() -> None:
    wrong, more = different_metrics([{"step": 1, "loss": 0.5}], [{"step": 1, "gain": 2.0}])
    assert wrong == ["metrics.jsonl:1: loss: 0.5 before, nothing after"]
    assert more == ["gain"]


def test_metrics_that_are_not_numbers_equal_themselves() -> None:
    assert different_metrics([{"loss": float("nan")}], [{"loss": float("nan")}]) == ([], [])


def finished_run(folder: Path, weight: float, loss: float, seconds: float) -> Path:
    """A run directory with a model of one tensor and one line of metrics."""
    (folder / "model").mkdir(parents=True)
    save_file({"weight": torch.tensor([weight])}, folder / "model" / "model.safetensors")
    (folder / "metrics.jsonl").write_text(json.dumps({"loss": loss, "seconds/iteration": seconds}) + "\n")
    return folder


@pytest.mark.parametrize(("weight", "loss", "is_identical"), [(1.0, 0.5, True), (1.25, 0.5, False), (1.0, 0.6, False)])
def test_two_runs_are_identical_in_all_but_their_times(
    tmp_path: Path, weight: float, loss: float, is_identical: bool
) -> None:
    start = finished_run(tmp_path / "start", 0.0, 0.0, 0.0) / "model"
    before = finished_run(tmp_path / "before", 1.0, 0.5, 1.5)
    after = finished_run(tmp_path / "after", weight, loss, 9.5)
    found = compare_runs(before, after, start)
    assert (found.num_tensors, found.num_moved, found.num_numbers) == (1, 1, 1)
    assert found.is_identical == is_identical


def test_runs_that_trained_nothing_show_nothing(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", 1.0, 0.5, 1.5)
    assert not compare_runs(run, run, run / "model").is_identical


@pytest.mark.parametrize("name", KINDS)
def test_the_rows_that_are_trained_on_are_records(tokenizer: Any, name: str) -> None:
    kind, make = KINDS[name]
    found = [make(row, tokenizer) for row in WordArithmetic(**TASK).demonstrations("train")[:8]]
    assert all(records.parse_record(getattr(records, kind), row, name) for row in found)
    for row in found:
        ids = row.get("response_ids") or row["chosen_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[:-1]) == ("".join(row["steps"]) if "steps" in row else row["chosen"])
