"""What a sampling job was made of: its problems, its policy's weights and tokenizer. Other ones are refused."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_json, write_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.runtime.schemas import EngineConfig, SampleConfig
from espalier.sampling import job
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.requests import TrajectoryRequests

TEXT = "3 + 4 = 7\n#### 7"


class Client:
    """Answers every request alike, and is gone after `most` of them."""

    def __init__(self, policy: Path, most: int):
        tokenizer = load_tokenizer(str(policy))
        self.ids = [*tokenizer(TEXT, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        self.most = most
        self.asked: list[str] = []

    async def open(self) -> None:
        """Nothing."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Raises ServerGone."""
        if len(self.asked) == self.most:
            raise ServerGone("gone")
        self.asked.append(request.id)
        return [Sample(TEXT, list(self.ids), "stop") for _ in range(params.n)]

    async def close(self) -> None:
        """Nothing."""


def problems(number: int, question: str = "How much is 3 + {}?", gold: str = "7", **more: Any) -> list[Problem]:
    return [Problem(f"p{k}", question.format(k), gold, **more) for k in range(number)]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Give the file of problems."""
    path = tmp_path / "test.jsonl"
    write_records(path, problems(6))
    return path


@pytest.fixture
def config(tmp_path: Path, asked: Path, tiny_policy: Path) -> SampleConfig:
    return SampleConfig(
        output=str(tmp_path / "t.jsonl"),
        policy=str(tiny_policy),
        engine=EngineConfig(concurrency=1),
        task={"_target_": "espalier.data.tasks.problem_file.ProblemFile", "path": str(asked), "kind": "marked_number"},
        requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "test"},
        params={"_target_": "espalier.sampling.client.SamplingParams", "n": 2, "temperature": 1, "max_tokens": 40},
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a function that runs a job by a client, gone after `most` requests, and returns the exit code and what was
    asked."""

    def run_it(config: SampleConfig, most: int = 99) -> tuple[int, list[str]]:
        client = Client(Path(config.policy), most)
        monkeypatch.setattr(job, "open_client", lambda *arguments: nullcontext((client, lambda: None)))
        try:
            return job.run_job(config, load_tokenizer, check_model_folder), client.asked
        except ServerGone:
            return 3, client.asked

    return run_it


def without(meta: Path, *keys: str) -> None:
    """Take inputs out of a provenance, as an earlier version wrote it."""
    stored = json.loads(meta.read_text())
    write_json(meta, {**stored, "inputs": {key: row for key, row in stored["inputs"].items() if key not in keys}})


@pytest.mark.parametrize(
    "changed",
    [
        problems(9),
        problems(6, gold="8"),
        problems(6, question="NEW question {}"),
        problems(6, context="All of it is in metres."),
        problems(6, info={"premises": ["One.", "Two."]}),
    ],
)
def test_a_job_of_problems_that_have_changed_since_is_refused_whether_it_was_cut_or_is_finished(
    changed: list[Problem], run: Any, config: SampleConfig, asked: Path
) -> None:
    assert run(config, most=3) == (3, ["p0", "p1", "p2"])
    write_records(asked, changed)
    with pytest.raises(BadInput, match=r"t\.jsonl was made otherwise \(its input problem_file/test has changed\)"):
        run(config)
    write_records(asked, problems(6))
    assert run(config) == (0, ["p3", "p4", "p5"]), "nothing is lost: with the problems as they were it goes on"
    write_records(asked, changed)
    with pytest.raises(BadInput, match=r"its input problem_file/test has changed"):
        run(config)
    write_records(asked, problems(6))
    assert run(config) == (0, []), "is complete"
    assert {row.prompt for row in read_records(Trajectory, config.output)} == {
        f"How much is 3 + {k}?\n" for k in range(6)
    }


def test_a_finished_job_needs_its_problems_no_more(
    run: Any, config: SampleConfig, asked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(config, most=3)[0] == 3
    moved = asked.rename(asked.with_name("elsewhere.jsonl"))
    with pytest.raises(BadInput, match="no such folder"):
        run(config)
    moved.rename(asked)
    assert run(config) == (0, ["p3", "p4", "p5"])
    asked.rename(moved)
    assert run(config) == (0, [])
    assert "whether the problems are still those that were asked is not known" in caplog.text


def test_the_same_problems_written_otherwise_and_others_that_are_not_asked_change_nothing(
    run: Any, config: SampleConfig, asked: Path
) -> None:
    first = replace(config, requests={**config.requests, "limit": 4})
    assert run(first, most=3)[0] == 3
    rows = [json.dumps({"gold": "7", "id": row.id, "question": row.question}) for row in problems(9)]
    rows[:4] = rows[3::-1]
    asked.write_text("\n\n".join(rows))
    assert run(first) == (0, ["p3"])


def test_an_output_that_an_earlier_version_began_goes_on_and_knows_its_problems_from_then_on(
    run: Any, config: SampleConfig, asked: Path
) -> None:
    assert run(config, most=3)[0] == 3
    without(Path(config.output).with_suffix(".meta.json"), "problem_file/test")
    assert run(config, most=2) == (3, ["p3", "p4"])
    write_records(asked, problems(6, gold="8"))
    with pytest.raises(BadInput, match="its input problem_file/test has changed"):
        run(config)
    write_records(asked, problems(6))
    assert run(config) == (0, ["p5"])
    without(Path(config.output).with_suffix(".meta.json"), "problem_file/test")
    write_records(asked, problems(6, gold="8"))
    assert run(config) == (0, []), "a finished one of before says nothing of its problems, and stays"


def test_problems_are_read_once_and_those_that_a_task_makes_are_said_by_its_settings(
    run: Any, config: SampleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from espalier.data.tasks.problem_file import ProblemFile

    read = []
    monkeypatch.setattr(ProblemFile, "problems", lambda task, split: read.append(split) or problems(6))
    assert run(config)[0] == 0
    assert read == ["test"]
    made = {"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 20, "num_test": 5}
    other = replace(config, task=made, output=f"{config.output}.made.jsonl")
    assert run(other)[0] == 0
    inputs = json.loads(Path(other.output).with_suffix(".meta.json").read_text())["inputs"]
    assert list(inputs) == [config.policy]


def test_a_source_reads_the_problems_of_another_task_anew() -> None:
    class Made:
        name = "made"

        def __init__(self, number: int):
            self.number = number

        def problems(self, split: str) -> list[Problem]:
            return problems(self.number)

    source = TrajectoryRequests("test", first=1, limit=3)
    one, other = Made(2), Made(9)
    assert [row.id for row in source.asked_problems(one)] == ["p1"]  # type: ignore[arg-type]
    assert [row.id for row in source.asked_problems(other)] == ["p1", "p2", "p3"]  # type: ignore[arg-type]


@pytest.fixture
def chatting(config: SampleConfig, tmp_path: Path) -> SampleConfig:
    """A job whose prompts are written by the chat template of a policy of its own."""
    policy = tmp_path / "policy"
    shutil.copytree(config.policy, policy)
    template = {"_target_": "espalier.data.prompts.PromptTemplate", "is_chat": True}
    write_template(policy, "OLD")
    return replace(config, policy=str(policy), task={**config.task, "template": template})


def write_template(policy: Path, word: str) -> None:
    tokenizer = load_tokenizer(str(policy))
    tokenizer.chat_template = f"{{% for m in messages %}}{word} {{{{ m['content'] }}}}\n{{% endfor %}}"
    tokenizer.save_pretrained(policy)


def test_a_chat_template_that_was_edited_between_cut_and_resume_is_refused(run: Any, chatting: SampleConfig) -> None:
    assert run(chatting, most=3)[0] == 3
    write_template(Path(chatting.policy), "NEW")
    with pytest.raises(BadInput, match=f"its input {chatting.policy} has changed"):
        run(chatting)
    write_template(Path(chatting.policy), "OLD")
    assert run(chatting) == (0, ["p3", "p4", "p5"])
    assert all(row.prompt.startswith("OLD") for row in read_records(Trajectory, chatting.output))


def test_an_output_that_an_earlier_version_began_goes_on_and_knows_its_policy_from_then_on(
    run: Any, chatting: SampleConfig
) -> None:
    assert run(chatting, most=3)[0] == 3
    meta = Path(chatting.output).with_suffix(".meta.json")
    stored = json.loads(meta.read_text())
    stored["inputs"][chatting.policy] = stored["inputs"][chatting.policy].partition(":")[0]
    write_json(meta, stored)
    assert run(chatting, most=2) == (3, ["p3", "p4"])
    write_template(Path(chatting.policy), "NEW")
    with pytest.raises(BadInput, match=f"its input {chatting.policy} has changed"):
        run(chatting)
