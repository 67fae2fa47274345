"""The measures of the credit benchmark, by hand; every estimator of conf/advantage/ has its row."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.credit.cosine_figure import draw
from benchmarks.credit.credit_oracle import COLUMNS, CONFIGS, Row, config_of, parse, points_of, read_rows, table_row
from benchmarks.credit.estimated_credit import CreditBench, Plan
from benchmarks.credit.measures import (
    StepCredit,
    bias_and_variance,
    cosine,
    rank_correlation,
    ranks,
    sign_error,
    step_estimates,
)
from espalier.models.load import load_tokenizer
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.credit.token_maps import spread_steps
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import Estimate, Experience, RolloutGroup
from espalier.runtime.entrypoint import build
from espalier.runtime.schemas import RLConfig
from espalier.values.exact.state_values import ExactSettings
from tests.support.rl_cases import FakeClient


def test_a_constant_error_is_bias_and_no_variance() -> None:
    steps = [StepCredit("d", 0.5, 0.7), StepCredit("d", 0.5, 0.7), StepCredit("alone", 0.0, 9.0)]
    assert bias_and_variance(steps) == pytest.approx((0.2, 0.0))


def test_an_error_without_a_mean_is_variance_and_no_bias() -> None:
    """Estimates 0.4 and 0.6 of 0.5: variance 0.02, mean right; another decision, 1 and 2 of 0, moves both.

    Squared bias: (2 (0 - 0.01) + 2 (2.25 - 0.25)) / 4 = 0.995; variance (2 x 0.02 + 2 x 0.5) / 4 = 0.26.
    """
    steps = [StepCredit("d", 0.5, 0.4), StepCredit("d", 0.5, 0.6)]
    assert bias_and_variance(steps) == pytest.approx((0.0, 0.02))
    steps += [StepCredit("e", 0.0, 1.0), StepCredit("e", 0.0, 2.0)]
    assert bias_and_variance(steps) == pytest.approx((math.sqrt(0.995), 0.26))


def test_no_decision_taken_twice_gives_no_number() -> None:
    assert all(math.isnan(value) for value in bias_and_variance([StepCredit("d", 0.5, 0.4)]))


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


def test_the_cosine_of_gradients() -> None:
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
    assert cosine(torch.tensor([1.0, 0.0]), torch.zeros(2)) == 0.0


def test_a_steps_estimate_is_the_mean_over_its_credited_tokens() -> None:
    assert step_estimates([1.0, 1.0, 0.0, 3.0, 0.0], [2, 4, 5]) == [1.0, 3.0, 0.0]


def test_every_estimator_has_a_row_and_two_rows_differ_in_name() -> None:
    rows = read_rows()
    assert {row.advantage for row in rows} == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert len({row.name for row in rows}) == len(rows)


def test_rows_that_cannot_be_run_say_why_and_others_have_their_settings(tiny_policy: Path) -> None:
    assert config_of(Row("gae", "gae"), tiny_policy, None) == "needs a critic"
    assert config_of(Row("tree", "tree"), tiny_policy, None) == "needs a tree of rollouts"  # without one it is RLOO
    assert config_of(Row("pure", "pure"), tiny_policy, None) == "needs process rewards"
    assert "--prm" in str(config_of(Row("prm", "process_values"), tiny_policy, None))
    config = config_of(Row("v", "vineppo", {"completions_per_state": 3}), tiny_policy, None)
    assert isinstance(config, RLConfig)
    assert config.advantage["completions_per_state"] == 3
    exact = config_of(Row("exact", "exact"), tiny_policy, None)
    assert isinstance(exact, RLConfig)
    build(exact.advantage)


class Truth(RLOO):
    """Gives the exact advantages of a bench's draws, one draw after another."""

    def __init__(self, bench: CreditBench):
        self.draws = iter(bench.draws)

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        draw = next(self.draws)
        ends = [trajectory.step_ends for trajectory in draw.trajectories]
        return Estimate(spread_steps(ends, draw.advantages, experience.response_mask))


def test_a_bench_measures_an_estimator_and_the_oracle_without_an_engine(tiny_policy: Path) -> None:
    """The exact advantages themselves have cosine 1, no bias and no wrong sign; VinePPO counts its tokens."""
    coarse = ExactSettings(96, 1.0, line_mass=0.6, state_mass=0.5, max_width=2, merge_pairs=1)
    plan = Plan(num_problems=2, group_size=2, num_draws=2, num_simulated=2, completions=3, truth=coarse)
    client = FakeClient(load_tokenizer(str(tiny_policy)), num_lines=2)
    with CreditBench(tiny_policy, plan, client) as bench:
        found = bench.measure(Truth(bench))
        assert found["cosines"] == pytest.approx([1.0, 1.0], abs=1e-6)
        assert (found["bias"], found["deviation"]) == pytest.approx((0.0, 0.0), abs=1e-6)
        assert found["sign_error"] == 0.0
        assert found["tokens_per_token"] == 0.0
        sampled = bench.measure(VinePPO(completions_per_state=2))
        assert sampled["tokens_per_token"] > 0.5
        assert bench.oracle()["simulated"] == 2
    table = [table_row("SFT", "truth", found), table_row("SFT", "sampled", sampled)]
    assert len(table[0]) == len(COLUMNS)
    assert draw(points_of(table)).count("<circle") == 2


@pytest.mark.parametrize("words", [["--policies", "SFT=nowhere"], ["--policies", "nowhere"], ["--prm", "nowhere"]])
def test_a_model_folder_that_is_none_is_refused_before_an_engine_starts(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["credit_oracle", *words])
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert f"{' '.join(words)}: " in capsys.readouterr().err
