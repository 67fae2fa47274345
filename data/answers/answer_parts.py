"""The parts of a written answer: what wraps it, its name (`x =`), its unit, the sides of a chain, the members of
a list. Linear scans on text; nothing here decides whether answers are equal."""

import re

from espalier.data.answers.final_answer import find_boxes
from espalier.data.answers.monomials import read_monomial
from espalier.data.answers.plain_numbers import PlainNumber, read_number

_COMMAND_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\*?\s*\{([^{}]*)\}"
)
_SPACING = re.compile(
    r"\\[,;:! ]|\\quad(?![a-zA-Z])|\\qquad(?![a-zA-Z])|~|\s+|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])"
    r"|\\displaystyle|\\limits"
)
_THIN_SPACES = ("\\,", "\\;", "\\:", "\\!", "\\ ", "~")
_NAME = re.compile(
    r"\s*m?\\angle\s*\{?[A-Z]{1,3}\}?\s*|\s*(?:[A-Za-z]|\\[a-zA-Z]+|[A-Za-z]{2,3})(?:_(?:\w|\{[^{}]{1,20}\}))?'?(?:\([a-z](?:,\s*[a-z])?\))?\s*"
    r"|\s*\(\s*[a-z](?:\s*,\s*[a-z]){1,4}\s*\)\s*|\s*[A-Z]{1,6}(?:_\{?\w{1,8}\}?)?(?::[A-Z]{1,6})?\s*"
)
_LETTERS = r"(?:[A-Za-z]{1,3}|\\[a-zA-Z]{2,8})"
_LONG_NAME = re.compile(
    r"\s*(?:\\text\w*\s*\{[A-Za-z .']{1,40}\}(?:_(?:\w|\{[^{}]{1,20}\}))?|\|\s*[A-Z]{2}\s*\||[A-Za-z][A-Za-z ]{2,30}"
    r"|(?:\|\s*)?\\(?:overline|vec|hat|mathbf|boldsymbol|mathrm|overrightarrow|widehat|bar|mathcal)\s*\{[A-Za-z]{1,4}\}(?:\s*\|)?"
    r"|[A-Za-z](?:_(?:\w|\{\w{1,6}\}))?(?:\^\{-1\}|'{1,3})?\s*\([^()=]{1,20}\)|\[\s*[A-Z]{3,8}\s*\]"
    rf"|\\(?:sin|cos|tan|cot|sec|csc|log|ln|det|dim|deg|arg|angle|triangle)\s*[({{]?\s*{_LETTERS}\s*[)}}]?"
    rf"|\\[dt]?frac\s*\{{{_LETTERS}\}}\s*\{{{_LETTERS}\}}|{_LETTERS}\s*[:/]\s*{_LETTERS})\s*"
)
_NOT_NAMES = re.compile(r"\s*(?:e|i|\\pi|\\infty|\\emptyset|\\varnothing|\\mathbb.*)\s*")
_EQUALS = re.compile(r"(?<![<>!\\:=])=(?!=)")
_NUMBER_AND_UNIT = re.compile(
    r"(?P<number>[-+]?\\?\$?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?|[-+]?\\frac\{\d+\}\{\d+\})\s*"
    r"(?P<unit>(?:\^\{?\\circ\}?|°)(?:\s*[CF])?|\\Omega|[^\W\d_](?:[^\W\d_]|[. /']){0,30}(?:\^\{?[23]\}?|²|³)?)"
)
_MULTIPLIER = re.compile(
    r"(?i)\b(?:hundred|thousand|million|billion|trillion|dozen|percent|pct|cents?|k|or|and|to|by|mod|of|base)\b"
)
_VARIABLES = frozenset("xyznkabijpqruvw")
_OPEN, _CLOSE = "([{", ")]}"
_BRACKET = re.compile(r"\\.|[()\[\]{}]")
_STEPS = {**dict.fromkeys((*_OPEN, "\\{"), 1), **dict.fromkeys((*_CLOSE, "\\}"), -1)}  # in depth


def _strip_thin(text: str) -> str:
    """Without white space and thin spaces at both ends; linear."""
    start, end = 0, len(text)
    while start < end and (text[start].isspace() or text[start] == "~" or text[start : start + 2] in _THIN_SPACES):
        start += 1 if text[start].isspace() or text[start] == "~" else 2
    while start < end and (text[end - 1].isspace() or text[end - 1] == "~" or text[end - 2 : end] in _THIN_SPACES):
        is_pair = end - 2 >= start and text[end - 2 : end] in _THIN_SPACES
        end -= 2 if is_pair else 1
    return text[start:end]


def unwrap(text: str) -> str:
    """Without the delimiters, boxes, braces, thin spaces and closing full stop around the whole text."""
    text = _strip_thin(text).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    for _ in range(6):
        before = text
        text = text.removeprefix("\\displaystyle").strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        if text.endswith("\\") and not text.endswith("\\\\"):
            text = text[:-1]
        text = _strip_thin(text)
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = text[len(opening) : -len(closing)]
            is_around = text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening)
            if is_around and opening not in inner.replace("\\$", "") and not inner.endswith("\\"):
                text = inner.strip()
        boxes = find_boxes(text) if text.startswith("\\") else []
        if len(boxes) == 1 and boxes[0][0] == 0 and boxes[0][1] == len(text):
            text = boxes[0][2].strip()
        if text.startswith("{") and _end_of_group(text) == len(text) - 1 and _is_formula_group(text):
            text = text[1:-1].strip()
        if text == before:
            break
    return text


def _is_formula_group(text: str) -> bool:
    """Say whether outer braces only group: `{1,2}` is how people type a set, and keeps them."""
    inner = text[1:-1].strip()
    is_bracketed = inner.startswith(("[", "(", "\\left", "\\$", "\\text", "\\{")) or "\\in" in inner
    return is_bracketed or "," not in _THOUSANDS.sub("", inner.replace("\\,", ""))


def _end_of_group(text: str) -> int:
    """Return the place of the bracket that closes the first one, -1 where none does."""
    depth = 0
    for match in _BRACKET.finditer(text):
        step = _STEPS.get(match[0])
        if step is not None:
            depth += step
            if depth == 0:
                return match.end() - 1
    return -1


def tidy(text: str) -> str:
    """Return a text that is the same for harmless ways of writing one answer; never the same for different ones."""
    text = unwrap(text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("{,}", ",").replace("\\neq", "\\ne")
    text = text.replace("\\leq", "\\le").replace("\\geq", "\\ge").replace("−", "-")
    text = re.sub(r"\\frac(\d)(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)(?!\d)", r"\\sqrt{\1}", text)
    text = plain_text(text)
    text = _SPACING.sub("", text)
    return re.sub(r"(?<![\d.])\.(\d)", r"0.\1", text)


def plain_text(text: str) -> str:
    """Replace `\\text{...}` and similar commands by what they hold."""
    return _COMMAND_TEXT.sub(lambda match: " " + match[1] + " ", text)


def without_text(text: str) -> str:
    """Remove `\\text{...}` and similar commands with what they hold."""
    return _COMMAND_TEXT.sub(" ", text)


def words(text: str) -> str | None:
    """Return the text in lower case, where it is nothing but words and the first has three letters or more."""
    plain = re.sub(r"\s+", " ", plain_text(unwrap(text))).strip().strip(".").lower()
    return plain if re.fullmatch(r"[a-z]{3,}(?:[ -][a-z]+)*", plain) else None


def _is_name(text: str, value: str) -> bool:
    """Say whether a side of an equation only names what its `value` is; a word is no name for another word."""
    if words(text) is not None and words(value) is not None:
        return False
    is_name = _NAME.fullmatch(text) or (len(text) < 60 and _LONG_NAME.fullmatch(text))
    return bool(is_name) and not _NOT_NAMES.fullmatch(text)


def unknown(text: str) -> str:
    """Return the one letter, perhaps with an index, that an answer gives the value of (`x_1 = 5`), in lower case and
    without braces (`X_{1}` is `x_1`); "" where there is none."""
    parts = _split(unwrap(text), _EQUALS)
    name = re.sub(r"[{}\s]", "", parts[0]).lower()
    return name if len(parts) == 2 and re.fullmatch(r"[a-z](?:_\w+)?", name) else ""


def sides(text: str) -> list[str]:
    """Return what stands between the equality signs, names left out: `x = 3 = 4` has the sides 3 and 4."""
    parts = _split(unwrap(text), _EQUALS)
    kept = [part.strip() for part in parts if part.strip() and not _is_name(part, parts[-1])]
    return kept if len(parts) > 1 and kept else [unwrap(text)]


def without_name(text: str) -> str:
    """`x = 3` → `3`; a text without one name and one value stays."""
    parts = _split(unwrap(text), _EQUALS)
    return parts[1].strip() if len(parts) == 2 and _is_name(*parts) else unwrap(text)


def num_equals(text: str) -> int:
    """Return equality signs outside brackets."""
    return len(_split(unwrap(text), _EQUALS)) - 1


_AND = re.compile(r",?\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z]))\s*")
_OR_IN_BRACKETS = re.compile(r"(?:\\text\s*\{)?\s*\(\s*or\b\s*\}?")
_SEPARATOR = re.compile(
    r"(?<!\d),|,(?!\d)|;|\\(?:text|textrm|mathrm|mbox|textbf)\s*\{[^{}]*?(?:\bor\b|\band\b|,|;)[^{}]*\}"
    r"|(?<![A-Za-z\\])(?:and/or|or|and)(?![A-Za-z])"
)
_JOINED = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|,)\s?(?=\d{3}(?!\d))")
_PM = re.compile(r"\\pm(?![a-zA-Z])|±|\\mp(?![a-zA-Z])")


def members(text: str) -> list[str]:
    """Return the members of a list without brackets: `3, 4`, `3 \\text{ or } 4`, `$3$ and $4$`, `3 (or 4)`.

    A comma between thousands is none; `\\{1, 2\\}` and `(1, 2)` are one member.
    """
    plain = unwrap(text).replace("\\!", "")
    plain = plain if "\\begin" in plain else plain.replace("\\\\", " , ")  # a broken line parts two answers
    plain = re.sub(r"(?<!\\)\$", " ", plain).replace("\\(", " ").replace("\\)", " ")
    plain = re.sub(r"\\(?:text|mathrm)\s*\{\s*\(?\s*(or|and|and/or)\s+\}?", r" \1 ", plain) if "(or" in plain else plain
    plain = re.sub(r"\(\s*or\b([^()]*)\)?", r" or \1 ", plain)
    plain = _THOUSANDS.sub("", plain)
    parts = [
        unwrap(part.strip(" {}") if part.count("{") != part.count("}") else part) for part in _split(plain, _SEPARATOR)
    ]
    return [part for part in parts if part]


def with_commas(text: str) -> str:
    """Return a list joined by "and" with commas instead."""
    return _AND.sub(", ", text)


def alternatives(text: str) -> list[str]:
    """Return the answer and those in brackets behind it: `12 (or 13)`; [] where no brackets follow."""
    first, *others = _OR_IN_BRACKETS.split(text)
    if not others:
        return []
    closing = r"(?:\\text\s*\{\s*\)\s*\}|\)\s*\}?)\s*$"
    return [unwrap(first), *(unwrap(re.sub(closing, "", other.strip())) for other in others)]


def has_many_values(text: str) -> bool:
    """Say whether the text is a list, has a plus-minus sign, or is in set braces or brackets of its own."""
    plain = unwrap(text)
    if _PM.search(plain) or "\\cup" in plain or _JOINED.search(plain) or bracket_kind(text):
        return True
    is_list = re.search(r"\d,\s?-?\d", _THOUSANDS.sub("", plain.replace("\\!", ""))) is not None
    return is_list or len(members(text)) > 1 or len(find_boxes(text)) > 1


_BUILDER = re.compile(r"\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|[|:]")
_SET_BUILDER = re.compile(
    r"^\\\{\s*([a-zA-Z])(?:\s*\\in\s*(?:\\mathbb\{?R\}?|\\mathbf\{R\}|R))?\s*(?:\\mid|\\vert|[|:]|\\colon)\s*([^{}|:]{1,200})\\\}$"
)


def set_condition(text: str) -> str | None:
    """Return `x > 2` of the set `\\{x \\mid x > 2\\}` of real numbers; None for anything else."""
    match = _SET_BUILDER.match(re.sub(r"\\left(?![a-zA-Z])\s*|\\right(?![a-zA-Z])\s*", "", unwrap(text)).strip())
    return match[2].strip() if match and match[1] in match[2] else None


def without_set_of_one(text: str) -> str:
    """`\\{(1, 2)\\}` → `(1, 2)`: the set of one tuple."""
    plain = unwrap(text)
    inner = re.fullmatch(r"(?:\\left)?\\\{\s*(\([^(){}]{1,200}\))\s*(?:\\right)?\\\}", plain)
    return inner[1] if inner and "," in inner[1] else text


def bracket_kind(text: str) -> str:
    """Return `set`, or `tuple (]` with its brackets, where one pair stands around the whole answer; else nothing."""
    plain = re.sub(r"\\left(?![a-zA-Z])\s*|\\right(?![a-zA-Z])\s*", "", without_name(text)).strip()
    plain = re.sub(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*", "", plain)
    if plain.startswith("\\{") and plain.endswith("\\}") and _end_of_group(plain) == len(plain) - 1:
        return "" if _BUILDER.search(plain) else "set"
    if plain.startswith("{") and _end_of_group(plain) == len(plain) - 1 and not _is_formula_group(plain):
        return "set"
    mixed = plain[:1] in "([" and plain[-1:] in ")]" and "," in plain
    if mixed and (plain.count("(") + plain.count("[") == 1 or _end_of_group(plain) == len(plain) - 1):
        return "tuple " + plain[0] + plain[-1]
    return ""


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators outside brackets; `\\text{...}` that separates is found before its braces count."""
    if separator.search(text) is None:  # most texts, and the long hostile ones: one look in place of one a character
        return [text]
    pieces: list[str] = []
    depth = start = position = 0
    while position < len(text):
        match = separator.match(text, position) if depth <= 0 else None
        if match and match.end() > position:
            pieces.append(text[start:position])
            start = position = match.end()
            continue
        if text[position] == "\\" and position + 1 < len(text):
            depth += (text[position + 1] == "{") - (text[position + 1] == "}")
            position += 2
            continue
        depth += (text[position] in _OPEN) - (text[position] in _CLOSE)
        position += 1
    return [*pieces, text[start:]]


def in_base(text: str) -> int | None:
    """Return the value of a number with its base as an index (`204_5`), None for anything else."""
    match = re.fullmatch(r"([0-9a-zA-Z]{1,40})_(?:\{(\d{1,2})\}|(\d{1,2}))", _SPACING.sub("", without_name(text)))
    try:
        return int(match[1], int(match[2] or match[3])) if match else None
    except ValueError:
        return None


def number_and_unit(text: str) -> PlainNumber | None:
    """Return the number of an answer with a unit of words or degrees (`52 \\text{ degrees}`); None for anything
    else."""
    if read_monomial(without_text(without_name(text))) is not None:
        return None
    plain = re.sub(r"\s+", " ", plain_text(_SPACING.sub(" ", without_name(text)))).strip()
    match = _NUMBER_AND_UNIT.fullmatch(plain)
    if match is None or _MULTIPLIER.search(match["unit"]) or match["unit"].strip().lower() in _VARIABLES:
        return None
    return read_number(match["number"].replace(" ", ""))


def has_plus_minus(text: str) -> bool:
    """Say whether a text has a plus-minus sign."""
    return _PM.search(text) is not None


def with_both_signs(text: str) -> str:
    """`1 \\pm \\sqrt{2}` → `1 + \\sqrt{2}, 1 - \\sqrt{2}`, for every member of a list that has one such sign."""
    parts = members(without_name(text))
    if len(parts) > 6 or any(len(_PM.findall(part)) > 1 or bracket_kind(part) for part in parts):
        return text
    both = [(_PM.sub("+", part), _PM.sub("-", part)) if has_plus_minus(part) else (part,) for part in parts]
    return ", ".join(part for signs in both for part in signs)


def as_union(text: str) -> str | None:
    """Return intervals joined by "or" or commas as a union; None where a member is no interval."""
    parts = members(text)
    is_union = len(parts) > 1 and all(bracket_kind(part).startswith("tuple") for part in parts)
    return " \\cup ".join(parts) if is_union else None
