"""What a run of steps, preferences or judged responses trains on: how its rows are laid out, and its responses, by the
hashes of `data.seen_responses`; rows of a benchmark among them are refused."""

from collections.abc import Iterator, Sequence
from typing import Any

from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample
from espalier.data.jsonl import read_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput
from espalier.data.seen_responses import response_hash, seen_rows
from espalier.data.steps import Decoder
from espalier.data.training_layout import RESPONSES, STEPS, PromptReader, TrainingLayout


def trained_responses(examples: Sequence[Any], tokenizer: Any) -> set[str]:
    """Return the hashes of all responses of pairs and of judged responses; of other examples nothing."""
    responses: set[tuple[int, ...]] = set()
    for example in examples:
        if isinstance(example, PairExample):
            responses |= {tuple(example.chosen_ids), tuple(example.rejected_ids)}
        elif isinstance(example, OutcomeExample):
            responses.add(tuple(example.ids[example.prompt_length :]))
    decode = Decoder(tokenizer)
    return {response_hash(decode(ids)) for ids in responses}


def trained_layout(examples: Sequence[Any], tokenizer: Any) -> TrainingLayout | None:
    """Return how the rows of steps, of pairs or of judged responses are laid out; None of other examples."""
    kinds: set[str] = set()

    def prompts() -> Iterator[Sequence[int]]:
        for example in examples:
            if isinstance(example, PairExample):
                kinds.add(RESPONSES)
                yield example.prompt_ids
            elif isinstance(example, OutcomeExample):
                kinds.add(RESPONSES)
                yield example.ids[: example.prompt_length]
            elif isinstance(example, StepExample):
                kinds.add(STEPS)
                yield example.ids[: example.positions[0] + 1] if example.positions else example.ids

    found = PromptReader(tokenizer).layout(prompts())
    return TrainingLayout(kinds.pop(), found) if len(kinds) == 1 else None


def check_benchmarks(examples: Sequence[Any], files: Sequence[str], tokenizer: Any, path: str) -> None:
    """Raise BadInput where rows of a benchmark are among the examples of `path`."""
    hashes = trained_responses(examples, tokenizer) if files else set()
    for file in files:
        rows = read_records(RankedResponses, file)
        if seen := seen_rows(rows, hashes):
            raise BadInput(f"{path} holds {len(seen)} of {len(rows)} rows of {file} ('{seen[0]}' is the first): a "
                           "model trained on them cannot be evaluated on them: leave them out")  # fmt: skip
