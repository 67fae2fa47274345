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
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.silence.real_tokenizers import NAMES, Subject, build
from espalier.data.answers.grade import Grade
from espalier.data.examples.example_view import token_text
from espalier.data.examples.step_examples import encode_labelled
from espalier.data.examples.token_examples import encode_demonstration
from espalier.data.process_data.formats import to_step_texts
from espalier.data.prompts import EncodedPrompt, PromptTemplate
from espalier.data.records import AnnotatedSolution, Demonstration, Problem, State, Trajectory
from espalier.data.splitters import SPLITTERS, splitter
from espalier.data.token_text import encode_response, read_tokens
from espalier.pipeline.pages.show_prompt import token_pieces
from espalier.pipeline.pairs.state_pairs import step_pairs
from espalier.sampling.client import Sample, SampleRequest
from espalier.sampling.requests import decode, make_completions, make_trajectory
from espalier.values.cut_points import split_at_cut_points
from espalier.values.monte_carlo import finished, states_of

STOPS = ("\n\n", "####", ". ", "\n\nQ", "数", "Thought", "6")
_FRAGMENTS = (
    "5.\n\n6", " ", "  ", "\n", ".\n\n", "#### ", "#### 17", "é", "e\u0301", "🙂", "👩‍👧", "中文。", "数学", "مرحبا",
    "\t", "\r\n", "\\frac{1}{2}", "$x = 3$", "word", " word", "Thought 2: ", "\nAction 2: Finish[7]", "12,345", "3.75",
    " 5", "5", ". ", "\0", "\u2028", "▁", "<0x0A>", "ﬁ", "Q: ", "\n\n\n", "naïve", "Step 1: ", "?", "a", "**",
)  # fmt: skip
_TEMPLATES = (
    PromptTemplate(template="Q: {question}\n"),
    PromptTemplate(template="Q: {question}\nA:", before_response=" "),
    PromptTemplate(template="Q{question}"),
)
_CHAT = PromptTemplate(template="Q: {question}", is_chat=True)

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


def whole(found: bytes) -> str:
    """Return the text of bytes, without the first ones of a character that they do not end."""
    for cut in range(min(4, len(found)) + 1):
        try:
            return found[: len(found) - cut].decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError("the cases hold no bytes that are no text")


def is_whole(found: bytes) -> bool:
    """Say whether bytes end with a whole character."""
    return whole(found).encode() == found


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


def random_text(case: "Case", most: int = 10) -> str:
    """Return fragments that tokenizers cut in different ways, one after the other; SentencePiece itself takes U+2581,
    its own sign for a space, for one."""
    text = "".join(case.rng.choice(_FRAGMENTS) for _ in range(case.rng.randint(1, most)))
    return text.replace("▁", "_") if case.subject.is_sentence_piece else text


class Case:
    """A prompt and a response in tokens, drawn with `rng`; `by_engine` reads sampled tokens as vLLM's own class."""

    def __init__(self, subject: Subject, rng: random.Random, by_engine: bool = False):
        self.subject, self.rng, self.by_engine = subject, rng, by_engine
        self.template, self.prompt = self._prompt()
        self.text = random_text(self)
        if not subject.raw(self.prompt.ids):
            self.text = self.text.lstrip(" ")
        self.canonical, self.is_exact = encode_response(subject.tokenizer, self.prompt.ids, self.text)
        self.ids = self.canonical if rng.random() < 0.5 else self._cut_otherwise()

    def _prompt(self) -> tuple[PromptTemplate, EncodedPrompt]:
        tokenizer = self.subject.tokenizer
        has_chat = bool(tokenizer.chat_template)
        template = self.rng.choice([*_TEMPLATES, _CHAT] if has_chat else _TEMPLATES)
        if has_chat and self.rng.random() < 0.05:
            return template, EncodedPrompt("", [tokenizer.bos_token_id])
        return template, template.encode(tokenizer, Problem("p", random_text(self), "7"))

    def _cut_otherwise(self) -> list[int]:
        """Return the text in other tokens: pieces of it tokenised alone, some characters byte by byte."""
        ids: list[int] = []
        start = 0
        while start < len(self.text):
            end = start + self.rng.randint(1, 6)
            piece = self.text[start:end]
            own, is_exact = encode_response(self.subject.tokenizer, [*self.prompt.ids, *ids], piece)
            ids += own if is_exact and self.rng.random() < 0.7 else [self._bytes[byte] for byte in piece.encode()]
            start = end
        return ids if self.subject.added(self.prompt.ids, ids) == self.text.encode() else self.canonical

    @cached_property
    def _bytes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for token, raw in self.subject.token_bytes.items():
            if len(raw) == 1:
                name = self.subject.tokenizer.convert_ids_to_tokens(token)
                if raw[0] not in found or name.startswith("<0x"):
                    found[raw[0]] = token
        return found

    def added(self, ids: list[int], behind: list[int] | None = None) -> bytes:
        """Return the bytes that tokens add to the prompt and what stands behind it."""
        return self.subject.added([*self.prompt.ids, *(behind or [])], ids)

    def lengths(self, ids: list[int]) -> list[int]:
        """Return how many bytes the first 0 to T tokens add to the prompt."""
        every = [len(self.subject.token_bytes[token]) for token in ids]
        lost = sum(every) - len(self.added(ids))  # a first space
        return [max(0, length - lost) for length in accumulate(every, initial=0)]

    def sampled(self, ids: list[int], behind: list[int] | None = None) -> tuple[Sample, str]:
        """Return tokens as an engine returns them, ended in one of three ways, and their text by the reference."""
        behind = behind or []
        prompt_ids, kind = [*self.prompt.ids, *behind], self.rng.choice(("stop", "length", "end"))
        stops = self.rng.sample(STOPS, 2) if kind == "stop" else []
        if kind == "end":
            sample = engine_sample(self, prompt_ids, ids, [])
            end = self.subject.tokenizer.eos_token_id
            sample = Sample(sample.text, [*ids, end], "stop", [-1.0] * (len(ids) + 1))
            return sample, whole(self.added(ids, behind))
        if kind == "length":
            ids = ids[: self.rng.randint(0, len(ids))]
        sample = engine_sample(self, prompt_ids, ids, stops)
        text = whole(self.added(sample.token_ids, behind))
        return sample, text[: text.index(sample.stop)] if sample.stop else text

    def request(self) -> SampleRequest:
        """For the prompt."""
        return SampleRequest("p", self.prompt.text, self.prompt.ids)


def engine_sample(case: Case, prompt_ids: list[int], ids: list[int], stops: list[str]) -> Sample:
    """Return tokens read one by one up to a stop string, by vLLM's own class or by the stream that it reads with."""
    tokenizer = case.subject.tokenizer
    if case.by_engine:
        from vllm import SamplingParams
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

        request: Any = SimpleNamespace(
            request_id="r", prompt_token_ids=prompt_ids, sampling_params=SamplingParams(stop=stops)
        )
        reader = FastIncrementalDetokenizer(tokenizer, request)
        for k, token in enumerate(ids, 1):
            stop = reader.update([token], False)
            if stop is not None:
                return Sample(reader.output_text, ids[:k], "stop", [-1.0] * k, stop)
        return Sample(reader.output_text, ids, "length", [-1.0] * len(ids))
    from tokenizers.decoders import DecodeStream

    stream, text = DecodeStream(ids=prompt_ids, skip_special_tokens=True), ""
    for k, token in enumerate(ids, 1):
        text += stream.step(tokenizer._tokenizer, token) or ""
        ends = {text.index(stop) + len(stop): stop for stop in stops if stop in text}
        if ends:
            stop = ends[min(ends)]
            return Sample(text[: text.index(stop)], ids[:k], "stop", [-1.0] * k, stop)
    return Sample(text, ids, "length", [-1.0] * len(ids))


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
