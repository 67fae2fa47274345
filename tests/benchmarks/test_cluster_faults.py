"""What is kept of runs in which a part of a cluster was broken."""

from typing import Any

from benchmarks.cluster.cluster_faults import figures_of, of_kind


def run(code: int | None = 0, was_broken: bool = True) -> dict[str, Any]:
    """What came of one."""
    return {"kind": "node", "code": code, "was_broken": was_broken, "left": "", "wrong": "", "is_same": code == 0}


def test_runs_of_before_keep_their_day_and_what_goes_wrong_counts_whether_something_was_broken_or_not() -> None:
    before = {"parts": [{"date": "2026-01-02", "seeds": [0], "runs": 3}], "bad": []}
    found = of_kind([run(), run(), run(was_broken=False), run(None, was_broken=False)], 1, before)
    assert [(part["seeds"], part["runs"]) for part in found["parts"]] == [([0], 3), ([1], 2)]
    assert found["parts"][0] == before["parts"][0]
    (figure,) = figures_of({"node": found}).values()
    assert (figure["value"], figure["met"]) == (1 - 1 / 6, False)
    assert figure["unit"].startswith("share of 6 runs (2026-01-02 and ")


def test_of_a_kind_of_which_nothing_was_broken_there_is_no_figure() -> None:
    assert figures_of({"node": of_kind([run(was_broken=False)], 0, {})}) == {}
