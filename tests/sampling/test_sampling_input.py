"""What a sampling run is given and cannot use: one clear line each, and nothing is written over."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, State
from espalier.data.token_text import PROBE_TEXT
from espalier.models.tiny import build_tiny, build_tokenizer
from espalier.runtime.entrypoint import build
from espalier.sampling.client import SampleRequest, ServerGone
from espalier.sampling.input_checks import check_origin, check_served, check_state_tokens, check_unique
from espalier.sampling.requests import decode
from tests.sampling.test_runner import job_config, run_the_job
from tests.support.root_config import root_config


def states_of(tokenizer: Any, count: int = 8) -> list[State]:
    rows = []
    for number in range(count):
        prompt, prefix = f"Mia has {number} apples. How many?\n", f"buys: {number} + 3 = {number + 3}\n"
        ids = [tokenizer(text).input_ids for text in (prompt, prefix)]
        rows.append(State(f"p{number}/0#1", f"p{number}", f"p{number}/0", 1, prompt, prefix, *ids, "7"))
    return rows


@pytest.fixture(scope="module")
def other_tokenizer() -> Any:
    """A tokenizer that learnt from another text."""
    return build_tokenizer(["the quick brown fox jumps over the lazy dog 0123456789 += \n"] * 50, vocab_size=300)


def before_and_after(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_two_tokenizers_differ_on_the_probe(tokenizer: Any, other_tokenizer: Any) -> None:
    mine, other = (one(PROBE_TEXT, add_special_tokens=False).input_ids for one in (tokenizer, other_tokenizer))
    assert mine != other
    assert decode(tokenizer)(mine) == PROBE_TEXT


def test_a_served_model_with_another_tokenizer_ends_with_two_and_writes_no_row(
    tmp_path: Path, tiny_policy: Path, other_tokenizer: Any, completion_server: Any
) -> None:
    def tokenize(text: str) -> list[int]:
        return list(other_tokenizer(text, add_special_tokens=False).input_ids)

    with completion_server(tokenize=tokenize, max_model_len=256) as server:
        with pytest.raises(BadInput, match="has another tokenizer than policy") as caught:
            run_the_job(job_config(server.base_url, tiny_policy, tmp_path / "t.jsonl"))
        assert server.bodies == []
    assert caught.value.exit_code == 2
    assert not (tmp_path / "t.jsonl").exists()


def test_a_wrong_model_name_leaves_what_stands_there_as_it_is(
    tmp_path: Path, tiny_policy: Path, tokenizer: Any, completion_server: Any
) -> None:
    text = "buys: 3 + 4 = 7\n#### 7"
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    output = tmp_path / "t.jsonl"
    with completion_server(max_model_len=256, answer=lambda prompt_ids, k: (text, ids), die_after=3) as server:
        config = job_config(server.base_url, tiny_policy, output)
        config = root_config(config, client={**config.client, "patience_seconds": 0.1}, concurrency=1)
        with pytest.raises(ServerGone):
            run_the_job(config)
    before = output.read_bytes()
    assert before
    with completion_server(max_model_len=256) as server:
        client = {**config.client, "base_url": server.base_url, "model": "polcy"}
        with pytest.raises(BadInput, match=r"serves policy, not 'polcy': set client.model=null or one"):
            run_the_job(replace(config, client=client))
    assert output.read_bytes() == before


def test_a_server_that_is_gone_is_told_with_the_rows_there_are_and_the_command_to_go_on(
    tmp_path: Path, tiny_policy: Path, tokenizer: Any, completion_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "service_api_caller_v1.py", "policy=a b"])
    ids = [*tokenizer("#### 7").input_ids, tokenizer.eos_token_id]
    output = tmp_path / "t.jsonl"
    with completion_server(max_model_len=256, answer=lambda prompt_ids, k: ("#### 7", ids), die_after=3) as server:
        config = job_config(server.base_url, tiny_policy, output)
        config = root_config(config, client={**config.client, "patience_seconds": 0.1}, concurrency=1)
        with pytest.raises(ServerGone) as caught:
            run_the_job(config)
    lines = str(caught.value).split("\n")
    assert lines[1] == f"{output} holds 6 rows; to go on:"
    assert shlex.split(lines[2]) == ["python", "service_api_caller_v1.py", "policy=a b"]


def test_problems_with_one_id_are_named() -> None:
    with pytest.raises(BadInput, match="two problems have the id 'p': ids must be unique"):
        check_unique([SampleRequest("p", "", [1]), SampleRequest("q", "", [1]), SampleRequest("p", "", [2])])


def test_a_state_that_stands_twice_is_named(tmp_path: Path, tokenizer: Any, tiny_policy: Path) -> None:
    path = tmp_path / "states.jsonl"
    rows = states_of(tokenizer)
    write_records(path, [*rows, rows[2]])
    requests = {"_target_": "espalier.sampling.requests.CompletionRequests", "states": str(path)}
    with pytest.raises(BadInput, match=r"states.jsonl:9: id 'p2/0#1' stands already at .*states.jsonl:3"):
        run_the_job(job_config("http://127.0.0.1:9", tiny_policy, tmp_path / "c.jsonl", requests=requests))


def test_states_in_tokens_of_their_own_tokenizer_pass(tokenizer: Any) -> None:
    rows = states_of(tokenizer)
    check_state_tokens(rows, decode(tokenizer), "states.jsonl")
    inside = [replace(row, prefix=row.prefix[:-3]) for row in rows]  # a prefix that ends inside a token
    check_state_tokens(inside, decode(tokenizer), "states.jsonl")
    check_state_tokens([replace(rows[0], prefix="", prefix_ids=[])], decode(tokenizer), "states.jsonl")


def test_states_in_tokens_of_another_tokenizer_are_refused(tokenizer: Any, other_tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"^states.jsonl: token ids and text of state 'p0/0#1' differ in policy's"):
        check_state_tokens(states_of(tokenizer), decode(other_tokenizer), "states.jsonl")
    unknown = [replace(row, prefix_ids=[10**9]) for row in states_of(tokenizer)]
    with pytest.raises(BadInput, match="cut for another policy"):
        check_state_tokens(unknown, decode(tokenizer), "states.jsonl")


def write_meta(path: Path, **fields: Any) -> None:
    path.write_text("")
    path.with_name(path.stem + ".meta.json").write_text(json.dumps(fields))


def test_states_of_another_policys_trajectories_are_refused_unless_told(tmp_path: Path) -> None:
    trajectories, states = tmp_path / "trajectories.jsonl", tmp_path / "states.jsonl"
    write_meta(trajectories, config={"policy": "runs/sft"}, inputs={"runs/sft": "aaaa"})
    write_meta(states, config={}, inputs={str(trajectories): "digest"})
    check_origin(str(states), "elsewhere/sft", "aaaa", False)  # the same weights under another name
    with pytest.raises(BadInput, match=r"its trajectories were sampled by runs/sft, policy is runs/dpo: set policy="):
        check_origin(str(states), "runs/dpo", "bbbb", False)
    with pytest.raises(BadInput, match="runs/sft, which has changed since, policy is runs/sft"):
        check_origin(str(states), "runs/sft", "bbbb", False)
    check_origin(str(states), "runs/dpo", "bbbb", True)


def test_the_origin_is_found_beside_the_states_after_a_move_and_passes_where_it_is_unknown(tmp_path: Path) -> None:
    trajectories, states = tmp_path / "trajectories.jsonl", tmp_path / "states.jsonl"
    write_meta(trajectories, config={"policy": "runs/sft"}, inputs={"runs/sft": "aaaa"})
    write_meta(states, config={}, inputs={"/was/elsewhere/trajectories.jsonl": "digest"})
    with pytest.raises(BadInput, match="sampled by runs/sft"):
        check_origin(str(states), "runs/dpo", "bbbb", False)
    (tmp_path / "trajectories.meta.json").unlink()
    check_origin(str(states), "runs/dpo", "bbbb", False)
    check_origin(str(tmp_path / "made_by_hand.jsonl"), "runs/dpo", "bbbb", False)


def test_states_cut_for_another_policy_end_a_job_before_any_request(
    tmp_path: Path, tiny_policy: Path, demonstration_texts: list[str], completion_server: Any, tokenizer: Any
) -> None:
    other = build_tiny(tmp_path / "other", demonstration_texts, hidden_size=64, num_layers=2, num_heads=2,
                       vocab_size=320, max_length=512, seed=1)  # fmt: skip
    trajectories, states = tmp_path / "trajectories.jsonl", tmp_path / "states.jsonl"
    eos = tokenizer.eos_token_id
    answer = lambda prompt_ids, k: ("buys: 1\n#### 7", [*tokenizer("buys: 1\n#### 7").input_ids, eos])  # noqa: E731
    with completion_server(max_model_len=256, answer=answer) as server:
        assert run_the_job(job_config(server.base_url, tiny_policy, trajectories)) == 0
        cut_states(trajectories, states)
        requests = {"_target_": "espalier.sampling.requests.CompletionRequests", "states": str(states)}
        num_asked = len(server.bodies)
        mine = job_config(server.base_url, tiny_policy, tmp_path / "c.jsonl", requests=requests)
        assert run_the_job(mine) == 0
        assert len(server.bodies) > num_asked
        before, num_asked = before_and_after(tmp_path), len(server.bodies)
        with pytest.raises(BadInput, match="its trajectories were sampled by"):
            run_the_job(replace(mine, policy=str(other), output=str(tmp_path / "d.jsonl")))
        assert len(server.bodies) == num_asked
        after = before_and_after(tmp_path)
        assert {name: after[name] for name in before} == before
        assert not (tmp_path / "d.jsonl").exists()
        told = {**requests, "is_of_any_policy": True}
        assert run_the_job(replace(mine, policy=str(other), output=str(tmp_path / "d.jsonl"), requests=told)) == 0
    assert read_records(State, states)


def cut_states(trajectories: Path, states: Path) -> None:
    from espalier.pipeline.stage import run_stage
    from espalier.runtime.schemas import StageConfig

    stage = {"_target_": "espalier.pipeline.values.cut_states.CutStates"}
    config = StageConfig(output=str(states), input=str(trajectories), stage=stage)
    assert run_stage(build(stage), None, config) == 0


def test_a_scripts_server_of_another_policy_is_refused_though_its_tokenizer_is_the_same(tmp_path: Path) -> None:
    check_served("", "runs/dpo")  # nobody says what it serves
    check_served("org/model", "org/model")
    check_served(str(tmp_path), f"{tmp_path}/../{tmp_path.name}")
    with pytest.raises(BadInput, match=r"serves runs/sft, policy is runs/dpo"):
        check_served("runs/sft", "runs/dpo")
