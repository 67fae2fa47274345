"""Pairs of answers that are known to be equal or known to be different.

Nothing is judged by hand or by a grader: each pair is right or wrong by the way it is made, from a seed.
Conventions on which graders disagree (`28%` against 28, an interval against an inequality, a fraction against
its rounding) are left out, apart from these: a unit may be left off or be another one, a list may come in any
order, a tuple may not, several answers where one is asked for are wrong.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.grading.perturbed_formulas import FORMULAS
from benchmarks.grading.perturbed_scalars import SCALARS, Answer
from benchmarks.grading.perturbed_structures import STRUCTURES


@dataclass(frozen=True)
class Case:
    """One prediction to grade; `is_equal` is known from how it was made, `rule` names that way."""

    prediction: str
    gold: str
    kind: str
    is_equal: bool
    rule: str
    num_options: int = 0


WRAPS: list[tuple[str, str]] = [
    ("dollars", "${}$"), ("parentheses", "\\({}\\)"), ("brackets", "\\[{}\\]"), ("box", "\\boxed{{{}}}"),
    ("full stop", "{}."), ("spaces", "  {} "), ("box in dollars", "$\\boxed{{{}}}$"),
    ("displaystyle", "\\displaystyle {}"), ("sentence", "The answer is ${}$."),
    ("sentence with box", "So the answer is $\\boxed{{{}}}$."), ("braces", "{{{}}}"), ("thin spaces", "\\, {} \\!"),
    ("box with spaces", "\\boxed{{ {} }}"),
]  # fmt: skip

HACKS: list[tuple[str, str]] = [
    ("or", "{g} \\text{{ or }} {d}"), ("or", "{d} \\text{{ or }} {g}"), ("bare or", "{g} or {d}"),
    ("and", "{g} \\text{{ and }} {d}"), ("list", "{g}, {d}"), ("list", "{d}, {g}"), ("set", "\\{{{g}, {d}\\}}"),
    ("chain", "{d}={g}"), ("chain", "{g}={d}"), ("long chain", "{g}={d}={g}"),
    ("boxes", "\\boxed{{{g}}} \\boxed{{{d}}}"), ("boxes", "\\boxed{{{g}}}, \\boxed{{{d}}}"),
    ("boxes with or", "$\\boxed{{{g}}}$ or $\\boxed{{{d}}}$"), ("corrected", "The answer is ${g}$. Wait, it is ${d}$."),
    ("corrected", "The answer is ${g}$. Actually, the answer is ${d}$."),
    ("remark", "{g}\\text{{ (or }}{d}\\text{{)}}"), ("dollars", "${g}$ or ${d}$"), ("dollars", "${g}$ $ {d}$"),
    ("semicolon", "{g}; {d}"), ("slash words", "{g} \\text{{ and/or }} {d}"), ("x= list", "x={g}, x={d}"),
    ("x= or", "x={g} \\text{{ or }} x={d}"), ("x= chain", "x={d}={g}"), ("newline", "{g}\n{d}"),
]  # fmt: skip

STRUCTURE_HACKS = [
    hack for hack in HACKS if hack[0] in ("or", "boxes", "boxes with or", "corrected", "remark", "dollars", "newline")
]

RIGHT_RESPONSES: list[tuple[str, str]] = [
    ("box", "Let us count both sides.\n\nThis gives the value \\boxed{{{g}}}."),
    ("box in display", "We simplify step by step:\n\\[\n\\boxed{{{g}}}\n\\]\nThis is what was asked for."),
    ("marker", "First we add, then we divide.\n#### {g}"),
    ("phrase", "We try the cases one after another. The answer is: ${g}$. I hope it is correct."),
    ("final answer", "We solve for the unknown.\n\n**Final Answer:** ${g}$"),
    (
        "phrase without dollars",
        "We solve for the unknown.\n\nFinal Answer: The final answer is ${g}$. I hope it is correct.",
    ),
    ("two equal boxes", "We find \\boxed{{{g}}}. As a check, both ways lead to $\\boxed{{{g}}}$."),
    (
        "another value on the way",
        "At first one might guess ${d}$, but then the condition fails. So it is $\\boxed{{{g}}}$.",
    ),
    ("after the reasoning", "<think>Perhaps \\boxed{{{d}}}? No.</think>\nThe result is \\boxed{{{g}}}."),
    ("answer tag", "<think>Let me see: ${d}$ or ${g}$.</think><answer>\\boxed{{{g}}}</answer>"),
    ("corrected", "The answer is ${d}$. Wait, that is not right. The answer is ${g}$."),
]

WRONG_RESPONSES: list[tuple[str, str]] = [
    ("box", "We expect ${g}$ at first, but the sign turns. Hence \\boxed{{{d}}}."),
    ("marker", "It looks like {g}, and yet:\n#### {d}"),
    ("phrase", "Someone may say {g}. The answer is: ${d}$. I hope it is correct."),
    ("two boxes", "One reading gives \\boxed{{{g}}}. The other gives \\boxed{{{d}}}."),
    ("neighbouring boxes", "The answer is $\\boxed{{{g}}}$ or $\\boxed{{{d}}}$."),
    ("neighbouring boxes", "The answer is $\\boxed{{{d}}}$ or $\\boxed{{{g}}}$."),
    ("or in the box", "Therefore \\boxed{{{g} \\text{{ or }} {d}}}."),
    ("or in the box", "Therefore \\boxed{{{d} \\text{{ or }} {g}}}."),
    ("chain in the box", "Therefore \\boxed{{{d} = {g}}}."),
    ("or in the phrase", "The final answer is ${g}$ or ${d}$."),
    ("corrected", "The answer is ${g}$. Wait, it is ${d}$."),
    ("corrected", "The answer is ${g}$. Hmm, I made a mistake. Actually, the answer is ${d}$."),
    ("only in the reasoning", "<think>It is \\boxed{{{g}}}.</think>\nThe result is \\boxed{{{d}}}."),
    ("reasoning not closed", "<think>It is \\boxed{{{g}}}, or is it \\boxed{{{d}}}?"),
    ("all candidates", "Candidates: ${g}$, ${d}$. I leave the choice to the reader: $\\boxed{{{g}, {d}}}$."),
    ("answer tag", "It may be \\boxed{{{g}}}.<answer>\\boxed{{{d}}}</answer>"),
]


def _pairs(answer: Answer, rng: random.Random) -> Iterator[tuple[str, str, bool]]:
    """Return (rule, prediction, is equal) of one answer, all there are."""
    equal, different = answer.equal, [("other answer", answer.other), *answer.different]
    for rule, text in equal:
        yield rule, text, True
    for name, wrap in WRAPS:
        yield f"wrapped: {name}", wrap.format(answer.gold), True
        rule, text = rng.choice(equal)
        if "$" not in text.replace("\\$", "") or "$" not in wrap:
            yield f"{rule}, wrapped: {name}", wrap.format(text), True
    for rule, text in different:
        yield rule, text, False
        name, wrap = rng.choice(WRAPS)
        yield f"{rule}, wrapped: {name}", wrap.format(text), False
    for rule, hack in HACKS if answer.is_scalar else STRUCTURE_HACKS:
        yield f"hack: {rule}", hack.format(g=answer.gold, d=answer.other), False


def _responses(answer: Answer, rng: random.Random) -> Iterator[tuple[str, str, bool]]:
    equal = [answer.gold, *(text for _, text in answer.equal)]
    different = [answer.other, *(text for _, text in answer.different)]
    for rule, layout in RIGHT_RESPONSES:
        yield f"response: {rule}", layout.format(g=rng.choice(equal), d=answer.other), True
    for rule, layout in WRONG_RESPONSES:
        hacked = answer.other if rule != "box" else rng.choice(different)
        yield f"response: {rule}", layout.format(g=answer.gold, d=hacked), False


def perturbations(seed: int, num_equal: int, num_different: int) -> list[Case]:
    """Return `num_equal` and `num_different` pairs of kinds `math` and `response_math` (two of the first to one of the
    second), spread evenly over the forms of answers and, within a form, over the rules."""
    rng = random.Random(seed)
    wanted = {
        ("math", True): num_equal * 2 // 3, ("response_math", True): num_equal - num_equal * 2 // 3,
        ("math", False): num_different * 2 // 3, ("response_math", False): num_different - num_different * 2 // 3,
    }  # fmt: skip
    makers = [*SCALARS, *FORMULAS, *STRUCTURES]
    shuffled: dict[tuple[str, bool, int], list[Case]] = {}
    seen: set[tuple[str, str]] = set()
    cases: list[Case] = []
    while any(wanted.values()):
        for number, make in enumerate(makers):
            for (kind, is_equal), left in wanted.items():
                if not left:
                    continue
                pool = shuffled.setdefault((kind, is_equal, number), [])
                while not pool:
                    answer = make(rng)
                    pairs = _pairs(answer, rng) if kind == "math" else _responses(answer, rng)
                    made = [
                        Case(text, answer.gold, kind, equal, f"{answer.form}: {rule}")
                        for rule, text, equal in pairs
                        if equal == is_equal and text != answer.gold
                    ]
                    rng.shuffle(made)
                    pool.extend(made[:4])
                case = pool.pop()
                if (case.prediction, case.gold) not in seen:
                    seen.add((case.prediction, case.gold))
                    cases.append(case)
                    wanted[kind, is_equal] -= 1
    return cases
