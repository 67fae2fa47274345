"""Prompts and responses in tokens, drawn at random, and the bytes that they stand for: the cases of `token_paths`."""

import random
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from benchmarks.silence.real_tokenizers import Subject
from espalier.data.prompts import EncodedPrompt, PromptTemplate
from espalier.data.records import Problem
from espalier.data.token_text import encode_response
from espalier.sampling.client import Sample, SampleRequest

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
