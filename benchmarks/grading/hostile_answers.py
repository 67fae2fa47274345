"""Answers made to break a grader: towers, bombs, endless and unclosed LaTeX, broken Unicode, code.

All of it is made from a seed. None may raise, take long, grow memory or be run, whether it comes as the
prediction or as the gold answer. `injections` spell code that would create a file wherever it were evaluated.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KINDS = (
    "math", "response_math", "number", "response_number", "marked_number", "choice", "boolean3", "short_answer",
    "think_format",
)  # fmt: skip
GOLDS = {
    "math": "\\frac{1}{2}", "response_math": "2\\sqrt{3}", "choice": "B", "boolean3": "Unknown",
    "short_answer": "Paris",
}  # fmt: skip


@dataclass(frozen=True)
class Hostile:
    """One call of the grader; `family` names what is hostile about it."""

    prediction: str
    gold: str
    kind: str
    family: str
    num_options: int = 0


TOWERS = (
    "\\boxed{\\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}", "9^{9^{9^{9}}}", "9^9^9^9", "10^{10^{8}}", "10**10**8",
    "2^{2^{2^{2^{2^{2}}}}}", "(10^9)!", "1000000000!", "((9!)!)!", "9!!!!!!", "\\binom{10^9}{10^8}",
    "\\binom{1000000000}{100000000}", "99999^{99999}", "\\sum_{n=1}^{10^9} \\frac{1}{n^2}", "\\prod_{n=1}^{1000000} n",
    "\\int_0^1 x^{x^{x^{x}}} dx", "\\int e^{-x^2} \\sin(x^3) \\log(x) dx",
    "\\lim_{x \\to 0} \\frac{\\sin(\\tan(x)) - \\tan(\\sin(x))}{x^{97}}", "(x+y+z+w)^{500}", "(1+x)^{9999}",
    "\\sqrt{\\sqrt{\\sqrt{\\sqrt{2^{99999}}}}}", "(((((2^{99})^{99})^{99})^{99})^{99})", "(x^{10000}-1)/(x-1)",
    "\\frac{x^{5000}-y^{5000}}{x-y}", "\\sin(10^{300})", "\\log(10^{10^{10}})", "\\prod_{i=1}^{100} (x - i)",
    "1.0e999999999", "1e-999999999", "10^{-10^{9}}", "\\zeta(10^{8})", "\\Gamma(10^{9})", "2^{1/0}", "0^{0^{0}}",
    "\\begin{pmatrix}2&1\\\\1&3\\end{pmatrix}^{100000}", "\\gcd(10^{5000}, 3^{9000})",
    "\\int_0^{10^9} \\lfloor x \\rfloor dx", "7 \\bmod 10^{10^7}", "factorial(factorial(1000))",
    "binomial(10**9, 10**8)", "Sum(1/n**2, (n, 1, 10**9))", "Product(n, (n, 1, 10**6))", "Integral(x**x**x, (x, 0, 1))",
    "((((9**9999)**9999)**9999)**9999)", "Matrix([[1,2],[3,4]])**99999", "exp(exp(exp(exp(1000))))",
    "Interval(0, 9**9**9)", "x**9999*y**9999+1/0", "\\sqrt[10000]{10^{10000}+1}",
    "\\tan(\\tan(\\tan(\\tan(\\tan(1)))))", "0.1" + "0" * 350 + "1", "\\overline{" + "12" * 150 + "}",
    "12345678901234567891^{9999}", "|||||||||x|||||||||", "x \\in \\{n^2 : n \\in \\mathbb{Z}\\}", "\\{1,2,...,10^9\\}",
    "1+2+3+\\cdots+10^{100}", "\\frac{1}{\\frac{1}{\\frac{1}{0}}}",
)  # fmt: skip

# One letter for each kind of text that a regular expression of the grader walks through; `n` is the length.
BOMBS: tuple[Callable[[int], str], ...] = (
    lambda n: "<think>a</think>" + "a" * n + "<think><think>",
    lambda n: "<think>" + "<" * n + "</think>" + "<" * n + "</think>", lambda n: "\n" * n + "A",
    lambda n: "the answer is" + " " * n + "!", lambda n: "answer" + "*" * n + " " * n, lambda n: "answer " * (n // 7),
    lambda n: "answer is **" * (n // 12), lambda n: "final answer to the question" * (n // 28),
    lambda n: "\\boxed{" * (n // 7), lambda n: "\\boxed{1} " * (n // 10), lambda n: "\\boxed" + " " * n,
    lambda n: "\\boxed{1}" + "\\quad" * (n // 5) + "\\boxed{2}", lambda n: "\\boxed{" + "{" * n + "}" * n + "}",
    lambda n: "\\boxed{\\boxed{" * (n // 14) + "1" + "}" * (n // 7), lambda n: "####" * (n // 4),
    lambda n: "####" + " " * n, lambda n: "#### 1" + "," * n, lambda n: "#### " + "1" * n + "x",
    lambda n: "#### " + "1,111" * (n // 5) + "!", lambda n: "€" + " " * n + "1" * n + "!",
    lambda n: "€" + "1 " * n + "x", lambda n: "$" * n, lambda n: "\\(" * (n // 2), lambda n: "\\text{" * (n // 6),
    lambda n: "\\text{" + "a" * n, lambda n: "\\text" + " " * n + "{", lambda n: "1 " * (n // 2) + "!",
    lambda n: "1," * (n // 2) + "x", lambda n: "1,111" * (n // 5), lambda n: "^" + " " * n + "1",
    lambda n: "^{" + " " * n + "{" * n, lambda n: "2^" + " " * n + "!", lambda n: "1" + " " * n + "x",
    lambda n: "1" * n + " !", lambda n: "!" * n, lambda n: "3" + " !" * (n // 2), lambda n: "2^x" * (n // 3),
    lambda n: "2**" * (n // 3), lambda n: "=" * n, lambda n: "1=" * (n // 2), lambda n: "x=" * (n // 2) + "1",
    lambda n: "sqrt(" * (n // 5), lambda n: "sqrt(" + "x" * n, lambda n: "\\frac" * (n // 5),
    lambda n: "\\frac{1}" * (n // 8), lambda n: "\\frac{" * (n // 6), lambda n: "\\left(" * (n // 6), lambda n: "(" * n,
    lambda n: "[" * n + "]" * n, lambda n: "\\" * n, lambda n: "\\\\" * (n // 2), lambda n: "{" * n, lambda n: "}" * n,
    lambda n: "Finish[" * (n // 7), lambda n: "Finish" + " " * n + "[", lambda n: "Finish[" + "A" * n,
    lambda n: "not " * (n // 4) + "A", lambda n: "answer" + " " * n + "not", lambda n: "not answer" + " " * n + "** B",
    lambda n: "A or " * (n // 5), lambda n: "A " * (n // 2), lambda n: "A a" * (n // 3), lambda n: "I am " * (n // 5),
    lambda n: "*" * n + "A", lambda n: "(" * n + "A", lambda n: "option " * (n // 7) + "A",
    lambda n: "true or " * (n // 8), lambda n: "the answer " + "a" * n + " is true",
    lambda n: "statement " * (n // 10) + ": true", lambda n: "cannot be " * (n // 10),
    lambda n: "not necessarily " * (n // 16) + "true", lambda n: "\\text{True" * (n // 10),
    lambda n: "a the " * (n // 6), lambda n: "." * n, lambda n: ". " * (n // 2), lambda n: "-" * n + "1",
    lambda n: "- " * (n // 2) + "1", lambda n: "," * n, lambda n: "1." * (n // 2), lambda n: "1e" * (n // 2),
    lambda n: "1/" * (n // 2) + "1", lambda n: "1 / " * (n // 4), lambda n: "wait " * (n // 5),
    lambda n: "3" + " ~" * (n // 2), lambda n: "\\boxed{3}. The final answer is 8 " + "a" * n + "!",
    lambda n: "The answer is 1. Wait, " * (n // 23), lambda n: "<answer>" * (n // 8), lambda n: "</think>" * (n // 8),
    lambda n: "\\begin{pmatrix}" * (n // 15), lambda n: "1 & " * (n // 4) + "\\\\",
    lambda n: "\\{" * (n // 2) + "\\}" * (n // 2), lambda n: "\\cup" * (n // 4), lambda n: "答案" * (n // 2),
    lambda n: "A:" * (n // 2), lambda n: "\nA" * (n // 2), lambda n: "\\text{" + "," * n,
    lambda n: "\\text{" + "or " * (n // 3), lambda n: "1\\," * (n // 3), lambda n: "\\! " * (n // 3) + "x",
    lambda n: "~" * n + "x", lambda n: "x" + "\\ " * (n // 2) + "x", lambda n: "(or " * (n // 4),
    lambda n: "x_{" * (n // 3) + "=1", lambda n: "(x,y" * (n // 4) + ")=1", lambda n: "A" * n + "=1",
    lambda n: "$1$" * (n // 3), lambda n: "1 and/or " * (n // 9), lambda n: "\\pm" * (n // 3),
    lambda n: "{" * (n // 2) + "1" + "}" * (n // 2), lambda n: "1" + " " * (n // 2) + "\\cdot" + " " * (n // 2) + "!",
    lambda n: "1{,}" * (n // 4), lambda n: "\\begin{" * (n // 7), lambda n: "\\end{pmatrix}" * (n // 13),
    lambda n: "x" + "=" * n + "1", lambda n: "1," * (n // 2) + "1",
    lambda n: "\\boxed{1}" + "final answer is the " * (n // 20),
    lambda n: "\\boxed{1}" + "final answer: " * (n // 14), lambda n: "réponse" + " " * n, lambda n: "答案是" * (n // 3),
    lambda n: "Ответ: не " * (n // 10), lambda n: "ответ" + " *" * (n // 2), lambda n: "½" * n, lambda n: "√" * n + "2",
    lambda n: "x²" * (n // 2), lambda n: "a=1," * (n // 4), lambda n: "a=1 and b=2 or " * (n // 15),
    lambda n: "(a,b)=" * (n // 6), lambda n: "\\\\frac" * (n // 6), lambda n: "\\\\boxed{" * (n // 8),
    lambda n: "A, B, " * (n // 6), lambda n: "A and B are " * (n // 12), lambda n: "not A, " * (n // 7) + "so B",
    lambda n: "(a)" * (n // 3), lambda n: "5" + "x" * n, lambda n: "x^2 " * (n // 4), lambda n: "\\{x\\mid " * (n // 8),
    lambda n: "5 \\text{" + "cm " * (n // 3) + "}", lambda n: "]1,2[" * (n // 5), lambda n: "**" * (n // 2) + "5",
    lambda n: "有1个" * (n // 3), lambda n: "\\\\" * (n // 2) + "frac", lambda n: "\\overline{AB}" * (n // 13) + "=5",
    lambda n: '"final answer is ' * (n // 17) + "\\boxed{1}", lambda n: "1 或 " * (n // 4),
    lambda n: "\\pm 1" * (n // 5), lambda n: "I choose" + " " * n, lambda n: "option A" + " " * n + "(",
    lambda n: "Option A (" * (n // 10), lambda n: "if the answer is " * (n // 17) + "A",
    lambda n: "The answer is A. Wait, option B " * (n // 32), lambda n: "answer is A or " * (n // 15),
    lambda n: "if " * (n // 3) + "true", lambda n: "not " * (n // 4) + "that", lambda n: "so it is true. " * (n // 15),
    lambda n: "nothing, " * (n // 9) + "true", lambda n: "the answer is " + "A. " * (n // 3),
    lambda n: "the answer is " + "St. " * (n // 4), lambda n: "minus " * (n // 6) + "5",
    lambda n: "= " * (n // 2) + "minus 5",
    lambda n: "is" + " " * n + "minus 5", lambda n: "–" * n + "5", lambda n: "negative " * (n // 9) + "5",
    lambda n: "#### Step 1\n" * (n // 12), lambda n: "#### " + "*" * n + "answer",
    lambda n: "#### answer" + "." * n + "x",
)  # fmt: skip

STRANGE = (
    "\x00", "1\x002", "\ud800", "12\udfff", "\ud800\udc00", "١٢", "１２", "１/２", "½", "²", "x²", "∞", "−12", "–12",
    "12\u2028", "\u202e21", "\ufeff12", "12\u200b", "𝟏𝟐", "①", "Ⅻ", "π", "√2", "½\\frac", "\x1b[2J", "\r\n12\r\n",
    "\t12\t", "ﬁ", "İ", "ß", "\u0000" * 100, "\U0010ffff", "a\u0301" * 500, "٪", "٫", "12٫5", "௧௨", "B\u0300", "Ｂ",
    "В", "\\boxed{\ud800}", "$\udc00$", "#### \ud83d",
)  # fmt: skip

_SMALL = [
    "x", "y", "z", "n", "\\pi", "\\theta", "e", "i", "0", "1", "2", "3", "7", "12", "0.5", "\\infty", "\\%", "100",
    "\\alpha",
]  # fmt: skip
_ONE = [
    "\\sqrt{{{0}}}", "({0})", "\\left({0}\\right)", "|{0}|", "\\{{{0}\\}}", "{0}!", "{0}^\\circ", "\\sin({0})",
    "\\log {0}", "-{0}", "\\overline{{{0}}}", "\\text{{{0}}}", "\\boxed{{{0}}}", "\\lfloor {0} \\rfloor", "[{0})",
]  # fmt: skip
_TWO = [
    "\\frac{{{0}}}{{{1}}}", "{0}+{1}", "{0}-{1}", "{0}\\cdot {1}", "{0}^{{{1}}}", "{0}, {1}", "{0}={1}",
    "\\binom{{{0}}}{{{1}}}", "{0} \\le {1}", "{0}\\cup {1}", "{0}_{{{1}}}", "\\int_{{{0}}}^{{{1}}} x dx",
    "\\sum_{{n={0}}}^{{{1}}} n", "\\log_{{{0}}} {1}", "{0} \\text{{ or }} {1}",
    "\\begin{{pmatrix}} {0} \\\\ {1} \\end{{pmatrix}}", "\\frac{{d}}{{d {0}}} {1}", "{0} \\pm {1}", "{0} \\bmod {1}",
    "{0}{1}", "\\lim_{{x \\to {0}}} {1}",
]  # fmt: skip


def formula(rng: random.Random, depth: int) -> str:
    """Return a random LaTeX formula, grammatical, at most `depth` deep."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(_SMALL)
    if rng.random() < 0.35:
        return rng.choice(_ONE).format(formula(rng, depth - 1))
    return rng.choice(_TWO).format(formula(rng, depth - 1), formula(rng, depth - 1))


def broken(rng: random.Random, text: str) -> str:
    """Return the text with a few characters deleted, doubled, swapped or made strange."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text) + 1)
        piece = rng.choice(
            ["{", "}", "\\", "$", "(", "]", "^", "_", "&", "!", "\x00", "\ud800", "\u0660", "=", "\\left", "\\frac", ""]
        )
        text = text[:place] + piece + text[place + rng.randint(0, 2) :]
    return text


def injections(path: str) -> list[str]:
    """Return sixty spellings of code that creates the file `path` where it is evaluated, read by SymPy, or run."""
    system, opened = f"__import__('os').system('touch {path}')", f"open('{path}','w')"
    codes = [
        system, opened, f"{opened}.write('x')", f"exec(\"{opened}\")", f"eval(\"{opened}\")", f"[{opened}]",
        f"({opened},)", f"{{{opened}}}", f"1+{system}", f"{system}+1", f"0 if {opened} else 1", f"{opened} or 1",
        f"[{opened} for _ in [1]]", f"(lambda: {opened})()", f"sympify(\"{opened}\")", f"S(\"{opened}\")",
        f"N({opened})", f"().__class__.__base__.__subclasses__()[0].__init__.__globals__['{path}']",
        f"__builtins__['open']('{path}','w')", f"getattr(__builtins__,'open')('{path}','w')",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('{path}','w')",
        f"Function('{path}')({opened})", f"Integral({opened}, x)", f"Sum({opened}, (x, 1, 2))",
        f"Lambda(x, {opened})(1)", f"lambdify(x, \"{opened}\")(1)", f"parse_expr(\"{opened}\")",
        f"parse_latex(\"{opened}\")", f"preview(x, viewer='file', filename='{path}')",
        f"pickle.loads(b\"cos\\nsystem\\n(S'touch {path}'\\ntR.\")", f"subprocess.run(['touch', '{path}'])",
        f"os.system('touch {path}')", f"pathlib.Path('{path}').touch()", f"print(1, file={opened})", f"f'{{{opened}}}'",
        f"x = {opened}", f"import os; os.system('touch {path}')", f"from os import system; system('touch {path}')",
        f"@{system}", f"`touch {path}`", f"$(touch {path})", f"; touch {path}", f"| touch {path}",
        f"\\immediate\\write18{{touch {path}}}", f"\\input{{|touch {path}}}", f"\\openout1={path}",
        f"\\directlua{{os.execute('touch {path}')}}", f"\\text{{{system}}}", f"\\operatorname{{{opened}}}",
        f"\\mathrm{{{opened}}}", f"${system}$", f"\\boxed{{{system}}}", f"\\frac{{{system}}}{{2}}",
        f"\\sqrt{{{opened}}}", f"x^{{{opened}}}", f"\\sin({system})", f"{{{{{opened}}}}}", f"{{%{opened}%}}",
        f"${{{system}}}", f"!!python/object/apply:os.system ['touch {path}']",
    ]  # fmt: skip
    assert len(codes) == 60
    return codes


def _text(rng: random.Random, family: str, path: str) -> str:
    if family == "tower":
        return rng.choice(["{}", "${}$", "\\boxed{{{}}}", "The answer is ${}$."]).format(rng.choice(TOWERS))
    if family == "bomb":
        return rng.choice(BOMBS)(rng.choice([50, 500, 1_900, 3_999, 9_000, 19_900]))
    if family == "megabyte":
        return rng.choice(BOMBS)(1_000_000)
    if family == "strange":
        return rng.choice(["{}", "\\boxed{{{}}}", "#### {}", "The answer is {}."]).format(rng.choice(STRANGE))
    if family == "code":
        return rng.choice(injections(path))
    if family == "broken":
        return broken(rng, formula(rng, rng.randint(1, 5)))
    if family == "noise":
        return "".join(
            chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x110000)])) for _ in range(rng.randint(1, 300))
        )
    return rng.choice(["{}", "${}$", "\\boxed{{{}}}"]).format(formula(rng, rng.randint(1, 6)))


FAMILIES = {
    "formula": 40, "broken": 24, "bomb": 14, "strange": 7, "noise": 6, "code": 4, "tower": 4, "megabyte": 1,
}  # fmt: skip


def hostile_answers(seed: int, number: int, path: str) -> Iterator[Hostile]:
    """Return `number` calls of the grader; half have a harmless gold, a third are hostile on both sides, the rest only
    as gold. `path` is the file that injected code would create."""
    rng = random.Random(seed)
    families, weights = list(FAMILIES), list(FAMILIES.values())
    for _ in range(number):
        family = rng.choices(families, weights)[0]
        kind = (
            rng.choice(KINDS)
            if family in ("bomb", "megabyte", "strange", "code", "noise")
            else rng.choice(("math", "response_math", *KINDS))
        )
        text = _text(rng, family, path)
        side = rng.random()
        gold = GOLDS.get(kind, "12") if side < 0.5 else _text(rng, family, path)
        if side > 0.83:
            text, gold = rng.choice(["12", "\\boxed{B}", "Unknown", "\\frac{1}{2}", "#### 12"]), text
        yield Hostile(text, gold, kind, family, rng.choice([0, 3, 4, 5]))
