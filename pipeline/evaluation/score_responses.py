"""RankedResponses → ResponseScores: what a scorer says of every response. Four kinds of scorers:

- **scalar**: `model` is a reward model; the logit at the last token (one label), or the expected share (classes);
- **log-ratio**: `model` is a policy and `reference` another, or the model is a folder of `models.log_ratio_reward`; the
  score is the sum over the response's tokens of log pi - log pi_ref (DPO's implicit reward, Rafailov et al. 2023), with
  `aggregate=average` its mean per token. `is_reference_free` takes log pi alone, of which `aggregate=norm` takes minus
  the Euclidean length of the tokens' log-probs;
- **verifier**: `model` is a generative verifier, asked as `verifier` says: p(Yes), read in one pass
  (`pipeline.evaluation.verifier_questions`);
- **judge**: `judgements` of a model that was asked about each row in both orders (`requests=judge_responses`), or that
  rated each response by itself (`requests=rate_responses`): `pipeline.evaluation.judged_responses`.

A model that was trained on rows of the file is refused (`data.seen_responses`): its accuracy would be memory.

Of a reward model `client=data_parallel_engines` asks vLLM engines, which are held against transformers first.

Rows are read one by one; their token ids lie on disk (`response_rows`), so that memory does not grow with them, and
batches are those of all rows at once. Their scores are kept batch by batch: a run that was stopped goes on by the same
command, to the same bytes. Several ranks take turns with the batches; each of them reads all rows.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from espalier.data.conversations import ended_response, pair_of_wholes, responses_of_turns
from espalier.data.jsonl import file_sha256
from espalier.data.prompts import PromptTemplate, encode_text
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput
from espalier.data.row_index import ProblemRows, hash_of
from espalier.data.seen_responses import is_seen, read_training_responses
from espalier.data.sources import BadRow
from espalier.data.step_verdicts import StepVerdictFormat
from espalier.data.steps import StepTokens
from espalier.data.training_layout import CHAT, FILE, RESPONSES, STEPS, TEXT, read_training_layout
from espalier.data.verification import VerifierFormat
from espalier.pipeline.evaluation.judged_responses import judge_scores, judgement_kind
from espalier.pipeline.evaluation.response_rows import KeptBatch, ResponseRows
from espalier.pipeline.evaluation.response_scorers import (
    AGGREGATES,
    NORM,
    EngineHead,
    NetworkScorer,
    VerifierScorer,
    own_policies,
)
from espalier.pipeline.evaluation.verifier_questions import VerifierQuestions, asked_layout, say_mass
from espalier.pipeline.score_parts import ScoreParts, model_on_ranks, scored_by
from espalier.pipeline.stage import StageContext
from espalier.runtime.distributed import barrier
from espalier.runtime.fingerprints import model_fingerprint

log = logging.getLogger("stage")
_ROWS, _JUDGEMENTS = range(2)  # files of the index


def encode_row(tokenizer: Any, row: RankedResponses, is_chat: bool) -> list[StepTokens]:
    """Return the tokens of a row's prompt with each of its responses, chosen ones first, and the end token: those that
    training makes of the same row (`data.conversations`). `is_chat`: prompt and response are turns in the tokenizer's
    own chat template. Raises BadInput on texts that do not begin with the same token and are said to."""
    place, texts = f"row '{row.id}'", [*row.chosen, *row.rejected]
    if is_chat:
        turns = row.turns or [{"role": "user", "content": row.prompt}]
        answers = [[{"role": "assistant", "content": text}] for text in texts]
        found = responses_of_turns(tokenizer, turns, answers, place)
        ids = [(one.prompt_ids, one.response_ids) for one in found]
    elif row.has_implicit_prompt:
        try:
            pair = pair_of_wholes(tokenizer, row.prompt, row.chosen[0], row.rejected[0], place)
        except BadRow as error:
            raise BadInput(f"{place}: {error}: give it a prompt") from None
        ids = [(pair.prompt_ids, pair.chosen_ids), (pair.prompt_ids, pair.rejected_ids)]
    else:
        prompt_ids = encode_text(tokenizer, row.prompt, place)
        ids = [(prompt_ids, ended_response(tokenizer, prompt_ids, text)) for text in texts]
    return [StepTokens(prompt, response, [len(response)], name=place) for prompt, response in ids]


@dataclass(frozen=True)
class ScoreResponses:
    """`model` or `judgements`, one of them. `is_chat`: prompt and response are turns in the tokenizer's own chat
    template; null: as the model was trained, where its folder says it, else where its tokenizer has a template.
    `takes_last_step`: of a process reward model the score of the last step is taken for the response's. `verifier`: how
    the model is asked as a generative verifier, null for other scorers; `template` writes its prompts (null: the prompt
    and a newline) and, where `is_chat` is null, says by its own whether they are turns. `batch_tokens` bounds the
    tokens of one forward pass."""

    model: str = ""
    reference: str = ""
    is_reference_free: bool = False
    aggregate: str = "sum"
    is_chat: bool | None = None
    judgements: str = ""
    takes_last_step: bool = False
    verifier: VerifierFormat | StepVerdictFormat | None = None
    template: PromptTemplate | None = None
    batch_tokens: int = 16384
    asks_engines: ClassVar[bool] = True
    runs_on_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.judgements):
            raise BadInput("name one scorer: stage.model, or stage.judgements")
        if self.is_chat not in (None, True, False):
            raise BadInput(f"stage.is_chat must be true, false or null, got {self.is_chat!r}")
        if self.aggregate not in AGGREGATES:
            raise BadInput(f"stage.aggregate must be one of {', '.join(AGGREGATES)}, got '{self.aggregate}'")
        if self.judgements and self.takes_last_step:
            raise BadInput("stage.takes_last_step=true is for process reward models, not for a judge: leave it out")
        if self.reference and self.is_reference_free:
            raise BadInput("stage.is_reference_free=true reads no reference: leave out stage.reference")
        _ = self._questions, self._asked  # raise
        if self.aggregate == NORM and not self.is_reference_free:
            raise BadInput("stage.aggregate=norm is of one policy's log-probs: set stage.is_reference_free=true")

    def inputs(self) -> list[str]:
        """Return the judgements."""
        return [self.judgements] if self.judgements else []

    @cached_property
    def _questions(self) -> VerifierQuestions | None:
        """What a generative verifier is asked, None of other scorers. Raises BadInput where settings do not agree."""
        names = ("judgements", "reference", "is_reference_free", "takes_last_step")
        others = [name for name in names if getattr(self, name)]
        others += ["aggregate"] if self.aggregate != "sum" else []
        return VerifierQuestions.of(self.verifier, self.template, others)

    @cached_property
    def _asked(self) -> tuple[bool | None, str]:
        """Whether the settings ask for turns, and which of them does (`asked_layout`)."""
        return asked_layout(self.is_chat, self.template)

    def run(self, input_path: str, context: StageContext) -> Iterator[ResponseScores]:
        """Return one row of scores a row, in order. Raises BadInput where the model was trained on rows of the file."""
        if self.judgements:
            if context.engines is not None:
                raise BadInput("verdicts of a judge are read and not computed: leave client out")
            return self._judged(input_path, context)
        if self.verifier and context.engines is not None:
            raise BadInput("a verifier's p(Yes) is read by transformers in this process: leave client out")
        with ExitStack() as opened:
            rows = opened.enter_context(ProblemRows(context.output))
            rows.add(RankedResponses, input_path, group="id")
            self._check_seen(rows, input_path, context)
            tokens, parts = self._scored(rows, input_path, context, opened)
            barrier()
            if self.verifier:
                say_mass(parts.rows(), self.model, context)
            return _output(rows, tokens, parts, opened.pop_all())

    def _judged(self, input_path: str, context: StageContext) -> Iterator[ResponseScores]:
        with ProblemRows(context.output) as rows:
            rows.add(RankedResponses, input_path, group="id")
            kind, group = judgement_kind(self.judgements)
            rows.add(kind, self.judgements, group=group)
            num_without = 0
            for row in rows.in_order(_ROWS):
                own = [one for one in rows.rows(_JUDGEMENTS, hash_of(row.id)) if getattr(one, group) == row.id]
                found = judge_scores(row, own)
                num_without += not found.chosen
                yield found
            context.counts["without_verdict"] = num_without

    def _check_seen(self, rows: ProblemRows, path: str, context: StageContext) -> None:
        hashes = read_training_responses(self._folder)
        if hashes is None:
            context.counts["training_responses"] = "not known"
            log.warning("%s does not say which responses it was trained on: that none is of %s is taken on trust",
                        self.model, path)  # fmt: skip
            return
        num_seen, num_rows, first = 0, 0, ""
        for row in rows.in_order(_ROWS):
            num_rows += 1
            if is_seen(row, hashes):
                num_seen, first = num_seen + 1, first or row.id
        if num_seen:
            raise BadInput(f"{self.model} was trained on {num_seen} of {num_rows} rows of {path} ('{first}' is the "
                           "first): its scores of them say nothing: train it without them")  # fmt: skip
        context.counts["seen_rows"] = 0

    @cached_property
    def _folder(self) -> str:
        """The folder of the model, which also says what it was trained on; of a hub name that of its newest commit."""
        return model_on_ranks(self.model)

    @cached_property
    def _reference(self) -> str:
        """The folder of the reference, "" without one."""
        return model_on_ranks(self.reference) if self.reference else ""

    def _scored(
        self, rows: ProblemRows, path: str, context: StageContext, opened: ExitStack
    ) -> tuple[ResponseRows, ScoreParts[KeptBatch]]:
        """Score what is missing, this rank's share of it; return all rows, and where their scores are kept."""
        from espalier.models.load import load_tokenizer

        tokenizer = load_tokenizer(self._folder)
        scorer = self._load(context) if context.engines is None else self._by_engines(context)
        is_chat = self._is_chat(tokenizer, context)
        tokens = opened.enter_context(ResponseRows(context.output, is_distinct=not scorer.has_head))
        num_implicit = 0
        for row in rows.in_order(_ROWS):
            is_turn = is_chat and (self._asked[0] is True or not row.has_implicit_prompt)
            num_implicit += is_chat and not is_turn
            for each in self._rows_of(row, tokenizer, is_turn):
                tokens.add(each)
        _say_implicit(num_implicit, context)
        longest = tokens.longest
        is_packed, limit = longest is not None and scorer.is_packed(longest), scorer.tokens_at_once
        origin = {
            "input": file_sha256(path),
            "models": [model_fingerprint(folder) for folder in (self._folder, self._reference) if folder],
            "layout": context.counts["layout"],
            "tokens": tokens.digest,
            "score": self._origin(scorer.has_head),
            **scored_by(context.engines),
            "batches": f"{'packed' if is_packed else 'padded'}, {limit} tokens",
        }
        parts = ScoreParts(KeptBatch, context.output, origin)
        context.kept.append(parts.folder)
        try:
            with parts.progress(context, tokens.num_rows, "response") as advance:
                tokens.score(is_packed, limit, scorer, parts, advance)
        finally:
            scorer.close()
        return tokens, parts

    def _rows_of(self, row: RankedResponses, tokenizer: Any, is_chat: bool) -> Iterable[StepTokens]:
        """Return what is scored of a row: its responses, or a verifier's questions about them."""
        return (
            self._questions.tokens(row, tokenizer, is_chat) if self._questions else encode_row(tokenizer, row, is_chat)
        )

    def _origin(self, has_head: bool) -> str:
        if self._questions:
            return self._questions.origin
        return "head" if has_head else f"{self.aggregate} of log-ratios"

    def _is_chat(self, tokenizer: Any, context: StageContext) -> bool:
        """Say whether prompt and response are turns: as it is asked for, else as the model was trained, else where its
        tokenizer has a template."""
        trained = read_training_layout(self._folder)
        prompts = trained.prompts if trained else ""
        says = {CHAT: True, TEXT: False}.get(prompts)
        asked, by = self._asked
        is_chat = asked if asked is not None else bool(tokenizer.chat_template) if says is None else says
        if is_chat and not tokenizer.chat_template:
            remedy = "set stage.is_chat=false" if self.template is None or not self.template.is_chat else (
                "choose a prompt with is_chat: false")  # fmt: skip
            raise BadInput(f"{self.model}: turns need a chat template, and its tokenizer has none: {remedy}")
        layout = "whole, in its chat template" if is_chat else "whole, as plain text"
        by = by or ("by its tokenizer" if says is None else f"by its {FILE}")
        if prompts and says != is_chat:
            log.warning("%s was trained on %s and reads responses %s (%s): stage.is_chat says which", self.model,
                        {CHAT: "turns of its chat template", TEXT: "plain text"}.get(prompts, "turns and plain text"),
                        layout, by)  # fmt: skip
        context.counts.update(layout=layout, layout_by=by)
        log.info("%s reads responses %s, %s", self.model, layout, by)
        return is_chat

    def _load(self, context: StageContext) -> NetworkScorer | VerifierScorer:
        from espalier.models.load import is_reward_model, load_policy
        from espalier.models.log_ratio_reward import is_log_ratio_reward
        from espalier.models.scalar_head import load_process_reward
        from espalier.runtime.distributed import device

        if self.verifier:
            return self._load_verifier()
        has_head = False
        if is_log_ratio_reward(self._folder):
            others = [f"stage.{name}" for name in ("reference", "is_reference_free") if getattr(self, name)]
            others += [f"stage.aggregate={NORM}"] if self.aggregate == NORM else []
            networks = own_policies(self._folder, self.model, others)
        elif has_head := is_reward_model(self._folder):
            if self.reference or self.is_reference_free:
                raise BadInput(f"{self.model} is a reward model with a head: leave out stage.reference and "
                               "stage.is_reference_free")  # fmt: skip
            self._check_ends(context)
            networks = [load_process_reward(self._folder)]
        elif not self.reference and not self.is_reference_free:
            self._check_published()
            raise BadInput(f"{self.model} is a policy: name stage.reference, or set stage.is_reference_free=true; a "
                           "generative verifier is asked by verifier@stage.verifier=solution")  # fmt: skip
        else:
            networks = [load_policy(path) for path in (self._folder, self._reference) if path]
        if self.takes_last_step and not has_head:
            raise BadInput(f"stage.takes_last_step=true is for process reward models, and {self.model} has no head: "
                           "leave it out")  # fmt: skip
        placed = [network.to(device()) for network in networks]
        return NetworkScorer(placed, has_head, self.aggregate, self.batch_tokens)

    def _load_verifier(self) -> VerifierScorer:
        """Raises BadInput on a reward model: a verifier is a language model."""
        from espalier.models.load import is_reward_model
        from espalier.models.log_ratio_reward import is_log_ratio_reward
        from espalier.rewards.generative_verifier import GenerativeVerifier
        from espalier.runtime.distributed import device

        assert self._questions is not None
        if is_reward_model(self._folder) or is_log_ratio_reward(self._folder):
            raise BadInput(f"{self.model} is a reward model and answers no question: leave out stage.verifier")
        found = GenerativeVerifier(self._folder, self._questions.verifier, self.batch_tokens)
        found.model.to(device())
        return VerifierScorer(found, self.batch_tokens)

    def _by_engines(self, context: StageContext) -> EngineHead:
        """Return the scorer of the context's engines, which start when they are asked. Raises BadInput, BadModel."""
        from espalier.models.scalar_head import outcome_scores
        from espalier.rewards.engine_scores import EngineScoredModel

        if self.reference or self.is_reference_free:
            raise BadInput("the log-ratio of policies has no head, and engines read one head: leave client out")
        model = EngineScoredModel(self._folder, context.engines, read=outcome_scores)
        self._check_ends(context)
        return EngineHead(model, self.batch_tokens)

    def _check_ends(self, context: StageContext) -> None:
        """Raises BadInput on a head that was trained on the ends of steps, unless its last step's is asked for."""
        from espalier.models.trained_ends import trained_ends

        remedy = ("a process reward model is for prm/score_steps; stage.takes_last_step=true takes its score of the "
                  "last step for the response's")  # fmt: skip
        found = trained_ends(self._folder)
        context.counts["ends"] = found.read_at(RESPONSES, self.model, self.takes_last_step, remedy)

    def _check_published(self) -> None:
        """Raises BadInput on a process reward model that others published without a head of transformers' own."""
        from espalier.models.trained_ends import trained_ends

        if (found := trained_ends(self._folder)).ends == STEPS:
            raise BadInput(f"{self.model} is a process reward model ({found.why}): score it by prm/score_steps")


def _say_implicit(number: int, context: StageContext) -> None:
    if number:
        context.counts["implicit_prompts"] = number
        log.warning("%d rows hold no prompt of their own, only texts that begin alike: they are read whole, as plain "
                    "text, as training reads them (stage.is_chat=true: as turns)", number)  # fmt: skip


def _output(
    rows: ProblemRows, tokens: ResponseRows, parts: ScoreParts[KeptBatch], opened: ExitStack
) -> Iterator[ResponseScores]:
    """Return every row's scores in order, and let `opened` go. Raises BadInput where one is missing."""
    with opened:
        if not tokens.take(parts.rows()):
            raise BadInput(f"{parts.folder} lacks scores: remove it and score again")
        values = iter(tokens)
        for row in rows.in_order(_ROWS):
            sides = [[next(values) for _ in side] for side in (row.chosen, row.rejected)]
            yield ResponseScores(row.id, row.subset, *sides)
