"""StepValues → a process reward model of two policies (`models.log_ratio_reward`): nothing is trained but its scale.

    python run_stage.py -cn prm/make_log_ratio_reward input=labelled_steps.jsonl output=prm \\
      stage.policy=RUN/dpo/model stage.reference=SFT_MODEL

Labels of steps say where among the log-ratios right and wrong part: slope and offset are their logistic regression on
the joined log-ratio (Platt 1999), so that 1/2 is a step as likely right as wrong. Without an input they are beta and
0, and scores say the order alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from espalier.data.examples.token_examples import is_in_part
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, StepValues
from espalier.data.splits import split_key
from espalier.data.steps import step_tokens
from espalier.data.training_problems import write_problems_of_log_ratio
from espalier.models.log_ratio_reward import LogRatioReward, Scale, is_log_ratio_reward, write_log_ratio_reward
from espalier.pipeline.stage import StageContext
from espalier.runtime.manifest import write_folder

_ROUNDS = 100
_RIDGE = (
    1e-3  # of the weight of all labels, on the slope of standardised ratios: labels that part exactly have no scale
)


def fit_scale(ratios: Sequence[float], labels: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return (slope, offset) that make sigmoid(slope x + offset) of the log-ratios x likeliest, given labels in [0, 1]
    and their weights; Newton's method in float64 on standardised ratios, the slope shrunk by a thousandth.

    Raises BadInput where all ratios or all labels are alike, and where the score would fall as the ratio rises.
    """
    x, y, w = (np.asarray(values, dtype=np.float64) for values in (ratios, labels, weights))
    total = w.sum()
    if not total > 0 or not 0 < (w * y).sum() / total < 1:
        raise BadInput(f"of {len(y)} labels of steps none parts right from wrong: all are alike")
    mean = (w * x).sum() / total
    spread = math.sqrt((w * (x - mean) ** 2).sum() / total)
    if not spread > 0:
        raise BadInput("the log-ratios of all labelled steps are alike: train the policy on more pairs")
    design = np.stack([(x - mean) / spread, np.ones_like(x)], axis=1)
    penalty = np.diag([_RIDGE * total, 0.0])
    found = np.zeros(2)
    for _ in range(_ROUNDS):
        shares = 1 / (1 + np.exp(-np.clip(design @ found, -500, 500)))
        slope = design.T @ (w * (shares - y)) + penalty @ found
        curve = design.T @ (design * (w * shares * (1 - shares))[:, None]) + penalty + 1e-9 * total * np.eye(2)
        step = np.linalg.solve(curve, slope)
        found -= step * min(1.0, 5.0 / max(1e-12, float(np.abs(step).max())))
        if float(np.abs(step).max()) < 1e-10:
            break
    if not found[0] > 0:
        raise BadInput("the policy makes right steps no likelier than wrong ones, as their labels say: train it "
                       "longer, or on more pairs")  # fmt: skip
    return float(found[0] / spread), float(found[1] - found[0] * mean / spread)


def _check_pair(policy: str, reference: str) -> None:
    """Raise BadInput where two folders are one model, or of different tokenizers."""
    from espalier.models.load import load_tokenizer

    if Path(policy).resolve() == Path(reference).resolve():
        raise BadInput(f"stage.policy and stage.reference are one model, {policy}: every log-ratio would be 0")
    if load_tokenizer(policy).get_vocab() != load_tokenizer(reference).get_vocab():
        raise BadInput(f"{policy} and {reference} have different tokenizers: name the policy that stage.policy was "
                       "trained from")  # fmt: skip


@dataclass(frozen=True)
class MakeLogRatioReward:
    """Two causal LMs with one tokenizer; the output is a folder."""

    policy: str
    """the folder or hub name of the policy that was trained on pairs"""
    reference: str | None
    """that of the policy that it was trained from; null, to compare: scores of the policy's log-probs alone"""
    how: str = "minimum"
    """minimum or sum of the steps' log-ratios so far, step: this step's alone, token: the lowest of its tokens, whole:
    that of the whole solution, at every step"""
    beta: float = 0.5
    """the slope where there are no labels"""
    part: str = "all"
    """the problems whose labels are read: all, train or held_out"""
    held_out_share: float = 0.0
    """of the problems, where `part` is not all"""
    batch_tokens: int = 8192
    """padded tokens of one forward pass"""

    def __post_init__(self) -> None:
        _ = self._unfitted

    @property
    def _unfitted(self) -> Scale:
        return Scale(self.how, self.beta, has_reference=self.reference is not None)

    def inputs(self) -> list[str]:
        """Return nothing: model folders that the config names are inputs of every stage."""
        return []

    def run(self, input_path: str, context: StageContext) -> None:
        """Write the folder, complete or not at all. Raises BadInput where the models are one, their tokenizers differ,
        or labels give no scale, and BadModel where one is not to be had."""
        from espalier.models.hub_snapshot import local_model
        from espalier.models.load import load_policy
        from espalier.runtime.distributed import device

        first, second = local_model(self.policy), None if self.reference is None else local_model(self.reference)
        if second is not None:
            _check_pair(first, second)
        if context.output.is_dir() and not is_log_ratio_reward(str(context.output)):
            raise BadInput(f"{context.output} holds another model: choose another output, or remove it")
        rows = self._labelled(input_path) if input_path else []
        scale = self._unfitted
        if rows:
            policy, reference = (None if path is None else load_policy(path) for path in (first, second))
            scale = self._fitted(LogRatioReward(policy, reference, scale).to(device()), rows, context)

        def write(partial: Path) -> None:
            write_log_ratio_reward(partial, first, second, scale)
            write_problems_of_log_ratio(partial, first)

        write_folder(context.output, write)
        context.counts.update(slope=round(scale.slope, 6), offset=round(scale.offset, 6))

    def _labelled(self, path: str) -> list[StepValues]:
        found = [
            row
            for row in read_records(StepValues, path)
            if is_in_part(split_key(row), self.part, self.held_out_share)
            and any(label is not None and weight > 0 for label, weight in zip(row.labels, row.weights, strict=True))
        ]
        if not found:
            raise BadInput(f"{path}: no labelled step of the problems of part {self.part}")
        return found

    def _fitted(self, model: LogRatioReward, rows: Sequence[StepValues], context: StageContext) -> Scale:
        tokens = list(map(step_tokens, rows))
        with context.progress("log-ratios", len(rows), "solution") as progress:
            ratios = model.ratios(tokens, self.batch_tokens, progress.update)
        if not any(value for row in ratios for value in row):
            raise BadInput(f"{self.policy} and {self.reference} give every step the same log-prob: one is a copy of "
                           "the other")  # fmt: skip
        read = [
            (ratio, label, weight)
            for row, of_row in zip(rows, ratios, strict=True)
            for ratio, label, weight in zip(of_row, row.labels, row.weights, strict=True)
            if label is not None and weight > 0
        ]
        context.counts.update(solutions=len(rows), labels=len(read))
        x, y, w = zip(*read, strict=True)
        slope, offset = fit_scale(x, y, w)
        return replace(model.scale, slope=slope, offset=offset)
