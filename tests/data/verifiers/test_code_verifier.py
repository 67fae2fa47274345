"""Programs against tests of each form. What programs may not do is in tests/data/sandbox."""

import json
from typing import Any

import pytest

from espalier.data.sources import BadRow
from espalier.data.verifiers.verify import Check, verify, write_checks

DOUBLE = "```python\ndef f(x):\n    return 2 * x\n```"
ECHO = "Text.\n```py\nprint('no')\n```\nBetter:\n```\nprint(int(input()) * 2)\n```\n"
CASES: list[tuple[str, Any, float]] = [
    (DOUBLE, ["assert f(2) == 4", "assert f('a') == 'aa'"], 1.0),
    (DOUBLE, ["assert f(2) == 4", "assert f(2) == 5"], 0.5),
    (DOUBLE, ["def check(candidate):\n    assert candidate(3) == 6\ncheck(f)"], 1.0),
    (DOUBLE, ["import math\nassert math.isclose(f(0.1), 0.2)"], 1.0),
    (DOUBLE, {"fn_name": "f", "inputs": [[1], [[1]]], "outputs": [2, [1, 1]]}, 1.0),
    (DOUBLE, {"fn_name": "g", "inputs": [[1]], "outputs": [2]}, 0.0),
    ("```\nclass Solution:\n    def f(self, x):\n        return (x, None)\n```",
     {"fn_name": "f", "inputs": [[True]], "outputs": [[True, None]]}, 1.0),
    (ECHO, {"inputs": ["2\n", "5"], "outputs": ["4", "10 \n\n"]}, 1.0),
    (ECHO, [{"input": "2", "output": "5"}], 0.0),
    ("def f(x): return 2 * x", ["assert f(2) == 4"], 0.0),
    ("```\nnot python\n```", ["assert f(2) == 4"], 0.0),
    ("<think>" + DOUBLE + "</think> I cannot.", ["assert f(2) == 4"], 0.0),
    (DOUBLE, {"tests": ["assert f(2) == 4", "assert f(2) == 5"], "threshold": 0.6}, 0.0),
    ("```\nimport os\ndef f(x):\n    return x if x else os._exit(0)\n```",
     ["assert f(1) == 1", "assert f(0) == 0", "assert f(2) == 2"], 2 / 3),
    ("```\ndef f(x):\n    while x: pass\n    return x\n```",
     {"tests": ["assert f(1) == 1", "assert f(0) == 0"], "seconds": 0.2}, 0.5),
    ("```\nexit()\n```", [{"input": "", "output": ""}], 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "truth", "wanted"), CASES)
def test_a_program_scores_the_share_of_tests_it_passes(text: str, truth: Any, wanted: float) -> None:
    for form in (truth, json.dumps(truth)):
        (verdict,) = verify(text, write_checks([Check("code", form)]))
        assert verdict.result.score == pytest.approx(wanted)


@pytest.mark.parametrize(("truth", "message"), [
    ([], "there is no test"),
    (["assert f("], "a test is no Python"),
    ({"inputs": [1], "outputs": []}, "of equal length"),
    ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "lists of arguments"),
    ([{"input": "1"}], "all objects with input and output"),
    ("gASV", "tests are not JSON"),
])  # fmt: skip
def test_tests_that_cannot_be_run_are_refused_when_rows_are_read(truth: Any, message: str) -> None:
    with pytest.raises(BadRow, match=f"verifier code: .*{message}"):
        write_checks([Check("code", truth)])
