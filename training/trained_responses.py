"""Which responses a run of preferences or judged responses trains on, by the hashes of `data.seen_responses`; rows of a
benchmark among them are refused."""

from collections.abc import Sequence
from typing import Any

from espalier.data.examples.token_examples import OutcomeExample, PairExample
from espalier.data.jsonl import read_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput
from espalier.data.seen_responses import response_hash, seen_rows
from espalier.data.steps import Decoder


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


def check_benchmarks(examples: Sequence[Any], files: Sequence[str], tokenizer: Any, path: str) -> None:
    """Raise BadInput where rows of a benchmark are among the examples of `path`."""
    hashes = trained_responses(examples, tokenizer) if files else set()
    for file in files:
        rows = read_records(RankedResponses, file)
        if seen := seen_rows(rows, hashes):
            raise BadInput(f"{path} holds {len(seen)} of {len(rows)} rows of {file} ('{seen[0]}' is the first): a "
                           "model trained on them cannot be evaluated on them: leave them out")  # fmt: skip
