"""Espalier trains language models to reason, step by step.

For a loop of your own the functions of `__all__` take and give plain values: `espalier.grpo_advantages([1, 0, 0, 0])`.
Each is loaded when it is first asked for, so that `import espalier` is quick and loads no torch. They are in
espalier/functions.py and espalier/prm.py; docs/api.md shows them all.

The folders beside this one are its sub-packages, by links: `espalier.data.records` is data/records.py, in a checkout
(installed or not) and in an installed package alike.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier.data.answers.grade import Grade
    from espalier.data.records import BadInput
    from espalier.data.steps import StepTokens
    from espalier.functions import (
        aggregate_scores,
        dr_grpo_advantages,
        gae,
        grade,
        grpo_advantages,
        monte_carlo_values,
        rloo_advantages,
        same_answer,
        split_steps,
        vineppo_advantages,
    )
    from espalier.prm import ProcessRewardModel, encode_steps, load_prm, score_steps
    from espalier.values.monte_carlo import StateValue

__all__ = [
    "BadInput",
    "Grade",
    "ProcessRewardModel",
    "StateValue",
    "StepTokens",
    "aggregate_scores",
    "dr_grpo_advantages",
    "encode_steps",
    "gae",
    "grade",
    "grpo_advantages",
    "load_prm",
    "monte_carlo_values",
    "rloo_advantages",
    "same_answer",
    "score_steps",
    "split_steps",
    "vineppo_advantages",
]

_MODULES = {
    "BadInput": "data.records",
    "Grade": "data.answers.grade",
    "ProcessRewardModel": "prm",
    "StateValue": "values.monte_carlo",
    "StepTokens": "data.steps",
    "encode_steps": "prm",
    "load_prm": "prm",
    "score_steps": "prm",
}  # all others are in functions

if not TYPE_CHECKING:  # a type checker reads the imports above, and knows what does not exist

    def __getattr__(name: str) -> object:
        """Load a name of `__all__` (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module 'espalier' has no attribute '{name}': it has {', '.join(__all__)}")
        found = getattr(import_module(f"espalier.{_MODULES.get(name, 'functions')}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return what an editor offers: the names of `__all__` beside those that are loaded."""
    return sorted({*globals(), *__all__})
