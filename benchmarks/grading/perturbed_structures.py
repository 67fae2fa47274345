"""Invented answers that are more than one number, or none: intervals, tuples, sets, lists, matrices,
words; each with rewrites that are equal and changes that are different."""

import random
from collections.abc import Callable

from benchmarks.grading.perturbed_scalars import Answer


def _interval(rng: random.Random) -> Answer:
    a = rng.randint(-20, 15)
    b = a + rng.randint(2, 20)
    left, right = rng.choice("(["), rng.choice(")]")
    low, high = rng.choice(
        [(str(a), str(b)), (str(a), "\\infty"), ("-\\infty", str(b)), (f"\\frac{{{a * 2 + 1}}}{{2}}", str(b + 1))]
    )
    left, right = ("(" if "infty" in low else left), (")" if "infty" in high else right)
    swap = {"(": "[", "[": "(", ")": "]", "]": ")"}
    answer = Answer(f"{left}{low},{high}{right}", f"{left}{low},{b + 2}{right}", "interval", is_scalar=False)
    answer.equal = [
        ("spaces", f"{left}{low}, {high}{right}"), ("left right", f"\\left{left}{low},{high}\\right{right}"),
        ("x in", f"x \\in {left}{low},{high}{right}"), ("left right", f"\\left{left} {low}, {high} \\right{right}"),
        ("thin space", f"{left}{low},\\,{high}{right}"),
        ("dfrac", f"{left}{low.replace('frac', 'dfrac')},{high}{right}"),
    ]  # fmt: skip
    if "infty" not in low:
        answer.different += [
            ("left bracket", f"{swap[left]}{low},{high}{right}"),
            ("left end", f"{left}{a - 3},{high}{right}"),
        ]
    if "infty" not in high:
        answer.different += [
            ("right bracket", f"{left}{low},{high}{swap[right]}"),
            ("right end", f"{left}{low},{b + 5}{right}"),
        ]
    answer.different += [
        ("to infinity", f"{left}{low},\\infty)" if "infty" not in high else f"(-\\infty,{high})"),
        ("one end", str(b + 1)),
    ]
    return answer


def _union(rng: random.Random) -> Answer:
    a = rng.randint(-20, 15)
    b = a + rng.randint(1, 20)
    answer = Answer(
        f"(-\\infty,{a})\\cup({b},\\infty)", f"(-\\infty,{a})\\cup({b + 1},\\infty)", "union", is_scalar=False
    )
    answer.equal = [("order", f"({b},\\infty)\\cup(-\\infty,{a})"), ("spaces", f"(-\\infty, {a}) \\cup ({b}, \\infty)")]
    answer.equal += [
        ("left right", f"\\left(-\\infty,{a}\\right) \\cup \\left({b},\\infty\\right)"),
        ("plus sign", f"(-\\infty,{a})\\cup({b},+\\infty)"),
    ]
    answer.different = [
        ("dropped", f"(-\\infty,{a})"),
        ("bracket", f"(-\\infty,{a}]\\cup({b},\\infty)"),
        ("brackets", f"(-\\infty,{a}]\\cup[{b},\\infty)"),
    ]
    answer.different += [
        ("end", f"(-\\infty,{a - 1})\\cup({b},\\infty)"),
        ("intersection", f"(-\\infty,{a})\\cap({b},\\infty)"),
        ("middle", f"({a},{b})"),
    ]
    return answer


def _tuple(rng: random.Random) -> Answer:
    a, b, c = rng.sample(range(-15, 30), 3)
    items = [str(a), str(b), str(c)][: rng.choice([2, 3])]
    if rng.random() < 0.4:
        items[0] = f"\\frac{{{2 * abs(a) + 1}}}{{2}}"
    gold = f"({','.join(items)})"
    answer = Answer(gold, f"({','.join([items[0], str(b + 1), *items[2:]])})", "tuple", is_scalar=False)
    answer.equal = [
        ("spaces", f"({', '.join(items)})"),
        ("left right", f"\\left({','.join(items)}\\right)"),
        ("dfrac", gold.replace("frac", "dfrac")),
    ]
    answer.equal += [
        ("thin spaces", "(" + ",\\, ".join(items) + ")"),
        ("letters", "(x,y,z)"[: 2 * len(items)] + ")=" + gold),
    ]
    answer.different = [
        ("permuted", f"({','.join(items[::-1])})"), ("dropped", f"({','.join(items[:-1])})"),
        ("member added", f"({','.join(items)},7)"), ("sign", f"({','.join([*items[:-1], str(-int(items[-1]) or 1)])})"),
        ("square brackets", f"[{','.join(items)}]"), ("braces", f"\\{{{','.join(items)}\\}}"),
    ]  # fmt: skip
    return answer


def _set(rng: random.Random) -> Answer:
    items = [str(n) for n in rng.sample(range(-9, 40), rng.choice([2, 3, 4]))]
    gold = "\\{" + ",".join(items) + "\\}"
    answer = Answer(gold, "\\{" + ",".join([*items[:-1], "77"]) + "\\}", "set", is_scalar=False)
    answer.equal = [
        ("order", "\\{" + ", ".join(items[::-1]) + "\\}"),
        ("left right", "\\left\\{" + ",".join(items) + "\\right\\}"),
        ("bare list", ", ".join(items)),
    ]
    answer.equal += [
        ("spaces", "\\{ " + " , ".join(items) + " \\}"),
        ("x in", "x \\in " + gold),
        ("lbrace", "\\lbrace " + ",".join(items) + "\\rbrace"),
    ]
    answer.different = [
        ("dropped", "\\{" + ",".join(items[:-1]) + "\\}"),
        ("added", "\\{" + ",".join([*items, "77"]) + "\\}"),
        ("one", items[0]),
    ]
    answer.different += [
        ("off", "\\{" + ",".join([*items[:-1], str(int(items[-1]) + 100)]) + "\\}"),
        ("glued", "".join(i.strip("-") for i in items)),
    ]
    return answer


def _list(rng: random.Random) -> Answer:
    items = [str(n) for n in rng.sample(range(-30, 60), rng.choice([2, 3]))]
    answer = Answer(",".join(items), ",".join([*items[:-1], "77"]), "list", is_scalar=False)
    answer.equal = [
        ("spaces", ", ".join(items)),
        ("order", ", ".join(items[::-1])),
        ("and", ", ".join(items[:-1]) + " \\text{ and } " + items[-1]),
    ]
    answer.equal += [
        ("x=", "x = " + ", ".join(items)),
        ("dollars", ", ".join(f"${i}$" for i in items)),
        ("bare and", ", ".join(items[:-1]) + " and " + items[-1]),
    ]
    answer.different = [
        ("dropped", items[0]),
        ("dropped", items[-1]),
        ("added", ",".join([*items, "77"])),
        ("off", ",".join([*items[:-1], str(int(items[-1]) + 1000)])),
    ]
    answer.different += [("sum", str(sum(int(i) for i in items) + 500)), ("glued", items[0] + items[-1].strip("-"))]
    return answer


def _matrix(rng: random.Random) -> Answer:
    a, b, c, d = rng.sample(range(-9, 20), 4)
    name = rng.choice(["pmatrix", "bmatrix"])

    def matrix(rows: list[list[int]], between: str = " \\\\ ", around: str = "") -> str:
        inner = between.join(" & ".join(str(x) for x in row) for row in rows)
        return f"\\begin{{{name}}}{around}{inner}{around}\\end{{{name}}}"

    rows = rng.choice([[[a, b], [c, d]], [[a], [b], [c]], [[a, b]]])
    gold = matrix(rows, "\\\\", " ")
    changed = [row[:] for row in rows]
    changed[-1][-1] += 1
    answer = Answer(gold, matrix(changed), "matrix", is_scalar=False)
    answer.equal = [
        ("spaces", matrix(rows, " \\\\ ", "  ")),
        ("newlines", matrix(rows, " \\\\\n", "\n")),
        ("A=", "A=" + gold),
    ]
    answer.different = [
        ("sign", matrix([[-x - (x == 0) for x in row] for row in rows])),
        ("one entry", str(a)),
        ("rows", matrix(rows[::-1] if len(rows) > 1 else [rows[0][::-1]])),
    ]
    if len(rows[0]) > 1:
        answer.different.append(("transposed", matrix([list(column) for column in zip(*rows, strict=True)])))
    return answer


def _word(rng: random.Random) -> Answer:
    one, other = rng.sample(
        [
            "even",
            "odd",
            "neither",
            "Tuesday",
            "Friday",
            "ellipse",
            "parabola",
            "Alice",
            "Carmen",
            "circle",
            "yes",
            "north",
        ],
        2,
    )
    answer = Answer(f"\\text{{{one}}}", f"\\text{{{other}}}", "word", is_scalar=False)
    answer.equal = [
        ("bare", one),
        ("case", one.swapcase()),
        ("bold", f"\\textbf{{{one}}}"),
        ("mathrm", f"\\mathrm{{{one}}}"),
        ("mbox", f"\\mbox{{{one}}}"),
        ("spaces", f"\\text{{ {one} }}"),
    ]
    answer.different = [
        ("denied", f"\\text{{not {one}}}"),
        ("bare", other),
        ("cut", one[:-1]),
        ("prefixed", "non" + one),
        ("letter", one[0]),
    ]
    return answer


def _letter(rng: random.Random) -> Answer:
    one, other = rng.sample("ABCDEF", 2)
    answer = Answer(f"\\text{{({one})}}", f"\\text{{({other})}}", "lettered answer", is_scalar=False)
    answer.equal = [
        ("bare", one),
        ("brackets", f"({one})"),
        ("text", f"\\text{{{one}}}"),
        ("bold", f"\\textbf{{({one})}}"),
        ("mathrm", f"\\mathrm{{({one})}}"),
    ]
    answer.different = [("bare", other), ("both", f"\\text{{({one}),({other})}}"), ("both", one + other)]
    return answer


STRUCTURES: list[Callable[[random.Random], Answer]] = [
    _interval, _interval, _union, _tuple, _tuple, _set, _list, _matrix, _word, _letter,
]  # fmt: skip
