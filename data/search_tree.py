"""The record of a search at test time: every node of one problem's tree, in columns (`search/`, docs/search.md).

Node 0 is the prompt. A node is a state: the prompt and the steps on the way to it. What was drawn from one state are
its children. Token ids are those of the sampler; the tokens of a way are those of its nodes, joined.
"""

import dataclasses
from dataclasses import dataclass, field

from espalier.data.answers.grade import Gold
from espalier.data.records import BadInput


@dataclass(frozen=True)
class SearchTree:
    """The tree of one problem. The lists have one entry per node, in the order in which nodes came."""

    id: str
    """that of the trajectory which the search answered with: `{problem}/0`"""
    problem_id: str
    prompt: str
    prompt_ids: list[int]
    gold: Gold
    num_options: int
    """number of options of a choice, else 0"""
    method: str
    """the class of the method: StepBeam"""
    scorer: str
    """the class of the scorer: ProcessScorer; of a reward the reward's: OutcomeReward; of several, joined by +"""
    aggregate: str
    """how the scores on the way to a node become the one it is ranked by (rewards/aggregate.py)"""
    chosen: int
    """the node that the search answered with"""
    is_cut: bool
    """whether the budget ended the search"""
    num_tokens: int
    """tokens that were generated, those included that were drawn behind a step's end and are in no node"""
    num_scores: int
    """scores that were asked"""
    num_scored_tokens: int
    """tokens that the scorer was given and had not been given before on the same way"""
    seconds: float
    """from the first question to the choice, beside the other problems in flight"""
    parents: list[int]
    """the node that it was drawn from, which stands before it; -1 of the prompt"""
    steps: list[str]
    """its text behind that of its parent, without the stop string that ended it; "" of the prompt"""
    step_ids: list[list[int]]
    """its token ids; [] of the prompt"""
    draws: list[int]
    """how many samples drew these very tokens from the parent: equal siblings are one node; 0 of the prompt"""
    endings: list[str]
    """"" where it can go on; stop: the response ended; length: it was cut"""
    scores: list[float | None]
    """the scorer's score of the state that it leads to; null where it was not asked"""
    values: list[float | None]
    """what the method holds its state to be worth in the end (the mean over visits in a Monte-Carlo tree search); null
    where the method keeps no values"""
    visits: list[int]
    """how often the method went through it: visits of a tree search, particles, members of a beam; 0: it was pruned"""
    answers: list[str | None]
    """of a node with an ending the extracted answer; null where there is none to read, and of nodes without"""
    is_correct: list[bool | None]
    """of a node with an ending whether its answer is right (never where it was cut); null of nodes without"""
    tokens_so_far: list[int]
    """tokens generated for this problem when the node had come"""
    logprobs: list[list[float]] = field(default_factory=list)
    """the sampler's log-probs of `step_ids` in nats; left out where they were not kept"""
    completions: list[list[int]] = field(default_factory=list)
    """the ends of the responses that the policy drew from this very state, one entry per sample, whatever a selection
    made of them: what its value may be estimated by; [] where there are none; left out: none of any node"""
    passage_id: str = ""

    def __post_init__(self) -> None:
        number = len(self.parents)
        for name in COLUMNS:
            column = getattr(self, name)
            if len(column) != number and (column or name not in ("logprobs", "completions")):
                raise BadInput(f"tree '{self.id}' has {number} nodes and {len(column)} {name}: one per node is wanted")
        if self.parents[:1] != [-1] or any(not 0 <= parent < k for k, parent in enumerate(self.parents) if k):
            raise BadInput(f"tree '{self.id}': a parent must stand before its children, behind the prompt's node 0")
        if not 0 <= self.chosen < number:
            raise BadInput(f"tree '{self.id}': it has no node {self.chosen}, which is said to be chosen")
        if any(not 0 < end < number or not self.endings[end] for ends in self.completions for end in ends):
            raise BadInput(f"tree '{self.id}': a completion must end at a node where a response ended")

    def children(self) -> list[list[int]]:
        """Return the children of every node."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return found

    def way(self, node: int) -> list[int]:
        """Return the nodes from the first step to this one."""
        way: list[int] = []
        while node:
            way.append(node)
            node = self.parents[node]
        return way[::-1]


COLUMNS = tuple(one.name for one in dataclasses.fields(SearchTree) if str(one.type).startswith("list[") and
                one.name != "prompt_ids")  # fmt: skip


_READ_GOLD = {"CompletionsScorer", "ExactScorer", "OutcomeReward", "VerifierReward"}


def reads_gold(scorer: str) -> bool:
    """Say whether the scorer of a tree read the gold answer, which nobody has at test time."""
    return bool(_READ_GOLD & set(scorer.split("+")))
