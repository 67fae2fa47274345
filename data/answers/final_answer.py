"""The final answer of a whole response: what counts as one, found by linear scans (no nested quantifiers).

In this order: nothing before a closing `</think>` counts, and nothing at all where reasoning was opened and
never closed; the content of the last `<answer>` is the response where there is one; then the last box
(`\\boxed{...}`, braces matched; neighbouring boxes joined by a comma, "and" or "or" are one list), or what is
called the final answer in so many words behind it; the line after the last `####`, unless it is a heading or an
answer follows it in words; the text after the last "answer is" or "answer:", in any of the languages of
answer_phrases.py. Else there is no marked answer and the caller reads the text itself.
"""

import re
from dataclasses import dataclass

from espalier.data.answers.answer_phrases import FINAL, OTHER_LANGUAGES, in_plain_form, is_denied
from espalier.data.answers.name_periods import is_within_name
from espalier.data.answers.notation import single_backslashes
from espalier.data.answers.plain_numbers import read_number

DENIED = "what the answer is not"
AFTER_BOX = "final answer phrase after a box"
_THINK_END = "</think>"
_BOX = re.compile(r"(?:\\(?:boxed|fbox)(?![a-zA-Z])|(?<![a-zA-Z\\])boxed(?=\{))\s*")
_BETWEEN_BOXES = re.compile(r"^(?:\s|\$|\\[\]\[(),;:!]|\\quad|\\qquad|\\text|[{},;]|and|or|\\&)*$")
_ANCHOR = re.compile(
    r"(?i)(?:final answers?|answers?|answer to (?:the|this) (?:question|problem))\**\s*"
    r"(?:(?:is|are|was|equals|=)\b[:=]?|[:：]\**)\s*(?:\*\*|(?:(?-i:simply|just)|therefore|thus)\b)?\s*"
)
_HEADING = re.compile(r"(?im)^[#*_ \t]*(?:the )?(?:final )?answer[*_: \t]*\n\s*")
_WEAK_ANCHOR = re.compile(
    r"(?i)\b(?:solutions?|roots?|zeros|zeroes|pairs?|triples?|results?|values?|numbers?)\s+(?:is|are)\b\s*:?\s*"
)
_END = re.compile(r"\n|(?<!\d)\.(?=\s|$)|\.(?=\s+[A-Z\n])|\.$|。|।|\. I hope")
_CORRECTION = re.compile(
    r"(?i)\b(?:wait|actually|correction|sorry|no,|i mean|rather(?! than)|should be(?=\s+[-+−$\\(*\d])|on second thought"
    r"|oops|instead(?! of))\b"
)
_TAKEN_BACK = re.compile(
    r"(?i)[\s.!*$)]*(?:hmm+|oh|but|well)?[\s,.]*(?:wait|no,|oops|sorry|correction|i mean|on second thought)\b"
)
_DOLLAR = re.compile(r"(?<!\\)\$")
_ASIDE = re.compile(r",\s+(?=(?:I|as|so|because|since|which|where|when|but|not|if)\b)")
_MAX_ANSWER = 2000
_MAX_PHRASES = 20


@dataclass(frozen=True)
class FinalAnswer:
    """`text` is the answer's own text, `how` what marked it; `text` None where nothing marks an answer: then
    `unmarked` is what is left to read. `line` is all of the line behind an answer phrase, of which `text` is the first
    sentence."""

    text: str | None
    how: str
    unmarked: str = ""
    line: str = ""


def after_reasoning(response: str) -> str | None:
    """Return what follows the last `</think>`, all of a response without one. None where the reasoning was never
    closed."""
    end = response.rfind(_THINK_END)
    if end >= 0:
        return response[end + len(_THINK_END) :]
    return None if response.lstrip()[:7] == "<think>" else response


def visible_part(response: str) -> str | None:
    """Return what a reader is shown: after the reasoning, inside `<answer>` where that is used. None where the
    reasoning was never closed."""
    shown = after_reasoning(response)
    if shown is None:
        return None
    response = shown
    close = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, close) if close >= 0 else response.rfind("<answer>")
    if start >= 0:
        response = response[start + 8 : close if close > start else len(response)]
    return response


def find_boxes(text: str) -> list[tuple[int, int, str]]:
    """Return (start, end, content) of every box, braces matched in one pass each; an unclosed box is left out."""
    boxes: list[tuple[int, int, str]] = []
    position = 0
    while match := _BOX.search(text, position):
        start = match.end()
        if text[start : start + 1] != "{":
            token = re.match(r"\\?[A-Za-z]+|[0-9]", text[start : start + 40])
            if token and start > match.start() + 6:
                boxes.append((match.start(), start + token.end(), token.group()))
            position = start
            continue
        end = _closing_brace(text, start)
        if end is None:
            position = start
            if len(text) - start > 100_000 or text.count("\\boxed", start) > 50:
                break  # unclosed braces by the thousand: scanning each to the end would be quadratic
            continue
        boxes.append((match.start(), end + 1, text[start + 1 : end]))
        position = end + 1
    return boxes


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text[start : start + 20_000], re.DOTALL):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return start + match.start()
    return None


def _last_boxes(text: str) -> tuple[str, int] | None:
    """Return (the last box, or the last group of neighbouring boxes as a list; where it ends)."""
    boxes = find_boxes(text)
    if not boxes:
        return None
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : group[0][0]]
        if len(between) > 40 or not between.strip(" $\n") or not _BETWEEN_BOXES.match(between):
            break
        group.insert(0, box)
    return ", ".join(_without_boxes(content) for _, _, content in group), group[-1][1]


def _without_boxes(text: str) -> str:
    """Return a text with the contents of the boxes in it instead of the boxes."""
    for start, end, content in reversed(find_boxes(text)):
        text = text[:start] + content + text[end:]
    return text


def _after_anchor(text: str) -> tuple[str, int] | None:
    """Return (the text after the last anchor, up to the end of its sentence; where the anchor ends)."""
    matches = [match for pattern in (_ANCHOR, _HEADING, OTHER_LANGUAGES) for match in pattern.finditer(text)]
    if not matches:
        return None
    last = max(matches, key=lambda match: match.end())
    answer = _answer_at(text, last.end())
    if answer and last.re is OTHER_LANGUAGES and not _is_formula_alone(text, last.end(), answer):
        answer = in_plain_form(answer, last[0])
    return (answer, last.end()) if answer else None


def _is_formula_alone(text: str, place: int, answer: str) -> bool:
    """Say whether the answer at a place of a text is what stood between the delimiters of one formula."""
    return text[place : place + 1] in ("$", "\\") and answer[:1] != text[place]


def _answer_at(text: str, place: int) -> str | None:
    """Return the answer that begins at a place of a text: its formula, or the rest of its sentence."""
    rest = text[place : place + _MAX_ANSWER]
    if rest.startswith(("$$", "\\[")):
        closing = rest.find("$$" if rest[0] == "$" else "\\]", 2)
        if closing > 0:
            return rest[2:closing].strip()
    closing_dollar = _DOLLAR.search(rest, 1) if rest.startswith("$") else None
    if closing_dollar is not None:
        closing = closing_dollar.start()
        after = rest[closing + 1 : closing + 9].strip()
        if not after or after[0] in ".,;\n)。" or after.startswith("I hope"):
            return rest[1:closing].strip()
    aside = _ASIDE.search(rest)
    rest = rest[: aside.start()] if aside else rest
    ends = (end.start() for end in _END.finditer(rest) if not is_within_name(rest, end.start()))
    answer = rest[: next(ends, len(rest))]
    return answer.strip().strip("*").strip() or None


_VALUE = re.compile(
    r"\**\s*(?:[-+−]?\s*[$£€]?\s*(?:\d|\.\d|\$|\\|[√π∞½])|[(\[{](?!\s*[a-z]{2})|[a-zA-Z](?:_\w)?(?:\([a-z]\))?\s*(?:=|\\in))"
)
_FEW_WORDS = re.compile(r"[A-Za-z]{1,20}(?: [A-Za-z]{1,20}){0,2}")
_NUMBER_WITH_UNIT = re.compile(
    r"(?:[-+−]?\s*[$£€]?\s*[-−]?[\d.,/]*\d|\$[^$]{1,200}\$)\s*"
    r"(?:\\?%|(?:(?!(?:of|out|for|from|if|when|because|since|as|with|plus|minus|times|and|or|not)\b)[^\W\d_]+(?![^\W\d_])"
    r"[²³]?\.?"
    r"(?:/[^\W\d_]+|\^\{?\d\}?)?[ \t]*){1,4})?"
)
_COMMANDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_LONG_WORD = re.compile(r"(?!(?:and|or|mod|sin|cos|tan|log|ln|sqrt|pi)\b)[^\W\d_]{3,}|\b(?:of|is|as|if|at|in|to|by)\b")
_SEE_ABOVE = re.compile(r"(?i)\\boxed\s+[a-z]|\b(?:correct|above|below|boxed|given|same|not|unclear)\b")


_CHAIN = re.compile(r"=[^,;=]*=")
_STEP = re.compile(
    r"(?i)\W*(?:(?:step|part|case|phase|stage|section|question|problem)\b"
    r"|(?:the )?(?:final )?(?:answer|solution|result|conclusion)\W*$)|\W*\d{1,2}[.)]\s+[^\W\d_]"
)
_WORDS_FIRST = re.compile(r"[*_\s]*[^\W\d_]{2,}(?!\s*[=(^])")


def _is_whole_value(answer: str) -> bool:
    """Say whether a value, or a list of values, is all that an answer text says (`8 apples`, `x = 3 or 4`): not `5 of
    the 10 marbles`, `18 (9 eggs at $2 each)`, `600 / 12 = 50 = x`."""
    text = answer.replace("**", "").strip(" .")
    if _NUMBER_WITH_UNIT.fullmatch(text):
        return True
    is_worded = _CHAIN.search(text) or _LONG_WORD.search(_COMMANDS.sub(" ", text))
    return _VALUE.match(text) is not None and not is_worded


def _is_same_number(one: str, other: str) -> bool:
    """Say whether two texts are one number, or one is what the other rounds to."""
    first, second = read_number(one.strip("$* .")), read_number(other.strip("$* ."))
    if first is None or second is None or first.is_percent != second.is_percent:
        return False
    decimals = [number.num_decimals for number in (first, second) if number.num_decimals]
    return abs(first.value - second.value) * 2 * 10 ** min(decimals, default=0) <= (1 if decimals else 0)


def _said_after(text: str, boxed: str) -> str | None:
    """Return the answer where a text behind a box calls one final, and it is in full a value as the box's content is,
    but another one. A phrase in quotation marks speaks of an answer and gives none; nor does one that is taken back at
    once ("Wait, ..."). Nothing else behind a box counts."""
    for match in list(FINAL.finditer(text))[: -_MAX_PHRASES - 1 : -1]:
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if line.count('"') % 2 or line.count("“") > line.count("”"):
            continue
        answer = _answer_at(text, match.end())
        nested = FINAL.match(answer) or _ANCHOR.search(answer) if answer else None
        if answer is None or nested or _SEE_ABOVE.search(answer):
            continue
        has_words = _FEW_WORDS.fullmatch(answer) and not re.search(r"\d|\\(?!text)", boxed)
        is_formula = _is_formula_alone(text, match.end(), answer)
        said = answer if is_formula else in_plain_form(answer, match[0])
        if not (is_formula or has_words or _is_whole_value(said)):
            continue
        end = text.find(answer, match.end()) + len(answer)
        is_kept = _TAKEN_BACK.match(text, end) or _is_same_number(said, boxed)
        return None if is_kept else said
    return None


def final_answer(response: str) -> FinalAnswer:
    """Return the response's final answer and how it is marked."""
    text = visible_part(response)
    if text is None:
        return FinalAnswer(None, "the reasoning is not closed")
    text = single_backslashes(text)
    boxed = _last_boxes(text)
    if boxed is not None:
        said = _said_after(text[boxed[1] :], boxed[0])
        return FinalAnswer(boxed[0][:_MAX_ANSWER], "box") if said is None else FinalAnswer(said, AFTER_BOX)
    tail = text[-8000:]
    anchored = _after_anchor(tail)
    marked = _after_marker(
        text, anchored[0] if anchored else "", len(text) - len(tail) + anchored[1] if anchored else 0
    )
    if marked is not None:
        return FinalAnswer(marked, "####")
    if anchored is not None:
        if is_denied(anchored[0]):
            return FinalAnswer(None, DENIED)
        line = tail[anchored[1] :].partition("\n")[0].strip()
        return _corrected(tail, anchored[1]) or FinalAnswer(anchored[0], "answer phrase", line=line)
    weak = max(_WEAK_ANCHOR.finditer(tail), key=lambda match: match.end(), default=None)
    answer = _answer_at(tail, weak.end()) if weak else None
    if weak and answer and _VALUE.match(answer) and not _corrected(tail, weak.end()):
        rest = tail[tail.find(answer, weak.end()) + len(answer) :]
        if not re.search(r"\d", rest):
            return FinalAnswer(answer, "a sentence that gives the values")
    return FinalAnswer(None, "nothing marks an answer", tail)


def _after_marker(text: str, said: str, said_at: int) -> str | None:
    """Return the line after the last `####`; None where it is a heading, or where a value is `said` behind it (or any
    answer, where the line is no value in full)."""
    marker = text.rfind("####")
    line, _, behind = text[marker + 4 :].partition("\n") if marker >= 0 else ("", "", "")
    line = line.strip()[:_MAX_ANSWER]
    is_last = not behind.strip()
    if not line or _STEP.match(line) or (_WORDS_FIRST.match(line) and not is_last):
        return None
    is_said_behind = said_at > marker and said != ""
    return None if is_said_behind and (_VALUE.match(said) or not _is_whole_value(line)) else line


def _corrected(text: str, place: int) -> FinalAnswer | None:
    """Return what a text says instead of the answer at a place; None where it stands by it."""
    answer = _answer_at(text, place) or ""
    corrected = _CORRECTION.search(text, text.find(answer, place) + len(answer))
    return FinalAnswer(None, "corrected after the answer phrase", text[corrected.end() :]) if corrected else None
