"""Numbers as they are written, read exactly: signs, thousands separators, decimals, fractions, mixed numbers,
scientific notation, percent, currency. No symbolic work, no floats."""

import re
from dataclasses import dataclass
from fractions import Fraction

_MAX_CHARS = 60
_SIMPLE = re.compile(r"-?(?:\d+|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d*)?|-?\.\d+")
_SLASH = re.compile(r"(-?)(\d{1,15})/(-?)(\d{1,15})")
_FRAC = re.compile(r"(-?)\\frac\{(-?\d{1,15})\}\{(-?\d{1,15})\}")
_FRAC_SHORT = re.compile(r"(-?)\\frac(\d)(\d)")
_MIXED = re.compile(r"(-?)(\d{1,9})(?: |\\ )?(?:\\frac\{(\d{1,9})\}\{(\d{1,9})\}|(?<= )(\d{1,9})/(\d{1,9}))")
_SCIENTIFIC = re.compile(
    r"(-?(?:\d{1,15})(?:\.\d{1,15})?)(?:[eE]|\\times10\^|\\cdot10\^|\*10\^|×10\^)\{?([+-]?\d{1,3})\}?"
)
_DIGITS = re.compile(r"[0-9]")


@dataclass(frozen=True)
class PlainNumber:
    """`value` exactly as written (a percent's number before the sign), `is_percent`, `num_decimals` written."""

    value: Fraction
    is_percent: bool = False
    num_decimals: int = 0


def read_number(text: str) -> PlainNumber | None:
    """Return a number that is all of `text`; None where it is anything else. Only ASCII digits are digits."""
    text = text.strip()
    if len(text) > _MAX_CHARS or not text.isascii() or not _DIGITS.search(text):
        return None
    text = text.replace("\\!", "").replace("\\,", "").replace("{,}", ",").replace("\\dfrac", "\\frac")
    text = text.replace("\\tfrac", "\\frac").strip()
    is_percent = False
    for ending in ("\\%", "%"):
        if text.endswith(ending):
            text, is_percent = text[: -len(ending)].strip(), True
            break
    text = text.removeprefix("+").strip()
    if text.startswith(("\\$", "$")):
        text = text.removeprefix("\\").removeprefix("$").strip()
    elif text.startswith(("-\\$", "-$")):
        text = "-" + text.removeprefix("-").removeprefix("\\").removeprefix("$").strip()
    return _read(text, is_percent)


def _read(text: str, is_percent: bool) -> PlainNumber | None:
    if text.startswith("- "):
        text = "-" + text[2:]
    if _SIMPLE.fullmatch(text):
        digits = text.replace(",", "")
        decimals = len(digits.partition(".")[2])
        return PlainNumber(Fraction(digits.removesuffix(".")), is_percent, decimals)
    if match := _SLASH.fullmatch(text.replace(" / ", "/")):
        return _ratio(match[1] + match[2], match[3] + match[4], is_percent)
    tight = text.replace(" ", "")
    if match := _FRAC.fullmatch(tight) or _FRAC_SHORT.fullmatch(tight):
        return _ratio(match[2], match[3], is_percent, match[1])
    if match := _MIXED.fullmatch(text):
        numerator, denominator = match[3] or match[5], match[4] or match[6]
        if int(denominator) == 0 or int(numerator) >= int(denominator):
            return None
        value = int(match[2]) + Fraction(int(numerator), int(denominator))
        return PlainNumber(-value if match[1] else value, is_percent)
    if match := _SCIENTIFIC.fullmatch(tight):
        return PlainNumber(Fraction(match[1]) * Fraction(10) ** int(match[2]), is_percent)
    return None


def _ratio(numerator: str, denominator: str, is_percent: bool, sign: str = "") -> PlainNumber | None:
    if int(denominator) == 0:
        return None
    value = Fraction(int(numerator), int(denominator))
    return PlainNumber(-value if sign else value, is_percent)


def is_equal_within_decimals(one: PlainNumber, other: PlainNumber) -> bool | None:
    """Equal as written: True or False; None where only one is a percent, or where a decimal may stand for a
    fraction that it rounds (`0.333` for `1/3`): that is for the caller to decide."""
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        return True if percent.value == 100 * plain.value else None
    if one.value == other.value:
        return True
    for decimal, exact in ((one, other), (other, one)):
        if decimal.num_decimals >= 3 and exact.num_decimals == 0 and exact.value.denominator > 1:
            return None
        if decimal.num_decimals >= 5 and exact.num_decimals >= 5:
            return None
    return False
