"""Whether labels carry signal: reliabilities by hand and against known values, the verdict, the stage, the refusal."""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, StepValues
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.label_signal import LabelSignal, describe_signal
from espalier.values.label_reliability import NONE, SIGNAL, WEAK, completions_for, counted_states, signal_sums, verdict
from espalier.values.value_prior import ValuePrior, fit_prior

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK_START = ROOT / "experiments" / "quickstart" / "process_rewards" / "step_values.jsonl"


def row(name: str, rights: list[int], num: int = 4, ids: list[int] | None = None) -> StepValues:
    """A trajectory, one token per step, whose inner states have `rights` of `num` completions right."""
    size = len(rights) + 1
    return StepValues(
        name, name.partition("/")[0], "Q", [f"{step}\n" for step in range(size)], [9],
        ids or [int(name.partition("/")[2]) * 100 + step for step in range(size)], list(range(1, size + 1)),
        [*(one / num for one in rights), 0.0], [*rights, 0], [*(num for _ in rights), 1], False,
    )  # fmt: skip


def figures_of(rows: list[StepValues]) -> dict[str, float]:
    sums = signal_sums(counted_states(rows)[0])
    return {name: float(value) for name, value in sums.figures(sums.table.sum(axis=0)).items()}


def simulated(values: list[list[float]], num: int, seed: int = 0, per_problem: int = 1) -> list[StepValues]:
    """One trajectory per row of true values, `num` completions of each state."""
    rng = random.Random(seed)
    return [
        row(f"p{place // per_problem}/{place % per_problem}",
            [sum(rng.random() < value for _ in range(num)) for value in one], num)
        for place, one in enumerate(values)
    ]  # fmt: skip


def test_the_reliability_of_four_states_by_hand() -> None:
    """Labels 0, 1/2, 1/2, 1: variance (1/4 + 0 + 0 + 1/4) / 3 = 1/6; noise (0 + 1/12 + 1/12 + 0) / 4 = 1/24."""
    figures = figures_of([row("p/0", [0, 2]), row("q/0", [2, 4])])
    assert figures["mean_value"] == pytest.approx(1 / 2)
    assert figures["share_zero"] == figures["share_one"] == pytest.approx(1 / 4)
    assert figures["noise_variance"] == pytest.approx(1 / 24)
    assert figures["value_variance"] == pytest.approx(1 / 8)
    assert figures["reliability"] == pytest.approx(3 / 4)
    # around the means of the steps, 1/4 and 3/4: 4 x 1/16 over 2 degrees of freedom; noise (1/24 + 1/24) / 2
    assert figures["within_step"] == pytest.approx((1 / 8 - 1 / 24) / (1 / 8))
    # along p and q alike: 2 x 1/16 over 1; noise half of 0 + 1/12
    assert figures["within_trajectory"] == pytest.approx((1 / 8 - 1 / 24) / (1 / 8))
    assert np.isnan(figures["siblings"])


def test_siblings_are_states_after_one_state() -> None:
    """After the shared first step 4 of 4 and 0 of 4: variance 1/2, without noise; the first state counts once."""
    rows = [row("p/0", [2, 4], ids=[1, 2, 3]), row("p/1", [2, 0], ids=[1, 7, 8])]
    states, _ = counted_states(rows)
    assert [state.label for state in states] == [0.5, 1.0, 0.0]
    assert states[0].trajectories == ("p/0", "p/1")
    assert figures_of(rows)["siblings"] == pytest.approx(1.0)


def test_the_sums_of_a_drawn_problem_are_those_of_two_problems() -> None:
    rows = [row("p/0", [0, 2]), row("q/0", [2, 4]), row("r/0", [1, 1])]
    sums = signal_sums(counted_states(rows)[0])
    drawn = sums.figures(np.asarray([2.0, 1.0, 0.0]) @ sums.table)
    again = figures_of([row("p/0", [0, 2]), row("p2/0", [0, 2]), row("q/0", [2, 4])])
    for name, value in again.items():
        assert float(drawn[name]) == pytest.approx(value, nan_ok=True, abs=1e-12), name


def test_the_split_half_auc_is_that_of_all_ways_to_halve() -> None:
    states, _ = counted_states([row("p/0", [0, 1]), row("q/0", [3, 2]), row("r/0", [4, 2])])
    won = pairs = 0.0
    bits_of = {right: set(itertools.permutations([1] * right + [0] * (4 - right))) for right in range(5)}
    halves = {right: [(sum(bits[:2]), sum(bits[2:])) for bits in ways] for right, ways in bits_of.items()}
    for one, other in itertools.permutations(states, 2):
        ways = list(itertools.product(halves[one.num_correct], halves[other.num_correct]))
        for (first, rest), (lower, nothing) in ways:
            if rest and not nothing:
                pairs += 1 / len(ways)
                won += ((first > lower) + (first == lower) / 2) / len(ways)
    assert figures_of([row("p/0", [0, 1]), row("q/0", [3, 2]), row("r/0", [4, 2])])["split_half_auc"] == pytest.approx(
        won / pairs
    )


def test_the_estimated_reliability_is_the_share_of_the_variance_that_is_the_values() -> None:
    rng = random.Random(1)
    values = [[rng.random(), rng.random()] for _ in range(2_000)]  # variance 1/12, mean of V (1 - V) 1/6
    for num in (2, 4, 8):
        figures = figures_of(simulated(values, num))
        known = (1 / 12) / (1 / 12 + 1 / 6 / num)
        assert figures["reliability"] == pytest.approx(known, abs=0.05)
        assert figures["within_step"] == pytest.approx(known, abs=0.05)
        assert figures["within_trajectory"] == pytest.approx(known, abs=0.05)


def test_values_that_change_between_problems_alone_have_no_reliability_along_a_solution() -> None:
    rng = random.Random(2)
    figures = figures_of(simulated([[value] * 4 for value in (rng.random() for _ in range(1_500))], 4))
    assert figures["reliability"] == pytest.approx(2 / 3, abs=0.05)
    assert figures["within_trajectory"] == pytest.approx(0.0, abs=0.05)


def test_spearman_brown() -> None:
    assert completions_for(0.5, 2 / 3, 4) == 2
    assert completions_for(0.5, 0.2, 4) == 16
    assert completions_for(0.8, 0.5, 4) == 16
    assert completions_for(0.5, -0.01, 4) is None


def test_the_expected_auc_is_that_of_drawn_values() -> None:
    rng = np.random.default_rng(0)
    for alpha, beta, num in ((1.0, 1.0, 4), (0.3, 1.2, 4), (5.0, 40.0, 8)):
        values = rng.beta(alpha, beta, 200_000)
        labels = rng.binomial(num, values)
        good = np.bincount(labels[values > alpha / (alpha + beta)], minlength=num + 1)
        bad = np.bincount(labels[values <= alpha / (alpha + beta)], minlength=num + 1)
        drawn = good @ (np.cumsum(bad) - bad / 2) / (good.sum() * bad.sum())
        assert ValuePrior(alpha, beta).expected_auc(num) == pytest.approx(drawn, abs=0.005)


def test_which_of_two_counts_is_better_under_a_uniform_distribution() -> None:
    """P(V1 > V2) of Beta(2, 1) and Beta(1, 2), densities 2v and 2 - 2v: the integral of 2v (2v - v^2) is 5/6."""
    prior = ValuePrior(1.0, 1.0)
    assert prior.higher([(1, 1)], [(0, 1)])[0, 0] == pytest.approx(5 / 6, abs=1e-4)
    assert prior.higher([(1, 1)], [(1, 1)])[0, 0] == pytest.approx(1 / 2, abs=1e-9)
    assert prior.count_probs(3) == pytest.approx([0.25] * 4)
    fitted = fit_prior(1 / 2, 1 / 12)
    assert fitted is not None
    assert (fitted.alpha, fitted.beta) == pytest.approx((1, 1))
    assert fit_prior(0.3, 0.0) is None


def test_the_verdicts_rule() -> None:
    assert verdict(0.7, 0.6, 0.8, 0.9, 0.3) == SIGNAL
    assert verdict(0.7, 0.6, 0.8, 0.8, 0.0) == WEAK  # the order is uncertain
    assert verdict(0.4, 0.3, 0.5, 0.9, 0.0) == WEAK
    assert verdict(0.6, 0.1, 0.8, 0.9, 0.0) == WEAK
    assert verdict(0.7, 0.6, 0.8, 0.9, 0.5) == WEAK  # too small for soft labels
    assert verdict(0.1, 0.02, 0.18, 0.9, 0.0) == NONE
    assert verdict(0.3, -0.1, 0.6, 0.9, 0.0) == NONE


def test_the_gain_is_how_much_lower_a_loss_is_that_knows_the_values() -> None:
    """Of uniform values: log 2 - 1/2 (the mean entropy of a uniform probability is 1/2)."""
    assert ValuePrior(1.0, 1.0).loss_gain == pytest.approx(np.log(2) - 1 / 2, abs=1e-5)
    rng = np.random.default_rng(1)
    for alpha, beta in ((0.3, 2.7), (0.02, 0.2), (300.0, 100.0), (1e4, 9e4)):
        values, mean = np.clip(rng.beta(alpha, beta, 400_000), 1e-300, 1 - 1e-16), alpha / (alpha + beta)
        losses = -values * np.log(values) - (1 - values) * np.log1p(-values)
        drawn = -mean * np.log(mean) - (1 - mean) * np.log1p(-mean) - losses.mean()
        assert ValuePrior(alpha, beta).loss_gain == pytest.approx(drawn, abs=0.002)


def test_few_states_after_equally_many_steps_show_no_gain() -> None:
    rows = [row(f"p{number}/0", [4 * (number % 2)], num=4) for number in range(30)]
    longer = [*rows, row("long/0", [4, 4, 4, 4], num=4)]  # alone after two steps and more
    document = described(longer)
    assert [one["gain"] is None for one in document["steps"]] == [False, True, True, True]
    assert document["low_gain_share"] == 0.0


def test_a_gain_that_is_known_of_few_of_the_states_says_nothing() -> None:
    rows = [row(f"p{number}/0", [1, *[4 * (number % 2)] * (3 if number < 19 else 0)], num=4) for number in range(20)]
    document = described(rows)
    assert [one["gain"] is None for one in document["steps"]] == [False, True, True, True]
    assert document["low_gain_share"] is None
    assert "would lower its loss" not in document["remedy"]


def test_what_counts_is_how_many_rows_are_trained_on_and_not_how_many_states_differ() -> None:
    """Eight solutions of a problem share their first six states, of small values, and differ in the last three."""
    rng = random.Random(7)
    rows = []
    for problem in range(100):
        shared = [int(64 * rng.choice((0.0, 0.1))) for _ in range(6)]
        for number in range(8):
            own = [64 * rng.randrange(2) for _ in range(3)]
            ids = [*range(1, 7), *(10 * number + step for step in range(7, 11))]
            rows.append(row(f"p{problem}/{number}", [*shared, *own], num=64, ids=ids))
    document = described(rows)
    assert [one["states"] for one in document["steps"]] == [100] * 6 + [800] * 3
    assert [one["trajectories"] for one in document["steps"]] == [800] * 9
    assert document["low_gain_share"] == pytest.approx(6 / 9)
    assert document["verdict"] == WEAK


def test_states_without_a_label_are_not_judged(tmp_path: Path) -> None:
    rng = random.Random(6)
    labelled = simulated([[rng.random() for _ in range(4)] for _ in range(60)], 8)
    unlabelled = [replace(one, id=f"q{one.id}", problem_id=f"q{one.problem_id}", num_correct=[0] * 5,
                          labels=[None] * 4 + [0.0]) for one in labelled]  # fmt: skip
    document = ran([*labelled, *unlabelled], tmp_path)
    assert document["trajectories_without_inner_labels"] == 60
    assert document["figures"] == ran(labelled, tmp_path)["figures"]


def test_values_without_noise_that_are_too_small_for_soft_labels_are_weak(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Right states are worth 0.1 and wrong ones 0 for six steps of eight; made hard, the same values carry signal."""
    rng = random.Random(5)
    values = []
    for _ in range(400):
        place = rng.randrange(9)  # of the first wrong step
        values.append([0.0 if step >= place else (0.1 if step < 6 else 0.8) for step in range(8)])
    rows = simulated(values, 256)
    document = ran(rows, tmp_path)
    assert document["read"]["mean"] > 0.9
    assert document["figures"]["expected_auc"]["mean"] > 0.9
    assert (document["verdict"], document["labels"]) == (WEAK, "soft")
    assert document["low_gain_share"] == pytest.approx(6 / 8, abs=0.05)
    assert document["remedy"].startswith("at 7")
    assert "labels=relative" in caplog.text
    certain = described(simulated([[0.99 if rng.random() < 0.9 else 0.7 for _ in range(6)] for _ in range(400)], 256))
    assert (certain["verdict"], certain["remedy"].endswith("take harder problems")) == (WEAK, True)
    assert "labels=relative" not in certain["remedy"]  # near a prompt's value of 1 it calls nearly everything good
    hard = [replace(one, labels=[float(value > 0.05) for value in one.values]) for one in rows]
    document = ran(hard, tmp_path)
    assert (document["verdict"], document["labels"], document["remedy"]) == (SIGNAL, "hard", "")


def described(rows: list[StepValues]) -> dict[str, Any]:
    return describe_signal(signal_sums(counted_states(rows)[0]))


def test_equal_values_and_values_of_6_and_12_per_cent_carry_no_signal_and_spread_ones_do() -> None:
    rng = random.Random(3)
    equal = described(simulated([[0.3] * 4] * 400, 4))
    assert equal["verdict"] == NONE
    off = described(simulated([[rng.choice((0.06, 0.12)) for _ in range(8)] for _ in range(400)], 4))
    assert off["verdict"] == NONE
    assert off["figures"]["reliability"]["mean"] == pytest.approx(0.0009 / (0.0009 + 0.0810 / 4), abs=0.05)
    assert "0 of 4 right" in off["remedy"]
    assert "train the policy first" in off["remedy"]
    spread = described(simulated([[rng.random() for _ in range(4)] for _ in range(400)], 4))
    assert spread["verdict"] == SIGNAL
    assert spread["remedy"] == ""


def test_a_few_good_states_among_many_without_a_success_are_weak() -> None:
    """Solutions that are right so far succeed with 0.4 per hard step to come, others with 0.01 (8 to 10 operations)."""
    rng = random.Random(4)
    values = []
    for _ in range(800):
        hard = [rng.random() < 0.5 for _ in range(9)]
        is_right, one = True, []
        for step in range(8):
            is_right = is_right and (not hard[step] or rng.random() < 0.4)
            one.append(0.4 ** sum(hard[step + 1 :]) if is_right else 0.01)
        values.append(one)
    document = described(simulated(values, 4, per_problem=8))
    assert document["figures"]["share_zero"]["mean"] > 0.75
    assert document["verdict"] == WEAK
    assert re.search(r"complete more per state \(params\.n >= \d+: ", document["remedy"])
    assert re.search(r"spend them on late states \(values/cut_states stage\.first_step=\d: ", document["remedy"])


@pytest.mark.skipif(not QUICK_START.is_file(), reason="no finished quick start in this checkout")
def test_the_quick_starts_labels_carry_signal(tmp_path: Path) -> None:
    context = StageContext(None, tmp_path / "o.json", 1.0)
    document = LabelSignal().run(str(QUICK_START), context)
    assert document["verdict"] == SIGNAL
    assert document["figures"]["reliability"]["mean"] == pytest.approx(0.912, abs=0.01)
    assert [one["step"] for one in document["steps"]] == [1, 2, 3, 4, 5, 6]


def ran(rows: list[StepValues], folder: Path, **settings: float) -> dict[str, Any]:
    write_records(folder / "v.jsonl", rows)
    return LabelSignal(**settings).run(str(folder / "v.jsonl"), StageContext(None, folder / "o.json", 1.0))


def test_labels_without_signal_are_refused_unless_that_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = simulated([[0.1] * 8] * 300, 4)
    with pytest.raises(BadInput, match=r"'none'.*Refused before training; stage.smallest_reliability=0"):
        ran(rows, tmp_path)
    assert ran(rows, tmp_path, smallest_reliability=0.0)["verdict"] == NONE
    assert "the labels' verdict is 'none'" in caplog.text
    below = [row(f"p{number}/0", [1, 2]) for number in range(30)]  # closer to one another than noise makes them
    assert ran(below, tmp_path, smallest_reliability=0.0)["read"]["high"] < 0
    with pytest.raises(BadInput, match="there is nothing to learn"):
        ran([row(f"p{number}/0", [0, 0]) for number in range(20)], tmp_path)
    with pytest.raises(BadInput, match="smallest_reliability must be"):
        LabelSignal(1.0)


def test_few_problems_and_single_completions_are_warned_of_not_refused(tmp_path: Path) -> None:
    assert ran([row(f"p{number}/0", [0, 0]) for number in range(19)], tmp_path)["verdict"] == NONE
    document = ran([row(f"p{number}/0", [number % 2, 1], num=1) for number in range(40)], tmp_path)
    assert document["verdict"] == "not known"
    assert document["states_with_fewer_than_two_completions"] == 80
    assert "params.n=2" in document["remedy"]


def test_signal_of_one_problem_is_not_known_and_of_few_is_said_to_be_of_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One problem has an interval without width."""
    spread = [row(f"p{number}/{k}", [16 * (k % 2), 3 * k], num=16) for number in range(3) for k in range(6)]
    document = ran(spread[:6], tmp_path)
    assert (document["verdict"], document["problems"]) == ("not known", 1)
    assert document["remedy"] == "one problem does not show how much the labels of others differ: sample more problems"
    assert "the labels' verdict is 'not known'" in caplog.text
    caplog.clear()
    assert ran(spread, tmp_path)["verdict"] == SIGNAL
    assert "'carries signal' rests on 3 problems, whose intervals are too narrow: sample 20 or more" in caplog.text
