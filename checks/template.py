"""The prompt as the model reads it: whole, with one begin token, and opened for an answer."""

from collections.abc import Sequence
from typing import Any

from espalier.checks.check import CheckFailed
from espalier.data.prompts import PromptTemplate, encode_prompt
from espalier.data.records import Problem
from espalier.data.tasks.task import Task

_NUM_LOOKED_AT = 20


def check_template(task: Task, tokenizer: Any, problems: Sequence[Problem]) -> str:
    """Encode the first problems and read the ids back: the question must stand in the text that the model reads, one
    begin token at most, and prompts of different questions must differ. Raises CheckFailed, BadInput."""
    template = getattr(task, "template", None)
    is_chat = isinstance(template, PromptTemplate) and template.writes_chat(tokenizer)
    how = "the tokenizer's chat template" if is_chat else "the task's prompt"
    looked = list(problems[:_NUM_LOOKED_AT])
    texts: dict[str, str] = {}
    longest = 0
    for problem in looked:
        prompt = encode_prompt(task, tokenizer, problem)
        read = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        missing = _missing(problem, prompt.text)
        if missing:
            raise CheckFailed(f"{how} leaves out the {missing} of problem '{problem.id}', the model reads "
                              f"{prompt.text[-60:]!r}: correct the template")  # fmt: skip
        if _missing(problem, read):
            raise CheckFailed(f"the tokenizer cannot write the prompt of problem '{problem.id}': its ids read as "
                              f"{read[:60]!r}: choose a tokenizer that has these characters")  # fmt: skip
        begin = getattr(tokenizer, "bos_token_id", None)
        if begin is not None and prompt.ids[:2] == [begin, begin]:
            raise CheckFailed(f"the prompt begins with {tokenizer.bos_token} twice: the chat template writes it and so "
                              "does the tokenizer: take it out of one of them")  # fmt: skip
        same = texts.setdefault(prompt.text, problem.question)
        if same != problem.question:
            raise CheckFailed(f"{how} writes one text for different questions: name {{question}} in it")
        longest = max(longest, len(prompt.ids))
    plain = "" if is_chat or not getattr(tokenizer, "chat_template", None) else (
        "; the tokenizer has a chat template that this prompt does not use (prompt@task.template=chat...)")  # fmt: skip
    return f"{how}, {longest} tokens at most in {len(looked)} prompts, ending {texts.popitem()[0][-24:]!r}{plain}"


def _missing(problem: Problem, text: str) -> str:
    """Return which part of the problem does not stand in the text, white space apart; empty where all do."""
    squeezed = "".join(text.split())
    parts = {"question": problem.question, **{f"option {option[:20]!r}": option for option in problem.options}}
    for name, part in parts.items():
        if "".join(part.split()) not in squeezed:
            return name
    return ""
