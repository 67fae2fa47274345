"""HTML and SVG as values: every plain string is escaped, so that no text of a model can become markup.

`tag("p", "1 < 2")` escapes its children unless they are `Markup`, and every attribute value always. What
UTF-8 or HTML cannot hold (lone surrogates, control characters) is shown as U+FFFD.
"""

import html
import re
from collections.abc import Iterable

_VOID = {"br", "link", "meta"}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already; only this module and constants of `analysis` make it."""


def printable(text: str) -> str:
    """Return text without what UTF-8 or HTML cannot hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def escape(text: str) -> Markup:
    """Return text as HTML text or as an attribute's value."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text)))


def join(parts: Iterable[str]) -> Markup:
    """Return the parts one after another, each escaped unless it is Markup."""
    return Markup("".join(escape(part) for part in parts))


def tag(element: str, /, *children: str, **attributes: str | int | float | None) -> Markup:
    """Return one element. `class_` is class, `stroke_width` is stroke-width; an attribute that is None is left out.

    Floats are written with three decimals at most.
    """
    written = ""
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            written += f' {key.rstrip("_").replace("_", "-")}="{escape(str.__str__(text))}"'
    if element in _VOID:
        return Markup(f"<{element}{written}>")
    return Markup(f"<{element}{written}>{join(children)}</{element}>")
