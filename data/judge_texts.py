"""Texts to a judge and from one: prompts filled in, and what the last line of a response says and nothing else."""

import re
from collections.abc import Mapping, Sequence

from espalier.data.records import BadInput


def said_lines(response: str) -> list[str]:
    """Return the lines that are not blank, without Markdown's bold around them."""
    stripped = (line.strip().strip("*").strip() for line in response.split("\n"))
    return [line for line in stripped if line]


def last_line_says(pattern: re.Pattern[str], response: str) -> str | None:
    """Return what the last line says; None where it does not fit, or where another line says something else."""
    lines = said_lines(response)
    if not lines or not pattern.fullmatch(lines[-1]):
        return None
    said = {match.group(1) for match in map(pattern.fullmatch, lines) if match}
    return said.pop() if len(said) == 1 else None


_SCORE = re.compile(r"Score: (10|[0-9])")


def parse_score(response: str) -> float | None:
    """Return the score of an answer in [0, 1]; None where its last line is none, or another line says another one."""
    said = last_line_says(_SCORE, response)
    return None if said is None else int(said) / 10


def last_line_agrees(name: str, response: str) -> bool | None:
    """Return whether the last line says "`name`: yes" or "`name`: no"; None where it says neither."""
    said = last_line_says(re.compile(rf"{name}: (yes|no)"), response)
    return None if said is None else said == "yes"


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return the template with `{name}` replaced; what a solution says in braces stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: parts.get(match.group(1), match.group(0)), template)


def check_template(template: str, names: Sequence[str], place: str = "requests.template") -> None:
    """Raise BadInput where the template lacks one of the parts."""
    missing = [name for name in names if "{" + name + "}" not in template]
    if missing:
        raise BadInput(f"{place} lacks {{{missing[0]}}}: the judge would not see it")
