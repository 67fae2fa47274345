"""Programs against tests of each form. What programs may not do is in tests/data/sandbox."""

import json
from typing import Any

import pytest

from benchmarks.grading.verifier_cases import PROGRAMS
from espalier.data.sources import BadRow
from espalier.data.verifiers.verify import Check, verify, write_checks


@pytest.mark.parametrize(("text", "truth", "wanted"), PROGRAMS)
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
    ([{"input": "1", "output": [1, 2]}], "the output of a program is a text or a list of texts"),
    ({"inputs": ["1"], "outputs": [{"a": 1}]}, "the output of a program is a text or a list of texts"),
    (["assert f(1) == 1", "import math"], "a test runs nothing"),
    (["assert f([1]) == Counter([1])"], "'Counter' is a name of the standard library"),
    ("gASV", "tests are not JSON"),
])  # fmt: skip
def test_tests_that_cannot_be_run_are_refused_when_rows_are_read(truth: Any, message: str) -> None:
    with pytest.raises(BadRow, match=f"verifier code: .*{message}"):
        write_checks([Check("code", truth)])
