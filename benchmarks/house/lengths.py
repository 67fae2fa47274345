"""How long things are: functions, files, and the function that is one iteration of reinforcement learning."""

import ast
from collections.abc import Iterable

from benchmarks.house.source import Definition, Found, Function, Source, definitions

ITERATION = ("rl/iteration.py", "iterate")


def _lines(node: ast.stmt) -> int:
    return int(node.end_lineno or node.lineno) - node.lineno + 1


def _longest(rows: Iterable[tuple[int, str]]) -> Found:
    ordered = sorted(rows, key=lambda row: (-row[0], row[1]))
    return Found(ordered[0][0] if ordered else 0, [f"{place} ({number} lines)" for number, place in ordered[:20]])


def longest_function(sources: Iterable[Source]) -> Found:
    """Measure the longest function or method, in lines from `def` to its end, docstring and all."""
    found = [one for one in definitions(sources) if isinstance(one.node, Function)]
    return _longest((_lines(one.node), one.place) for one in found)


def longest_file(sources: Iterable[Source]) -> Found:
    """Measure the longest file, in lines."""
    return _longest((len(source.text.splitlines()), source.place()) for source in sources)


def iteration(sources: Iterable[Source]) -> Definition:
    """Find the function that is one iteration. Raises LookupError where it is no longer there under its name."""
    path, name = ITERATION
    for one in definitions(sources):
        if str(one.source.path) == path and one.node.name == name:
            return one
    raise LookupError(f"{path} has no function '{name}': name the one that is an iteration in {__name__}.ITERATION")


def rl_iteration_lines(sources: Iterable[Source]) -> Found:
    """Measure the function that is one iteration, in lines."""
    return _longest([(_lines((one := iteration(sources)).node), one.place)])
