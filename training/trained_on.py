"""What a run of steps, preferences or judged responses trains on: its problems, its responses by the hashes of
`data.seen_responses`, and how its rows are laid out; rows of a benchmark among them are refused."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from espalier.data.examples.stored_examples import column_of
from espalier.data.examples.token_examples import UNKNOWN, OutcomeExample, PairExample, StepExample, TokenExample
from espalier.data.jsonl import read_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput
from espalier.data.seen_responses import read_training_responses, response_hash, seen_rows, write_training_responses
from espalier.data.steps import Decoder
from espalier.data.training_layout import (
    RESPONSES,
    STEPS,
    PromptReader,
    TrainingLayout,
    read_training_layout,
    write_training_layout,
)
from espalier.data.training_problems import read_training_problems, write_training_problems
from espalier.models.load import is_reward_model

log = logging.getLogger("train")


def trained_responses(examples: Sequence[Any], tokenizer: Any) -> set[str]:
    """Return the hashes of all responses of pairs and of judged responses, and of what a verifier learns to judge or,
    beside that, imitates; of other examples nothing."""
    responses: set[tuple[int, ...]] = set()
    hashes = judged_solutions(examples)
    if hashes:
        hashes |= learnt_responses(
            (one for one in examples if isinstance(one, TokenExample) and not one.judged), tokenizer
        )
    for example in examples:
        if isinstance(example, PairExample):
            responses |= {tuple(example.chosen_ids), tuple(example.rejected_ids)}
        elif isinstance(example, OutcomeExample):
            responses.add(tuple(example.ids[example.prompt_length :]))
    decode = Decoder(tokenizer)
    return hashes | {response_hash(decode(ids)) for ids in responses}


def judged_solutions(examples: Sequence[Any]) -> set[str]:
    """Return the hashes of the solutions that a verifier's demonstrations judge."""
    return set(column_of(examples, "judged", "")) - {"", UNKNOWN}


def _says_what_it_judges(examples: Sequence[Any]) -> bool:
    """Say whether every demonstration of a verifier names both its problem and its solution."""
    both = zip(column_of(examples, "problem_id", ""), column_of(examples, "judged", ""), strict=True)
    return all(bool(problem_id) == bool(judged) and judged != UNKNOWN for problem_id, judged in both)


def _is_silent_verifier(folder: str) -> bool:
    """Say whether a folder is of a language model that learned what is right or wrong and does not say of which
    responses."""
    learned = read_training_problems(folder) is not None or read_training_layout(folder) is not None
    return learned and read_training_responses(folder) is None


def trained_layout(examples: Sequence[Any], tokenizer: Any) -> TrainingLayout | None:
    """Return how the rows of steps, of pairs, of judged responses or of a verifier's questions are laid out; None of
    other examples."""
    kinds: set[str] = set()

    def prompts() -> Iterator[Sequence[int]]:
        for example in examples:
            if isinstance(example, PairExample):
                kinds.add(RESPONSES)
                yield example.prompt_ids
            elif isinstance(example, OutcomeExample):
                kinds.add(RESPONSES)
                yield example.ids[: example.prompt_length]
            elif isinstance(example, TokenExample) and example.judged:
                kinds.add(RESPONSES)
                yield example.ids
            elif isinstance(example, StepExample):
                kinds.add(STEPS)
                yield example.ids[: example.positions[0] + 1] if example.positions else example.ids

    found = PromptReader(tokenizer).layout(prompts())
    return TrainingLayout(kinds.pop(), found) if len(kinds) == 1 else None


def write_trained_on(folder: Path, examples: Sequence[Any], tokenizer: Any, model: Mapping[str, Any]) -> None:
    """Write the files of `data.trained_on` of a model that was trained on these examples; `model`: the config node that
    it was built from."""
    problems = set(column_of(examples, "problem_id", "")) - {""}
    start = str(model["path"])
    is_reward, is_verifier = is_reward_model(start), any(column_of(examples, "judged", ""))
    must_say = is_reward or _is_silent_verifier(start)
    if problems:
        # what a policy saw before is not seen by the head of a reward model that is trained from it
        from_policy = model.get("num_labels") is not None and not is_reward
        earlier, policy = ("", start) if from_policy else (start, "")
        write_training_problems(folder, problems, earlier, must_say, policy)
    if is_verifier and not _says_what_it_judges(examples):
        log.warning("%s: some demonstrations do not say which solutions they judge, so it does not say which responses "
                    "it was trained on: make them again (problems/verifier_demonstrations)", folder)  # fmt: skip
    elif responses := trained_responses(examples, tokenizer):
        write_training_responses(folder, responses, start, must_say)
    if layout := trained_layout(examples, tokenizer):
        write_training_layout(folder, layout)


def learnt_responses(examples: Iterable[Any], tokenizer: Any) -> set[str]:
    """Return the hashes of what is imitated: of every demonstration or conversation each run of tokens that the loss
    reads, and all from the first of them to the last; of other examples nothing."""
    runs = {run for example in examples if isinstance(example, TokenExample) for run in _learnt_runs(example)}
    decode = Decoder(tokenizer)
    return {response_hash(decode(ids)) for ids in runs}


def _learnt_runs(example: TokenExample) -> Iterator[tuple[int, ...]]:
    ids = example.ids[example.prompt_length :]
    is_read = [weight != 0 for weight in example.weights or [1.0] * len(ids)]
    for is_learnt, run in groupby(zip(is_read, ids, strict=True), itemgetter(0)):
        if is_learnt:
            yield tuple(token for _, token in run)
    if True in is_read:
        yield tuple(ids[is_read.index(True) : len(is_read) - is_read[::-1].index(True)])


def check_benchmarks(examples: Sequence[Any], files: Sequence[str], tokenizer: Any, path: str) -> None:
    """Raise BadInput where rows of a benchmark are among the examples of `path`, what a verifier's demonstrations judge
    included, and where these hold no responses that could be compared with rows."""
    if not files:
        return
    if any(isinstance(example, StepExample) for example in examples):
        raise BadInput(f"held_out_benchmarks compares whole responses, and {path} holds steps: leave it out")
    if number := sum(judged == UNKNOWN for judged in column_of(examples, "judged", "")):
        raise BadInput(f"held_out_benchmarks compares the solutions that a verifier judges, and {number} "
                       f"demonstrations of {path} do not hold theirs: make them again "
                       "(problems/verifier_demonstrations), or leave it out")  # fmt: skip
    hashes = trained_responses(examples, tokenizer) | learnt_responses(examples, tokenizer)
    for file in files:
        rows = read_records(RankedResponses, file)
        if seen := seen_rows(rows, hashes):
            raise BadInput(f"{path} holds {len(seen)} of {len(rows)} rows of {file} ('{seen[0]}' is the first): a "
                           "model trained on them cannot be evaluated on them: leave them out")  # fmt: skip
