"""The letter a response chooses among lettered options.

Only the response is read, never the prompt, and the range of letters comes from the problem. Two different
answers are wrong: a policy must not gain by listing several. In this order: `Finish[B]`, the last box, the
last "answer is B" or "answer: B", a response that is or begins with a letter, the one letter that is affirmed ("B is
right"), letters that stand alone and are not denied ("not A or C", "A is not"; letter_mentions.py).
"""

import re
from collections.abc import Sequence

from espalier.data.answers.final_answer import find_boxes, visible_part
from espalier.data.answers.grade import Grade
from espalier.data.answers.letter_anchors import answer_letters
from espalier.data.answers.letter_mentions import NOT_ARTICLE, Mention, letter_mentions
from espalier.data.answers.notation import single_backslashes

FINISH = re.compile(r"Finish\s*\[([^\]\n]{0,300})\]?")
_SMALL_IN_BRACKETS = re.compile(r"(?<![\w)\\])\([a-h]\)(?!\w)")
_OPTION_BEGINS = re.compile(r"(?i)[\W\d]*(?:option|choice|选项)")
_MAX_TAIL = 6000


def letters_of(num_options: int) -> str:
    """ "ABCD" for 4; at most 26, and 10 where the number is not known (0)."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: min(num_options, 26) or 10]


def _listed(text: str, letters: str) -> list[str]:
    """Return letters that a short answer text names, in order: `B`, `(B)`, `B. text`, `\\text{B}`, `A or B`, `A, B`."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text).strip().strip("$*`\"' .")
    if re.fullmatch(r"(?i)\(?[a-z]\)?", text):
        return [text.strip("()").upper()]
    if re.fullmatch(rf"(?:[\[(]?[{letters}][\])]?[\s,;/&]*){{2,}}", text):
        return re.findall(rf"[{letters}]", text)
    head = re.match(rf"\(?([{letters}])\)?(?:\s*[.):：,]|\s+(?!\s*(?:or|and|/|&))|\s*$|(?=[^\x00-\x7f]))", text)
    both = re.match(rf"\(?([{letters}])\)?\s*(?:,|or|and|/|&|或|和|、)\s*(?:and\s+|or\s+)?\(?([{letters}])\b", text)
    if both:
        return re.findall(rf"(?<![A-Za-z])([{letters}])(?![A-Za-z'])", text[:60])
    if head:
        return [head[1]]
    alone = re.findall(rf"(?<![A-Za-z'])\(?([{letters}])\)?(?![A-Za-z'])", text[:200])
    return _without_article(text[:200], alone, letters)


def _without_article(text: str, found: list[str], letters: str) -> list[str]:
    """Return letters without the article "A" ("A dog ...") and the pronoun "I"."""
    kept = list(found)
    for letter in "AI":
        for _ in re.findall(rf"(?<![A-Za-z'(]){letter} (?!{NOT_ARTICLE})(?=[a-z])", text):
            if letter in kept:
                kept.remove(letter)
    return kept


def _affirmed(mentions: Sequence[Mention]) -> list[str]:
    """Return the one letter that is affirmed, where every other that is not denied is named before it; else none."""
    affirmed = {mention.letter for mention in mentions if mention.says == "affirmed"}
    kept = [mention for mention in mentions if mention.says in ("affirmed", "")]
    return [kept[-1].letter] if len(affirmed) == 1 and kept[-1].says == "affirmed" else []


def choose_letter(response: str, num_options: int) -> tuple[str | None, str]:
    """Return (letter, reason); several letters as "A, B"; None where no letter of the range is named."""
    offered = letters_of(num_options)
    letters = offered if len(offered) > 8 else "ABCDEFGH"  # a letter beyond the range is seen, and refused
    visible = visible_part(response)
    if visible is None:
        return None, "the reasoning is not closed"
    text = single_backslashes(visible[-_MAX_TAIL:])
    text = _SMALL_IN_BRACKETS.sub(lambda match: match[0].upper(), text)
    finishes = FINISH.findall(text)
    if finishes:
        return _settle(
            [letter for content in finishes for letter in _finish_letters(content, letters)], offered, "Finish"
        )
    boxes = find_boxes(text)
    if boxes:
        return _settle(_listed(boxes[-1][2], letters), offered, "box")
    stripped = text.strip().strip("*`\"' ")
    if re.fullmatch(r"(?i)[(\[]?[a-z][)\].:]*", stripped):
        return _settle([re.sub(r"[^A-Za-z]", "", stripped).upper()], offered, "the whole response")
    if re.fullmatch(rf"(?:[*\[(]*[{letters}][*\])]*[\s,;/&]*){{2,8}}", stripped):
        return _settle(re.findall(rf"[{letters}]", stripped), offered, "the whole response")
    mentions = letter_mentions(text, letters)
    denied = {mention.place for mention in mentions if mention.says == "denied"}
    anchored = answer_letters(text, letters, mentions)
    if anchored:
        return _settle(anchored, offered, "answer phrase")
    head = re.match(rf"\s*[*(\[]*([{letters}])[*)\]]*(?:[.):：。]|\s+(?=[A-Z])|\s*\n|(?=[^\x00-\x7f]))", text)
    if head and head.start(1) not in denied and not (head[1] in "AI" and re.match(r"\s*[AI] [a-z]", text)):
        both = _listed(text.strip()[:40], letters)
        return _settle(
            both if len(set(both)) > 1 and _is_list(text, letters) else [head[1]], offered, "the first letter"
        )
    affirmed = _affirmed(mentions)
    if affirmed:
        return _settle(affirmed, offered, "the one that is affirmed")
    return _settle(_standing_alone(text, mentions), offered, "a letter that stands alone")


def _standing_alone(text: str, mentions: Sequence[Mention]) -> list[str]:
    """Return letters that are not denied; of several those of the last line, where it alone or a conclusion names
    one and it does not go on through the options."""
    kept = [mention for mention in mentions if mention.says in ("affirmed", "")]
    if len({mention.letter for mention in kept}) > 1:
        lines = [line for line in text.split("\n") if line.strip()]
        start = text.rfind(lines[-1])
        last = [mention.letter for mention in kept if mention.place >= start]
        is_concluded = re.search(r"(?i)\b(?:therefore|thus|hence|so|conclu\w+)\b", lines[-1])
        if len(set(last)) == 1 and (len(lines) > 1 or is_concluded) and not _OPTION_BEGINS.match(lines[-1]):
            return last
    return [mention.letter for mention in kept]


def _is_list(text: str, letters: str) -> bool:
    return re.match(rf"\s*\(?[{letters}]\)?\s*(?:,|or|and|/|&)\s*(?:or |and )?\(?[{letters}]\b", text) is not None


def _finish_letters(content: str, letters: str) -> list[str]:
    content = re.sub(
        r"(?i)\b(?:the\s+)?(?:final\s+)?answers?\s+(?:is|are)\b|\boptions?\b|\bchoices?\b", " ", content
    ).strip()
    if re.fullmatch(r"(?i)[(\s\"'*]*[a-z][)\s.\"'*]*", content):
        return [re.sub(r"[^A-Za-z]", "", content).upper()]
    head = re.match(rf"\s*\(?([{letters}])[).:]\s", content)
    others = re.findall(rf"(?<![A-Za-z'])([{letters}])(?![A-Za-z'])", content)
    if head and not _is_list(content, letters):
        return [head[1]]
    return _without_article(content, others, letters)


def _settle(found: Sequence[str], letters: str, how: str) -> tuple[str | None, str]:
    distinct = sorted(set(found))
    outside = [letter for letter in distinct if letter not in letters]
    if outside:
        return None, f"{outside[0]} is not among {letters[0]}-{letters[-1]}"
    if not distinct:
        return None, f"no letter of {letters[0]}-{letters[-1]} is chosen"
    return ", ".join(distinct), how if len(distinct) == 1 else f"{len(distinct)} different answers"


def grade_choice(prediction: str, gold: str, num_options: int) -> Grade:
    """Return kind `choice`: the gold is a letter, alone or before its option's text."""
    gold_letter, reason = choose_letter(gold, num_options)
    if gold_letter is None or "," in gold_letter:
        return Grade(None, False, f"the gold '{gold[:40]}' is not one letter: {reason}")
    letter, reason = choose_letter(prediction, num_options)
    return Grade(letter, letter == gold_letter, reason)
