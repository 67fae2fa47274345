"""p(Yes) of a generative verifier: how likely a causal language model continues a text with a Yes rather than a No.

score = p_yes / (p_yes + p_no), where p_yes sums the probabilities of all spellings of a Yes (` Yes` and `Yes` are other
tokens) and a spelling of several tokens counts with the product of theirs, so that a first token which both verdicts
share (a space that stands alone) says nothing for either. Spellings of the same tokens, or that go on from another one
of their side, are counted once.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from espalier.data.prompts import encode_text
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.data.token_text import encode_response
from espalier.models.sampled_logprobs import sampled_logprobs

Tokens = tuple[int, ...]
NextLogprobs = Callable[[Sequence[list[int]]], "list[dict[int, float] | None]"]
"""Rows of ids → the log-probs of the likeliest tokens behind each, by id; None for one that is refused."""
_SMALLEST = math.log(1e-6)
SMALLEST_MASS = 0.5
"""Of both verdicts on average, below which a model is held not to answer the question."""
log = logging.getLogger(__name__)


def warn_of_mass(masses: Sequence[float], name: str) -> None:
    """Warn where a model answers with neither verdict: it was asked otherwise when it was trained, or its tokens of a
    verdict are others."""
    mass = fmean(masses) if masses else 1.0
    if mass < SMALLEST_MASS:
        log.warning("%s gives both verdicts together a probability of %.3g: ask it as its demonstrations did (another "
                    "verifier=...), or train it longer", name, mass)  # fmt: skip


def spelling_tokens(tokenizer: Any, before: str, spellings: Sequence[str]) -> list[Tokens]:
    """Return the tokens of each spelling behind the text `before`, without those that begin with another one.

    Raises BadInput where the tokenizer cannot write a spelling (it normalises): its tokens would read otherwise; and
    where it joins the first one, which demonstrations write, with the end of `before`: behind its last token the model
    would then always mean something else."""
    context = encode_text(tokenizer, before, "verifier.question")
    if encode_text(tokenizer, before + spellings[0], "verifier.question")[: len(context)] != context:
        raise BadInput(f"the tokenizer joins the end of {before[-12:]!r} and the beginning of {spellings[0]!r} in one "
                       "token: choose another opening or question of the verifier, or other words")  # fmt: skip
    found: list[Tokens] = []
    for spelling in spellings:
        ids, is_exact = encode_response(tokenizer, context, spelling)
        if not ids or not is_exact:
            raise BadInput(f"the tokenizer cannot write {spelling!r}: leave it out of verifier.yes and verifier.no")
        found.append(tuple(ids))
    return [row for row in dict.fromkeys(found)
            if not any(row != other and row[: len(other)] == other for other in found)]  # fmt: skip


@dataclass(frozen=True)
class VerdictTokens:
    """The token sequences of the spellings of both verdicts; none of one side begins with one of the other."""

    yes: list[Tokens]
    no: list[Tokens]

    @classmethod
    def of(cls, tokenizer: Any, question: str, yes: Sequence[str], no: Sequence[str]) -> "VerdictTokens":
        """Raises BadInput where a spelling cannot be written, or the tokens of two verdicts cannot be distinguished."""
        found = cls(spelling_tokens(tokenizer, question, yes), spelling_tokens(tokenizer, question, no))
        for one in found.yes:
            for other in found.no:
                length = min(len(one), len(other))
                if one[:length] == other[:length]:
                    raise BadInput(f"verifier.yes and verifier.no are the same tokens {list(one[:length])}: spell them "
                                   "otherwise")  # fmt: skip
        return found


@dataclass(frozen=True)
class YesProb:
    """`share`: p_yes / (p_yes + p_no); `mass`: p_yes + p_no, near 1 where the model does answer the question."""

    share: float
    mass: float

    @classmethod
    def of(cls, yes: Sequence[float], no: Sequence[float]) -> "YesProb":
        """From the log-probs of the spellings of each (-inf: none), without underflow of the share. Raises ValueError
        where all are -inf."""
        highest = max(*yes, *no)
        if highest == -math.inf:
            raise ValueError("no spelling of a verdict has a probability")
        p_yes, p_no = (math.fsum(math.exp(value - highest) for value in side) for side in (yes, no))
        return cls(p_yes / (p_yes + p_no), (p_yes + p_no) * math.exp(highest))


def yes_probs(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    verdicts: VerdictTokens,
    *,
    batch_tokens: int = 16384,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[YesProb]:
    """Return the score in [0, 1] of every text, a whole prompt up to where the verdict stands, in order.

    `batch_tokens` are padded tokens of one forward pass; `on_progress` gets the number of distinct texts done. Raises
    BadInput for a text that is longer than the network takes.
    """
    distinct = list(dict.fromkeys(texts))
    rows = [question_tokens(tokenizer, text, f"text {number}, which ends {text[-60:]!r},")
            for number, text in enumerate(distinct)]  # fmt: skip
    found = yes_probs_of_tokens(model, rows, verdicts, batch_tokens, on_progress)
    scores = dict(zip(distinct, found, strict=True))
    return [scores[text] for text in texts]


def question_tokens(tokenizer: Any, text: str, name: str) -> StepTokens:
    """Return the tokens of a text up to where the verdict stands, all of them of its prompt; errors call it `name`."""
    return StepTokens(encode_text(tokenizer, text, name), [], [], name)


def check_window(model: Any, row: StepTokens, verdicts: VerdictTokens) -> None:
    """Raise BadInput for a text that is longer, with a verdict, than the network takes."""
    longest = getattr(model.config, "max_position_embeddings", None)
    length = len(row.prompt_ids)
    if longest is not None and length + max(map(len, (*verdicts.yes, *verdicts.no))) > longest:
        raise BadInput(f"{row.name} has {length} tokens and the verifier takes {longest} with its verdict: leave out "
                       "longer solutions, or take a verifier with a longer window")  # fmt: skip


def yes_probs_of_tokens(
    model: Any,
    rows: Sequence[StepTokens],
    verdicts: VerdictTokens,
    batch_tokens: int = 16384,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[YesProb]:
    """Return the score of each row of `question_tokens`, as `yes_probs` does of texts."""
    sides = [*verdicts.yes, *verdicts.no]
    for row in rows:
        check_window(model, row, verdicts)
    asked = [StepTokens(row.prompt_ids, list(tokens), [], row.name) for row in rows for tokens in sides]
    found = sampled_logprobs(model, asked, batch_tokens, lambda done: on_progress(done // len(sides)))
    sums = [math.fsum(row) for row in found]
    by_row = [sums[start : start + len(sides)] for start in range(0, len(sums), len(sides))]
    return [YesProb.of(row[: len(verdicts.yes)], row[len(verdicts.yes) :]) for row in by_row]


def yes_probs_of_likeliest(
    tokenizer: Any, texts: Sequence[str], verdicts: VerdictTokens, ask: NextLogprobs
) -> list[YesProb | None]:
    """Return the score in [0, 1] of every text as `yes_probs` does, by a model elsewhere that says which tokens are the
    likeliest: a spelling of several tokens is asked for token by token.

    What is not among the likeliest, or less likely than 1e-6 together with what stands before it, counts as 0: a share
    is off by at most that over its `mass`. None where a text is refused, or has neither verdict among the likeliest.
    """
    distinct = list(dict.fromkeys(texts))
    rows = [encode_text(tokenizer, text, f"a text that ends {text[-60:]!r}") for text in distinct]
    sides = [*verdicts.yes, *verdicts.no]
    scores: dict[str, YesProb | None] = {}
    for text, found in zip(distinct, spelling_logprobs(rows, sides, ask), strict=True):
        is_known = found is not None and max(found) > -math.inf
        num = len(verdicts.yes)
        scores[text] = YesProb.of(found[:num], found[num:]) if found is not None and is_known else None
    return [scores[text] for text in texts]


def spelling_logprobs(
    rows: Sequence[list[int]], spellings: Sequence[Tokens], ask: NextLogprobs
) -> list[list[float] | None]:
    """Return the log-prob of every spelling behind each row of ids; -inf where it is not among the likeliest, None for
    a row that is refused."""
    reached: dict[tuple[int, Tokens], float] = {(place, ()): 0.0 for place in range(len(rows))}
    refused: set[int] = set()
    for depth in range(max(map(len, spellings))):
        going_on: dict[Tokens, set[int]] = defaultdict(set)
        for tokens in spellings:
            if len(tokens) > depth:
                going_on[tokens[:depth]].add(tokens[depth])
        asked = [(place, before) for place, before in reached if before in going_on and place not in refused]
        answers = ask([[*rows[place], *before] for place, before in asked]) if asked else []
        for (place, before), likeliest in zip(asked, answers, strict=True):
            if likeliest is None:
                refused.add(place)
                continue
            for token in going_on[before]:
                logprob = reached[place, before] + likeliest.get(token, -math.inf)
                if logprob > _SMALLEST:
                    reached[place, (*before, token)] = logprob
    return [None if place in refused else [reached.get((place, tokens), -math.inf) for tokens in spellings]
            for place in range(len(rows))]  # fmt: skip
