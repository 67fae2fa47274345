"""VinePPO's trees: the published settings, by hand, on tables of solutions."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from espalier.data.records import BadInput
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig
from espalier.search.budget import Budget
from espalier.search.methods.siblings import HighLowSiblings, UnlikeSiblings
from espalier.search.methods.tree_inference import TreeInference
from espalier.search.scorers.random_scorer import RandomScorer
from tests.support.search_cases import TableSampler, searched

Make = Callable[..., TableSampler]


def published(name: str) -> Any:
    """The method of a config of conf/search/."""
    config = compose_config(SampleConfig, "api/vllm/search", ["policy=p", "output=o", f"search={name}"])
    return build(config.search).method


def first_requests(table: TableSampler) -> list[int]:
    """The numbers of samples that were asked for behind the prompt alone."""
    return [params.n for ids, params in table.requests if not table.response_of(ids)]


def test_the_tree_of_the_published_episodes_has_branch_factor_three_and_depth_five(sampler: Make) -> None:
    table = sampler({"a\nb\nc\nd\ne\nf\ng\n# 1": 1.0})  # every child is the same node: one request of 3 per depth
    tree, found, _ = searched(table, published("tree_episodes"), RandomScorer())
    assert [params.n for _, params in table.requests] == [3, 3, 3, 3, 3]
    assert [(node.text, node.draws, node.visits) for node in tree.nodes[1:]] == [
        ("a\n", 3, 3), ("b\n", 3, 3), ("c\n", 3, 3), ("d\n", 3, 3), ("e\n", 3, 3)]  # fmt: skip
    assert max(node.depth for node in tree.nodes) == 5
    assert not tree.finished()
    assert not any(node.completions for node in tree.nodes), "no response ended: nothing is known of any state"
    assert not found.is_cut


def test_every_state_of_the_published_episodes_has_three_samples_and_none_behind_five_steps(sampler: Make) -> None:
    table = sampler({"".join(f"{one}\n" for one in way) + "# 1": 1 / 729 for way in product("abc", repeat=6)})
    tree, _, _ = searched(table, published("tree_episodes"), RandomScorer())
    assert all(sum(child.draws for child in node.children) == 3 * (node.depth < 5) for node in tree.nodes)
    assert len(table.requests) == sum(node.depth < 5 for node in tree.nodes)


def test_three_children_to_depth_six_then_one(sampler: Make) -> None:
    table = sampler({"a\nb\nc\nd\ne\nf\ng\nh\n# 1": 1.0})
    tree, found, _ = searched(table, published("tree_inference"), RandomScorer())
    assert [params.n for _, params in table.requests] == [3] * 6 + [1] * 3
    assert found.chosen.response() == "a\nb\nc\nd\ne\nf\ng\nh\n# 1"
    # 3^6 leaves as trees count them; each state has one response per sample that was drawn from it
    assert [len(node.completions) for node in tree.nodes] == [3] * 6 + [1] * 3 + [0]


def test_a_published_fish_bone_draws_one_step_and_three_responses_from_every_state(sampler: Make) -> None:
    table = sampler({"a\nb\n# 1": 1.0})
    searched(table, published("fish_bone"), RandomScorer())
    assert [params.n for _, params in table.requests] == [1, 3, 1, 3, 1, 3]


def test_behind_the_branching_depth_responses_are_drawn_whole(sampler: Make) -> None:
    table = sampler({"a\nb\nc\n# 1": 1.0})
    searched(table, TreeInference(((0, 2),), branching_depth=2), RandomScorer())
    assert [(params.n, "\n" in params.stop) for _, params in table.requests] == [(2, True), (2, True), (2, False)]


def test_the_first_tokens_of_every_child_are_drawn_at_the_high_temperature(sampler: Make) -> None:
    table = sampler({"abcabcabcabcabc\n# 1": 1.0})
    method = published("tree_high_low")
    assert method.siblings == HighLowSiblings(10, 1.3, 0.9)
    tree, _, _ = searched(table, method, RandomScorer())
    step = len(table.encode("abcabcabcabcabc\n"))
    assert step > 10
    asked = [(params.n, params.temperature, params.max_tokens) for _, params in table.requests]
    assert asked[0] == (3, 1.3, 10)
    assert asked[1][:2] == (3, 0.9), "what is left of the children, who are equal so far"
    assert asked[2][:2] == (3, 1.3), "and so at the next depth"
    assert [node.text for node in tree.nodes[1:]] == ["abcabcabcabcabc\n", "# 1"]
    assert tree.num_tokens == 3 * len(table.encode("abcabcabcabcabc\n# 1")) + 3
    assert not any(node.completions for node in tree.nodes), "these are no samples of the policy"


def test_whole_responses_too_begin_at_the_high_temperature(sampler: Make) -> None:
    table = sampler({"abcabcabcabcabc\nb\n# 1": 1.0})
    method = TreeInference(((0, 2),), branching_depth=1, siblings=HighLowSiblings(3, 1.5, 0.5))
    tree, found, _ = searched(table, method, RandomScorer())
    asked = [(params.n, params.temperature) for _, params in table.requests]
    assert asked[:3] == [(2, 1.5), (2, 0.5), (2, 1.5)], "two equal children, then how their responses begin"
    assert {temperature for _, temperature in asked[3:]} == {0.5}
    assert found.chosen.response() == "abcabcabcabcabc\nb\n# 1"
    assert not any(node.completions for node in tree.nodes)


def test_children_that_are_like_those_that_are_kept_are_drawn_anew(sampler: Make) -> None:
    table = sampler({"a b\n# 1": 0.9, "c d\n# 2": 0.1}, seed=1)
    method = TreeInference(((0, 2), (1, 1)), siblings=UnlikeSiblings(0.5, 200))
    tree, _, _ = searched(table, method, RandomScorer())
    first = [node for node in tree.nodes if node.depth == 1]
    assert sorted((node.text, node.visits) for node in first) == [("a b\n", 1), ("c d\n", 1)]
    assert sum(node.draws for node in first) == sum(first_requests(table))
    assert sum(node.draws for node in first) > 2, "this table draws the same step first"
    assert not any(node.completions for node in tree.nodes), "a choice among samples is no sample"


def test_the_last_round_keeps_whatever_it_draws(sampler: Make) -> None:
    table = sampler({"a b\n# 1": 1.0})
    method = TreeInference(((0, 3), (1, 1)), siblings=UnlikeSiblings(0.5, 4))
    tree, _, _ = searched(table, method, RandomScorer())
    # one is kept at once; two are like it in rounds 1 to 3, and stay in round 4
    assert first_requests(table) == [3, 2, 2, 2]
    assert [(node.text, node.draws, node.visits) for node in tree.nodes[1:2]] == [("a b\n", 9, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_only_children_that_were_kept_have_a_vote(sampler: Make, seed: int) -> None:
    # behind "a" two like answers are kept, after 20 rounds that draw 21; behind each of the other three two unlike ones
    table = {"a\n# 1": 1.0, "b\n# 2": 0.5, "b\nx y # 3": 0.5, "c\n# 2": 0.5, "c\nx y # 4": 0.5,
             "d\n# 2": 0.5, "d\nx y # 5": 0.5}  # fmt: skip
    method = TreeInference(((0, 4), (1, 2)), siblings=UnlikeSiblings(0.5, 20))
    tree, found, _ = searched(sampler({text: share / 4 for text, share in table.items()}, seed=seed), method,
                              RandomScorer())  # fmt: skip
    first = next(node for node in tree.finished() if node.answered().answer == "1")
    assert (first.visits, first.draws) == (2, 21)
    assert found.chosen.answered().answer == "2", "three votes against two"


def test_a_search_for_unlike_children_that_the_budget_cut_votes_with_what_it_kept(sampler: Make) -> None:
    method = TreeInference(((0, 3),), siblings=UnlikeSiblings(0.5, 1000))
    tree, found, _ = searched(sampler({"# 1": 1.0}), method, RandomScorer(), budget=Budget(tokens=40))
    assert found.is_cut
    assert found.chosen.answered().answer == "1"
    assert [node.visits for node in tree.finished()] == [1]


def test_whole_responses_that_are_drawn_until_they_differ_value_no_state(sampler: Make) -> None:
    method = TreeInference(((0, 2),), branching_depth=1, siblings=UnlikeSiblings(0.5, 5))
    tree, _, _ = searched(sampler({"a b\nc d\n# 1": 0.5, "a b\ne f\n# 2": 0.5}), method, RandomScorer())
    assert tree.finished()
    assert not any(node.completions for node in tree.nodes)


def test_the_published_bleu_expander_is_composed() -> None:
    assert published("tree_unlike") == TreeInference([[0, 3], [6, 1]], siblings=UnlikeSiblings(0.5, 20))


def test_a_budget_ends_a_search_for_unlike_children(sampler: Make) -> None:
    method = TreeInference(((0, 3),), siblings=UnlikeSiblings(0.0, 1000))
    tree, found, _ = searched(sampler({"a b\n# 1": 1.0}), method, RandomScorer(), budget=Budget(tokens=40))
    assert found.is_cut
    assert tree.num_tokens < 60


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: UnlikeSiblings(1.0), "siblings.largest_bleu"),
        (lambda: UnlikeSiblings(0.5, 0), "siblings.rounds"),
        (lambda: HighLowSiblings(0), "siblings.tokens"),
        (lambda: TreeInference(max_depth=-1), "max_depth"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(BadInput, match=f"search.method.{name}"):
        make()
