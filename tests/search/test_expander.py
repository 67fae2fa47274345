"""Where steps end in token space: published tokenizers, blank lines, lengths, stop strings."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.silence.real_tokenizers import build
from espalier.data.prefix_tree import num_distinct_tokens
from espalier.data.records import BadInput
from espalier.data.splitters import splitter
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.sampling.requests import make_trajectory
from espalier.search.asks import Draw
from espalier.search.client import sample_of
from espalier.search.expander import StepCuts
from espalier.search.methods.samples import Samples
from espalier.search.methods.step_beam import StepBeam
from espalier.search.methods.tree_inference import TreeInference
from espalier.search.scorers.completions_scorer import CompletionsScorer
from espalier.search.scorers.random_scorer import RandomScorer
from espalier.search.tree import Node, Tree
from tests.support.search_cases import LastNumber, TableSampler, TableScorer, searched

Make = Callable[..., TableSampler]

# A full stop with two newlines is one token of the published ones; a formula holds a newline within `$$`.
TEXTS = {
    "So 12 apples.\n\nThen 5.\n\n\nHence # 7": 0.5,
    "So 12 apples.\n\nThen 6.\n\nHence\n# 8": 0.3,
    "Né: $$x\n= 5$$ is it.\nThen 🙂 6.\n# 7": 0.2,
}


def ways(tree: Tree) -> dict[str, list[str]]:
    return {leaf.response(): [node.text for node in leaf.way()] for leaf in tree.finished()}


@pytest.fixture(scope="module", params=["sentencepiece", "tekken", "tiny"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer as its authors publish it, and the tiny one."""
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    return build(request.param, tmp_path_factory.mktemp("tokenizers") / "t", 40_000).tokenizer


@pytest.mark.parametrize("cuts", [StepCuts(), StepCuts("", 3), StepCuts("\n", 2), StepCuts("\n\n", 0)], ids=str)
@pytest.mark.parametrize("split", ["lines", "sentences"])
def test_steps_end_where_the_splitter_ends_them_on_the_samplers_tokens(
    published: Any, cuts: StepCuts, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = published
    monkeypatch.setattr(LastNumber, "split_steps", staticmethod(splitter(split)))
    table = TableSampler(tokenizer, TEXTS)
    tree, _, _ = searched(table, TreeInference([[0, 40], [1, 12]]), RandomScorer(), cuts=cuts)
    assert {tuple(leaf.response_ids()) for leaf in tree.finished()} == set(table.table)
    for leaf in tree.finished():
        request = SampleRequest("p", tree.prompt, tree.prompt_ids)
        wanted = make_trajectory(LastNumber(), tokenizer, tree.problem, request, 0, sample_of(leaf))  # type: ignore[arg-type]
        own = tree.trajectory(leaf)
        assert own.response == wanted.response
        if not cuts.step_stop:
            assert (own.steps, own.step_ends) == (wanted.steps, wanted.step_ends)
        # behind a stop string white space is of the next step
        assert [step.strip() for step in own.steps] == [step.strip() for step in wanted.steps]
        assert (own.answer, own.is_correct) == (wanted.answer, wanted.is_correct)


def test_whole_responses_are_cut_into_the_same_steps_as_steps_drawn_one_by_one(sampler: Make) -> None:
    whole, steps = sampler(), sampler()
    one = searched(whole, Samples(200), TableScorer(whole, "1"))[0]
    other = searched(steps, TreeInference([[0, 60], [1, 40]]), RandomScorer())[0]
    assert ways(one) == ways(other)


def test_a_blank_step_is_drawn_on_and_a_response_of_an_end_alone_is_finished(sampler: Make) -> None:
    table = sampler({"\n\na\n# 1": 0.5, "": 0.25, "a\n": 0.25})
    tree, _, _ = searched(table, StepBeam(9, 5), RandomScorer())
    assert ways(tree) == {"\n\na\n# 1": ["\n\na\n", "# 1"], "": [""], "a\n": ["a\n", ""]}
    empty = next(leaf for leaf in tree.finished() if leaf.response() == "")
    assert empty.response_ids() == [table.end]
    row = tree.trajectory(empty)
    assert (row.steps, row.step_ends, row.answer) == ([], [], None)
    ended = next(leaf for leaf in tree.finished() if leaf.response() == "a\n")
    assert tree.trajectory(ended).step_ends == [len(ended.response_ids())]  # the end token is the last step's


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_a_response_is_cut_at_its_length_and_is_wrong_then(max_tokens: int, sampler: Make) -> None:
    table = sampler({"# 1\nmore and more": 1.0})
    tree, found, _ = searched(table, StepBeam(2, 2), TableScorer(table, "1"), max_tokens=max_tokens)
    assert found.chosen.num_tokens == max_tokens
    assert found.chosen.ending == "length"
    assert not tree.trajectory(found.chosen).is_correct
    assert not found.is_cut


def test_a_state_at_the_end_of_the_models_window_is_cut_and_not_asked(sampler: Make) -> None:
    table = sampler({"a\nb\nc\n# 1": 1.0}, max_model_length=7)  # of these three are the prompt's
    _, found, _ = searched(table, StepBeam(1, 2), RandomScorer())
    assert (found.chosen.num_tokens, found.chosen.ending) == (4, "length")


def test_a_stop_string_of_the_task_ends_the_response_and_is_no_part_of_its_text(sampler: Make) -> None:
    table = sampler({"a\n# 1\nQ: next\n": 1.0})
    for method in (Samples(2), StepBeam(1, 2)):
        tree, found, _ = searched(table, method, RandomScorer(), stop=["\nQ:"])
        assert (found.chosen.response(), found.chosen.ending, found.chosen.stop) == ("a\n# 1", "stop", "\nQ:")
        assert tree.trajectory(found.chosen).is_correct
        request = SampleRequest("p", tree.prompt, tree.prompt_ids)
        row = make_trajectory(LastNumber(), table.tokenizer, tree.problem, request, 0, sample_of(found.chosen))  # type: ignore[arg-type]
        assert (row.response, row.is_correct, row.finish_reason) == ("a\n# 1", True, "stop")


def test_equal_siblings_are_one_node_with_their_number(sampler: Make) -> None:
    table = sampler({"a\n# 1": 0.5, "b\n# 2": 0.5})
    tree, _, _ = searched(table, StepBeam(4, 10), RandomScorer(), return_logprobs=True)
    assert sum(node.draws for node in tree.root.children) == 40
    assert len(tree.root.children) == 2
    assert all(len(node.logprobs) == len(node.token_ids) for node in tree.nodes)


def test_prompts_computed_are_the_distinct_tokens_and_one_for_every_sample(sampler: Make) -> None:
    lines = {f"{first}\n{second}\n# {third}": 1 / 27 for first in "abc" for second in "def" for third in "123"}
    table = sampler({"so it is that " * 9 + text: share for text, share in lines.items()})
    tree, _, expander = searched(table, StepBeam(4, 4), RandomScorer())
    ids = [[*tree.prompt_ids, *node.response_ids()] for node in tree.nodes]
    num_samples = sum(params.n for _, params in table.requests)
    # every token of a prompt is computed once; the last one again for every sample, whose logits it is read for
    assert table.computed - num_samples <= num_distinct_tokens(ids)
    assert expander.prompt_tokens == sum(len(prompt) for prompt, _ in table.requests)


# Where one step ends only the label of the next one says.
LABELLED = {
    "so\nAction 1: a\nThought 2: b\nAction 2: # 1": 0.5,
    "so\nAction 1: a\nand on\nThought 2: c\nAction 2: # 2": 0.3,
    "so\nAction 1: d\nAction 2: # 3": 0.2,
}


@pytest.mark.parametrize("cuts", [StepCuts(), StepCuts("", 3), StepCuts("", 0)], ids=str)
def test_what_a_sample_drew_behind_its_step_is_where_the_next_one_begins(
    cuts: StepCuts, sampler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastNumber, "split_steps", staticmethod(splitter("react")))
    for text in LABELLED:
        table = sampler({text: 1.0})
        tree, found, _ = searched(table, StepBeam(1, 1), RandomScorer(), cuts=cuts, return_logprobs=True)
        assert [node.text for node in found.chosen.way()] == splitter("react")(text)
        assert tree.num_tokens == found.chosen.num_tokens == len(found.chosen.response_ids())  # each was drawn once
        assert all(len(node.logprobs) == len(node.token_ids) for node in tree.nodes)


def test_samples_that_go_on_from_what_was_drawn_before_are_the_policys(
    sampler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastNumber, "split_steps", staticmethod(splitter("react")))
    table = sampler(LABELLED)
    tree, _, expander = searched(table, Samples(1, "vote"), RandomScorer())
    tree = Tree(tree.problem, tree.prompt, tree.prompt_ids, tree.grade)
    steps = {tuple(splitter("react")(text)): share for text, share in LABELLED.items()}

    def mass(node: Node) -> float:
        way = tuple(one.text for one in node.way())
        return sum(share for solution, share in steps.items() if solution[: len(way)] == way)

    open_nodes = [tree.root]
    while open_nodes:  # of every state half as many as came to it: which of them go on, no text has a part in
        node = open_nodes.pop()
        number = node.draws // 2 or 2000
        asyncio.run(expander.draw([Draw(node, number)]))
        for child in node.children:
            assert child.draws / number == pytest.approx(mass(child) / mass(node), abs=0.07)
        open_nodes += [child for child in node.children if not child.is_finished]
    assert {leaf.response() for leaf in tree.finished()} == set(LABELLED)
    generated = sum(len(node.token_ids) * node.draws for node in tree.nodes)
    assert tree.num_tokens < 2 * generated


def test_samples_of_another_temperature_do_not_go_on_from_what_was_drawn_before(
    sampler: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastNumber, "split_steps", staticmethod(splitter("react")))
    table = sampler({"so\nAction 1: a": 0.51, "so\nAction 1: b": 0.49})
    tree, _, expander = searched(table, Samples(1, "vote"), RandomScorer())
    tree = Tree(tree.problem, tree.prompt, tree.prompt_ids, tree.grade)
    (drawn,) = asyncio.run(expander.draw([Draw(tree.root, 100)]))
    (greedy,) = asyncio.run(expander.draw([Draw(drawn[0], 100, temperature=0.0)]))
    assert {node.response() for node in greedy} == {"so\nAction 1: a"}
    (others,) = asyncio.run(expander.draw([Draw(drawn[0], 100)]))
    assert {node.response() for node in others} == {"so\nAction 1: a", "so\nAction 1: b"}


def test_equal_samples_are_drawn_on_in_one_request(sampler: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastNumber, "split_steps", staticmethod(splitter("react")))
    table = sampler({"so\nAction 1: a\nAction 2: # 1": 1.0})
    searched(table, StepBeam(2, 4), RandomScorer())
    # the first lines, and all that is wanted to see that each is a step; of the beam of one state 4 go on, and 4 more
    assert [params.n for _, params in table.requests] == [8, 8, 4]


def test_nodes_are_never_tokenised_again(sampler: Make) -> None:
    table = sampler()
    asked = []
    tokenize = table.tokenizer.__class__.__call__

    def counted(self: Any, *arguments: Any, **settings: Any) -> Any:
        asked.append(arguments)
        return tokenize(self, *arguments, **settings)

    table.tokenizer.__class__.__call__, before = counted, table.tokenizer.__class__.__call__
    try:
        searched(table, StepBeam(2, 3), RandomScorer())
    finally:
        table.tokenizer.__class__.__call__ = before
    assert len(asked) <= 2  # the prompt of the test, and the word that the decoder decodes behind


@pytest.mark.parametrize("scorer", [RandomScorer(), CompletionsScorer(2)], ids=["steps", "whole"])
def test_a_stop_string_that_begins_in_the_step_before_ends_the_response(scorer: Any, sampler: Make) -> None:
    """The engine sees the second half of it alone, and goes on to the end token."""
    table = {"d\n# 3": 1.0}
    wanted = searched(sampler(table), Samples(1), RandomScorer(), stop=["\n# "])[1].chosen
    tree, found, _ = searched(sampler(table), StepBeam(1, 1), scorer, stop=["\n# "])
    assert wanted.response() == found.chosen.response() == "d"
    assert {(leaf.response(), leaf.ending) for leaf in tree.finished()} == {("d", "stop")}


def test_a_sampler_without_token_ids_is_refused(tokenizer: Any) -> None:
    """A chat API: it would be asked for the empty prompt, and its answers would be nodes without text."""

    class Chat(TableSampler):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            return [replace(sample, token_ids=[]) for sample in await super().sample(request, params)]

    with pytest.raises(BadInput, match="no token ids"):
        searched(Chat(tokenizer, {"a\n# 1": 1.0}), Samples(2), RandomScorer())
