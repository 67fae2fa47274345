"""The measures of the credit benchmark, by hand; every estimator of conf/advantage/ has its row."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.credit import credit_oracle, oracle_result
from benchmarks.credit.credit_oracle import build_task, describe, main, parse, settings_of_task
from benchmarks.credit.estimated_credit import CreditBench, Sizes
from benchmarks.credit.estimator_parts import CONFIGS, EstimatorParts, Row, config_of, parts_of, read_rows
from benchmarks.credit.measures import (
    StepCredit,
    bias_and_variance,
    rank_correlation,
    ranks,
    sign_error,
    step_estimates,
)
from benchmarks.credit.oracle_check import (
    CheckedState,
    agreeing,
    chance_within,
    check_states,
    describe_check,
    describe_values,
    mean_gap,
    smallest_found_error,
)
from benchmarks.credit.plan import read_plan
from espalier.data.records import Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.rewards.outcome import OutcomeReward
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.advantages.tree import TreeAdvantage
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.schemas import RLConfig
from espalier.values.exact.decision_values import ExactValue
from espalier.values.exact.state_values import ExactSettings
from tests.support.pass_logprobs import token_logprobs
from tests.support.rl_cases import FakeClient

COARSE = ExactSettings(96, 1.0, line_mass=0.6, state_mass=0.5, max_width=2, merge_pairs=1)
PLAN = Path(oracle_result.__file__).with_name("plan.yaml")


def test_a_constant_error_is_bias_and_no_variance() -> None:
    steps = [StepCredit("d", 0.5, 0.7, 0), StepCredit("d", 0.5, 0.7, 1), StepCredit("alone", 0.0, 9.0, 0)]
    assert bias_and_variance(steps) == pytest.approx((0.2, 0.0))


def test_errors_that_differ_between_draws_are_variance_and_no_bias() -> None:
    """Errors of two draws -0.1 and 0.1: their product, -0.01, is no bias; with the mean square 0.01 variance is 0.02.

    Another decision, errors 1 and 2: product 2, mean square 2.5. Together bias (2 (-0.01) + 2 x 2) / 4 = 0.995, and
    variance (2 x 0.02 + 2 x 0.5) / 4 = 0.26.
    """
    steps = [StepCredit("d", 0.5, 0.4, 0), StepCredit("d", 0.5, 0.6, 1)]
    assert bias_and_variance(steps) == pytest.approx((0.0, 0.02))
    steps += [StepCredit("e", 0.0, 1.0, 0), StepCredit("e", 0.0, 2.0, 1)]
    assert bias_and_variance(steps) == pytest.approx((math.sqrt(0.995), 0.26))


def test_equal_errors_of_one_draw_are_one_error() -> None:
    """Rollouts of a draw that pass through a state share its completions: their error is noise, not bias."""
    steps = [StepCredit("d", 0.0, 0.3, 0)] * 5 + [StepCredit("d", 0.0, -0.3, 1)] * 5
    assert bias_and_variance(steps) == pytest.approx((0.0, 0.18))


def test_no_decision_of_two_draws_gives_no_number() -> None:
    steps = [StepCredit("d", 0.5, 0.4, 0), StepCredit("d", 0.5, 0.4, 0)]
    assert all(math.isnan(value) for value in bias_and_variance(steps))


def test_signs_count_beyond_the_margin_and_no_credit_is_half_wrong() -> None:
    rows = [(0.5, 0.1), (0.5, -0.1), (-0.5, 0.0), (0.01, -1.0)]
    share, num = sign_error([StepCredit(0, exact, estimate) for exact, estimate in rows])
    assert (share, num) == (0.5, 3)


def test_rank_correlation_by_hand() -> None:
    assert ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0


def test_a_steps_estimate_is_the_mean_over_its_credited_tokens() -> None:
    assert step_estimates([1.0, 1.0, 0.0, 3.0, 0.0], [2, 4, 5]) == [1.0, 3.0, 0.0]


def test_every_estimator_has_a_row_and_two_rows_differ_in_name() -> None:
    rows = read_rows()
    assert {row.advantage for row in rows} == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.slow
def test_rows_that_cannot_be_run_say_why_and_others_have_their_settings(tiny_policy: Path) -> None:
    def config(row: Row, prm: Path | None = None) -> RLConfig | str:
        return config_of(row, ("task=word_arithmetic",), tiny_policy, prm)

    by_name = {row.name: row for row in read_rows()}
    assert "needs a critic" in str(config(Row("gae", "gae")))
    assert "trained along" in str(config(by_name["ppo"]))
    assert "branches" in str(config(Row("tree", "tree")))  # without one it is RLOO
    assert "process rewards" in str(config(Row("pure", "pure")))
    assert "--prm" in str(config(by_name["PRM value"]))
    found = config(by_name["vineppo K=3"])
    assert isinstance(found, RLConfig)
    assert found.advantage["completions_per_state"] == 3
    with_prm = [row for row in by_name.values() if row.prm]
    assert len(with_prm) == 6
    assert all(isinstance(config(row, tiny_policy), RLConfig) for row in with_prm)
    tree = config(by_name["tree"])
    assert isinstance(tree, RLConfig)
    assert parts_of(tree).tree == TreeRollouts([2, 2], 1)


def test_a_task_is_built_as_programs_build_it() -> None:
    cells = read_plan(PLAN).cells
    task, max_tokens = build_task(settings_of_task(cells["long_arithmetic"]))
    assert (task.name, max_tokens) == ("long_arithmetic", 128)
    assert build_task(settings_of_task(cells["word_arithmetic"]))[1] == 96


class Truth(RLOO):
    """Gives the exact advantages of a bench's draws, one draw after another."""

    def __init__(self, bench: CreditBench):
        self.draws = iter(bench.draws)

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        draw = next(self.draws)
        ends = [trajectory.step_ends for trajectory in draw.trajectories]
        return Estimate(spread_steps(ends, draw.advantages, experience.response_mask))


def plain_gradient(bench: CreditBench, draw: int, row: int, advantages: torch.Tensor) -> torch.Tensor:
    """Of one rollout, unpadded, by a pass of its own."""
    rollout = [one for group in bench.draws[draw].groups for one in group.rollouts][row]
    ids = torch.tensor([[*rollout.context_ids, *rollout.drawn_ids]])
    logprobs = token_logprobs(bench.network(input_ids=ids).logits, ids)[0][0]
    own = advantages[row, 1 : ids.shape[1]]
    return torch.cat([part.flatten() for part in torch.autograd.grad((own * logprobs).sum(), bench.parameters)])


def test_a_bench_measures_estimators_and_the_oracle_without_an_engine(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact advantages themselves have cosine 1, no bias and no wrong sign; others count their tokens."""
    monkeypatch.setattr(credit_oracle, "BATCH", 2)
    sizes, task = Sizes(num_problems=3, group_size=2, num_draws=2, num_reference=4, truth=COARSE), WordArithmetic()
    client = FakeClient(load_tokenizer(str(tiny_policy)), num_lines=2)
    outcome = OutcomeReward()
    with CreditBench(tiny_policy, task, task.problems("dev")[:5], sizes, client) as bench:
        measured = bench.measure(EstimatorParts(Truth(bench), outcome))
        found = describe("SFT", "truth", measured, 2)
        assert (found["bias"], found["deviation"]) == pytest.approx((0.0, 0.0), abs=1e-6)
        assert (found["wrong_sign"], found["tokens_per_token"]) == (0.0, 0.0)
        assert measured.products.rest_exact.shape == (3, 4)
        assert torch.allclose(measured.products.rest, bench.measure_exact().products.rest)

        exact, advantages = bench.exact, [bench.exact_advantages(draw) for draw in bench.draws]
        for p, d in product(range(3), range(2)):  # the mean over the two rollouts of a group
            one, other = (plain_gradient(bench, d, row, advantages[d]) for row in (2 * p, 2 * p + 1))
            assert torch.allclose(exact[p, d], (one + other) / 2, atol=1e-5)

        sampled = describe("SFT", "sampled", bench.measure(EstimatorParts(VinePPO(2), outcome)), 2, measured.products)
        assert sampled["tokens_per_token"] > 0.5
        tree = EstimatorParts(TreeAdvantage(), outcome, TreeRollouts([2], 1), 2)
        grown = describe("SFT", "tree", bench.measure(tree), 2)
        assert grown["bias"] is None
        assert grown["tokens_per_token"] > 0.2

        checked = check_states(bench, 2, 10_000)
        oracle = {**describe_check(checked), **describe_values(bench)}
        assert oracle["states"] == 6  # the states before each of three lines of two problems
    rows = [{**row, "cosine_batch": [0.5, 0.4, 0.6]} for row in (found, sampled, grown)]
    policy = {"rows": rows, "left_out": {"ppo": "why"}, "oracle": oracle}
    result = {"sizes": asdict(sizes), "batch": 64, "policies": {"SFT": policy}}
    picture = tmp_path / "picture.svg"
    for name in ("one", "other", "one"):
        path = oracle_result.write(name, result, tmp_path, picture)
    written: dict[str, Any] = json.loads(path.read_text())
    assert list(written["detail"]["tasks"]) == ["one", "other"]
    assert written["figures"]["oracle_within_three_errors"]["goal"] == 12
    assert all(len(row) == len(table["columns"]) for table in written["tables"] for row in table["rows"])
    assert picture.read_text().count("<circle") == 6


def test_a_share_agrees_within_three_errors_of_the_bounds() -> None:
    """Of 100 outcomes a value of a half has standard error 0.05, and one of 0.0 that of one outcome in 100: 0.01."""
    assert agreeing(ExactValue(0.5, 0.5), 100) == range(35, 66)
    assert agreeing(ExactValue(0.0, 0.0), 100) == range(4)
    assert agreeing(ExactValue(0.0, 0.1), 100) == range(20)  # 0.1 + 3 x 0.03
    assert CheckedState("p", ExactValue(0.5, 0.5), 65, 100).is_within
    assert not CheckedState("p", ExactValue(0.5, 0.5), 66, 100).is_within


def test_the_power_of_the_check_is_that_of_the_binomial() -> None:
    """4 outcomes of a value of a half have standard error 1/4: any share agrees. Of 16 it is 1/8, and 2 to 14 agree."""
    half = ExactValue(0.5, 0.5)
    assert chance_within(half, 4, 0.9) == pytest.approx(1.0)
    assert chance_within(half, 16, 0.5) == pytest.approx(1 - 2 * (1 + 16) / 2**16)
    assert chance_within(half, 16, 1.0) == 0.0
    assert smallest_found_error([CheckedState("p", half, 2, 4)]) is None
    error = smallest_found_error([CheckedState("p", half, 50, 100)])
    assert error is not None
    assert chance_within(half, 100, 0.5 - error) < 0.98 <= chance_within(half, 100, 0.5 - error + 0.005)


def test_the_error_of_the_mean_gap_takes_a_problems_states_together() -> None:
    """Gaps 0.1, 0.1 of one problem and -0.1 of another: mean 0.1 / 3; the sums are 0.2 - 2/30 and -0.1 - 1/30, whose
    squares, times 2 / 1, are 8 / 225: their root over 3 states."""
    rows = [("a", 6), ("a", 6), ("b", 4)]
    mean, error = mean_gap([CheckedState(name, ExactValue(0.5, 0.5), right, 10) for name, right in rows])
    assert mean == pytest.approx(0.1 / 3)
    assert error == pytest.approx(math.sqrt(2 * (0.4**2 + 0.4**2) / 9) / 3)


@pytest.mark.parametrize("words", [["--policies", "SFT=nowhere"], ["--policies", "nowhere"], ["--prm", "nowhere"]])
def test_a_model_folder_that_is_none_is_refused_before_an_engine_starts(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["credit_oracle", *words])
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert f"{' '.join(words)}: " in capsys.readouterr().err


def test_a_task_that_is_no_cell_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["credit_oracle", "--task", "gsm8k"])
    assert main() == 2
    assert "--task: there is no 'gsm8k'" in capsys.readouterr().err


def test_what_other_code_measured_is_kept_under_its_own_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").touch()
    sizes = Sizes(2, 2, 2, 2, COARSE)
    comparison = credit_oracle.Comparison(WordArithmetic(), (), [], None, sizes, 1, 10, tmp_path)
    problems = [Problem("p", "", "1")]
    found = {"rows": [], "left_out": {}, "oracle": {}, "seconds": {}, "commit": "old"}
    kept = {"asked": comparison.asked(tmp_path, problems), "found": found}
    (tmp_path / "SFT.json").write_text(json.dumps(kept))
    for commit, said in (("old", ""), ("new", "SFT.json was measured at commit old: remove it to measure again")):
        monkeypatch.setattr(credit_oracle, "code_commit", partial(str, commit))
        assert comparison.measure_policy("SFT", tmp_path, problems) == found
        assert said in (err := capsys.readouterr().err)
        assert bool(said) == bool(err)
