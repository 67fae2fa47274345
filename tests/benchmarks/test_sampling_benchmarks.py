"""What the sampling benchmarks reckon with: the truth of a step, shares of tokens, labels with and without sharing."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import result
from benchmarks.sampling import sampling
from benchmarks.sampling.prm_budget import true_steps
from benchmarks.sampling.recorded_values import SPARE, TRUTH, Recorded, RecordedWorld
from benchmarks.sampling.value_budget import shares_of, summary, tokens_at
from espalier.data.records import Completion, Problem, Trajectory
from espalier.data.tasks.arithmetic_operations import solve
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.vllm_client import VLLMClient
from espalier.values.monte_carlo import count_sampled, distinct_states, states_of
from espalier.values.step_values import counted, inner_estimates

PROBLEM = Problem("p", "Q", "3", {"start": 6, "operations": [["halves", 0], ["buys", 2], ["gives", 2]]})


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        (["halves: 6 / 2 = 3\n", "buys: 3 + 2 = 5\n", "gives: 5 - 2 = 3\n", "#### 3"], [True] * 4),
        (["halves: 6 - 2 = 4\n", "buys: 4 + 2 = 6\n", "gives: 6 - 2 = 4\n", "#### 4"], [False] * 4),
        (["halves: 6 / 2 = 3\n", "buys: 3 + 2 = 6\n", "gives: 6 - 2 = 3\n", "#### 3"], [True, False, False, False]),
        (["halves: 6 / 2 = 3\n", "#### 3"], [True, False]),
        (
            ["halves: 6 / 2 = 3\n", "buys: 3 + 2 = 5\n", "gives: 5 - 2 = 3\n", "#### 3\n", "#### 3"],
            [True] * 4 + [False],
        ),
    ],
)
def test_the_truth_of_a_step_is_that_of_all_before_it(steps: list[str], want: list[bool]) -> None:
    assert true_steps(PROBLEM, steps) == want


def test_true_solutions_are_true_at_every_step_and_the_teachers_wrong_ones_are_not_at_their_end() -> None:
    task = WordArithmetic(num_train=60)
    for problem in task.problems("train"):
        operations = [(verb, amount) for verb, amount in problem.info["operations"]]
        true = solve(problem.info["start"], operations, None, 0.0)
        assert all(true_steps(problem, task.split_steps(true)))
        taught = solve(problem.info["start"], operations, random.Random(problem.id), 0.6)
        if not task.grade(problem.gold, taught).is_correct:
            assert not true_steps(problem, task.split_steps(taught))[-1]


def test_the_share_of_tokens_at_equal_error_by_hand() -> None:
    """Between 100 tokens at error 0.4 and 400 at 0.1, error 0.2 lies half way in both logarithms: 200 tokens."""
    assert tokens_at(0.2, [(100, 0.4), (400, 0.1)]) == pytest.approx(200)
    points = {"plain": [(100, 0.5), (200, 0.4), (300, 0.3), (400, 0.25), (1000, 0.2), (2000, 0.1)],
              "smoothed": [(100, 0.4), (400, 0.1)], "adaptive": [(100, 0.9), (200, 0.8)]}  # fmt: skip
    assert shares_of(points) == {"smoothed": pytest.approx(0.2)}
    figures = summary([{"smoothed": 0.2}, {"smoothed": 0.6, "adaptive": 0.1}, {"smoothed": 0.4}], "x")
    assert list(figures) == ["smoothed"], "a way that does not always meet the error has no figure"
    assert (figures["smoothed"]["value"], figures["smoothed"]["low"], figures["smoothed"]["met"]) == (0.4, 0.2, True)


def trajectory(name: str, ids: list[int]) -> Trajectory:
    steps = [f"{token}\n" for token in ids]
    ends = list(range(1, len(ids) + 1))
    problem = name.partition("/")[0]
    return Trajectory(name, problem, "Q\n", "".join(steps), steps, [90], ids, ends, "stop", "7", "7", ids[-1] % 2 == 0)


ROWS = [trajectory(f"p{k % 3}/{k}", [1 + k % 2, 5, 6 + k % 3, 9]) for k in range(12)]


def test_recorded_completions_are_drawn_once_a_way_and_never_those_of_the_truth() -> None:
    keys = [(state.problem_id, tuple(state.prefix_ids)) for state in distinct_states(ROWS)]
    table = {key: Recorded([False] * TRUTH + [True] * SPARE, list(range(TRUTH + SPARE))) for key in keys}
    world = RecordedWorld(0, ROWS, table)
    rng, drawn, tokens = random.Random(1), [], 0
    for number in (10, 50, 4):
        rights, cost = world.ask(keys[0], number, rng)
        drawn += rights
        tokens += cost
    assert drawn == [True] * SPARE
    assert tokens == sum(range(TRUTH, TRUTH + SPARE)), "each once"
    with pytest.raises(ValueError, match="all of them drawn"):
        world.ask(keys[0], 1, rng)
    assert world.ask(keys[0], SPARE, random.Random(2))[1] == tokens, "another way draws from all of them again"
    assert world.error(dict.fromkeys(keys, 0.5)) == 0.5


def answer(prompt_ids: list[int], index: int) -> tuple[str, list[int]]:
    """A function of the prompt's ids and the sample's number alone."""
    is_right = (sum(prompt_ids) * 31 + index * 7) % 3 == 0
    return ("#### 7" if is_right else "#### 8"), [5, 5]


def ask(base_url: str, requests: list[SampleRequest]) -> dict[str, list[bool]]:
    async def all_of_them() -> dict[str, list[bool]]:
        client = VLLMClient(base_url)
        await client.open()
        try:
            rows = [await client.sample(request, SamplingParams(4, 1.0, 8)) for request in requests]
        finally:
            await client.close()
        return {r.id: [s.text == "#### 7" for s in row] for r, row in zip(requests, rows, strict=True)}

    return asyncio.run(all_of_them())


def test_labels_are_the_same_whether_states_are_shared_or_asked_each_by_itself(
    completion_server: Any, tmp_path: Path
) -> None:
    every = [state for row in ROWS for state in states_of(row)]
    distinct = distinct_states(ROWS)
    assert len(distinct) < len(every)
    with completion_server(answer=answer) as server:
        shared = ask(server.base_url, [SampleRequest(s.id, "", s.prompt_ids + s.prefix_ids) for s in distinct])
        alone = ask(server.base_url, [SampleRequest(s.id, "", s.prompt_ids + s.prefix_ids) for s in every])
    rows = [Completion(f"{name}/{k}", name, name.partition("/")[0], "", [], "stop", None, right)
            for name, rights in shared.items() for k, right in enumerate(rights)]  # fmt: skip
    estimates = {key: counted(count) for key, count in count_sampled(distinct, rows).items()}
    for row in ROWS:
        want = [sum(alone[state.id]) / 4 for state in states_of(row)]
        assert [one.value for one in inner_estimates(row, estimates)] == want


def test_a_parts_figures_are_replaced_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, result):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "sampling.json").write_text('{"detail": {"requests": "old"}, "figures": {"old_figure": {"value": 1}}}')
    sampling.merge("prefill", {"a": {"value": 1}, "b": {"value": 2}}, {"states": 5})
    sampling.merge("plan", {"c": {"value": 3}}, {})
    path = sampling.merge("prefill", {"a": {"value": 4}}, {"states": 6})
    stored = json.loads(path.read_text())
    assert stored["figures"] == {"c": {"value": 3}, "a": {"value": 4}}
    assert stored["detail"]["prefill"] == {"figures": ["a"], "states": 6}
