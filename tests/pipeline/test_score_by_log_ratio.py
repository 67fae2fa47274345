"""Implicit process rewards: by hand, and beside the two networks' own log-probs."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Trajectory
from espalier.data.training_problems import write_training_problems
from espalier.models.load import load_policy
from espalier.pipeline.prm.score_by_log_ratio import ScoreByLogRatio, log_ratio_scores
from espalier.pipeline.stage import StageContext

ROW = Trajectory("p/0", "p", "Q\n", "a\nb\nc", ["a\n", "b\n", "c"], [5, 6], [7, 8, 9, 10, 11], [2, 4, 5], "stop", "7",
                 "7", True)  # fmt: skip


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_scores_are_the_minimum_or_the_sum_of_the_steps_log_ratios_so_far() -> None:
    """Steps of log-ratios 0.5 + 0.5, -3 + 1 and 4: minimum 1, -2, -2; sums 1, -1, 3."""
    logprobs, reference = [-1.0, -1.0, -4.0, -1.0, -1.0], [-1.5, -1.5, -1.0, -2.0, -5.0]
    least = log_ratio_scores(logprobs, reference, [2, 4, 5], 0.5, "minimum")
    assert least == pytest.approx([sigmoid(0.5), sigmoid(-1), sigmoid(-1)], abs=1e-6)
    total = log_ratio_scores(logprobs, reference, [2, 4, 5], 0.5, "sum")
    assert total == pytest.approx([sigmoid(0.5), sigmoid(-0.5), sigmoid(1.5)], abs=1e-6)
    assert log_ratio_scores([-2000.0], [0.0], [1], 1.0, "sum") == [0.0]


def test_far_log_ratios_keep_their_order() -> None:
    """Sigmoids of -20, -25 and -30, and of 15 and 20: equal numbers in six digits."""
    falling = [log_ratio_scores([x], [0.0], [1], 0.5, "sum")[0] for x in (40.0, 30.0, -40.0, -50.0, -60.0)]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 5


def test_a_copy_of_the_reference_and_a_network_that_breaks_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [ROW])
    context = StageContext(None, tmp_path / "s.jsonl", 60)
    shutil.copytree(tiny_policy, tmp_path / "copy")
    with pytest.raises(BadInput, match="is a copy of the reference"):
        list(ScoreByLogRatio(str(tmp_path / "copy"), str(tiny_policy)).run(str(tmp_path / "t.jsonl"), context))
    model = load_policy(str(tiny_policy))
    with torch.no_grad():
        next(model.parameters())[9] = math.nan  # the embedding of the third token of the response
    model.save_pretrained(tmp_path / "copy")
    with pytest.raises(BadInput, match="'p/0': the model gives a token of it a log-prob that is no finite number"):
        list(ScoreByLogRatio(str(tmp_path / "copy"), str(tiny_policy)).run(str(tmp_path / "t.jsonl"), context))
    write_records(tmp_path / "bare.jsonl", [replace(ROW, prompt_ids=[])])
    with pytest.raises(BadInput, match="'p/0' has no prompt tokens"):
        list(ScoreByLogRatio(str(tmp_path / "copy"), str(tiny_policy)).run(str(tmp_path / "bare.jsonl"), context))


@pytest.fixture
def moved_policy(tiny_policy: Path, tmp_path: Path) -> Path:
    """The tiny policy with other weights, that says it was trained on problem p."""
    model = load_policy(str(tiny_policy))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "moved")
    AutoTokenizer.from_pretrained(tiny_policy).save_pretrained(tmp_path / "moved")
    write_training_problems(tmp_path / "moved", ["p"], "")
    return tmp_path / "moved"


def test_scores_are_those_of_the_two_networks(tiny_policy: Path, moved_policy: Path, tmp_path: Path) -> None:
    other = replace(ROW, id="q/0", problem_id="q", prompt_ids=[5, 6, 7, 8])
    write_records(tmp_path / "t.jsonl", [ROW, other, replace(ROW, id="p/1")])
    stage = ScoreByLogRatio(str(moved_policy), str(tiny_policy), beta=1.0, how="sum")
    found = list(stage.run(str(tmp_path / "t.jsonl"), StageContext(None, tmp_path / "s.jsonl", 60)))
    assert [(row.id, row.is_seen) for row in found] == [("p/0", True), ("q/0", False), ("p/1", True)]
    assert found[0].scores == found[2].scores
    networks = [load_policy(str(path)).eval() for path in (moved_policy, tiny_policy)]
    for row, scored in zip((ROW, other), found, strict=False):
        ids, first = torch.tensor([row.prompt_ids + row.response_ids]), len(row.prompt_ids)
        with torch.no_grad():
            logs = [network(ids).logits[0].double().log_softmax(-1) for network in networks]
        ratios = [float(logs[0][k - 1, ids[0, k]] - logs[1][k - 1, ids[0, k]]) for k in range(first, ids.shape[1])]
        wanted = [sigmoid(sum(ratios[:end])) for end in row.step_ends]
        assert scored.scores == pytest.approx(wanted, abs=1e-4)


def test_one_model_and_foreign_tokenizers_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [ROW])
    context = StageContext(None, tmp_path / "s.jsonl", 60)
    with pytest.raises(BadInput, match="are one model"):
        list(ScoreByLogRatio(str(tiny_policy), str(tiny_policy)).run(str(tmp_path / "t.jsonl"), context))
    foreign = AutoTokenizer.from_pretrained(tiny_policy)
    foreign.add_tokens(["<new>"])
    foreign.save_pretrained(tmp_path / "foreign")
    (tmp_path / "foreign" / "config.json").write_bytes((tiny_policy / "config.json").read_bytes())
    (tmp_path / "foreign" / "model.safetensors").write_bytes((tiny_policy / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match="have different tokenizers"):
        list(ScoreByLogRatio(str(tmp_path / "foreign"), str(tiny_policy)).run(str(tmp_path / "t.jsonl"), context))
    for settings, message in (({"how": "mean"}, "must be one of minimum, sum"), ({"beta": 0.0}, "must be above 0")):
        with pytest.raises(BadInput, match=message):
            ScoreByLogRatio("a", "b", **settings)
