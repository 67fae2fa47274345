"""The weighting of RewardBench against published leaderboard scores, the other benchmarks by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from espalier.data.ranked_responses import ResponseScores
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.reward_benchmarks import (
    REWARD_BENCH_COUNTS,
    REWARD_BENCH_SECTIONS,
    TiedPrompts,
    best_of_credit,
    domain_score,
    is_right,
    section_scores,
    style_cells,
    style_scores,
)

NAMES = [name for subsets in REWARD_BENCH_SECTIONS.values() for name in subsets]
# Accuracies of the subsets in the order of NAMES, as allenai/reward-bench-results publishes them (eval-set/...), and
# (overall, Chat, Chat Hard, Safety, Reasoning) of the same models on the leaderboard of October 2024, as the model card
# of Skywork-Reward quotes it.
PUBLISHED = {
    "general-preference/GPM-Llama-3.1-8B": (
        [0.92, 0.9368421052631579, 0.9052631578947369, 1.0, 0.975, 0.8108108108108109, 0.91, 0.8507462686567164,
         0.9565217391304348, 0.9361702127659575, 0.8043478260869565, 0.94, 0.99, 0.935064935064935, 0.976,
         0.6838235294117647, 0.9753914988814317, 0.9451219512195121, 0.9451219512195121, 0.9329268292682927,
         0.9512195121951219, 0.9634146341463414, 0.926829268292683],
        (92.2, 93.3, 88.6, 91.1, 96.0),
    ),
    "LxzGordon/URM-LLaMa-3.1-8B": (
        [0.95, 0.9368421052631579, 0.9473684210526315, 1.0, 1.0, 0.8648648648648649, 0.93, 0.8656716417910447,
         0.9456521739130435, 0.7872340425531915, 0.8043478260869565, 0.92, 0.98, 0.9545454545454546, 0.944,
         0.7426470588235294, 0.9843400447427293, 0.9451219512195121, 0.9634146341463414, 0.9512195121951219,
         0.9695121951219512, 0.9573170731707317, 0.9451219512195121],
        (92.9, 95.5, 88.2, 91.1, 97.0),
    ),
    "Skywork/Skywork-Reward-Gemma-2-27B": (
        [0.96, 0.9473684210526315, 0.9473684210526315, 1.0, 0.975, 0.8648648648648649, 0.96, 0.8955223880597015,
         0.9782608695652174, 0.9148936170212766, 0.782608695652174, 0.94, 0.99, 0.948051948051948, 0.94,
         0.7794117647058824, 0.9485458612975392, 0.9634146341463414, 0.9817073170731707, 0.9878048780487805,
         0.9695121951219512, 0.9695121951219512, 0.9634146341463414],
        (93.8, 95.8, 91.4, 91.9, 96.1),
    ),
    "Skywork/Skywork-Reward-Llama-3.1-8B": (
        [0.96, 0.9473684210526315, 0.9368421052631579, 1.0, 1.0, 0.8378378378378378, 0.9, 0.8955223880597015,
         0.9347826086956522, 0.7872340425531915, 0.7391304347826086, 0.92, 0.98, 0.9545454545454546, 0.972,
         0.6764705882352942, 0.9686800894854586, 0.9451219512195121, 0.9573170731707317, 0.9634146341463414,
         0.9695121951219512, 0.9573170731707317, 0.9390243902439024],
        (92.5, 95.8, 87.3, 90.8, 96.2),
    ),
    "nvidia/Llama-3.1-Nemotron-70B-Reward": (
        [0.98, 0.9789473684210527, 0.968421052631579, 1.0, 0.95, 0.7567567567567568, 0.95, 0.8880597014925373,
         0.8695652173913043, 0.723404255319149, 0.7608695652173914, 0.97, 0.97, 0.961038961038961, 0.956,
         0.9044117647058824, 0.9888211382113821, 0.9695121951219512, 0.9878048780487805, 0.9878048780487805,
         0.9695121951219512, 0.975609756097561, 0.9451219512195121],
        (94.1, 97.5, 85.7, 95.1, 98.1),
    ),
}  # fmt: skip


def scored(name: str, chosen: list[float], rejected: list[float], subset: str = "") -> ResponseScores:
    return ResponseScores(name, subset, chosen, rejected)


@pytest.mark.parametrize("model", PUBLISHED)
def test_sections_and_score_are_the_published_ones(model: str) -> None:
    accuracies, published = PUBLISHED[model]
    scores = section_scores(dict(zip(NAMES, accuracies, strict=True)))
    ours = [100 * scores[name] for name in ("overall", *REWARD_BENCH_SECTIONS)]  # type: ignore[operator]
    assert ours == pytest.approx(published, abs=0.0501)


def test_there_are_23_subsets_of_2985_rows_and_math_weighs_984() -> None:
    assert len(NAMES) == 23
    assert sum(REWARD_BENCH_COUNTS.values()) - 984 + 447 == 2985
    right = {name: float(name == "math-prm") for name in NAMES}
    assert section_scores(right)["Reasoning"] == pytest.approx(0.5)  # 984 / (984 + 6 * 164)


def test_prior_sets_weigh_half_and_a_missing_subset_leaves_no_score() -> None:
    accuracies = dict.fromkeys(NAMES, 0.8) | dict.fromkeys(("anthropic_helpful", "anthropic_hhh", "shp"), 0.4)
    assert section_scores(accuracies)["overall"] is None  # summarize is missing
    whole = section_scores(accuracies | {"summarize": 0.8})
    assert whole["Prior Sets"] == pytest.approx(0.5)
    assert whole["overall"] == pytest.approx((4 * 0.8 + 0.5 * 0.5) / 4.5)
    del accuracies["donotanswer"]
    assert section_scores(accuracies)["Safety"] is None


def test_a_tie_and_a_row_without_scores_are_wrong() -> None:
    assert is_right(scored("a", [1.0], [0.9])) == 1
    assert is_right(scored("a", [1.0], [1.0])) == 0
    assert is_right(scored("a", [], [])) == 0


def test_best_of_four_shares_the_credit_among_the_highest() -> None:
    assert best_of_credit(scored("a", [2.0], [1.0, 0.0, 1.9])) == 1
    assert best_of_credit(scored("a", [2.0], [2.0, 0.0, 2.0])) == pytest.approx(1 / 3)
    assert best_of_credit(scored("a", [1.0], [2.0, 0.0, 0.0])) == 0


def ties_score(folder: Path, rows: list[ResponseScores]) -> float:
    with TiedPrompts(folder / "out.json") as prompts:
        for row in rows:
            prompts.add(row)
        return prompts.score()


def test_ties_are_scored_as_published(tmp_path: Path) -> None:
    rows = [
        scored("Ties/ref:1", [3.0], [0.0, 1.0]),  # C_ref = 2
        scored("Ties/tied:1", [4.0, 3.0], [0.0]),  # C = 3, D = 1
        scored("Ties/ref:2", [1.0], [2.0]),  # C_ref = -1
        scored("Ties/tied:2", [5.0, 2.0], [1.0]),  # C = 1, D = 3
    ]
    margins = (math.tanh(2 / 1 - 1) + math.tanh(-1 / 3 - 1)) / 2
    assert ties_score(tmp_path, rows) == pytest.approx(0.3 * 0.5 + 0.3 * 1 + 0.2 * 0.5 + 0.2 * 0.5 + 0.01 * margins)
    with pytest.raises(BadInput, match="the prompt 2 of the subset Ties has only one of ref:2 and tied:2"):
        ties_score(tmp_path, rows[:3])
    with pytest.raises(BadInput, match="'Ties/other': an id of the subset Ties must be ref:N or tied:N"):
        ties_score(tmp_path, [scored("Ties/other", [1.0], [0.0])])


def test_rm_bench_is_hard_where_the_wrong_response_is_the_richer_one() -> None:
    # richer style scores one more per step; the right response half a point more
    row = scored("a", [0.5, 1.5, 2.5], [0.0, 1.0, 2.0])
    table = style_cells(row)
    assert not style_cells(scored("b", [], [])).any()
    with pytest.raises(BadInput, match="'c' has 1 chosen and 1 rejected responses, and rm_bench has three styles"):
        style_cells(scored("c", [1.0], [0.0]))
    assert np.array_equal(table, [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert style_scores(table) == pytest.approx({"easy": 1.0, "normal": 1.0, "hard": 0.0, "score": 6 / 9})
    scores = {"chat": 0.8, "math": 0.6, "code": 0.4, "safety-refuse": 1.0, "safety-response": 0.0}
    assert domain_score(scores) == pytest.approx((0.8 + 0.6 + 0.4 + 0.5) / 4)
    assert domain_score({"chat": 1.0}) is None
