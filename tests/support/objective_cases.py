"""What the tests of objectives share: a model of given logits, two examples of each kind, losses in plain floats."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample
from espalier.models.load import load_policy, load_reference
from espalier.models.scalar_head import load_process_reward
from espalier.training.objectives.bradley_terry import BradleyTerry
from espalier.training.objectives.dpo import DirectPreference
from espalier.training.objectives.dpo_positive import PositivePreference
from espalier.training.objectives.dpo_robust import RobustPreference
from espalier.training.objectives.hinge import HingePreference
from espalier.training.objectives.implicit_ce import ImplicitCrossEntropy
from espalier.training.objectives.ipo import IdentityPreference
from espalier.training.objectives.kto import KahnemanTversky
from espalier.training.objectives.nca import NoiseContrastive
from espalier.training.objectives.objective import Objective
from espalier.training.objectives.outcome_reward import OutcomeRewardObjective
from espalier.training.objectives.preference import PairObjective
from espalier.training.objectives.process_reward import ProcessRewardObjective
from espalier.training.objectives.sft import SupervisedFineTuning
from tests.support.slow import slow_unless

PADDED = Layout("padded")
DEMONSTRATIONS = [TokenExample("a", [5, 6, 7, 8], 2), TokenExample("b", [9, 4, 3], 1, [0.5, -2.0])]
PAIRS = [PairExample("p", [5, 6], [7, 8, 1], [9], 0.5), PairExample("q", [4], [3, 2], [8, 8], 0.25)]
# The tokens after the prompt of each side, as (ids, start): chosen, rejected, chosen, rejected.
SIDES = [([5, 6, 7, 8, 1], 2), ([5, 6, 9], 2), ([4, 3, 2], 1), ([4, 8, 8], 1)]
STEPS = [StepExample("a", [5, 6, 7, 8], [1, 3], [1.0, 0.25], [1.0, 2.0]), StepExample("b", [9, 4], [1], [0.5])]
OUTCOMES = [
    OutcomeExample("a", [5, 6, 7, 8], 2, 1.0, 1.0, [3, 2, 1]),
    OutcomeExample("b", [9, 4, 3], 1, 0.0, 2.0, [7]),
]

PAIR_OBJECTIVES: dict[str, Any] = {
    "dpo": lambda reference: DirectPreference(reference, beta=0.5),
    "dpo with sft": lambda reference: DirectPreference(reference, beta=0.5, sft_weight=0.3),
    "cdpo": lambda reference: DirectPreference(reference, beta=0.5, label_smoothing=0.1),
    "length normalised": lambda reference: DirectPreference(reference, beta=2.0, is_length_normalised=True),
    "robust": lambda reference: RobustPreference(reference, beta=0.5, flip_rate=0.2),
    "ipo": lambda reference: IdentityPreference(reference, beta=0.2),
    "hinge": lambda reference: HingePreference(reference, beta=0.5),
    "nca": lambda reference: NoiseContrastive(reference, beta=0.5),
    "positive": lambda reference: PositivePreference(reference, beta=0.5, penalty=3.0, label_smoothing=0.05),
}
OBJECTIVES = [
    "sft token", "sft sequence", "sft batch", "soft labels", "hard labels", "classes", "outcome", "two classes",
    "bradley-terry", "reference-free", "kto", "kto without baseline", "implicit ce", *PAIR_OBJECTIVES,
]  # fmt: skip
# For what depends on batches and not on the function of a margin, in which alone these four differ from "dpo".
BATCH_CASES = slow_unless(lambda name: name not in ("cdpo", "robust", "hinge", "nca"), OBJECTIVES)


class Fixed:
    """A model whose logits [B, T, L] are given."""

    def __init__(self, logits: torch.Tensor):
        self.logits = logits

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits[: input_ids.shape[0], : input_ids.shape[1]])

    def to(self, device: torch.device) -> "Fixed":
        return self


def random_logits(rows: int, length: int, labels: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, length, labels, generator=torch.Generator().manual_seed(seed))


def token_logprobs(logits: torch.Tensor, ids: list[int], start: int) -> list[float]:
    """The log-probs of ids[start:], one token at a time, in float64."""
    found = []
    for t in range(start, len(ids)):
        row = [math.exp(value) for value in logits[t - 1].double().tolist()]
        found.append(math.log(row[ids[t]] / sum(row)))
    return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_softmax(row: torch.Tensor) -> list[float]:
    values = row.double().tolist()
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def case(name: str, policy: Path) -> tuple[Objective, Any, list[Any]]:
    """(objective, fresh model, two examples)."""
    path = str(policy)
    if name.startswith("sft"):
        return SupervisedFineTuning(name.split()[1]), load_policy(path), DEMONSTRATIONS
    if name == "bradley-terry":
        objective = BradleyTerry(margin_scale=1.0, label_smoothing=0.1, centring=0.01)
        return objective, load_process_reward(path, 1), PAIRS
    if name in ("outcome", "two classes"):
        return OutcomeRewardObjective(), load_process_reward(path, 1 if name == "outcome" else 2), OUTCOMES
    if name in ("soft labels", "hard labels", "classes"):
        hard_above = 0.3 if name == "hard labels" else None
        return ProcessRewardObjective(hard_above), load_process_reward(path, 5 if name == "classes" else 1), STEPS
    reference = load_reference(path)
    if name.startswith("kto"):
        has_baseline = name == "kto"
        return KahnemanTversky(reference, 0.5, 1.0, 1.5, has_baseline), load_policy(path), OUTCOMES
    if name == "implicit ce":
        return ImplicitCrossEntropy(reference, 0.5), load_policy(path), OUTCOMES
    if name == "reference-free":
        objective_free: PairObjective = DirectPreference(None, beta=2.0, is_length_normalised=True, target_margin=1.0)
        return objective_free, load_policy(path), PAIRS
    return PAIR_OBJECTIVES[name](reference), load_policy(path), PAIRS
