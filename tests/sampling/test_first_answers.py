"""What a pilot, and the first problems of any run, say before the rest is paid for."""

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.problem_file import ProblemFile
from espalier.data.tasks.task import Task
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.runtime.schemas import EngineConfig, SampleConfig
from espalier.sampling import job
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams
from espalier.sampling.first_answers import pilot_of, summary, warnings
from espalier.sampling.requests import CompletionRequests

RIGHT = "3 and 4 are 7.\n#### 7"


def rows(*responses: str, finish: str = "stop", per_problem: int = 2, task: Task | None = None) -> list[Trajectory]:
    """Trajectories of `per_problem` responses a problem, whose gold is 7."""
    grader = task or own_problems("marked_number")
    made = []
    for k, response in enumerate(responses):
        grade = grader.grade("7", response)
        is_right = grade.is_correct and finish == "stop"
        made.append(Trajectory(f"p{k // per_problem}/{k % per_problem}", f"p{k // per_problem}", "Q", response,
                               response.splitlines(keepends=True), [1], [1] * 10, [], finish, "7", grade.answer,
                               is_right))  # fmt: skip
    return made


def own_problems(kind: str) -> ProblemFile:
    return ProblemFile(path="problems", kind=kind, steps="lines")


def test_the_line_says_accuracy_by_problem_what_is_unread_and_cut_and_what_the_whole_run_costs() -> None:
    """Of two problems one is right in both samples, one in none: 50 %; 10 tokens a sample, 4 samples of 2 problems."""
    line = summary(rows(RIGHT, RIGHT, "7", "#### 8"), num_problems=100)
    assert line.startswith("first 2 problems: 50.0 % right [9, 91]"), "Wilson's interval of one in two"
    assert "25.0 % without an answer that can be read, 0.0 % cut at params.max_tokens" in line
    assert "about 2,000 tokens for all 100" in line


def test_where_a_chat_api_returns_no_token_ids_nothing_is_said_of_tokens() -> None:
    found = [replace(row, response_ids=[]) for row in rows("3 and\n4", "4 and\n3", finish="length")]
    assert "tokens" not in summary(found, num_problems=100).replace("params.max_tokens", "")
    assert warnings(found, own_problems("marked_number"))[0].startswith(
        "100.0 % of the solutions were cut and are wrong"
    )


def test_answers_that_are_never_marked_are_named_with_the_kind_that_would_read_them() -> None:
    found = warnings(
        rows("They are\n7 in all.", "So\nit is 7.", "It\nis 8.", "So it\nis 7."), own_problems("marked_number")
    )
    assert len(found) == 1
    assert "100.0 % of the solutions that ended have no answer that task.kind=marked_number reads" in found[0]
    assert "answers are never marked by ####: choose a prompt that asks for it" in found[0]
    assert "task.kind=response_number would find 75.0 % right" in found[0] or "response_math" in found[0]


def test_a_kind_that_does_not_fit_the_golds_is_named_with_the_one_that_does() -> None:
    task = own_problems("boolean3")
    found = warnings(rows("They are\n7 in all.", "So\nit is 7.", "It\nis 7!", "So it\nis 7", task=task), task)
    assert "would find 100.0 % right" in found[0]


def test_solutions_that_are_cut_alike_of_one_step_or_all_wrong_are_warned_of() -> None:
    task = own_problems("marked_number")
    cut = warnings(rows("3 and\n4", "4 and\n3", finish="length"), task)
    assert any(warning.startswith("100.0 % of the solutions were cut after 10 tokens") for warning in cut)
    assert any("none of 2 solutions is right" in warning for warning in warnings(rows("a\n#### 6", "b\n#### 5"), task))
    assert any("the same text" in warning for warning in warnings(rows(RIGHT, RIGHT), task))
    assert any("a single step" in warning for warning in warnings(rows("#### 7", "So #### 7"), task))


def test_nothing_is_warned_of_where_solutions_differ_and_some_are_right() -> None:
    assert warnings(rows(RIGHT, "3 and\n4 are 8.\n#### 8", "No\n#### 6", RIGHT), own_problems("marked_number")) == []


def test_problems_without_a_gold_are_not_called_wrong() -> None:
    unlabelled = [replace(row, gold="") for row in rows("a\n#### 7", "b\n#### 6")]
    assert warnings(unlabelled, own_problems("marked_number")) == []


class Answers:
    """Answers every request but the refused ones; keeps what was asked."""

    def __init__(self, policy: str, refused: tuple[str, ...] = ()):
        tokenizer = load_tokenizer(policy)
        self.ids = [*tokenizer(RIGHT).input_ids, tokenizer.eos_token_id]
        self.asked: list[str] = []
        self.refused = refused

    async def open(self) -> None:
        """Nothing to open."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return the same answer n times."""
        self.asked.append(request.id)
        if request.id in self.refused:
            raise Refused("too long")
        return [Sample(RIGHT, list(self.ids), "stop") for _ in range(params.n)]

    async def close(self) -> None:
        """Nothing to close."""


def run(
    output: Path,
    policy: Path,
    monkeypatch: pytest.MonkeyPatch,
    pilot: int = 0,
    refused: tuple[str, ...] = (),
    max_failed_share: float = 0.0,
) -> list[str]:
    """Run the job of 30 problems; the ids that were asked."""
    client = Answers(str(policy), refused)
    monkeypatch.setattr(job, "open_client", lambda *arguments: nullcontext((client, lambda: None)))
    config = SampleConfig(
        output=str(output), policy=str(policy), engine=EngineConfig(concurrency=1), pilot=pilot,
        max_failed_share=max_failed_share,
        task={"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 30},
        requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "train"},
        params={"_target_": "espalier.sampling.client.SamplingParams", "n": 2, "temperature": 1, "max_tokens": 40},
    )  # fmt: skip
    job.run_job(config, load_tokenizer, check_model_folder)
    return client.asked


def meta(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.with_suffix(".meta.json").read_text())
    return found


def test_a_pilot_asks_problems_from_everywhere_and_the_run_after_it_asks_the_others_alone(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    with caplog.at_level(logging.INFO):
        piloted = run(output, tiny_policy, monkeypatch, pilot=3)
    every = [f"word_arithmetic-train-{k}" for k in range(30)]
    assert [name.rpartition("-")[2].lstrip("0") or "0" for name in piloted] == ["0", "10", "20"]
    assert "first 3 problems: " in caplog.text
    assert "the pilot is over: the same command without pilot asks the 27 other problems" in caplog.text
    assert meta(output)["is_complete"] is False
    assert meta(output)["counts"]["rows"] == 6
    rest = run(output, tiny_policy, monkeypatch)
    assert len(rest) == 27
    assert not set(rest) & set(piloted)
    assert meta(output)["is_complete"] is True
    assert meta(output)["counts"]["requests"] == len(every) == 30
    assert len({row["id"] for _, row in iter_rows(output)}) == 60


def test_a_pilot_that_was_done_says_again_what_it_said_and_asks_nothing(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    run(output, tiny_policy, monkeypatch, pilot=3)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert run(output, tiny_policy, monkeypatch, pilot=3) == []
    assert "first 3 problems: " in caplog.text
    assert meta(output)["is_complete"] is False


def test_a_pilot_of_more_problems_than_there_are_is_the_run(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    assert len(run(output, tiny_policy, monkeypatch, pilot=50)) == 30
    assert meta(output)["is_complete"] is True


def test_every_run_that_begins_looks_at_its_first_twenty_problems_once_and_one_that_goes_on_does_not(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    with caplog.at_level(logging.INFO):
        run(output, tiny_policy, monkeypatch)
    assert caplog.text.count("first 20 problems: ") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run(output, tiny_policy, monkeypatch)
    assert "problems: " not in caplog.text


def test_a_run_that_was_cut_before_its_first_problems_were_seen_says_it_when_it_goes_on(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    run(output, tiny_policy, monkeypatch)
    whole = output.read_text().splitlines(keepends=True)
    stored = meta(output)
    for num_rows, num_lines in ((2 * 7, 1), (2 * 25, 0)):
        output.write_text("".join(whole[:num_rows]))
        output.with_suffix(".meta.json").write_text(json.dumps({**stored, "is_complete": False}))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert len(run(output, tiny_policy, monkeypatch)) == 30 - num_rows // 2
        assert caplog.text.count("first 20 problems: ") == num_lines


def test_refused_requests_of_a_pilot_are_not_said_to_finish_the_run(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    first = run(tmp_path / "names.jsonl", tiny_policy, monkeypatch, pilot=1)
    with caplog.at_level(logging.INFO):
        run(output, tiny_policy, monkeypatch, pilot=3, refused=(first[0],), max_failed_share=0.5)
    assert "the run is finished" not in caplog.text
    assert "1 of 3 requests were refused" in caplog.text
    assert len(run(output, tiny_policy, monkeypatch)) == 28


def test_a_refused_problem_of_the_pilot_is_left_out_of_what_it_says(
    tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.jsonl"
    first = run(tmp_path / "names.jsonl", tiny_policy, monkeypatch, pilot=1)
    with caplog.at_level(logging.INFO):
        run(output, tiny_policy, monkeypatch, pilot=3, refused=(first[0],))
    assert "first 2 problems: " in caplog.text
    assert meta(output)["counts"]["failed"] == 1


def test_a_pilot_of_states_and_a_negative_one_are_refused(tmp_path: Path, tiny_policy: Path) -> None:
    with pytest.raises(BadInput, match="pilot counts problems"):
        pilot_of([], 3, CompletionRequests("states.jsonl"))
    config = SampleConfig(output=str(tmp_path / "x.jsonl"), policy=str(tiny_policy), pilot=-1)
    with pytest.raises(BadInput, match="pilot must be at least 0"):
        job.run_job(config, load_tokenizer, check_model_folder)
