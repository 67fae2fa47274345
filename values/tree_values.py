"""What a searched tree says of the policy: its responses, and the values of the states on them.

A value is the chance that the policy's own sampling ends right. A search does not sample like that: it prunes, and what
is left below a state is better than what the policy would draw from there. So a state is valued by the responses that
were drawn from that very state and kept whatever came of them (`SearchTree.completions`), and by nothing else: neither
by the search's own scores and values, nor by the leaves that a selection left over. A pruned state without completions
has no value, which is not 0. What a response ended in is known of every response, however it was found.
"""

from collections.abc import Sequence

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, StepValues, Trajectory
from espalier.data.search_tree import SearchTree
from espalier.values.monte_carlo import Count
from espalier.values.step_values import StateEstimate, counted, step_values

NO_VALUES = (
    "no state of these trees has completions of its own, so that nothing is known of what the policy would do from it: "
    "search with search=omega_prm, search=tree_inference or scorer@search.scorer=completions, or list the responses "
    "(values/list_responses) and complete their states (values/cut_states)"
)


def read_trees(path: str, needs_completions: bool = False) -> list[SearchTree]:
    """Return the trees of a file. Raises BadInput where there is none, and, where completions are needed, where no
    state behind a prompt has any."""
    trees = read_records(SearchTree, path)
    if not trees:
        raise BadInput(f"{path}: no tree: name the X.trees.jsonl of a search")
    if needs_completions and not any(any(tree.completions[1:]) for tree in trees):
        raise BadInput(f"{path}: {NO_VALUES}")
    return trees


def completion_counts(tree: SearchTree) -> list[Count]:
    """Return of every node the right ones of its completions, one per sample; 0 of 0 where it has none."""
    ends = tree.completions or [[] for _ in tree.parents]
    return [Count(sum(bool(tree.is_correct[end]) for end in of_one), len(of_one)) for of_one in ends]


def response_nodes(tree: SearchTree) -> list[int]:
    """Return the nodes where a response with any text ended, in the order in which they came."""
    return [node for node, ending in enumerate(tree.endings) if ending and any(tree.steps[k] for k in tree.way(node))]


def way_of_steps(tree: SearchTree, node: int) -> tuple[list[int], list[int]]:
    """Return the nodes of the steps of a response, and after how many of its tokens each ends. A node without text (the
    end token alone) is no step: its tokens are the last step's."""
    way = tree.way(node)
    ends, total = dict[int, int](), 0
    for one in way:
        total += len(tree.step_ids[one])
        if tree.steps[one]:
            ends[one] = total
    steps = list(ends)
    return steps, [*(ends[one] for one in steps[:-1]), total]


def tree_response(tree: SearchTree, node: int) -> Trajectory:
    """Return the response that ended at a node, on the sampler's own token ids, under the id `{problem}/{node}`."""
    steps, ends = way_of_steps(tree, node)
    texts = [tree.steps[one] for one in steps]
    way = tree.way(node)
    ids = [token for one in way for token in tree.step_ids[one]]
    logprobs = [value for one in way for value in tree.logprobs[one]] if tree.logprobs else []
    return Trajectory(
        id=f"{tree.problem_id}/{node}",
        problem_id=tree.problem_id,
        prompt=tree.prompt,
        response="".join(texts),
        steps=texts,
        prompt_ids=tree.prompt_ids,
        response_ids=ids,
        step_ends=ends,
        finish_reason=tree.endings[node],
        gold=tree.gold,
        answer=tree.answers[node],
        is_correct=bool(tree.is_correct[node]),
        num_options=tree.num_options,
        logprobs=logprobs if logprobs and len(logprobs) == len(ids) else None,
        passage_id=tree.passage_id,
    )


def tree_step_values(tree: SearchTree) -> list[StepValues]:
    """Return one record per response. Every state is labelled once, in the first response that passes through it: a
    reward model would else read a state as often as the search went on from it. Values stand in all of them.
    `prompt_value` is the share of right completions of the prompt itself."""
    counts = completion_counts(tree)
    prompt_value = counted(counts[0]).value
    labelled: set[int] = set()
    records: list[StepValues] = []
    for node in response_nodes(tree):
        steps, _ = way_of_steps(tree, node)
        inner: Sequence[StateEstimate] = [counted(counts[one]) for one in steps[:-1]]
        known = step_values(tree_response(tree, node), inner, prompt_value)
        labels = [None if one in labelled else value for one, value in zip(steps[:-1], known.values, strict=False)]
        labels.append(known.values[-1])
        labelled.update(steps[:-1])
        weights = [float(label is not None) for label in labels]
        records.append(StepValues(**{**vars(known), "labels": labels, "weights": weights}))
    return records
