"""Task and policy → a page that shows one prompt, and its demonstration, as the tokens the model reads.

    python run_stage.py -cn pages/show_prompt task=gsm8k stage.policy=MODEL output=prompt.html stage.index=17

The demonstration goes through `data.examples.token_examples.encode_demonstration`, so the loss mask on the page is the
one that training uses. The page is one HTML file without scripts; at a terminal the same is printed there, in colour
unless NO_COLOR is set. Characters that cannot be seen are written as their code.
"""

import html
import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from espalier.data.examples.token_examples import encode_demonstration
from espalier.data.prompts import EncodedPrompt, PromptTemplate, encode_prompt
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.steps import Decoder
from espalier.data.token_text import read_tokens
from espalier.pipeline.stage import StageContext

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --paper: #faf9f5; --ink: #1c2420; --muted: #66706a; --hair: #e4e3dc;
  --read: #efeee8; --learnt: #d5ecdf; --special: #f3dfc2; --bad: #a83f2a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #111513; --ink: #e4e9e5; --muted: #95a099; --hair: #2b322e;
  --read: #232925; --learnt: #1d4733; --special: #5b4520; --bad: #f0a08c; }} }}
body {{ margin: 0 auto; max-width: 1080px; padding: 24px 20px 60px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 26px; margin: 0 0 12px; }} h2 {{ font-size: 19px; margin: 36px 0 8px; }}
p {{ margin: 4px 0; color: var(--muted); }} .warning {{ color: var(--bad); font-weight: 600; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 0; }}
dt {{ color: var(--muted); }} dd {{ margin: 0; font-family: ui-monospace, monospace; font-size: 14px; }}
pre, .tokens {{ font: 14px/1.4 ui-monospace, monospace; white-space: pre-wrap; border: 1px solid var(--hair);
  border-radius: 8px; padding: 12px; margin: 8px 0; }}
.tokens span {{ display: inline-block; margin: 1px; padding: 0 3px; border-radius: 4px; background: var(--read);
  vertical-align: top; }}
.tokens .learnt {{ background: var(--learnt); font-weight: 600; }}
.tokens .special {{ outline: 2px solid var(--special); }}
.tokens small {{ display: block; font-size: 10px; font-weight: 400; color: var(--muted); }}
</style></head><body>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Piece:
    """One token, or the several that make one character: text, ids, whether the loss reads it."""

    text: str
    ids: list[int]
    is_learnt: bool
    is_special: bool


@dataclass(frozen=True)
class ShowPrompt:
    """`policy`: the folder whose tokenizer writes the prompt; problem `index` (from 0) of `split`."""

    policy: str
    split: str = "train"
    index: int = 0

    def inputs(self) -> list[str]:
        """Return the tokenizer's files, where the policy is a folder."""
        return [str(path) for name in _TOKENIZER_FILES if (path := Path(self.policy) / name).is_file()]

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page. Raises BadInput without a task, or with an index beyond its problems."""
        from espalier.models.load import load_tokenizer

        if context.task is None:
            raise BadInput("pages/show_prompt needs a task: add task=NAME")
        problem = self._problem(context.task)
        tokenizer = load_tokenizer(self.policy)
        template = getattr(context.task, "template", None)
        encoded = encode_prompt(context.task, tokenizer, problem)
        demonstration, notes = find_demonstration(context.task, self.split, problem, encoded)
        notes += remarks(template, tokenizer, problem, encoded)
        ids, num_prompt = encoded.ids, len(encoded.ids)
        if demonstration is not None:
            example = encode_demonstration(tokenizer, demonstration)
            ids, num_prompt = example.ids, example.prompt_length
            if example.ids[: example.prompt_length] != encoded.ids:
                notes.append("training reads other tokens for this prompt than sampling does")
            if isinstance(template, PromptTemplate) and not demonstration.completion.startswith(
                template.before_response
            ):
                notes.append(f"the demonstration does not begin with the prompt's {template.before_response!r}")
        pieces = token_pieces(tokenizer, ids, num_prompt)
        facts = {
            "problem": f"{problem.id} ({context.task.name}, {self.split} {self.index})",
            "gold": str(problem.gold),
            "policy": self.policy,
            "prompt": f"{len(encoded.text)} characters, {len(encoded.ids)} tokens",
            "response": f"{len(ids) - num_prompt} tokens, which the loss reads" if demonstration else "none",
            "stop": ", ".join(map(repr, template.stop)) if isinstance(template, PromptTemplate) else "",
        }
        facts = {name: visible(text) for name, text in facts.items() if text}
        notes = [visible(note) for note in notes]
        context.counts.update(prompt_tokens=num_prompt, response_tokens=len(ids) - num_prompt, notes=len(notes))
        if sys.stdout.isatty():
            print(render_terminal(facts, notes, pieces, has_colour="NO_COLOR" not in os.environ))
        return render_page(facts, notes, encoded.text, pieces)

    def _problem(self, task: Any) -> Problem:
        problems: list[Problem] = task.problems(self.split)
        if not 0 <= self.index < len(problems):
            raise BadInput(
                f"stage.index={self.index}: {task.name} has {len(problems)} {self.split} problems, counted from 0"
            )
        return problems[self.index]


def find_demonstration(
    task: Any, split: str, problem: Problem, encoded: EncodedPrompt
) -> tuple[Demonstration | None, list[str]]:
    """Return the task's first demonstration of the problem, and why there is none where there is none.

    A chat prompt takes the place of the demonstration's own, which is made without a tokenizer.
    """
    try:
        rows: list[Demonstration] = task.demonstrations(split)
    except BadInput as error:
        return None, [f"no demonstration: {error}"]
    for row in rows:
        if row.id == problem.id or row.id.startswith(problem.id + "/"):
            template = getattr(task, "template", None)
            is_written = isinstance(template, PromptTemplate) and encoded.text != template.render(problem)
            return (replace(row, prompt=encoded.text) if is_written else row), []
    return None, [f"no demonstration: {task.name} has none for this problem"]


def remarks(template: Any, tokenizer: Any, problem: Problem, encoded: EncodedPrompt) -> list[str]:
    """Return what a reader of the prompt should know: texts left out or changed, special tokens within, an empty
    end."""
    notes = []
    for what, values in (("options", problem.options), ("context", problem.context.splitlines())):
        missing = [value for value in values if value.strip() not in encoded.text]
        if missing:
            notes.append(f"the prompt leaves out the problem's {what}: {missing[0][:60]!r}")
    if encoded.ids.count(tokenizer.bos_token_id) > 1 and tokenizer.bos_token_id != tokenizer.eos_token_id:
        notes.append("the begin token stands more than once in the prompt")
    if (
        not (isinstance(template, PromptTemplate) and template.writes_chat(tokenizer))
        and tokenizer.eos_token_id in encoded.ids
    ):
        notes.append("the prompt contains the end token: the text of the problem holds it")
    read = Decoder(tokenizer, skips_special_tokens=False)(encoded.ids).removeprefix(tokenizer.bos_token or "")
    if "".join(read.split()) != "".join(encoded.text.removeprefix(tokenizer.bos_token or "").split()):
        notes.append("the tokenizer changes the prompt's text: the model reads what the tokens show")
    if encoded.text.endswith(" "):
        notes.append("the prompt ends with a space, which most tokenizers put at the beginning of a word")
    return notes


def token_pieces(tokenizer: Any, ids: Sequence[int], num_prompt: int) -> list[Piece]:
    """Return the tokens with the text each of them brings; tokens from `num_prompt` on are those the loss reads.

    Tokens that are parts of one character (bytes) make one piece.
    """
    special = set(tokenizer.all_special_ids)
    tokens = read_tokens([], ids, Decoder(tokenizer, skips_special_tokens=False))
    cuts = [k for k in range(len(ids) + 1) if tokens.is_border[k] or k == num_prompt]
    return [
        Piece(
            tokens.text[tokens.ends[start] : tokens.ends[end]],
            list(ids[start:end]),
            start >= num_prompt,
            ids[start] in special,
        )
        for start, end in pairwise(cuts)
    ]


def visible(text: str) -> str:
    """Return the text with what cannot be seen or written (control, format and half characters) as its code."""
    return "".join(
        f"\\u{ord(character):04x}" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        and character not in "\n\t" else character
        for character in text
    )  # fmt: skip


def _shown(piece: Piece) -> str:
    """Return a token's text; a newline is drawn and stays one, a tab and a lone space are drawn."""
    text = visible(piece.text).replace("\t", "⇥").replace("\n", "↵\n")
    return text if text.strip(" ") else text.replace(" ", "·")


def render_page(facts: dict[str, str], notes: Sequence[str], text: str, pieces: Sequence[Piece]) -> str:
    """Return one self-contained page; every text is escaped."""
    escape = html.escape
    tokens = []
    for piece in pieces:
        name = " ".join(["learnt"] * piece.is_learnt + ["special"] * piece.is_special)
        shown = escape(_shown(piece).removesuffix("\n")) or "∅"
        ids = " ".join(map(str, piece.ids))
        tokens.append(f'<span class="{name}">{shown}<small>{ids}</small></span>')
        tokens.append("\n" * piece.text.endswith("\n"))
    body = [
        "<h1>What the model reads</h1>",
        "<dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items()),
        "</dl>",
        *(f'<p class="warning">{escape(note)}</p>' for note in notes),
        "<h2>Tokens</h2>",
        "<p>Below each token stands its id. The loss reads the green ones; framed ones are special.</p>",
        f'<div class="tokens">{"".join(tokens)}</div>',
        "<h2>The prompt as text</h2>",
        f"<pre>{escape(visible(text))}</pre>",
    ]
    return _PAGE.format(title=escape(facts["problem"]), body="\n".join(body))


def render_terminal(facts: dict[str, str], notes: Sequence[str], pieces: Sequence[Piece], *, has_colour: bool) -> str:
    """Return the same for a terminal: tokens in turn light and dark, those the loss reads in green; without colour they
    are parted by `|`, and the response follows a line of its own."""
    lines = [f"{name:>10}  {fact}" for name, fact in facts.items()]
    lines += [f"{'note':>10}  {note}" for note in notes]
    prompt = [_shown(piece) for piece in pieces if not piece.is_learnt]
    response = [_shown(piece) for piece in pieces if piece.is_learnt]
    if not has_colour:
        return "\n".join([*lines, "", "|".join(prompt), "--- the loss reads from here on ---", "|".join(response)])
    shades = {False: ("\x1b[39m", "\x1b[90m"), True: ("\x1b[32m", "\x1b[92m")}
    coloured = [
        shades[is_learnt][number % 2] + shown
        for is_learnt, texts in ((False, prompt), (True, response))
        for number, shown in enumerate(texts)
    ]
    ids = " ".join(str(token) for piece in pieces for token in piece.ids)
    return "\n".join([*lines, "", "".join(coloured) + "\x1b[0m", "", f"\x1b[90m{ids}\x1b[0m"])
