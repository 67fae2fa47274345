"""Pointwise outcome rewards: predict from the last token of a whole response how good it is.

With one label binary cross-entropy against the outcome or a probability of it (soft labels), with two labels the
2-class outcome model (Cobbe et al. 2021; Jiao et al. 2024): formulas in `training.objectives.scalar_targets`.
Responses compared in pairs are `training.objectives.bradley_terry`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_outcomes
from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import OutcomeExample
from espalier.training.objectives.scalar_targets import ScalarRewardObjective


@dataclass
class OutcomeRewardObjective(ScalarRewardObjective):
    """One read a response, at its last token."""

    def collate(self, examples: Sequence[OutcomeExample], layout: Layout) -> Batch:
        """Return one row and one read an example."""
        return collate_outcomes(examples, layout)
