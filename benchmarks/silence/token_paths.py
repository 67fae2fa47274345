"""Random texts and cuts through every way from tokens to text, beside their bytes.

    python -m benchmarks.silence.token_paths 10000

The reference joins the bytes of tokens (`real_tokenizers`) and decodes them at once; no decoder of the product or of a
tokenizer library is in it. A case is a prompt and a response in tokens: as the tokenizer writes the text, or cut
elsewhere and partly into single bytes, as a sampler may write it. Each path says for each cut whether the product's
text is the reference's; a difference is kept as it was met first.
"""

import random
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.silence.real_tokenizers import NAMES, Subject, build
from benchmarks.silence.token_cases import Case, is_whole, random_text, whole
from espalier.data.answers.grade import Grade
from espalier.data.examples.example_view import token_text
from espalier.data.examples.step_examples import encode_labelled
from espalier.data.examples.token_examples import encode_demonstration
from espalier.data.process_data.formats import to_step_texts
from espalier.data.prompts import PromptTemplate
from espalier.data.records import AnnotatedSolution, Demonstration, Problem, State, Trajectory
from espalier.data.splitters import SPLITTERS, splitter
from espalier.data.token_text import encode_response, read_tokens
from espalier.pipeline.pages.show_prompt import token_pieces
from espalier.pipeline.pairs.state_pairs import step_pairs
from espalier.sampling.client import SampleRequest
from espalier.sampling.requests import decode, make_completions, make_trajectory
from espalier.values.cut_points import split_at_cut_points
from espalier.values.monte_carlo import finished, states_of

Check = tuple[bool, str]  # whether the product's text is the reference's, and both where not


@dataclass(frozen=True)
class PathCount:
    """One path of one tokenizer: texts that went through it, the cuts compared, and how many differ; the first."""

    tokenizer: str
    path: str
    texts: int
    cuts: int
    differences: int
    first: str = ""


def same(found: object, wanted: object, what: str = "") -> Check:
    """Return a comparison and its words."""
    return found == wanted, f"{what}: {found!r} is not {wanted!r}"


class Recorder:
    """A task that takes every answer for right and remembers what it read."""

    name = "recorder"

    def __init__(self, splitter_name: str):
        self.split_steps = splitter(splitter_name)
        self.read: list[str] = []

    def grade(self, gold: Any, response: str, num_options: int = 0) -> Grade:
        """Right, whatever it is."""
        self.read.append(response)
        return Grade("7", True)

    def problems(self, split: str) -> list[Problem]:
        """None."""
        return []

    def demonstrations(self, split: str) -> list[Demonstration]:
        """None."""
        return []

    def prompt(self, problem: Problem) -> str:
        """Never asked for."""
        raise NotImplementedError


def borders(case: Case, ids: list[int], chars: list[int], text: str) -> list[int]:
    """Return the token ends of character places, by bytes: the first that holds them and ends with a whole
    character."""
    lengths, raw, found = case.lengths(ids), case.added(ids), set()
    for place in chars:
        k = bisect_left(lengths, len(text[:place].encode()))
        while k < len(ids) and not is_whole(raw[: lengths[k]]):
            k += 1
        found.add(k)
    kept = sorted(end for end in found if 0 < len(whole(raw[: lengths[end]])) < len(text))
    return [*kept, len(ids)] if text else []


def steps_agree(case: Case, row: Trajectory) -> Iterator[Check]:
    """Return each state of a trajectory: the text of its steps is that of its tokens."""
    yield same("".join(row.steps), row.response, "steps join")
    for number, end in enumerate(row.step_ends[:-1], 1):
        yield same("".join(row.steps[:number]).encode(), case.added(row.response_ids[:end]), f"state {number}")
    if row.steps:
        yield same(row.step_ends[-1], len(row.response_ids), "the last step")


def of_original(case: Case) -> Iterator[Check]:
    """mistral_common writes and reads the same tokens."""
    original, tokenizer = case.subject.original, case.subject.tokenizer
    if original is None or case.subject.name == "sentencepiece_first":
        return
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    ids = original.encode(case.text, bos=False, eos=False)
    if max(ids, default=0) < len(tokenizer):
        yield same(list(tokenizer(case.text, add_special_tokens=False).input_ids), ids, "encode")
    every = [*case.prompt.ids, *case.ids] if case.prompt.text else case.canonical
    yield same(
        decode(tokenizer)(every), original.decode(every, special_token_policy=SpecialTokenPolicy.IGNORE), "decode"
    )


def of_loaders(case: Case) -> Iterator[Check]:
    """Return the light loader and the general one give one tokenizer."""
    own, other = case.subject.tokenizer, _general(str(case.subject.folder))
    yield same(list(own(case.text).input_ids), list(other(case.text).input_ids), "encode")
    yield same(decode(own)(case.ids), decode(other)(case.ids), "decode")


def of_prompts(case: Case) -> Iterator[Check]:
    """Tokenise a prompt: its tokens are its text."""
    text = case.prompt.text
    for token in case.subject.tokenizer.added_tokens_decoder.values():
        text = text.replace(token.content, "") if token.special else text
    yield same(case.subject.raw(case.prompt.ids), text.encode(), "prompt")


def of_round_trip(case: Case) -> Iterator[Check]:
    """Check that a response that is tokenised behind its prompt reads as it was written, and a demonstration's."""
    yield case.is_exact, f"encode_response changes {case.text!r}"
    yield same(case.added(case.canonical), case.text.encode(), "encode_response")
    if case.prompt.text:
        example = encode_demonstration(case.subject.tokenizer, Demonstration("d", case.prompt.text, case.text))
        yield same(case.subject.added(example.ids[: example.prompt_length], example.ids[example.prompt_length : -1]),
                   case.text.encode(), "demonstration")  # fmt: skip


def of_tokens(case: Case) -> Iterator[Check]:
    """Return every cut: the characters its tokens hold, and whether a state may end there."""
    found = read_tokens(case.prompt.ids, case.ids, decode(case.subject.tokenizer))
    yield same(found.text.encode(), case.added(case.ids), "text")
    whole_raw = case.added(case.ids)
    for k, length in enumerate(case.lengths(case.ids)):
        raw = whole_raw[:length]
        yield same(found.is_border[k], is_whole(raw) or k == len(case.ids), f"border {k}")
        if found.is_border[k]:
            yield same(found.text[: found.ends[k]], whole(raw), f"end {k}")


def of_steps(case: Case) -> Iterator[Check]:
    """Return a trajectory by each splitter, with an end token, a stop string, or cut by its length."""
    for name in SPLITTERS:
        task = Recorder(name)
        sample, text = case.sampled(case.ids)
        row = make_trajectory(task, case.subject.tokenizer, Problem("p", "", "7"), case.request(), 0, sample)
        yield same((row.response, task.read), (text, [text]), "graded")
        yield same(len(row.logprobs or []), len(row.response_ids), "log-probs")
        if sample.stop:
            needed = max(1, bisect_left(case.lengths(case.ids), len(text.encode())))
            yield same(row.response_ids, case.ids[:needed], "tokens before the stop")
        yield from steps_agree(case, row)
        places, place = [], 0
        for step in task.split_steps(text)[:-1]:
            place += len(step)
            places.append(place)
        if row.response_ids:
            yield same(row.step_ends, borders(case, row.response_ids, places, text), f"{name} ends")


def of_cut_points(case: Case) -> Iterator[Check]:
    """SPO's segments, and the completions of their states."""
    row = _trajectory(case)
    if not row.response_ids:
        return
    logprobs = [case.rng.choice((-1.0, -0.01)) for _ in row.response_ids]
    cut = split_at_cut_points(row, logprobs, decode(case.subject.tokenizer))
    yield from steps_agree(case, cut)
    yield from _completions(case, cut)


def of_states(case: Case) -> Iterator[Check]:
    """Return states after a splitter's steps: what their completions are graded on."""
    yield from _completions(case, _trajectory(case))


def of_pairs(case: Case) -> Iterator[Check]:
    """Return step pairs: texts and tokens of prompt, chosen and rejected."""
    row = _trajectory(case)
    if len(row.steps) < 2:
        return
    shared = row.response_ids[: case.rng.choice(row.step_ends[:-1])]
    more, is_exact = encode_response(case.subject.tokenizer, [*case.prompt.ids, *shared], random_text(case))
    other = _trajectory(case, [*shared, *more], "p/1") if is_exact else row
    values = {"p/0": [0.9] * len(row.steps), "p/1": [0.1] * len(other.steps)}
    for pair in step_pairs([row, other], values, 0.5):
        prefix = pair.prompt_ids[len(case.prompt.ids) :]
        yield same(pair.prompt, case.prompt.text + case.added(prefix).decode(), "prompt")
        for text, ids in ((pair.chosen, pair.chosen_ids), (pair.rejected, pair.rejected_ids)):
            yield whole(case.added(ids, prefix)).startswith(text), f"{text!r} is not of its tokens"


def of_judged_steps(case: Case) -> Iterator[Check]:
    """Read a judged solution at the tokens that hold the last characters of its steps."""
    if not case.prompt.text:
        return
    question = random_text(case)
    lines = [line.strip() for line in case.text.split("\n") if line.strip()]
    record = AnnotatedSolution("p", "p", question, lines, [1.0] * len(lines), -1, None)
    template = PromptTemplate(template="Q: {question}\n", before_response=case.template.before_response)
    found = encode_labelled(case.subject.tokenizer, record, template, "x")
    yield found is not None, f"{record.steps} are left out"
    if found is None or not lines:
        return
    prompt = template.encode(case.subject.tokenizer, Problem("p", question, "")).ids
    _, steps, _ = to_step_texts(record, template)
    steps = [template.before_response + steps[0], *steps[1:]]
    yield same(case.subject.added(prompt, found.ids[len(prompt) :]), "".join(steps).encode(), "judged text")
    for number, position in enumerate(found.positions, 1):
        text = "".join(steps[:number]).encode()
        lengths = [len(case.subject.added(prompt, found.ids[len(prompt) : end])) for end in (position, position + 1)]
        yield lengths[0] < len(text) <= lengths[1], f"step {number} is read at token {position}"


def of_pages(case: Case) -> Iterator[Check]:
    """Return what a reader is shown: the pieces of a prompt's page, and the marks of an example."""
    tokenizer, ids = case.subject.tokenizer, [*case.prompt.ids, *case.ids]
    wanted = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    yield same("".join(piece.text for piece in token_pieces(tokenizer, ids, len(case.prompt.ids))), wanted, "page")
    names = set(tokenizer.all_special_tokens)
    shown = [token_text(tokenizer)(token) for token in case.ids]
    for token, text in zip(case.ids, shown, strict=True):
        raw = case.subject.token_bytes[token]
        is_text = "\ufffd" not in raw.decode(errors="replace")
        yield (text == raw.decode() if is_text else text not in names), f"token {token} is shown as {text!r}"


def _trajectory(case: Case, ids: list[int] | None = None, name: str = "p/0") -> Trajectory:
    sample, _ = case.sampled(case.ids if ids is None else ids)
    task = Recorder(case.rng.choice(list(SPLITTERS)))
    request = SampleRequest(name.split("/")[0], case.prompt.text, case.prompt.ids)
    index = int(name.split("/")[1])
    return make_trajectory(task, case.subject.tokenizer, Problem("p", "", "7"), request, index, sample)


def _completions(case: Case, row: Trajectory) -> Iterator[Check]:
    tokenizer = case.subject.tokenizer
    for state in states_of(row, first_step=0)[:6]:
        yield same(state.prefix.encode(), case.added(state.prefix_ids), "state")
        rest = row.response_ids[len(state.prefix_ids) :]
        if case.rng.random() < 0.5:
            rest, _ = encode_response(tokenizer, state.prompt_ids + state.prefix_ids, random_text(case, 4))
        rest = [token for token in rest if case.subject.token_bytes[token]]
        sample, text = case.sampled(rest, state.prefix_ids)
        task = Recorder("lines")
        (completion,) = make_completions(task, tokenizer, state, state.id, [sample])
        yield same(task.read, [state.prefix + text], "graded")
        yield same(state.prefix + completion.response, state.prefix + text, "completion")
        yield from _finished(case, state, completion, text)


def _finished(case: Case, state: State, completion: Any, text: str) -> Iterator[Check]:
    row = finished(state, completion)
    yield same(row.response, state.prefix + text, "whole")
    yield whole(case.added(row.response_ids)).startswith(row.response), f"{row.response!r} is not of its tokens"


@cache
def _general(folder: str) -> Any:
    from espalier.models.load import load_tokenizer

    return load_tokenizer(folder)


PATHS: dict[str, Callable[[Case], Iterator[Check]]] = {
    "mistral_common": of_original,
    "loaders": of_loaders,
    "prompts": of_prompts,
    "text to tokens": of_round_trip,
    "tokens to text": of_tokens,
    "steps and stop strings": of_steps,
    "states and completions": of_states,
    "cut points": of_cut_points,
    "step pairs": of_pairs,
    "judged steps": of_judged_steps,
    "pages": of_pages,
}


def _checks(path: Callable[[Case], Iterator[Check]], case: Case) -> Iterator[Check]:
    """Return the path's checks; an error is a difference."""
    try:
        yield from path(case)
    except (ValueError, LookupError) as error:
        yield False, f"{type(error).__name__}: {error}"


def count(subject: Subject, num_texts: int, seed: int, by_engine: bool = False) -> list[PathCount]:
    """Try every path of one tokenizer."""
    found = []
    for name, path in PATHS.items():
        cuts = differences = 0
        first = ""
        for number in range(num_texts):
            case = Case(subject, random.Random(f"{seed}/{name}/{number}"), by_engine)
            for is_same, words in _checks(path, case):
                cuts += 1
                differences += not is_same
                first = first or ("" if is_same else f"case {number}, prompt {case.prompt.text!r}: {words}")
        found.append(PathCount(subject.name, name, num_texts, cuts, differences, first))
    return found


def measure(num_texts: int, seed: int) -> list[PathCount]:
    """Try every path of every tokenizer, sampled tokens read by vLLM's own class."""
    with tempfile.TemporaryDirectory() as folder:
        subjects = [build(name, Path(folder) / name) for name in NAMES]
        return [row for subject in subjects for row in count(subject, num_texts, seed, by_engine=True)]


if __name__ == "__main__":
    for row in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10000, seed=0):
        print(f"{row.tokenizer:>20}  {row.path:<24} {row.texts} texts, {row.cuts} cuts, {row.differences} differ")
        if row.first:
            print(f"{'':>22}{row.first}")
