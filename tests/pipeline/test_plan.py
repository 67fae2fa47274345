"""The cost before it is paid, by hand on a pilot whose every length is known, and against finished runs."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.measured_runs import read_cost, read_run
from espalier.pipeline.values.plan import Plan, state_growth

# 10 tokens in steps that end at 2, 5 and 10; the second shares the first state, a third is the first again.
ONE = Trajectory("q/0", "q", "Q", "abc", ["a", "b", "c"], [9] * 4, list(range(10)), [2, 5, 10], "stop", "7", "7", True)
TWO = replace(ONE, id="q/1", response_ids=[0, 1, *range(20, 30)], step_ends=[2, 6, 12], is_correct=False)
THREE = replace(ONE, id="q/2")


def plan(
    folder: Path, task: WordArithmetic, policy: Path, rows: list[Trajectory] | None = None, **settings: Any
) -> Any:
    if rows is not None:
        write_records(folder / "pilot.jsonl", rows)
        settings["pilot"] = str(folder / "pilot.jsonl")
    settings = {"num_problems": 5, "num_samples": 3, "tokens_per_second": 10.0, "start_seconds": 7.0, **settings}
    return Plan(policy=str(policy), **settings).run("", StageContext(task, Path("unused"), 10.0))


def test_a_plan_by_hand(tmp_path: Path, task: WordArithmetic, tiny_policy: Path) -> None:
    """Three distinct states: rests of (8 + 10 + 8) / 3, of 5 and of 6 tokens; prompts of 6, 9 and 10 tokens."""
    found = plan(tmp_path, task, tiny_policy, [ONE, TWO, THREE], mean_completions=6.0)
    sample, complete = found["stages"]
    assert (sample["requests"], sample["rows"], sample["generated_tokens"]) == (5, 15, round(15 * 32 / 3))
    assert sample["seconds"] == round(7 + 160 / 10)
    assert (complete["requests"], complete["rows"], complete["prompt_tokens"]) == (15, 90, 5 * 25)
    assert complete["generated_tokens"] == round(5 * 6 * (26 / 3 + 5 + 6))
    assert found["total"]["rows"] == 105
    assert found["basis"]["states_per_problem"] == 3


def test_one_sample_a_problem_is_scaled_up_as_if_nothing_were_shared(
    tmp_path: Path, task: WordArithmetic, tiny_policy: Path
) -> None:
    found = plan(tmp_path, task, tiny_policy, [ONE], num_samples=4)
    assert found["stages"][1]["requests"] == 5 * 2 * 4


def test_the_bisection_is_reckoned_over_wrong_trajectories(
    tmp_path: Path, task: WordArithmetic, tiny_policy: Path
) -> None:
    """Two states lie between prompt and end of the wrong one: ceil(log2(3)) = 2 questions."""
    found = plan(tmp_path, task, tiny_policy, [ONE, TWO, THREE], method="first_error")
    assert found["stages"][1]["requests"] == 5 * 2


def test_without_a_pilot_the_demonstrations_tell(tmp_path: Path, task: WordArithmetic, tiny_policy: Path) -> None:
    found = plan(tmp_path, task, tiny_policy)
    assert found["basis"]["pilot"] == "demonstrations"
    assert 15 < found["basis"]["mean_response_tokens"] < 60
    assert found["stages"][0]["bytes"] > 0


def test_longer_problems_than_the_pilots_cost_more(tmp_path: Path, task: WordArithmetic, tiny_policy: Path) -> None:
    rows = [replace(ONE, id=f"q{k}/0", problem_id=f"q{k}", prompt_ids=[9] * (k + 1), response_ids=list(range(10 + k)),
                    step_ends=[2, 5, 10 + k]) for k in range(20)]  # fmt: skip
    found = plan(tmp_path, task, tiny_policy, rows, num_samples=1)
    lengths = found["stages"][0]["prompt_tokens"] / 5
    assert found["basis"]["mean_response_tokens"] == pytest.approx(min(9 + lengths, 1.5 * 19.5), abs=0.01)


def meta(path: Path, **values: Any) -> str:
    counts = {"requests": 5, "rows": 15, "generated_tokens": 200, **values}
    path.write_text(json.dumps({"counts": counts, "seconds": 27.0}))
    return str(path)


def test_the_rate_is_measured_and_what_was_paid_stands_beside(
    tmp_path: Path, task: WordArithmetic, tiny_policy: Path
) -> None:
    """200 tokens in 27 - 7 seconds are 10 a second. 160 tokens foretold, 200 paid: a fifth too few."""
    path = meta(tmp_path / "t.meta.json")
    found = plan(tmp_path, task, tiny_policy, [ONE, TWO, THREE], tokens_per_second=0.0, measured=[path], actual=[path])
    assert found["basis"]["tokens_per_second"] == [10.0, 10.0]
    error = found["actual"][0]["error"]
    assert (error["requests"], error["generated_tokens"]) == (0.0, -0.2)
    assert error["seconds"] == pytest.approx(23 / 27 - 1, abs=1e-4)


def test_how_many_states_more_samples_reach_by_hand() -> None:
    """n = 2, F1 = 4, F2 = 2: F0 = 1/2 * 16/4 = 2; two more reach 2 * (1 - (1 - 4/8)^2) = 1.5 of 6 + 1.5."""
    assert state_growth({1: 4, 2: 2}, 2, 4) == pytest.approx(1 + 1.5 / 6)
    assert state_growth({2: 5}, 2, 8) == 1.0, "every state was seen twice: none is new"
    assert state_growth({1: 5}, 1, 8) == 8.0
    assert state_growth({1: 5, 2: 1}, 4, 4) == 1.0
    assert state_growth({}, 2, 4) == 1.0


def test_growth_against_states_that_were_sampled() -> None:
    """Each of 400 problems has 30 states with chances that fall off; 8 samples of one state each, reckoned from 3."""
    rng = random.Random(0)
    chances = [1 / (rank + 1) for rank in range(30)]
    visits, reached, seen = Counter[int](), 0, 0
    for _ in range(400):
        drawn = rng.choices(range(30), chances, k=8)
        visits.update(Counter(drawn[:3]).values())
        seen += len(set(drawn[:3]))
        reached += len(set(drawn))
    assert state_growth(visits, 3, 8) == pytest.approx(reached / seen, rel=0.08)


def test_rates_of_solutions_and_of_completions_are_kept_apart(
    tmp_path: Path, task: WordArithmetic, tiny_policy: Path
) -> None:
    """200 tokens in 20 s of sampling after a start of 7 s, and in 10 s after a start of 17 s: 12 s on average."""
    paths = []
    for name, seconds in (("Trajectory", 20.0), ("Completion", 10.0)):
        paths.append(meta(tmp_path / f"{name}.meta.json"))
        row = json.loads(Path(paths[-1]).read_text())
        row |= {
            "sampling_seconds": seconds,
            "config": {"requests": {"_target_": f"espalier.sampling.requests.{name}Requests"}},
        }
        Path(paths[-1]).write_text(json.dumps(row))
    found = plan(
        tmp_path, task, tiny_policy, [ONE, TWO, THREE], tokens_per_second=0.0, start_seconds=0.0, measured=paths
    )
    assert found["basis"]["tokens_per_second"] == [10.0, 20.0]
    assert found["basis"]["start_seconds"] == 12.0
    sample, complete = found["stages"]
    assert sample["seconds"] == round(12 + sample["generated_tokens"] / 10)
    assert complete["seconds"] == round(12 + complete["generated_tokens"] / 20)


def test_the_rate_is_of_the_tokens_that_were_measured_with_the_seconds(tmp_path: Path) -> None:
    """Of 200 tokens 150 fell into a part of the job that was killed: its seconds are not among the 20 s either."""
    path = meta(tmp_path / "t.meta.json")
    row = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**row, "sampling_seconds": 20.0, "sampling_tokens": 50}))
    run = read_run(path, 0.0)
    assert run.tokens / run.seconds == 50 / 20
    assert read_cost(path)[0]["generated_tokens"] == 200


def test_a_long_pilot_is_read_evenly_not_from_its_head(tmp_path: Path, task: WordArithmetic, tiny_policy: Path) -> None:
    """Rows come in the order they finished: the first ten problems have 10 tokens, the last ten 20."""
    rows = [replace(ONE, id=f"q{k}/0", problem_id=f"q{k}", response_ids=list(range(10 if k < 10 else 20)),
                    step_ends=[2, 5, 10 if k < 10 else 20]) for k in range(20)]  # fmt: skip
    found = plan(tmp_path, task, tiny_policy, rows, num_samples=1, max_pilot_problems=4)
    assert found["basis"]["mean_response_tokens"] == 15.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens_per_second": 0.0}, "no rate to compute seconds with: set stage.tokens_per_second"),
        ({"method": "guess"}, "there is no method 'guess': choose from plain, first_error"),
        ({"first": 10**6}, "has no problem from 1000000 on"),
        ({"keep_ratio": 2.0}, "keep_ratio must be from 0 to 1"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, task: WordArithmetic, tiny_policy: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        plan(tmp_path, task, tiny_policy, [ONE], **settings)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"counts": {"rows": 3}, "seconds": 1}', '{"counts": 5, "seconds": "x"}']
)
def test_provenance_of_something_else_is_refused(
    content: str, tmp_path: Path, task: WordArithmetic, tiny_policy: Path
) -> None:
    path = tmp_path / "x.meta.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=r"x.meta.json: is not the meta.json of a sampling run"):
        plan(tmp_path, task, tiny_policy, [ONE], measured=[str(path)], tokens_per_second=0.0)


def test_a_pilot_without_token_ids_tells_nothing(tmp_path: Path, task: WordArithmetic, tiny_policy: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing tells how long a solution is: give stage.pilot"):
        plan(tmp_path, task, tiny_policy, [replace(ONE, response_ids=[], step_ends=[])])
