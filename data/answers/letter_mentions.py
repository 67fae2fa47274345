"""What a text says of the lettered options it names: one is affirmed ("B is right"), denied ("not A or C",
"(A) is wrong") or only named. A place, not a letter, is denied: what is denied first may be affirmed in the end.

Words deny or affirm a letter of their own sentence and line only: in "C. Note that A fails." C stands.
"""

import re
from dataclasses import dataclass

_GAP = r"[^\S\n]"  # white space within a line
_OPTION = r"(?:(?i:options?|choices?|answers?|either|both)\s+)?"
_DENIED_BEFORE = re.compile(
    r"(?i)(?:\bnot|n't(?:\s+be)?|\bnever|\bneither|\bnor|\bcannot be|\bexcept(?:\s+for)?|\brul(?:e[sd]?|ing) out"
    r"|\beliminat(?:e[sd]?|ing)|\bdiscard(?:s|ed|ing)?|\bdismiss(?:es|ed|ing)?|\bexclud(?:e[sd]?|ing)"
    r"|\breject(?:s|ed|ing)?"
    r"|\bthan|\bunlike|\binstead of|\brather than|\bagainst|\bnicht|\bn'est pas|\bpas"
    r"|不是|并非|不选|排除|不应选)"
    rf"{_GAP}*(?:(?:be|the|any of|option|choice|answer|either|both)s?{_GAP}+){{0,2}}[(\"'*\[]*$"
)
_BEFORE_A_LETTER = r"[^\S\n]+(?:(?:options?|choices?|answers?)[^\S\n]+)?[(\[\"'*]*(?-i:[A-H])\b"
_NEGATIVE = (
    rf"(?:(?:not|never)\b(?!{_BEFORE_A_LETTER})"  # "C, not A" denies A
    r"|(?:n't|no longer|in(?:correct|valid|consistent|adequate)|wrong|false|untrue|eliminated|ruled out"
    r"|excluded|rejected|discarded|impossible|irrelevant|unsupported|contradict\w*|fails?|out"
    r"|too (?:broad|narrow|extreme|strong))\b)"
)
_DENIED_AFTER = re.compile(
    rf"(?i)^[)\"'*\]]*{_GAP}*(?!(?-i:[A-Z][a-z]))(?:(?:is|was|are|were|does|do|can|could|would|must|should|might|may|seems?|looks?|has|have|be"
    r"|being|also|all|both"
    rf"|clearly|definitely|obviously|simply|therefore|thus|plainly|just|to|been){_GAP}+){{0,4}}"
    rf"(?:(?:is|was|are|does|do|ca|could|would|must|should)?{_NEGATIVE}|cannot\b|can't\b"
    r"|不是(?!\s*[A-H])|(?:是)?错|(?:是)?不对|(?:是)?不正确|不符合|被?排除)"
)
_AFFIRMED_AFTER = re.compile(
    rf"(?i)^[)\"'*\]]*{_GAP}*(?:(?:is|was|are|must|has|to|be|seems?|looks?|appears|remains|clearly|definitely|obviously|therefore"
    rf"|thus|indeed|then|the|only|most|my|our|likely|probably|certainly|one|that|which){_GAP}+){{1,5}}"
    r"(?:correct|right|true|valid|best|answer|choice|option|one|accurate|appropriate)\b(?!\s*\?)"
    rf"|^[)\"'*\]]*{_GAP}*(?:(?:是)?(?:正确|对的|答案)|it is\b|remains\b)"
)
_HYPOTHETICAL = re.compile(
    r"(?i)(?:\b(?:if|whether|suppose|supposing|assum(?:e|ing)|unless|given that|imagine)\s+"
    r"(?:(?:that|we|you|one|i|the|it|my|our|to|choose|pick|select|take|try|correct|right|best|final|answer|option|choice"
    r"|is|was|were|be|would)\s+){0,7}|(?:如果|假设|假如|若|是否)(?:正确|答案|选项|选择|选|是|为)*\s*)[(\"'*\[]*$"
)
# "A" before a lower-case word is an article unless one of these follows.
NOT_ARTICLE = (
    r"(?:is|are|was|were|or|and|but|because|since|as|must|seems?|follows|holds|might|may|could|would|should|does|too"
    r"|also|alone|ou|oder|o|e|y|и|или|et|und)\b"
)
_ARTICLE = re.compile(rf" (?!{NOT_ARTICLE})[a-z]")
_NAMED_BEFORE = re.compile(r"[(\[]$|(?i:\b(?:option|choice))s? $")
_ASKED = re.compile(r"[^.!;:\n]{0,40}\?")
_JOIN = r"and|or|nor|/|&|、|和|或|und|oder|et|ou|или|и"


@dataclass(frozen=True)
class Mention:
    """`letter` at `place` of a text; `says` is "affirmed", "denied", "supposed" ("if B is right", "B?") or ""."""

    letter: str
    place: int
    says: str


def letter_mentions(text: str, letters: str) -> list[Mention]:
    """Return every capital letter that stands alone, in order; articles and pronouns are left out. A list of letters is
    denied or affirmed as one: "not A or C", "A, B and D are wrong"."""
    mentions: list[Mention] = []
    end_of_list = -1
    says = ""
    one = rf"[(\[\"'*]*(?<![A-Za-z'’\\])[{letters}](?![A-Za-z'’])[)\]\"'*]*"
    listing = re.compile(
        rf"{one}(?:\s{{0,9}},?\s{{0,9}}(?:{_JOIN})\s*{_OPTION}{one}|\s*,\s*{_OPTION}{one}(?!\s+(?:is|was)\b)){{0,8}}"
    )
    conjunction = re.compile(_JOIN.replace("and|or|nor", r"\b(?:and|or|nor)\b"))
    for match in re.finditer(rf"(?<![A-Za-z'’\\])([{letters}])(?![A-Za-z'’])", text):
        place, after = match.start(1), text[match.end() : match.end() + 60]
        is_named = _NAMED_BEFORE.search(text[max(0, place - 12) : place]) is not None
        if match[1] in "AI" and not is_named and _ARTICLE.match(after):
            continue
        if place > end_of_list:
            group = listing.match(text, place)
            is_list = group is not None and conjunction.search(group[0]) is not None
            end = group.end() if group and is_list else match.end()
            end_of_list = end - 1 if is_list else place
            says = _said(text[max(0, place - 60) : place], text[end : end + 80])
            if says == "affirmed" and is_list:
                says = ""
        if place <= end_of_list:
            mentions.append(Mention(match[1], place, says))
    return mentions


def _said(before: str, after: str) -> str:
    if _DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after):
        return "denied"
    if _HYPOTHETICAL.search(before) or _ASKED.match(after):
        return "supposed"
    return "affirmed" if _AFFIRMED_AFTER.match(after) else ""
