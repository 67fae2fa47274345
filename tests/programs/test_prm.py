"""Steps scored by `espalier.load_prm` and `espalier.score_steps`: as the stage scores them, as the network says."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput, Trajectory
from espalier.data.steps import Decoder, StepTokens
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import read_response, steps_on_tokens
from espalier.data.training_layout import TrainingLayout, write_training_layout
from espalier.models.load import BadModel
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.pipeline.prm.score_steps import ScoreSteps
from espalier.pipeline.stage import StageContext


@pytest.fixture(scope="module")
def solutions(task: WordArithmetic) -> list[tuple[str, list[str]]]:
    """(prompt, steps) of twelve demonstrations."""
    rows = task.demonstrations("train")[:12]
    return [(row.prompt, espalier.split_steps(row.completion)) for row in rows]


def as_sampled(tokenizer: Any, number: int, prompt: str, steps: Sequence[str]) -> Trajectory:
    """The record that a sampler leaves of this solution, which ended by itself."""
    prompt_ids = encode_text(tokenizer, prompt, "here")
    ids = [*tokenizer("".join(steps), add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    tokens = read_response(prompt_ids, ids, Decoder(tokenizer), "".join(steps), "here")
    cut, ends = steps_on_tokens(steps, tokens)
    name = f"p{number}"
    return Trajectory(f"{name}/0", name, prompt, "".join(cut), cut, prompt_ids, ids, ends, "stop", "", None, False)


def test_text_is_scored_as_the_stage_scores_its_sampled_tokens(
    tiny_prm: Path, solutions: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    prm = espalier.load_prm(tiny_prm)
    rows = [as_sampled(prm.tokenizer, number, *solution) for number, solution in enumerate(solutions)]
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    by_stage = [
        row.scores
        for row in ScoreSteps(str(tiny_prm)).run(str(path), StageContext(None, tmp_path / "scores.jsonl", 10.0))
    ]
    found = espalier.score_steps(prm, solutions)
    assert found == by_stage
    given = [espalier.StepTokens(row.prompt_ids, row.response_ids, row.step_ends) for row in rows]
    assert espalier.score_steps(prm, given) == by_stage
    every = [score for row in found for score in row]
    assert len(every) == sum(len(steps) for _, steps in solutions)
    assert max(every) - min(every) > 0.05


def test_scores_are_the_networks_probabilities_at_step_ends(
    tiny_prm: Path, solutions: list[tuple[str, list[str]]]
) -> None:
    prm = espalier.load_prm(tiny_prm)
    prompt, steps = solutions[0]
    ids = list(prm.tokenizer(prompt, add_special_tokens=False).input_ids)
    places = []
    for step in steps:  # digits, words and newlines are tokens apart: pieces of text are tokenised as the whole is
        ids += prm.tokenizer(step, add_special_tokens=False).input_ids
        places.append(len(ids) - 1)
    ids.append(prm.tokenizer.eos_token_id)
    with torch.no_grad():
        logits = prm.network(input_ids=torch.tensor([ids])).logits[0, :, 0].double()
    for is_finished, last in ((True, len(ids) - 1), (False, places[-1])):
        expected = torch.sigmoid(logits[[*places[:-1], last]]).tolist()
        found = espalier.score_steps(prm, [(prompt, steps)], is_finished=is_finished)[0]
        assert found == pytest.approx(expected, abs=0.01)  # the product computes in bf16


def test_one_response_cut_in_two_ways_is_scored_at_the_ends_of_each(
    tiny_prm: Path, solutions: list[tuple[str, list[str]]]
) -> None:
    prm = espalier.load_prm(tiny_prm)
    prompt, steps = solutions[0]
    fine, coarse = espalier.score_steps(prm, [(prompt, steps), (prompt, [steps[0], "".join(steps[1:])])])
    assert coarse == [fine[0], fine[-1]]


def test_a_policy_with_a_fresh_head_says_one_half(tiny_policy: Path) -> None:
    prm = espalier.load_prm(tiny_policy, num_labels=1)
    assert espalier.score_steps(prm, [("1 + 1 = ?\n", ["1 + 1 = 2\n", "#### 2"]), ("1 + 1 = ?\n", [])]) == [
        [0.5, 0.5],
        [],
    ]
    with pytest.raises(BadModel, match="no process reward model: train one"):
        espalier.load_prm(tiny_policy)
    with pytest.raises(espalier.BadInput, match="no such model folder"):
        espalier.load_prm("./nowhere/prm")


def test_an_outcome_model_is_not_read_after_every_step(tiny_prm: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_prm, tmp_path / "outcome")
    write_training_layout(tmp_path / "outcome", TrainingLayout("responses", "text"))
    with pytest.raises(BadInput, match="was trained on responses and not on steps"):
        espalier.load_prm(tmp_path / "outcome")


def test_what_cannot_be_scored_is_named_with_its_place(tiny_prm: Path) -> None:
    prm = espalier.load_prm(tiny_prm)
    tokens = espalier.encode_steps(prm.tokenizer, "1 + 1 = ?\n", ["2\n", "#### 2"])
    for solution, words in (
        (("1 + 1 = ?\n", "2"), r"solution 1: steps must be a list of texts"),
        (("1 + 1 = ?\n", ["2", ""]), r"solution 1: steps must be .* not empty"),
        (("", ["2"]), r"solution 1: the prompt is empty"),
        (("1 + 1 = ?\n", ["2<|end|>"]), r"solution 1: the tokenizer changes the text .* leave special tokens out"),
        (replace(tokens, step_ends=[0, 3]), r"solution 1: step_ends must rise from 1 to its \d+ response tokens"),
        (replace(tokens, step_ends=[1, 99]), r"solution 1: step_ends must rise"),
        (StepTokens([], [], [], ""), r"solution 1: token ids from 0 to \d+ are wanted, one at least, got \[\]"),
        (replace(tokens, prompt_ids=[5, 99999, 6]), r"solution 1: token ids from 0 to \d+ are wanted"),
        ("qq", r"solution 1 must be \(prompt, steps\) or StepTokens, got 'qq'"),
        (7, r"solution 1 must be \(prompt, steps\) or StepTokens, got 7"),
        (("1 + 1 = ?\n", 7), r"solution 1: steps must be a list of texts"),
        (([{"role": "user", "content": "?"}], ["2"]), r"solution 1: the prompt must be a text, .*apply_chat_template"),
        (("1 + 1 = ?\n", ["7" * 600]), r"solution 1 has 6\d\d tokens and the model 512 positions"),
    ):
        with pytest.raises(espalier.BadInput, match=words):
            espalier.score_steps(prm, [("1 + 1 = ?\n", ["2"]), solution])  # type: ignore[list-item]


def test_a_single_solution_and_a_folder_s_name_are_no_arguments_of_score_steps(tiny_prm: Path) -> None:
    with pytest.raises(espalier.BadInput, match=r"solution 0 must be .* a list of solutions is scored"):
        espalier.score_steps(espalier.load_prm(tiny_prm), ("1 + 1 = ?\n", ["2"]))  # type: ignore[arg-type]
    with pytest.raises(espalier.BadInput, match="prm must be what load_prm returns, got 'prm'"):
        espalier.score_steps("prm", [])  # type: ignore[arg-type]


def test_a_model_that_learned_from_chat_turns_warns_once_of_a_plain_question(
    tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_prm, tmp_path / "chat")
    write_training_layout(tmp_path / "chat", TrainingLayout("steps", "chat"))
    prm = espalier.load_prm(tmp_path / "chat")
    for _ in range(2):
        espalier.score_steps(prm, [("1 + 1 = ?\n", ["2"])])
    (line,) = [record.message for record in caplog.records if "was trained on prompts" in record.message]
    assert "turns of a chat template, and these are plain text" in line
    caplog.clear()
    prm.tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}{% endfor %}\nassistant: "
    turns = [{"role": "user", "content": "1 + 1 = ?"}]
    text = prm.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    espalier.score_steps(prm, [(text, ["2"])])
    assert not caplog.records


def test_a_reward_model_shows_itself_in_one_short_line(tiny_prm: Path) -> None:
    shown = repr(espalier.load_prm(tiny_prm, device="cpu"))
    assert shown == f"ProcessRewardModel('{tiny_prm}', LlamaForTokenClassification on cpu)"


def test_a_reward_model_of_two_policies_shows_itself_too(tiny_policy: Path, tmp_path: Path) -> None:
    write_log_ratio_reward(tmp_path / "two", str(tiny_policy), str(tiny_policy), Scale())
    prm = espalier.load_prm(tmp_path / "two", device="cpu")
    assert repr(prm) == f"ProcessRewardModel('{tmp_path / 'two'}', LogRatioReward on cpu)"
    assert len(espalier.score_steps(prm, [("1 + 1 = ?\n", ["2"])])[0]) == 1


def test_a_network_that_is_trained_is_trained_on_after_it_has_scored(tiny_prm: Path) -> None:
    prm = espalier.load_prm(tiny_prm)
    for is_training in (True, False):
        prm.network.train(is_training)
        espalier.score_steps(prm, [("1 + 1 = ?\n", ["2"])])
        assert prm.network.training is is_training


def test_the_weights_of_a_large_model_are_in_the_provenance_file_by_file(tmp_path: Path) -> None:
    stage = ScoreSteps(str(tmp_path / "one"), str(tmp_path / "several"))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    for name in reversed(names):
        (tmp_path / "several" / name).touch()
    several = [str(tmp_path / "several" / name) for name in names]
    assert stage.inputs() == [str(tmp_path / "one" / "model.safetensors"), *several]
