"""Chat APIs: limits, the budget, the key. The server is real (aiohttp on loopback); what it answers is set."""

import asyncio
import email.utils
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from espalier.data.jsonl import read_records, to_line
from espalier.data.records import BadInput, Completion, Trajectory
from espalier.models.load import check_model_folder, load_tokenizer
from espalier.pipeline.problems.select_demonstrations import SelectDemonstrations
from espalier.pipeline.stage import StageContext
from espalier.runtime import entrypoint
from espalier.runtime.entrypoint import build
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import RLConfig
from espalier.sampling.api_keys import check_key_variable, check_keys, refuse_key_in, require_keys
from espalier.sampling.budget import Budget, Charge, Prices
from espalier.sampling.client import BudgetSpent, Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.job import run_job
from espalier.sampling.openai_client import NoKey, OpenAIChatClient
from espalier.sampling.rate_limit import empty_for, parse_seconds, retry_after
from espalier.sampling.runner import Runner, finished_requests
from tests.runtime.test_configs import compose_config
from tests.support.chat_server import ChatServer, chat_answer

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "sk-a-secret-of-a-test-0123456789"
ONE = SamplingParams(n=1, temperature=1.0, max_tokens=20)
TWO = SamplingParams(n=2, temperature=1.0, max_tokens=20)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def make_request(name: str = "p", text: str = "how many?") -> SampleRequest:
    return SampleRequest(name, text, [1], [{"role": "user", "content": text}])


def ask(server: ChatServer, params: SamplingParams = ONE, num: int = 1, **options: Any) -> Any:
    """(answers of `num` requests at once, the client); raises what the first failing one raises."""
    client = OpenAIChatClient("m", server.base_url, **options)

    async def run() -> list[list[Sample]]:
        await client.open()
        try:
            return await asyncio.gather(*(client.sample(make_request(f"p/{k}"), params) for k in range(num)))
        finally:
            await client.close()

    return asyncio.run(run()), client


def sample_all(server: ChatServer, path: Path, num: int, concurrency: int = 4, **options: Any) -> OpenAIChatClient:
    """A run over `num` requests, resumed where the file stands."""

    def records(request: SampleRequest, samples: list[Sample]) -> list[Completion]:
        return [Completion(f"{request.id}/0", request.id, "p", samples[0].text, [], "stop", None, False)]

    client = OpenAIChatClient("m", server.base_url, budget=str(path), **options)
    requests = [make_request(f"p/{k}") for k in range(num)]
    runner = Runner(client, ONE, records, path, concurrency=concurrency, stall_seconds=20.0,
                    on_progress=lambda done, fields: None)  # fmt: skip
    asyncio.run(runner.run(requests, finished_requests(path, requests, 1)))
    return client


# --- rate limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after-ms": "1500", "retry-after": "7"}, 1.5),
        ({"retry-after": email.utils.formatdate(1_000_030, usegmt=True)}, 30.0),
        ({"retry-after": email.utils.formatdate(999_000, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_retry_after_in_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=1_000_000.0) == seconds


def test_reset_times_and_what_is_left() -> None:
    assert [parse_seconds(text) for text in ("20ms", "1s", "6m0s", "1h2m3.5s", "12", "x", "")] == [
        0.02, 1.0, 360.0, 3723.5, 12.0, None, None]  # fmt: skip
    spent = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "2s"}
    assert empty_for(spent, 10) == 2.0
    few = {"x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "6m0s"}
    assert (empty_for(few, 10), empty_for(few, 9)) == (360.0, 0.0)
    odd = {"x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "0"}
    assert empty_for(odd, 10) == empty_for({}, 10) == 0.0


def test_after_429_nobody_asks_again_before_retry_after(tmp_path: Path) -> None:
    """The first request is refused for 0.4 s; the other three wait with it, and nothing is billed twice."""

    def reply(number: int, body: Any) -> Any:
        return (429, {"Retry-After": "0.4"}, {"error": {"message": "slow down"}}) if number == 0 else chat_answer("a")

    with ChatServer(reply) as server:
        client = sample_all(server, tmp_path / "c.jsonl", 4, concurrency=1)
    assert len(server.bodies) == 5
    assert server.times[1] - server.times[0] >= 0.4
    assert client.budget.spent == Charge(40, 0, 20, 0.0)


def test_an_empty_budget_of_the_api_holds_the_next_request() -> None:
    headers = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "300ms"}

    def reply(number: int, body: Any) -> Any:
        return (200, headers, chat_answer("a"))

    async def run(client: OpenAIChatClient) -> None:
        await client.open()
        await client.sample(make_request(), ONE)
        await client.sample(make_request("q"), ONE)
        await client.close()

    with ChatServer(reply) as server:
        asyncio.run(run(OpenAIChatClient("m", server.base_url)))
    assert server.times[1] - server.times[0] >= 0.3


def test_a_wait_that_is_too_long_and_a_used_up_quota_end_the_run() -> None:
    with (
        ChatServer(lambda *_: (429, {"Retry-After": "999"}, {})) as server,
        pytest.raises(ServerGone, match=r"the API asks to wait 999 s, client\.max_wait_seconds is 120"),
    ):
        ask(server)
    assert len(server.bodies) == 1
    quota = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}
    with ChatServer(lambda *_: (429, {}, quota)) as server, pytest.raises(ServerGone, match="quota is used up"):
        ask(server)
    assert len(server.bodies) == 1


def test_thirty_percent_faults_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    faults: list[Any] = [
        (500, {}, {}), (429, {"retry-after": "0"}, {}), (503, {"retry-after": "garbage"}, {}), None, b'{"choices": [',
        {"error": "200, and yet an error"}, chat_answer("a", "b"), chat_answer("a", finish_reason="abort"),
    ]  # fmt: skip
    monkeypatch.setattr("espalier.sampling.openai_client.random.uniform", lambda low, high: 0.001)

    def reply(number: int, body: Any) -> Any:
        return rng.choice(faults) if rng.random() < 0.3 else chat_answer(body["messages"][0]["content"])

    path = tmp_path / "c.jsonl"
    with ChatServer(reply) as server:
        sample_all(server, path, 60, concurrency=8, max_attempts=14)
    assert sorted(row.id for row in read_records(Completion, path)) == sorted(f"p/{k}/0" for k in range(60))
    assert len(server.bodies) < 1.7 * 60


def test_refused_rows_are_not_asked_again(tmp_path: Path) -> None:
    for reply, reason in (
        ((400, {}, {"error": {"message": "too long"}}), "HTTP 400: too long"),
        ((422, {}, {"error": {"message": "odd"}}), "HTTP 422: odd"),
        (chat_answer("a", finish_reason="content_filter"), "content filter"),
        (chat_answer("", finish_reason="length"), "no text within params.max_tokens=20"),
    ):
        with ChatServer(lambda *_, reply=reply: reply) as server, pytest.raises(Refused, match=reason):
            ask(server)
        assert len(server.bodies) == 1


def test_what_is_sent(tmp_path: Path) -> None:
    with ChatServer(lambda *_: chat_answer("a", "b")) as server:
        (answers,), _ = ask(server, TWO, system="Be brief.", length_key="max_completion_tokens")
    assert [sample.text for sample in answers] == ["a", "b"]
    body = server.bodies[0]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "how many?"}]
    assert (body["model"], body["n"], body["max_completion_tokens"]) == ("m", 2, 20)
    assert "max_tokens" not in body
    assert server.keys == {KEY}


# --- the budget -----------------------------------------------------------------------------------------------


def test_prices_by_hand() -> None:
    """1,000 prompt tokens, 400 of them cached, 200 of answers, at 2, 0.5 and 8 a million."""
    prices = Prices(prompt=2.0, completion=8.0, cached=0.5)
    assert prices.charge(1000, 200, 400).cost == pytest.approx((600 * 2 + 400 * 0.5 + 200 * 8) / 1e6)
    assert Prices(2.0, 8.0).charge(1000, 200, 400).cost == pytest.approx((1000 * 2 + 200 * 8) / 1e6)
    worst = prices.worst_case([{"role": "user", "content": "hé"}], 3, 10)
    assert (worst.prompt_tokens, worst.completion_tokens) == (4 + 3 + 8 + 64, 30)
    assert worst.cost == pytest.approx((79 * 2 + 30 * 8) / 1e6)
    with pytest.raises(BadInput, match=r"client\.prompt_price must be at least 0"):
        Prices(prompt=-1.0)


def test_the_worst_case_is_above_what_real_tokenizers_make(tokenizer: Any) -> None:
    texts = ["seven plus eight?", "héé ∑∑ 数学 \U0001f600" * 5, "\ud800 lone", "a" * 400, ""]
    for text in texts:
        worst = Prices().worst_case([{"role": "user", "content": text}], 1, 1)
        visible = text.encode(errors="replace").decode()
        assert worst.prompt_tokens > len(tokenizer(visible).input_ids)


def test_usage_with_cached_tokens_is_billed_at_their_price(tmp_path: Path) -> None:
    usage = {
        "prompt_tokens": 90,
        "completion_tokens": 7,
        "total_tokens": 97,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    with ChatServer(lambda *_: chat_answer("a", usage=usage)) as server:
        _, client = ask(
            server, budget=str(tmp_path / "t.jsonl"), prompt_price=2.0, cached_price=0.5, completion_price=8.0
        )
    assert client.budget.spent == Charge(90, 64, 7, pytest.approx((26 * 2 + 64 * 0.5 + 7 * 8) / 1e6))
    lines = [json.loads(line) for line in (tmp_path / "t.budget.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["asked", "sent", "billed"]


def test_an_answer_without_usage_and_a_lost_one_count_with_their_worst_case() -> None:
    worst = Prices().worst_case([{"role": "user", "content": "how many?"}], 1, 20)
    answer = {name: value for name, value in chat_answer("a").items() if name != "usage"}
    with ChatServer(lambda *_: answer) as server:
        _, client = ask(server)
    assert client.budget.spent == client.budget.unknown == worst
    with ChatServer(lambda number, _: None if number == 0 else chat_answer("a")) as server:
        _, client = ask(server)
    assert client.budget.spent == worst + Charge(10, 0, 5)
    assert f"of these {worst.tokens} tokens" in client.budget.describe()


def test_no_connection_costs_nothing() -> None:
    client = OpenAIChatClient("m", "http://127.0.0.1:9/v1", max_attempts=2)

    async def run() -> None:
        await client.open()
        try:
            await client.sample(make_request(), ONE)
        finally:
            await client.close()

    with pytest.raises(ServerGone, match="2 attempts failed, the last with: no connection"):
        asyncio.run(run())
    assert client.budget.spent == Charge()


@pytest.mark.parametrize(
    "caps", [{"max_total_tokens": 250}, {"max_cost": 250e-6, "prompt_price": 1.0, "completion_price": 1.0}]
)
def test_the_cap_is_never_passed_and_a_higher_one_goes_on(tmp_path: Path, caps: dict[str, Any]) -> None:
    """A request may take 82 + 20 tokens and takes 15. With 250, the eleventh begins at 150 (150 + 102 > 250: no)."""
    path = tmp_path / "c.jsonl"
    worst = Prices().worst_case(make_request().messages, 1, 20).tokens
    assert worst == 9 + 4 + 8 + 64 + 20
    with ChatServer(lambda *_: chat_answer("a"), seconds=0.01) as server:
        with pytest.raises(BudgetSpent, match=r"over client\.max_") as caught:
            sample_all(server, path, 30, **caps)
        assert caught.value.exit_code == 5
        assert "raise the cap and run the same command to go on" in str(caught.value)
        assert server.most_at_once == 2, "two worst cases fit into 250, not three"
        rows = read_records(Completion, path)
        assert len(rows) == len(server.bodies) == 10, "the last leaves at 9 * 15 + 105 = 240 tokens"
        lines = [json.loads(line) for line in (tmp_path / "c.budget.jsonl").read_text().splitlines()]
        assert (
            sum(line["prompt_tokens"] + line["completion_tokens"] for line in lines if line["kind"] == "billed") == 150
        )
        client = sample_all(
            server, path, 30, **{name: value * 100 if "max" in name else value for name, value in caps.items()}
        )
        assert client.budget.spent.tokens == 30 * 15, "the budget went on"
        assert len(server.bodies) == 30
    assert len(read_records(Completion, path)) == 30


def test_nothing_is_sent_where_the_first_request_does_not_fit(tmp_path: Path) -> None:
    with ChatServer(lambda *_: chat_answer("a")) as server, pytest.raises(BudgetSpent, match="0 answers billed"):
        sample_all(server, tmp_path / "c.jsonl", 3, max_total_tokens=100)
    assert server.bodies == []


def test_a_killed_run_counts_what_was_in_flight(tmp_path: Path) -> None:
    """`sent` without an end, and a torn line behind it: its worst case counts, once."""
    path = str(tmp_path / "t.budget.jsonl")
    asked = {"model": "m", "system": ""}
    budget = Budget(path, asked)
    budget.begin()
    asyncio.run(budget.reserve("p/0", Charge(100, 0, 20, 0.5)))
    asyncio.run(budget.reserve("p/1", Charge(100, 0, 20, 0.5)))
    budget.settle(1, Charge(30, 10, 7, 0.1))
    with open(path, "ab") as file:
        file.write(b'{"kind":"bil')
    again = Budget(path, asked)
    again.begin()
    assert again.spent == Charge(130, 10, 27, pytest.approx(0.6))
    assert again.unknown == Charge(100, 0, 20, 0.5)
    assert asyncio.run(again.reserve("p/1", Charge(1, 0, 1))) == 3
    again.close()


def test_a_budget_of_another_model_or_with_a_bad_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.budget.jsonl"
    Budget(str(path), {"model": "m", "system": ""}).begin()
    with pytest.raises(BadInput, match="model was 'm', now 'other': choose another output"):
        Budget(str(path), {"model": "other", "system": ""}).begin()
    for line in ('{"kind":"paid","attempt":1}', '{"kind":"billed","attempt":9,"cost":1.0}', "[1]"):
        path.write_text(to_line({"kind": "asked", "model": "m", "system": ""}) + line + "\n")
        with pytest.raises(BadInput, match=r"t.budget.jsonl:2: "):
            Budget(str(path), {"model": "m", "system": ""}).begin()


def test_what_was_spent_under_the_old_name_of_the_file_is_not_forgotten(tmp_path: Path) -> None:
    path, asked = tmp_path / "t.budget.jsonl", {"model": "m", "system": ""}
    first = Budget(str(path), asked)
    first.begin()
    first.settle(asyncio.run(first.reserve("p/0", Charge(100, 0, 20, 0.5))), Charge(30, 10, 7, 0.1))
    first.close()
    old = path.rename(tmp_path / "t.bill.jsonl")
    with pytest.raises(BadInput, match=r"t\.bill\.jsonl: .*: rename it to t\.budget\.jsonl$"):
        Budget(str(path), asked).begin()
    assert not path.exists()
    old.rename(path)
    again = Budget(str(path), asked)
    again.begin()
    assert again.spent == Charge(30, 10, 7, 0.1)
    again.close()


def test_a_cap_on_money_needs_prices() -> None:
    with pytest.raises(BadInput, match=r"client\.max_cost needs client\.prompt_price"):
        OpenAIChatClient("m", max_cost=1.0)


# --- distillation ---------------------------------------------------------------------------------------------


def test_a_teachers_right_solutions_become_demonstrations(tmp_path: Path, tiny_policy: Path) -> None:
    """The teacher knows every second problem; its wrong answers are kept as trajectories and not imitated."""
    output = tmp_path / "teacher.jsonl"
    config = compose_config(
        ROOT / "conf", "api/openai/distil", f"policy={tiny_policy}", f"output={output}", "client.model=m",
        "client.base_url=null", "task.num_train=40", "task.num_dev=20", "requests.split=dev", "requests.limit=6",
        "params.n=2",
    )  # fmt: skip
    task = build(config.task)
    truth = {row.prompt: row.completion for row in task.demonstrations("dev")}
    known = {problem.id for problem in task.problems("dev")[:6:2]}
    asked = {task.prompt(problem): problem.id for problem in task.problems("dev")}

    def reply(number: int, body: Any) -> Any:
        prompt = body["messages"][0]["content"]
        right = truth[prompt]
        return chat_answer(right, right if asked[prompt] in known else "#### 77777")

    with ChatServer(reply) as server:
        config.client.base_url = server.base_url
        assert run_job(OmegaConf.to_object(config), load_tokenizer, check_model_folder) == 0  # type: ignore[arg-type]
    rows = read_records(Trajectory, output)
    assert len(rows) == 12
    assert {row.problem_id for row in rows if not row.is_correct} == {asked[p] for p in list(truth)[:6]} - known
    context = StageContext(None, Path("unused"), 10.0)
    found = list(SelectDemonstrations(distinct_by="none").run(str(output), context))
    assert len(found) == 9
    assert all(row.completion == truth[row.prompt] for row in found)


# --- the key --------------------------------------------------------------------------------------------------


def test_a_refused_key_is_told_without_it() -> None:
    for status in (401, 403):
        body = {"error": {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}}
        with (
            ChatServer(lambda *_, body=body, status=status: (status, {}, body)) as server,
            pytest.raises(NoKey) as caught,
        ):
            ask(server)
        assert caught.value.exit_code == 2
        assert f"HTTP {status}: the API refuses the key in OPENAI_API_KEY" in str(caught.value)
        assert KEY not in str(caught.value)
        assert len(server.bodies) == 1
    for status, error in ((400, Refused), (404, BadInput)):
        body = {"error": {"message": f"no model for {KEY}"}}
        with (
            ChatServer(lambda *_, body=body, status=status: (status, {}, body)) as server,
            pytest.raises(error) as caught,
        ):
            ask(server)
        assert "no model for [key]" in str(caught.value)


def test_a_key_in_a_config_or_as_the_name_of_a_variable_is_refused_and_not_told() -> None:
    with pytest.raises(BadInput, match=r"client\.base_url holds the API key") as caught:
        refuse_key_in({"client": {"base_url": f"https://host/v1?key={KEY}"}}, "OPENAI_API_KEY")
    assert KEY not in str(caught.value)
    with pytest.raises(BadInput, match="must be the NAME of the environment variable") as caught:
        check_key_variable(KEY)
    assert KEY not in str(caught.value)


def test_keys_are_looked_for_wherever_a_client_stands_in_a_config() -> None:
    client = {"model": "m", "key_variable": "OPENAI_API_KEY"}
    check_keys({"reward": {"terms": {"judge": {"asking": {"client": client}}}}, "task": [{"key_variable": None}]})
    with pytest.raises(BadInput, match=r"reward\.template holds the API key") as caught:
        check_keys({"reward": {"template": f"use {KEY}", "asking": {"client": client}}})
    assert KEY not in str(caught.value)
    with pytest.raises(BadInput, match="must be the NAME") as caught:
        check_keys({"reward": {"client": {"key_variable": KEY}}})
    assert KEY not in str(caught.value)


def test_a_key_that_is_missing_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the chat client of a judge in reinforcement learning; a server of ours needs none."""
    config = entrypoint.compose_config(RLConfig, "rl", [
        "reward=llm_judge", "reward.terms.judge.asking.client.model=m", "model.path=m", "output_dir=d"
    ])  # fmt: skip
    server = {"_target_": "espalier.sampling.vllm_client.VLLMClient", "key_variable": "VLLM_API_KEY"}
    require_keys(asdict(config))
    monkeypatch.delenv("OPENAI_API_KEY")
    require_keys({"client": server})
    with pytest.raises(BadInput, match="OPENAI_API_KEY is not set: export it"):
        require_keys(asdict(config))


ECHO = {"error": {"message": f"Bearer {KEY} is not welcome"}}


def check_no_key(folder: Path, printed: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "teacher.budget.jsonl" for path in files)
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in printed
    assert "spent: " in printed


@pytest.mark.parametrize("ending", ["answers", "400", "500", "cap"])
def test_the_key_is_in_nothing_that_a_run_leaves_behind(
    tmp_path: Path, tiny_policy: Path, ending: str, capfd: pytest.CaptureFixture[str]
) -> None:
    replies: dict[str, Any] = {"answers": chat_answer("7"), "cap": chat_answer("7"),
                               "400": (400, {}, ECHO), "500": (500, {"retry-after": "0"}, ECHO)}  # fmt: skip
    output = tmp_path / "run" / "teacher.jsonl"
    set_up_logging()
    with ChatServer(lambda *_: replies[ending]) as server:
        config = compose_config(
            ROOT / "conf", "api/openai/distil", f"policy={tiny_policy}", f"output={output}", "client.model=m",
            f"client.base_url={server.base_url}", "task.num_train=40", "requests.limit=3", "engine.concurrency=1",
            "client.max_attempts=2", "params.max_tokens=20",
            f"client.max_total_tokens={200 if ending == 'cap' else 100000}",
        )  # fmt: skip
        message = ""
        try:
            code = run_job(OmegaConf.to_object(config), load_tokenizer, check_model_folder)  # type: ignore[arg-type]
        except (BudgetSpent, ServerGone) as error:
            code, message = error.exit_code, str(error)
    assert code == {"answers": 0, "cap": 5, "400": 1, "500": 3}[ending]
    printed = capfd.readouterr()
    check_no_key(tmp_path, message + printed.out + printed.err)


@pytest.mark.slow
def test_the_key_is_not_told_by_a_run_that_ends_with_401(tmp_path: Path, tiny_policy: Path) -> None:
    with ChatServer(lambda *_: (401, {}, ECHO)) as server:
        command = [sys.executable, str(ROOT / "openai_api_caller_v1.py"), f"policy={tiny_policy}", "client.model=m",
                   f"output={tmp_path}/run/teacher.jsonl", f"client.base_url={server.base_url}", "task.num_train=40",
                   "requests.limit=3"]  # fmt: skip
        environment = {**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_LOG": "debug"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert server.keys == {KEY}
    assert "error: m: HTTP 401: the API refuses the key in OPENAI_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr
    check_no_key(tmp_path, done.stdout + done.stderr)
