"""A judge: what it is asked, how its verdicts are read, win rates by hand, and its scores."""

import asyncio
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from espalier.data.jsonl import read_records, write_records
from espalier.data.judgements import PairJudgement, StepJudgement, Verification
from espalier.data.records import AnnotatedSolution, BadInput, PreferencePair, StepScores, Trajectory
from espalier.models.load import check_model_folder
from espalier.pipeline.evaluation.measure_win_rate import MeasureWinRate, order_verdict, pair_outcome
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.prm.score_by_judge import ScoreByJudge
from espalier.pipeline.stage import StageContext
from espalier.sampling.client import BudgetSpent, Refused, Sample, SampleRequest, SamplingParams
from espalier.sampling.job import run_job
from espalier.sampling.llm_judge import (
    PolicyPairRequests,
    PreferencePairRequests,
    StepRequests,
    fill,
    parse_each_step,
    parse_first_error,
    parse_verdict,
)
from espalier.sampling.openai_client import OpenAIChatClient
from tests.runtime.test_configs import compose_config
from tests.support.chat_server import ChatServer, chat_answer

ROOT = Path(__file__).resolve().parent.parent.parent
TASK: Any = None


def trajectory(problem: int, text: str, k: int = 0) -> Trajectory:
    steps = [f"{line}\n" for line in text.split("\n")]
    return Trajectory(f"p{problem}/{k}", f"p{problem}", f"What is {problem}?\n", "".join(steps), steps, [], [], [],
                      "stop", "1", "1", True)  # fmt: skip


def context() -> StageContext:
    return StageContext(None, Path("unused"), 10.0)


# --- verdicts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ("A is clear.\nVerdict: A", "A"),
        ("**Verdict: B**\n", "B"),
        ("Verdict: tie\n\n", "tie"),
        ("Verdict: A\nVerdict: A", "A"),
        ("Verdict: A.", None),
        ("verdict: A", None),
        ("Verdict: A or B", None),
        ("Verdict: C", None),
        ("Verdict: A\nI am not sure, though.", None),
        ("Verdict: A\nNo, on reflection:\nVerdict: B", None),
        ("My verdict: A", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_last_line_and_nothing_else(response: str, verdict: str | None) -> None:
    assert parse_verdict(response) == verdict


def test_the_first_error_is_read_strictly() -> None:
    assert parse_first_error("Step 2 adds wrongly.\nFirst error: 2", 3) == 1
    assert parse_first_error("First error: none", 3) == -1
    assert parse_first_error("First error: 3", 3) == 2
    for response in ("First error: 4", "First error: 0", "First error: 02", "First error: -1", "First error: step 2",
                     "First error: 2\nFirst error: none", "First error: 2 (sure)", "none"):  # fmt: skip
        assert parse_first_error(response, 3) is None, response


def test_every_step_needs_its_line_in_order() -> None:
    good = "Looks fine.\nStep 1: right\nStep 2: wrong\nStep 3: right"
    assert parse_each_step(good, 3) == [1.0, 0.0, 1.0]
    for response in (
        good + "\nStep 4: right", "Step 1: right\nStep 3: wrong\nStep 2: right", "Step 1: right\nStep 2: wrong",
        good + "\nThat is all.", "Step 1: wrong\n" + good, good.replace("wrong", "doubtful"), "",
    ):  # fmt: skip
        assert parse_each_step(response, 3) is None, response


def test_a_solution_cannot_fill_in_the_template() -> None:
    assert fill("{a}|{b}|{c}", {"a": "{b}", "b": r"\1{a}"}) == r"{b}|\1{a}|{c}"


# --- requests -------------------------------------------------------------------------------------------------


def test_every_pair_is_asked_in_both_orders(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_records(first, [trajectory(1, "ours one"), trajectory(1, "ours two", 1), trajectory(2, "ours"),
                          trajectory(3, "alone")])  # fmt: skip
    write_records(second, [trajectory(2, "theirs"), trajectory(1, "theirs one"), trajectory(1, "theirs two", 1)])
    source = PolicyPairRequests(first=str(first), second=str(second))
    asked = {request.id: request.messages[0]["content"] for request in source.load(TASK, None)}
    assert list(asked) == ["p1/0>p1/0/ab", "p1/0>p1/0/ba", "p2/0>p2/0/ab", "p2/0>p2/0/ba"]
    assert "<solution_a>\nours one\n</solution_a>\n\n<solution_b>\ntheirs one\n" in asked["p1/0>p1/0/ab"]
    assert "<solution_a>\ntheirs one\n</solution_a>\n\n<solution_b>\nours one\n" in asked["p1/0>p1/0/ba"]
    assert "<problem>\nWhat is 1?\n</problem>" in asked["p1/0>p1/0/ba"]
    many = PolicyPairRequests(first=str(first), second=str(second), pairs_per_problem=5)
    assert len(many.load(TASK, None)) == 6
    write_records(second, [trajectory(9, "theirs")])
    with pytest.raises(BadInput, match="have no problem in common"):
        source.load(TASK, None)
    with pytest.raises(BadInput, match=r"requests.template lacks \{solution_b\}"):
        PolicyPairRequests("{question} {solution_a}", str(first), str(first)).load(TASK, None)


def test_the_winner_is_told_whatever_place_it_was_shown_in(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write_records(path, [PreferencePair("p/0>p/1", "p", "outcome", "Q", "good", "bad", [], [], [], 1.0, 0.0)])
    source = PreferencePairRequests(preferences=str(path))
    there, back = source.load(TASK, None)

    def answers(request: Any, *texts: str, reason: str = "stop") -> list[str | None]:
        rows = source.records(TASK, None, request, [Sample(text, [], reason) for text in texts])
        assert [row.id for row in rows] == [f"{request.id}/{k}" for k in range(len(texts))]
        return [row.answer for row in rows]

    assert answers(there, "Verdict: A", "Verdict: B", "Verdict: tie", "?") == ["first", "second", "tie", None]
    assert answers(back, "Verdict: A", "Verdict: B", "Verdict: tie", "?") == ["second", "first", "tie", None]
    assert answers(back, "Verdict: A", reason="length") == [None], "a cut answer has no verdict"


def test_steps_before_a_judge(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_records(path, [trajectory(1, "one\ntwo\nthree")])
    source = StepRequests(str(path))
    (request,) = source.load(TASK, None)
    assert request.id == "p1/0"
    assert "in 3 numbered steps" in request.prompt
    assert "<step_2>\ntwo\n</step_2>" in request.prompt
    samples = [Sample(text, [], "stop") for text in ("First error: 2", "First error: none", "hm")]
    rows = source.records(TASK, None, request, samples)
    assert [row.id for row in rows] == ["p1/0/0", "p1/0/1", "p1/0/2"]
    assert [row.answer for row in rows] == ["2", "none", None]
    assert [row.labels for row in rows] == [[1.0, 0.0, None], [1.0, 1.0, 1.0], []]
    assert [row.states for row in rows] == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], []]
    each = StepRequests(str(path), form="each_step")
    (request,) = each.load(TASK, None)
    (row,) = each.records(TASK, None, request, [Sample("Step 1: right\nStep 2: wrong\nStep 3: right", [], "stop")])
    assert (row.answer, row.labels, row.states) == ("101", [1.0, 0.0, 1.0], [1.0, 0.0, 0.0])
    labelled = tmp_path / "l.jsonl"
    write_records(labelled, [AnnotatedSolution("x", "q", "Why?", ["a", "b"], [1.0, 0.0], 1, False)])
    assert StepRequests(str(labelled), kind="labelled").load(TASK, None)[0].id == "x"
    with pytest.raises(BadInput, match=r"requests.form must be first_error or each_step, got 'all'"):
        StepRequests(str(path), form="all").load(TASK, None)
    with pytest.raises(BadInput, match=r"requests.kind must be trajectories or labelled"):
        StepRequests(str(path), kind="pairs").load(TASK, None)


# --- win rates ------------------------------------------------------------------------------------------------


def judgements(pair: int, ab: str | None, ba: str | None, problem: int | None = None) -> list[PairJudgement]:
    problem_id = f"p{pair if problem is None else problem}"
    return [PairJudgement(f"{pair}/{order}/0", f"{pair}", problem_id, order, answer, "…", "stop")
            for order, answer in (("ab", ab), ("ba", ba))]  # fmt: skip


def win_rate(path: Path, rows: list[PairJudgement]) -> dict[str, Any]:
    write_records(path, rows)
    return MeasureWinRate().run(str(path), context())


def test_win_rate_by_hand(tmp_path: Path) -> None:
    """2 won, 1 lost, 1 tied, 1 disagreed (the one shown first won both times), 1 without a verdict."""
    rows = [*judgements(0, "first", "first"), *judgements(1, "first", "first"), *judgements(2, "second", "second"),
            *judgements(3, "tie", "tie"), *judgements(4, "first", "second"), *judgements(5, "first", None)]  # fmt: skip
    found = win_rate(tmp_path / "j.jsonl", rows)
    means = {name: figure["mean"] for name, figure in found["figures"].items()}
    assert means == {
        "win_rate": (2 + 2 * 0.5) / 5, "won": 0.4, "lost": 0.2, "tied": 0.2, "disagreed": 0.2,
        "position_bias": (3 + 2) / 8 - 0.5, "unreadable": pytest.approx(1 / 12, abs=1e-5),
    }  # fmt: skip
    assert (found["num_pairs"], found["num_left_out"], found["num_problems"]) == (5, 1, 6)
    figure = found["figures"]["win_rate"]
    assert 0 <= figure["low"] < 0.6 < figure["high"] <= 1
    assert "position_bias" in found["table"]["plain"]


def test_a_judge_that_looks_at_places_alone_is_found_out(tmp_path: Path) -> None:
    found = win_rate(tmp_path / "j.jsonl", [row for k in range(20) for row in judgements(k, "first", "second")])
    means = {name: figure["mean"] for name, figure in found["figures"].items()}
    assert (means["win_rate"], means["disagreed"], means["position_bias"]) == (0.5, 1.0, 0.5)


def test_swapping_the_policies_swaps_the_figures(tmp_path: Path) -> None:
    cases = [("first", "first"), ("second", "first"), ("tie", "first"), ("second", "second"), ("first", "first")]
    other = {"first": "second", "second": "first", "tie": "tie"}
    ours = win_rate(tmp_path / "a.jsonl", [row for k, case in enumerate(cases) for row in judgements(k, *case)])
    swapped = [row for k, (ab, ba) in enumerate(cases) for row in judgements(k, other[ba], other[ab])]
    theirs = win_rate(tmp_path / "b.jsonl", swapped)
    assert ours["figures"]["win_rate"]["mean"] == pytest.approx(1 - theirs["figures"]["win_rate"]["mean"])
    for name in ("tied", "disagreed", "position_bias"):
        assert ours["figures"][name] == theirs["figures"][name]


def test_intervals_draw_problems_not_pairs(tmp_path: Path) -> None:
    cases = [("first", "first"), ("second", "second")] * 20
    alone = win_rate(tmp_path / "a.jsonl", [row for k, case in enumerate(cases) for row in judgements(k, *case)])
    pairs = [row for k, case in enumerate(cases) for row in judgements(k, *case, problem=k % 4)]
    together = win_rate(tmp_path / "b.jsonl", pairs)
    widths = [found["figures"]["win_rate"]["high"] - found["figures"]["win_rate"]["low"] for found in (alone, together)]
    assert alone["figures"]["win_rate"]["mean"] == together["figures"]["win_rate"]["mean"] == 0.5
    assert widths[1] > 2 * widths[0]


def test_votes_of_an_order() -> None:
    assert order_verdict([None, None]) is None
    assert order_verdict(["first", None]) == "first"
    assert order_verdict(["first", "second", "second"]) == "second"
    assert order_verdict(["first", "second"]) == order_verdict(["tie", "first"]) == "tie"
    assert pair_outcome(["first", "tie"]) == "disagreed"


def test_judgements_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none of 1 pairs has a verdict in both orders"):
        win_rate(tmp_path / "j.jsonl", judgements(0, None, "first"))
    with pytest.raises(BadInput, match="order 'ab' and answer 'A'"):
        win_rate(tmp_path / "j.jsonl", judgements(0, "A", "first"))


# --- the whole way --------------------------------------------------------------------------------------------


def longer_is_better(number: int, body: dict[str, Any]) -> Any:
    """A judge that prefers the longer solution, and what it is shown first where they are as long."""
    text = body["messages"][0]["content"]
    sides = re.findall(r"<solution_.>\n(.*?)\n</solution_.>", text, re.DOTALL)
    usage = {"prompt_tokens": 300, "completion_tokens": 5, "total_tokens": 305}
    return chat_answer("Verdict: A" if len(sides[0]) >= len(sides[1]) else "Verdict: B", usage=usage)


def judge(server: ChatServer, tmp_path: Path, name: str, *overrides: str) -> int:
    config = compose_config(
        ROOT / "conf", f"api/openai/{name}", f"output={tmp_path}/judgements.jsonl", "client.model=m",
        f"client.base_url={server.base_url}", "engine.concurrency=3", *overrides,
    )  # fmt: skip
    return run_job(OmegaConf.to_object(config), lambda path: None, check_model_folder)  # type: ignore[arg-type]


def test_a_teacher_of_verdicts_per_step_is_asked_by_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test-0123")
    solutions = tmp_path / "t.jsonl"
    write_records(solutions, [trajectory(0, "2+2=5")])
    settings = ["verifier@requests.verifier=each_step", "requests.shows_gold=false", f"requests.solutions={solutions}"]
    said = "Step 1: 2+2=5 is not so. \\boxed{incorrect}"
    with ChatServer(lambda number, body: chat_answer(said)) as server:
        assert judge(server, tmp_path, "teacher_rationales", *settings) == 0
        assert "Step 1: 2+2=5\n" in server.bodies[0]["messages"][0]["content"]
    (row,) = read_records(Verification, tmp_path / "judgements.jsonl")
    assert (row.answer, row.response) == ("no", said)


def test_a_judging_run_stops_at_its_cap_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test-0123")
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    write_records(ours, [trajectory(k, "long" * 5 if k < 6 else "even" if k < 8 else "s") for k in range(10)])
    write_records(theirs, [trajectory(k, "even") for k in range(10)])
    files = [f"requests.first={ours}", f"requests.second={theirs}"]
    with ChatServer(longer_is_better) as server:
        with pytest.raises(BudgetSpent):
            judge(server, tmp_path, "judge_pairs", *files, "client.max_total_tokens=5000")
        begun = len(read_records(PairJudgement, tmp_path / "judgements.jsonl"))
        assert 0 < begun < 20
        assert judge(server, tmp_path, "judge_pairs", *files) == 0
        assert len(server.bodies) == 20, "what was judged is not asked again"
        assert judge(server, tmp_path, "judge_pairs", *files) == 0
        assert len(server.bodies) == 20
    rows = read_records(PairJudgement, tmp_path / "judgements.jsonl")
    assert {row.id for row in rows} == {f"p{k}/0>p{k}/0/{order}/0" for k in range(10) for order in ("ab", "ba")}
    found = MeasureWinRate().run(str(tmp_path / "judgements.jsonl"), context())
    assert {name: found["counts"][name] for name in ("won", "lost", "tied", "disagreed")} == {
        "won": 6, "lost": 2, "tied": 0, "disagreed": 2}  # fmt: skip
    assert found["figures"]["position_bias"]["mean"] == pytest.approx((6 + 2 + 4) / 20 - 0.5)


def test_a_judge_is_measured_as_any_scorer(tmp_path: Path) -> None:
    """Truth: first errors at 1, none, 0; the judge finds the first two and says nothing of the third."""
    truth = [AnnotatedSolution(f"s{k}", f"q{k}", "Q", ["a", "b"], [None, None], first, None)
             for k, first in enumerate((1, -1, 0))]  # fmt: skip
    said: list[list[float | None]] = [[1.0, 0.0], [1.0, 1.0], []]
    rows = [StepJudgement(f"s{k}/0", f"s{k}", f"q{k}", 2, "x" if labels else None, labels, "…", "stop")
            for k, labels in enumerate(said)]  # fmt: skip
    paths = [str(tmp_path / name) for name in ("truth.jsonl", "judged.jsonl", "scores.jsonl")]
    write_records(paths[0], truth)
    write_records(paths[1], [*rows, replace(rows[0], id="s0/1", labels=[1.0, 1.0])])
    scores = list(ScoreByJudge().run(paths[1], context()))
    assert [row.scores for row in scores] == [[1.0, 0.5], [1.0, 1.0], [0.5, 0.5]]
    write_records(paths[1], rows)
    write_records(paths[2], list(ScoreByJudge().run(paths[1], context())))
    assert [row.id for row in read_records(StepScores, paths[2])] == ["s0", "s1", "s2"]
    found = EvaluatePRMBenchmarks(paths[2], threshold=0.5).run(paths[0], context())["first_error"]
    assert found["overall"]["accuracy_with_error"]["mean"] == 0.5
    assert found["overall"]["accuracy_without_error"]["mean"] == 1.0


def engine_tokens(server: Any) -> tuple[int, int]:
    """(prompt tokens, generated tokens) by the engine's own counters."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = [re.search(rf"^vllm:{name}_tokens_total{{.*}} ([0-9.e+]+)$", text, re.MULTILINE)
             for name in ("prompt", "generation")]  # fmt: skip
    return tuple(int(float(match.group(1))) for match in found if match)  # type: ignore[return-value]


@pytest.mark.server
@pytest.mark.timeout(300)
def test_a_real_server_is_asked_and_billed(real_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is spent is what the engine counted; a policy that cannot judge has no verdict, and none is made up."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test-0123")
    write_records(tmp_path / "a.jsonl", [trajectory(k, "seven plus eight") for k in range(6)])
    write_records(tmp_path / "b.jsonl", [trajectory(k, f"{k} minus two") for k in range(6)])
    before = engine_tokens(real_server)
    config = compose_config(
        ROOT / "conf", "api/openai/judge_pairs", f"output={tmp_path}/j.jsonl", "client.model=policy",
        f"client.base_url={real_server.base_url}/v1", f"requests.first={tmp_path}/a.jsonl", "params.max_tokens=24",
        f"requests.second={tmp_path}/b.jsonl", "requests.template='{question}{solution_a} or {solution_b}'",
        "params.n=2", "params.temperature=1.0", "client.prompt_price=1.0", "client.completion_price=4.0",
        "client.max_cost=1.0",
    )  # fmt: skip
    assert run_job(OmegaConf.to_object(config), lambda path: None, check_model_folder) == 0  # type: ignore[arg-type]
    after = engine_tokens(real_server)
    rows = read_records(PairJudgement, tmp_path / "j.jsonl")
    assert {row.id for row in rows} == {f"p{k}/0>p{k}/0/{order}/{vote}" for k in range(6)
                                        for order in ("ab", "ba") for vote in range(2)}  # fmt: skip
    assert {row.answer for row in rows} == {None}
    client = OpenAIChatClient("policy", budget=f"{tmp_path}/j.jsonl")
    client.budget.begin()
    # the engine counts a prompt once for every sample of it, or once for all: the API bills it once
    prompts, generated = after[0] - before[0], after[1] - before[1]
    assert client.budget.spent.completion_tokens == generated
    assert client.budget.spent.prompt_tokens in (prompts, prompts // 2)
    assert client.budget.spent.cost == pytest.approx((client.budget.spent.prompt_tokens + 4 * generated) / 1e6)
    with pytest.raises(BadInput, match=r"model was 'policy', now 'other'"):
        asyncio.run(OpenAIChatClient("other", budget=f"{tmp_path}/j.jsonl").open())
    with pytest.raises(BadInput, match=r"HTTP 404: check client.model='other'"):
        asyncio.run(_ask_once(OpenAIChatClient("other", f"{real_server.base_url}/v1")))
    long = SampleRequest("x", "one two three " * 200, [])
    with pytest.raises(Refused, match="HTTP 400"):
        asyncio.run(_ask_once(OpenAIChatClient("policy", f"{real_server.base_url}/v1"), long))


async def _ask_once(client: OpenAIChatClient, request: SampleRequest | None = None) -> list[Sample]:
    await client.open()
    try:
        return await client.sample(request or SampleRequest("x", "one", []), SamplingParams(1, 0.0, 4))
    finally:
        await client.close()
