"""Rows of a benchmark as what a generative verifier is asked about: every response by itself, as a whole solution.

The question is the one of `prm/score_by_verifier` about a labelled solution of one step: prompt, response, and the
verifier's question where the verdict stands. As a turn the prompt is written by the verifier's chat template, its
answer's beginning included, as policies with a template sample it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from espalier.data.prompts import PromptTemplate, write_chat
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import AnnotatedSolution, BadInput, Problem
from espalier.data.solutions_to_verify import of_annotated
from espalier.data.step_verdicts import StepVerdictFormat
from espalier.data.steps import StepTokens
from espalier.data.verification import VerifierFormat
from espalier.pipeline.evaluation.response_rows import KeptBatch
from espalier.pipeline.stage import StageContext

_QUESTION = "Q"


def asked_layout(is_chat: bool | None, template: PromptTemplate | None) -> tuple[bool | None, str]:
    """Return (whether prompts are turns, by the stage's `is_chat`, else by its template's; who says it), (None, "")
    where neither does. Raises BadInput where one says yes and the other no."""
    own = template.is_chat if template is not None else None
    if is_chat is None:
        return own, "by the prompt's is_chat" if own is not None else ""
    if own not in (None, is_chat):
        raise BadInput(f"stage.is_chat={str(is_chat).lower()} and stage.template.is_chat={str(own).lower()}: set one "
                       "of them to null")  # fmt: skip
    return is_chat, "as asked for"


@dataclass(frozen=True)
class VerifierQuestions:
    """`verifier`: how it is asked; `template`: how a row's prompt is written (None: the prompt and a newline)."""

    verifier: VerifierFormat
    template: PromptTemplate | None = None

    @classmethod
    def of(
        cls, verifier: VerifierFormat | StepVerdictFormat | None, template: PromptTemplate | None, others: Iterable[str]
    ) -> "VerifierQuestions | None":
        """Return the questions of the stage's settings, None without a verifier. Raises BadInput on a verifier of
        steps, on a template that nobody reads, and where `others` are set, which belong to other scorers."""
        if verifier is None:
            if template is not None:
                raise BadInput("stage.template writes prompts for a verifier: set verifier@stage.verifier=solution, or "
                               "leave it out")  # fmt: skip
            return None
        if set_too := next(iter(others), ""):
            raise BadInput(f"a generative verifier's score is p(Yes) of its question: leave out stage.{set_too}")
        if not isinstance(verifier, VerifierFormat) or verifier.unit != "solution":
            raise BadInput("a verifier is asked about whole responses here: choose verifier@stage.verifier=solution")
        return cls(verifier, template)

    def texts(self, row: RankedResponses, tokenizer: Any, is_chat: bool) -> list[str]:
        """Return the texts up to the verdict about each response, chosen ones first. `is_chat`: the prompt is a turn in
        the tokenizer's own chat template."""
        prompt = self._prompt(row, tokenizer, is_chat)
        return [self.verifier.ask(prompt, [text], has_rationale=False) for text in (*row.chosen, *row.rejected)]

    def _prompt(self, row: RankedResponses, tokenizer: Any, is_chat: bool) -> str:
        if is_chat:
            template = self.template or PromptTemplate()
            if row.turns and template.messages(Problem(row.id, _QUESTION, "")) != _asking(_QUESTION):
                raise _without_template(row, "has turns of its own")
            turns = row.turns or template.messages(Problem(row.id, row.prompt, ""))
            return write_chat(tokenizer, turns) + template.continues + template.before_response
        if row.has_implicit_prompt:  # what two texts begin with, maybe within a word
            if self._as_text(row.id, _QUESTION) != PromptTemplate().render(Problem(row.id, _QUESTION, "")):
                raise _without_template(row, "has no prompt of its own, two texts begin alike,")
            return row.prompt
        return self._as_text(row.id, row.prompt)

    def _as_text(self, name: str, question: str) -> str:
        return of_annotated(AnnotatedSolution(name, "", question, [], [], None, None), self.template, "").prompt

    def tokens(self, row: RankedResponses, tokenizer: Any, is_chat: bool) -> Iterator[StepTokens]:
        """Yield the tokens of those texts. Raises BadInput where the tokenizer or its template refuses one."""
        from espalier.models.verdict_probs import question_tokens

        for text in self.texts(row, tokenizer, is_chat):
            yield question_tokens(tokenizer, text, f"row '{row.id}'")

    @property
    def origin(self) -> str:
        """What scores are made by, in words: other words of a verdict are another score."""
        return f"p(Yes) of {self.verifier.yes} against {self.verifier.no}"


def _asking(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _without_template(row: RankedResponses, why: str) -> BadInput:
    """Return the refusal of a row that would be asked about otherwise than the rows around it."""
    return BadInput(f"row '{row.id}' {why} and would be asked about without what stage.template writes around a "
                    "question: leave the template out, or score such rows by themselves")  # fmt: skip


def say_mass(kept: Iterable[KeptBatch], model: str, context: StageContext) -> None:
    """Count the mean of p(Yes) + p(No) over all rows; warn where a verifier answers with neither."""
    from espalier.models.verdict_probs import warn_of_mass

    means = [(fmean(batch.masses), len(batch.masses)) for batch in kept if batch.masses]
    if means:
        mass = sum(mean * number for mean, number in means) / sum(number for _, number in means)
        context.counts["verdict_mass"] = round(mass, 4)
        warn_of_mass([mass], model)
