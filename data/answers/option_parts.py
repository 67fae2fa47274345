"""An answer that gives an option's letter before its text: `(A) 12`, `B. 12`."""

import re

_OPTION = r"\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?"
_OTHER_OPTION = re.compile(r"(?<![A-Za-z\\])(?:[A-J](?![A-Za-z])|or\b|and\b)")
_LETTER_ALONE = re.compile(_OPTION + r"\(?([A-J])\)?[.:]?\s*\}?\s*")
_LETTER_AND_MORE = re.compile(_OPTION + r"(?:\(([A-J])\)|([A-J])[.):](?=\s))\s*\}?(?:\s|\\[ ,;:]|~)*\}?(?=\S)(?![)}])")


def option_apart(answer: str, gold: str) -> tuple[str, str]:
    """Return (answer, gold) where one gives an option's letter before its text, and the other the letter or the text
    alone."""
    for one, other, is_gold in ((answer, gold, False), (gold, answer, True)):
        named = _LETTER_AND_MORE.match(one)
        if named is None or _OTHER_OPTION.search(one, named.end()) or _LETTER_AND_MORE.match(other):
            continue
        alone = _LETTER_ALONE.fullmatch(other)
        letter = named[1] or named[2]
        if alone:
            return (alone[1], letter) if is_gold else (letter, alone[1])
        if named[1]:
            return (answer, gold[named.end() :]) if is_gold else (answer[named.end() :], gold)
    return answer, gold
