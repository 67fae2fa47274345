"""What a sampling job says it has cost, however often it was cut: the sum over its whole output."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import iter_rows
from espalier.models import precision
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.runtime.schemas import EngineConfig, SampleConfig
from espalier.sampling import job
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.engine_arguments import settled_dtype

Sampling = Callable[..., dict[str, Any]]
TEXT = "buys: 3 + 4 = 7\n#### 7"
STOP_TEXT = TEXT + "\nProblem"


class AnswersSome:
    """Answers so many requests with the same text, then its server is gone. One request after the other."""

    def __init__(self, policy: str, most: int, stop: str):
        tokenizer = load_tokenizer(policy)
        text = STOP_TEXT if stop else TEXT
        self.ids = [*tokenizer(text).input_ids, *([] if stop else [tokenizer.eos_token_id])]
        self.left, self.stop = most, stop

    async def open(self) -> None:
        """Nothing to open."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return the same answer n times. Raises ServerGone when all were given."""
        if not self.left:
            raise ServerGone("gone")
        self.left -= 1
        text = TEXT + ("\n" if self.stop else "")
        return [Sample(text, list(self.ids), "stop", stop=self.stop) for _ in range(params.n)]

    async def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def sample(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> Sampling:
    """Run (or go on with) the job of an output, whose server answers `most` requests; the provenance afterwards."""

    def sample(output: Path, most: int = 1000, stop: str = "", **settings: Any) -> dict[str, Any]:
        client = AnswersSome(str(tiny_policy), most, stop)
        monkeypatch.setattr(job, "open_client", lambda *arguments: nullcontext((client, lambda: None)))
        config = SampleConfig(
            output=str(output), policy=str(tiny_policy), engine=EngineConfig(concurrency=1),
            task={"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 12},
            requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "train"},
            params={"_target_": "espalier.sampling.client.SamplingParams", "n": 2, "temperature": 1, "max_tokens": 40},
            **settings,
        )  # fmt: skip
        if most >= 12:
            assert job.run_job(config, load_tokenizer, check_model_folder) == 0
        else:
            with pytest.raises(ServerGone):
                job.run_job(config, load_tokenizer, check_model_folder)
        meta: dict[str, Any] = json.loads(output.with_suffix(".meta.json").read_text())
        return meta

    return sample


def tokens_in_rows(output: Path) -> int:
    return sum(len(row["response_ids"]) for _, row in iter_rows(output))


def test_a_job_that_was_cut_and_resumed_counts_the_tokens_of_all_its_rows(tmp_path: Path, sample: Sampling) -> None:
    """12 problems of 2 samples: 5 requests, then 4 more, then the last 3."""
    whole, output = sample(tmp_path / "whole.jsonl"), tmp_path / "cut.jsonl"
    sample(output, most=5)
    sample(output, most=4)
    meta = sample(output)
    assert whole["counts"]["generated_tokens"] == tokens_in_rows(output) > 24
    assert meta["counts"] == whole["counts"]
    assert meta["sampling_tokens"] == tokens_in_rows(output)


def test_the_cost_of_a_part_that_was_cut_stays_in_the_sum(tmp_path: Path, sample: Sampling) -> None:
    output = tmp_path / "cut.jsonl"
    part = sample(output, most=5)
    assert 0 <= part["sampling_seconds"] <= part["seconds"]
    output.with_suffix(".meta.json").write_text(json.dumps({**part, "seconds": 100.0, "sampling_seconds": 90.0}))
    meta = sample(output)
    assert 100 <= meta["seconds"] < 200
    assert 90 <= meta["sampling_seconds"] < 100


def test_tokens_behind_a_stop_string_are_counted_although_no_row_holds_them(tmp_path: Path, sample: Sampling) -> None:
    whole, output = sample(tmp_path / "whole.jsonl", stop="Problem"), tmp_path / "cut.jsonl"
    sample(output, most=5, stop="Problem")
    meta = sample(output, stop="Problem")
    assert tokens_in_rows(output) < meta["counts"]["generated_tokens"] == whole["counts"]["generated_tokens"]


def test_a_job_that_was_killed_counts_what_its_rows_hold_and_measures_the_rest_alone(
    tmp_path: Path, sample: Sampling
) -> None:
    """`kill -9` after 9 of 12 requests: the provenance is still the one of the start."""
    output = tmp_path / "killed.jsonl"
    part = sample(output, most=9)
    killed = {**part, "seconds": 0, "sampling_seconds": 0, "sampling_tokens": 0}
    output.with_suffix(".meta.json").write_text(json.dumps(killed))
    meta = sample(output)
    assert meta["counts"]["generated_tokens"] == tokens_in_rows(output)
    assert meta["sampling_tokens"] == tokens_in_rows(output) * 3 / 12, "of the part that sampling_seconds are of"


def test_what_a_server_that_runs_already_computes_in_is_not_guessed(
    tmp_path: Path, sample: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(job.SERVER_VARIABLE, "http://x")
    config = sample(tmp_path / "one.jsonl", server={"dtype": "auto"})["config"]
    assert config["server"]["dtype"] == "auto"


def test_what_engines_compute_in_stands_in_the_provenance(
    tmp_path: Path, sample: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's answer in place of `auto`, of the last part: a job may go on where it is another."""
    output, asked = tmp_path / "cut.jsonl", {"dtype": "auto", "options": {}}
    for most, is_fast, dtype in ((5, True, "bfloat16"), (1000, False, "float32")):
        monkeypatch.setattr(precision, "has_fast_bf16", lambda device_type, is_fast=is_fast: is_fast)
        config = sample(output, most, server=asked, client={**asked, "options": {"dtype": "half"}})["config"]
        assert (config["server"]["dtype"], config["client"]["dtype"]) == (dtype, "half")


def test_engines_on_a_cluster_do_not_compute_in_what_the_driver_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may have no GPU: engines of `dtype: auto` are asked for as `RayEngines` itself reads it."""
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device_type: False)
    ray = {"_target_": "espalier.sampling.ray_engines.RayEngines", "model": "m", "dtype": "auto", "options": {}}
    here = {**ray, "_target_": "espalier.sampling.engine_pool.EnginePool"}
    assert (settled_dtype(ray)["dtype"], settled_dtype(here)["dtype"]) == ("bfloat16", "float32")
    pytest.importorskip("ray")
    from espalier.sampling.ray_engines import RayEngines

    assert f"{RayEngines.__module__}.{RayEngines.__qualname__}" == ray["_target_"]
    assert RayEngines(model="m", dtype="auto").dtype == settled_dtype(ray)["dtype"]
