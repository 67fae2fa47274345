"""Which search for a budget: by hand, and that chance is recommended as seldom as promised."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Trajectory
from espalier.pipeline.evaluation.recommend_search import (
    RecommendSearch,
    SearchFigures,
    bins_of,
    read_search,
    recommend,
)
from espalier.pipeline.stage import StageContext
from espalier.rewards.composed import ComposedReward
from espalier.rewards.length import LengthPenalty
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.verifiers import VerifierReward
from espalier.search.client import name_of
from espalier.search.scorers.completions_scorer import CompletionsScorer
from espalier.search.scorers.reward_scorer import RewardScorer
from tests.support.search_trees import TREE, changed

PROBLEMS = [f"p{number}" for number in range(40)]


def figures(rights: Sequence[float], cost: float) -> SearchFigures:
    spent = dict.fromkeys(PROBLEMS, cost)
    return SearchFigures(dict(zip(PROBLEMS, rights, strict=True)), {"tokens": spent, "scores": spent, "seconds": spent})


def save(path: Path, rights: Sequence[bool], tokens: int) -> str:
    trees = [
        changed(id=f"{problem}/0", problem_id=problem, chosen=3 if right else 4, num_tokens=tokens)
        for problem, right in zip(PROBLEMS, rights, strict=False)
    ]
    write_records(path, trees)
    return str(path)


def samples(path: Path, rights: dict[str, Sequence[bool]]) -> str:
    rows = [
        Trajectory(f"{problem}/{k}", problem, "Q", "x", ["x"], [1], [2], [1], "stop", "7", None, right)
        for problem, outcomes in rights.items()
        for k, right in enumerate(outcomes)
    ]
    write_records(path, rows)
    return str(path)


def test_a_search_that_is_better_beyond_doubt_is_recommended_where_it_fits() -> None:
    searches = {"beam_4": figures([1.0] * 30 + [0.0] * 10, 400), "best_of_4": figures([1.0] * 10 + [0.0] * 30, 200)}
    wide = recommend(searches, "all", PROBLEMS, "tokens", 500, 30)
    assert (wide.recommended, wide.alike) == ("beam_4", ["beam_4"])
    narrow = recommend(searches, "all", PROBLEMS, "tokens", 399, 30)
    assert narrow.recommended == "best_of_4"
    assert "compared with nothing" in narrow.why
    assert recommend(searches, "all", PROBLEMS, "tokens", 100, 30).why == "no search fits the budget"


def test_nothing_is_recommended_where_a_difference_could_be_chance_and_the_cheapest_is_named() -> None:
    one, other = [1.0] * 21 + [0.0] * 19, [0.0] * 1 + [1.0] * 19 + [0.0] * 20
    searches = {"wide": figures(one, 400), "narrow": figures(other, 200)}
    found = recommend(searches, "all", PROBLEMS, "tokens", 500, 30)
    assert found.recommended is None
    assert found.alike == ["narrow", "wide"]
    assert "cannot be told apart" in found.why
    assert found.why.endswith("the cheapest of them is narrow")


def test_pairs_of_one_problem_are_compared_so_that_a_small_steady_gain_is_seen() -> None:
    rng = random.Random(0)
    base = [rng.random() for _ in PROBLEMS]
    searches = {"a": figures([value + 0.05 for value in base], 10), "b": figures(base, 10)}
    assert recommend(searches, "all", PROBLEMS, "tokens", 10, 30).recommended == "a"


def test_few_problems_recommend_nothing() -> None:
    searches = {"a": figures([1.0] * 40, 10), "b": figures([0.0] * 40, 10)}
    found = recommend(searches, "hard", PROBLEMS[:29], "tokens", 10, 30)
    assert (found.recommended, found.why) == (None, "29 problems are too few (stage.min_problems=30)")


def test_searches_that_are_equally_good_are_recommended_by_chance_in_few_sets() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(60):
        searches = {name: figures([float(rng.random() < 0.5) for _ in PROBLEMS], 10) for name in ("a", "b", "c")}
        hits += recommend(searches, "all", PROBLEMS, "tokens", 10, 30).recommended is not None
    assert hits <= 6


def test_bins_are_by_the_policy_s_share_and_the_last_holds_its_end() -> None:
    shares = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 1.0, "e": 0.2}
    assert bins_of(shares, [0.25, 0.5]) == {
        "all": ["a", "b", "c", "d", "e"], "0 to 0.25": ["a", "e"], "0.25 to 0.5": ["b"], "0.5 to 1": ["c", "d"]
    }  # fmt: skip
    assert bins_of(shares, [])["0 to 1"] == ["a", "b", "c", "d", "e"]


def test_a_search_that_was_scored_by_the_gold_answer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_search("beam", [save(tmp_path / "0.jsonl", [True], 100)])
    assert "scored by the gold answer" in caplog.text
    scorers: dict[Any, bool] = {
        OutcomeReward(): True,  # scorer@search.scorer=outcome
        VerifierReward(): True,
        ComposedReward({"length": LengthPenalty(2, 9), "outcome": OutcomeReward()}): True,
        ComposedReward({"length": LengthPenalty(2, 9)}): False,
        CompletionsScorer(4): True,
        CompletionsScorer(4, agrees=True): False,
    }
    for scorer, is_ceiling in scorers.items():
        caplog.clear()
        own = scorer if isinstance(scorer, CompletionsScorer) else RewardScorer(scorer)
        write_records(tmp_path / "1.jsonl", [changed(scorer=name_of(own))])
        read_search("best_of_4", [str(tmp_path / "1.jsonl")])
        assert ("scored by the gold answer" in caplog.text) == is_ceiling


def test_runs_of_one_search_are_averaged_by_problem(tmp_path: Path) -> None:
    paths = [save(tmp_path / "0.jsonl", [True, False], 100), save(tmp_path / "1.jsonl", [True, True], 300)]
    found = read_search("beam", paths)
    assert found.accuracy == {"p0": 1.0, "p1": 0.5}
    assert found.costs["tokens"] == {"p0": 200.0, "p1": 200.0}
    assert found.costs["scores"] == {"p0": float(TREE.num_scores), "p1": float(TREE.num_scores)}


def run(tmp_path: Path, path: str, **settings: Any) -> dict[str, Any]:
    return RecommendSearch(**settings).run(path, StageContext(None, tmp_path / "out.json", 60))


def test_the_stage_recommends_by_difficulty_and_shows_what_everything_gives_and_costs(tmp_path: Path) -> None:
    beam = save(tmp_path / "beam.jsonl", [True] * 40, 400)
    vote = save(tmp_path / "vote.jsonl", [number < 20 for number in range(40)], 200)
    own = samples(tmp_path / "own.jsonl", {problem: [k < 20] * 8 for k, problem in enumerate(PROBLEMS)})
    result = run(tmp_path, own, searches={"beam": beam, "vote": [vote]}, budgets=[300, 500], edges=[0.5],
                 min_problems=20)  # fmt: skip
    assert result["difficulties"] == {"all": 40, "0 to 0.5": 20, "0.5 to 1": 20}
    said = {(one["difficulty"], one["budget"]): one["recommended"] for one in result["recommendations"]}
    assert said == {
        ("all", 300): "vote", ("all", 500): "beam",
        ("0 to 0.5", 300): "vote", ("0 to 0.5", 500): "beam",
        ("0.5 to 1", 300): "vote", ("0.5 to 1", 500): None,  # both are right everywhere
    }  # fmt: skip
    row = next(row for row in result["searches"] if (row["difficulty"], row["search"]) == ("all", "vote"))
    assert (row["accuracy"]["mean"], row["tokens"], row["seconds"]) == (0.5, 200, 2.0)
    assert "beam" in result["table"]["recommendations"]["plain"]


def test_searches_of_other_problems_and_missing_samples_are_refused(tmp_path: Path) -> None:
    beam = save(tmp_path / "beam.jsonl", [True] * 40, 400)
    fewer = save(tmp_path / "fewer.jsonl", [True] * 39, 400)
    own = samples(tmp_path / "own.jsonl", {problem: [True] for problem in PROBLEMS[:39]})
    with pytest.raises(BadInput, match="are of different problems"):
        run(tmp_path, own, searches={"a": beam, "b": fewer}, budgets=[1])
    with pytest.raises(BadInput, match="do not hold the same problems"):
        run(tmp_path, own, searches={"a": [beam, fewer]}, budgets=[1])
    with pytest.raises(BadInput, match="no sample of problem 'p39'"):
        run(tmp_path, own, searches={"a": beam}, budgets=[1])
    write_records(tmp_path / "no_gold.jsonl", [replace(TREE, gold="")])
    with pytest.raises(BadInput, match="no gold answer"):
        run(tmp_path, own, searches={"a": str(tmp_path / "no_gold.jsonl")}, budgets=[1])
    with pytest.raises(BadInput, match="must rise"):
        RecommendSearch({"a": beam}, [1], edges=[0.5, 0.25])
