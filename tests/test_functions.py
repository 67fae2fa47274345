"""The functions of `import espalier`: against formulas in float64, the programs' own scores, and their examples."""

import ast
import doctest
import json
import math
import random
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.data.prompts import encode_text
from espalier.data.records import Trajectory
from espalier.data.splitters import SPLITTERS
from espalier.data.steps import Decoder
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import read_response, steps_on_tokens
from espalier.models.load import BadModel
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.score_steps import ScoreSteps
from espalier.pipeline.stage import StageContext
from espalier.pipeline.votes import answer_classes, vote_key
from espalier.rewards.aggregate import AGGREGATES

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = [name for name in espalier.__all__ if name.islower()]
IMPORT = "import sys, time; start = time.perf_counter(); import espalier; print(time.perf_counter() - start)"


@pytest.fixture(scope="module")
def prm_path(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model whose scores differ, with its tokenizer."""
    path = tmp_path_factory.mktemp("front") / "prm"
    torch.manual_seed(0)
    model = load_process_reward(str(tiny_policy), 1)
    torch.nn.init.normal_(model.get_parameter("score.weight"), std=0.1)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tiny_policy / name).read_bytes())
    return path


@pytest.fixture(scope="module")
def solutions(task: WordArithmetic) -> list[tuple[str, list[str]]]:
    """(prompt, steps) of twelve demonstrations."""
    rows = task.demonstrations("train")[:12]
    return [(row.prompt, espalier.split_steps(row.completion)) for row in rows]


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
def test_the_example_of_a_function_is_right(name: str, prm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prm_path.parent)
    assert run_examples(getattr(espalier, name).__doc__, name) >= 2


def test_the_page_shows_every_name_and_its_examples_are_right(prm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    monkeypatch.chdir(prm_path.parent)
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


# A process reward model.


def as_sampled(tokenizer: Any, number: int, prompt: str, steps: Sequence[str]) -> Trajectory:
    """The record that a sampler leaves of this solution, which ended by itself."""
    prompt_ids = encode_text(tokenizer, prompt, "here")
    ids = [*tokenizer("".join(steps), add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    tokens = read_response(prompt_ids, ids, Decoder(tokenizer), "".join(steps), "here")
    cut, ends = steps_on_tokens(steps, tokens)
    name = f"p{number}"
    return Trajectory(f"{name}/0", name, prompt, "".join(cut), cut, prompt_ids, ids, ends, "stop", "", None, False)


def test_text_is_scored_as_the_stage_scores_its_sampled_tokens(
    prm_path: Path, solutions: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    prm = espalier.load_prm(prm_path)
    rows = [as_sampled(prm.tokenizer, number, *solution) for number, solution in enumerate(solutions)]
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    by_stage = [
        row.scores for row in ScoreSteps(str(prm_path)).run(str(path), StageContext(None, Path("unused"), 10.0))
    ]
    found = espalier.score_steps(prm, solutions)
    assert found == by_stage
    given = [espalier.StepTokens(row.prompt_ids, row.response_ids, row.step_ends) for row in rows]
    assert espalier.score_steps(prm, given) == by_stage
    every = [score for row in found for score in row]
    assert len(every) == sum(len(steps) for _, steps in solutions)
    assert max(every) - min(every) > 0.05


def test_scores_are_the_networks_probabilities_at_step_ends(
    prm_path: Path, solutions: list[tuple[str, list[str]]]
) -> None:
    prm = espalier.load_prm(prm_path)
    prompt, steps = solutions[0]
    ids = list(prm.tokenizer(prompt, add_special_tokens=False).input_ids)
    places = []
    for step in steps:  # digits, words and newlines are tokens apart: pieces of text are tokenised as the whole is
        ids += prm.tokenizer(step, add_special_tokens=False).input_ids
        places.append(len(ids) - 1)
    ids.append(prm.tokenizer.eos_token_id)
    with torch.no_grad():
        logits = prm.network(input_ids=torch.tensor([ids])).logits[0, :, 0].double()
    for is_finished, last in ((True, len(ids) - 1), (False, places[-1])):
        expected = torch.sigmoid(logits[[*places[:-1], last]]).tolist()
        found = espalier.score_steps(prm, [(prompt, steps)], is_finished=is_finished)[0]
        assert found == pytest.approx(expected, abs=0.01)  # the product computes in bf16


def test_one_response_cut_in_two_ways_is_scored_at_the_ends_of_each(
    prm_path: Path, solutions: list[tuple[str, list[str]]]
) -> None:
    prm = espalier.load_prm(prm_path)
    prompt, steps = solutions[0]
    fine, coarse = espalier.score_steps(prm, [(prompt, steps), (prompt, [steps[0], "".join(steps[1:])])])
    assert coarse == [fine[0], fine[-1]]


def test_a_policy_with_a_fresh_head_says_one_half(tiny_policy: Path) -> None:
    prm = espalier.load_prm(tiny_policy, num_labels=1)
    assert espalier.score_steps(prm, [("1 + 1 = ?\n", ["1 + 1 = 2\n", "#### 2"]), ("1 + 1 = ?\n", [])]) == [
        [0.5, 0.5],
        [],
    ]
    with pytest.raises(BadModel, match="no process reward model: train one"):
        espalier.load_prm(tiny_policy)
    with pytest.raises(BadModel, match="no such model folder"):
        espalier.load_prm("./nowhere/prm")


def test_what_cannot_be_scored_is_named_with_its_place(prm_path: Path) -> None:
    prm = espalier.load_prm(prm_path)
    tokens = espalier.encode_steps(prm.tokenizer, "1 + 1 = ?\n", ["2\n", "#### 2"])
    for solution, words in (
        (("1 + 1 = ?\n", "2"), r"solution 1: steps must be a list of texts"),
        (("1 + 1 = ?\n", ["2", ""]), r"solution 1: steps must be .* not empty"),
        (("", ["2"]), r"solution 1: the prompt is empty"),
        (("1 + 1 = ?\n", ["2<|end|>"]), r"solution 1: the tokenizer changes the text .* leave special tokens out"),
        (replace(tokens, step_ends=[0, 3]), r"solution 1: step_ends must rise from 1 to its \d+ response tokens"),
        (replace(tokens, step_ends=[1, 99]), r"solution 1: step_ends must rise"),
        (("1 + 1 = ?\n", ["7" * 600]), r"solution 1 has 6\d\d tokens and the model 512 positions"),
    ):
        with pytest.raises(espalier.BadInput, match=words):
            espalier.score_steps(prm, [("1 + 1 = ?\n", ["2"]), solution])  # type: ignore[list-item]


# What they are not defined for.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: espalier.grpo_advantages([1.0]), "2 rewards at least are wanted, got 1"),
        (lambda: espalier.rloo_advantages([]), "2 rewards at least are wanted, got 0"),
        (lambda: espalier.dr_grpo_advantages([1.0, math.nan]), "rewards: number 2 of 2 is nan"),
        (lambda: espalier.gae([0.5], [0.0, 1.0]), "1 values and 2 rewards: one of each per token"),
        (lambda: espalier.gae([0.5], [1.0], gamma=1.5), "gamma must be from 0 to 1, got 1.5"),
        (lambda: espalier.gae([math.inf], [1.0]), "number 1 of 2 is inf"),
        (lambda: espalier.vineppo_advantages([0.5], 1.0, [1, 2]), "1 state_values and 2 step_ends"),
        (lambda: espalier.vineppo_advantages([0.5, 0.5], 1.0, [3, 2]), r"never fall, got \[3, 2\]"),
        (lambda: espalier.monte_carlo_values([[1], []]), "a state without completions has no value"),
        (lambda: espalier.aggregate_scores([0.5], "median"), "no aggregate 'median': there are product, minimum"),
        (lambda: espalier.aggregate_scores([1.5], "log_odds"), r"needs scores in \[0, 1\], got 1.5"),
        (lambda: espalier.split_steps("a", "words"), "no step splitter 'words': choose one of lines"),
        (lambda: espalier.grade("a", "a", kind="essay"), "no kind 'essay' of answer"),
    ],
)
def test_what_a_function_is_not_defined_for_is_said_in_one_line(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(espalier.BadInput, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
