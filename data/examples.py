"""Records → token examples: ids with what the loss reads. Built once, before training.

Text is tokenised in one place only (demonstrations, which no sampler has tokenised); trajectories, values
and pairs carry the sampler's ids. An example that does not fit `max_length` is left out and counted.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.jsonl import read_records
from data.prompts import encode_text
from data.records import BadInput, Demonstration, PreferencePair, StepValues

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenExample:
    """`ids` [T]; the loss reads tokens `prompt_length`..T-1."""

    id: str
    ids: list[int]
    prompt_length: int


@dataclass(frozen=True)
class StepExample:
    """`ids` [T]; `positions` [S] are indices into ids of step ends, `values` [S] their targets in [0, 1]."""

    id: str
    ids: list[int]
    positions: list[int]
    values: list[float]


@dataclass(frozen=True)
class PairExample:
    """Two continuations of one prompt, as ids."""

    id: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


def is_held_out(problem_id: str, share: float) -> bool:
    """Whether a problem belongs to the held-out `share`, by hash: the same everywhere, for every file."""
    digest = hashlib.sha256(f"held-out/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _in_part(problem_id: str, part: str, held_out_share: float) -> bool:
    if part not in ("all", "train", "held_out"):
        raise BadInput(f"part must be all, train or held_out, got '{part}'")
    return part == "all" or is_held_out(problem_id, held_out_share) == (part == "held_out")


def _keep_short(examples: list[Any], length: Callable[[Any], int], max_length: int, path: str) -> list[Any]:
    kept = [example for example in examples if length(example) <= max_length]
    if len(kept) < len(examples):
        log.warning("%s: %d of %d examples are longer than %d tokens and left out", path,
                    len(examples) - len(kept), len(examples), max_length)  # fmt: skip
    if not kept:
        raise BadInput(f"{path}: no example to train on (of {len(examples)} read)")
    return kept


def encode_demonstration(tokenizer: Any, demonstration: Demonstration) -> TokenExample:
    """Prompt and completion tokenised apart, so that the border is where sampling will put it; then EOS."""
    prompt = encode_text(tokenizer, demonstration.prompt, f"demonstration '{demonstration.id}'")
    completion = tokenizer(demonstration.completion, add_special_tokens=False).input_ids
    return TokenExample(demonstration.id, [*prompt, *completion, tokenizer.eos_token_id], len(prompt))


@dataclass(frozen=True)
class DemonstrationExamples:
    """SFT examples of a file of `Demonstration`."""

    path: str
    max_length: int

    def load(self, tokenizer: Any) -> list[TokenExample]:
        """Examples in file order."""
        records = read_records(Demonstration, self.path)
        examples = [encode_demonstration(tokenizer, record) for record in records]
        return _keep_short(examples, lambda example: len(example.ids), self.max_length, self.path)


@dataclass(frozen=True)
class StepValueExamples:
    """PRM examples of a file of `StepValues`: the problems of one part, each distinct text once.

    Trajectories of one problem with the same ids carry the same values, and a tiny policy repeats itself:
    `is_distinct` keeps the first.
    """

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0
    is_distinct: bool = True

    def load(self, tokenizer: Any) -> list[StepExample]:
        """Examples in file order; `tokenizer` is not used: ids come from the sampler."""
        examples: list[StepExample] = []
        seen: set[tuple[str, tuple[int, ...]]] = set()
        for record in read_records(StepValues, self.path):
            key = (record.problem_id, tuple(record.response_ids))
            if not _in_part(record.problem_id, self.part, self.held_out_share):
                continue
            if not record.steps or (self.is_distinct and key in seen):
                continue
            seen.add(key)
            start = len(record.prompt_ids)
            positions = [start + end - 1 for end in record.step_ends]
            ids = record.prompt_ids + record.response_ids
            examples.append(StepExample(record.id, ids, positions, record.values))
        return _keep_short(examples, lambda example: len(example.ids), self.max_length, self.path)


@dataclass(frozen=True)
class PreferenceExamples:
    """DPO examples of a file of `PreferencePair`; every pair of the file is one example."""

    path: str
    max_length: int
    part: str = "all"
    held_out_share: float = 0.0

    def load(self, tokenizer: Any) -> list[PairExample]:
        """Examples in file order; `tokenizer` is not used."""
        examples = [
            PairExample(pair.id, pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
            for pair in read_records(PreferencePair, self.path)
            if _in_part(pair.problem_id, self.part, self.held_out_share)
        ]
        return _keep_short(examples, pair_length, self.max_length, self.path)


def pair_length(pair: PairExample) -> int:
    """Tokens of the longer side with its prompt."""
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))


def example_length(example: Any) -> int:
    """Tokens of any example, for batching by length."""
    return pair_length(example) if isinstance(example, PairExample) else len(example.ids)


def fingerprint(examples: Sequence[Any]) -> str:
    """A hash of the examples and their order, stored in checkpoints: a resume on other data is refused."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
    return digest.hexdigest()[:16]
