"""A number times letters (`5x`, `3ab`, `2 \\cdot x^2`), as distinct from a number with its unit (`5 cm`, `5 m`).

LaTeX writes both alike. Here letters are a unit where they stand in `\\text{...}` or `\\mathrm{...}`, where they are
a known unit or a word, or where one letter of a unit stands apart (`5 m`, not `5m`); all else is a variable. Whether
the letter of a unit right behind a number (`5m`) is one depends on the gold answer: beside a plain number it is.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from espalier.data.answers.plain_numbers import read_number

_UNIT_NAMES = (
    "cm mm km dm nm kg mg gm ml mL kL cL dL ft in yd mi lb lbs oz hr hrs min mins sec secs ms mph kph kmh rad deg sq cu"
    " rs Rs am pm AM PM Hz kHz kW kJ mol pt qt gal pct USD EUR th st nd rd cc ohm ohms amp amps rpm mpg bps kPa Pa MB"
)
_UNITS = frozenset(_UNIT_NAMES.split(" "))
_UNIT_LETTERS = frozenset("mgshlLNJVKWACF")
_PREFIX = re.compile(
    r"(?P<number>[-+]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?|[-+]?\s*\\[dt]?frac\{\d+\}\{\d+\}|[-+](?=\s*[a-zA-Z]))"
    r"(?P<gap>\s*(?:\\cdot|\\times|\*|\\,|\\ |~)?\s*)"
)
_LETTER = re.compile(r"\s*(?:\\cdot|\*)?\s*([a-zA-Z])(?:_\{?(\w)\}?)?(?:\^(?:\{(\d{1,3})\}|(\d)))?")
_MAX_LETTERS = 6


@dataclass(frozen=True)
class Monomial:
    """`coefficient` times the product of `powers`: (letter, exponent), sorted."""

    coefficient: Fraction
    powers: tuple[tuple[str, int], ...]


def is_unit(letters: str, is_apart: bool) -> bool:
    """Say whether bare letters behind a number are its unit; `is_apart` where white space parts them."""
    if letters in _UNITS:
        return True
    if len(letters) == 1:
        return is_apart and letters in _UNIT_LETTERS
    if len(letters) == 2 or _is_row_of_letters(letters):
        return False
    return is_apart or len(letters) > 3


def _is_row_of_letters(letters: str) -> bool:
    """Return `abc`, `xyz`: neighbours in the alphabet, which name unknowns."""
    return all(ord(after) - ord(before) == 1 for before, after in pairwise(letters))


def read_monomial(text: str) -> Monomial | None:
    """Return a number times letters that is all of `text`; None for anything else, a number with its unit too."""
    text = text.strip()
    if len(text) > 40:
        return None
    match = _PREFIX.match(text)
    number = match["number"].replace(" ", "") if match else ""
    rest = text[match.end() :] if match else text
    unit = re.search(r"(?<=\w) +([a-zA-Z]{2,})$", rest)
    rest = rest[: unit.start()] if unit and is_unit(unit[1], is_apart=True) else rest
    if not rest or not re.match(r"[a-zA-Z]", rest):
        return None
    run = re.match(r"[a-zA-Z]+", rest)
    assert run is not None
    is_product = match is not None and re.search(r"cdot|times|\*", match["gap"]) is not None
    is_apart = match is not None and match["gap"] != "" and not is_product
    if match and number.strip("+-") and not is_product and is_unit(run[0], is_apart) and "_" not in rest:
        return None
    powers: Counter[str] = Counter()
    position = 0
    while position < len(rest):
        letter = _LETTER.match(rest, position)
        if letter is None or len(powers) >= _MAX_LETTERS or (not match and position == 0 and len(run[0]) > 1):
            return None
        powers[letter[1] + ("_" + letter[2] if letter[2] else "")] += int(letter[3] or letter[4] or 1)
        position = letter.end()
    value = read_number(number.lstrip("+")) if number.strip("+-") else None
    if value is None and number.strip("+-"):
        return None
    coefficient = value.value if value is not None else Fraction(-1 if number == "-" else 1)
    return Monomial(coefficient, tuple(sorted(powers.items())))


def has_glued_unit(text: str, more: str = "") -> bool:
    """Say whether a text is a number and one letter of a unit, or one of `more`, right behind it, perhaps squared or
    cubed (`5m`, `12V`)."""
    match = _PREFIX.match(text.strip())
    letter = _LETTER.fullmatch(text.strip(), match.end()) if match and match["number"].strip("+- ") else None
    if match is None or letter is None or match["gap"] or letter[1] not in _UNIT_LETTERS.union(more):
        return False
    return letter[2] is None and (letter[3] or letter[4] or "2") in ("2", "3")


_TAIL = re.compile(r"(?P<before>^|[^a-zA-Z])(?P<letters>[a-zA-Z]{1,20})(?:\^\{?\d\}?)?\s*$")


def ends_with_variable(formula: str) -> bool:
    """Say whether the letters at the end of a formula are variables (`x^2 + 3t`), not a unit (`2\\sqrt{3} cm`)."""
    tail = _TAIL.search(formula[-60:])
    if tail is None or tail["before"] == "\\":
        return False
    return not is_unit(tail["letters"], tail["before"].isspace())
