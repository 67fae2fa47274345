"""Periods within names: `Mr. Smith`, `St. Louis`, `J. K. Rowling`, `Ulysses S. Grant`, `U.S. Virgin Islands`, `Vol. 2`.

An answer may be one letter, or end with a unit, so a lone initial (`B. Dogs …`) and what stands before a word that
begins sentences (`Washington, D.C. The …`) are none.
"""

import re

_BEHIND = re.compile(r"\.[ \t]{1,2}(?:([A-Z][^\W\d_]*)|\d)")
_TITLE = re.compile(
    r"(?<!\d)(?<!\d )\b(?:Dr|Mr|Mrs|Ms|Mme|Mlle|Messrs|Prof|St|Gen|Col|Capt|Lt|Sgt|Rev|Hon|Pres|Gov|Sen|Rep|Mt|Ft|Jr|Sr"
    r"|v|vs)$"
)
_NUMBERED = re.compile(r"(?i)\b(?:vol|op|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)$")
_INITIAL = re.compile(r"(?<!\w)[A-Z]$")
_INITIALS = re.compile(r"(?<!\w)[A-Z]\. ?[A-Z]$")
_AFTER_A_NAME = re.compile(r"\b(?!(?:Option|Choice|Case|Answer|Part|Point|Line|Figure)\b)[A-Z][a-z'’]+ [A-Z]$")
_BEGINS_A_SENTENCE = re.compile(
    r"(?:An?|And|As|Because|But|By|First|For|Hence|Here|He|However|I|If|In|Is|It|Let|My|No|Note|Now|Of|On|One|Our|She|Since"
    r"|So|That|The|Then|There|Therefore|These|They|This|Those|Thus|To|We|What|When|Which|While|With|You|Your|Wait|Yes)\b(?!\.)"
)


def is_within_name(text: str, place: int) -> bool:
    """Say whether the period at a place of a text stands within a name; False where no period stands there."""
    behind = _BEHIND.match(text, place)
    if behind is None:
        return False
    before = text[max(0, place - 24) : place]
    if behind[1] is None:
        return _NUMBERED.search(before) is not None
    if _BEGINS_A_SENTENCE.match(text, behind.start(1)):
        return False
    if _TITLE.search(before) or _INITIALS.search(before):
        return True
    is_initial_next = len(behind[1]) == 1 and text[behind.end() : behind.end() + 1] == "."
    return (_INITIAL.search(before) is not None and is_initial_next) or _AFTER_A_NAME.search(before) is not None
