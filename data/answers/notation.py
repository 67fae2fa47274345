"""One spelling for the ways an answer is typed: doubled backslashes, Unicode's mathematical characters, digits of
other scripts, brackets' sizes, currency signs. Linear rewriting; nothing here decides whether answers are equal."""

import re
import unicodedata

# LaTeX commands whose names also mean nothing else after a line break: `\\frac` is a doubled backslash.
_COMMANDS = (
    "boxed|fbox|[dtc]?frac|sqrt|text(?:bf|it|rm|normal)?|math(?:rm|bf|bb|it|cal)|mbox|operatorname|left|right|begin|end"
    "|pi|theta|alpha|beta|gamma|lambda|infty|cdot|times|div|le|leq|ge|geq|neq?|pm|mp|cup|cap|in|circ|angle|degree"
    "|log|ln|sin|cos|tan|d?binom|sum|int|emptyset|varnothing|setminus|quad|qquad|approx|overline|displaystyle|to"
)
_DOUBLED = re.compile(rf"(?<!\\)\\\\(?=(?:{_COMMANDS})(?![a-zA-Z]))")
_DOUBLED_BRACED = re.compile(r"(?<!\\)\\\\(?=(?:boxed|fbox|[dtc]?frac|sqrt|text(?:bf|it|rm)?|math(?:rm|bf|bb)|mbox)\{)")
_DOUBLED_SIGN = re.compile(r"(?<!\\)\\\\(?:[{}%$,;!]|\([^()]{0,200}\\\\\))")
_TYPED_NEWLINE = re.compile(r"(?<!\\)\\n(?![a-zA-Z])")
_BACKSLASHES = re.compile(r"\\+")
_HAS_ROWS = re.compile(r"\\begin\s*\{")


def single_backslashes(text: str) -> str:
    """`\\\\\\\\frac` → `\\\\frac`: a backslash that was escaped once too often, in the text of JSON or of a program.

    Where every backslash of a text is doubled (and one stands before a command or a sign that needs one), all are
    halved, those of rows too; else only those before a command's name. Two backslashes before anything else break
    a line. A typed `\\n` is one, too.
    """
    text = _TYPED_NEWLINE.sub("\n", text) if "\\n" in text else text
    if "\\\\" not in text or not (_DOUBLED.search(text) or _DOUBLED_SIGN.search(text)):
        return text
    if all(len(run[0]) % 2 == 0 for run in _BACKSLASHES.finditer(text)):
        return _BACKSLASHES.sub(lambda run: run[0][: len(run[0]) // 2], text)
    return (_DOUBLED_BRACED if _HAS_ROWS.search(text) else _DOUBLED).sub(lambda _: "\\", text)


_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "＋": "+", "×": "\\times ", "✕": "\\times ",
    "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "\\div ", "∕": "/", "⁄": "/", "／": "/",
    "≤": "\\le ", "⩽": "\\le ", "≦": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≧": "\\ge ", "≠": "\\ne ",
    "≈": "\\approx ", "≡": "\\equiv ",
    "±": "\\pm ", "∓": "\\mp ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
    "⌀": "\\emptyset ", "∖": "\\setminus ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℚ": "\\mathbb{Q}",
    "ℕ": "\\mathbb{N}", "ℂ": "\\mathbb{C}", "∠": "\\angle ", "△": "\\triangle ", "→": "\\to ", "º": "°", "˚": "°",
    "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "ε": "\\epsilon ", "θ": "\\theta ",
    "λ": "\\lambda ", "μ": "\\mu ", "π": "\\pi ", "ρ": "\\rho ", "σ": "\\sigma ", "τ": "\\tau ", "φ": "\\phi ",
    "ϕ": "\\phi ", "ω": "\\omega ", "Δ": "\\Delta ", "Ω": "\\Omega ", "∑": "\\sum ", "∫": "\\int ", "∣": "|", "′": "'",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2062": "", "\u200b": "", "，": ",", "；": ";", "（": "(", "）": ")",
    "［": "[", "］": "]", "｛": "{", "｝": "}", "＝": "=", "＜": "<", "＞": ">", "％": "%", "、": ",",
})  # fmt: skip
_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5), "⅘": (4, 5),
    "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8), "⅑": (1, 9),
    "⅒": (1, 10),
}  # fmt: skip
_VULGAR = re.compile("[" + "".join(_FRACTIONS) + "]")
_SUPERSCRIPTS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPTS = re.compile(r"[₀₁₂₃₄₅₆₇₈₉]+")
_PLAIN_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
_ROOT = re.compile(r"([√∛∜])\s*(\(|\d+(?:\.\d+)?|[a-zA-Z]|\{)?")
_DEGREES = {"√": "", "∛": "[3]", "∜": "[4]"}


def ascii_digits(text: str) -> str:
    """Return digits of other scripts (`٣`, `３`, `३`) as 0 to 9; superscripts and circled digits stay."""
    if text.isascii():
        return text
    return "".join(
        str(unicodedata.digit(one)) if unicodedata.category(one) == "Nd" and not one.isascii() else one for one in text
    )


def _root(match: re.Match[str]) -> str:
    command, after = "\\sqrt" + _DEGREES[match[1]], match[2] or ""
    if after == "(":
        return command + "("  # its bracket is found by `_braced_roots`
    return command + (after if after == "{" else "{" + after + "}" if after else "")


def _braced_roots(text: str) -> str:
    """Return `sqrt(2)` and `\\sqrt(2)` with braces, where the bracket is closed and holds no other."""
    text = re.sub(r"\\sqrt(\[\d\])?\(([^()]{1,200})\)", r"\\sqrt\1{\2}", text)
    return re.sub(r"(?<![\\a-zA-Z])sqrt\s*(?=\{)", r"\\sqrt", text)


def latex_characters(text: str) -> str:
    """Unicode's mathematical characters as LaTeX: `√3` → `\\sqrt{3}`, `x²` → `x^{2}`, `3½` → `3\\frac{1}{2}`, `π`."""
    if not text.isascii():
        text = ascii_digits(text)
        text = _VULGAR.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*_FRACTIONS[match[0]]), text)
        text = _SUPERSCRIPTS.sub(lambda match: "^{" + match[0].translate(_PLAIN_SCRIPTS) + "}", text)
        text = _SUBSCRIPTS.sub(lambda match: "_{" + match[0].translate(_PLAIN_SCRIPTS) + "}", text)
        text = _ROOT.sub(_root, text).translate(_CHARACTERS)
    return _braced_roots(text)


_SIZES = re.compile(r"\\[bB]igg?[lrm]?(?![a-zA-Z])\s*")
_CURRENCY = re.compile(
    r"^\s*([-+]?)\s*(?:\\pounds|\\euro|[£€¥₹₩₽]|(?:Rs\.?|USD|EUR|GBP|US\\?\$)(?=\s*\d))\s*(?=[-+]?\.?\d)"
    r"|(?<=\d)\s*(?:\\pounds|\\euro|[£€¥₹₩₽元円원]|USD|EUR|GBP)\s*$"
)
_SPELLINGS = [
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\(?:R|reals|Reals)(?![a-zA-Z])"), r"\\mathbb{R}"),
    (re.compile(r"\\mathbf\s*\{([RZQNC])\}(?=\s*$)"), r"\\mathbb{\1}"),
    (re.compile(r"\\lg(?![a-zA-Z])"), r"\\log_{10}"),
    (re.compile(r"\{\s*(\w{1,9})\s*\\choose\s*(\w{1,9})\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\[dt]?binom\s*(\d)\s*(\d)(?!\d)"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?:\{\})?[_^]\{?(\d{1,4})\}?C_\{?(\d{1,4})\}?"), r"\\binom{\1}{\2}"),
    (re.compile(r"(begin|end)\{smallmatrix\}"), r"\1{matrix}"),
    (re.compile(r"\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"\\rangle(?![a-zA-Z])"), ")"),
    (re.compile(r"\\(?:therefore|implies|Rightarrow)(?![a-zA-Z])"), " "),
    (re.compile(r":=|\\coloneqq"), "="),
    (re.compile(r"=>(?!=)"), r"\\ge "),
    (re.compile(r"=<"), r"\\le "),
    (re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])"), r" \\cup "),
    (re.compile(r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d{1,4})\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*[)}]?"),
     r"\\\1(\\frac{\2\\pi}{180})"),
    (re.compile(r"\\text\s*\{\s*infinity\s*\}"), r"\\infty "),
    (re.compile(r"^\s*\\text\s*\{[^{}]{0,60}(?:\bis|\bare|[:=])\s*\}\s*(?=\S)"), ""),
    (re.compile(r"\s*\$?\s*(?:\\(?:blacksquare|square|Box|qed)(?![a-zA-Z])|∎|■)\s*\$?\s*\.?$"), ""),
    (re.compile(r"\\(?:mathbf|textbf|boldsymbol|mathit|mathrm|text|bm)\s*\{\s*([-+]?\d[\d.,]{0,40})\s*\}"), r"\1"),
    (re.compile(r"^\(([0-9a-zA-Z]{1,40})\)_"), r"\1_"),
    (re.compile(r"\\mid(?![a-zA-Z])\s*([^|{}]{1,40}?)\s*\\mid(?![a-zA-Z])"), r"|\1|"),
    (re.compile(r"(?<=[\d}])\s*\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\s*\{[^{}]*\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{[^{}]*\}"
     r"(?:\^\{?\d\}?)?\s*\}$"), ""),
]  # fmt: skip
_OPEN_INTERVAL = re.compile(
    r"^(\s*(?:[a-zA-Z]\s*\\in\s*)?)([\[\]])([^\[\](){},;]{1,60})[,;]([^\[\](){},;]{1,60})([\[\]])\s*$"
)
_OUTER_MARKS = re.compile(r"^(\*{1,3}|`+|\"|“|'')(.+?)(\*{1,3}|`+|\"|”|'')\.?$", re.DOTALL)
_LEADING = re.compile(r"^\s*(?:=|\\approx|\\equiv|\\to|:)\s*(?=[^=\s])")
_TRAILING = re.compile(r"\s*(?:[,;=]|\\times|\\cdot)\s*(?=\$?\.?$)")


def _turned_brackets(match: re.Match[str]) -> str:
    """`]1, 2[` → `(1, 2)`; `[1; 2]` → `[1, 2]`."""
    start, end = {"[": "[", "]": "("}[match[2]], {"]": "]", "[": ")"}[match[5]]
    return f"{match[1]}{start}{match[3]},{match[4]}{end}"


_OPEN_DOLLARS = re.compile(r"(?<!\\)\$(\s*(?:,|;|,?\s*and|,?\s*or)\s*)\$")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_BASE_IN_WORDS = re.compile(r"_\{?\s*\\text\s*\{\s*([a-z]{3,7})\s*\}\s*\}?|_\{([a-z]{3,7})\}")
_CONNECTIVE = re.compile(
    r"(?i)^(?:so|thus|hence|therefore|then|also|consequently|finally|donc|ainsi|somit|daher|folglich|entonces|luego|portanto"
    r"|logo|quindi|dunque)\s*[,:]?\s+(?=[$\\\d(\[-]|[a-zA-Z]\s*=)"
)


def without_connective(text: str) -> str:
    """Without the "So" or "Therefore," before a formula."""
    return _CONNECTIVE.sub("", text)


def _base(match: re.Match[str]) -> str:
    number = _BASES.get(match[1] or match[2])
    return f"_{{{number}}}" if number else match[0]


_HALF = r"(?:([ap])\.\s?m\b\.?|([ap])m\b)"
_HALF_OF_DAY = re.compile(
    r"(?i)(?<=\d)(?:\s|\\[,;: ]|~){0,4}(\$?)(?:\s|~){0,2}"
    rf"(?:\\(?:text|mathrm|textrm|mbox)\s*\{{(?:\s|~){{0,4}}{_HALF}\s?\}}|{_HALF})"
)


def _halves_of_day(text: str) -> list[str]:
    return ["".join(letters).upper() + "M" for _, *letters in _HALF_OF_DAY.findall(text)]


def is_other_half_of_day(answer: str, gold: str) -> bool:
    """Say whether the last times of day of an answer and those of the gold answer ("3:00 PM", `3 \\text{ p.m.}`) stand
    in different halves of the day; a side that names no half fits either."""
    own, wanted = _halves_of_day(answer), _halves_of_day(gold)
    return bool(own and wanted) and set(own[-len(wanted) :]) != set(wanted)


def in_one_half_of_day(answer: str, gold: str) -> tuple[str, str]:
    """Return (answer, gold) with AM and PM in one spelling; without where one side names none or all are the same."""
    own, wanted = _halves_of_day(answer), _halves_of_day(gold)
    is_named = bool(own and wanted) and len({*own, *wanted}) > 1

    def spelled(match: re.Match[str]) -> str:
        return match[1] + " " + _halves_of_day("0" + match[0])[0] if is_named else match[1]

    return _HALF_OF_DAY.sub(spelled, answer), _HALF_OF_DAY.sub(spelled, gold)


def one_spelling(text: str) -> str:
    """Return an answer (not a sentence) in one spelling."""
    text = latex_characters(single_backslashes(text)).strip()
    marks = _OUTER_MARKS.match(text)
    if marks and marks[1] not in marks[2]:
        text = marks[2].strip()
    if not text.startswith("$") and not text.endswith("$"):
        text = _OPEN_DOLLARS.sub(r"\1", text)  # the dollars of `$1$ and $2$`, whose outer ones are gone
    text = _BASE_IN_WORDS.sub(_base, _SIZES.sub("", without_connective(text)))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _OPEN_INTERVAL.sub(_turned_brackets, text)
    text = _CURRENCY.sub(r"\1", text)
    return _TRAILING.sub("", _LEADING.sub("", text))
