"""One search from its first question to its answer: what a method asks for is drawn and scored, until it is done or its
budget is spent."""

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.search.asks import Expand, SearchMethod
from espalier.search.budget import Budget
from espalier.search.expander import Expander
from espalier.search.scorers.scorer import Scorer
from espalier.search.tree import Node, Tree


@dataclass(frozen=True)
class Searched:
    """A tree that is searched: the node to answer with, whether the budget ended it, seconds."""

    chosen: Node
    is_cut: bool
    seconds: float


async def search_tree(
    method: SearchMethod,
    tree: Tree,
    expander: Expander,
    scorer: Scorer,
    budget: Budget,
    thread: Executor | None = None,
) -> Searched:
    """Grow a tree by a method and choose, in `thread`, since choosing grades answers. Raises Refused where the prompt
    is, ServerGone, and what the scorer raises."""
    began = time.monotonic()
    expander.is_stepwise = budget.is_watched_within_responses
    expander.is_cut = lambda: budget.is_spent(tree, began)
    growth = method.grow(tree)
    answer: list[list[Node]] | list[float] | None = None
    is_cut = False
    try:
        while not is_cut:
            ask = growth.send(answer)
            if budget.is_spent(tree, began, counts_tokens=isinstance(ask, Expand)):
                is_cut = True
            elif isinstance(ask, Expand):
                answer = await expander.draw(ask.draws)
            else:
                is_cut = not await score_nodes(ask.nodes, expander, scorer, budget)
                answer = [node.rank() for node in ask.nodes]
    except StopIteration:
        pass
    finally:
        growth.close()
        scorer.forget(tree)
    chosen = await asyncio.get_running_loop().run_in_executor(thread, method.choose, tree)
    return Searched(chosen, is_cut or expander.has_cut, time.monotonic() - began)


async def score_nodes(nodes: Sequence[Node], expander: Expander, scorer: Scorer, budget: Budget) -> bool:
    """Have nodes scored that have no score yet, with those on their way where their rank is made of these too; say
    whether the budget paid for all. Raises BadInput on a score that is no number."""
    if not nodes:
        return True
    tree = nodes[0].tree
    wanted = [one for node in nodes for one in (node.way() if scorer.aggregate != "last" else [node])]
    todo = [node for node in dict.fromkeys(wanted) if node.score is None]
    paid = todo[: budget.num_scores(tree, len(todo))]
    tree.num_scores += len(paid)
    tree.num_scored_tokens += sum(map(count_unread, paid))
    for node, score in zip(paid, await scorer.score(paid, expander) if paid else [], strict=True):
        if not math.isfinite(score):
            raise BadInput(f"the scorer gave node {node.number} of problem '{tree.problem.id}' the score {score}: the "
                           "weights of its model are damaged, or too large for its precision; with another scorer "
                           "choose another output")  # fmt: skip
        node.score = score
    return len(paid) == len(todo)


def count_unread(node: Node) -> int:
    """Return the tokens up to a node that no node was scored behind before."""
    unread = [one for one in [node.tree.root, *node.way()] if not one.is_read]
    for one in unread:
        one.is_read = True
    return sum(len(one.token_ids if one.parent else one.tree.prompt_ids) for one in unread)
