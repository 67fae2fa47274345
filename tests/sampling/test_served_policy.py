"""Whose samples they are: a server or an engine of another model than the policy is refused, at a resume too."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.runtime.schemas import EngineConfig, SampleConfig
from espalier.sampling.client import ServerGone
from espalier.sampling.input_checks import check_started, is_same_model
from espalier.sampling.job import run_job

Row = dict[str, Any]


@pytest.fixture
def models(tiny_policy: Path, tmp_path: Path) -> dict[str, str]:
    """The folders `sft`, `copy`, the same files, and `dpo`, other weights behind the same tokenizer."""
    folders = {name: shutil.copytree(tiny_policy, tmp_path / name) for name in ("sft", "copy", "dpo")}
    weights = folders["dpo"] / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size // 4))
    return {name: str(folder) for name, folder in folders.items()}


@pytest.fixture
def ask(models: dict[str, str], completion_server: Any, tmp_path: Path) -> Any:
    """Give a function that runs a job of the policy sft on a server of the rows of /v1/models, which dies after some
    answers; it returns the exit code, and the model that was asked."""
    write_records(tmp_path / "test.jsonl", [Problem(f"p{k}", f"3 + {k}?", "7") for k in range(4)])
    tokenizer = load_tokenizer(models["sft"])
    ids = [*tokenizer("#### 7", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    problems = {"_target_": "espalier.data.tasks.problem_file.ProblemFile", "path": str(tmp_path / "test.jsonl")}

    def run(rows: list[Row], die_after: int | None = None, **client: Any) -> tuple[int, str]:
        served = {"data": [{"max_model_len": 200, **row} for row in rows]}
        with completion_server(answer=lambda prompt, k: ("#### 7", ids), models=served, die_after=die_after) as server:
            node = {"_target_": "espalier.sampling.vllm_client.VLLMClient", "base_url": server.base_url}
            config = SampleConfig(
                output=str(tmp_path / "t.jsonl"),
                policy=models["sft"],
                engine=EngineConfig(concurrency=1),
                task={**problems, "kind": "marked_number"},
                client={**node, "patience_seconds": 0.3, **client},
                requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "test"},
                params={
                    "_target_": "espalier.sampling.client.SamplingParams",
                    "n": 1,
                    "temperature": 1,
                    "max_tokens": 40,
                },
            )
            try:
                code = run_job(config, load_tokenizer, check_model_folder)
            except ServerGone:
                code = 3
            return code, server.bodies[0]["model"]

    return run


def test_models_are_the_same_by_name_by_folder_or_by_their_files(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(models["sft"])
    (tmp_path / "empty").mkdir()
    for same in (models["sft"], "sft", "dpo/../sft", "link", "copy"):
        assert is_same_model(same, models["sft"]) is True, same
    assert is_same_model("dpo", models["sft"]) is False
    for unknown in ("org/model", "policy", "/elsewhere/sft", "empty"):
        assert is_same_model(unknown, models["sft"]) is None, unknown
    assert is_same_model("org/model", "org/model") is True


def test_a_server_of_another_model_is_refused_also_where_the_job_goes_on(models: dict[str, str], ask: Any) -> None:
    sft, dpo = models["sft"], models["dpo"]
    for rows in ([{"id": dpo}], [{"id": "policy", "root": dpo}], [{"id": sft + "-2", "root": dpo}, {"id": dpo}]):
        with pytest.raises(BadInput, match=rf"serves .*{dpo}.*, policy is {sft}: serve that"):
            ask(rows)
    assert ask([{"id": sft}], die_after=2) == (3, sft)
    with pytest.raises(BadInput, match=f"policy is {sft}"):
        ask([{"id": dpo}])
    with pytest.raises(BadInput, match=rf"serves {dpo} as 'asked', policy is {sft}: set policy="):
        ask([{"id": "asked", "root": dpo}], model="asked")
    assert ask([{"id": "policy", "root": sft}])[0] == 0


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([{"id": "dpo"}, {"id": "sft"}], "sft"),  # an adapter behind its base: ids alone
        ([{"id": "base", "root": "dpo"}, {"id": "mine", "root": "sft", "parent": "base"}], "mine"),
        ([{"id": "base", "root": "dpo"}, {"id": "other"}, {"id": "mine", "root": "copy"}], "mine"),
    ],
)
def test_of_several_names_the_policys_is_asked(
    rows: list[Row], name: str, models: dict[str, str], ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{key: models.get(value, value) for key, value in row.items()} for row in rows]
    assert ask(rows) == (0, models.get(name, name))
    assert "taken on trust" not in caplog.text.replace("that it has the policy's tokenizer is taken on trust", "")


@pytest.mark.parametrize("row", [{"id": "policy"}, {"id": "policy", "root": "org/model"}, {"id": "/elsewhere/sft"}])
def test_what_cannot_be_told_is_one_line_and_nothing_where_the_name_was_set(
    row: Row, ask: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    line = f"serves {row.get('root', row['id'])}: that it is the policy, {tmp_path}/sft, is taken on trust"
    assert ask([row], die_after=2) == (3, row["id"])
    assert caplog.text.count(line) == 1
    caplog.clear()
    assert ask([row], model=row["id"]) == (0, row["id"])
    assert line not in caplog.text
    assert len(read_records(Trajectory, tmp_path / "t.jsonl")) == 4


def test_an_engine_that_is_started_for_another_model_is_refused(
    models: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    check_started(models["copy"], models["sft"], "server.model")
    assert not caplog.records
    check_started("org/model", models["sft"], "server.model")
    assert "server.model=org/model: that it is the policy" in caplog.text
    with pytest.raises(BadInput, match=r"client\.model=.*dpo is another model than policy=.*sft: leave client\.model"):
        check_started(models["dpo"], models["sft"], "client.model")


@pytest.mark.parametrize(
    "changes",
    [
        {"server": {"_target_": "espalier.sampling.server.VLLMServer", "log": "log"},
         "client": {"_target_": "espalier.sampling.vllm_client.VLLMClient", "base_url": None}},
        {"client": {"_target_": "espalier.sampling.offline_client.OfflineClient"}},
        {"client": {"_target_": "espalier.sampling.data_parallel_engines.DataParallelEngines"}},
    ],
)  # fmt: skip
def test_a_job_whose_own_engine_has_another_model_ends_before_it_starts(
    changes: dict[str, Row], models: dict[str, str], tmp_path: Path
) -> None:
    part = "server" if "server" in changes else "client"
    changes = {**changes, part: {**changes[part], "model": models["dpo"]}}
    config = SampleConfig(
        output=str(tmp_path / "t.jsonl"),
        policy=models["sft"],
        task={"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 20, "num_test": 2},
        requests={"_target_": "espalier.sampling.requests.TrajectoryRequests", "split": "test"},
        params={"_target_": "espalier.sampling.client.SamplingParams", "n": 1, "temperature": 1, "max_tokens": 40},
    )
    with pytest.raises(BadInput, match=rf"{part}\.model={models['dpo']} is another model than policy={models['sft']}"):
        run_job(replace(config, **changes), load_tokenizer, check_model_folder)  # type: ignore[arg-type]
