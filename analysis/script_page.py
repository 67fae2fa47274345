"""A page with a script: one file without a network, whose only script that may run is its own.

The page's policy names the script's hash, and every text of a model is in packed blocks (`analysis.embedded`) or is
escaped.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.analysis.embedded import block, pack
from espalier.analysis.markup import Markup, tag
from espalier.analysis.page import STYLE

_FOLDER = Path(__file__).parent
_SHARED = ("blocks.js", "inspector.css")


def _read(names: Sequence[str]) -> str:
    return "".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def render_script_page(
    name: str,
    main: Sequence[str],
    links: Sequence[str],
    own: Sequence[str],
    index: Mapping[str, Any],
    blocks: Sequence[str],
) -> str:
    """Return the whole document. `name`: what is shown; `links`: ids of sections; `own`: the page's files of this
    folder (.js, .css); `index` is packed as the block "index", `blocks` (packed) are "block-0" and so on."""
    files = [*_SHARED, *own]
    script = _read([file for file in files if file.endswith(".js")])
    style = STYLE.read_text(encoding="utf-8") + _read([file for file in files if file.endswith(".css")])
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Espalier: {name}"),
        tag("style", Markup(style)),
    )
    brand = tag("div", tag("b", "Espalier"), tag("span", name, class_="muted"), class_="brand")
    nav = tag("nav", *(tag("a", link, href=f"#{link}") for link in links), aria_label="sections")
    packed = [block("index", pack(index)), *(block(f"block-{number}", one) for number, one in enumerate(blocks))]
    body = tag("body", tag("header", brand, nav), tag("main", *main), *packed, tag("script", Markup(script)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
