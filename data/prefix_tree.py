"""Token sequences as a prefix tree (trie): their order, their distinct tokens, what an engine must compute.

An engine with a prefix cache computes a token once for all prompts that agree up to it, in whole blocks (vLLM's
`block_size`). Prompts sent in the tree's order meet the cache while it is warm. Everything here works on the
sorted list of sequences, in which the neighbours of a sequence are those it shares most with: no tree is built.
"""

from collections.abc import Sequence
from itertools import takewhile

from espalier.data.records import BadInput

Tokens = Sequence[int]


def tree_order(sequences: Sequence[Tokens]) -> list[int]:
    """Return the indices of the sequences in the tree's depth-first order: a prefix stands before what extends it."""
    return sorted(range(len(sequences)), key=lambda index: tuple(sequences[index]))


def shared_length(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences have in common from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def num_distinct_tokens(sequences: Sequence[Tokens]) -> int:
    """Return the nodes of the tree without its root: the tokens of all sequences, shared ones counted once."""
    total, last = 0, ()  # type: int, tuple[int, ...]
    for sequence in sorted(map(tuple, sequences)):
        total += len(sequence) - shared_length(sequence, last)
        last = sequence
    return total


def least_prompt_tokens(sequences: Sequence[Tokens], num_siblings: int, block_size: int) -> int:
    """Return the fewest prompt tokens that an engine which caches whole blocks can compute for `num_siblings` samples
    of every distinct sequence.

    A sample needs the logits of the prompt's last token, so of L tokens at most floor((L - 1) / B) blocks come from
    the cache and the rest, 1 to B tokens, is computed for every sibling anew. The blocks before are computed once
    each, over all sequences; a full last block that some sibling computed serves the longer sequences too.
    Raises BadInput on numbers below 1 and on an empty sequence.
    """
    if num_siblings < 1 or block_size < 1:
        raise BadInput(f"siblings and block size must be at least 1, got {num_siblings} and {block_size}")
    distinct = sorted(set(map(tuple, sequences)))
    if distinct and not distinct[0]:
        raise BadInput("a sequence without tokens cannot be completed")
    total, last = 0, ()  # type: int, tuple[int, ...]
    for sequence in distinct:
        cached = (len(sequence) - 1) // block_size
        total += num_siblings * (len(sequence) - cached * block_size)
        total += block_size * max(0, cached - shared_length(sequence, last) // block_size)
        last = sequence
    return total
