"""RankedResponses → ResponseScores: what a scorer says of every response. Three kinds of scorers:

- **scalar**: `model` is a reward model; the logit at the last token (one label), or the expected share (classes);
- **log-ratio**: `model` is a policy and `reference` another, or the model is a folder of `models.log_ratio_reward`; the
  score is the sum over the response's tokens of log pi - log pi_ref (DPO's implicit reward, Rafailov et al. 2023), with
  `aggregate=average` its mean per token. `reference` null with `is_reference_free` takes log pi alone;
- **judge**: `judgements` of a model that was asked about each row in both orders (`requests=judge_responses`): a side's
  score is its share of the verdicts, a tie half for each, so that a judge who goes by the place is a tie.

A model that was trained on rows of the file is refused (`data.seen_responses`): its accuracy would be memory.

Of a reward model `client=data_parallel_engines` asks vLLM engines, which are held against transformers first.

Rows are read one by one; their token ids and scores lie on disk (`response_rows`), so that memory does not grow with
them, and batches are those of all rows at once.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from espalier.data.conversations import ended_response, pair_of_wholes, responses_of_turns
from espalier.data.judgements import PairJudgement
from espalier.data.prompts import encode_text
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput
from espalier.data.row_index import ProblemRows, hash_of
from espalier.data.seen_responses import is_seen, read_training_responses
from espalier.data.sources import BadRow
from espalier.data.steps import StepTokens
from espalier.data.training_layout import CHAT, FILE, RESPONSES, STEPS, TEXT, read_training_layout
from espalier.pipeline.evaluation.response_rows import ResponseRows
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
AGGREGATES = ("sum", "average")
_WORTH = {"first": 1.0, "tie": 0.5, "second": 0.0}
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


def judged_scores(row: RankedResponses, judgements: Sequence[PairJudgement]) -> ResponseScores:
    """Return the shares of a row's verdicts for each side; no scores where no verdict of one of the orders can be read.
    Raises BadInput on a row with more than two responses, and without judgements in both orders."""
    if len(row.chosen) != 1 or len(row.rejected) != 1:
        raise BadInput(f"'{row.id}' has more than two responses: a judge of pairs cannot score it")
    answers: dict[str, list[str | None]] = defaultdict(list)
    for judgement in judgements:
        answers[judgement.order].append(judgement.answer)
    if len(answers) < 2:
        raise BadInput(f"'{row.id}' has no judgements in both orders: judge these rows")
    means = []
    for votes in answers.values():
        read = [_WORTH[vote] for vote in votes if vote is not None]
        means += [sum(read) / len(read)] if read else []
    share = sum(means) / 2 if len(means) == 2 else None
    sides = ([], []) if share is None else ([share], [1 - share])
    return ResponseScores(row.id, row.subset, *sides)


@dataclass(frozen=True)
class _Scorer:
    """Networks that score rows of tokens: one with a head, or one or two policies."""

    networks: Sequence[Any]
    has_head: bool
    is_average: bool
    batch_tokens: int

    def is_packed(self, longest: StepTokens) -> bool:
        """Say whether rows of which this is the longest are packed. Raises BadInput where it is refused."""
        from espalier.models.packing_check import packing_of

        try:
            choices = [packing_of(network).choice_for(len(longest.prompt_ids) + len(longest.response_ids))
                       for network in self.networks]  # fmt: skip
        except BadInput as error:
            raise BadInput(f"{longest.name}: {error}") from None
        return self.has_head and choices == ["packed"]

    def __call__(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the score of each row."""
        return self._head_scores(rows) if self.has_head else self._ratios(rows)

    def _ratios(self, rows: Sequence[StepTokens]) -> list[float]:
        from espalier.models.sampled_logprobs import sampled_logprobs

        logprobs = [sampled_logprobs(network, rows, self.batch_tokens) for network in self.networks]
        sums = [[sum(line) for line in each] for each in logprobs]
        ratios = [own - base for own, base in zip(*sums, strict=True)] if len(sums) == 2 else sums[0]
        lengths = [len(row.response_ids) if self.is_average else 1 for row in rows]
        return [round(ratio / length, 6) for ratio, length in zip(ratios, lengths, strict=True)]

    def _head_scores(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the logits at the last tokens, or the expected shares of a model with classes."""
        from espalier.models.scalar_head import outcome_scores
        from espalier.rewards.outcome_model import last_logits

        ids = [[*row.prompt_ids, *row.response_ids] for row in rows]
        reads = last_logits(self.networks[0], ids, self.batch_tokens)
        return [round(float(outcome_scores(read)), 6) for read in reads]


@dataclass(frozen=True)
class _EngineScorer:
    """A reward model behind engines (`rewards.engine_scores.EngineScoredModel`), read as a `_Scorer` reads its head."""

    model: Any
    batch_tokens: int
    has_head: bool = True

    def is_packed(self, longest: StepTokens) -> bool:
        """Return true: engines put rows together themselves. Raises BadInput where a row is too long for them."""
        from espalier.rewards.engine_scores import check_lengths

        check_lengths(self.model.engines, [longest])
        return True

    def __call__(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the score of each row."""
        return [value for (value,) in self.model.scores(rows, self.batch_tokens)]


@dataclass(frozen=True)
class ScoreResponses:
    """`model` or `judgements`, one of them. `is_chat`: prompt and response are turns in the tokenizer's own chat
    template; null: as the model was trained, where its folder says it, else where its tokenizer has a template.
    `takes_last_step`: of a process reward model the score of the last step is taken for the response's.
    `batch_tokens` bounds the tokens of one forward pass."""

    model: str = ""
    reference: str = ""
    is_reference_free: bool = False
    aggregate: str = "sum"
    is_chat: bool | None = None
    judgements: str = ""
    takes_last_step: bool = False
    batch_tokens: int = 16384
    asks_engines: ClassVar[bool] = True

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

    def inputs(self) -> list[str]:
        """Return the judgements."""
        return [self.judgements] if self.judgements else []

    def run(self, input_path: str, context: StageContext) -> Iterator[ResponseScores]:
        """Return one row of scores a row, in order. Raises BadInput where the model was trained on rows of the file."""
        with ProblemRows(context.output) as rows:
            rows.add(RankedResponses, input_path, group="id")
            if self.judgements and context.engines is not None:
                raise BadInput("verdicts of a judge are read and not computed: leave client out")
            if self.judgements:
                rows.add(PairJudgement, self.judgements, group="pair_id")
                yield from _judged(rows, context)
            else:
                self._check_seen(rows, input_path, context)
                yield from self._scored(rows, context)

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
        from espalier.models.hub_snapshot import local_model

        return local_model(self.model)

    def _scored(self, rows: ProblemRows, context: StageContext) -> Iterator[ResponseScores]:
        from espalier.models.load import load_tokenizer

        tokenizer = load_tokenizer(self._folder)
        scorer = self._load(context) if context.engines is None else self._by_engines(context)
        is_chat = self._is_chat(tokenizer, context)
        num_implicit = 0
        with ResponseRows(context.output, is_distinct=not scorer.has_head) as tokens:
            for row in rows.in_order(_ROWS):
                is_turn = is_chat and (self.is_chat is True or not row.has_implicit_prompt)
                num_implicit += is_chat and not is_turn
                for each in encode_row(tokenizer, row, is_turn):
                    tokens.add(each)
            _say_implicit(num_implicit, context)
            if longest := tokens.longest:
                _score_all(tokens, longest, scorer, context)
            values = iter(tokens)
            for row in rows.in_order(_ROWS):
                sides = [[next(values) for _ in side] for side in (row.chosen, row.rejected)]
                yield ResponseScores(row.id, row.subset, *sides)

    def _is_chat(self, tokenizer: Any, context: StageContext) -> bool:
        """Say whether prompt and response are turns: as it is asked for, else as the model was trained, else where its
        tokenizer has a template."""
        trained = read_training_layout(self._folder)
        prompts = trained.prompts if trained else ""
        says = {CHAT: True, TEXT: False}.get(prompts)
        is_chat = self.is_chat if self.is_chat is not None else bool(tokenizer.chat_template) if says is None else says
        if is_chat and not tokenizer.chat_template:
            raise BadInput(f"{self.model}: turns need a chat template, and its tokenizer has none: set "
                           "stage.is_chat=false")  # fmt: skip
        layout = "whole, in its chat template" if is_chat else "whole, as plain text"
        by = "as asked for" if self.is_chat is not None else "by its tokenizer" if says is None else f"by its {FILE}"
        if prompts and says != is_chat:
            log.warning("%s was trained on %s and reads responses %s (%s): stage.is_chat says which", self.model,
                        {CHAT: "turns of its chat template", TEXT: "plain text"}.get(prompts, "turns and plain text"),
                        layout, by)  # fmt: skip
        context.counts.update(layout=layout, layout_by=by)
        log.info("%s reads responses %s, %s", self.model, layout, by)
        return is_chat

    def _load(self, context: StageContext) -> _Scorer:
        from espalier.models.load import is_reward_model, load_policy
        from espalier.models.log_ratio_reward import is_log_ratio_reward, load_log_ratio_reward
        from espalier.models.scalar_head import load_process_reward
        from espalier.runtime.distributed import device

        has_head = False
        if is_log_ratio_reward(self._folder):
            both = load_log_ratio_reward(self._folder)
            networks = [both.policy, both.reference]
        elif has_head := is_reward_model(self._folder):
            if self.reference or self.is_reference_free:
                raise BadInput(f"{self.model} is a reward model with a head: leave out stage.reference and "
                               "stage.is_reference_free")  # fmt: skip
            self._check_ends(context)
            networks = [load_process_reward(self._folder)]
        elif not self.reference and not self.is_reference_free:
            self._check_published()
            raise BadInput(f"{self.model} is a policy: name stage.reference, or set stage.is_reference_free=true")
        else:
            networks = [load_policy(path) for path in (self._folder, self.reference) if path]
        if self.takes_last_step and not has_head:
            raise BadInput(f"stage.takes_last_step=true is for process reward models, and {self.model} has no head: "
                           "leave it out")  # fmt: skip
        placed = [network.to(device()) for network in networks]
        return _Scorer(placed, has_head, self.aggregate == "average", self.batch_tokens)

    def _by_engines(self, context: StageContext) -> _EngineScorer:
        """Return the scorer of the context's engines, which start when they are asked. Raises BadInput, BadModel."""
        from espalier.models.scalar_head import outcome_scores
        from espalier.rewards.engine_scores import EngineScoredModel

        if self.reference or self.is_reference_free:
            raise BadInput("the log-ratio of policies has no head, and engines read one head: leave client out")
        model = EngineScoredModel(self._folder, context.engines, read=outcome_scores)
        self._check_ends(context)
        return _EngineScorer(model, self.batch_tokens)

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


def _score_all(
    tokens: ResponseRows, longest: StepTokens, scorer: _Scorer | _EngineScorer, context: StageContext
) -> None:
    """Have all rows scored; engines get several calls' worth at a time, and end."""
    if isinstance(scorer, _Scorer):
        tokens.score(scorer.is_packed(longest), scorer.batch_tokens, scorer)
        return
    try:
        tokens.score(scorer.is_packed(longest), scorer.batch_tokens * 4 * context.engines.num_engines, scorer)
    finally:
        scorer.model.close()


def _say_implicit(number: int, context: StageContext) -> None:
    if number:
        context.counts["implicit_prompts"] = number
        log.warning("%d rows hold no prompt of their own, only texts that begin alike: they are read whole, as plain "
                    "text, as training reads them (stage.is_chat=true: as turns)", number)  # fmt: skip


def _judged(rows: ProblemRows, context: StageContext) -> Iterator[ResponseScores]:
    num_without = 0
    for row in rows.in_order(_ROWS):
        own = [one for one in rows.rows(_JUDGEMENTS, hash_of(row.id)) if one.pair_id == row.id]
        found = judged_scores(row, own)
        num_without += not found.chosen
        yield found
    context.counts["without_verdict"] = num_without
