"""Steps that are sentences.

Written for the prose of solutions: rules and a short list of English abbreviations, no model. Where a rule
cannot know, it does not cut: two sentences in one step do less harm than a step that is half a sentence.
"""

import re

from espalier.data.splitters.lines import first_text, pieces

_CLOSERS = "\"'”’»›)\\]}*_」』）】》〉$\\\\"  # the last two end a formula that ends a sentence
# Sentence-final marks (`. . .` is an ellipsis), CJK or not, with closing quotes and brackets; or a newline with what
# is blank after it. No part can fail once it has begun: a long run is read once.
_MARK = re.compile(
    rf"(?P<cjk>[。！？｡]++[.!?…。！？｡]*+)[{_CLOSERS}]*+|(?P<marks>[.!?…]++(?:\ [.!?…]++)*+)[{_CLOSERS}]*+"
    r"|(?P<newline>\r?\n\s*)"
)
_OPENERS = re.compile(r"[\s\"'“‘«‹(\[{*_]*")
_LETTERS = re.compile(r"(?:\w\.)+\w")
_ITEM = re.compile(r"\s*[(*]*(?:[0-9]{1,3}|[a-z]|[ivx]{2,4})")
_WORD = re.compile(r"[^\W\d_]+(?:\.[^\W\d_]+)*\Z")

# A name or a number follows these: the sentence goes on.
_NAMES = "dr mr mrs ms mme mlle messrs prof st gen col capt lt sgt rev hon pres gov sen rep mt ft"
_NOTES = "vs cf e.g i.e eg ie viz fig figs eq eqs ex thm lem cor prop def sec ch vol no nos pp art approx ca resp ph.d"
_DATES = "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri"
_ABBREVIATIONS = frozenset(f"{_NAMES} {_NOTES} {_DATES}".split())
# Those of them that are words too: abbreviations only before a digit ("No. 5").
_ALSO_WORDS = frozenset(("no", "art", "ex", "def", "mar", "wed", "fig", "prop"))


def _is_abbreviation(text: str, place: int, next_character: str) -> bool:
    """Say whether the period at `place` belongs to an abbreviation, an initial or a list's number."""
    if place > 1 and text[place - 1].isupper() and not text[place - 2].isalnum():
        return True
    near = text[max(0, place - 8) : place]
    if (place <= 8 or "\n" in near) and _ITEM.fullmatch(near.rpartition("\n")[2]):
        return True
    word = _WORD.search(text[max(0, place - 24) : place])
    if word is None:
        return False
    bare = word[0].lower()
    if len(bare) == 1:
        return word[0].isupper() or (bare == "p" and next_character.isdigit())
    if bare in ("a.m", "p.m"):
        return not next_character.isupper()
    if bare in _ALSO_WORDS:
        return next_character.isdigit()
    return bare in _ABBREVIATIONS or _LETTERS.fullmatch(bare) is not None


def _ends(text: str, mark: re.Match[str]) -> bool:
    """Say whether a sentence ends with this run of marks."""
    if mark.lastgroup != "marks":
        return True
    if not text[mark.end() : mark.end() + 1].isspace():
        return False
    opened = _OPENERS.match(text, mark.end())
    following = text[opened.end() : opened.end() + 1] if opened else ""
    if following.islower():
        return False
    return not (mark["marks"] == "." and _is_abbreviation(text, mark.start(), following))


def split_sentences(response: str) -> list[str]:
    """Return one sentence a step; white space between sentences, and a newline, belongs to the sentence after it.

    A sentence ends with `.`, `!`, `?` or an ellipsis, quotes, brackets and formulas that close there included,
    before white space and anything but a small letter; with a CJK full stop; and at the end of a line. It does
    not end after abbreviations and titles (`Dr.`, `e.g.`), initials (`J. Smith`, `U.S.`), inside decimals or after
    the number of a list's item (`2. First …`). No step is blank, unless the whole response is.
    """
    ends = [
        mark.start() if mark.lastgroup == "newline" else mark.end()
        for mark in _MARK.finditer(response)
        if _ends(response, mark)
    ]
    cuts: list[int] = []
    begin = first_text(response)
    for end in ends:
        if begin < end:
            cuts.append(end)
            begin = first_text(response, end)
    if cuts and begin == len(response):
        cuts.pop()
    return pieces(response, cuts)
