"""One reward model that scores rows of token ids: by transformers in this process, or by vLLM engines that are held
against transformers before they are believed."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.pipeline.prm.step_inputs import TASK, TOKENS, WHOLE
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

Scores = Callable[[Sequence[StepTokens]], list[list[float]]]


def shown(deviations: Mapping[str, Any]) -> str:
    """Return deviations as text."""
    from espalier.models.published.table import with_newlines

    return ", ".join(f"{name}={with_newlines(value)!r}" for name, value in deviations.items())


@dataclass(frozen=True)
class StepModel:
    """A model's `folder`, how it reads solutions (`layout`) and its `tokenizer`; `batch_tokens` of one forward pass, or
    of one call of an engine; `num_checked` rows are scored by transformers too where engines score; `deviations` from
    how its authors read it (`models.published.table.deviate`)."""

    folder: str
    layout: str
    tokenizer: Any
    batch_tokens: int
    num_checked: int
    deviations: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def row(self) -> Any:
        """How a published model is read; None for one trained here. Raises BadInput on deviations that it has not."""
        from espalier.models.published.load import row_of
        from espalier.models.published.table import deviate

        if self.layout not in (TOKENS, TASK, WHOLE):
            return deviate(row_of(self.layout, self.folder), self.deviations)
        if self.deviations:
            raise BadInput(f"stage.deviations are of how others' models are read, and {self.folder} is read as "
                           f"{self.layout}: leave them out, or name a layout of models/published/table.py")  # fmt: skip
        return None

    @property
    def read_as(self) -> str:
        """The layout in words, with what differs from it."""
        return f"{self.layout}, but {shown(self.deviations)}" if self.deviations else self.layout

    def by_transformers(self, on_cpu: bool = False) -> Scores:
        """Load the network; `on_cpu`: the GPU is left to engines."""
        import torch

        from espalier.runtime.distributed import device

        place = torch.device("cpu") if on_cpu else device()
        if self.row is not None:
            from espalier.models.published.load import load_published
            from espalier.models.published.scoring import PublishedScorer

            network = load_published(self.folder, self.row)
            network.to(place)
            scorer = PublishedScorer(network, self.tokenizer, self.row)
            return lambda rows: scorer.scores_of(rows, self.batch_tokens)
        from espalier.models.scalar_head import load_process_reward, outcome_scores, scores_from_logits
        from espalier.rewards.process import score_step_tokens

        model, pad_id = load_process_reward(self.folder), int(self.tokenizer.pad_token_id)
        model.to(place)
        read = outcome_scores if self.layout == WHOLE else scores_from_logits
        return lambda rows: score_step_tokens(model, rows, pad_id=pad_id, batch_tokens=self.batch_tokens, read=read)

    def engine_form(self) -> Any:
        """Return how engines serve it (`models.published.engines.EngineForm`). Raises BadModel where they do not."""
        from espalier.models.published.engines import EngineForm, engine_form
        from espalier.models.scalar_head import scores_from_logits
        from espalier.rewards.engine_scores import check_engine_model

        if self.row is not None:
            return engine_form(self.folder, self.row, self.tokenizer)
        check_engine_model(self.folder)
        return EngineForm(_OwnRead(scores_from_logits))

    @contextmanager
    def by_engines(self, first: Sequence[StepTokens], context: StageContext) -> Iterator[Scores]:
        """Start the engines, hold them against transformers on some of the `first` rows, and end them behind the block.
        Raises ScoresDiffer, and what engines raise."""
        from espalier.models.scalar_head import outcome_scores
        from espalier.rewards.engine_scores import check_scores, score_by_engines

        form, engines = self.engine_form(), context.engines
        checked = [row for row in first if row.step_ends][: self.num_checked]
        expected = self.by_transformers(on_cpu=True)(checked) if checked else []

        def read(logits: Any) -> Any:
            return outcome_scores(logits) if self.layout == WHOLE else form.read.scores(logits, self.tokenizer)

        def scores(rows: Sequence[StepTokens]) -> list[list[float]]:
            found: dict[int, list[float]] = {}

            def keep(places: list[int], batch: list[list[float]]) -> None:
                found.update(zip(places, batch, strict=True))

            score_by_engines(engines, rows, self.batch_tokens, keep, read)
            return [found[place] for place in range(len(rows))]

        try:
            engines.open(self.folder, form.options)
            if checked:
                agreement = check_scores(engines, checked, expected, read)
                log.info("engines agree with transformers: %s", agreement)
                largest = max(agreement.largest_gap, context.counts.get("largest_gap", 0.0))
                context.counts["largest_gap"] = round(largest, 6)
            yield scores
        finally:
            engines.close()


@dataclass(frozen=True)
class _OwnRead:
    """Scores of heads that are trained here, which need no tokenizer."""

    read: Callable[[Any], Any]

    def scores(self, logits: Any, tokenizer: Any) -> Any:
        """See `models.published.reads.Read`."""
        return self.read(logits)
