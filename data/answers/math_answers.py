"""Are two mathematical answers the same? Fast exact paths first, symbolic work in the pool for the rest.

The fast paths decide only what they can decide exactly: the same text after harmless rewriting, two plain
numbers, two different words. Everything else goes to math-verify in a worker process. A prediction that
states a false chain of numbers (`13=12`) is wrong whatever its last side says.
"""

import re

from data.answers.final_answer import FinalAnswer, final_answer, find_boxes, visible_part
from data.answers.grade import Grade
from data.answers.plain_numbers import is_equal_within_decimals, read_number
from data.answers.pool import POOL

_MAX_CHARS = 4000
_DELIMITERS = re.compile(r"\$|\\\(|\\\[|\\boxed|\\fbox|\\begin\{(?:align|equation|gather)")
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_COMMAND_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\*?\s*\{([^{}]*)\}"
)
_PROSE = re.compile(r"\b(?:the|is|are|so|we|of|therefore|thus|answer|which|that|donc|then|get|it)\b", re.IGNORECASE)
_NON_LATIN = re.compile(r"[\u0600-\u06ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_NUMBER_AND_UNIT = re.compile(r"[$€£¥]?\s*-?[\d,. ]*\d\s*(?:[^\W\d_]{1,12}[.²³]?|%|[$€£¥])(?:\s.{0,12})?")
_EUROPEAN = re.compile(r"-?\d+,\d{2,}|-?\d{1,3}(?: \d{3})+(?:[.,]\d+)?")
_SPACING = re.compile(r"\\[,;:! ]|\\quad|\\qquad|~|\s+|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\displaystyle|\\limits")
_SIDE = re.compile(r"(?<![<>!\\:])=(?!=)")


def unwrap(text: str) -> str:
    """Without the delimiters, boxes and closing full stop around the whole text."""
    text = text.strip()
    for _ in range(4):
        before = text
        text = text.rstrip(".").strip() if not text.endswith("..") else text
        text = text[:-1].strip() if text.endswith("\\") and not text.endswith("\\\\") else text
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = text[len(opening) : -len(closing)]
            is_around = text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening)
            if is_around and opening.strip("\\") not in inner.replace("\\$", ""):
                text = inner.strip()
        boxes = find_boxes(text) if text.startswith("\\") else []
        if len(boxes) == 1 and boxes[0][0] == 0 and boxes[0][1] == len(text):
            text = boxes[0][2].strip()
        if text == before:
            break
    return text


def tidy(text: str) -> str:
    """A text that is the same for harmless ways of writing one answer; never the same for different ones."""
    text = unwrap(text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("{,}", ",").replace("\\neq", "\\ne")
    text = text.replace("\\leq", "\\le").replace("\\geq", "\\ge").replace("−", "-").replace("\\left\\{", "\\{")
    text = text.replace("\\right\\}", "\\}")
    text = re.sub(r"\\frac(\d)(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)(?!\d)", r"\\sqrt{\1}", text)
    text = _COMMAND_TEXT.sub(lambda match: " " + match[1] + " ", text)
    text = _SPACING.sub("", text)
    return re.sub(r"(?<![\d.])\.(\d)", r"0.\1", text)


def _words(text: str) -> str | None:
    """The text as lower-case words, where it is nothing but words of three letters and more."""
    plain = _COMMAND_TEXT.sub(lambda match: " " + match[1] + " ", unwrap(text))
    plain = re.sub(r"\s+", " ", plain).strip().strip(".").lower()
    return plain if re.fullmatch(r"[a-z]{3,}(?:[ -][a-z]+)*", plain) else None


def _contradicts_itself(text: str) -> bool:
    """Whether the text is a chain of plain numbers that are not equal."""
    sides = [read_number(unwrap(side)) for side in _SIDE.split(unwrap(text))]
    if len(sides) < 2 or any(side is None for side in sides):
        return False
    return any(is_equal_within_decimals(sides[0], side) is False for side in sides[1:])  # type: ignore[arg-type]


def _quick(answer: str, gold: str) -> tuple[bool, str] | None:
    """(is right, reason) where a fast path decides."""
    one, other = tidy(answer), tidy(gold)
    if one and one == other:
        return True, "the same text"
    first, second = read_number(unwrap(answer)), read_number(unwrap(gold))
    if first is not None and second is not None:
        is_same = is_equal_within_decimals(first, second)
        if is_same is None and first.is_percent != second.is_percent:
            is_same = second.is_percent and first.value == second.value  # "what percent": the sign may be left off
        if is_same is not None:
            return is_same, "equal numbers" if is_same else "different numbers"
    words, gold_words = _words(answer), _words(gold)
    if words is not None and gold_words is not None and sorted(words) != sorted(gold_words):
        return False, "different words"
    if words is not None and words == gold_words:
        return True, "the same words"
    if _contradicts_itself(answer):
        return False, "a chain of unequal numbers"
    return None


def _is_prose(text: str) -> bool:
    plain = _COMMAND_TEXT.sub(" ", text)
    if _NON_LATIN.search(plain):
        return True
    words = _WORD.findall(re.sub(r"\\[a-zA-Z]+", " ", plain))
    return (bool(_PROSE.search(plain)) and len(words) >= 2) or len(words) >= 4


def _ways(text: str) -> list[bool]:
    """Whether to read a text as one formula (True), as it stands (False), or both in turn."""
    if _DELIMITERS.search(text):
        return [False]
    if _is_prose(text):
        return [False]
    if _NUMBER_AND_UNIT.fullmatch(text.strip()) or _EUROPEAN.fullmatch(text.strip()):
        return [True, False]
    return [True]


def compare_math(answer: str, gold: str) -> tuple[str, str]:
    """(verdict, reason) for two answers; never raises, never takes long."""
    if not answer.strip():
        return "unparseable", "an empty answer"
    if len(answer) > _MAX_CHARS or len(gold) > _MAX_CHARS:
        return "unparseable", f"longer than {_MAX_CHARS} characters"
    decided = _quick(answer, gold)
    if decided is not None:
        return ("right" if decided[0] else "wrong"), decided[1]
    forms = [(one, other) for one in _ways(gold) for other in _ways(answer)]
    return POOL.compare(gold, answer, forms)


def grade_math(prediction: str, gold: str) -> Grade:
    """Kind `math`: the prediction is an answer, perhaps in its sentence or its box."""
    text = prediction if len(prediction) <= _MAX_CHARS else prediction[-_MAX_CHARS:]
    if "</think>" in text:
        text = visible_part(text) or ""
    boxes = find_boxes(text)
    shown = unwrap(boxes[-1][2]) if len(boxes) == 1 else unwrap(text)
    if len(boxes) == 1:
        decided = _quick(shown, gold)
        if decided is not None and (decided[0] or decided[1] == "a chain of unequal numbers"):
            return _grade(shown, "right" if decided[0] else "wrong", decided[1])
    if not boxes:
        found = final_answer(text)
        if found.how.startswith("corrected"):
            text = found.unmarked
    verdict, reason = compare_math(text, gold)
    return _grade(shown, verdict, reason)


def grade_math_response(response: str, gold: str) -> Grade:
    """Kind `response_math`: the prediction is a whole response; only its final answer counts."""
    found: FinalAnswer = final_answer(response)
    gold_answer = _gold_of(gold)
    if found.text is None:
        if not found.unmarked.strip():
            return Grade(None, False, found.how)
        verdict, reason = compare_math(_last_statement(found.unmarked), gold_answer)
        return _grade(_last_statement(found.unmarked)[-200:], verdict, f"{reason} ({found.how})")
    verdict, reason = compare_math(found.text, gold_answer)
    return _grade(found.text, verdict, reason)


def _gold_of(gold: str) -> str:
    """The gold's own box where the gold is published with its text around it."""
    boxes = find_boxes(gold)
    return boxes[-1][2] if len(boxes) == 1 else gold


def _last_statement(text: str) -> str:
    """The last non-blank paragraph of an unmarked text, at most 1,000 characters of it."""
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    return (paragraphs[-1] if paragraphs else text)[-1000:]


def _grade(answer: str, verdict: str, reason: str) -> Grade:
    return Grade(None if verdict == "unparseable" else answer, verdict == "right", reason)
