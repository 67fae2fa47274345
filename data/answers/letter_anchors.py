"""The letters that stand right behind an answer phrase, in three ranks: what is stated ("the answer is B", "I choose
B", "option B is right") decides alone; without it what is only named ("option B", "choose B"); without both what is
discussed ("Option A: too broad", "comparing option A and option B"). Of what is denied or supposed nothing counts.

So a response may go through its options one by one, before its answer or behind it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from espalier.data.answers.letter_mentions import NOT_ARTICLE, Mention

_PHRASE = re.compile(
    r"(?i)(?:(?P<statement>\b(?:correct|right|best)\s+(?:option|choice|one)\b"
    r"|\bI(?:['’](?:ll|d)|\s+(?:will|would))?\s+(?:choose|pick|select|go\s+with)\b|答案|正确|我选择)"
    r"|(?P<answer>\banswer\b(?:\s+(?:choice|option|letter))?)|(?P<noun>\boption\b|\bchoice\b|选项)"
    r"|\b(?:choose|pick|select|go\s+with)\b|选择)\**\s*"
    r"(?P<verb>(?:would be|should be|must be|is|are|was|为|是|選|选)\s*)?(?P<colon>[:：])?\s*"
    r"(?:(?:option|choice|choices|options)\s*)?\**\s*"
)
_NOT_BEFORE = re.compile(r"(?i)(?:\bnot|n't(?:\s+be)?|\bneither|\bnor|不是|并非)\s*(?:the\s+)?$")
_COMPARED_BEFORE = re.compile(r"(?i)\b(?:compar(?:e|es|ed|ing)|between|consider(?:s|ed|ing)?)\s+(?:the\s+)?$")
_LABEL = re.compile(r"[)\]}*\"']*\s*(?:\([^()\n]{0,80}\)\s*)?\**\s*(?:[:：–—]|-\s)")
_FULL_STOP = re.compile(r"[)\]}*\"']*\.")
_SENTENCE_BEGINS = re.compile(r"[\n.!?;:。；：][\s\-*#>•\d)]*$")
_CORRECTION = re.compile(
    r"(?i)\b(?:wait|actually|correction|sorry|no(?=\s*[,.:;!–—-])|i mean|rather|oops|instead|on second thought)\b"
)


class Rank(IntEnum):
    """How much a letter behind a phrase says."""

    STATED = 0
    NAMED = 1
    DISCUSSED = 2


@dataclass(frozen=True)
class Named:
    """The `letters` that one phrase, which ends at `place`, names: several where it lists them."""

    rank: Rank
    place: int
    letters: tuple[str, ...]


def answer_letters(text: str, letters: str, mentions: Sequence[Mention]) -> list[str]:
    """Return the letters that the phrases of the highest rank name; after a correction only the later ones count, and a
    letter that is named or affirmed there without such a phrase ("Wait, B is right") beside them. `mentions` are those
    of the text (letter_mentions.py)."""
    named = list(_named(text, letters, mentions))
    if not named:
        return []
    rank = min(one.rank for one in named)
    chosen = [one for one in named if one.rank is rank]
    corrected = _CORRECTION.search(text, chosen[-1].place) if rank is Rank.STATED else None
    if corrected is None:
        return _last_word(text, chosen)
    doubts = [one.letters for one in named if one.rank is Rank.NAMED and one.place > corrected.start()]
    doubts += [(one.letter,) for one in mentions if one.says == "affirmed" and one.place > corrected.start()]
    return _last_word(text, chosen) + [letter for doubt in doubts for letter in doubt]


def _last_word(text: str, chosen: Sequence[Named]) -> list[str]:
    """Return the letters of `chosen`, or of its last phrase alone where that corrects those before it."""
    last = chosen[-1]
    others = [one.place for one in chosen if set(one.letters) != set(last.letters)]
    if others and len(last.letters) == 1 and _CORRECTION.search(text, others[-1], last.place):
        return list(last.letters)
    return [letter for one in chosen for letter in one.letters]


def _named(text: str, letters: str, mentions: Sequence[Mention]) -> Iterator[Named]:
    """Yield what the phrases of a text name, in order."""
    says = {mention.place: mention.says for mention in mentions}
    read_to = -1
    for match in _PHRASE.finditer(text):
        if _NOT_BEFORE.search(text[max(0, match.start() - 30) : match.start()]):
            continue
        places = [place for place in _listed_places(text, match.end(), letters) if place > read_to]
        kept = [place for place in places if says.get(place) not in ("denied", "supposed")]
        if not kept or kept[0] != places[0]:
            continue
        read_to = places[-1]
        is_affirmed = says.get(kept[0]) == "affirmed"
        rank = Rank.STATED if is_affirmed else _rank(match, text, kept[0])
        yield Named(rank, match.end(), tuple(text[place] for place in kept))


def _rank(match: "re.Match[str]", text: str, place: int) -> Rank:
    """Return the rank of a phrase before the letter at a place, of one that is neither denied nor affirmed."""
    if match["statement"] or match["verb"] or (match["answer"] and match["colon"]):
        return Rank.STATED
    before = ("\n" if match.start() <= 30 else "") + text[max(0, match.start() - 30) : match.start()]
    is_label = (match["answer"] or match["noun"]) and (
        _LABEL.match(text, place + 1, place + 120)
        or (_FULL_STOP.match(text, place + 1, place + 120) and _SENTENCE_BEGINS.search(before))
    )
    return Rank.DISCUSSED if is_label or _COMPARED_BEFORE.search(before) else Rank.NAMED


def _listed_places(text: str, start: int, letters: str) -> list[int]:
    """Return the places of the letters that a text names from a place on: of the first, in brackets or not, and of
    those that are joined to it ("A or option B")."""
    first = re.compile(rf"[\s(\[{{\"'$*]*(?:\\(?:text|mathrm|textbf)\{{)?([{letters}])(?![A-Za-z'])")
    joined = re.compile(rf"[)\]}}*]*\s*(?:,|or|and|/|&|或|和|、)\s*(?:option\s*)?\(?([{letters}])(?![A-Za-z'])")
    match = first.match(text, start, start + 80)
    if match is None or re.compile(rf" (?!{NOT_ARTICLE})[a-z]").match(text, match.end()):
        return []
    places = []
    while match:
        places.append(match.start(1))
        match = joined.match(text, match.end(), match.end() + 80)
    return places
