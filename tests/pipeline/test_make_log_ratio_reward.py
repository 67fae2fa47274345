"""The log-ratio of two policies as a process reward model: by hand, and beside the two networks' own log-probs."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, StepValues, Trajectory
from espalier.data.training_problems import (
    problem_hash,
    read_policy_problems,
    read_training_problems,
    write_training_problems,
)
from espalier.models.load import BadModel, load_policy
from espalier.models.log_ratio_reward import LogRatioReward, Scale, joined_ratios
from espalier.models.scalar_head import load_critic, load_process_reward
from espalier.pipeline.prm.make_log_ratio_reward import MakeLogRatioReward, fit_scale
from espalier.pipeline.prm.score_steps import ScoreSteps
from espalier.pipeline.stage import StageContext
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.rewards.process import ProcessReward, score_trajectories
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.manifest import find_damage

ROW = Trajectory("p/0", "p", "Q\n", "&'()*", ["&'", "()", "*"], [5, 6], [7, 8, 9, 10, 11], [2, 4, 5], "stop", "7",
                 "7", True)  # fmt: skip


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def labelled(row: Trajectory, labels: list[float | None]) -> StepValues:
    """The trajectory with labels of its steps."""
    nothing = [0] * len(labels)
    return StepValues(
        row.id, row.problem_id, row.prompt, row.steps, row.prompt_ids, row.response_ids, row.step_ends,
        [0.0] * len(labels), nothing, nothing, True, labels,
    )  # fmt: skip


def test_log_ratios_are_joined_over_steps_tokens_or_the_whole_solution() -> None:
    """Steps of log-ratios 0.5 + 0.5, -3 + 1 and 4."""
    logprobs, reference = [-1.0, -1.0, -4.0, -1.0, -1.0], [-1.5, -1.5, -1.0, -2.0, -5.0]
    assert joined_ratios(logprobs, reference, [2, 4, 5], "minimum") == [1.0, -2.0, -2.0]
    assert joined_ratios(logprobs, reference, [2, 4, 5], "sum") == [1.0, -1.0, 3.0]
    assert joined_ratios(logprobs, reference, [2, 4, 5], "step") == [1.0, -2.0, 4.0]
    assert joined_ratios(logprobs, reference, [2, 4, 5], "token") == [0.5, -3.0, 4.0]
    assert joined_ratios(logprobs, reference, [2, 4, 5], "whole") == [3.0, 3.0, 3.0]
    assert Scale(slope=2.0, offset=1.0).score(1.0) == pytest.approx(sigmoid(3.0))
    assert Scale().score(-2000.0) == 0.0


def test_far_log_ratios_keep_their_order() -> None:
    """Sigmoids of -20, -25 and -30, and of 15 and 20: equal numbers in six digits."""
    falling = [Scale(slope=0.5).score(x) for x in (40.0, 30.0, -40.0, -50.0, -60.0)]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 5


def test_the_scale_is_the_logistic_regression_of_the_labels() -> None:
    """On labels drawn at slope 1.5 and offset -0.4; a row of weight 2 counts as two rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(0.5, 1.0, 20_000)
    y = (rng.random(20_000) < 1 / (1 + np.exp(-(1.5 * x - 0.4)))).astype(float)
    slope, offset = fit_scale(x.tolist(), y.tolist(), [1.0] * len(x))
    assert slope == pytest.approx(1.5, rel=0.06)
    assert offset == pytest.approx(-0.4, abs=0.1)
    few = ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.0, 1.0])
    doubled = fit_scale(*few, [1.0, 2.0, 1.0, 1.0])
    again = fit_scale([0.0, 1.0, 1.0, 2.0, 3.0], [0.0, 1.0, 1.0, 0.0, 1.0], [1.0] * 5)
    assert doubled == pytest.approx(again)
    shares = [sigmoid(doubled[0] * value + doubled[1]) for value in few[0]]
    rows = list(zip(shares, few[1], [1.0, 2.0, 1.0, 1.0], strict=True))
    assert sum(w * (share - label) for share, label, w in rows) == pytest.approx(0.0, abs=1e-6)  # at the optimum


def test_labels_that_part_exactly_have_a_finite_scale_and_labels_that_say_nothing_none() -> None:
    slope, offset = fit_scale([-2.0, -1.0, 1.0, 2.0], [0.0, 0.0, 1.0, 1.0], [1.0] * 4)
    assert 0 < slope < 1e3
    assert offset == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(BadInput, match="all are alike"):
        fit_scale([0.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(BadInput, match="the log-ratios of all labelled steps are alike"):
        fit_scale([1.0, 1.0], [0.0, 1.0], [1.0, 1.0])
    with pytest.raises(BadInput, match="makes right steps no likelier than wrong ones"):
        fit_scale([0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 0.0, 0.0], [1.0] * 4)


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


def make(
    tmp_path: Path, policy: Path, reference: Path | None, rows: list[StepValues] | None = None, **settings: Any
) -> Path:
    """Return the folder that the stage writes."""
    source, folder = tmp_path / "labels.jsonl", tmp_path / "prm"
    if rows:
        write_records(source, rows)
    stage = MakeLogRatioReward(str(policy), None if reference is None else str(reference), **settings)
    stage.run(str(source) if rows else "", StageContext(None, folder, 60))
    return folder


def own_ratios(row: Trajectory, policy: Path, reference: Path) -> list[float]:
    """Of every token, in float64."""
    networks = [load_policy(str(path)).eval() for path in (policy, reference)]
    ids, first = torch.tensor([row.prompt_ids + row.response_ids]), len(row.prompt_ids)
    with torch.no_grad():
        logs = [network(ids).logits[0].double().log_softmax(-1) for network in networks]
    return [float(logs[0][k - 1, ids[0, k]] - logs[1][k - 1, ids[0, k]]) for k in range(first, ids.shape[1])]


def test_scores_are_those_of_the_two_networks(tiny_policy: Path, moved_policy: Path, tmp_path: Path) -> None:
    folder = make(tmp_path, moved_policy, tiny_policy, beta=1.0, how="sum")
    assert find_damage(folder) == ""
    other = replace(ROW, id="q/0", problem_id="q", prompt_ids=[5, 6, 7, 8])
    write_records(tmp_path / "t.jsonl", [ROW, other, replace(ROW, id="p/1")])
    context = StageContext(None, tmp_path / "s.jsonl", 60)
    found = list(ScoreSteps(str(folder)).run(str(tmp_path / "t.jsonl"), context))
    assert [(row.id, row.is_seen) for row in found] == [("p/0", True), ("q/0", False), ("p/1", True)]
    assert found[0].scores == found[2].scores
    for row, scored in zip((ROW, other), found, strict=False):
        ratios = own_ratios(row, moved_policy, tiny_policy)
        wanted = [sigmoid(sum(ratios[:end])) for end in row.step_ends]
        assert scored.scores == pytest.approx(wanted, abs=1e-4)


def test_without_a_reference_scores_are_of_the_policys_log_probs_alone(moved_policy: Path, tmp_path: Path) -> None:
    folder = make(tmp_path, moved_policy, None, how="step", beta=0.1)
    assert not (folder / "reference").exists()
    assert not json.loads((folder / "log_ratio_reward.json").read_text())["has_reference"]
    model: Any = load_process_reward(str(folder))
    network, ids = load_policy(str(moved_policy)).eval(), torch.tensor([ROW.prompt_ids + ROW.response_ids])
    with torch.no_grad():
        logs = network(ids).logits[0].double().log_softmax(-1)
    own = [float(logs[k - 1, ids[0, k]]) for k in range(2, 7)]
    wanted = [sigmoid(0.1 * sum(own[start:end])) for start, end in ((0, 2), (2, 4), (4, 5))]
    assert score_trajectories(model, [ROW], pad_id=0) == [pytest.approx(wanted, abs=1e-4)]


def test_labels_set_the_scale(tiny_policy: Path, moved_policy: Path, tmp_path: Path) -> None:
    rows, ratios = [], []
    for k in range(6):
        row = replace(ROW, id=f"q{k}/0", problem_id=f"q{k}", response_ids=[7 + k, 8 + k, 9, 10 + 2 * k, 11])
        of_row = own_ratios(row, moved_policy, tiny_policy)
        ratios.append(joined_ratios(of_row, [0.0] * 5, row.step_ends, "minimum"))
        rows.append(row)
    middle = sorted(value for row in ratios for value in row)[9]
    labels: list[list[float | None]] = [[float(value > middle) for value in row] for row in ratios]
    labels[0][1] = None  # not read
    folder = make(
        tmp_path, moved_policy, tiny_policy, [labelled(row, one) for row, one in zip(rows, labels, strict=True)]
    )
    scale = json.loads((folder / "log_ratio_reward.json").read_text())
    pairs = [pair for row, one in zip(ratios, labels, strict=True) for pair in zip(row, one, strict=True)]
    read = [(x, y) for x, y in pairs if y is not None]
    wanted = fit_scale([x for x, _ in read], [y for _, y in read], [1.0] * len(read))
    assert (scale["slope"], scale["offset"]) == pytest.approx(wanted, rel=1e-3)
    assert read_training_problems(str(folder)) == {problem_hash("p")}  # two numbers remember no problem
    model: Any = load_process_reward(str(folder))
    scored = [score for row in score_trajectories(model, rows, pad_id=0) for score in row]
    assert all((score > 0.5) == (y == 1) for score, (_, y) in zip(scored, pairs, strict=True) if y is not None)


def test_what_the_reference_knew_too_is_beside_what_the_policy_alone_was_trained_on(
    tiny_policy: Path, moved_policy: Path, tmp_path: Path
) -> None:
    """Otherwise both folds of a second round would have seen everything."""
    before = tmp_path / "before"
    shutil.copytree(tiny_policy, before)
    write_training_problems(before, ["a", "b"], "")
    write_training_problems(moved_policy, ["b", "c"], str(before))
    assert read_training_problems(str(moved_policy)) == {problem_hash(name) for name in "abc"}
    folder = str(make(tmp_path, moved_policy, before))
    assert read_training_problems(folder) == {problem_hash(name) for name in "bc"}
    assert read_policy_problems(folder) == {problem_hash("a")}
    (moved_policy / "training_problems.json").unlink()
    assert read_training_problems(str(make(tmp_path / "unknown", moved_policy, before))) is None


def test_another_models_folder_is_not_taken_for_it(tiny_policy: Path, moved_policy: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_policy, tmp_path / "prm")
    with pytest.raises(BadInput, match="holds another model"):
        make(tmp_path, moved_policy, tiny_policy)


def test_models_of_the_hub_are_copied_from_its_cache(
    tiny_policy: Path, moved_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "hub" / "models--org--policy"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    (model / "blobs").mkdir()
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for path in tiny_policy.iterdir():  # as its client lays them: links to files of another name
        shutil.copy(path, model / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    rows = [labelled(ROW, [1.0, 0.0, 0.0])]
    folder = make(tmp_path, moved_policy, Path("org/policy"), rows)
    shutil.rmtree(model)
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    found = score_trajectories(load_process_reward(str(folder)), [ROW], pad_id=0)
    (tmp_path / "own").mkdir()
    own = make(tmp_path / "own", moved_policy, tiny_policy, rows)
    assert found == score_trajectories(load_process_reward(str(own)), [ROW], pad_id=0)
    with pytest.raises(BadModel, match="org/other: neither a folder nor a model of the hub"):
        make(tmp_path / "own", moved_policy, Path("org/other"))


def test_another_scale_or_reference_is_another_model(tiny_policy: Path, moved_policy: Path, tmp_path: Path) -> None:
    folder = make(tmp_path, moved_policy, tiny_policy)
    before = model_fingerprint(str(folder))
    (folder / "log_ratio_reward.json").write_text('{"how": "sum", "slope": 1.0, "offset": 0.0}')
    scaled = model_fingerprint(str(folder))
    shutil.copy(moved_policy / "model.safetensors", folder / "reference" / "model.safetensors")
    assert len({before, scaled, model_fingerprint(str(folder))}) == 3


def test_it_is_a_process_reward_and_nothing_that_needs_a_head(
    tiny_policy: Path, moved_policy: Path, tmp_path: Path
) -> None:
    folder = str(make(tmp_path, moved_policy, tiny_policy))
    assert isinstance(load_process_reward(folder), LogRatioReward)
    (score,) = ProcessReward(folder, form="score", offset=0.0)([ROW])
    assert score.steps == score_trajectories(load_process_reward(folder), [ROW], pad_id=0)[0]
    with pytest.raises(BadInput, match="choose a process reward"):
        OutcomeModelReward(folder)
    with pytest.raises(BadModel, match="has no head that a critic could begin with"):
        load_critic(folder)
    with pytest.raises(BadModel, match="has no head to train"):
        load_process_reward(folder, num_labels=1)
    (Path(folder) / "log_ratio_reward.json").write_text('{"how": "minimum", "slope": -1.0}')
    with pytest.raises(BadModel, match=r"log_ratio_reward.json cannot be read .*the slope must be above 0"):
        load_process_reward(folder)


def test_a_copy_of_the_reference_and_a_network_that_breaks_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_policy, tmp_path / "copy")
    rows = [labelled(ROW, [1.0, 0.0, 0.0])]
    with pytest.raises(BadInput, match="one is a copy of the other"):
        make(tmp_path, tmp_path / "copy", tiny_policy, rows)
    model = load_policy(str(tiny_policy))
    with torch.no_grad():
        next(model.parameters())[9] = math.nan  # the embedding of the third token of the response
    model.save_pretrained(tmp_path / "copy")
    with pytest.raises(BadInput, match="'p/0': the model gives a token of it a log-prob that is no finite number"):
        make(tmp_path, tmp_path / "copy", tiny_policy, rows)
    with pytest.raises(BadInput, match="'p/0' has no prompt tokens"):
        make(tmp_path, tmp_path / "copy", tiny_policy, [labelled(replace(ROW, prompt_ids=[]), [1.0, 0.0, 0.0])])
    with pytest.raises(BadInput, match="no labelled step of the problems of part all"):
        make(tmp_path, tmp_path / "copy", tiny_policy, [labelled(ROW, [None, None, None])])
    assert not (tmp_path / "prm").exists()


def test_one_model_and_foreign_tokenizers_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="are one model"):
        make(tmp_path, tiny_policy, tiny_policy)
    foreign = AutoTokenizer.from_pretrained(tiny_policy)
    foreign.add_tokens(["<new>"])
    foreign.save_pretrained(tmp_path / "foreign")
    (tmp_path / "foreign" / "config.json").write_bytes((tiny_policy / "config.json").read_bytes())
    (tmp_path / "foreign" / "model.safetensors").write_bytes((tiny_policy / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match="have different tokenizers"):
        make(tmp_path, tmp_path / "foreign", tiny_policy)
    for settings, message in (({"how": "mean"}, "one of minimum, sum"), ({"beta": 0.0}, "must be above 0")):
        with pytest.raises(BadInput, match=message):
            MakeLogRatioReward("a", "b", **settings)  # type: ignore[arg-type]
