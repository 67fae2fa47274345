"""What to do with labels that few completions carry: keep, leave out, weight, or denoise them.

- "keep": every label counts in full;
- "drop": labels whose interval is wider than `max_width`, or, for hard labels and classes, reaches over more than one
  label, are left out;
- "weight": the weight of a label is one minus the width of its interval;
- "denoise": the self-denoising annotation of SCAN (arXiv 2509.16548, 2025; the recipe of its released data). The
  first error by Monte Carlo, the first inner state that is lost, tends to lie late, because the policy corrects
  errors: so problems that the policy solves less often than `min_confidence` (there 0.75) are left out; right
  trajectories of the others are right in every step; in wrong ones the step into the first lost state is wrong, the
  `tolerance` (there 2) steps before it carry their value relative to the prompt's, min(1, V(s) / V(prompt)), earlier
  ones are right and later ones have no label. A state is lost where its value is not above the label rule's
  threshold (there 0). The terminal state is no sample of the policy: its 0 says that the answer is wrong, not where
  it went wrong. So a wrong trajectory without a lost inner state has no label at all. Nor has a step of which neither
  its own value is known nor that of a later state before the lost one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.values.labels import LabelRule

POLICIES = ("keep", "drop", "weight", "denoise")


@dataclass(frozen=True)
class NoiseRule:
    """See the module. Raises BadInput on an unknown policy and on values out of range."""

    policy: str = "keep"
    max_width: float = 0.6
    min_confidence: float = 0.75
    tolerance: int = 2

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"there is no noise policy '{self.policy}': choose from {', '.join(POLICIES)}")
        if not 0 <= self.max_width <= 1 or not 0 <= self.min_confidence <= 1:
            raise BadInput(f"max_width and min_confidence must be from 0 to 1, got {self.max_width} and "
                           f"{self.min_confidence}")  # fmt: skip
        if self.tolerance < 0:
            raise BadInput(f"tolerance is a number of steps of at least 0, got {self.tolerance}")

    def apply(
        self, rule: LabelRule, values: Sequence[float | None], low: Sequence[float], high: Sequence[float],
        prompt_value: float, is_correct: bool,
    ) -> tuple[list[float | None], list[float]]:  # fmt: skip
        """Return (labels, weights) of the S steps of a trajectory from their values and intervals, S each; the last
        state is the terminal one."""
        if self.policy == "denoise":
            return self._denoised(rule, values, prompt_value, is_correct)
        labels = [None if value is None else rule.label(value) for value in values]
        widths = [above - below for below, above in zip(low, high, strict=True)]
        if self.policy == "drop":
            for step, (below, above) in enumerate(zip(low, high, strict=True)):
                if widths[step] > self.max_width or (rule.kind != "soft" and not rule.is_clear(below, above)):
                    labels[step] = None
        weights = [1.0 - width for width in widths] if self.policy == "weight" else [1.0] * len(labels)
        return labels, [0.0 if label is None else weight for label, weight in zip(labels, weights, strict=True)]

    def _denoised(
        self, rule: LabelRule, values: Sequence[float | None], prompt_value: float, is_correct: bool
    ) -> tuple[list[float | None], list[float]]:
        num = len(values)
        if prompt_value < self.min_confidence or not num:
            return [None] * num, [0.0] * num
        if is_correct:
            return [1.0] * num, [1.0] * num
        inner = values[:-1]
        error = next((step for step, value in enumerate(inner) if value is not None and value <= rule.threshold), None)
        if error is None:
            return [None] * num, [0.0] * num
        num_good = max((step + 1 for step in range(error) if values[step] is not None), default=0)
        labels: list[float | None] = [1.0] * num_good + [None] * (error - num_good) + [0.0] + [None] * (num - error - 1)
        for step in range(max(0, error - self.tolerance), error):
            value = values[step]
            labels[step] = None if value is None else rule.label(min(1.0, value / max(prompt_value, 1e-9)))
        return labels, [0.0 if label is None else 1.0 for label in labels]
