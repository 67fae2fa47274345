"""A searched tree by hand: one problem, eight nodes, every number of which can be counted."""

from dataclasses import replace
from typing import Any

from espalier.data.search_tree import SearchTree

# 0 prompt ─ 1 "a\n" (kept) ─ 3 "# 7" right, drawn twice
#          │                └ 4 "# 8" wrong (chosen)
#          │                └ 5 "b\n" (pruned, nothing known)
#          └ 2 "c\n" (pruned) ─ 6 "# 7" right, by completions alone
#                             └ 7 "" (the end token alone)
TREE = SearchTree(
    id="p/0",
    problem_id="p",
    prompt="Q\n",
    prompt_ids=[90, 91],
    gold="7",
    num_options=0,
    method="StepBeam",
    scorer="CompletionsScorer",
    aggregate="last",
    chosen=4,
    is_cut=False,
    num_tokens=40,
    num_scores=5,
    num_scored_tokens=20,
    seconds=2.0,
    parents=[-1, 0, 0, 1, 1, 1, 2, 2],
    steps=["", "a\n", "c\n", "# 7", "# 8", "b\n", "# 7", ""],
    step_ids=[[], [1, 2], [3], [4, 5], [6, 7, 8], [9], [4, 5], [99]],
    draws=[0, 3, 1, 2, 1, 1, 3, 1],
    endings=["", "", "", "stop", "stop", "", "stop", "stop"],
    scores=[None, 0.5, 0.75, 0.3, 0.9, 0.1, None, None],
    values=[None] * 8,
    visits=[1, 1, 0, 0, 1, 0, 0, 0],
    answers=[None, None, None, "7", "8", None, "7", None],
    is_correct=[None, None, None, True, False, None, True, False],
    tokens_so_far=[0, 5, 5, 20, 20, 20, 12, 12],
    completions=[[], [3, 4, 4, 4], [6, 6, 6, 7], [], [], [], [], []],
)


def changed(**columns: Any) -> SearchTree:
    """The tree with other columns."""
    return replace(TREE, **columns)
