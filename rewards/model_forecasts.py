"""Models that read responses in free words: which answers a paragraph offers, how probable each is by it, and whether
the paragraph as a whole is right (Band et al. 2024, arXiv 2404.00474, sections on surrogate readers).

The extracting model is a language model trained on `stage.target=extraction` of `problems/make_reader_data` or
`problems/import_calibration_data`, the forecaster an outcome reward model trained on `target=forecasting`; both are
asked with the texts of their training (`data.reader_prompts`) in their own tokenizers. Extraction samples at a
temperature of 0.3 in the published runs.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from espalier.data.answers.short_answers import golds
from espalier.data.answers.stated_answers import Forecast
from espalier.data.examples.token_examples import encode_demonstrations
from espalier.data.reader_prompts import extraction_prompt, factuality_prompt, forecast_prompt, read_answers
from espalier.data.reader_questions import Questions
from espalier.data.records import BadInput, Demonstration, Problem, Trajectory
from espalier.data.training_layout import RESPONSES
from espalier.models.frozen_reward import load_frozen_reward, place
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import scores_from_logits
from espalier.models.text_writer import TextWriter
from espalier.rewards.process import row_logits
from espalier.rewards.score import HoldsEngines, Score, ScoreRange


class TextScorer:
    """A scalar head that is read at the end of a text behind a prompt, in its own tokenizer."""

    reads_texts: ClassVar[bool] = True
    reads_frozen_reward: ClassVar[bool] = True

    def __init__(self, path: str, batch_tokens: int = 16384, attention: str = "auto"):
        self.path, self.batch_tokens = path, batch_tokens
        self.model: Any = load_frozen_reward(path, RESPONSES, attention).eval()
        self.tokenizer = load_tokenizer(path)

    @torch.inference_mode()
    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return a score in [0, 1] of each (prompt, text), tokenised as in training."""
        if not pairs:
            return []
        texts = [Demonstration(str(place), prompt, text) for place, (prompt, text) in enumerate(pairs)]
        rows = [example.ids for example in encode_demonstrations(self.tokenizer, texts, self.path)]
        scores = [0.0] * len(rows)
        for batch in row_logits(self.model, rows, self.tokenizer.pad_token_id, self.batch_tokens):
            for index, logits in batch:
                scores[index] = float(scores_from_logits(logits[-1]))
        return scores


class WritesTexts(Protocol):
    """What lists answers: `models.text_writer.TextWriter` in this process, `rewards.asked_writer.AskedWriter` through
    engines."""

    def __call__(self, prompts: Sequence[str]) -> list[str | None]:
        """Return continuations, in order; None where one did not end."""


class ModelForecasts:
    """Forecasts of responses in free words (`rewards.calibration.Forecasts`). `extractor` lists the answers, of which
    `forecaster` says how probable each is; `problems`: a file of them, for their questions. A list of answers that does
    not end offers nothing, as a response that was cut."""

    def __init__(self, extractor: WritesTexts, forecaster: TextScorer, problems: str):
        self.questions = Questions(problems)
        self.writer, self.scorer = extractor, forecaster

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem whose question is not there."""
        self.questions.check_problems(problems)

    def to(self, device: torch.device) -> None:
        """Move the networks of this process."""
        if isinstance(self.writer, TextWriter):
            self.writer.model.to(device)  # type: ignore[arg-type]
        place(self.scorer.model, device)

    @property
    def has_engines(self) -> bool:
        """Whether the extractor asks some."""
        return isinstance(self.writer, HoldsEngines)

    def close(self) -> None:
        """End the extractor's engines, where it has some."""
        if isinstance(self.writer, HoldsEngines):
            self.writer.close()

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Forecast]:
        """Extract, then forecast every answer and the gold (the first of its names), offered or not, as published. A
        response that was cut offers nothing, and its gold has 0. Raises BadInput where a gold is missing."""
        whole = [row for row in trajectories if row.finish_reason == "stop"]
        questions = [self.questions.of(row.problem_id) for row in whole]
        lists = self.writer(
            [extraction_prompt(asked, row.response) for asked, row in zip(questions, whole, strict=True)]
        )
        offered = [read_answers(text or "") for text in lists]
        asked_of = []
        for row, question, answers in zip(whole, questions, offered, strict=True):
            names = golds(row.gold)
            if not names:
                raise BadInput(f"problem '{row.problem_id}' has no gold answer: a calibration reward needs one")
            prompt = forecast_prompt(question, row.response)
            asked_of.append([(prompt, text) for text in [*answers, names[0]]])
        scores = iter(self.scorer([pair for pairs in asked_of for pair in pairs]))
        read = iter([([next(scores) for _ in answers], next(scores)) for answers in offered])
        forecasts, answers_of = [], iter(offered)
        for row in trajectories:
            if row.finish_reason != "stop":
                forecasts.append(Forecast())
                continue
            probabilities, gold = next(read)
            forecasts.append(Forecast(tuple(next(answers_of)), tuple(probabilities), gold))
        return forecasts


class FactualityReward:
    """1 where a model takes the whole response to be right (its score is above 1/2), else 0: the baseline that
    linguistic calibration is compared with. A response that was cut is not right."""

    has_readers = True
    reads_texts: ClassVar[bool] = True

    def __init__(self, path: str, problems: str, batch_tokens: int = 16384, attention: str = "auto"):
        self.questions = Questions(problems)
        self.scorer = TextScorer(path, batch_tokens, attention)

    @classmethod
    def score_range(cls, settings: dict[str, Any]) -> ScoreRange:
        """Return 0 to 1."""
        return ScoreRange((0.0, 1.0))

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise BadInput on a problem whose question is not there."""
        self.questions.check_problems(problems)

    def to(self, device: torch.device) -> None:
        """Move the network."""
        place(self.scorer.model, device)

    def networks(self) -> dict[str, Any]:
        """None that is given the policy's ids."""
        return {}

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return an outcome each; the part is the probability that the response is right."""
        scores = self.scorer(
            [(factuality_prompt(self.questions.of(row.problem_id)), row.response) for row in trajectories]
        )
        return [Score(float(score > 0.5 and row.finish_reason == "stop"), parts={"factuality": score})
                for row, score in zip(trajectories, scores, strict=True)]  # fmt: skip
