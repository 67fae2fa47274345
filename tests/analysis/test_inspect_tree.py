"""The page of a searched tree: what it says was lost, and that no text of a model becomes markup."""

import html.parser
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.tree import InspectTree
from espalier.analysis.tree_view import colour, find_loss, pruned_nodes, right_below, span
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput
from espalier.data.search_tree import SearchTree
from espalier.pipeline.stage import StageContext
from tests.support.browser import browse
from tests.support.search_trees import TREE, changed


class Elements(html.parser.HTMLParser):
    """The elements of a page, the ids of nodes and the text of each, and how deep elements stand in one another."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.deepest = 0

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value and value.startswith("n")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
            self.deepest = max(self.deepest, len(self.open))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.texts.append(data)


def page(tmp_path: Path, tree: SearchTree, **settings: Any) -> str:
    write_records(tmp_path / "s.trees.jsonl", [tree])
    return InspectTree(**settings).run(str(tmp_path / "s.trees.jsonl"), StageContext(None, tmp_path / "t.html", 60))


def read(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    assert not elements.open
    return elements


def test_a_right_response_that_could_have_been_chosen_was_lost_by_the_choice() -> None:
    assert right_below(TREE) == [True, True, True, True, False, False, True, False]
    # node 3 is right and scored; 6 was drawn to value a pruned state alone
    loss = find_loss(TREE)
    assert (loss.is_right, loss.unchosen, loss.lost_at) == (False, [3], [])


def test_the_right_answer_is_lost_at_the_last_state_whose_right_children_were_pruned() -> None:
    # without the right response behind node 1, what is known to be right was pruned at the prompt
    wrong = [None, None, None, False, False, None, True, False]
    loss = find_loss(changed(is_correct=wrong))
    assert (loss.lost_at, loss.pruned_at) == ([0], [0])
    # behind node 1 a right response was drawn only to value it, and went on nowhere
    unscored = [None, 0.5, 0.75, None, 0.9, 0.1, None, None]
    loss = find_loss(changed(scores=unscored))
    assert (loss.lost_at, loss.pruned_at) == ([1], [])
    assert find_loss(changed(scores=unscored, visits=[1, 0, 0, 0, 1, 0, 0, 0])).lost_at == [0]


def test_nothing_is_lost_where_the_answer_is_right_or_none_was_ever_drawn_or_nobody_knows() -> None:
    assert find_loss(changed(chosen=3)).is_right
    assert find_loss(changed(is_correct=[None, None, None, False, False, None, False, False])).lost_at == []
    assert find_loss(changed(gold="")).is_right is None


def test_pruned_are_states_that_the_search_did_not_go_on_from() -> None:
    assert pruned_nodes(TREE) == {2, 5}
    # a state on a response that was drawn only to value the prompt was no candidate; one that the method valued was
    unscored = [None, 0.5, None, 0.3, 0.9, 0.1, None, None]
    assert pruned_nodes(changed(scores=unscored)) == {5}
    held = [None, None, 0.4, None, None, None, None, None]
    assert pruned_nodes(changed(scores=unscored, values=held, completions=[])) == {2, 5}


def test_colours_go_from_nought_to_one_or_over_all_scores() -> None:
    assert span([None, 0.2, 0.9]) == (0.0, 1.0)
    assert span([-3.0, 5.0, None]) == (-3.0, 5.0)
    assert [colour(number, (0.0, 1.0)) for number in (0.0, 0.19, 0.2, 0.99, 1.0, None)] == [
        "v0", "v0", "v1", "v4", "v4", "unknown"]  # fmt: skip
    assert [colour(number, (-3.0, 5.0)) for number in (-3.0, 1.0, 5.0)] == ["v0", "v2", "v4"]
    assert colour(2.0, (2.0, 2.0)) == "v2"


def test_the_page_shows_every_node_once_and_what_was_lost(tmp_path: Path) -> None:
    text = page(tmp_path, TREE)
    elements = read(text)
    assert sorted(elements.ids) == [f"n{node}" for node in range(8)]
    assert "Lost by the choice" in text
    assert "right, and not chosen" in text
    assert "3 of 4 completions right" in text
    assert text.count('class="node plain pruned"') + text.count('class="node pruned"') == 2


def test_a_hostile_solution_is_shown_as_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script></pre></details><img src=x onerror=alert(1)>\"'&\x00\ud800"
    steps = [*TREE.steps[:3], evil, *TREE.steps[4:]]
    answers = [*TREE.answers[:3], evil, *TREE.answers[4:]]
    text = page(tmp_path, changed(steps=steps, answers=answers, prompt=evil, problem_id=evil, gold=evil, method=evil))
    elements = read(text)
    assert "script" not in elements.names
    assert "img" not in elements.names
    shown = evil.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert elements.texts.count(shown) == 2
    assert "default-src 'none'" in html.unescape(text)
    text.encode("utf-8")


def large(number: int, rng: random.Random, is_deep: bool) -> SearchTree:
    parents = [
        -1,
        *(rng.randrange(max(0, node - 3), node) if is_deep else rng.randrange(node) for node in range(1, number)),
    ]
    has_child = set(parents)
    ends = ["" if node in has_child else "stop" for node in range(number)]
    rights = [None if not end else rng.random() < 0.1 for end in ends]
    return changed(
        parents=parents,
        steps=["", *(f"step {node}\n" for node in range(1, number))],
        step_ids=[[], *([node] for node in range(1, number))],
        draws=[0, *[1] * (number - 1)],
        endings=ends,
        scores=[rng.random() for _ in range(number)],
        values=[None] * number,
        visits=[rng.randrange(3) for _ in range(number)],
        answers=[None] * number,
        is_correct=rights,
        tokens_so_far=[0] * number,
        completions=[],
        chosen=number - 1,
    )


@pytest.mark.parametrize("is_deep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ten_thousand_nodes_are_written_in_seconds_and_no_browser_s_depth_is_exceeded(
    is_deep: bool, tmp_path: Path
) -> None:
    tree = large(10_000, random.Random(3), is_deep)
    began = time.process_time()
    text = page(tmp_path, tree)
    assert time.process_time() - began < 10
    assert len(text) < 8_000_000
    elements = read(text)
    assert len(elements.ids) == len(set(elements.ids)) == 10_000
    assert elements.deepest < 400


def test_another_problem_or_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no tree of problem 'other' among 1"):
        page(tmp_path, TREE, problem="other")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInput, match="no tree"):
        InspectTree().run(str(tmp_path / "empty.jsonl"), StageContext(None, tmp_path / "t.html", 60))


def test_a_browser_renders_it_without_a_complaint(tmp_path: Path) -> None:
    target = tmp_path / "tree.html"
    target.write_text(page(tmp_path, large(500, random.Random(1), False)), encoding="utf-8")
    done = browse(tmp_path, target, "--dump-dom")
    assert done.stdout.count('id="n') == 500
    assert "CONSOLE" not in done.stderr


def measured(tmp_path: Path, text: str, expression: str) -> list[Any]:
    """What a real browser finds of the page on a screen of 340 pixels: a list of `page`, its document."""
    source = html.escape(text, quote=True)
    probe = tmp_path / "probe.html"
    probe.write_text(
        f'<!doctype html><iframe style="border:0;width:340px;height:900px" srcdoc="{source}"></iframe><pre id="found">'
        "</pre><script>document.querySelector('iframe').onload = () => {"
        "const page = document.querySelector('iframe').contentDocument, root = page.documentElement;"
        f"found.textContent = JSON.stringify({expression}); }};</script>",
        encoding="utf-8",
    )
    done = browse(tmp_path, probe, "--dump-dom", "--virtual-time-budget=8000")
    match = re.search(r'<pre id="found">(\[.*?\])</pre>', done.stdout)
    assert match is not None, done.stdout[-500:]
    numbers: list[Any] = json.loads(html.unescape(match[1]))
    return numbers


def deep(number: int) -> SearchTree:
    """Folds inside folds: every state on one way has two children."""
    parents = [-1, *(2 * (node // 2) for node in range(number - 1))]
    return replace(large(number, random.Random(0), True), parents=parents, steps=["", *["word " * 20] * (number - 1)],
                   endings=["" if node in parents else "stop" for node in range(number)],
                   is_correct=[None if node in parents else False for node in range(number)],
                   chosen=number - 1)  # fmt: skip


def test_the_page_fits_a_narrow_screen_and_deep_steps_can_still_be_read(tmp_path: Path) -> None:
    text = page(
        tmp_path, changed(prompt="p" * 400, problem_id="i" * 100, steps=[*TREE.steps[:1], "x" * 400, *TREE.steps[2:]])
    )
    width, screen = measured(tmp_path, text, "[root.scrollWidth, root.clientWidth]")
    assert width <= screen
    text = page(tmp_path, deep(81))
    width, screen, step = measured(
        tmp_path, text, "[root.scrollWidth, root.clientWidth, page.querySelector('#n80 pre').clientWidth]"
    )
    assert width <= screen, "the tree scrolls, the page does not"
    assert step >= 150


def test_the_browser_shows_where_the_right_answer_was_lost_and_opens_what_is_folded(tmp_path: Path) -> None:
    tree = large(600, random.Random(1), False)
    chosen = next(node for node, right in enumerate(tree.is_correct) if right is False)
    tree = replace(tree, chosen=chosen, visits=[1] * 600)
    text = page(tmp_path, tree)
    assert "Lost by the choice" in text
    shown = "[...page.querySelectorAll('.node')].filter((one) => one.checkVisibility()).map((one) => one.id)"
    opened = "page.querySelectorAll('details').forEach((one) => { one.open = true; })"
    first, _, all_open = measured(tmp_path, text, f"[{shown}, {opened}, {shown}]")
    lost = {f"n{node}" for right in find_loss(tree).unchosen for node in tree.way(right)}
    assert lost < set(first) < set(all_open)
    assert len(all_open) == 600
