"""The 25 verifiable instructions of IFEval (Zhou et al. 2023, "Instruction-Following Evaluation for Large Language
Models", arXiv 2311.07911, table 1), as checks of a text; from the published definitions.

`INSTRUCTIONS` maps a published id to a function of the text and the published arguments. A `relation` is "at least",
"less than" (both of IFEval), "at most", "around" (a tenth of the number, one at least) or "exactly" (both of the
RLVR sets of Lambert et al. 2024, whose names for the same instructions `RLVR_NAMES` translates).

Words and sentences are counted by rules of our own: no tokenizer's data is needed. A sentence ends at `.`, `!`, `?` or
their Chinese and Japanese forms before a space or the end, but not behind a title or an initial.
"""

import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

_TITLES = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|e\.g|i\.e|etc|No|U\.S|[A-Z])\.(?=\s)")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'”’)\]]*+(?=\s|$)|[。！？]+")
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SEPARATORS = re.compile(r"\s*[,/]\s*(?:or\s+)?|\s+or\s+")
_QUOTES = " \"'"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_LETTER_FORM = re.compile(r"(?:\w|\d+|[ivx]+)[)\]}]", re.IGNORECASE)
RELATIONS = ("at least", "less than", "at most", "around", "exactly")


def holds(number: int, relation: str, wanted: int) -> bool:
    """Say whether a count is as wanted. Raises ValueError on a relation that is none of `RELATIONS`."""
    if relation == "at least":
        return number >= wanted
    if relation == "less than":
        return number < wanted
    if relation == "at most":
        return number <= wanted
    if relation == "around":
        return abs(number - wanted) <= max(round(wanted / 10), 1)
    if relation == "exactly":
        return number == wanted
    raise ValueError(f"a relation is one of {', '.join(RELATIONS)}, got {relation!r}")


def count_words(text: str) -> int:
    """Return the number of words as IFEval counts them: runs of letters and digits (`don't` is two)."""
    return len(re.findall(r"\w+", text))


def count_sentences(text: str) -> int:
    """Return the number of sentences, as the module says; what stands behind the last end is one, too."""
    plain = _TITLES.sub(lambda match: match.group()[:-1], text)
    pieces = [piece for line in plain.split("\n") for piece in _SENTENCE_END.split(line)]
    return sum(bool(re.search(r"\w", piece)) for piece in pieces)


def detect_language(text: str) -> str:
    """Return the ISO code of a text's language, "" where it has none to tell (digits alone)."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.lang_detect_exception.LangDetectException:
        return ""


def has_keywords(text: str, keywords: Sequence[str]) -> bool:
    """All of them occur, in any case."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs so often, as a whole word."""
    return holds(len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE)), relation, frequency)


def lacks_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of them occurs as a whole word."""
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter occurs so often, in any case."""
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def is_in_language(text: str, language: str) -> bool:
    """The whole response is in the language, by its ISO code."""
    return detect_language(text) == language


def has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """So many sentences."""
    return holds(count_sentences(text), relation, num_sentences)


def has_words(text: str, num_words: int, relation: str) -> bool:
    """So many words."""
    return holds(count_words(text), relation, num_words)


def has_paragraphs(text: str, num_paragraphs: int) -> bool:
    """So many paragraphs parted by `***` (or `* * *`), none of them empty but before the first and after the last."""
    return _num_parts(re.split(r"\s?(?:\*\*\*|\* \* \*)\s?", text)) == num_paragraphs


def _num_parts(parts: Sequence[str]) -> int | None:
    """Return the number of parts, empty ones at either end left out; None where one in the middle is empty."""
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return sum(bool(part.strip()) for part in parts)


def has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs parted by blank lines, and the nth (from 1) begins with the word."""
    parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = parts[nth_paragraph - 1].split()[0].strip("\"'“”‘’*_.,:;!?()[]")
    return first.lower() == first_word.lower()


def has_placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many texts in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    """A line or sentence that begins with the marker; blanks between the letters of `P.S.` do not matter."""
    letters = r"\s?".join(map(re.escape, postscript_marker.replace(" ", "")))
    return re.search(rf"(?<!\w){letters}\s*\S", text, re.IGNORECASE) is not None


def has_bullets(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `* ` or `- `."""
    return len(re.findall(r"^[ \t]*[*-][ \t]+\S", text, re.MULTILINE)) == num_bullets


def has_choice(text: str, options: str | Sequence[str] = _CHOICES) -> bool:
    """One of the answers that the prompt offers stands in the response, with its bracket where it has one (`a)` is no
    `a`), or is all of it, bracket or not."""
    offered = _listed(options) if isinstance(options, str) else [option.strip(_QUOTES) for option in options]
    stands = (re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text, re.IGNORECASE) for option in offered if option)
    return any(stands) or _bare(text) in {_bare(option) for option in offered} - {""}


def _listed(text: str) -> list[str]:
    """Return the options of a list, without the brackets around all of it."""
    inside = text.strip(_QUOTES)
    if inside[:1] in _BRACKETS and inside[-1:] == _BRACKETS[inside[0]] and _closes_last(inside):
        inside = inside[1:-1]
    options = _SEPARATORS.split(inside)
    return [_own(option) for option in options] if len(options) > 1 else [text.strip(_QUOTES)]


def _closes_last(text: str) -> bool:
    """Say whether the bracket that a text begins with is closed by its last sign, and not before: `(A), (B)` is not."""
    opening, closing = text[0], _BRACKETS[text[0]]
    depths = accumulate((sign == opening) - (sign == closing) for sign in text)
    return [place for place, depth in enumerate(depths, 1) if depth <= 0][:1] == [len(text)]


def _own(option: str) -> str:
    """Return an option without quotes and without a bracket that has no other in it; `a)` and `1)` keep theirs."""
    option = option.strip(_QUOTES)
    for opening, closing in _BRACKETS.items():
        surplus = option.count(opening) - option.count(closing)
        if surplus > 0 and option.startswith(opening):
            option = option[1:]
        elif surplus < 0 and option.endswith(closing) and not _LETTER_FORM.fullmatch(option):
            option = option[:-1]
    return option.strip(_QUOTES)


def _bare(text: str) -> str:
    return text.strip(" \n\"'().*").lower()


def has_highlights(text: str, num_highlights: int) -> bool:
    """At least so many texts between `*...*` or `**...**`."""
    found = re.findall(r"\*\*([^\n*]+)\*\*|(?<!\*)\*([^\n*]+)\*(?!\*)", text)
    return sum(bool("".join(one).strip()) for one in found) >= num_highlights


def has_sections(text: str, section_spliter: str, num_sections: int, relation: str = "at least") -> bool:
    """So many sections that begin with the word and a number (`Section 1`); a word that ends with a sign (`Section:`)
    needs no number."""
    number = r"\s?\d+" if section_spliter[-1:].isalnum() else ""
    return holds(len(re.findall(rf"(?<!\w){re.escape(section_spliter)}{number}", text)), relation, num_sections)


def is_json(text: str) -> bool:
    """The whole response is JSON; a fence around it does not count."""
    inside = text.strip()
    opening, _, rest = inside.partition("\n")
    if opening.strip().lower() in ("```", "```json") and rest.endswith("```"):
        inside = rest.removesuffix("```")
    try:
        json.loads(inside)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """A title in double angular brackets, `<<...>>`."""
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The request comes first, word for word, then more; in any case of letters."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def has_two_responses(text: str) -> bool:
    """Two different responses parted by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """So many words in capital letters alone."""
    words = re.findall(r"\w+(?:[-'’]\w+)*", text)
    return holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def is_english_capital(text: str) -> bool:
    """English, without a small letter."""
    return text.isupper() and detect_language(text.lower()) == "en"


def is_english_lowercase(text: str) -> bool:
    """English, without a capital letter."""
    return text.islower() and detect_language(text) == "en"


def ends_with(text: str, end_phrase: str) -> bool:
    """The phrase is the last thing said, whatever blanks or quotation marks are around; in any case of letters."""
    return text.strip().strip('"').strip().lower().endswith(end_phrase.strip().strip('"').strip().lower())


def is_quoted(text: str) -> bool:
    """Double quotation marks around the whole response."""
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def lacks_commas(text: str) -> bool:
    """No comma."""
    return "," not in text


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": lacks_words,
    "keywords:letter_frequency": has_letter_often,
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:number_words": has_words,
    "length_constraints:nth_paragraph_first_word": has_first_word,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": has_choice,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:repeat_prompt": repeats_prompt,
    "combination:two_responses": has_two_responses,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": is_english_capital,
    "change_case:english_lowercase": is_english_lowercase,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "punctuation:no_comma": lacks_commas,
}

# Name in the RLVR sets → (id, their argument → ours, what else holds there)
RLVR_NAMES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency", {"word": "keyword", "N": "frequency"}, {"relation": "exactly"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency", {"letter": "letter", "N": "let_frequency"}, {"let_relation": "exactly"}),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences", {"N": "num_sentences", "quantifier": "relation"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}, {}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}, {}),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph", "first_word": "first_word"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}, {}),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": (
        "detectable_format:number_highlighted_sections", {"N": "num_highlights"}, {}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"section_splitter": "section_spliter", "N": "num_sections"}, {"relation": "exactly"}),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency", {"N": "capital_frequency", "quantifier": "capital_relation"}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}  # fmt: skip
