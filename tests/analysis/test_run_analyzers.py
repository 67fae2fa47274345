"""What a run's own files say of it, on runs of a few iterations whose figures are computed by hand."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from espalier.analysis.analyzers.run_history import RunHistory, named_folders
from espalier.analysis.analyzers.training_curves import DrawTrainingCurves, first_reached
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext


def write_run(root: Path, accuracies: list[float], **more: float) -> Path:
    """Iterations of 100 drawn tokens and 2 seconds."""
    root.mkdir(parents=True)
    rows = [{"step": step, "rollout/accuracy": one, "rollout/drawn_tokens": 100.0, "seconds/iteration": 2.0, **more}
            for step, one in enumerate(accuracies, 1)]  # fmt: skip
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def append(root: Path, row: dict[str, Any]) -> None:
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def context(folder: Path) -> StageContext:
    return StageContext(None, folder / "out.json", 10.0)


def curves(runs: object, folder: Path, accuracy: str = "rollout/accuracy", window: int = 1) -> dict[str, Any]:
    return DrawTrainingCurves(runs, accuracy, [0.5, 0.9], window).run("", context(folder))


def test_what_a_policy_has_cost_are_the_iterations_before_it(tmp_path: Path) -> None:
    """The third line's rollouts are of the policy after two updates: 2 x (100 + 50 completion) tokens, 4 seconds."""
    more = {"estimate/completion_tokens": 50.0, "kl/per_response": 0.25}
    found = curves(str(write_run(tmp_path / "a", [0.2, 0.4, 0.6], **more)), tmp_path)["runs"]["a"]
    assert found["reached"] == {"0.5": {"updates": 2, "tokens": 300, "seconds": 4.0}, "0.9": None}
    assert found["costs"][-1] == {"tokens": 450, "seconds": 6.0}
    assert found["curves"]["accuracy"] == [(0, 0.2), (1, 0.4), (2, 0.6)]
    assert found["curves"]["kl"] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    assert found["curves"]["explained_variance"] is None  # a run without a critic


def test_a_run_whose_credit_is_made_by_a_reward_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reward model's samples are in no line of the run."""
    run = write_run(tmp_path / "a", [0.2, 0.4])
    config = {"model": {"path": "SFT"}, "critic": {"model": {"path": "SFT"}}, "advantage": {"divide_by_std": True}}
    (run / "config.yaml").write_text(json.dumps(config))
    curves(str(run), tmp_path)
    assert not caplog.records
    reward = {"terms": {"process": {"path": "PRM", "form": "minimum"}, "outcome": {"right": 1.0}}}
    (run / "config.yaml").write_text(json.dumps({**config, "reward": reward}))
    curves(str(run), tmp_path)
    assert "its credit is made by PRM: the samples and the training of that before the run are in none" in caplog.text


def test_an_evaluation_is_of_the_policy_after_its_lines_updates(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.2, 0.4])
    append(run, {"step": 0, "eval/accuracy": 0.1})
    append(run, {"step": 2, "eval/accuracy": 0.5})
    append(run, {"step": 3, "eval/accuracy": 0.9})  # killed before its iteration was logged
    found = curves(str(run), tmp_path, "eval/accuracy")["runs"]["a"]
    assert found["curves"]["accuracy"] == [(0, 0.1), (2, 0.5)]
    assert found["reached"]["0.5"] == {"updates": 2, "tokens": 200, "seconds": 4.0}


def test_a_target_is_reached_by_the_mean_of_the_window_not_by_one_lucky_measurement() -> None:
    curve = [(0, 0.2), (1, 0.8), (2, 0.4), (3, 0.7), (4, 0.9)]
    assert first_reached(curve, 0.6, 1) == 1
    assert first_reached(curve, 0.6, 2) == 2  # (0.8 + 0.4) / 2
    assert first_reached(curve, 0.65, 3) == 4
    assert first_reached(curve[:1], 0.1, 2) is None


def test_runs_are_drawn_side_by_side_and_what_none_measures_is_left_out(tmp_path: Path) -> None:
    runs = {"one": str(write_run(tmp_path / "a", [0.5])), "two": str(write_run(tmp_path / "b", [0.1, 0.3]))}
    curves(runs, tmp_path)
    figure = ElementTree.parse(tmp_path / "out.svg")
    assert len(figure.findall(".//{*}polyline")) == 4  # accuracy over tokens and over seconds, each of two runs
    assert {"one", "two"} <= {text.text for text in figure.findall(".//{*}text")}


def test_folders_are_named_by_a_pattern_a_list_or_a_mapping(tmp_path: Path) -> None:
    one, two = (str(write_run(tmp_path / name, [0.5])) for name in ("a", "b"))
    assert named_folders(f"{tmp_path}/*", "stage.runs") == {"a": one, "b": two}
    assert named_folders({"x": one}, "stage.runs") == {"x": one}
    for wrong in ("", f"{tmp_path}/none*", [f"{tmp_path}/c"], [one, f"{tmp_path}/x/a"]):
        with pytest.raises(BadInput, match=r"^stage\.runs"):
            named_folders(wrong, "stage.runs")


def test_a_run_that_cannot_be_read_ends_in_one_line(tmp_path: Path) -> None:
    def message(run: Path, **settings: Any) -> str:
        with pytest.raises(BadInput) as raised:
            curves(str(run), tmp_path, **settings)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    run = write_run(tmp_path / "a", [0.5])
    assert "no eval/accuracy in it" in message(run, accuracy="eval/accuracy")
    assert "stage.accuracy must be" in message(run, accuracy="accuracy")
    assert "stage.window must be" in message(run, window=0)
    append(run, {"step": 3, "rollout/accuracy": 0.1})
    assert "iteration 2 of 3 is missing" in message(run)
    trained = write_run(tmp_path / "b", [])
    append(trained, {"step": 1, "train/loss": 0.1})
    assert "no iteration of reinforcement learning" in message(trained)
    old = write_run(tmp_path / "c", [])
    append(old, {"step": 1, "rollout/accuracy": 0.1, "rollout/drawn_tokens": 5.0})
    assert "iteration 1 has no seconds/iteration" in message(old)
    broken = write_run(tmp_path / "d", [])
    (broken / "metrics.jsonl").write_text('{"step": 1, "rollout/accuracy": NaN}\n')
    assert "metrics.jsonl:1: not a JSON object (NaN is not a number)" in message(broken)
    (broken / "metrics.jsonl").write_text('{"step": 1, "rollout/accuracy": "high"}\n')
    assert "metrics.jsonl:1: must hold a step (int) and numbers" in message(broken)
    with pytest.raises(BadInput, match="holds no samples/iteration"):
        RunHistory(broken).samples()
