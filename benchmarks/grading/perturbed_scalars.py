"""Invented answers that are one number (in the forms that MATH's answers take, Hendrycks et al. 2021), each with
rewrites that are equal and changes that are different by the way they are made."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Answer:
    """An answer in LaTeX with (rule, text) of its rewrites; `other` is a different answer of the same form."""

    gold: str
    other: str
    form: str
    equal: list[tuple[str, str]] = field(default_factory=list)
    different: list[tuple[str, str]] = field(default_factory=list)
    is_scalar: bool = True


def _frac(value: Fraction, command: str = "\\frac") -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _decimal(value: Fraction, places: int) -> str:
    scaled = round(value * 10**places)
    digits = str(abs(scaled)).rjust(places + 1, "0")
    whole, part = (digits[:-places], digits[-places:]) if places else (digits, "")
    return ("-" if scaled < 0 else "") + whole + ("." + part if places else "")


def _near(value: Fraction) -> list[tuple[str, str]]:
    """Return decimals off by one part in 1,000 and in 10,000."""
    return [(f"off by {share:g}", _decimal(value * (1 + Fraction(str(share))), 8)) for share in (1e-3, 1e-4)]


def _integer(rng: random.Random) -> Answer:
    n = rng.choice([rng.randint(2, 99), rng.randint(1001, 99999), -rng.randint(2, 500)])
    answer = Answer(str(n), str(n + rng.choice([-1, 1, 10])), "integer")
    answer.equal = [
        ("trailing zeros", f"{n}.00"), ("unit", f"{n} \\text{{ apples}}"), ("unit", f"{n}\\text{{ cm}}^2"),
        ("fraction", f"\\frac{{{3 * n}}}{{3}}"), ("x=", f"x = {n}"), ("x=", f"n={n}"),
        ("sum", f"{n - 4}+4"), ("mathrm unit", f"{n}\\,\\mathrm{{m}}"), ("chain", f"{n - 4}+4={n}"),
    ]  # fmt: skip
    if abs(n) > 999:
        head, tail = str(n)[:-3], str(n)[-3:]
        answer.equal += [("thousands", f"{head}{mark}{tail}") for mark in (",", "{,}", "\\,", ",\\!", "\\!,")[:4]]
        answer.different += [("dropped group", head), ("dropped group", f"{head}.{tail}")]
    answer.different += [
        ("sign", str(-n)), ("x100", str(100 * n)), ("/100", _decimal(Fraction(n, 100), 2)), *_near(Fraction(n)),
        ("percent", f"{n}\\%"), ("digit appended", f"{n}0"), ("squared", f"{n}^2"), ("unknown left", f"{n}x"),
        ("plus minus", f"\\pm {abs(n)}"), ("other unit number", f"{n + 1} \\text{{ apples}}"),
        ("root", f"\\sqrt{{{abs(n)}}}"),
    ]  # fmt: skip
    return answer


def _decimal_number(rng: random.Random) -> Answer:
    places = rng.randint(1, 3)
    value = Fraction(rng.randint(1, 5000) * 10 + rng.randint(1, 9), 10**places)
    gold = _decimal(value, places)
    answer = Answer(gold, _decimal(value + Fraction(1, 10**places), places), "decimal")
    answer.equal = [("trailing zeros", gold + "0"), ("fraction", _frac(value)), ("x=", f"x={gold}")]
    answer.equal += [("leading zero", gold[1:])] if gold.startswith("0.") else []
    answer.different = [("sign", "-" + gold), ("x100", _decimal(value * 100, places)), *_near(value)]
    answer.different += [("/100", _decimal(value / 100, places + 2)), ("point lost", gold.replace(".", "").lstrip("0"))]
    return answer


def _fraction(rng: random.Random) -> Answer:
    value = Fraction(0)
    while value.denominator < 2:
        value = Fraction(rng.randint(-40, 60), rng.choice([2, 3, 4, 5, 7, 8, 9, 11, 13, 24]))
    gold, a, b = _frac(value), value.numerator, value.denominator
    answer = Answer(gold, _frac(value + Fraction(rng.choice([-1, 1, 2]), b * 1)), "fraction")
    answer.equal = [
        ("dfrac", _frac(value, "\\dfrac")), ("tfrac", _frac(value, "\\tfrac")), ("slash", f"{a}/{b}"),
        ("not reduced", f"\\frac{{{2 * a}}}{{{2 * b}}}"), ("sign inside", f"\\frac{{{a}}}{{{b}}}"),
        ("x=", f"x = {gold}"), ("over", f"{{{a} \\over {b}}}"), ("unit", f"{gold} \\text{{ hours}}"),
        ("spaces", f"\\frac {{ {a} }} {{ {b} }}"),
    ]  # fmt: skip
    if 0 < a < 10 and b < 10:
        answer.equal += [("short", f"\\frac{a}{b}"), ("short", f"\\frac{{{a}}}{b}"), ("short", f"\\frac{a}{{{b}}}")]
    if 1000 % b == 0:
        answer.equal.append(("decimal", _decimal(value, 3)))
    answer.different = [
        ("sign", _frac(-value)), ("upside down", _frac(1 / value)), ("x100", _frac(value * 100)), *_near(value),
        ("/100", f"\\frac{{{a}}}{{{b * 100}}}"), ("numerator", str(a)), ("plus one", _frac(value + 1)),
    ]  # fmt: skip
    answer.different = [(rule, text) for rule, text in answer.different if text[-3:] != "{1}"]
    return answer


def _mixed(rng: random.Random) -> Answer:
    whole, b = rng.randint(2, 20), rng.choice([3, 4, 5, 7, 8])
    a = rng.randint(1, b - 1)
    value, part = whole + Fraction(a, b), f"\\frac{{{a}}}{{{b}}}"
    answer = Answer(f"{whole}{part}", f"{whole + 1}{part}", "mixed number")
    answer.equal = [
        ("improper", _frac(value)),
        ("spaces", f"{whole} {part}"),
        ("slash", f"{value.numerator}/{value.denominator}"),
    ]
    answer.equal += [("dfrac", f"{whole}\\dfrac{{{a}}}{{{b}}}"), ("sum", f"{whole}+{part}"), ("x=", f"x={whole}{part}")]
    answer.equal += [("decimal", _decimal(value, 3))] if 1000 % b == 0 else []
    answer.different = [("product", f"{whole}\\cdot{part}"), ("difference", f"{whole}-{part}"), ("part", part)]
    answer.different += [("whole part", str(whole)), ("sign", f"-{whole}{part}"), *_near(value)]
    return answer


def _radical(rng: random.Random) -> Answer:
    c, k = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    gold = f"{c}\\sqrt{{{k}}}"
    answer = Answer(gold, f"{c + 1}\\sqrt{{{k}}}", "radical")
    answer.equal = [
        ("inside", f"\\sqrt{{{c * c * k}}}"), ("cdot", f"{c} \\cdot \\sqrt{{{k}}}"),
        ("order", f"\\sqrt{{{k}}} \\cdot {c}"), ("power", f"{c}\\cdot {k}^{{1/2}}"),
        ("rationalised", f"\\frac{{{c * k}}}{{\\sqrt{{{k}}}}}"), ("x=", f"x={gold}"), ("unit", f"{gold}\\text{{ cm}}"),
        ("times", f"{c}\\times\\sqrt{{{k}}}"),
    ]  # fmt: skip
    answer.equal += [("short", f"{c}\\sqrt{k}"), ("short", f"{c}\\sqrt {k}")] if k < 10 else []
    answer.different = [
        ("factor lost", f"\\sqrt{{{k}}}"), ("sum", f"{c}+\\sqrt{{{k}}}"), ("inside", f"{c}\\sqrt{{{k + 1}}}"),
        ("sign", f"-{gold}"), ("cube root", f"{c}\\sqrt[3]{{{k}}}"), ("root lost", f"{c * k}"),
        ("near", _decimal(Fraction(str(round(c * k**0.5 * 1.0001, 9))), 6)), ("plus minus", f"\\pm {gold}"),
    ]  # fmt: skip
    return answer


def _radical_sum(rng: random.Random) -> Answer:
    a, b, k = rng.randint(1, 12), rng.randint(2, 9), rng.choice([2, 3, 5, 7])
    gold = f"{a}+{b}\\sqrt{{{k}}}"
    answer = Answer(gold, f"{a + 1}+{b}\\sqrt{{{k}}}", "sum with a radical")
    answer.equal = [("order", f"{b}\\sqrt{{{k}}}+{a}"), ("spaces", f"{a} + {b} \\sqrt{{{k}}}"), ("x=", f"x={gold}")]
    answer.equal += [
        ("inside", f"{a}+\\sqrt{{{b * b * k}}}"),
        ("halves", f"\\frac{{{2 * a}+{2 * b}\\sqrt{{{k}}}}}{{2}}"),
    ]
    answer.different = [("sign", f"{a}-{b}\\sqrt{{{k}}}"), ("swapped", f"{b}+{a}\\sqrt{{{k}}}")]
    answer.different += [("dropped", f"{b}\\sqrt{{{k}}}"), ("plus minus", f"{a}\\pm {b}\\sqrt{{{k}}}")]
    return answer if a != b else _radical_sum(rng)


def _pi(rng: random.Random) -> Answer:
    c, d = rng.randint(2, 19), rng.choice([1, 1, 3, 6, 7])
    if Fraction(c, d).denominator != d:
        return _pi(rng)
    gold = f"{c}\\pi" if d == 1 else f"\\frac{{{c}\\pi}}{{{d}}}"
    answer = Answer(gold, f"{c + 1}\\pi" if d == 1 else f"\\frac{{{c + d}\\pi}}{{{d}}}", "multiple of pi")
    answer.equal = [
        ("cdot", f"{c} \\cdot \\pi" if d == 1 else f"\\frac{{{c}}}{{{d}}}\\cdot\\pi"),
        ("x=", f"\\theta={gold}"),
    ]
    answer.equal += [
        ("order", f"\\pi\\cdot {c}" if d == 1 else f"\\frac{{{c}}}{{{d}}}\\pi"),
        ("unit", f"{gold}\\text{{ cm}}^2"),
    ]
    answer.equal += [("slash", f"{c}\\pi/{d}")] if d > 1 else [("fraction", f"\\frac{{{2 * c}\\pi}}{{2}}")]
    answer.different = [
        ("pi lost", _frac(Fraction(c, d)) if d > 1 else str(c)),
        ("sign", f"-{gold}"),
        ("sum", f"{c}+\\pi"),
    ]
    answer.different += [
        ("power", f"{c}\\pi^2"),
        ("3.14", _decimal(Fraction(c, d) * Fraction(314, 100), 6)),
        ("below", f"\\frac{{{c}}}{{\\pi}}"),
    ]
    return answer


def _percent(rng: random.Random) -> Answer:
    p = rng.randint(2, 97)
    answer = Answer(f"{p}\\%", f"{p + 1}\\%", "percent")
    answer.equal = [("bare sign", f"{p}%"), ("space", f"{p} \\%"), ("zeros", f"{p}.0\\%"), ("x=", f"x={p}\\%")]
    answer.different = [
        ("x100", f"{p}00\\%"),
        ("/100", f"{_decimal(Fraction(p, 100), 2)}\\%"),
        ("sign", f"-{p}\\%"),
        ("off", str(p + 1)),
    ]
    return answer


def _degrees(rng: random.Random) -> Answer:
    d = rng.randint(2, 179)
    answer = Answer(f"{d}^\\circ", f"{d + 1}^\\circ", "degrees")
    answer.equal = [
        ("sign lost", str(d)),
        ("braces", f"{d}^{{\\circ}}"),
        ("word", f"{d} \\text{{ degrees}}"),
        ("sign", f"{d}°"),
    ]
    answer.equal += [("x=", f"x={d}^\\circ"), ("x=", f"\\angle A = {d}^\\circ")]
    answer.different = [
        ("off", str(d + 1)),
        ("sign", f"-{d}^\\circ"),
        ("x100", f"{d}00^\\circ"),
        ("supplement", f"{180 - d}^\\circ"),
    ]
    if d == 90:
        answer.different.pop()
    return answer


def _money(rng: random.Random) -> Answer:
    m = rng.choice([rng.randint(2, 999), rng.randint(1000, 99999)])
    answer = Answer(f"\\${m}", f"\\${m + 1}", "money")
    answer.equal = [
        ("bare", str(m)),
        ("cents", f"\\${m}.00"),
        ("word", f"{m} \\text{{ dollars}}"),
        ("thousands", f"\\${m:,}"),
    ]
    answer.different = [
        ("off", str(m - 1)),
        ("x100", f"\\${m}00"),
        ("/100", f"\\${_decimal(Fraction(m, 100), 2)}"),
        ("sign", f"-\\${m}"),
    ]
    return answer


def _unit(rng: random.Random) -> Answer:
    n, unit = rng.randint(2, 400), rng.choice(["cm", "miles", "square units", "hours", "mph", "inches", "kg"])
    answer = Answer(f"{n}\\text{{ {unit}}}", f"{n + 1}\\text{{ {unit}}}", "unit")
    answer.equal = [
        ("left off", str(n)),
        ("bare word", f"{n} {unit}"),
        ("mbox", f"{n}\\mbox{{ {unit}}}"),
        ("other unit", f"{n}\\text{{ feet}}"),
    ]
    answer.equal += [("space", f"{n} \\text{{{unit}}}"), ("mathrm", f"{n}~\\mathrm{{{unit.replace(' ', '~')}}}")]
    answer.different = [("off", str(n + 1)), ("x100", f"{n}00\\text{{ {unit}}}"), ("sign", f"-{n}\\text{{ {unit}}}")]
    return answer


def _scientific(rng: random.Random) -> Answer:
    a, k = f"{rng.randint(1, 9)}.{rng.randint(1, 9)}", rng.randint(3, 9)
    value = Fraction(a) * 10**k
    answer = Answer(f"{a} \\times 10^{{{k}}}", f"{a} \\times 10^{{{k + 1}}}", "scientific notation")
    answer.equal = [
        ("cdot", f"{a} \\cdot 10^{k}"),
        ("written out", str(value)),
        ("thousands", f"{int(value):,}"),
        ("short", f"{a}\\times10^{k}"),
    ]
    answer.different = [
        ("power", f"{a} \\times 10^{{{k - 1}}}"),
        ("sign of power", f"{a} \\times 10^{{-{k}}}"),
        ("power lost", a),
    ]
    answer.different += [("base", f"{a} \\times 2^{{{k}}}"), ("sign", f"-{a} \\times 10^{{{k}}}"), *_near(value)]
    return answer


def _power(rng: random.Random) -> Answer:
    b, k = rng.randint(2, 9), rng.randint(2, 7)
    answer = Answer(f"{b}^{{{k}}}", f"{b}^{{{k + 1}}}", "power")
    answer.equal = [("short", f"{b}^{k}"), ("written out", str(b**k)), ("product", f"{b}\\cdot {b}^{{{k - 1}}}")]
    answer.different = [
        ("swapped", f"{k}^{{{b}}}"),
        ("product", str(b * k)),
        ("sign", f"-{b}^{{{k}}}"),
        ("off", str(b**k + 1)),
    ]
    return answer if b != k and {b, k} != {2, 4} and b * k != b**k else _power(rng)


def _complex(rng: random.Random) -> Answer:
    a, b = rng.sample(range(2, 20), 2)
    answer = Answer(f"{a}+{b}i", f"{a + 1}+{b}i", "complex number")
    answer.equal = [
        ("order", f"{b}i+{a}"),
        ("spaces", f"{a} + {b}\\,i"),
        ("cdot", f"{a}+{b}\\cdot i"),
        ("z=", f"z={a}+{b}i"),
    ]
    answer.different = [
        ("conjugate", f"{a}-{b}i"),
        ("swapped", f"{b}+{a}i"),
        ("sign", f"-{a}+{b}i"),
        ("real part", str(a)),
        ("i lost", str(a + b)),
    ]
    return answer


def _base(rng: random.Random) -> Answer:
    base = rng.choice([2, 3, 5, 7, 8])
    digits = str(rng.randint(1, base - 1)) + "".join(str(rng.randrange(base)) for _ in range(4))
    other = digits[:-1] + str((int(digits[-1]) + 1) % base)
    answer = Answer(f"{digits}_{{{base}}}", f"{other}_{{{base}}}", "base")
    answer.equal = [("short", f"{digits}_{base}"), ("space", f"{digits} _ {{{base}}}")]
    answer.different = [
        ("base", f"{digits}_{{{base + 1}}}"),
        ("digit", other + f"_{base}"),
        ("digit appended", f"{digits}0_{base}"),
    ]
    return answer


SCALARS: list[Callable[[random.Random], Answer]] = [
    _integer, _integer, _decimal_number, _fraction, _fraction, _mixed, _radical, _radical_sum, _pi, _percent, _degrees,
    _money, _unit, _scientific, _power, _complex, _base,
]  # fmt: skip
