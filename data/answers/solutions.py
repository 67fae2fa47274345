"""Values of named unknowns in one layout: `a=1,b=2;a=3,b=4`, "a = 1 and b = 2, or a = 3 and b = 4",
`(a,b) = (1,2) \\text{ or } (3,4)`, a system in braces, each as `(1,2),(3,4)`.

Unknowns come in the order of the alphabet, so that `y=2, x=1` is `(1,2)`, where all are single letters of one family
(`x y z`, `a b c`, ...) or have indexes; else in the order in which they are named, or in that of the alphabet (`n=4,
m=3` is `(4,3)` or `(3,4)`). Answers that name other unknowns than the gold answer are different answers; a name's case
and the braces of its index tell nothing apart.
"""

import re
from dataclasses import dataclass

_MAX_CHARS = 600
_NAME = (
    r"(?:\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|angle\s*[A-Z]{1,3})|[A-Z]{1,3}|[a-z])"
    r"(?:_(?:\w|\{\w{1,6}\}))?'?(?:\([a-z]\))?"
)
_ONE_NAME = re.compile(rf"\s*({_NAME})\s*=\s*")
_NAMES = re.compile(rf"\s*\(\s*({_NAME}(?:\s*,\s*{_NAME}){{1,5}})\s*\)\s*(?:=|\\in(?![a-z]))\s*")
_JOIN = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*[,;]?\s*(?:and|with|where|when|while)?\s*[,;]?\s*\}|\\q?quad(?![a-z])"
    r"|\\(?:land|wedge|newline)(?![a-z])|\\\\(?!\{)|&(?=\s*[a-zA-Z(])|\n"
    r"|(?<![a-zA-Z\\])(?:and|with|where|und|et)(?![a-zA-Z=])"
)
_OR = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*[,;]?\s*or\s*[,;]?\s*\}|\\(?:lor|vee)(?![a-z])"
    r"|(?<![a-zA-Z\\])(?:or|oder|ou)(?![a-zA-Z=])"
)
_ALTERNATIVE = "\x1f"  # stands for "or": a solution ends there
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:cases|array|aligned|align\*?|gather\*?|gathered)\}(?:\{[clr]+\})?")
_NO_VALUE = re.compile(r"[=<>:]|\\(?:in|le|ge|ne|neq|leq|geq|approx|pm)(?![a-zA-Z])|(?<![\\a-zA-Z{])[a-zA-Z]{3,}")
_FAMILIES = ("abcd", "xyzw", "xyzt", "uvw", "pqrs", "ABCD", "PQR", "XYZ")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Solutions:
    """`names` in the order of `values`; one tuple of values a solution. No names where the answer names none."""

    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    def in_order(self, names: tuple[str, ...]) -> str:
        """Return the values as tuples in the order of `names`; a plain list where there is one name."""
        rows = [[row[self.names.index(name)] for name in names] for row in self.values]
        return ", ".join(row[0] if len(row) == 1 else f"({','.join(row)})" for row in rows)

    @property
    def orders(self) -> tuple[tuple[str, ...], ...]:
        """The orders of the names in which values without names may be read."""
        letters = [name[0] for name in self.names if len(name) == 1]
        is_family = len(letters) == len(self.names) and any(set(letters) <= set(family) for family in _FAMILIES)
        has_indexes = all("_" in name and name.split("_")[0] == self.names[0].split("_")[0] for name in self.names)
        by_alphabet = tuple(sorted(self.names))
        return (by_alphabet,) if is_family or has_indexes else tuple(dict.fromkeys((self.names, by_alphabet)))

    def renamed(self) -> "Solutions":
        """With names in lower case and without braces, where that leaves them different."""
        plain = tuple(re.sub(r"[{}\s]", "", name) for name in self.names)
        small = tuple(name.lower() for name in plain)
        names = next((names for names in (small, plain) if len(set(names)) == len(names)), self.names)
        return Solutions(names, self.values)


def split_outside(text: str, separators: str = ",;") -> list[str]:
    """Return the parts between separators outside brackets; empty parts are left out."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and character in separators:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _flat(text: str) -> str:
    """Without what stands around a system and between its equations, which become commas."""
    text = _ENVIRONMENT.sub(" ", text).replace("\\left", "").replace("\\right", "").replace("{,}", ",")
    text = re.sub(r"(?<!\\)\$|\\\(|\\\)|\\\[|\\\]", " ", text)
    text = re.sub(r"^\s*\\?\{(?=\s*[a-zA-Z(])|\\?\}\s*\.?\s*$", " ", text) if _is_braced(text) else text
    text = re.sub(r"\\[;:!,](?=\s|[a-zA-Z(-]|\d)", " ", text)
    return _JOIN.sub(" , ", _OR.sub(f" {_ALTERNATIVE} ", text)).replace("&", " ").strip(" .,;")


def _is_braced(text: str) -> bool:
    plain = text.strip().rstrip(".")
    return plain.startswith(("\\{", "{")) and plain.endswith("}")


def _components(text: str) -> tuple[str, ...] | None:
    """Return (1, 2) of `(1, 2)`; None where the text is no tuple."""
    plain = text.strip()
    if not (plain.startswith("(") and plain.endswith(")")):
        return None
    parts = split_outside(plain[1:-1])
    return tuple(parts) if len(parts) > 1 else None


def read_solutions(text: str) -> Solutions | None:
    """Return the solutions a text names; None where it is anything but values of named unknowns."""
    if ("=" not in text and "\\in" not in text) or len(text) > _MAX_CHARS:
        return None
    flat = _flat(text)
    return _named_tuples(flat) if _NAMES.match(flat) else _assignments(flat)


def _named_tuples(flat: str) -> Solutions | None:
    """Return `(a,b)=(1,2)`, `(a,b) \\in \\{(1,2),(3,4)\\}`, `(a,b)=(1,2), (a,b)=(3,4)`."""
    first = _NAMES.match(flat)
    assert first is not None
    names = tuple(name.strip() for name in first[1].split(","))
    values = []
    for part in split_outside(flat, ",;" + _ALTERNATIVE):
        named = _NAMES.match(part)
        if named and tuple(name.strip() for name in named[1].split(",")) != names:
            return None
        rest = part[named.end() :].strip() if named else part
        inner = re.fullmatch(r"\\?\{(.*?)\\?\}", rest)
        for row in split_outside(inner[1]) if inner else [rest]:
            components = _components(row)
            if components is None or len(components) != len(names):
                return None
            values.append(components)
    return Solutions(names, tuple(values)) if values and len(set(names)) == len(names) else None


def _assignments(flat: str) -> Solutions | None:
    """`a=1, b=2; a=3, b=4`: a new solution begins where a name comes again, and after "or"."""
    rows: list[dict[str, str]] = []
    for alternative in split_outside(flat, _ALTERNATIVE):
        rows.append({})
        for part in split_outside(alternative):
            named = _ONE_NAME.match(part)
            value = part[named.end() :].strip() if named else ""
            if named is None or not value or _NO_VALUE.search(value) or _is_in(named[1], value):
                return None
            if named[1] in rows[-1]:
                rows.append({})
            rows[-1][named[1]] = value
    names = tuple(rows[0]) if rows else ()
    if not names or any(set(row) != set(names) for row in rows):
        return None
    return Solutions(names, tuple(tuple(row[name] for name in names) for row in rows))


def _is_in(name: str, value: str) -> bool:
    return re.search(rf"(?<![a-zA-Z\\]){re.escape(name)}(?![a-zA-Z])", value) is not None


def in_one_layout(answer: str, gold: str) -> list[tuple[str, str]] | str:
    """Return (answer, gold) as lists of tuples in one order of the unknowns, for each order in which they may be read;
    as they are where neither names two values or more; the reason where the two name different unknowns."""
    own, wanted = read_solutions(answer), read_solutions(gold)
    if own is None and wanted and len(wanted.names) > 1 and read_solutions(_OR.sub(",", answer)):
        return "alternatives for different unknowns"
    sizes = [len(solution.names) * len(solution.values) for solution in (own, wanted) if solution]
    if max(sizes, default=0) < 2:
        return [(answer, gold)]
    if own and wanted:
        if set(own.names) != set(wanted.names):
            own, wanted = own.renamed(), wanted.renamed()
        if set(own.names) != set(wanted.names):
            return "values of different unknowns"
        order = tuple(sorted(own.names))
        return [(own.in_order(order), wanted.in_order(order))]
    if own:
        return [(own.in_order(order), gold) for order in own.orders]
    assert wanted is not None
    return [(answer, wanted.in_order(order)) for order in wanted.orders]
