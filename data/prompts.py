"""Prompts as data: a template with named fields, an instruction, worked examples, stop strings.

A prompt is a file of conf/prompt/, put into a task as its `template`; no task holds prompt text of its own.
The blocks stand in this order, with `separator` between them:

    system, instruction          what is asked in general (a block that is empty falls away)
    worked example 1 .. k        `template` of the example, `continues`, `before_response`, its response
    the problem                  `template` of the problem, `continues`: here the model goes on

Texts of problems are put in as they are, in one pass: braces in a question (LaTeX) are never read as fields.
In a template only `{name}` is a field, where the name is letters, digits and underscores; `{{name}}` writes
`{name}`; every other brace stands for itself, so `\\frac{1}{2}` and `\\boxed{}` need no care.

The text of a prompt is tokenised once, here: samplers and trainers take its ids.
"""

import logging
import random
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from espalier.data.records import BadInput, Problem, parse_record
from espalier.data.shots import Shot, passage, read_shots
from espalier.data.sources import LETTERS

log = logging.getLogger(__name__)

FIELDS = ("question", "context", "premises", "options", "letters")
_FIELD = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}(\n*)")
_MAY_BE_EMPTY = ("context", "premises")


@dataclass(frozen=True)
class EncodedPrompt:
    """What the model continues, as text and as the ids that go to it."""

    text: str
    ids: list[int]


def check_unicode(text: str, place: str) -> None:
    """Raise BadInput where a prompt's text holds half a character, which nobody can be sent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(f"{place}: character {error.start} of the prompt is half a character (a surrogate)") from None


def encode_text(tokenizer: Any, text: str, place: str, *, is_complete: bool = False) -> list[int]:
    """Return the ids of a prompt's text, tokenised once.

    The tokenizer adds its begin token unless the text begins with one (a chat template's, or a text that was
    made by one) or `is_complete` says that the text has all its special tokens. An end token that the
    tokenizer adds by itself is taken off: a response follows. `place` opens every message. Raises BadInput
    on a text without tokens, or one that is not Unicode.
    """
    check_unicode(text, place)
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    is_complete = is_complete or bool(begin and text.startswith(begin))
    ids = list(tokenizer(text, add_special_tokens=not is_complete).input_ids)
    if not is_complete and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(end):
        ids.pop()
    if not ids:
        raise BadInput(f"{place}: the prompt is empty: check the prompt's template")
    return ids


@dataclass(frozen=True)
class PromptTemplate:
    """How a problem is asked; conf/prompt/ holds the published and our own ones.

    `template` and `instruction` may name {question}, {context}, {premises} (one a line: `info["premises"]`,
    else the context), {options} (lettered lines) and {letters} ("A, B, C or D"). A {context} or {premises}
    that is empty and begins a line takes the newlines after it along. `option_style` shows the first letter:
    "A.", "(A)", "A)". `shots` are worked examples in the config itself (fields of `Shot`), of which the first
    `num_shots` are shown (null: all); or `num_shots` of the file `shots_path`, drawn by `seed`. The problem
    itself is never one of them: the next example takes its place, if there is one. `before_response` stands
    between a prompt and a response, as the model is to write it. `continues` opens the response for the
    model. `stop` ends a sample; samplers read it from here. `is_chat`: the blocks are turns in the
    tokenizer's own chat template, `system` is the system turn; None: where the tokenizer has one.
    """

    template: str = "{question}\n"
    instruction: str = ""
    shots: list[Any] = field(default_factory=list)
    shots_path: str = ""
    num_shots: int | None = None
    seed: int = 0
    separator: str = "\n\n"
    before_response: str = ""
    continues: str = ""
    stop: list[str] = field(default_factory=list)
    option_style: str = "A."
    system: str = ""
    is_chat: bool | None = None

    def __post_init__(self) -> None:
        """Raises BadInput on a value that cannot work; files are read when the first prompt is made."""
        texts = ("template", "instruction", "shots_path", "separator", "before_response", "continues",
                 "option_style", "system")  # fmt: skip
        for name in texts:
            _check(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        for name in ("shots", "stop"):
            _check(isinstance(getattr(self, name), list), name, "a list", getattr(self, name))
        _check(all(isinstance(text, str) and text for text in self.stop), "stop", "a list of strings", self.stop)
        _check(self.is_chat is None or isinstance(self.is_chat, bool), "is_chat", "null, true or false", self.is_chat)
        _check(_is_int(self.seed), "seed", "a whole number", self.seed)
        is_count = self.num_shots is None or (_is_int(self.num_shots) and self.num_shots >= 0)
        _check(is_count, "num_shots", "null or a whole number from 0 on", self.num_shots)
        is_style = re.fullmatch(r"[^A-Za-z0-9]*A[^A-Za-z0-9]*", self.option_style)
        _check(bool(is_style), "option_style", "the first letter as it is shown: A. or (A) or A)", self.option_style)
        for name in ("template", "instruction"):
            _check_fields(getattr(self, name), name)
        if not self.template.strip() or not _field_names(self.template):
            raise BadInput(f"prompt.template names no field, so every problem reads the same: it may name {_known()}")
        if self.shots and self.shots_path:
            raise BadInput("prompt.shots and prompt.shots_path are both given: empty one of them")
        if self.shots_path and self.num_shots is None:
            raise BadInput("prompt.shots_path needs prompt.num_shots: how many worked examples to draw")
        object.__setattr__(self, "shots", [_as_shot(shot, index) for index, shot in enumerate(self.shots)])
        if not self.shots_path and (self.num_shots or 0) > len(self.shots):
            raise BadInput(f"prompt.num_shots is {self.num_shots}, there are {len(self.shots)} worked examples")

    def writes_chat(self, tokenizer: Any) -> bool:
        """Say whether a prompt is written by the tokenizer's chat template."""
        return bool(getattr(tokenizer, "chat_template", None)) if self.is_chat is None else self.is_chat

    def render(self, problem: Problem) -> str:
        """Return the prompt as one text: what a policy continues where `is_chat` is false, and what a chat API can be
        sent as one message. Raises BadInput on options that are asked for and missing."""
        blocks = [self.system, self._instruction(problem)]
        blocks += [self._ask(shot.as_problem()) + self.continues + self._answer(shot) for shot in self._shots(problem)]
        blocks.append(self._ask(problem) + self.continues)
        return self.separator.join(block for block in blocks if block)

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """Return the prompt as chat turns (`role`, `content`), for chat APIs and chat templates; the last is the
        user's.

        The instruction opens the first user turn; worked examples are turns of their own. `continues` opens
        the examples' answers but not the last turn: `encode` appends it to the generation prompt, while an
        API's answer brings it along (`strip_opening`).
        """
        turns: list[dict[str, str]] = []
        opening = self._instruction(problem)
        for shot in self._shots(problem):
            asked = self._ask(shot.as_problem())
            turns.append({"role": "user", "content": self._join(opening, asked)})
            turns.append({"role": "assistant", "content": (self.continues + self._answer(shot)).strip()})
            opening = ""
        turns.append({"role": "user", "content": self._join(opening, self._ask(problem))})
        return [{"role": "system", "content": self.system}, *turns] if self.system else turns

    def encode(self, tokenizer: Any, problem: Problem) -> EncodedPrompt:
        """Return the prompt's text and ids, as sampled and as trained on; a begin token never stands twice.

        A chat prompt is written by the tokenizer's chat template, generation prompt included, and has just
        the special tokens that the template writes. Raises BadInput where the tokenizer has no chat template
        or its template refuses the turns.
        """
        if not self.writes_chat(tokenizer):
            text = self.render(problem)
            return EncodedPrompt(text, encode_text(tokenizer, text, f"problem '{problem.id}'"))
        turns = self.messages(problem)
        text = write_chat(tokenizer, turns) + self.continues
        if self.is_chat is None:
            before, _, after = text.partition(turns[-1]["content"])
            _say_chat(str(getattr(tokenizer, "name_or_path", "")), before[:200], after)
        return EncodedPrompt(text, encode_text(tokenizer, text, f"problem '{problem.id}'", is_complete=True))

    def completion(self, response: str) -> str:
        """Return a worked response as the model is to write it after the prompt: what a demonstration holds."""
        return self.before_response + response

    def strip_opening(self, response: str) -> str:
        """Return an API's answer without the `continues` that it may begin with, like a policy's response."""
        answer = response.lstrip()
        return answer.removeprefix(self.continues) if self.continues and answer.startswith(self.continues) else response

    def files(self) -> list[str]:
        """Return files read, for provenance."""
        return [self.shots_path] if self.shots_path else []

    @cached_property
    def _pool(self) -> list[Shot]:
        """Worked examples in the order in which they are taken."""
        if not self.shots_path or self.num_shots == 0:
            return self.shots
        shots = read_shots(self.shots_path)
        if (self.num_shots or 0) > len(shots):
            raise BadInput(
                f"{self.shots_path} holds {len(shots)} worked examples, prompt.num_shots is {self.num_shots}"
            )
        return random.Random(f"shots/{self.seed}").sample(shots, len(shots))

    def _shots(self, problem: Problem) -> list[Shot]:
        """Return the examples shown with a problem: never the problem itself."""
        wanted = len(self._pool) if self.num_shots is None else self.num_shots
        shots: list[Shot] = []
        for shot in self._pool:
            if len(shots) == wanted:
                break
            if not shot.poses(problem):
                shots.append(shot)
        return shots

    def _instruction(self, problem: Problem) -> str:
        return self._fill(self.instruction, problem)

    def _ask(self, problem: Problem) -> str:
        return self._fill(self.template, problem)

    def _answer(self, shot: Shot) -> str:
        return self.completion(shot.response)

    def _join(self, *blocks: str) -> str:
        return self.separator.join(block for block in blocks if block).strip()

    def _fill(self, template: str, problem: Problem) -> str:
        """Return the template with the problem's texts, each put in once and never read again."""

        def value(match: re.Match[str]) -> str:
            literal, name, newlines = match.groups()
            if literal is not None:
                return "{" + literal + "}"
            text = self._field(name, problem)
            is_line = match.start() == 0 or template[match.start() - 1] == "\n"
            return text if not text and is_line and name in _MAY_BE_EMPTY else text + newlines

        return _FIELD.sub(value, template)

    def _field(self, name: str, problem: Problem) -> str:
        if name == "question":
            return problem.question
        if name == "context":
            return problem.context
        if name == "premises":
            return passage(problem)
        letters = LETTERS[: len(problem.options)]
        if not 0 < len(problem.options) <= len(LETTERS):
            need = (
                f"has {len(problem.options)} options and the prompt names {{{name}}}, which needs 1 to {len(LETTERS)}"
            )
            raise BadInput(f"problem '{problem.id}' {need}: choose another prompt (prompt@task.template=NAME)")
        if name == "letters":
            return " or ".join(part for part in (", ".join(letters[:-1]), letters[-1]) if part)
        lines = zip(letters, problem.options, strict=True)
        return "\n".join(f"{self.option_style.replace('A', letter)} {option}" for letter, option in lines)


def encode_prompt(task: Any, tokenizer: Any, problem: Problem) -> EncodedPrompt:
    """Return a task's prompt as it goes to the model: by its `template`, or by `task.prompt` where it has none."""
    template = getattr(task, "template", None)
    if isinstance(template, PromptTemplate):
        return template.encode(tokenizer, problem)
    text = task.prompt(problem)
    return EncodedPrompt(text, encode_text(tokenizer, text, f"problem '{problem.id}'"))


def write_chat(tokenizer: Any, messages: list[dict[str, str]], asks: bool = True) -> str:
    """Return the turns in the tokenizer's chat template as text, up to where the model's answer begins where it `asks`
    for one.

    Raises BadInput where there is no chat template, or where it refuses the turns.
    """
    name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(f"{name} has no chat template: choose a prompt with is_chat: false, or a chat model")
    from jinja2.exceptions import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    except (TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{name}: its chat template refuses the turns {roles} ({reason}): change the prompt") from None
    return text


@cache
def _say_chat(name: str, before: str, after: str) -> None:
    """Say once what the template of a tokenizer that nobody asked for writes around a question: a system turn of its
    own, say."""
    log.info("prompts are turns in the chat template of %s, which writes %r before the question and %r behind it "
             "(task.template.is_chat=false: plain text)", name or "the tokenizer", before, after)  # fmt: skip


def _known() -> str:
    return ", ".join(f"{{{name}}}" for name in FIELDS)


def _field_names(template: str) -> list[str]:
    return [match[2] for match in _FIELD.finditer(template) if match[2]]


def _check_fields(template: str, name: str) -> None:
    for placeholder in _field_names(template):
        if placeholder not in FIELDS:
            remedy = f"the fields are {_known()}; write {{{{{placeholder}}}}} for the text {{{placeholder}}}"
            raise BadInput(f"prompt.{name} has an unknown field {{{placeholder}}}: {remedy}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(is_good: bool, name: str, need: str, value: Any) -> None:
    if not is_good:
        raise BadInput(f"prompt.{name} must be {need}, got {str(value)[:60]!r}")


def _as_shot(row: Any, index: int) -> Shot:
    if isinstance(row, Shot):
        return row
    if not isinstance(row, dict):
        raise BadInput(f"prompt.shots[{index}] must have the fields question and response, got {str(row)[:60]!r}")
    return parse_record(Shot, row, f"prompt.shots[{index}]")
