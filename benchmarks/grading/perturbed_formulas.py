"""Invented answers that are formulas in unknowns: polynomials, equations, inequalities, rational functions; each with
rewrites that are equal and changes that are different."""

import random
from collections.abc import Callable

from benchmarks.grading.perturbed_scalars import Answer


def _terms(coefficients: list[int], powers: list[int], name: str = "x") -> str:
    """Return `3x^2-x+5` from coefficients and powers, in the order given."""
    text = ""
    for coefficient, power in zip(coefficients, powers, strict=True):
        size = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
        text += ("-" if coefficient < 0 else "+" if text else "") + size
        text += "" if power == 0 else name if power == 1 else f"{name}^{power}" if power < 10 else f"{name}^{{{power}}}"
    return text


def _polynomial(rng: random.Random) -> Answer:
    c = [rng.choice([-1, 1]) * rng.randint(1, 9) for _ in range(3)]
    gold = _terms(c, [2, 1, 0])
    answer = Answer(gold, _terms([c[0], c[1], c[2] + 10], [2, 1, 0]), "polynomial", is_scalar=False)
    answer.equal = [
        ("order", _terms(c[::-1], [0, 1, 2])), ("braces", gold.replace("^2", "^{2}")), ("f(x)=", f"f(x)={gold}"),
        ("spaces", gold.replace("+", " + ").replace("-", " - ")),
        ("cdot", gold.replace("x^2", "x \\cdot x") if abs(c[0]) == 1 else gold + "+0"),
        ("bracket", f"x({_terms(c[:2], [1, 0])}){_terms([c[2]], [0]) if c[2] < 0 else '+' + str(c[2])}"),
    ]  # fmt: skip
    answer.different = [
        ("sign", _terms([-c[0], *c[1:]], [2, 1, 0])), ("sign", _terms([c[0], -c[1], c[2]], [2, 1, 0])),
        ("power", _terms(c, [3, 1, 0])), ("dropped", _terms(c[:2], [2, 1])),
        ("all signs", _terms([-x for x in c], [2, 1, 0])), ("other unknown", _terms(c, [2, 1, 0], "y")),
    ]  # fmt: skip
    return answer


def _factored(rng: random.Random) -> Answer:
    a, b = rng.sample(range(2, 12), 2)
    answer = Answer(f"(x+{a})(x-{b})", f"(x+{a + 1})(x-{b})", "factored polynomial", is_scalar=False)
    answer.equal = [
        ("order", f"(x-{b})(x+{a})"),
        ("expanded", _terms([1, a - b, -a * b], [2, 1, 0]).replace("+0x", "").replace("-0x", "")),
    ]
    answer.equal += [
        ("left right", f"\\left(x+{a}\\right)\\left(x-{b}\\right)"),
        ("cdot", f"(x+{a}) \\cdot (x-{b})"),
        ("swapped", f"({a}+x)(-{b}+x)"),
    ]
    answer.different = [
        ("signs", f"(x-{a})(x+{b})"),
        ("sign", f"-(x+{a})(x-{b})"),
        ("factor lost", f"(x+{a})"),
        ("square", f"(x+{a})(x-{b})^2"),
    ]
    return answer


def _equation(rng: random.Random) -> Answer:
    m, b = rng.sample(range(2, 15), 2)
    answer = Answer(f"y={m}x+{b}", f"y={m + 1}x+{b}", "equation", is_scalar=False)
    answer.equal = [
        ("order", f"y={b}+{m}x"),
        ("spaces", f"y = {m} x + {b}"),
        ("sides", f"{m}x+{b}=y"),
        ("cdot", f"y={m}\\cdot x+{b}"),
    ]
    answer.different = [
        ("sign", f"y={m}x-{b}"),
        ("sign", f"y=-{m}x+{b}"),
        ("swapped", f"y={b}x+{m}"),
        ("unknowns", f"x={m}y+{b}"),
        ("dropped", f"y={m}x"),
    ]
    return answer


def _circle(rng: random.Random) -> Answer:
    h, k, r = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 30)
    gold = f"(x-{h})^2+(y+{k})^2={r}"
    answer = Answer(gold, f"(x-{h})^2+(y+{k})^2={r + 1}", "equation of a circle", is_scalar=False)
    answer.equal = [
        ("order", f"(y+{k})^2+(x-{h})^2={r}"),
        ("braces", gold.replace("^2", "^{2}")),
        ("spaces", gold.replace("=", " = ")),
    ]
    answer.equal += [("left right", gold.replace("(", "\\left(").replace(")", "\\right)"))]
    answer.different = [
        ("sign", f"(x+{h})^2+(y+{k})^2={r}"),
        ("sign", f"(x-{h})^2-(y+{k})^2={r}"),
        ("square lost", f"(x-{h})+(y+{k})^2={r}"),
    ]
    return answer


def _inequality(rng: random.Random) -> Answer:
    n, (sign, flipped, wrong) = (
        rng.randint(-20, 40),
        rng.choice([("\\le", "\\ge", "<"), ("\\ge", "\\le", ">"), ("<", ">", "\\le"), (">", "<", "\\ge")]),
    )
    answer = Answer(f"x {sign} {n}", f"x {sign} {n + 1}", "inequality", is_scalar=False)
    answer.equal = [
        ("sides", f"{n} {flipped} x"),
        ("long name", f"x {sign.replace('le', 'leq').replace('ge', 'geq')} {n}"),
        ("braces", f"x {sign} {{{n}}}"),
    ]
    answer.different = [
        ("strictness", f"x {wrong} {n}"),
        ("direction", f"x {flipped} {n}"),
        ("equation", f"x = {n}"),
        ("sign", f"x {sign} {-n or 5}"),
        ("number", str(n)),
    ]
    return answer


def _rational(rng: random.Random) -> Answer:
    a, b = rng.sample(range(2, 12), 2)
    answer = Answer(f"\\frac{{x+{a}}}{{x-{b}}}", f"\\frac{{x+{a}}}{{x-{b + 1}}}", "rational function", is_scalar=False)
    answer.equal = [
        ("slash", f"(x+{a})/(x-{b})"),
        ("dfrac", f"\\dfrac{{x+{a}}}{{x-{b}}}"),
        ("order", f"\\frac{{{a}+x}}{{-{b}+x}}"),
        ("signs", f"\\frac{{-x-{a}}}{{{b}-x}}"),
    ]
    answer.different = [
        ("upside down", f"\\frac{{x-{b}}}{{x+{a}}}"),
        ("sign", f"-\\frac{{x+{a}}}{{x-{b}}}"),
        ("sign", f"\\frac{{x-{a}}}{{x-{b}}}"),
        ("numerator", f"x+{a}"),
    ]
    return answer


FORMULAS: list[Callable[[random.Random], Answer]] = [
    _polynomial, _factored, _equation, _circle, _inequality, _rational,
]  # fmt: skip
