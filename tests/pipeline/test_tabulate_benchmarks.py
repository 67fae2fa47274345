"""docs/benchmarks.md is what the stage makes of the result files, and shows what is in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.records import BadInput
from espalier.pipeline.pages.tabulate_benchmarks import TabulateBenchmarks, number, result_section
from espalier.pipeline.stage import StageContext

ROOT = Path(__file__).resolve().parent.parent.parent
FIGURE = {"value": 0.9463, "low": 0.8123, "high": 1.17, "unit": "ratio", "goal": 0.9, "better": "higher", "met": True,
          "how": "bash scripts/bench.sh sampling MODEL"}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    """A result file with one figure."""
    stamp = {"machine": "2 cores", "commit": "abc", "date": "2026-01-02", "versions": {"torch": "2.13.0"}}
    return {**stamp, "figures": {"server_vs_in_process": {**FIGURE, **changes}}}


def test_a_figure_stands_with_its_goal_and_its_command(tmp_path: Path) -> None:
    (tmp_path / "sampling.json").write_text(json.dumps(result()))
    page = result_section(tmp_path / "sampling.json")
    assert "## sampling" in page
    assert "2026-01-02, commit abc, 2 cores; torch 2.13.0." in page
    row = ("| `server_vs_in_process` | 0.9463 | 0.8123 to 1.17 | ratio | ≥ 0.9 | yes | "
           "`bash scripts/bench.sh sampling MODEL` |")  # fmt: skip
    assert row in page.splitlines()


def test_a_missed_goal_is_shown_as_missed(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(result(met=False, better="lower", goal=3, low=0.9463, high=0.9463)))
    assert "| `server_vs_in_process` | 0.9463 |  | ratio | ≤ 3 | **no** |" in result_section(tmp_path / "x.json")


def test_a_figure_without_a_goal_neither_meets_nor_misses_it(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(result(met=None, goal=None)))
    assert "| 0.9463 | 0.8123 to 1.17 | ratio |  |  | `bash" in result_section(tmp_path / "x.json")


def test_tables_of_a_benchmark_are_shown_as_they_are(tmp_path: Path) -> None:
    extra = {"title": "Rates.", "columns": ["side", "tokens/s"], "rows": [["a|b", 12345.6], ["c", 0.12345678]]}
    (tmp_path / "x.json").write_text(json.dumps({**result(), "tables": [extra]}))
    page = result_section(tmp_path / "x.json")
    assert "Rates.\n\n| side | tokens/s |\n|---|---|\n| a\\|b | 12,346 |\n| c | 0.1235 |\n" in page


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (1.0, "1"), (0.00123456, "0.001235"), (226506.1, "226,506"),
                                              (1024, "1,024"), (999.96, "1000"), (-2, "-2")])  # fmt: skip
def test_numbers_have_four_digits(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {"x": {}}}', json.dumps(result(unit=None, low="x"))])
def test_a_file_that_is_no_result_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(BadInput, match=r"broken\.json: not the result of a benchmark"):
        result_section(tmp_path / "broken.json")


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no result files"):
        TabulateBenchmarks(str(tmp_path)).inputs()


def test_the_committed_page_is_what_the_stage_makes_of_the_committed_results() -> None:
    context = StageContext(None, ROOT / "docs" / "benchmarks.md", 10.0)
    page = TabulateBenchmarks(str(ROOT / "benchmarks" / "results")).run("", context)
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page, "run bash scripts/pages.sh benchmarks"
