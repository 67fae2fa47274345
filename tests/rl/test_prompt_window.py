"""Problems whose prompt does not fit the engine's window, and those whose prompt the server refuses."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records
from espalier.data.left_out import LeftOut, count_left_out
from espalier.data.prompt_window import fit_window
from espalier.data.prompts import encode_prompt
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.engines_from_config import window_of
from espalier.rl.problems import warn_of_seen
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_checks import Refusal, check_refused
from espalier.rl.trainer import Trainer
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import NotAnswered, Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient
from tests.support.rl_cases import PARAMS, FakeClient, make_trainer, read_metrics


class Lines:
    """A task whose prompt is the question; its tokenizer makes a token of a character."""

    name = "lines"
    eos_token_id, bos_token, eos_token = 0, None, "\0"

    def prompt(self, problem: Problem) -> str:
        return problem.question

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        return type("Encoded", (), {"input_ids": [1] * len(text)})


def lengths_of(task: WordArithmetic, tokenizer: Any, split: str = "train") -> dict[str, int]:
    return {problem.id: len(encode_prompt(task, tokenizer, problem).ids) for problem in task.problems(split)}


class Refusing(FakeClient):
    """Answers HTTP 400 to these problems, always."""

    refused: tuple[str, ...] = ()
    asked: list[str]

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.asked.append(request.problem_id)
        if request.problem_id in self.refused:
            raise Refused("HTTP 400: this prompt is refused")
        return await super().sample(request, params)


def refusing(trainer: Trainer, tokenizer: Any, *problem_ids: str) -> Refusing:
    client = Refusing(tokenizer)
    client.refused, client.asked = problem_ids, []
    trainer.rollout_source.sampler.client = client
    return client


def test_a_prompt_fits_where_it_leaves_room_for_one_token() -> None:
    problems = [Problem(name, "x" * length, "1") for name, length in (("a", 9), ("b", 10), ("c", 12), ("d", 5))]
    fit = fit_window(Lines(), Lines(), "train", problems, window=10, max_tokens=5)
    assert [problem.id for problem in fit.kept] == ["a", "d"]
    assert fit.left_out == [("c", 12), ("b", 10)]
    assert fit.num_short == 1, "'a' leaves 1 token, 'd' leaves 5"


def test_what_is_left_out_is_said_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    problems = [Problem(name, "x" * length, "1") for name, length in (("a", 9), ("b", 10), ("c", 12))]
    with count_left_out() as counted:
        fit_window(Lines(), Lines(), "dev", problems, window=10, max_tokens=5).check()
    assert counted == [LeftOut("lines/dev", "have a prompt that leaves no room in the window of 10 tokens", 2, 3)]
    first, second = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 of 3 problems" in first
    assert first.endswith("left out (longest: 'c', 12 tokens)")
    assert "1 of 1 problems leave less room in the window of 10 tokens than max_tokens (5)" in second
    with pytest.raises(BadInput, match=r"lines/dev: none of 3 problems fits the window of 9 tokens \(the shortest"):
        fit_window(Lines(), Lines(), "dev", problems, window=9, max_tokens=5).check()


@pytest.mark.slow
def test_problems_that_do_not_fit_are_never_asked_and_a_resume_is_of_the_same_run(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    lengths = lengths_of(task, tokenizer) | lengths_of(task, tokenizer, "dev")
    window = sorted(lengths.values())[-4]
    too_long = {name for name, length in lengths.items() if length >= window}
    num_train = len(too_long & lengths_of(task, tokenizer).keys())
    more = {"stop_after": 1, "save_every": 1}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", window=window, **more)
    client = refusing(trainer, tokenizer)
    trainer.run()
    assert too_long
    assert not too_long & set(client.asked)
    row = [row for row in read_metrics(tmp_path / "run") if "rollout/reward" in row][-1]
    assert row["problems/train_left_out"] == num_train
    assert row["problems/dev_left_out"] == len(too_long) - num_train
    assert row["rollout/refused"] == 0
    whole = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", stop_after=2)
    assert whole.problems.digest == trainer.problems.digest
    whole.run()
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


def test_a_window_that_leaves_too_few_problems_is_refused_at_once(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    def make(window: int, **more: int) -> Trainer:
        return make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", window=window, **more)

    with pytest.raises(BadInput, match="word_arithmetic/train: none of 200 problems fits the window of 5 tokens"):
        make(5)
    lengths = sorted(lengths_of(task, tokenizer).values())
    with pytest.raises(BadInput, match=r"num_problems must be 1 to 1\d\d .*, got 200"):
        make(lengths[-2], rollout_num_problems=200)


def test_a_prompt_that_the_server_refuses_gives_no_group_and_the_run_goes_on(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {"num_iterations": 1, "evaluation_every": 1}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **more)
    client = refusing(trainer, tokenizer, task.problems("dev")[0].id)
    client.refused += (_first_drawn(trainer),)
    trainer.run()
    rows = read_metrics(tmp_path / "run")
    drawn = [row for row in rows if "rollout/reward" in row]
    assert [row["step"] for row in drawn] == [1]
    assert drawn[0]["rollout/refused"] == 1
    assert drawn[0]["rollout/num_groups"] == 5
    assert {row["eval/refused"] for row in rows if "eval/accuracy" in row} == {1.0}
    written = read_records(Trajectory, tmp_path / "run" / "samples" / "evaluation-000001.jsonl")
    answered = [problem for problem in task.problems("dev") if problem.id != client.refused[0]]
    most = trainer.config.samples.num_problems
    assert [(one.problem_id, one.gold) for one in written] == [(one.id, one.gold) for one in answered[:most]]
    told = f"1 of 6 problems are refused by the server: '{client.refused[1]}' (HTTP 400"
    assert any(record.message.startswith(told) for record in caplog.records)


def _first_drawn(trainer: Trainer) -> str:
    from espalier.rl.problem_order import draw_problems

    return draw_problems(trainer.problems.train, trainer.config.rollout.num_problems, trainer.config.seed, 0)[0].id


def test_more_refused_problems_than_the_limit_end_the_run_with_their_ids() -> None:
    refused = [Refusal(f"p{k}", "HTTP 400") for k in range(2)]
    check_refused(refused, 40, RLConfig().rollout.max_refused_share)
    with pytest.raises(BadInput, match=r"2 of 39 problems are refused by the server: 'p0', 'p1' \(HTTP 400\)"):
        check_refused(refused, 39, RLConfig().rollout.max_refused_share)
    with pytest.raises(BadInput, match="2 of 2"):
        check_refused(refused, 2, 1.0)
    check_refused(refused[:1], 4, 0.05)  # or one problem would end a small run on every resume
    with pytest.raises(BadInput, match="1 of 4"):
        check_refused(refused[:1], 4, 0.0)


def test_a_request_that_is_never_answered_is_no_refusal(task: WordArithmetic, tokenizer: Any) -> None:
    class Late(FakeClient):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            raise NotAnswered("12 attempts failed")

    sampler = Sampler(Late(tokenizer), task, tokenizer, concurrency=4, stall_seconds=60)
    with pytest.raises(ServerGone, match="12 attempts failed"):
        asyncio.run(sampler.draw(task.problems("dev")[:2], PARAMS, "x", 0))


def test_the_window_is_known_before_the_engine_starts(completion_server: Any, tiny_policy: Path) -> None:
    client, path = VLLMClient(), str(tiny_policy)
    assert window_of(client, VLLMServer("m", "l", max_model_len=300), path) == 300
    assert window_of(client, VLLMServer("m", "l", options={"max_model_len": 200}), path) == 200
    assert window_of(DataParallelEngines("m", "l", max_model_len=90), None, path) == 90
    assert window_of(DataParallelEngines("m", "l", options={"max_model_len": 80}), None, path) == 80
    with completion_server(max_model_len=70) as one, completion_server(max_model_len=60) as other:
        assert window_of(VLLMClient([one.base_url, other.base_url]), None, path) == 60
    with completion_server(models={"data": [{"id": "policy"}]}) as silent:
        assert window_of(VLLMClient(silent.base_url), None, path) == 512, "the model's positions"


def test_dev_problems_that_are_trained_on_are_told(caplog: pytest.LogCaptureFixture) -> None:
    train = [Problem(f"t{k}", f"Question {k}?", "1") for k in range(3)]
    warn_of_seen(train, [Problem("d0", "Question 9?", "1"), Problem("d1", "Question 1?", "1", context="of another")])
    assert caplog.text == ""
    warn_of_seen(train, [Problem("d0", "Question 9?", "1"), Problem("d1", "Question 1?", "1")])
    assert "1 of 2 dev problems are trained on too" in caplog.text
