"""Steps at improbable tokens flow through the pipeline as any steps do: split, cut, complete, value, label, train."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.examples.step_examples import StepValueExamples
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, Completion, State, StepValues, Trajectory
from espalier.pipeline.stage import run_stage
from espalier.pipeline.values.cut_states import CutStates
from espalier.pipeline.values.estimate_values import EstimateValues
from espalier.pipeline.values.split_steps import SplitSteps
from espalier.runtime.schemas import StageConfig

SURE, DOUBT = math.log(0.95), math.log(0.4)
RESPONSES = ("1 + 2 = 3\n#### 3", "1 + 2 = 4\n#### 4")


@pytest.fixture
def sampled(tokenizer: Any, tmp_path: Path) -> list[Trajectory]:
    """Two solutions of one problem, an improbable token where they part, with their log-probs."""
    prompt_ids = tokenizer("How many?\n").input_ids
    rows = []
    for number, response in enumerate(RESPONSES):
        ids = [*tokenizer(response).input_ids, tokenizer.eos_token_id]
        logprobs = [SURE] * len(ids)
        logprobs[1], logprobs[len(ids) // 2] = DOUBT, DOUBT
        rows.append(Trajectory(f"p/{number}", "p", "How many?\n", response, [response], prompt_ids, ids, [len(ids)],
                               "stop", "3", response[-1], number == 0, logprobs=logprobs))  # fmt: skip
    write_records(tmp_path / "sampled.jsonl", rows)
    return rows


def run(stage: Any, source: str, target: str, folder: Path) -> Path:
    """A stage from file to file."""
    output = folder / target
    config = StageConfig(output=str(output), input=str(folder / source), stage={"_target_": type(stage).__name__})
    assert run_stage(stage, None, config) == 0
    return output


def complete(states: Sequence[State]) -> list[Completion]:
    """Two completions of every state, the first right."""
    return [
        Completion(f"{s.id}/{k}", s.id, s.problem_id, "x", [5], "stop", "3", k == 0) for s in states for k in (0, 1)
    ]


def test_states_at_cut_points_are_valued_labelled_and_learnt(
    sampled: list[Trajectory], tiny_policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    path = run(SplitSteps(str(tiny_policy)), "sampled.jsonl", "trajectories.jsonl", tmp_path)
    rows = read_records(Trajectory, path)
    for row, before in zip(rows, sampled, strict=True):
        size = len(before.response_ids)
        assert row.step_ends == [2, size // 2 + 1, size]
        assert "".join(row.steps) == before.response
        assert replace(row, steps=before.steps, step_ends=before.step_ends) == before, "nothing else is touched"
        assert [tokenizer.decode(row.response_ids[:end], skip_special_tokens=True) for end in row.step_ends] == [
            "".join(row.steps[: number + 1]) for number in range(3)
        ]

    states = read_records(State, run(CutStates(), "trajectories.jsonl", "states.jsonl", tmp_path))
    # both begin with the same two tokens: one state for the two of them
    keys = {tuple(row.response_ids[:end]) for row in rows for end in row.step_ends[:-1]}
    assert {tuple(state.prefix_ids) for state in states} == keys
    assert len(states) == len(keys)
    write_records(tmp_path / "completions.jsonl", complete(states))

    files = (str(path), str(tmp_path / "states.jsonl"))
    values = run(EstimateValues(*files), "completions.jsonl", "values.jsonl", tmp_path)
    assert [row.values for row in read_records(StepValues, values)] == [[0.5, 0.5, 1.0], [0.5, 0.5, 0.0]]
    labels = run(EstimateValues(*files, estimator="smoothed"), "completions.jsonl", "labels.jsonl", tmp_path)
    assert [len(row.labels) for row in read_records(StepValues, labels)] == [3, 3]

    start = len(sampled[0].prompt_ids)
    for examples in (StepValueExamples(str(values), 512), StepValueExamples(str(labels), 512)):
        for row, example in zip(rows, examples.load(tokenizer), strict=True):
            assert example.positions == [start + end - 1 for end in row.step_ends]
            assert example.ids == row.prompt_ids + row.response_ids


def test_another_splitter_may_make_the_steps(sampled: list[Trajectory], tiny_policy: Path, tmp_path: Path) -> None:
    path = run(SplitSteps(str(tiny_policy), by="lines"), "sampled.jsonl", "trajectories.jsonl", tmp_path)
    assert [row.steps for row in read_records(Trajectory, path)] == [r.splitlines(keepends=True) for r in RESPONSES]


def test_log_probs_that_were_not_kept_are_asked_for(
    sampled: list[Trajectory], tiny_policy: Path, tmp_path: Path
) -> None:
    write_records(tmp_path / "sampled.jsonl", [replace(sampled[0], logprobs=None)])
    with pytest.raises(
        BadInput, match=r"trajectory 'p/0' has no log-probs: sample it with params.return_logprobs=true"
    ):
        run(SplitSteps(str(tiny_policy)), "sampled.jsonl", "trajectories.jsonl", tmp_path)
    assert not (tmp_path / "trajectories.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"by": "pages"}, "stage.by must be cut_points or one of lines, paragraphs, gsm8k"),
        ({"threshold": 0.0}, "the threshold of cut points must be over 0"),
        ({"num_segments": 2, "cut_points_per_segment": 1}, "not both"),
    ],
)
def test_settings_that_say_nothing_are_refused(
    options: dict[str, Any], said: str, sampled: list[Trajectory], tiny_policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        run(SplitSteps(str(tiny_policy), **options), "sampled.jsonl", "trajectories.jsonl", tmp_path)


def test_an_empty_response_keeps_its_no_steps(sampled: list[Trajectory], tiny_policy: Path, tmp_path: Path) -> None:
    empty = replace(sampled[0], response="", steps=[], step_ends=[], response_ids=[], logprobs=[])
    write_records(tmp_path / "sampled.jsonl", [empty])
    path = run(SplitSteps(str(tiny_policy)), "sampled.jsonl", "trajectories.jsonl", tmp_path)
    assert read_records(Trajectory, path) == [empty]
