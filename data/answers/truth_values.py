"""The truth value that a response names: True, False or Unknown.

In this order: the whole response, `Finish[True]`, the last box, the last "the statement is true" or "so it is true",
the words of the last line that has any. What is only supposed, denied or left open ("if the statement is true", "it is
not the case that …", "we cannot determine whether …") names none; several different ones are wrong.
"""

import re
from collections.abc import Sequence

from espalier.data.answers.final_answer import find_boxes, visible_part
from espalier.data.answers.grade import Grade
from espalier.data.answers.letters import FINISH

_MAX_TAIL = 6000

_TRUTHS = {
    "true": "True", "false": "False", "unknown": "Unknown", "uncertain": "Unknown", "undetermined": "Unknown",
    "yes": "True", "no": "False", "correct": "True", "incorrect": "False", "t": "True", "f": "False", "u": "Unknown",
}  # fmt: skip
_UNDECIDED = re.compile(
    r"(?i)\b(?:can(?:not|'t| not)|could not|impossible to)\s+(?:be\s+)?(?:determin|decid|conclud|infer|know|tell|sa)\w*"
    r"|\bnot enough information\b|\bneither true nor false\b|\binsufficient information\b"
    r"|\bneither (?:proved|proven) nor disproved\b"
)
_TRUTH_ANCHOR = re.compile(
    r"(?i)(?:(?:\banswer\b|\bconclusion\b|\bstatement\b|\bhypothesis\b|\bclaim\b|\bverdict\b|\blabel\b)"
    r"[^.\n:]{0,40}?(?:\bis\b|\bmust be\b|[:：])|\b(?:so|therefore|thus|hence),?\s+(?:it|this)\s+(?:is|must be))"
    r"[\s*\"'(\[]*(?:\\text\{)?(true|false|unknown|uncertain|undetermined)\b(?!\s+that\b)"
)
_CLAUSE_ENDS = re.compile(r"[.!?;\n]|,\s*nor\b|\b(?:so|therefore|thus|hence|but|however|yet)\b")
_SUPPOSES = re.compile(r"(?i)\b(?:if|whether|assum(?:e[sd]?|ing)|suppos(?:e[sd]?|ing)|unless|imagine)\b")
_DENIES = re.compile(
    r"(?i)(?:\bnot|n['’]t|\bnever|\bno|\bnone|\bneither|\bnor|\bcannot)\b[^,]{0,80}?\bthat\b"
    r"|(?:n['’]t|\bnot)\s+(?:think|believe|say|see|find)\b|\bnothing\b|\bnor\b"
)
_CONCLUDED_BEFORE = re.compile(r"(?i)\b(?:so|therefore|thus|hence|overall|in conclusion)\b[^.\n]{0,60}$")
_EITHER = re.compile(r"(?i)\b(?:true|false|unknown|uncertain)\s*(?:or|/|and)\s*(?:true|false|unknown|uncertain)\b")
_TRUTH_WORD = re.compile(r"(?i)\b(true|false|unknown|uncertain|undetermined)\b")


def _truths(text: str) -> list[str]:
    """Return the truth values a text names; "not true" names none; a phrase for undecided names Unknown."""
    truths = ["Unknown"] * bool(_UNDECIDED.search(text))
    text = _UNDECIDED.sub(" ", text)
    for match in _TRUTH_WORD.finditer(text):
        before = text[max(0, match.start() - 12) : match.start()]
        if not re.search(r"(?i)(?:\bnot|n't|\bneither|\bnor)\s+(?:necessarily\s+)?$", before):
            truths.append(_TRUTHS[match[1].lower()])
    return truths


def choose_truth(response: str) -> tuple[str | None, str]:
    """Return ("True", "False" or "Unknown", reason); several as "False, True"; None where none is named."""
    visible = visible_part(response)
    if visible is None:
        return None, "the reasoning is not closed"
    text = visible[-_MAX_TAIL:].strip()
    whole = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", text).strip("$*`\"'()[]{} .!\n")
    if whole.lower() in _TRUTHS:
        return _TRUTHS[whole.lower()], "the whole response"
    for how, contents in (("Finish", FINISH.findall(text)), ("box", [box[2] for box in find_boxes(text)][-1:])):
        if contents:
            named = [value for content in contents for value in _whole_or_named(content)]
            return _settle_truth(named, how)
    text = _asserted(text)
    anchored = [(match.end(), _TRUTHS[match[1].lower()]) for match in _TRUTH_ANCHOR.finditer(text)]
    if anchored:
        return _settle_truth(_anchored_truths(text, *anchored[-1]), "answer phrase")
    lines = [line for line in text.split("\n") if line.strip()]
    return _settle_truth(
        _truths(lines[-1]) if lines and _truths(lines[-1]) else _truths(text), "a word that stands alone"
    )


def _asserted(text: str) -> str:
    """Return the text without the truth values that it only supposes, denies or leaves open."""
    ends = [*(match.start() for match in _CLAUSE_ENDS.finditer(text)), len(text)]
    return "".join(_asserted_clause(text[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))


def _asserted_clause(clause: str) -> str:
    """Return a clause without truth values behind "if", "whether" or "cannot determine", and up to the next comma
    behind "not … that"."""
    opened = [match.end() for match in (_SUPPOSES.search(clause), _UNDECIDED.search(clause)) if match]
    not_said = [(min(opened), len(clause))] if opened else []
    if denied := _DENIES.search(clause):
        comma = clause.find(",", denied.end())
        not_said.append((denied.end(), len(clause) if comma < 0 else comma))

    def said(word: "re.Match[str]") -> str:
        return " " if any(begin <= word.start() < end for begin, end in not_said) else word[0]

    return _TRUTH_WORD.sub(said, clause) if not_said else clause


def _anchored_truths(text: str, last: int, truth: str) -> list[str]:
    """Return what the last phrase, which ends at `last`, says, and what is said against it in its line or behind it."""
    either = _EITHER.search(text, text.rfind("\n", 0, last) + 1, last + 30)
    if either:
        return _truths(either.group())
    undecided = _UNDECIDED.search(text, last)
    if undecided is None:
        return [truth]
    is_concluded = _CONCLUDED_BEFORE.search(text[max(last, undecided.start() - 80) : undecided.start()])
    return ["Unknown"] if is_concluded else [truth, "Unknown"]


def _whole_or_named(content: str) -> list[str]:
    word = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", content).strip("$*`\"'() .!").lower()
    return [_TRUTHS[word]] if word in _TRUTHS else _truths(content)


def _settle_truth(found: Sequence[str], how: str) -> tuple[str | None, str]:
    distinct = sorted(set(found))
    if not distinct:
        return None, "none of True, False, Unknown is named"
    return ", ".join(distinct), how if len(distinct) == 1 else f"{len(distinct)} different answers"


def grade_boolean3(prediction: str, gold: str) -> Grade:
    """Return kind `boolean3`: True, False or Unknown ("Uncertain" is another spelling of Unknown)."""
    truth = _TRUTHS.get(gold.strip().strip(".").lower())
    if truth is None:
        return Grade(None, False, f"the gold '{gold[:40]}' is none of True, False, Unknown")
    answer, reason = choose_truth(prediction)
    return Grade(answer, answer == truth, reason)
