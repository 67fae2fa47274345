"""RankedResponses → ResponseScores: what a scorer says of every response. Three kinds of scorers:

- **scalar**: `model` is a reward model; the logit at the last token (one label), or the expected share (classes);
- **log-ratio**: `model` is a policy and `reference` another, or the model is a folder of `models.log_ratio_reward`; the
  score is the sum over the response's tokens of log pi - log pi_ref (DPO's implicit reward, Rafailov et al. 2023), with
  `aggregate=average` its mean per token. `reference` null with `is_reference_free` takes log pi alone;
- **judge**: `judgements` of a model that was asked about each row in both orders (`requests=judge_responses`): a side's
  score is its share of the verdicts, a tie half for each, so that a judge who goes by the place is a tie.

A model that was trained on rows of the file is refused (`data.seen_responses`): its accuracy would be memory.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.judgements import PairJudgement
from espalier.data.prompts import encode_text
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput
from espalier.data.seen_responses import read_training_responses, seen_rows
from espalier.data.steps import StepTokens
from espalier.data.token_text import encode_response
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")
AGGREGATES = ("sum", "average")


def encode_row(tokenizer: Any, row: RankedResponses, is_chat: bool) -> list[StepTokens]:
    """Return the tokens of a row's prompt with each of its responses, chosen ones first, and the end token. `is_chat`:
    prompt and response are turns in the tokenizer's own chat template. Raises BadInput where there is none."""
    if is_chat and not tokenizer.chat_template:
        raise BadInput("stage.is_chat=true needs a chat template, and the model's tokenizer has none: set it to false")
    messages = [{"role": "user", "content": row.prompt}]
    text = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if is_chat else row.prompt
    )
    prompt = encode_text(tokenizer, text, f"row '{row.id}'", is_complete=is_chat)
    found = []
    for response in (*row.chosen, *row.rejected):
        ids, _ = encode_response(tokenizer, prompt, response)
        ids = [*ids, tokenizer.eos_token_id]
        found.append(StepTokens(prompt, ids, [len(ids)], name=f"row '{row.id}'"))
    return found


def judged_scores(rows: Sequence[RankedResponses], judgements: Sequence[PairJudgement]) -> Iterator[ResponseScores]:
    """Return the shares of verdicts for each side; no scores where no verdict of one of the orders can be read. Raises
    BadInput on a row with more than two responses, and without judgements in both orders."""
    answers: dict[str, dict[str, list[str | None]]] = defaultdict(lambda: defaultdict(list))
    for row in judgements:
        answers[row.pair_id][row.order].append(row.answer)
    worth = {"first": 1.0, "tie": 0.5, "second": 0.0}
    for ranked in rows:
        if len(ranked.chosen) != 1 or len(ranked.rejected) != 1:
            raise BadInput(f"'{ranked.id}' has more than two responses: a judge of pairs cannot score it")
        if len(answers[ranked.id]) < 2:
            raise BadInput(f"'{ranked.id}' has no judgements in both orders: judge these rows")
        means = []
        for votes in answers[ranked.id].values():
            read = [worth[vote] for vote in votes if vote is not None]
            means += [sum(read) / len(read)] if read else []
        share = sum(means) / 2 if len(means) == 2 else None
        sides = ([], []) if share is None else ([share], [1 - share])
        yield ResponseScores(ranked.id, ranked.subset, *sides)


@dataclass(frozen=True)
class ScoreResponses:
    """`model` or `judgements`, one of them. `batch_tokens` bounds the tokens of one forward pass."""

    model: str = ""
    reference: str = ""
    is_reference_free: bool = False
    aggregate: str = "sum"
    is_chat: bool = False
    judgements: str = ""
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.judgements):
            raise BadInput("name one scorer: stage.model, or stage.judgements")
        if self.aggregate not in AGGREGATES:
            raise BadInput(f"stage.aggregate must be one of {', '.join(AGGREGATES)}, got '{self.aggregate}'")
        if self.reference and self.is_reference_free:
            raise BadInput("stage.is_reference_free=true reads no reference: leave out stage.reference")

    def inputs(self) -> list[str]:
        """Return the judgements."""
        return [self.judgements] if self.judgements else []

    def run(self, input_path: str, context: StageContext) -> list[ResponseScores]:
        """Return one row of scores a row, in order. Raises BadInput where the model was trained on rows of the file."""
        rows = read_records(RankedResponses, input_path)
        if self.judgements:
            scores = list(judged_scores(rows, read_records(PairJudgement, self.judgements)))
            context.counts["without_verdict"] = sum(not row.chosen for row in scores)
            return scores
        self._check_seen(rows, input_path, context)
        from espalier.models.load import load_tokenizer

        tokenizer = load_tokenizer(self.model)
        encoded = [encode_row(tokenizer, row, self.is_chat) for row in rows]
        values = iter(self._values([each for row in encoded for each in row], context))
        return [
            ResponseScores(row.id, row.subset, [next(values) for _ in row.chosen], [next(values) for _ in row.rejected])
            for row in rows
        ]

    def _check_seen(self, rows: Sequence[RankedResponses], path: str, context: StageContext) -> None:
        hashes = read_training_responses(self.model)
        if hashes is None:
            context.counts["training_responses"] = "not known"
            log.warning("%s does not say which responses it was trained on: that none is of %s is taken on trust",
                        self.model, path)  # fmt: skip
            return
        if seen := seen_rows(rows, hashes):
            raise BadInput(f"{self.model} was trained on {len(seen)} of {len(rows)} rows of {path} ('{seen[0]}' is the "
                           "first): its scores of them say nothing: train it without them")  # fmt: skip
        context.counts["seen_rows"] = 0

    def _values(self, rows: Sequence[StepTokens], context: StageContext) -> list[float]:
        """Return the score of each row of tokens."""
        from espalier.models.load import is_reward_model, load_policy
        from espalier.models.log_ratio_reward import is_log_ratio_reward, load_log_ratio_reward
        from espalier.models.sampled_logprobs import sampled_logprobs
        from espalier.runtime.distributed import device

        if is_log_ratio_reward(self.model):
            both = load_log_ratio_reward(self.model)
            networks = [both.policy, both.reference]
        elif is_reward_model(self.model):
            if self.reference or self.is_reference_free:
                raise BadInput(f"{self.model} is a reward model with a head: leave out stage.reference and "
                               "stage.is_reference_free")  # fmt: skip
            return self._head_scores(rows)
        elif not self.reference and not self.is_reference_free:
            raise BadInput(f"{self.model} is a policy: name stage.reference, or set stage.is_reference_free=true")
        else:
            networks = [load_policy(path) for path in (self.model, self.reference) if path]
        logprobs = [sampled_logprobs(network.to(device()), rows, self.batch_tokens) for network in networks]
        sums = [[sum(line) for line in each] for each in logprobs]
        ratios = [own - base for own, base in zip(*sums, strict=True)] if len(sums) == 2 else sums[0]
        lengths = [len(row.response_ids) if self.aggregate == "average" else 1 for row in rows]
        return [round(ratio / length, 6) for ratio, length in zip(ratios, lengths, strict=True)]

    def _head_scores(self, rows: Sequence[StepTokens]) -> list[float]:
        """Return the logits at the last tokens, or the expected shares of a model with classes."""
        from espalier.models.scalar_head import load_process_reward, scores_from_logits
        from espalier.rewards.outcome_model import last_logits
        from espalier.runtime.distributed import device

        model = load_process_reward(self.model).to(device())
        reads = last_logits(model, [[*row.prompt_ids, *row.response_ids] for row in rows], self.batch_tokens)
        return [round(float(read if read.numel() == 1 else scores_from_logits(read)), 6) for read in reads]
