"""Every method against what the whole table of solutions says."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from espalier.data.records import BadInput, parse_record
from espalier.data.search_tree import SearchTree
from espalier.sampling.client import SamplingParams
from espalier.search.budget import Budget
from espalier.search.choices import choose_solution
from espalier.search.expander import Expander, StepCuts
from espalier.search.methods.dvts import DVTS
from espalier.search.methods.lookahead import Lookahead
from espalier.search.methods.mcts import MCTS
from espalier.search.methods.omega_prm import OmegaPRM
from espalier.search.methods.particles import Particles, entropy_share, power_for, resample
from espalier.search.methods.rebase import Rebase, shares_of
from espalier.search.methods.samples import Samples
from espalier.search.methods.step_beam import StepBeam
from espalier.search.methods.tree_inference import TreeInference, factor_at
from espalier.search.scorers.completions_scorer import CompletionsScorer
from espalier.search.scorers.random_scorer import RandomScorer
from espalier.search.tree import Node, Tree
from tests.support.search_cases import TableSampler, TableScorer, searched

Make = Callable[..., TableSampler]

# How many samples each has under way at once, at most.
METHODS = {
    Samples(8): 8,
    Samples(8, "vote"): 8,
    Samples(8, "weighted_vote"): 8,
    StepBeam(2, 3): 6,
    DVTS(3, 2): 6,
    Lookahead(2, 2, 2): 4,
    Rebase(6): 6,
    Particles(6): 6,
    Particles(6, entropy_floor=0.8): 6,
    Particles(6, weights="increments"): 6,
    MCTS(12, 3): 3,
    MCTS(12, 3, selection="uct", rollouts=2): 6,
    OmegaPRM(3, 4): 4,
    TreeInference(((0, 3), (2, 1))): 9,
    TreeInference(((0, 2),), branching_depth=1): 4,
    TreeInference(((0, 3),), spine=True): 3,
}


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_method_answers_with_a_solution_of_the_table_and_its_tree_is_a_record(method: Any, sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, method, TableScorer(table, "1"))
    assert not found.is_cut
    for leaf in tree.finished():
        assert tuple(leaf.response_ids()) in table.table
    assert found.chosen.ending == "stop"
    row = tree.record(found.chosen, "m", "s", found.is_cut, found.seconds)
    again = parse_record(SearchTree, vars(row), "row")
    assert again == row
    for node, way in ((node, row.way(node.number)) for node in tree.nodes):
        assert [token for one in way for token in row.step_ids[one]] == node.response_ids()
        assert table.decode([one for one in node.response_ids() if one != table.end]) == node.response()
    for node, children in enumerate(row.children()):
        assert len({tuple(row.step_ids[child]) for child in children}) == len(children)
        assert all(row.tokens_so_far[node] <= row.tokens_so_far[child] for child in children)


def test_width_one_of_one_greedy_sample_is_greedy_decoding_token_for_token(sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, StepBeam(1, 1), RandomScorer(), temperature=0.0)
    whole = table.draw((), SamplingParams(1, 0.0, 64))
    assert found.chosen.response_ids() == whole.token_ids
    assert [node.text for node in found.chosen.way()] == ["a\n", "b\n", "# 1"]
    assert tree.num_tokens == len(whole.token_ids)


@pytest.mark.parametrize("gold", ["1", "2", "3"])
def test_a_beam_with_the_exact_scorer_takes_the_way_that_brute_force_does(gold: str, sampler: Make) -> None:
    table = sampler(seed=3)
    _, found, _ = searched(table, StepBeam(1, 200), TableScorer(table, gold), gold=gold)
    # over all solutions: the first lines, then the lines behind the best of them, and so forth, by their true values
    lines = [(text.splitlines(keepends=True), text) for text in table.solutions]
    way: list[str] = []
    while "".join(way) not in table.solutions:
        behind = dict.fromkeys(row[len(way)] for row, _ in lines if row[: len(way)] == way)

        def value(line: str) -> float:
            texts = [text for row, text in lines if row[: len(way) + 1] == [*way, line]]
            right = [table.solutions[text] for text in texts if text.endswith(f"# {gold}")]
            return math.fsum(right) / math.fsum(table.solutions[text] for text in texts)

        way.append(max(behind, key=value))
    assert found.chosen.response() == "".join(way)
    assert found.chosen.answered().is_correct


def test_a_beam_gets_narrower_as_its_solutions_end(sampler: Make) -> None:
    table = sampler({"# 1": 0.5, "a\n# 2": 0.25, "b\nc\n# 1": 0.25})
    _, _, expander = searched(table, StepBeam(3, 20), TableScorer(table, "1"))
    # 60 from the prompt; two states go on, 20 each; one goes on
    assert [params.n for _, params in table.requests] == [60, 20, 20, 20]
    assert expander.num_requests == 4


def test_a_beam_wider_than_its_siblings_keeps_all_of_them(sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, StepBeam(50, 1), RandomScorer())
    assert all(node.visits for node in tree.nodes[1:])
    assert found.chosen.ending == "stop"


def test_subtrees_choose_among_their_own_samples_alone(sampler: Make) -> None:
    tree, _, _ = searched(sampler(), Samples(1), RandomScorer())
    tree = Tree(tree.problem, "", [1], tree.grade)
    growth = DVTS(subtrees=2, siblings=2).grow(tree)
    (draw,) = growth.send(None).draws
    assert (draw.node, draw.n) == (tree.root, 4)
    nodes = [tree.add(tree.root, [k], "x\n", "", "", []) for k in range(4)]
    for node, score in zip(nodes, (0.9, 0.8, 0.2, 0.1), strict=True):
        node.score = score
    assert growth.send([nodes]).nodes == nodes
    asked = growth.send([0.9, 0.8, 0.2, 0.1]).draws
    # the second subtree goes on from its own best, though the first one's second is better
    assert [(one.node, one.n) for one in asked] == [(nodes[0], 2), (nodes[2], 2)]


def test_two_subtrees_in_one_state_ask_once_and_their_samples_are_dealt(sampler: Make) -> None:
    table = sampler({"a\n# 1": 0.5, "a\n# 2": 0.5})
    tree, _, _ = searched(table, DVTS(subtrees=3, siblings=2), TableScorer(table, "1"))
    assert [params.n for _, params in table.requests] == [6, 6]
    assert sum(node.draws for node in tree.finished()) == 6


@pytest.mark.parametrize("selection", ["uct", "puct"])
def test_values_of_the_tree_search_converge_to_the_best_outcome_of_the_table(selection: str, sampler: Make) -> None:
    table = sampler()
    gaps = []
    for simulations in (10, 100, 2000):
        method = MCTS(simulations, 60, selection=selection, exploration=0.3)
        tree, found, _ = searched(table, method, TableScorer(table, "1"))
        assert tree.root.value is not None
        gaps.append(1.0 - tree.root.value)
        assert found.chosen.response() in ("a\nb\n# 1", "d\nd\n# 1")
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.05


def test_values_by_rollouts_are_the_oracles_within_their_error(sampler: Make) -> None:
    table = sampler(seed=5)

    class Outcome(TableScorer):
        async def score(self, nodes: Any, expander: Any) -> list[float]:
            return [float(node.answered().is_correct) for node in nodes]

    rollouts = 400
    tree, _, _ = searched(table, OmegaPRM(walks=6, rollouts=rollouts), Outcome(table, "1"))
    valued = [node for node in tree.nodes if node.value is not None]
    assert len(valued) >= 4
    for node in valued:
        truth = table.value(tuple(node.response_ids()), "1")
        assert node.value == pytest.approx(truth, abs=4 * math.sqrt(truth * (1 - truth) / rollouts) + 1e-9)


def test_bisection_finds_the_state_behind_which_nothing_is_right(sampler: Make) -> None:
    table = sampler({"a\nb\nc\nd\n# 1": 0.5, "a\nb\nx\nd\n# 2": 0.5})

    class Outcome(TableScorer):
        async def score(self, nodes: Any, expander: Any) -> list[float]:
            return [float(node.answered().is_correct) for node in nodes]

    tree, _, _ = searched(table, OmegaPRM(walks=1, rollouts=40), Outcome(table, "1"))
    values = {node.response(): node.value for node in tree.nodes if node.value is not None}
    assert values["a\nb\nx\n"] == 0.0  # the first wrong step
    assert 0 < values["a\nb\n"] < 1
    assert "a\nb\nx\nd\n" not in values  # behind it nothing is asked


def _mean_of_scores(table: TableSampler, gold: str) -> float:
    """Sum of p(x) r(x) over the table, r(x) the score of the whole solution, as the filter's potentials are bounded."""
    return math.fsum(share * min(max(table.value(ids, gold), 1e-6), 1 - 1e-6) for ids, share in table.table.items())


@pytest.mark.parametrize("floor", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_the_filter_estimates_the_mean_score_without_bias(floor: float, sampler: Make) -> None:
    table = sampler(seed=1)
    scorer = TableScorer(table, "1")
    estimates = []
    for seed in range(400):
        method = Particles(4, weights="increments", entropy_floor=floor, seed=seed)
        tree, _, _ = searched(table, method, scorer)
        estimates.append(tree.root.value or 0.0)
    truth = _mean_of_scores(table, "1")  # by hand: 0.35, the share of right solutions
    assert truth == pytest.approx(0.35, abs=1e-5)
    mean = math.fsum(estimates) / len(estimates)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in estimates) / len(estimates) ** 2)
    assert abs(mean - truth) < 4 * error + 1e-6
    assert error < 0.02
    tree, _, _ = searched(table, Particles(4, weights="increments", temperature=0.5), scorer)
    assert tree.root.value is None, "it would be of the squared scores"


@pytest.mark.parametrize("weights", ["odds", "increments"])
@pytest.mark.parametrize("floor", [0.0, 0.8])
def test_a_filter_of_the_lowest_temperature_follows_the_best_score_alone(
    weights: str, floor: float, sampler: Make
) -> None:
    """Odds of 1e-6 to the power 1000 are no number a computer holds, nor is their inverse."""
    table = sampler(seed=2)
    method = Particles(32, weights, temperature=0.001, entropy_floor=floor, floor_steps=1)
    tree, found, _ = searched(table, method, TableScorer(table, "1"))
    assert found.chosen.answered().is_correct
    assert all(leaf.answered().is_correct for leaf in tree.finished() if leaf.visits)


def test_a_filter_whose_scores_are_all_0_keeps_its_particles(sampler: Make) -> None:
    table = sampler(seed=2)
    tree, _, _ = searched(table, Particles(32, temperature=0.001), TableScorer(table, "nobody's answer"))
    assert len({leaf for leaf in tree.finished() if leaf.visits}) > 2


def test_resampling_gives_every_particle_its_share_on_average() -> None:
    weights = [0.1, 2.0, 0.0, 0.7, 1.2]
    starts = [(k + 0.5) / 4000 for k in range(4000)]
    counts = [0] * 5
    for start in starts:
        for place in resample(weights, start):
            counts[place] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert count / 4000 == pytest.approx(5 * weight / 4.0, abs=2e-3)


def test_the_power_keeps_the_entropy_at_its_floor() -> None:
    weights = [1.0, 1e-3, 1e-5, 1e-2]
    power = power_for(weights, 0.8)
    assert entropy_share([weight**power for weight in weights]) == pytest.approx(0.8, abs=1e-6)
    assert power_for([1.0, 1.0], 0.9) == 1.0


def test_samples_are_dealt_by_softmax_and_add_up() -> None:
    # e^(0.2 / 0.2) = 2.718 to 1: of 10 samples 7.31 and 2.69
    assert shares_of([0.8, 0.6], [1, 1], 10, 0.2) == [7, 3]
    assert shares_of([0.5, 0.5], [3, 1], 8, 0.2) == [6, 2]
    assert sum(shares_of([0.1, 0.9, 0.3], [1, 1, 1], 17, 0.5)) == 17


def test_samples_that_value_a_state_are_none_of_those_that_are_dealt_out(sampler: Make) -> None:
    """Completions of a state share nodes with the samples that are dealt to it later."""
    for seed in range(3):
        tree, _, _ = searched(sampler(seed=seed), Rebase(16), CompletionsScorer(4))
        assert sum(leaf.visits for leaf in tree.finished()) == 16


def test_branch_factors_are_piecewise_constant_in_the_depth(sampler: Make) -> None:
    assert [factor_at(depth, ((0, 3), (2, 2), (5, 1))) for depth in range(7)] == [3, 3, 2, 2, 2, 1, 1]
    table = sampler({"a\nb\nc\n# 1": 1.0})
    searched(table, TreeInference(((0, 3), (2, 1))), RandomScorer())
    assert [params.n for _, params in table.requests] == [3, 3, 1, 1]


def test_looking_ahead_zero_steps_is_beam_search(sampler: Make) -> None:
    one, other = sampler(seed=2), sampler(seed=2)
    beam = searched(one, StepBeam(2, 3), TableScorer(one, "1"))[0]
    ahead = searched(other, Lookahead(2, 3, 0), TableScorer(other, "1"))[0]
    assert [(node.response(), node.score, node.visits) for node in beam.nodes] == [
        (node.response(), node.score, node.visits) for node in ahead.nodes
    ]


def test_a_step_is_worth_what_the_greedy_steps_behind_it_lead_to(sampler: Make) -> None:
    table = sampler()
    tree, _, _ = searched(table, Lookahead(1, 40, 2), TableScorer(table, "1"))
    values = {node.response(): node.value for node in tree.root.children if node.value is not None}
    assert values == {"a\n": 1.0, "d\n": 0.0, "e\n": 0.0}  # greedily a b 1, d 3, e b f (which is worth 0)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 20, 45])
def test_a_budget_is_exceeded_by_a_step_per_beam_at_most(method: Any, tokens: int, sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, method, TableScorer(table, "1"), budget=Budget(tokens=tokens))
    longest = max(len(table.encode(line)) + 1 for text in table.solutions for line in text.splitlines(True))
    assert tree.num_tokens < tokens + longest * METHODS[method]
    assert found.chosen in tree.nodes
    if tokens == 1:
        assert found.is_cut
        assert len(table.requests) <= 1


def test_no_score_is_asked_beyond_the_budget(sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, StepBeam(2, 10), TableScorer(table, "1"), budget=Budget(scores=4))
    assert found.is_cut
    assert tree.num_scores == 4
    assert sum(node.score is not None for node in tree.nodes) == 4


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_search_that_has_spent_its_seconds_is_cut_with_the_best_so_far(method: Any, sampler: Make) -> None:
    table = sampler(seconds=0.04)
    tree, found, _ = searched(table, method, TableScorer(table, "1"), budget=Budget(seconds=0.05))
    whole, done, _ = searched(sampler(), method, TableScorer(table, "1"), budget=Budget(seconds=60))
    assert not done.is_cut
    assert whole.num_tokens > tree.num_tokens or not found.is_cut
    if found.is_cut:  # the requests that were under way ended, and no others were asked
        assert 0.05 <= found.seconds < 0.05 + 2 * 0.04 + 0.3
        assert found.chosen in tree.nodes
        assert len(tree.nodes) > 1


def test_a_limit_of_seconds_below_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"search\.budget\.seconds must be at least 0 \(0: no limit\), got -1"):
        Budget(seconds=-1)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Lookahead(steps=-1), "method.steps"),
        (lambda: Lookahead(temperature=-0.5), "method.temperature"),
        (lambda: MCTS(rollouts=-1), "method.rollouts"),
        (lambda: StepCuts("\n", -1), "cuts.step_tokens"),
        (lambda: CompletionsScorer(0), "scorer.number"),
    ],
    ids=["steps", "temperature", "rollouts", "step_tokens", "number"],
)
def test_a_setting_below_its_least_is_refused_by_its_name(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(BadInput, match=rf"search\.{name} must be at least [01]"):
        make()


def test_what_a_budget_cuts_off_is_answered_with_the_best_open_state(sampler: Make) -> None:
    table = sampler()
    tree, found, _ = searched(table, StepBeam(2, 10), TableScorer(table, "1"), budget=Budget(tokens=25))
    assert found.is_cut
    assert not found.chosen.is_finished
    best = max(node.rank() for node in tree.nodes if node.score is not None)
    assert found.chosen.rank() == best
    assert tree.trajectory(found.chosen).finish_reason == "length"
    assert not tree.trajectory(found.chosen).is_correct


def test_majority_and_weighted_vote_choose_by_the_samples_of_an_answer(sampler: Make) -> None:
    tree, _, _ = searched(sampler(), Samples(1), RandomScorer())
    tree = Tree(tree.problem, "", [1], tree.grade)

    def leaf(ids: list[int], text: str, score: float, draws: int) -> Node:
        node = tree.add(tree.root, ids, text, "stop", "", [])
        node.score, node.draws = score, draws
        return node

    one = leaf([2], "# 1", 0.9, 1)
    leaf([3], "# 2", 0.3, 2)
    two = leaf([4], "so # 2", 0.35, 1)
    assert Samples(4, "best").choose(tree) is one
    assert Samples(4, "vote").choose(tree) is two  # three samples say 2; the best of them
    assert Samples(4, "weighted_vote").choose(tree) is two  # 2 * 0.3 + 0.35 > 0.9
    one.score = 0.96
    assert Samples(4, "weighted_vote").choose(tree) is one


def scored(sampler: Make, aggregate: str, scores: dict[str, float]) -> Tree:
    """A tree of whole solutions with these scores; "# 1" was drawn three times."""
    tree, _, _ = searched(sampler({"# 1": 1.0}), Samples(1, "vote"), RandomScorer())
    tree.aggregate = aggregate
    tree.root.children.clear()
    del tree.nodes[1:]
    for number, (text, score) in enumerate(scores.items()):
        for _ in range(3 if text == "# 1" else 1):
            tree.add(tree.root, [number], text, "stop", "", []).score = score
    return tree


def test_a_vote_weighted_by_log_odds_counts_shares_so_that_more_samples_never_count_against_an_answer(
    sampler: Make,
) -> None:
    tree = scored(sampler, "log_odds", {"# 1": 0.4, "# 2": 0.45})  # 3 * 0.4 against 0.45
    assert choose_solution(tree, "weighted_vote").response() == "# 1"


def test_scores_below_0_weigh_no_votes(sampler: Make) -> None:
    tree = scored(sampler, "last", {"# 1": -1.0, "# 2": -2.5})
    assert choose_solution(tree, "best").response() == "# 1"
    with pytest.raises(BadInput, match="form=probability"):
        choose_solution(tree, "weighted_vote")


@pytest.mark.parametrize("method", [Particles(4), OmegaPRM(1, 4)], ids=str)
def test_scores_that_are_no_shares_are_refused_where_shares_are_read(method: Any, sampler: Make) -> None:
    class Thrice(RandomScorer):
        async def score(self, nodes: Any, expander: Any) -> list[float]:
            return [3.0 + score for score in await super().score(nodes, expander)]

    with pytest.raises(BadInput, match=r"reads shares in \[0, 1\]"):
        searched(sampler(), method, Thrice())


def test_answers_of_log_odds_are_right_from_one_half_on(sampler: Make) -> None:
    class Even(RandomScorer):
        aggregate = "log_odds"

        async def score(self, nodes: Any, expander: Any) -> list[float]:
            return [0.55 for _ in nodes]  # log-odds 0.2, which is no 0.5

    tree, _, _ = searched(sampler({"# 1": 1.0}), OmegaPRM(1, 4), Even())
    assert tree.root.value == 1.0


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_ends_a_search_at_its_node(score: float, sampler: Make) -> None:
    class Damaged(TableScorer):
        async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
            return [score for _ in nodes]

    table = sampler()
    with pytest.raises(
        BadInput, match=f"node 1 of problem 'p' the score {score}: the weights of its model are damaged"
    ):
        searched(table, StepBeam(2, 2), Damaged(table, "1"))
