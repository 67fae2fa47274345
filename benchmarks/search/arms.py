"""Which methods are held side by side, each at about the same number of samples per depth."""

from collections.abc import Mapping
from math import isqrt

SIZES = (4, 16, 64)
"""Times one sample's tokens."""
LABELS = {"process": "values", "contrast": "contrast"}
"""Scorer → the labels that its reward model is trained on (scripts/process_rewards.sh)."""
SCORERS = (*LABELS, "exact", "random")
NO_SCORER = "none"


def settings_of(method: str, size: int, tokens_of_a_sample: float) -> list[str]:
    """Return what a method of conf/search/ is set to for `size` times the tokens of one sample. Those that draw until
    something ends them have a budget of so many tokens; the others draw `size` samples at every depth."""
    root = isqrt(size)
    budget = f"search.budget.tokens={round(size * tokens_of_a_sample)}"
    widths = {
        "best_of_n": [f"search.method.n={size}"],
        "majority": [f"search.method.n={size}"],
        "weighted_vote": [f"search.method.n={size}"],
        "step_beam": [f"search.method.width={root}", f"search.method.siblings={root}"],
        "dvts": [f"search.method.subtrees={root}", f"search.method.siblings={root}"],
        "lookahead": [f"search.method.width={root}", f"search.method.siblings={max(1, root // 2)}"],
        "rebase": [f"search.method.samples={size}"],
        "particles": [f"search.method.number={size}"],
        "entropic_particles": [f"search.method.number={size}"],
        "mcts": [f"search.method.simulations={8 * size}", budget],
        "uct": [f"search.method.simulations={8 * size}", budget],
        "tree_inference": [budget],
    }
    return [f"search={method}", *widths[method]]


METHODS: Mapping[str, tuple[str, ...]] = {
    "majority": (NO_SCORER,),
    "tree_inference": (NO_SCORER,),
    **dict.fromkeys(
        ("best_of_n", "weighted_vote", "step_beam", "dvts", "lookahead", "rebase", "particles", "entropic_particles",
         "mcts", "uct"),
        SCORERS,
    ),
}  # fmt: skip
"""Method → the scorers that it is run with."""
