"""Symbolic comparison of two mathematical answers, by math-verify. Runs only in a worker process (pool.py).

What a model wrote is never evaluated as code: LaTeX goes through latex2sympy2_extended's grammar, plain
numbers through math-verify's number pattern, and a SymPy-like text (`Integral(x, x)`) through a reader of our
own over Python's syntax tree with a list of allowed names. Sizes are bounded before anything is parsed; time
and memory are bounded by the process.
"""

import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from espalier.data.answers.monomials import ends_with_variable
from espalier.data.answers.pool import NOT_EQUAL
from espalier.data.answers.sympy_text import SYMPY_LIKE, TooHard, read_sympy

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

_MAX_CHARS = 4000
_MAX_DIGITS = 400
_MAX_DEPTH = 60
_NUMBER_WITH_SIGN = re.compile(r"[-+\\$€£\d.,\s]*\d\s*(?:\\?%|[€£$])?\s*")
_WORDS = re.compile(r"(?:\\text\w*\{)?[A-Za-z][A-Za-z' .-]{0,200}\}?")
_LATEX_ONLY = (LatexExtractionConfig(),)
_WITH_LETTERS = (
    LatexExtractionConfig(normalization_config=replace(LatexExtractionConfig().normalization_config, units=False)),
)
_BOTH = (LatexExtractionConfig(), ExprExtractionConfig())
_WIDE_POWER = re.compile(
    r"\^\s*\{?\s*[(\-\\{]*\s*\d{5,}|\d{4,}\s*!(?!=)|[\d)}]\s*!\s*!\s*!|\d\s*\^[^,;=]{1,20}\^[^,;=]{1,20}\^"
    r"|\d\*\*[^,;]{1,20}\*\*\s*\d"
)


def check_bounds(text: str) -> None:
    """Raise TooHard where a text is too long, too deep or holds towers, long numbers or wide powers."""
    if len(text) > _MAX_CHARS:
        raise TooHard(f"longer than {_MAX_CHARS} characters")
    if re.search(rf"\d{{{_MAX_DIGITS}}}", text):
        raise TooHard(f"a number of more than {_MAX_DIGITS} digits")
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise TooHard(f"nested deeper than {_MAX_DEPTH}")
    if _WIDE_POWER.search(text):
        raise TooHard("a power or factorial too large to compute")


@lru_cache(maxsize=2048)
def _parsed(text: str, is_latex: bool) -> tuple[Any, ...]:
    """Return what math-verify finds. Of a formula that ends with a variable it strips no unit: it takes most letters
    for one (`3x + 2t` would be `3x + 2`)."""
    latex = _WITH_LETTERS if ends_with_variable(text.strip("$ ")) else _LATEX_ONLY
    values = parse(text, extraction_config=latex if is_latex else _BOTH, parsing_timeout=None, raise_on_error=False)
    return tuple(values)


def as_latex(text: str) -> str:
    """Return a formula as people type it (`pi/3`, `sqrt(2)`, `x**2`) in LaTeX's spelling."""
    text = re.sub(
        r"(?<![\\a-zA-Z])(pi|infinity|infty)(?![a-zA-Z])", lambda m: "\\" + m[1].replace("inity", "ty") + " ", text
    )
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\(([^()]{1,200})\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])(ln|log|sin|cos|tan)(?=\s*[(_])", r"\\\1", text)
    text = re.sub(r"\s*\\cdot\s*(?=[a-zA-Z](?![a-zA-Z]))", "", text)
    return text.replace("**", "^")


def read_formula(text: str, is_wrapped: bool) -> tuple[Any, ...]:
    """Return what math-verify reads in a text; with `is_wrapped` the whole text is one LaTeX formula."""
    check_bounds(text)
    if not is_wrapped:
        return _parsed(text, False)
    values = _parsed(f"${as_latex(text)}$", True)
    if all(isinstance(value, str) for value in values) and _NUMBER_WITH_SIGN.fullmatch(text):
        return _parsed(f"${text}$", False)
    return values


def _read_bare(text: str) -> tuple[Any, ...]:
    """Return the LaTeX grammar alone, without math-verify's clean-up (which takes a lone letter for a unit)."""
    try:
        return (latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None),)
    except Exception:
        return ()


def is_equal(gold: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    """Return math-verify's verdict without its timeouts."""
    return bool(verify(list(gold), list(answer), timeout_seconds=None, raise_on_error=False))


def _is_equal_sympy(gold: Any, answers: tuple[Any, ...]) -> bool:
    """Return a SymPy-like gold against what was read: equal as written, after evaluation, or by math-verify."""
    values = [answer for answer in answers if not isinstance(answer, str)]
    same_names = [(_renamed(gold), _renamed(answer)) for answer in values]
    if any(one == other or str(one) == str(other) for one, other in same_names):
        return True
    evaluated = [(_evaluated(one), _evaluated(other)) for one, other in same_names]
    if any(one == other or str(one) == str(other) for one, other in evaluated):
        return True
    return any(verify([one], [other], timeout_seconds=None) for one, other in evaluated)


def _renamed(value: Any) -> Any:
    """Return the value with symbols that differ by their names alone."""
    try:
        return value.xreplace({symbol: sympy.Symbol(symbol.name, real=True) for symbol in value.free_symbols})
    except Exception:
        return value


def _evaluated(value: Any) -> Any:
    """With integrals, sums and limits worked out, where that can be done."""
    try:
        return value.doit() if hasattr(value, "doit") else value
    except Exception:
        return value


def compare(gold: str, answer: str, forms: list[tuple[bool, bool]]) -> tuple[str, str]:
    """Return (verdict, reason): "right", "wrong" or "unparseable".

    `forms` are pairs (gold as one formula, answer as one formula) to try in turn; the first in which both
    sides can be read and are equal is right.
    """
    is_read = False
    is_gold_read = False
    for wrap_gold, wrap_answer in forms:
        one, other = read_formula(gold, wrap_gold), read_formula(answer, wrap_answer)
        is_gold_read |= _is_understood(one, gold)
        is_read |= _is_understood(other, answer)
        if one and other and is_equal(one, other):
            return "right", "equal by math-verify"
    for text, counterpart in ((gold, answer), (answer, gold)):
        if SYMPY_LIKE.search(text) or text.isidentifier():
            value = read_sympy(text)
            if value is not None:
                is_gold_read |= text is gold
                is_read |= text is answer
                if _is_equal_sympy(value, (*read_formula(counterpart, True), *_read_bare(counterpart))):
                    return "right", "equal by SymPy"
    if not is_read:
        return "unparseable", "the answer cannot be read as mathematics"
    if not is_gold_read:
        return "unparseable", "the gold answer cannot be read as mathematics"
    return "wrong", NOT_EQUAL


_WARM_UP = (
    ("\\frac{1}{2}", "0.5", "right"),
    ("x^2+2x+1", "(x+1)^2", "right"),
    ("(1,2]", "(1,2]", "right"),
    ("\\{1,2\\}", "\\{2,1\\}", "right"),
    ("\\sqrt{8}", "2\\sqrt{2}", "right"),
    ("x \\le 5", "5 \\ge x", "right"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "right"),
    ("\\pi", "3", "wrong"),
    ("90^\\circ", "90", "right"),
    ("1,2", "1,3", "wrong"),
    ("y = 2x + 3", "y - 2x = 3", "right"),
    ("\\frac{x^2}{4} + \\frac{y^2}{3} = 1", "3x^2 + 4y^2 = 12", "right"),
    ("F_n = \\sum_{k=0}^{n-1} F_k F_{n-k}", "F_n = \\sum_{k=0}^{n-1} F_{n-k} F_k", "right"),
    ("(-\\infty, 0) \\cup [2, \\infty)", "(-\\infty,0)\\cup[2,\\infty)", "right"),
    ("\\int_0^1 x dx", "\\frac{1}{2}", "right"),
    ("\\log_2 8", "3", "right"),
    ("\\sin^2 x + \\cos^2 x", "1", "right"),
    ("3 + 4i", "4i + 3", "right"),
    ("\\binom{5}{2}", "10", "right"),
    ("125\\text{ miles}", "125", "right"),
)


def _is_understood(found: tuple[Any, ...], text: str) -> bool:
    """Say whether more was found than the text itself, or the text is a word."""
    return any(not isinstance(value, str) for value in found) or _WORDS.fullmatch(text.strip()) is not None


def warm_up() -> None:
    """Fill the parser's caches and prove that it works: an antlr version that does not fit fails here."""
    for gold, answer, verdict in _WARM_UP:
        given, reason = compare(gold, answer, [(True, True)])
        if given != verdict:
            raise RuntimeError(f"the LaTeX parser does not work: '{gold}' against '{answer}' is {given} ({reason})")
