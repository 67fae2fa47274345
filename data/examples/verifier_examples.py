"""Verifications and solutions in one set of SFT examples: what a generative verifier is trained on (arXiv 2408.15240).

The loss is L(verify) + lambda * L(generate), where each L is the mean of its own set, whatever the sizes of the sets:
with n units in all of which m are of a set, its weights are n / m, times lambda for solutions. A unit is what the
objective's `loss_aggregation` counts: a token that the loss reads, or an example.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from espalier.data.examples.token_examples import DemonstrationExamples, TokenExample
from espalier.data.records import BadInput


def num_units(examples: Sequence[TokenExample], loss_aggregation: str) -> int:
    """Return the tokens that the loss reads, or the examples."""
    if loss_aggregation == "token":
        return sum(len(example.ids) - example.prompt_length for example in examples)
    return len(examples)


def weighted(examples: Sequence[TokenExample], weight: float) -> list[TokenExample]:
    """Return the examples with this weight on every token of the response."""
    return [replace(one, weights=[weight] * (len(one.ids) - one.prompt_length)) for one in examples]


@dataclass(frozen=True)
class VerifierExamples:
    """`verify`: demonstrations of verdicts; `generate`: those of right solutions; `generate_weight`: lambda, above 0
    (for 0 choose examples=demonstrations); `loss_aggregation`: the objective's. Ids get the name of their set before
    them."""

    verify: DemonstrationExamples
    generate: DemonstrationExamples
    generate_weight: float
    loss_aggregation: str

    def load(self, tokenizer: Any) -> list[TokenExample]:
        """Return verifications, then solutions. Raises BadInput where lambda is not above 0."""
        if not self.generate_weight > 0:
            raise BadInput(f"examples.generate_weight must be above 0, got {self.generate_weight:g}: train on "
                           "verifications alone with examples=demonstrations")  # fmt: skip
        sets = {name: getattr(self, name).load(tokenizer) for name in ("verify", "generate")}
        units = {name: num_units(examples, self.loss_aggregation) for name, examples in sets.items()}
        total = sum(units.values())
        scales = {"verify": 1.0, "generate": self.generate_weight}
        return [
            replace(one, id=f"{name}/{one.id}")
            for name, examples in sets.items()
            for one in weighted(examples, scales[name] * total / units[name])
        ]
