"""Where the formulas of a text are: blocks of LaTeX that no step may be cut in.

One scan of the text finds the delimiters, and a pass over them pairs these off; there is no search for a
closing delimiter that could start over and over, so the time is linear whatever the text.

- `\\begin{x}…\\end{x}`, `\\(…\\)` and `\\[…\\]` pair off like brackets, each with its own kind. Of two openers with
  one closer, either may be the one that was meant: the block begins at the first.
- `[asy]…[/asy]` is a drawing: nothing inside it is read.
- `$…$` and `$$…$$` outside of all those pair off from left to right. Inside them a `\\text{…}` group that holds
  an even number of dollars is passed over: these are formulas of their own (`$x \\text{ if $y$} $`).
- `\\boxed{…}` and `\\fbox{…}` count as formulas, in or out of dollars.
- `\\$`, `\\\\[2pt]` and other escaped characters are no delimiters; neither is a delimiter whose partner is
  missing.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

_TOKEN = re.compile(
    r"\\begin[ \t]*\{(?P<begin>[^{}\\$\n]*)\}"
    r"|\\end[ \t]*\{(?P<end>[^{}\\$\n]*)\}"
    r"|\\(?P<group>text[a-z]*|mbox|hbox|boxed|fbox)[ \t]*\{"
    r"|\\(?P<opens>[(\[])"
    r"|\\(?P<closes>[)\]])"
    r"|\\."
    r"|(?P<dollars>\$+)"
    r"|(?P<brace>[{}])"
    r"|(?P<drawing>\[asy\])",
    re.DOTALL,
)
_DRAWING_END = "[/asy]"
_BOXES = ("boxed", "fbox")

Span = tuple[int, int]


class _Scan:
    """What one scan of a text finds: closed blocks, groups that may hold formulas, dollars."""

    def __init__(self, text: str):
        self.blocks: list[Span] = []
        self.groups: list[Span] = []
        self.dollars: list[int] = []
        self._open: dict[tuple[str, str], list[int]] = {}
        self._closed: dict[tuple[str, str], list[int]] = {}
        self._braces: list[tuple[int, str]] = []
        drawing_end, last_drawing_end = 0, text.rfind(_DRAWING_END)
        for token in _TOKEN.finditer(text):
            kind = token.lastgroup
            if kind is None or token.start() < drawing_end:
                continue
            if kind == "dollars":
                self.dollars.extend(range(token.start(), token.end()))
            elif kind != "drawing":
                self._take(token, kind)
            elif token.end() <= last_drawing_end:
                drawing_end = text.index(_DRAWING_END, token.end()) + len(_DRAWING_END)
                self.blocks.append((token.start(), drawing_end))

        for partner, opened in self._open.items():
            self._close_surplus(opened, self._closed.get(partner, []))

    def _close_surplus(self, opened: list[int], closed: list[int]) -> None:
        """Of two openers with one closer, the first ends there too: either may be the one that was meant."""
        for start in opened:
            number = bisect_right(closed, start)
            if number < len(closed):
                self.blocks.append((start, closed[number]))

    def _take(self, token: re.Match[str], kind: str) -> None:
        value = str(token[kind])
        if kind == "brace":
            self._take_brace(token.start(), value)
        elif kind == "group":
            self._braces.append((token.start(), value))
        elif kind in ("begin", "opens"):
            self._open.setdefault((kind, value), []).append(token.start())
        else:
            partner = ("begin", value) if kind == "end" else ("opens", "(" if value == ")" else "[")
            if opened := self._open.get(partner):
                self.blocks.append((opened.pop(), token.end()))
                self._closed.setdefault(partner, []).append(token.end())

    def _take_brace(self, place: int, brace: str) -> None:
        if brace == "{":
            self._braces.append((place, ""))
        elif self._braces:
            start, command = self._braces.pop()
            if command in _BOXES:
                self.blocks.append((start, place + 1))
            elif command:
                self.groups.append((start, place + 1))


def _dollar_blocks(dollars: list[int], groups: list[Span]) -> list[Span]:
    """Return the formulas between dollars (places in the text), from left to right.

    `inline[i]` and `display[i]` are the numbers of the dollar (of the pair's first dollar) that closes a
    formula whose inside begins before dollar i; `num` where there is none.
    """
    num = len(dollars)
    past_group: dict[int, int] = {}
    for start, end in groups:
        first, last = bisect_left(dollars, start), bisect_left(dollars, end)
        if last > first and (last - first) % 2 == 0:
            past_group[first] = max(last, past_group.get(first, 0))
    inline, display = [num] * (num + 2), [num] * (num + 2)
    for i in range(num - 1, -1, -1):
        if i in past_group:
            inline[i], display[i] = inline[past_group[i]], display[past_group[i]]
        else:
            inline[i] = i
            display[i] = i if i + 1 < num and dollars[i + 1] == dollars[i] + 1 else display[i + 1]
    blocks: list[Span] = []
    i = 0
    while i < num - 1:
        is_pair = dollars[i + 1] == dollars[i] + 1
        if is_pair and display[i + 2] < num:
            blocks.append((dollars[i], dollars[display[i + 2]] + 2))
            i = display[i + 2] + 2
        elif not is_pair and inline[i + 1] < num:
            blocks.append((dollars[i], dollars[inline[i + 1]] + 1))
            i = inline[i + 1] + 1
        else:
            # A pair that is never closed is text; so is a dollar, the first of three if that saves the other two.
            i += 2 if is_pair and (num - i) % 2 == 0 else 1
    return blocks


def _merge(spans: list[Span]) -> list[Span]:
    """Return the outermost spans, in order; those that overlap become one, those that touch do not."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def outside(places: Iterable[int], blocks: list[Span]) -> list[int]:
    """Return the places (rising) that are not inside a block; a border of a block is outside."""
    kept: list[int] = []
    number = 0
    for place in places:
        while number < len(blocks) and blocks[number][1] <= place:
            number += 1
        if number == len(blocks) or place <= blocks[number][0]:
            kept.append(place)
    return kept


def find_blocks(text: str) -> list[Span]:
    """Return (start, end) of every outermost LaTeX block, in order, as character offsets; blocks never overlap, but one
    may begin where another ends."""
    scan = _Scan(text)
    blocks = _merge(scan.blocks)
    return _merge(blocks + _dollar_blocks(outside(scan.dollars, blocks), scan.groups))
