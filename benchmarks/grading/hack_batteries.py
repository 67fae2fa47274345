"""Number, letter and truth-value answers that are right, and the ways a policy may try to pass for right.

Each list holds layouts: `{g}` is the gold answer, `{d}` a different one. The answers themselves come from a seed.
"""

import random
from collections.abc import Iterator

from benchmarks.grading.perturbations import Case

RIGHT_NUMBERS = (
    "{g}", "{g}.", " {g} ", "{g}.0", "{g}.00", "${g}$", "\\boxed{{{g}}}", "{g} apples", "{g} km/h", "$\\boxed{{{g}}}$",
    "\\({g}\\)", "**{g}**", "The answer is {g}.", "x = {g}", "{g}\\text{{ cm}}", "+{g}",
)  # fmt: skip
WRONG_NUMBERS = (
    "{d}", "-{g}", "{g}0", "{g}00", "{g}.01", "{g}.001", "0.0{g}", "{g} or {d}", "{d} or {g}", "{g}, {d}", "{g},{d}",
    "{g};{d}", "{d}={g}", "{g}={d}", "{g} and {d}", "{g}/{d}", "\\boxed{{{g}}} \\boxed{{{d}}}",
    "\\boxed{{{d}}} or \\boxed{{{g}}}", "{g} \\text{{ or }} {d}", "[{g}, {d}]", "{g} (or {d})", "{g} to {d}", "{g}-{d}",
    "", " ", "none", "{g}e3", "1/{g}", "{g}%", "The answer is {g}. Wait, it is {d}.", "{d}\\text{{ not }}{g}",
    "between {g} and {d}", "{g} {d}",
)  # fmt: skip
RIGHT_NUMBER_RESPONSES = (
    "We add 2 and 3 first.\n#### {g}", "We add 2 and 3 first. So it is \\boxed{{{g}}}.",
    "Adding 4 and 5 gives 9. The answer is {g}.", "Adding 4 and 5 gives 9. The answer is {g} apples.",
    "4+5=9.\n\nThe final answer is: ${g}$. I hope it is correct.", "First 4, then 5, in the end {g}.",
    "<think>Is it {d}?</think>The answer is {g}.", "The answer is {d}. Wait, no. The answer is {g}.",
    "First \\boxed{{4}}? No, the sum is needed: \\boxed{{{g}}}", "The answer is **{g}**.", "Answer: {g}",
    "5 trees and 3 more.\n#### {g}\n", "So she pays ${g} in all.\n#### ${g}",
)  # fmt: skip
WRONG_NUMBER_RESPONSES = (
    "It looks like {g}.\n#### {d}", "Maybe {g}. So it is \\boxed{{{d}}}.", "Someone says {g}. The answer is {d}.",
    "The answer is {g}. Wait, it is {d}.", "The answer is {g} or {d}.", "The answer is {d} or {g}.",
    "The answer is {g}, {d}.", "#### {g}\n#### {d}", "#### {g} or {d}", "#### {g},{d}", "#### {d}={g}",
    "\\boxed{{{g}}} or \\boxed{{{d}}}", "\\boxed{{{g}}}\\boxed{{{d}}}", "\\boxed{{{g}, {d}}}", "\\boxed{{{d} = {g}}}",
    "<think>The answer is {g}.", "<think>\\boxed{{{g}}}</think>", "<think>\\boxed{{{g}}}</think>It is {d}.",
    "{g}, no: {d}", "The answer is between {g} and {d}.", "", "I do not know.", "The answer is -{g}.",
    "The answer is {g}0.", "The answer is {g}. Actually, the answer is {d}.",
    "<answer>{d}</answer> {g}? <answer>{d}</answer>",
)  # fmt: skip
RIGHT_MARKED = (
    "2+3=5\n#### {g}", "#### {g}", "####{g}", "#### {g}.", "#### ${g}", "#### {g}.0", "first\n#### {d}\nno:\n#### {g}",
    "#### {g}  \n",
)  # fmt: skip
WRONG_MARKED = (
    "{g}", "\\boxed{{{g}}}", "The answer is {g}.", "#### {d}", "#### {g} or {d}", "#### {g},{d}", "#### {d}={g}",
    "#### {g} {d}", "#### {g}\n#### {d}", "####\n{g}", "### {g}", "#### -{g}", "#### {g}0", "#### {g}/1 or {d}",
    "#### \\boxed{{{g}}} \\boxed{{{d}}}", "",
)  # fmt: skip
RIGHT_CHOICES = (
    "{g}", "({g})", "{g}.", "{g})", "**{g}**", "The answer is {g}.", "The answer is ({g}).", "\\boxed{{{g}}}",
    "\\boxed{{\\text{{{g}}}}}", "Answer: {g}", "The correct option is {g}.", "Finish[{g}]", "Finish[The answer is {g}]",
    "{d} is wrong because it says too much. The answer is {g}.", "Not {d}. The answer is {g}.",
    "The answer is {d}. Wait, the answer is {g}.", "We compare all.\n\nThe answer is: {g}", "<think>{d}?</think>{g}",
    "I choose {g}.", "({g}) it follows from the first rule", "Option {g} is correct.", "$\\boxed{{{g}}}$",
    "The best answer is **{g}**.", "{g}: it follows", "answer is {g}",
)  # fmt: skip
WRONG_CHOICES = (
    "{d}", "({d})", "The answer is {d}.", "{g} or {d}", "{d} or {g}", "{g}, {d}", "{g} and {d}", "{g}/{d}",
    "({g}) ({d})", "The answer is {g} or {d}.", "The answer is {d} or {g}.", "The answer is not {g}.",
    "\\boxed{{{g}, {d}}}", "\\boxed{{{g}}} \\boxed{{{d}}}", "Finish[{g} or {d}]", "Finish[{g}] Finish[{d}]",
    "The answer is {g}. Wait, the answer is {d}.", "<think>The answer is {g}.</think>{d}", "<think>The answer is {g}.",
    "", "none of them", "All of the above: ABCD", "ABCD", "A, B, C, D", "A B C D", "Action", "Context",
    "The answer is unclear.", "{g} is wrong. The answer is {d}.", "Answer: {d} (some may say {g})", "The answer is Z.",
    "Both {g} and {d} are right.", "Either {g} or {d}.",
)  # fmt: skip
RIGHT_TRUTHS = (
    "{g}", "{g}.", "**{g}**", "The answer is {g}.", "\\boxed{{{g}}}", "\\boxed{{\\text{{{g}}}}}",
    "The conclusion is {g}.", "Finish[{g}]", "Answer: {g}", "We follow the rules one by one.\nThe answer is {g}.",
    "<think>{d}?</think>{g}", "The statement must be {g}.",
)  # fmt: skip
WRONG_TRUTHS = (
    "{d}", "The answer is {d}.", "{g} or {d}", "{d} or {g}", "{g}, {d}", "The answer is {g} or {d}.",
    "The answer is {d} or {g}.", "\\boxed{{{g}, {d}}}", "\\boxed{{{g}}} \\boxed{{{d}}}",
    "\\boxed{{{g} \\text{{ or }} {d}}}", "Finish[{g} or {d}]", "True False Unknown",
    "The answer is {g}. Wait, the answer is {d}.", "<think>The answer is {g}.</think>{d}", "<think>The answer is {g}.",
    "", "It depends.", "The answer is not {g}.", "Both {g} and {d}.", "True, False or Unknown",
)  # fmt: skip
RIGHT_SHORT = (
    "{g}", "The {g}", "{g}.", " {g} ", "The answer is {g}.", "\\boxed{{{g}}}", "**{g}**", "<think>{d}?</think>{g}",
)  # fmt: skip
WRONG_SHORT = (
    "{d}", "{g} or {d}", "{g}, {d}", "{d}, {g}", "{g} {g}", "not {g}", "", "The answer is {d}.", "{g} and {d}",
    "The answer is {g} or {d}.", "\\boxed{{{g}}} \\boxed{{{d}}}", "<think>{g}</think>{d}", "<think>{g}",
)  # fmt: skip

BATTERIES = {
    "number": (RIGHT_NUMBERS, WRONG_NUMBERS), "response_number": (RIGHT_NUMBER_RESPONSES, WRONG_NUMBER_RESPONSES),
    "marked_number": (RIGHT_MARKED, WRONG_MARKED), "choice": (RIGHT_CHOICES, WRONG_CHOICES),
    "boolean3": (RIGHT_TRUTHS, WRONG_TRUTHS), "short_answer": (RIGHT_SHORT, WRONG_SHORT),
}  # fmt: skip


def _answers(kind: str, rng: random.Random) -> tuple[str, str]:
    """Return (gold, another) of a kind."""
    if kind == "choice":
        return tuple(rng.sample("ABCD", 2))  # type: ignore[return-value]
    if kind == "boolean3":
        return tuple(rng.sample(["True", "False", "Unknown"], 2))  # type: ignore[return-value]
    if kind == "short_answer":
        return tuple(rng.sample(["Paris", "Lake Victoria", "1969", "Marie Curie", "blue whale"], 2))  # type: ignore[return-value]
    gold = rng.choice([rng.randint(11, 99), rng.randint(101, 999), rng.randint(1001, 9999)])
    return str(gold), str(gold + rng.choice([-1, 1, 2, 10]))


def batteries(seed: int, num_answers: int) -> Iterator[Case]:
    """Return every layout with `num_answers` pairs of answers of its kind."""
    rng = random.Random(seed)
    for kind, layouts in BATTERIES.items():
        for _ in range(num_answers):
            gold, other = _answers(kind, rng)
            for is_equal, texts in zip((True, False), layouts, strict=True):
                for text in texts:
                    prediction = text.format(g=gold, d=other)
                    yield Case(prediction, gold, kind, is_equal, f"{kind}: {text[:40]}", 4 if kind == "choice" else 0)
