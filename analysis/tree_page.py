"""The page of one searched tree: every node in its place, coloured by value and score, and where the right answer was
lost. No script: branches fold by themselves, and ten thousand nodes are a few megabytes of text."""

from pathlib import Path

from espalier.analysis.embedded import Cap
from espalier.analysis.markup import Markup, join, tag
from espalier.analysis.page import render_page
from espalier.analysis.sections import duration, note, section, tiles
from espalier.analysis.tree_view import Loss, colour, find_loss, pruned_nodes, span
from espalier.data.search_tree import SearchTree
from espalier.values.tree_values import completion_counts

STYLE = Path(__file__).with_name("tree.css")
_DEEPEST = 100  # folds inside folds; browsers end at 512 elements
_ALL_OPEN = 300  # nodes of a tree that is shown with all its branches open


class TreeRows:
    """Writes the rows of a tree. `marked`: nodes on the way to the answer and to where the right one was lost."""

    def __init__(self, tree: SearchTree, loss: Loss, cap: Cap):
        self.tree, self.loss, self.cap = tree, loss, cap
        self.counts, self.children = completion_counts(tree), tree.children()
        self.pruned = pruned_nodes(tree)
        self.scores, self.values = span(tree.scores), span(tree.values)
        self.way = {0, *tree.way(tree.chosen)}
        self.marked = self.way.union(*(tree.way(node) for node in (*loss.lost_at, *loss.unchosen)))

    def value(self, node: int) -> float | None:
        """Return the share of right completions, else what the response ended in, else what the method holds."""
        if self.counts[node].num_completions:
            return self.counts[node].value
        ended = self.tree.is_correct[node]
        return self.tree.values[node] if ended is None else float(ended)

    def row(self, node: int, is_fold: bool) -> Markup:
        """Return one node."""
        tree, count = self.tree, self.counts[node]
        limits = self.values if not count.num_completions and tree.is_correct[node] is None else (0.0, 1.0)
        marks = [tag("i", class_=colour(self.value(node), limits), title="value"),
                 tag("i", class_=colour(tree.scores[node], self.scores), title="score")]  # fmt: skip
        kinds = ["node", "" if is_fold else "plain", "pruned" if node in self.pruned else "",
                 "chosen" if node in self.way else ""]  # fmt: skip
        text = self.cap.cut(tree.steps[node].rstrip("\n")) if node else "prompt"
        return tag("div", tag("span", *marks, class_="marks"), tag("pre", text or "(end)"), self._figures(node),
                   class_=" ".join(filter(None, kinds)), id=f"n{node}")  # fmt: skip

    def _figures(self, node: int) -> Markup:
        tree, count = self.tree, self.counts[node]
        parts: list[str] = [f"{node}"]
        if count.num_completions:
            parts.append(f"{count.num_correct} of {count.num_completions} completions right")
        if tree.values[node] is not None:
            parts.append(f"held to be worth {tree.values[node]:.3g}")
        if tree.scores[node] is not None:
            parts.append(f"score {tree.scores[node]:.3g}")
        if tree.draws[node] > 1:
            parts.append(f"drawn {tree.draws[node]} times")
        if node and tree.visits[node] > 1:
            parts.append(f"{tree.visits[node]} visits")
        if node in self.pruned:
            parts.append("pruned")
        if tree.endings[node]:
            right = bool(tree.is_correct[node])
            words = "cut" if tree.endings[node] == "length" else "right" if right else "wrong"
            answer = "" if tree.answers[node] is None else f": {self.cap.cut(str(tree.answers[node]))}"
            parts.append(tag("b", f"{words}{answer}", class_="good" if right else "bad"))
        if node == tree.chosen:
            parts.append(tag("b", "the answer"))
        if node in self.loss.lost_at:
            parts.append(tag("b", "right answer lost here", class_="lost"))
        if node in self.loss.unchosen:
            parts.append(tag("b", "right, and not chosen", class_="lost"))
        return tag("div", *(join([" · ", part]) if k else part for k, part in enumerate(parts)), class_="figures")

    def write(self) -> Markup:
        """Return all rows, folded where a state has several children; a chain of single steps stays on one level."""
        parts: list[str] = []
        todo: list[tuple[int, int] | None] = [(0, 0)]  # (node, folds around it); None: a fold ends
        are_open = len(self.children) <= _ALL_OPEN
        while todo:
            here = todo.pop()
            if here is None:
                parts.append("</div></details>")
                continue
            node, depth = here
            children = self.children[node]
            is_fold = len(children) > 1 and depth < _DEEPEST
            row = self.row(node, is_fold)
            if is_fold:
                is_open = " open" if are_open or node in self.marked else ""
                parts.append(f'<details{is_open}><summary>{row}</summary><div class="branch">')
                todo.append(None)
            else:
                parts.append(row)
            todo += [(child, depth + is_fold) for child in reversed(children)]
        return Markup("".join(parts))


def _links(nodes: list[int]) -> Markup:
    shown = [tag("a", f"node {node}", href=f"#n{node}") for node in nodes[:20]]
    more = f" and {len(nodes) - 20:,} more" if len(nodes) > 20 else ""
    return join([*(join([", ", link]) if k else link for k, link in enumerate(shown)), more])


def loss_sentence(loss: Loss) -> Markup:
    """Say what became of the right answer."""
    if loss.is_right is None:
        return join(["The problem has no gold answer: nobody can say where a right one was lost."])
    if loss.is_right:
        return join(["The answer is right."])
    if loss.unchosen:
        return join(
            ["Lost by the choice: a right response was found, and another one chosen: ", _links(loss.unchosen), "."]
        )
    if loss.pruned_at:
        return join(["Lost by pruning: a right response is known behind a step that was pruned here, and behind none "
                     "that went on: ", _links(loss.pruned_at), "."])  # fmt: skip
    if loss.lost_at:
        return join(["Lost by the draw: right responses were drawn to value these states, and no step on one was drawn "
                     "again to go on from: ", _links(loss.lost_at), "."])  # fmt: skip
    return join(["No right response is in the tree: it was not pruned, as far as anybody knows, but never drawn."])


def render_tree(tree: SearchTree, cap: Cap) -> str:
    """Return the whole document; every text of the tree is escaped by `analysis.markup`."""
    loss = find_loss(tree)
    rows = TreeRows(tree, loss, cap)
    gold = tree.gold if isinstance(tree.gold, str) else " | ".join(tree.gold)
    figures = tiles([(f"{len(tree.parents):,}", "nodes"), (f"{len(rows.pruned):,}", "pruned"),
                     (f"{sum(map(bool, tree.endings)):,}", "responses"),
                     (f"{tree.num_tokens:,}", "generated tokens"), (f"{tree.num_scores:,}", "scores"),
                     (duration(tree.seconds), "for the search")])  # fmt: skip
    low, high = rows.scores
    legend = (f"The first mark of a node is its value: right ones among the completions of its state, else what the "
              f"response ended in, else what the method holds it to be worth. The second is the score, coloured from "
              f"{low:.3g} (red) to {high:.3g} (green). Grey: not known. Bold: the way to the answer. Struck through: "
              "pruned.")  # fmt: skip
    main = [
        tag("h1", tree.problem_id),
        tag("p", loss_sentence(loss), class_="lead"),
        figures,
        section("prompt", "Prompt", tag("pre", cap.cut(tree.prompt), class_="prompt"),
                note(f"gold answer: {gold or 'none'}")),
        section("tree", f"{tree.method}, scored by {tree.scorer}" + (", cut by the budget" if tree.is_cut else ""),
                note(legend), tag("div", rows.write(), class_="tree")),
    ]  # fmt: skip
    return render_page(tree.problem_id, main, ["prompt", "tree"], STYLE.read_text(encoding="utf-8"))
