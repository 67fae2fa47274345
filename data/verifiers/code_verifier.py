"""The verifier of programs: the last fenced block of a response, run against tests in the sandbox (data/sandbox/).

| ground truth | tests |
|---|---|
| `["assert f(2) == 4", ...]` | Python with `assert`, each run against the program's functions by name |
| `{"fn_name": "f", "inputs": [[2], ...], "outputs": [4, ...]}` | calls of one function, or method of `Solution` |
| `{"inputs": ["2\\n", ...], "outputs": [...]}`, or `[{"input": ..., "output": ...}, ...]` | standard input and output |

Each of them also as its JSON text, or under `tests` of an object with `seconds` (per test) and `threshold` (a pass rate
below it scores 0). A list of texts as an input or output is its lines. Where every output of a function is a list of
one element, that element alone is right too: sets wrap results so (APPS, Hendrycks et al. 2021, arXiv 2105.09938).

Values cross between two processes, as plain ones: right programs that return generators or change arguments in place
score 0.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from espalier.data.answers.final_answer import after_reasoning
from espalier.data.sandbox.called_names import AssertTest, NoTest, read_assert_tests
from espalier.data.sandbox.run import FunctionCall, check_sandbox, run_script, run_tests
from espalier.data.sources import BadRow
from espalier.data.verifiers.response import Response, Result, Verifier

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_MAX_PROGRAM = 100_000


@dataclass(frozen=True)
class InputOutput:
    """A test by standard input and output."""

    input: str
    output: str


@dataclass(frozen=True)
class CodeTests:
    """All of one form: asserts, calls, or inputs with their outputs."""

    tests: list[AssertTest] | list[FunctionCall] | list[InputOutput]
    seconds: float = 4.0
    threshold: float = 0.0
    max_seconds: float = 60.0


def read_tests(truth: Any) -> CodeTests:
    """Return the tests of a ground truth. Raises BadRow on another form, BadInput where programs cannot be confined."""
    check_sandbox()
    value = truth
    if isinstance(truth, str):
        try:
            value = json.loads(truth)
        except ValueError:
            raise BadRow(f"tests are not JSON: {truth[:40]!r}") from None
    settings: dict[str, float] = {}
    if isinstance(value, Mapping) and "tests" in value:
        settings = {name: _positive(name, value[name]) for name in ("seconds", "threshold") if name in value}
        value = value["tests"]
    tests = _read_list(value)
    if not tests:
        raise BadRow("there is no test")
    return CodeTests(tests, **settings)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise BadRow(f"{name} must be a number from 0 on, got {str(value)[:40]!r}")
    return float(value)


def _read_list(value: Any) -> Any:
    if isinstance(value, Mapping):
        inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise BadRow("tests need inputs and outputs of equal length")
        if name:
            if not all(isinstance(given, list) for given in inputs):
                raise BadRow("the inputs of a function are lists of arguments")
            are_wrapped = all(isinstance(out, list) and len(out) == 1 for out in outputs)
            return [
                FunctionCall(str(name), given, out, are_wrapped) for given, out in zip(inputs, outputs, strict=True)
            ]
        value = [{"input": given, "output": out} for given, out in zip(inputs, outputs, strict=True)]
    if not isinstance(value, list):
        raise BadRow(f"tests are a list or an object, got {str(value)[:40]!r}")
    if all(isinstance(test, str) for test in value):
        return _assert_tests(value)
    if not all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in value):
        raise BadRow("tests are all texts with assert, or all objects with input and output")
    return [InputOutput(_lines("input", test["input"]), _lines("output", test["output"])) for test in value]


def _assert_tests(tests: list[str]) -> list[AssertTest]:
    try:
        return read_assert_tests(tests)
    except NoTest as error:
        raise BadRow(str(error)) from None


def _lines(name: str, value: Any) -> str:
    """Return what is written or read: a text, a number, or a list of texts as lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"the {name} of a program is a text or a list of texts, got {str(value)[:40]!r}")
    return str(value)


def read_program(text: str) -> str | None:
    """Return the last fenced block of a response, None where there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks and len(blocks[-1]) <= _MAX_PROGRAM else None


def is_same_output(one: str, other: str) -> bool:
    """Say whether two outputs have the same lines; blanks at their ends and empty lines at the end do not count."""
    lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (one, other)]
    return lines[0] == lines[1]


def check_code(response: Response, tests: CodeTests) -> Result:
    """The share of tests that the program passes."""
    program = read_program(after_reasoning(response.text) or "")
    if program is None:
        return Result(0.0, None, "no fenced block")
    if isinstance(tests.tests[0], InputOutput):
        passed = _passed_outputs(program, tests)
    else:
        passed = run_tests(program, tests.tests, tests.seconds, tests.max_seconds)  # type: ignore[arg-type]
    rate = sum(passed) / len(passed)
    return Result(rate if rate >= tests.threshold else 0.0, program[:200], f"{sum(passed)} of {len(passed)} tests")


def _passed_outputs(program: str, tests: CodeTests) -> list[bool]:
    """A program whose time is used up by earlier tests fails the rest."""
    passed: list[bool] = []
    left = tests.max_seconds
    for test in tests.tests:
        assert isinstance(test, InputOutput)
        if left <= 0:
            passed.append(False)
            continue
        run = run_script(program, test.input, min(tests.seconds, left))
        left -= run.seconds
        passed.append(not run.reason and is_same_output(run.output, test.output))
    return passed


CODE_VERIFIERS = dict.fromkeys(("code", "code_stdio"), Verifier(read_tests, check_code))
