"""Several runs side by side, from the summary.json files that a report writes."""

from pathlib import Path

import pytest

from espalier.analysis.run_files import Interval, PolicyEvaluation, RewardModelQuality, StepQuality
from espalier.analysis.seeds import CompareSeeds
from espalier.analysis.summary import summarize
from espalier.data.jsonl import write_json
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext


def write_summary(folder: Path, mean: float, target: str = "values") -> str:
    shown = Interval(mean, mean - 0.1, mean + 0.1, 10)
    quality = StepQuality(shown, shown, None, 5, 2)
    evaluation = PolicyEvaluation("sft", {"greedy": shown}, ["p"], {"greedy": [1.0]}, 0.0)
    prm = RewardModelQuality(quality, quality, [], target)
    folder.mkdir()
    write_json(folder / "summary.json", summarize({}, {"sft": evaluation}, prm, {("dpo", "sft"): {"greedy": shown}}))
    return str(folder)


def test_runs_are_compared_as_a_report_wrote_them(tmp_path: Path) -> None:
    runs = [write_summary(tmp_path / name, mean) for name, mean in (("a", 0.5), ("b", 0.7))]
    lines = CompareSeeds(runs).run("", StageContext(None, tmp_path, 10.0)).splitlines()
    assert lines[0] == "| figure | a | b | mean (lowest to highest) |"
    assert lines[2] == "| sft greedy | 50.0 [40.0, 60.0] | 70.0 [60.0, 80.0] | 60.0 (50.0 to 70.0) |"
    assert "| PRM inner_auc | 0.500 [0.400, 0.600] | 0.700 [0.600, 0.800] | 0.600 (0.500 to 0.700) |" in lines
    assert "| PRM inner_value_mae | not defined | not defined | not defined |" in lines
    assert not [line for line in lines if "target" in line]


def test_reward_models_that_are_judged_by_different_targets_are_not_averaged(tmp_path: Path) -> None:
    runs = [write_summary(tmp_path / name, 0.5, name) for name in ("values", "labels")]
    with pytest.raises(BadInput, match=r"different targets \(.*labels/summary.json by labels, .*by values\): compare"):
        CompareSeeds(runs).run("", StageContext(None, tmp_path, 10.0))
    with pytest.raises(BadInput, match="is empty"):
        CompareSeeds([]).run("", StageContext(None, tmp_path, 10.0))
