"""Which solution of a tree is the answer."""

from collections.abc import Callable, Sequence

from espalier.data.records import BadInput
from espalier.rewards.aggregate import logistic
from espalier.rewards.votes import vote_key, winning_answer
from espalier.search.tree import Node, Tree

CHOICES = ("best", "vote", "weighted_vote")


def check_choice(choice: str) -> None:
    """Raise BadInput where there is no such choice."""
    if choice not in CHOICES:
        raise BadInput(f"search.method.choice must be one of {', '.join(CHOICES)}, got '{choice}'")


def draws_of(node: Node) -> int:
    """Return how many samples drew a node: a vote each."""
    return node.draws


def choose_solution(tree: Tree, choice: str = "best", votes: Callable[[Node], int] = draws_of) -> Node:
    """Return the finished node of the highest rank ("best"), or the best one with the answer of most `votes` ("vote")
    or of the largest sum of ranks, each times its votes ("weighted_vote"). Ties go to the one that came first. Where no
    response ended, the open node of the highest rank, deeper ones first; where nothing was drawn, the prompt.

    Those that ended by themselves come before those that were cut, those with a vote before others, and where ranks
    decide, those that were scored before those that were drawn to value a state. Raises BadInput as `weight_of`.
    """
    finished = tree.finished()
    ended = [node for node in finished if node.ending == "stop"] or finished
    ended = [node for node in ended if votes(node)] or ended
    if choice != "vote":
        ended = [node for node in ended if node.score is not None] or ended
    if not ended:
        return max(tree.nodes, key=lambda node: (node.score is not None, node.rank(), node.depth, -node.number))
    if choice == "best":
        return best_of(ended)
    weights = [votes(node) * (1.0 if choice == "vote" else weight_of(node)) for node in ended]
    winner = winning_answer([tree.trajectory(node) for node in ended], weights)
    voters = [node for node in ended if is_vote_for(node, winner)]
    return best_of(voters or ended)


def weight_of(node: Node) -> float:
    """Return its rank as something that adds up: of log-odds the share behind them. Raises BadInput where it is below
    0: more samples would then count against their answer."""
    rank = logistic(node.rank()) if node.tree.aggregate == "log_odds" else node.rank()
    if rank < 0:
        raise BadInput(f"problem '{node.tree.problem.id}': a solution is scored {rank:g}, and votes and particles are "
                       "weighted by scores of at least 0: choose another scorer (of an outcome model "
                       "search.scorer.reward.form=probability)")  # fmt: skip
    return rank


def share_of(node: Node) -> float:
    """Return its rank as a share in [0, 1]. Raises BadInput where it is none."""
    if (rank := weight_of(node)) > 1:
        raise BadInput(f"problem '{node.tree.problem.id}': a state is ranked {rank:g}, and this method reads shares "
                       "in [0, 1]: choose another scorer, or another search.scorer.aggregate")  # fmt: skip
    return rank


def is_vote_for(node: Node, answer: str | None) -> bool:
    """Say whether a finished node gave this answer as it is written, or the same number."""
    own = node.answered().answer
    return own is not None and answer is not None and vote_key(own) == vote_key(answer)


def best_of(nodes: Sequence[Node]) -> Node:
    """Return the node of the highest rank; ties go to the one that came first."""
    return max(nodes, key=lambda node: (node.rank(), -node.number))
