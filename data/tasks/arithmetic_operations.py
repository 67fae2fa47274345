"""What happens to a total in the generated word problems: each operation in words, as a solution's line, and what the
total is after it.

An operation is a verb and an amount. Some verbs have a wrong way beside the right one; v is the total before:

| verb | in words | right line | wrong line |
|---|---|---|---|
| buys | buys n more | `v + n` | |
| gives | gives away n | `v - n` | |
| doubles | doubles the things | `v * 2` | `v + 2` |
| halves | halves the things | `v / 2` | `v - 2` |
| pairs | buys n pairs | `v + 2n` | `v + n` |
| lends | lends n, half come back | `v - n/2` | `v - n` |
| friend | a friend doubles n: the total stays | `n * 2` | `n + 2` |
| swaps | swaps all for n: the total is n, whatever it was | `0 + n` | |

A line is `<verb>: <a> <sign> <b> = <c>`; `#### <total>` is the last one.
"""

import random
import re
from collections.abc import Sequence

Operation = tuple[str, int]

_PHRASES = {
    "buys": "{name} buys {n} more.",
    "gives": "{name} gives away {n}.",
    "doubles": "{name} doubles the {thing}.",
    "halves": "{name} halves the {thing}.",
    "pairs": "{name} buys {n} pairs.",
    "lends": "{name} lends {n}, half come back.",
    "friend": "A friend doubles {n}.",
    "swaps": "{name} swaps all for {n}.",
}
_LINE = re.compile(r"([a-z]+): -?[0-9]{1,9} [-+*/] -?[0-9]{1,9} = (-?[0-9]{1,9})\n+")
_ANSWER = re.compile(r"#### (-?[0-9]{1,9})\n*")


def _right_way(verb: str, amount: int) -> tuple[str, int]:
    return {
        "buys": ("+", amount),
        "gives": ("-", amount),
        "doubles": ("*", 2),
        "halves": ("/", 2),
        "pairs": ("+", 2 * amount),
        "lends": ("-", amount // 2),
        "friend": ("*", 2),
        "swaps": ("+", amount),
    }[verb]


def _wrong_way(verb: str, amount: int) -> tuple[str, int] | None:
    ways = {"doubles": ("+", 2), "halves": ("-", 2), "pairs": ("+", amount), "lends": ("-", amount), "friend": ("+", 2)}
    return ways.get(verb)


def _calculate(value: int, way: tuple[str, int]) -> int:
    sign, number = way
    return {"+": value + number, "-": value - number, "*": value * number, "/": value // 2}[sign]


def _total_after(verb: str, before: int, result: int) -> int:
    """Return the total after a line that writes `result`: a friend's things are not counted in."""
    return before if verb == "friend" else result


def apply_operation(value: int, operation: Operation) -> int:
    """Return the true total after an operation."""
    verb, amount = operation
    first = {"swaps": 0, "friend": amount}.get(verb, value)
    return _total_after(verb, value, _calculate(first, _right_way(verb, amount)))


def apply_operations(value: int, operations: Sequence[Operation]) -> int:
    """Return the true total after all the operations, one after the other."""
    for operation in operations:
        value = apply_operation(value, operation)
    return value


def tell(name: str, thing: str, start: int, operations: Sequence[Operation]) -> str:
    """Return the problem in words."""
    sentences = [_PHRASES[verb].format(name=name, thing=thing, n=n) for verb, n in operations]
    return f"{name} has {start} {thing}. {' '.join(sentences)} How many {thing} now?"


def solve(start: int, operations: Sequence[Operation], rng: random.Random | None, wrong_way_rate: float) -> str:
    """Return a solution, one step a line. With an rng, the teacher's: wrong ways at `wrong_way_rate`."""
    value = start
    lines = []
    for verb, amount in operations:
        way, wrong_way = _right_way(verb, amount), _wrong_way(verb, amount)
        if wrong_way is not None and rng is not None and rng.random() < wrong_way_rate:
            way = wrong_way
        first = {"swaps": 0, "friend": amount}.get(verb, value)
        result = _calculate(first, way)
        lines.append(f"{verb}: {first} {way[0]} {way[1]} = {result}")
        value = _total_after(verb, value, result)
    return "\n".join([*lines, f"#### {value}"])


def read_line(line: str, verb: str, before: int) -> int | None:
    """Return the total after a solution's line, newline included, for an operation of that verb.

    The written result counts, however it was found: `5 + 5 = 10` doubles 5, and so does `5 * 2 = 11`, wrongly. None
    where the line is cut off, has another form or another verb.
    """
    match = _LINE.fullmatch(line)
    return _total_after(verb, before, int(match[2])) if match and match[1] == verb else None


def read_answer(line: str) -> int | None:
    """Return the total of a last line, `#### <total>`, with or without a newline; None where it has another form."""
    match = _ANSWER.fullmatch(line)
    return int(match[1]) if match else None
