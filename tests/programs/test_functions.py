"""The functions of `import espalier`: against formulas in float64, and their examples."""

import ast
import doctest
import math
import random
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espalier
from espalier.data.records import Trajectory
from espalier.data.splitters import SPLITTERS
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.aggregate import AGGREGATES
from espalier.rewards.votes import answer_classes, vote_key

ROOT = Path(__file__).resolve().parent.parent.parent
FUNCTIONS = [name for name in espalier.__all__ if name.islower()]
IMPORT = "import sys, time; start = time.perf_counter(); import espalier; print(time.perf_counter() - start)"


def fresh_process(code: str) -> list[str]:
    """The words that a new interpreter prints."""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return answer.stdout.split()


# The front room itself.


def test_the_import_is_quick() -> None:
    seconds = [float(fresh_process(IMPORT)[0]) for _ in range(3)]
    assert statistics.median(seconds) < 0.3


def test_the_import_loads_no_torch_and_nor_do_functions_that_need_none() -> None:
    code = (
        "import sys, espalier; print('torch' in sys.modules, sum(name.startswith('espalier') for name in sys.modules));"
        "espalier.split_steps('a'); espalier.grade('7', '7'); espalier.aggregate_scores([1.0]);"
        "espalier.monte_carlo_values([[1]]); espalier.same_answer('7', '7.0'); print('torch' in sys.modules)"
    )
    assert fresh_process(code) == ["False", "1", "False"]


def test_every_name_of_the_front_room_is_there_and_has_a_docstring() -> None:
    assert set(espalier.__all__) <= set(dir(espalier))
    for name in espalier.__all__:
        assert getattr(espalier, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'grpo': it has BadInput"):
        espalier.grpo  # type: ignore[attr-defined] # noqa: B018


def test_editors_and_type_checkers_see_every_name() -> None:
    guarded = [node for node in ast.parse(Path(str(espalier.__file__)).read_text()).body if isinstance(node, ast.If)]
    seen = {alias.name for node in guarded[0].body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(espalier.__all__)


# Examples.


def run_examples(text: str, name: str) -> int:
    """Run the examples of a text; the number that there are."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)
    return len(test.examples)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_is_right(name: str, tiny_prm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_prm.parent)
    assert run_examples(getattr(espalier, name).__doc__, name) >= 2


def test_the_page_shows_every_name_and_its_examples_are_right(tiny_prm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    monkeypatch.chdir(tiny_prm.parent)
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert run_examples("".join(blocks), "docs/api.md") > 15
    assert not [name for name in espalier.__all__ if name not in page]


def test_the_loop_of_ones_own_runs_and_its_step_raises_what_it_optimises(capsys: pytest.CaptureFixture[str]) -> None:
    script = ROOT / "docs" / "examples" / "own_loop.py"
    found = runpy.run_path(str(script))
    assert len(script.read_text().splitlines()) <= 60
    assert found["rewards"] == [1.0, 0.0, 0.0]
    assert [len(row) for row in found["scores"]] == [len(row) for row in found["steps"]] == [3, 3, 1]
    assert found["grpo"] == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5])
    by_step = [
        [row[end - 1] for end in tokens.step_ends]
        for row, tokens in zip(found["vineppo"], found["tokens"], strict=True)
    ]
    assert by_step == [[0.25, 0.25, 0.0], [0.25, -0.75, 0.0], [-0.5]]
    learnt = [score for row in found["scores"] for score in row]
    assert learnt == pytest.approx([0.75, 1, 1, 0.75, 0, 0, 0], abs=0.25)  # the values that the steps lead to
    assert found["objectives"] == sorted(found["objectives"])
    assert "the best solution is number 0" in capsys.readouterr().out
    found["folder"].cleanup()


# Advantages and values, each against its formula.


def drawn(number: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.choice([0.0, 1.0, rng.uniform(-1, 2)]) for _ in range(number)]


@pytest.mark.parametrize("number", [2, 3, 8, 64])
def test_group_advantages_are_those_of_the_papers(number: int) -> None:
    rewards = [0.25, *drawn(number - 1, number)]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert espalier.grpo_advantages(rewards) == pytest.approx([(reward - mean) / std for reward in rewards])
    assert espalier.dr_grpo_advantages(rewards) == pytest.approx([reward - mean for reward in rewards])
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(number)]
    expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
    assert espalier.rloo_advantages(rewards) == pytest.approx(expected)


def test_rewards_that_agree_teach_nothing() -> None:
    for function in (espalier.grpo_advantages, espalier.dr_grpo_advantages, espalier.rloo_advantages):
        assert function([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.95), (0.5, 0.5), (0.0, 1.0)])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma: float, lam: float) -> None:
    values, rewards = drawn(20, 1), drawn(20, 2)
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    expected = [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 20)) for t in range(20)]  # eq. 16
    assert espalier.gae(values, rewards, gamma, lam) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    assert espalier.gae(values=[0.25, 0.5, 0.75], rewards=[0.0, 0.0, 1.0]) == [0.75, 0.5, 0.25]
    assert espalier.gae([], []) == []


def test_vineppo_advantages_by_hand() -> None:
    # three steps of 1, 3 and 2 tokens; V = 0.5, 0.75, 0.25 and the outcome 1
    found = espalier.vineppo_advantages([0.5, 0.75, 0.25], 1.0, [1, 4, 6])
    assert found == [0.25, -0.5, -0.5, -0.5, 0.75, 0.75]
    assert espalier.vineppo_advantages([0.5, None, 0.25], 1.0, [1, 4, 6]) == [-0.25, 0.0, 0.0, 0.0, 0.75, 0.75]
    assert espalier.vineppo_advantages([], 1.0, []) == []


def test_the_values_of_states_are_means_with_their_standard_errors() -> None:
    rows = [[1, 0, 0, 1, 1], [True, True], drawn(9, 3)]
    for row, found in zip(rows, espalier.monte_carlo_values(rows), strict=True):
        numbers = [float(reward) for reward in row]
        assert found.value == pytest.approx(statistics.fmean(numbers))
        assert found.standard_error == pytest.approx(statistics.stdev(numbers) / len(numbers) ** 0.5)
        assert found.num_completions == len(row)
    assert math.isnan(espalier.monte_carlo_values([[1]])[0].standard_error)


def test_the_standard_error_is_the_spread_of_values_drawn_again_and_again() -> None:
    rng = random.Random(0)
    found = espalier.monte_carlo_values([[rng.random() < 0.3 for _ in range(16)] for _ in range(4000)])
    spread = statistics.pvariance([state.value for state in found])
    claimed = statistics.fmean(state.standard_error**2 for state in found)
    assert claimed == pytest.approx(spread, rel=0.05)
    assert spread == pytest.approx(0.3 * 0.7 / 16, rel=0.05)


@pytest.mark.parametrize("how", AGGREGATES)
def test_scores_are_aggregated_as_everywhere_else(how: str) -> None:
    scores = [0.9, 0.5, 0.8]
    expected = {
        "product": 0.36, "minimum": 0.5, "last": 0.8, "mean": 2.2 / 3, "geometric_mean": 0.36 ** (1 / 3), "sum": 2.2,
        "log_odds": math.log(9) + math.log(1) + math.log(4),
    }  # fmt: skip
    assert espalier.aggregate_scores(scores, how) == pytest.approx(expected[how])
    assert espalier.aggregate_scores([], how) == (-math.inf if how == "log_odds" else 0.0)


# Steps and answers.


@pytest.mark.parametrize("how", SPLITTERS)
def test_steps_join_to_the_response(how: str) -> None:
    response = "Thought 1: so we add.\n3 + 4 = 7. Then we double it, and get 14.\n\n#### 14"
    steps = espalier.split_steps(response, how)
    assert steps == SPLITTERS[how](response)
    assert "".join(steps) == response


def test_a_task_and_the_function_grade_alike(task: WordArithmetic) -> None:
    for row, problem in zip(task.demonstrations("train")[:40], task.problems("train"), strict=False):
        gold = str(problem.gold)
        assert espalier.grade(row.completion, gold, kind="marked_number") == task.grade(gold, row.completion)


@pytest.mark.parametrize(
    ("response", "gold", "verdict"),
    [
        ("The answer is $\\boxed{12}$.", "12", "right"),
        ("The answer is 13.", "12", "wrong"),
        ("Thus \\boxed{x = 3}", "3", "right"),
        ("No idea.", "3", "wrong"),
        ("<think>So it must be", "3", "unparseable"),
        ("\\boxed{(1, 2)}", "(2, 1)", "wrong"),
    ],
)
def test_a_whole_response_is_graded_by_its_final_answer(response: str, gold: str, verdict: str) -> None:
    assert espalier.grade(response, gold).verdict == verdict


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("1/2", "0.5", True),
        ("1,250", "1250.0", True),
        (" blue  whale", "blue whale", True),
        ("x=3", "3", True),
        ("x+1", "1+x", True),
        ("7", "7.1", False),
        ("north", "south", False),
        ("", "0", False),
    ],
)
def test_two_answers_are_the_same_where_they_vote_together(one: str, other: str, expected: bool) -> None:
    assert espalier.same_answer(one, other) is expected
    assert espalier.same_answer(other, one) is expected
    base = Trajectory("p/0", "p", "", one, [], [], [], [], "stop", "", one, False)
    leaders = answer_classes([base, replace(base, answer=other)]).leaders
    assert (leaders[vote_key(one)] == leaders[vote_key(other)]) is expected


@pytest.mark.parametrize("of", [np.array, torch.tensor, tuple], ids=["array", "tensor", "tuple"])
def test_arrays_and_tensors_are_lists(of: Callable[[list[Any]], Any]) -> None:
    assert espalier.aggregate_scores(of([0.5, 0.25]), "product") == 0.125
    assert espalier.aggregate_scores(of([0.5, 0.25])) == 0.25
    ends = espalier.vineppo_advantages(of([0.5, 0.25]), of([1.0])[0], of([2.0, 5.0]))
    assert ends == [-0.25, -0.25, 0.75, 0.75, 0.75]
    assert espalier.gae(of([0.5, 0.5]), of([0.0, 1.0]), lam=0.5) == [0.25, 0.5]
    assert espalier.grpo_advantages(of([1, 0, 0, 0])) == [1.5, -0.5, -0.5, -0.5]
    (found,) = espalier.monte_carlo_values(of([[True, True, False, True]]))
    assert (found.value, type(found.value)) == (0.75, float)


# What they are not defined for.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: espalier.grpo_advantages([1.0]), "2 rewards at least are wanted, got 1"),
        (lambda: espalier.rloo_advantages([]), "2 rewards at least are wanted, got 0"),
        (lambda: espalier.dr_grpo_advantages([1.0, math.nan]), "rewards: number 2 of 2 is nan"),
        (lambda: espalier.gae([0.5], [0.0, 1.0]), "1 values and 2 rewards: one of each per token"),
        (lambda: espalier.gae([0.5], [1.0], gamma=1.5), "gamma must be a number from 0 to 1, got 1.5"),
        (lambda: espalier.gae([math.inf], [1.0]), "values: number 1 of 1 is inf"),
        (lambda: espalier.vineppo_advantages([0.5], 1.0, [1, 2]), "1 state_values and 2 step_ends"),
        (lambda: espalier.vineppo_advantages([0.5, 0.5], 1.0, [3, 2]), r"never fall, got \[3, 2\]"),
        (lambda: espalier.monte_carlo_values([[1], []]), "a state without completions has no value"),
        (lambda: espalier.aggregate_scores([0.5], "median"), "no aggregate 'median': there are product, minimum"),
        (lambda: espalier.aggregate_scores([1.5], "log_odds"), r"needs scores in \[0, 1\], got 1.5"),
        (lambda: espalier.split_steps("a", "words"), "no step splitter 'words': choose one of lines"),
        (lambda: espalier.grade("a", "a", kind="essay"), "no kind 'essay' of answer"),
        (lambda: espalier.grade("a", 14), "gold must be a text or a list of texts, got 14"),  # type: ignore[arg-type]
        (lambda: espalier.grade("a", None), "gold must be a text or a list"),  # type: ignore[arg-type]
        (lambda: espalier.grade(None, "a"), "response must be a text, got None"),  # type: ignore[arg-type]
        (lambda: espalier.split_steps(["a"]), "response must be a text"),  # type: ignore[arg-type]
        (lambda: espalier.same_answer("7", 7), "other must be a text, got 7"),  # type: ignore[arg-type]
        (lambda: espalier.monte_carlo_values([1, 0]), r"rewards\[0\] must be a list of numbers, got 1"),  # type: ignore[list-item]
        (lambda: espalier.monte_carlo_values([["1"]]), r"rewards\[0\]: number 1 of 1 is '1'"),  # type: ignore[list-item]
        (lambda: espalier.grpo_advantages(1.0), "rewards must be a list of numbers, got 1.0"),  # type: ignore[arg-type]
        (lambda: espalier.gae([0.5], None), "rewards must be a list of numbers, got None"),  # type: ignore[arg-type]
        (lambda: espalier.vineppo_advantages(None, 1.0, []), "state_values must be a list"),  # type: ignore[arg-type]
        (lambda: espalier.vineppo_advantages([0.5], None, [1]), "outcome: number 1 of 1 is None"),  # type: ignore[arg-type]
        (lambda: espalier.vineppo_advantages([0.5], 1.0, ["a"]), "step_ends: number 1 of 1 is 'a'"),  # type: ignore[list-item]
        (lambda: espalier.vineppo_advantages([0.5], 1.0, [2.5]), r"whole ones, and never fall, got \[2.5\]"),  # type: ignore[list-item]
        (lambda: espalier.monte_carlo_values(5), "rewards must be a list of lists of numbers, got 5"),  # type: ignore[arg-type]
        (lambda: espalier.gae([0.5], [1.0], gamma=None), "gamma must be a number from 0 to 1, got None"),  # type: ignore[arg-type]
        (lambda: espalier.grade("B", "B", "choice", "4"), "num_options must be a whole number"),  # type: ignore[arg-type]
        (lambda: espalier.load_prm(None), "path must be a folder or a hub name, got None"),  # type: ignore[arg-type]
        (lambda: espalier.load_prm("x", num_labels=0), "num_labels must be at least 1, got 0"),
        (lambda: espalier.load_prm("x", device="gpu"), "device must be one of torch's, as cpu or cuda:0, got 'gpu'"),
        (lambda: espalier.aggregate_scores(0.5), "scores must be a list of numbers, got 0.5"),  # type: ignore[arg-type]
    ],
)
def test_what_a_function_is_not_defined_for_is_said_in_one_line(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(espalier.BadInput, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
