"""What a searched tree says of the policy: by hand, and against the whole table of a policy's solutions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.process_data.formats import read_labelled, step_format
from espalier.data.records import BadInput, Problem, StepValues, Trajectory
from espalier.data.search_tree import SearchTree
from espalier.pipeline.pairs.pair_siblings import SiblingPreferences
from espalier.pipeline.prm.export_trees import ExportTrees
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.list_responses import ListResponses
from espalier.pipeline.values.value_trees import ValueTrees
from espalier.search.budget import Budget
from espalier.search.methods.omega_prm import OmegaPRM
from espalier.search.methods.samples import Samples
from espalier.search.methods.siblings import HighLowSiblings
from espalier.search.methods.step_beam import StepBeam
from espalier.search.methods.tree_inference import TreeInference
from espalier.search.scorers.completions_scorer import CompletionsScorer
from espalier.search.scorers.random_scorer import RandomScorer
from espalier.values.tree_values import completion_counts, response_nodes, tree_response, tree_step_values
from tests.support.search_cases import SOLUTIONS, TableSampler, TableScorer, searched
from tests.support.search_trees import TREE, changed
from tests.support.slow import slow_unless

# The chance of the answer 1 of each state of the table, by its text.
TRUE = {"": 0.35, "a\n": 0.6, "d\n": 0.125, "e\n": 0.0}


def context(tmp_path: Path) -> StageContext:
    return StageContext(None, tmp_path / "out.jsonl", 60)


def saved(tmp_path: Path, trees: Sequence[SearchTree]) -> str:
    write_records(tmp_path / "s.trees.jsonl", trees)
    return str(tmp_path / "s.trees.jsonl")


def test_values_are_shares_of_completions_and_a_pruned_state_without_any_has_none() -> None:
    assert [(one.num_correct, one.num_completions) for one in completion_counts(TREE)][:3] == [(0, 0), (1, 4), (3, 4)]
    first, second, third, *others = tree_step_values(TREE)
    assert (first.id, first.values, first.labels) == ("p/3", [0.25, 1.0], [0.25, 1.0])
    # the second response passes through the same state: its value stands there, its label does not
    assert (second.values, second.labels, second.weights) == ([0.25, 0.0], [None, 0.0], [0.0, 1.0])
    assert (third.id, third.values, third.num_completions) == ("p/6", [0.75, 1.0], [4, 1])
    assert third.prompt_value is None  # nothing was drawn whole from the prompt: not the share of the tree's leaves
    assert [row.id for row in others] == ["p/7"]
    without = changed(completions=[])
    assert [row.values for row in tree_step_values(without)][:2] == [[None, 1.0], [None, 0.0]]


def test_responses_are_the_sampler_s_tokens_and_an_end_token_belongs_to_the_last_step() -> None:
    row = tree_response(TREE, 7)
    assert (row.steps, row.response_ids, row.step_ends) == (["c\n"], [3, 99], [2])
    row = tree_response(TREE, 4)
    assert (row.response, row.response_ids, row.step_ends) == ("a\n# 8", [1, 2, 6, 7, 8], [2, 5])
    assert (row.answer, row.is_correct, row.prompt_ids) == ("8", False, [90, 91])


def test_a_tree_s_responses_are_those_of_the_search_itself(sampler: Callable[..., TableSampler]) -> None:
    table = sampler()
    tree, found, _ = searched(table, TreeInference(((0, 3),)), RandomScorer())
    row = tree.record(found.chosen, "m", "s", False, 0.0)
    assert [tree_response(row, node) for node in response_nodes(row)] == [
        tree.trajectory(node) for node in tree.finished()
    ]


def pooled(rows: Sequence[SearchTree], table: TableSampler) -> dict[str, tuple[int, int]]:
    """Right and all completions of each state, by its text."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        for node, count in enumerate(completion_counts(row)):
            text = "".join(row.steps[one] for one in row.way(node))
            right, number = found.get(text, (0, 0))
            found[text] = right + count.num_correct, number + count.num_completions
    return found


METHODS: list[tuple[Any, Any]] = [
    (OmegaPRM(3, 6), "table"),
    (StepBeam(1, 3), CompletionsScorer(6)),
    (TreeInference(((0, 3), (1, 2))), "table"),
    (TreeInference(((0, 2),), spine=True), "table"),
    (Samples(6), "table"),
]


@pytest.mark.parametrize(
    ("method", "scorer"),
    slow_unless(lambda case: isinstance(case[0], OmegaPRM | Samples), METHODS),
    ids=lambda one: type(one).__name__,
)
def test_completions_of_every_method_estimate_the_policy_without_bias(
    method: Any, scorer: Any, sampler: Callable[..., TableSampler]
) -> None:
    rows = []
    for seed in range(250):
        table = sampler(seed=seed)
        tree, found, _ = searched(table, method, TableScorer(table, "1") if scorer == "table" else scorer)
        rows.append(tree.record(found.chosen, "m", "s", False, 0.0))
    shares = {text: count for text, count in pooled(rows, table).items() if text in TRUE and count[1] > 300}
    assert shares
    for text, (right, number) in shares.items():
        error = (TRUE[text] * (1 - TRUE[text]) / number) ** 0.5
        assert abs(right / number - TRUE[text]) <= 6 * error + 1e-9, text


def test_leaves_that_a_selection_left_over_would_say_more_than_the_policy_can(
    sampler: Callable[..., TableSampler],
) -> None:
    right = number = 0
    for seed in range(100):
        table = sampler(seed=seed)
        tree, found, _ = searched(table, StepBeam(1, 3), TableScorer(table, "1"))
        row = tree.record(found.chosen, "m", "s", False, 0.0)
        right += sum(bool(one) for one in row.is_correct)
        number += len(tree.finished())
        assert not row.completions
    assert right / number > TRUE[""] + 0.1


def test_completions_that_the_budget_cut_count_for_no_state(sampler: Callable[..., TableSampler]) -> None:
    tree, found, _ = searched(sampler(), Samples(50), RandomScorer(), budget=Budget(tokens=250))
    row = tree.record(found.chosen, "m", "s", found.is_cut, 0.0)
    assert found.is_cut
    assert any(row.endings)
    assert not row.completions


def test_a_completion_ends_where_a_response_ended() -> None:
    with pytest.raises(BadInput, match="a completion must end"):
        changed(completions=[[5], [], [], [], [], [], [], []])


def test_a_stop_string_is_no_part_of_a_response(sampler: Callable[..., TableSampler]) -> None:
    table = sampler({"a\n# 1\nQ: more": 1.0})
    tree, found, _ = searched(table, Samples(1), RandomScorer(), stop=["\nQ:"])
    row = tree.record(found.chosen, "m", "s", False, 0.0)
    (node,) = response_nodes(row)
    assert tree_response(row, node).response == "a\n# 1" == tree.trajectory(found.chosen).response


def test_steps_drawn_at_other_temperatures_are_no_samples_of_the_policy(sampler: Callable[..., TableSampler]) -> None:
    method = TreeInference(((0, 3),), siblings=HighLowSiblings())
    tree, found, _ = searched(sampler(), method, RandomScorer())
    assert not tree.record(found.chosen, "m", "s", False, 0.0).completions


def test_the_stage_labels_and_refuses_trees_that_say_nothing_of_the_policy(tmp_path: Path) -> None:
    path = saved(tmp_path, [TREE])
    rows = list(ValueTrees(label="hard", threshold=0.5).run(path, context(tmp_path)))
    assert [row.labels for row in rows] == [[0.0, 1.0], [None, 0.0], [1.0, 1.0], [0.0]]
    rows = list(ValueTrees(min_completions=5).run(path, context(tmp_path)))
    assert rows[0].labels == [None, 1.0]
    write_records(tmp_path / "again.jsonl", rows)
    assert read_records(StepValues, tmp_path / "again.jsonl") == rows
    listed = list(ListResponses().run(path, context(tmp_path)))
    write_records(tmp_path / "listed.jsonl", listed)
    assert [row.id for row in read_records(Trajectory, tmp_path / "listed.jsonl")] == ["p/3", "p/4", "p/6", "p/7"]
    path = saved(tmp_path, [changed(completions=[])])
    with pytest.raises(BadInput, match="has completions of its own"):
        ValueTrees().run(path, context(tmp_path))


def test_siblings_make_a_pair_from_the_state_that_they_share(tmp_path: Path) -> None:
    path = saved(tmp_path, [TREE])
    pairs = SiblingPreferences(margin=0.4).run(path, context(tmp_path))
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in pairs] == [
        ("Q\n", "c\n", "a\n"),
        ("Q\na\n", "# 7", "# 8"),
    ]
    first, second = pairs
    assert (first.chosen_ids, first.rejected_ids, first.prompt_ids) == ([3], [1, 2], [90, 91])
    assert (first.chosen_score, first.rejected_score) == (0.75, 0.25)
    assert (second.prompt_ids, second.chosen_ids, second.rejected_ids) == ([90, 91, 1, 2], [4, 5], [6, 7, 8])
    whole = SiblingPreferences(margin=0.4, chosen="solution").run(path, context(tmp_path))
    assert (whole[0].chosen, whole[0].chosen_ids) == ("c\n# 7", [3, 4, 5])
    # too few completions: inner steps take no part, whatever the search scored them; outcomes do
    few = SiblingPreferences(margin=0.4, min_completions=5).run(path, context(tmp_path))
    assert [pair.prompt for pair in few] == ["Q\na\n"]


@pytest.mark.parametrize("form", ["tree", "flat"])
def test_a_tree_written_as_math_aps_is_read_back_with_its_values(form: str, tmp_path: Path) -> None:
    write_records(tmp_path / "problems.jsonl", [Problem("p", "Q", "7")])
    stage = ExportTrees(str(tmp_path / "problems.jsonl"), form)
    rows = list(stage.run(saved(tmp_path, [TREE]), context(tmp_path)))
    write_records(tmp_path / "aps.jsonl", rows)
    read = list(read_labelled(tmp_path / "aps.jsonl", step_format("math_aps")))
    assert {(tuple(step.strip() for step in row.steps), tuple(row.labels)) for row in read} >= {
        (("a", "# 7"), (0.25, 1.0)),
        (("a", "# 8"), (0.25, 0.0)),
        (("c", "# 7"), (0.75, 1.0)),
    }
    assert all(row.gold == "7" and row.question == "Q" for row in read)
    assert rows[0]["question_id"] == "p"


def test_a_state_without_a_value_is_part_of_the_next_published_step(tmp_path: Path) -> None:
    write_records(tmp_path / "problems.jsonl", [Problem("p", "Q", "7")])
    tree = changed(completions=[[3, 4], [], [], [], [], [], [], []])
    path = saved(tmp_path, [changed(id="q/0", problem_id="p"), tree])
    rows = list(ExportTrees(str(tmp_path / "problems.jsonl")).run(path, context(tmp_path)))
    steps = rows[1]["reasoning_steps"]
    assert steps["mc_value"] == 0.5
    assert [child["text"] for child in steps["children"]] == ["a\n# 7", "a\n# 8", "c\n# 7"]


def test_flat_prefixes_that_begin_one_another_by_chance_are_left_out(tmp_path: Path) -> None:
    write_records(tmp_path / "problems.jsonl", [Problem("p", "Q", "7")])
    tree = changed(steps=["", "a\n", "c\n", "# 7", "# 77", "b\n", "# 7", ""])
    path = saved(tmp_path, [TREE, changed(id="q/0", steps=tree.steps)])
    rows = list(ExportTrees(str(tmp_path / "problems.jsonl"), "flat").run(path, context(tmp_path)))
    assert len(rows) == 1


def test_a_tree_of_an_unknown_problem_is_refused(tmp_path: Path) -> None:
    write_records(tmp_path / "problems.jsonl", [Problem("other", "Q", "7")])
    with pytest.raises(BadInput, match="no problem 'p'"):
        ExportTrees(str(tmp_path / "problems.jsonl")).run(saved(tmp_path, [TREE]), context(tmp_path))


def test_a_tree_of_another_problem_with_the_same_id_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, [TREE])
    for question, gold in (("How many?", "7"), ("Q", "8")):
        write_records(tmp_path / "problems.jsonl", [Problem("p", question, gold)])
        with pytest.raises(BadInput, match="'p/0' is the tree of another problem than 'p'"):
            ExportTrees(str(tmp_path / "problems.jsonl")).run(path, context(tmp_path))


def test_the_table_says_what_the_states_are_worth(sampler: Callable[..., TableSampler]) -> None:
    table = sampler()
    assert {text: round(table.value(tuple(table.encode(text)), "1"), 6) for text in TRUE} == {
        text: round(share, 6) for text, share in TRUE.items()
    }
    assert sum(SOLUTIONS.values()) == pytest.approx(1)
