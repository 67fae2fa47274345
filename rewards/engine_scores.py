"""Scores of steps by engines that give a process reward model's logits: read at the same places and by the same formula
as `rewards.process` reads its own, and held against it before they are believed.

An engine that reads a head otherwise (another activation, other places, a cache that is not this model's) answers as
readily as one that is right. So the first solutions are scored by transformers too (`check_scores`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from espalier.data.records import BadInput
from espalier.data.steps import StepTokens, TokenRow
from espalier.models.load import BadModel, load_config
from espalier.models.scalar_head import load_process_reward, scores_from_logits
from espalier.rewards.process import score_step_tokens

log = logging.getLogger(__name__)

# What bf16 does to a score, seen on tiny models with steep heads: 0.003 on average, 0.011 at most.
LARGEST_GAP, LARGEST_MEAN_GAP = 0.1, 0.02


Reads = Callable[[torch.Tensor], torch.Tensor]
"""Logits [S, L] → scores [S]."""


class ScoresDiffer(RuntimeError):
    """Engines and transformers disagree about the same solutions."""

    exit_code = 2


class TokenScorer(Protocol):
    """What gives logits of token rows: `sampling.engine_scorer.EngineScorer`."""

    @property
    def max_length(self) -> int:
        """The longest row that it takes, in tokens."""

    @property
    def num_engines(self) -> int:
        """How many engines there are."""

    def open(self, model: str, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Start with this model; `options` are those of an engine that the model needs."""

    def token_logits(
        self,
        rows: Sequence[TokenRow],
        batch_tokens: int,
        on_batch: Callable[[list[int], list[list[list[float]]]], None],
    ) -> None:
        """Give `on_batch` the places of a batch's rows, and the logits [L] at each of their asked places."""

    def close(self) -> None:
        """End it."""


def check_engine_model(path: str) -> None:
    """Raise BadModel unless the folder has a head at every token, which is all that engines read."""
    from espalier.models.log_ratio_reward import is_log_ratio_reward

    if is_log_ratio_reward(path):
        raise BadModel(f"{path} scores by the log-ratio of two policies and has no head that an engine reads: leave "
                       "client out, transformers scores it")  # fmt: skip
    kinds = load_config(path).architectures or []
    if not any(name.endswith(("ForTokenClassification", "ForSequenceClassification")) for name in kinds):
        raise BadModel(f"{path} is no reward model ({', '.join(kinds) or 'no architecture named'}): engines read "
                       "folders with a linear head, of tokens or of whole texts")  # fmt: skip


def token_row(solution: StepTokens) -> TokenRow:
    """Return the row of a solution with one step at least, asked at the last token of every step."""
    start = len(solution.prompt_ids)
    places = [start + end - 1 for end in solution.step_ends]
    return TokenRow(solution.name, [*solution.prompt_ids, *solution.response_ids], places)


def score_by_engines(
    engines: TokenScorer,
    solutions: Sequence[StepTokens],
    batch_tokens: int,
    on_scores: Callable[[list[int], list[list[float]]], None],
    read: Reads = scores_from_logits,
) -> None:
    """Give `on_scores`, as batches are done, the places of their solutions and the score in [0, 1] after every step, as
    `rewards.process.score_step_tokens` gives them, or as they are `read` off logits. Equal solutions are scored once;
    one without steps has no scores.

    Raises BadInput for a row that is longer than the engines take, and what the engines raise.
    """
    same: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    rows: list[TokenRow] = []
    for place, solution in enumerate(solutions):
        row = token_row(solution)
        if row.places:
            copies = same.setdefault((tuple(row.ids), tuple(row.places)), [])
            if not copies:
                rows.append(row)
            copies.append(place)
    check_lengths(engines, solutions)
    if empty := [place for place, solution in enumerate(solutions) if not solution.step_ends]:
        on_scores(empty, [[] for _ in empty])
    copies_of = list(same.values())

    def on_batch(places: list[int], logits: list[list[list[float]]]) -> None:
        done = [
            (copy, read_scores(row, read))
            for place, row in zip(places, logits, strict=True)
            for copy in copies_of[place]
        ]
        on_scores([copy for copy, _ in done], [scores for _, scores in done])

    if rows:
        engines.token_logits(rows, batch_tokens, on_batch)


def read_scores(logits: Sequence[Sequence[float]], read: Reads = scores_from_logits) -> list[float]:
    """Return the scores of logits [S, L], rounded as those of transformers are."""
    return [round(float(value), 6) for value in read(torch.tensor(logits))]


def check_lengths(engines: TokenScorer, solutions: Sequence[StepTokens]) -> None:
    """Raise BadInput, with the remedy, for a solution that is longer than the engines take; they need not run yet."""
    lengths = [len(solution.prompt_ids) + len(solution.response_ids) for solution in solutions]
    if (longest := max(lengths, default=0)) > engines.max_length:
        name = solutions[lengths.index(longest)].name
        raise BadInput(f"{name} has {longest} tokens and the engines take {engines.max_length}: set "
                       f"client.max_model_len={longest}")  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """How far engines and transformers are apart: over `num_scores`, on average and at most."""

    num_scores: int
    mean_gap: float
    largest_gap: float

    def __str__(self) -> str:
        return f"{self.num_scores} scores, {self.mean_gap:.4f} apart on average and {self.largest_gap:.4f} at most"


def check_scores(
    engines: TokenScorer,
    solutions: Sequence[StepTokens],
    expected: Sequence[Sequence[float]],
    read: Reads = scores_from_logits,
) -> Agreement:
    """Compare engines with the `expected` scores of transformers: all steps of every solution, and once more the last
    step alone, for which the prefix cache is read.

    Raises ScoresDiffer beyond what bf16 does, and what the engines raise.
    """
    whole = [token_row(solution) for solution in solutions if solution.step_ends]
    last = [TokenRow(row.name, row.ids, row.places[-1:]) for row in whole]
    wanted = [list(scores) for scores in expected if scores]
    gaps: list[float] = []
    for rows, scores in ((whole, wanted), (last, [row[-1:] for row in wanted])):
        gaps += _gaps(engines, rows, scores, read)
    found = Agreement(len(gaps), sum(gaps) / max(len(gaps), 1), max(gaps, default=0.0))
    if found.mean_gap > LARGEST_MEAN_GAP or found.largest_gap > LARGEST_GAP:
        raise ScoresDiffer(
            f"engines and transformers score the same solutions differently: {found}, where bf16 explains "
            f"{LARGEST_MEAN_GAP} and {LARGEST_GAP}: leave client out, or see whether client.dtype=float32 agrees"
        )
    return found


def _gaps(
    engines: TokenScorer, rows: Sequence[TokenRow], expected: Sequence[Sequence[float]], read: Reads
) -> list[float]:
    """Return |engine - expected| of every asked place of every row; of numbers beyond 1 (logits), relative to them."""
    gaps: list[float] = []

    def on_batch(places: list[int], logits: list[list[list[float]]]) -> None:
        for place, row in zip(places, logits, strict=True):
            pairs = zip(read_scores(row, read), expected[place], strict=True)
            gaps.extend(abs(one - other) / max(1.0, abs(other)) for one, other in pairs)

    if rows:
        engines.token_logits(rows, max(len(row.ids) for row in rows) * len(rows), on_batch)
    return gaps


class EngineScoredModel:
    """A process reward model behind engines, where a network is asked for (`models.scalar_head.ScoresSteps`).

    Args: its folder `path`; `engines`, which start when they are asked first; then `num_checked` solutions are scored
    by transformers too; `read` makes numbers of logits. Raises BadModel on a folder that engines do not read.
    """

    def __init__(self, path: str, engines: TokenScorer, num_checked: int = 4, read: Reads = scores_from_logits):
        check_engine_model(path)
        self.read = read
        self.path, self.engines, self.num_checked = path, engines, num_checked
        self.config = load_config(path)
        self._is_open = False

    def eval(self) -> "EngineScoredModel":
        """Return itself: engines do nothing else."""
        return self

    def to(self, device: torch.device) -> "EngineScoredModel":
        """Return itself: engines have devices of their own."""
        return self

    def scores(
        self, rows: Sequence[StepTokens], batch_tokens: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> list[list[float]]:
        """Return the score in [0, 1] (or what is `read`) after every step of every solution. Raises ScoresDiffer,
        BadInput on a row that is too long, and what engines raise."""
        if not self._is_open:
            self._start(rows)
        found: dict[int, list[float]] = {}

        def keep(places: list[int], scores: list[list[float]]) -> None:
            found.update(zip(places, scores, strict=True))
            on_progress(len(found))

        score_by_engines(self.engines, rows, batch_tokens, keep, self.read)
        return [found[place] for place in range(len(rows))]

    def _start(self, rows: Sequence[StepTokens]) -> None:
        check_lengths(self.engines, rows)
        checked = [row for row in rows if row.step_ends][: self.num_checked]
        network = load_process_reward(self.path) if checked else None
        expected = score_step_tokens(network, checked, pad_id=0, read=self.read) if checked else []
        self.engines.open(self.path)
        self._is_open = True
        if checked:
            log.info("engines agree with transformers: %s", check_scores(self.engines, checked, expected, self.read))

    def close(self) -> None:
        """End the engines."""
        self._is_open = False
        self.engines.close()
