"""Records → token examples: ids with what the loss reads. Built once, before training.

Here are the kinds of examples, demonstrations and preference pairs; step values and judged steps are in
`data.examples.step_examples`, judged responses in `data.examples.outcome_examples`. Trajectories, values and pairs
carry the sampler's ids; only text that no sampler has tokenised is tokenised here, once. An example that does not fit
`max_length` is left out and counted.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput, Demonstration, PreferencePair
from espalier.data.seen_responses import response_hash
from espalier.data.splits import original_id, split_key
from espalier.data.token_text import encode_response

log = logging.getLogger(__name__)

E = TypeVar("E")
R = TypeVar("R")

UNKNOWN = "unknown"
"""`TokenExample.judged` of a demonstration that judges a solution and does not hold it, as older ones do."""


@dataclass(frozen=True)
class TokenExample:
    """`ids` [T]; the loss reads tokens `prompt_length`..T-1, each times its weight in `weights` (empty: all 1).

    A token of weight 0 is masked: it is not counted either. `problem_id` and `judged`, the hash of the solution
    (`data.seen_responses`) or UNKNOWN, say what a verifier learns to judge and are no part of the example.
    """

    id: str
    ids: list[int]
    prompt_length: int
    weights: list[float] = field(default_factory=list)
    problem_id: str = field(default="", repr=False, compare=False)
    judged: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True)
class StepExample:
    """`ids` [T]; `positions` [S] are indices into ids of step ends, `values` [S] their targets in [0, 1].

    `weights` [S] weigh the reads (empty: all 1). `has_outcome`: the last read is of the terminal state, and its value
    the outcome; the others are of inner states. It and `problem_id` say where values come from and are no part of the
    data.
    """

    id: str
    ids: list[int]
    positions: list[int]
    values: list[float]
    weights: list[float] = field(default_factory=list)
    has_outcome: bool = field(default=False, repr=False, compare=False)
    problem_id: str = field(default="", repr=False, compare=False)

    @property
    def inner_values(self) -> list[float]:
        """The values of the reads of inner states."""
        return self.values[:-1] if self.has_outcome else self.values


@dataclass(frozen=True)
class OutcomeExample:
    """`ids` [T] of a prompt and a response from token `prompt_length` on; `value` in [0, 1] judges the response.

    `weight` weighs the example. `mismatched_ids`: a response to another prompt, for objectives that compare.
    `problem_id` says where the response comes from and is no part of the example.
    """

    id: str
    ids: list[int]
    prompt_length: int
    value: float
    weight: float = 1.0
    mismatched_ids: list[int] = field(default_factory=list)
    problem_id: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True)
class PairExample:
    """Two continuations of one prompt, as ids; `margin`: how much better the chosen one is held to be; `weight` weighs
    the pair. `problem_id` says where the pair comes from and is no part of the example."""

    id: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float = 0.0
    problem_id: str = field(default="", repr=False, compare=False)
    weight: float = field(default=1.0, repr=False)


def is_held_out(key: str, share: float) -> bool:
    """Say whether a problem belongs to the held-out `share`, by the hash of its `split_key`: the same everywhere, for
    every file, for all problems of a passage, and for all copies of a problem in a mixture."""
    digest = hashlib.sha256(f"held-out/{original_id(key)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def is_in_part(key: str, part: str, held_out_share: float) -> bool:
    """Say whether the problem of a `split_key` belongs to `part`: all, train or held_out. Raises BadInput on another
    word."""
    if part not in ("all", "train", "held_out"):
        raise BadInput(f"part must be all, train or held_out, got '{part}'")
    return part == "all" or is_held_out(key, held_out_share) == (part == "held_out")


class HasPart(Protocol):
    """A source of examples that takes the problems of one part of a file."""

    @property
    def path(self) -> str:
        """The file that is read."""

    @property
    def part(self) -> str:
        """The part whose problems are taken: all, train or held_out."""

    @property
    def held_out_share(self) -> float:
        """The share of the problems that is held out, in [0, 1]."""


def of_part(records: Sequence[R], source: HasPart) -> list[R]:
    """Return the records of the problems of the source's part (`is_in_part` of their `split_key`)."""
    kept = [row for row in records if is_in_part(split_key(row), source.part, source.held_out_share)]
    reason = f"belong to problems that are not in part {source.part}"
    leave_out(source.path, len(records) - len(kept), len(records), "rows", reason, is_asked_for=True)
    return kept


def leave_out_repeated(path: str, number: int, total: int, noun: str) -> None:
    """Count rows that repeat an earlier one (`is_distinct`)."""
    leave_out(path, number, total, noun, "repeat an earlier one", is_asked_for=True)


def keep_short(examples: list[E], max_length: int, path: str) -> list[E]:
    """Return the examples of at most `max_length` tokens. What is left out is counted in a warning, and how many of it
    have a prompt that fills the window alone; the longest is named. Raises BadInput where none is left."""
    kept = [example for example in examples if example_length(example) <= max_length]
    if len(kept) < len(examples):
        long: list[Any] = [example for example in examples if example_length(example) > max_length]
        hopeless = sum(prompt_tokens(example) >= max_length for example in long)
        alone = f" ({hopeless} by their prompt alone)" if hopeless else ""
        longest = max(long, key=example_length)
        details = f"{alone}: the longest is '{longest.id}' with {example_length(longest)}"
        leave_out(path, len(long), len(examples), "examples", f"are longer than {max_length} tokens", details=details)
    if not kept:
        raise BadInput(f"{path}: no example is left (of {len(examples)} read)")
    return kept


def encode_demonstration(tokenizer: Any, demonstration: Demonstration) -> TokenExample:
    """Return prompt and completion tokenised apart, so that the border is where sampling will put it; then EOS.

    Behind the prompt the completion's tokens read as its text, also where the tokenizer writes a space before what it
    tokenises by itself.
    """
    return _encode(tokenizer, demonstration)[0]


def encode_demonstrations(tokenizer: Any, demonstrations: Sequence[Demonstration], path: str) -> list[TokenExample]:
    """Return `encode_demonstration` of each. Warns, once, where a tokenizer that normalises changes completions."""
    pairs = [_encode(tokenizer, row) for row in demonstrations]
    changed = [example.id for example, is_exact in pairs if not is_exact]
    if changed:
        log.warning("%s: the tokenizer changes the text of %d of %d completions ('%s' is the first): the model learns "
                    "to write what their tokens read as", path, len(changed), len(pairs), changed[0])  # fmt: skip
    return [example for example, _ in pairs]


def _encode(tokenizer: Any, row: Demonstration) -> tuple[TokenExample, bool]:
    """Return the example, and whether its completion's tokens read as the completion."""
    prompt = encode_text(tokenizer, row.prompt, f"demonstration '{row.id}'")
    completion, is_exact = encode_response(tokenizer, prompt, row.completion)
    ids = [*prompt, *completion, tokenizer.eos_token_id]
    judged = response_hash(row.judged) if row.judged else UNKNOWN if row.problem_id else ""
    return TokenExample(row.id, ids, len(prompt), problem_id=row.problem_id, judged=judged), is_exact


@dataclass(frozen=True)
class DemonstrationExamples:
    """SFT examples of a file of `Demonstration`.

    `max_length`: tokens of prompt, completion and end; `min_completion_tokens`: those of the completion with
    its end. `is_completion_only` false also trains on the prompt (all its tokens but the first).
    """

    path: str
    max_length: int
    min_completion_tokens: int = 0
    is_completion_only: bool = True

    def load(self, tokenizer: Any) -> list[TokenExample]:
        """Return examples in file order."""
        records = read_records(Demonstration, self.path)
        num_named = sum(bool(row.problem_id) for row in records)
        if 0 < num_named < len(records):
            log.warning("%s: %d of %d demonstrations name no problem, so the model will not say which it learned to "
                        "judge: make these again (problems/verifier_demonstrations)", self.path,
                        len(records) - num_named, len(records))  # fmt: skip
        examples = encode_demonstrations(tokenizer, records, self.path)
        if 0 < num_named < len(records):  # only now: which of them judge is known by then
            examples = [replace(example, problem_id="") for example in examples]
        long = [e for e in examples if len(e.ids) - e.prompt_length >= self.min_completion_tokens]
        short = f"are shorter than {self.min_completion_tokens} tokens"
        leave_out(self.path, len(examples) - len(long), len(examples), "completions", short)
        if not self.is_completion_only:
            long = [replace(example, prompt_length=1) for example in long]
        return keep_short(long, self.max_length, self.path)


@dataclass(frozen=True)
class WeightedResponse:
    """A response whose tokens have weights, as the advantages of an episode are."""

    id: str
    """unique in the file"""
    problem_id: str
    prompt_ids: list[int]
    """token ids of the prompt"""
    response_ids: list[int]
    """token ids of the response"""
    weights: list[float]
    """one per response token, multiplies its loss; 0 masks it (an observation that a tool wrote)"""


@dataclass(frozen=True)
class WeightedExamples:
    """SFT examples of a file of `WeightedResponse`. `has_mean_one_weights` rescales the weights of each response
    so that the mean of those that are not 0 is 1."""

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    has_mean_one_weights: bool = False

    def load(self, tokenizer: Any) -> list[TokenExample]:
        """Return the examples in file order; `tokenizer` is not used.

        Raises BadInput where a row has no prompt token, not one weight per response token, or weights to be rescaled
        that sum to 0.
        """
        examples = []
        for row in of_part(read_records(WeightedResponse, self.path), self):
            if not row.prompt_ids or len(row.weights) != len(row.response_ids):
                numbers = f"{len(row.prompt_ids)} prompt tokens, {len(row.response_ids)} response tokens"
                raise BadInput(f"{self.path}: '{row.id}' has {numbers} and {len(row.weights)} weights: at least one "
                               "prompt token and one weight a response token are wanted")  # fmt: skip
            weights = self._scaled(row) if self.has_mean_one_weights else row.weights
            ids = row.prompt_ids + row.response_ids
            examples.append(TokenExample(row.id, ids, len(row.prompt_ids), weights))
        return keep_short(examples, self.max_length, self.path)

    def _scaled(self, row: WeightedResponse) -> list[float]:
        live = [weight for weight in row.weights if weight != 0]
        mean = sum(live) / len(live) if live else 1.0
        if mean == 0:
            raise BadInput(f"{self.path}: the weights of '{row.id}' sum to 0 and cannot be scaled to a mean of 1: "
                           "set examples.has_mean_one_weights=false")  # fmt: skip
        return [weight / mean for weight in row.weights]


@dataclass(frozen=True)
class PreferenceExamples:
    """Examples of a file of `PreferencePair`; every pair of the file is one example.

    `has_score_margin`: the example's margin is the chosen score less the rejected one (Bradley-Terry's).
    `balances_prompts`: all prompts weigh alike, however many pairs they have: each pair weighs 1 / pairs of its prompt,
    as the comparisons of one ranking do in Ouyang et al. 2022 (weights are scaled to a mean of 1). For Bradley-Terry.
    """

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    has_score_margin: bool = False
    balances_prompts: bool = False

    def load(self, tokenizer: Any) -> list[PairExample]:
        """Return examples in file order; `tokenizer` is not used. Raises BadInput on a pair with an empty part."""
        examples = [self._example(pair) for pair in of_part(read_records(PreferencePair, self.path), self)]
        kept = keep_short(examples, self.max_length, self.path)
        return balanced_prompts(kept) if self.balances_prompts else kept

    def _example(self, pair: PreferencePair) -> PairExample:
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            if not getattr(pair, name):
                raise BadInput(f"{self.path}: {name} of pair '{pair.id}' is empty: build the pairs with token ids")
        margin = pair.chosen_score - pair.rejected_score if self.has_score_margin else 0.0
        return PairExample(pair.id, pair.prompt_ids, pair.chosen_ids, pair.rejected_ids, margin, pair.problem_id)


def balanced_prompts(examples: Sequence[PairExample]) -> list[PairExample]:
    """Return the pairs with the same sum of weights for every prompt, 1 on average over all pairs."""
    sizes = Counter(tuple(example.prompt_ids) for example in examples)
    scale = len(examples) / len(sizes) if sizes else 1.0
    return [replace(example, weight=scale / sizes[tuple(example.prompt_ids)]) for example in examples]


def pair_length(pair: PairExample) -> int:
    """Return tokens of the longer side with its prompt."""
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))


def example_length(example: Any) -> int:
    """Return tokens of any example, for batching by length."""
    if isinstance(example, PairExample):
        return pair_length(example)
    if isinstance(example, OutcomeExample):
        return max(len(example.ids), example.prompt_length + len(example.mismatched_ids))
    return len(example.ids)


def computed_tokens(example: Any) -> int:
    """Return tokens that a pass over any example computes without padding: a pair's prompt once, both its sides."""
    if isinstance(example, PairExample):
        return len(example.prompt_ids) + len(example.chosen_ids) + len(example.rejected_ids)
    return len(example.ids)


def prompt_tokens(example: Any) -> int:
    """Return tokens of any example's prompt; 0 where it does not say."""
    if isinstance(example, PairExample):
        return len(example.prompt_ids)
    return getattr(example, "prompt_length", 0)


def examples_fingerprint(examples: Sequence[Any]) -> str:
    """Return a hash of the examples and their order, stored in checkpoints: a resume on other data is refused."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
        if isinstance(example, PairExample) and example.weight != 1.0:  # runs from before there were weights go on
            digest.update(f"weight {example.weight!r}".encode())
    return digest.hexdigest()[:16]
