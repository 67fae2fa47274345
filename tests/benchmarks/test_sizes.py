"""The benchmark of sizes: what counts tensors, by hand, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.sizes import resume
from benchmarks.sizes.sizes import figure, stored_parts, table, write_parts
from benchmarks.sizes.tensor_memory import live_bytes, measured

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_what_lives_before_and_the_most_within_are_counted_by_hand() -> None:
    before = live_bytes()
    kept = torch.zeros(1000)
    view = kept[:10]
    assert live_bytes() - before == 4000
    with measured() as peak:
        first = torch.ones(2000)
        second = first + 1
        del first
        third = torch.ones(500)
    assert peak.before - before == 4000
    assert 16_000 <= peak.within < 16_100  # 8,000 twice, while the sum is made, and its 1
    assert float(second[0] + third[0] + view[0]) == 3


def test_the_worst_rank_is_the_figure() -> None:
    smaller, larger = ({"planned": 2**20, "measured": 2**size, "process": 0, "cpu_seconds": 0.123} for size in (20, 22))
    one = [{"planned": 90, "measured": 100, "process": 200, "cpu_seconds": 1.0}]
    two = [smaller, larger | {"planned": 2**21}]
    found = {"one": {"made": "here", "ranks": one}, "two": {"made": "there", "ranks": two}}
    made = figure([abs(rank["planned"] / rank["measured"] - 1) for rank in [*one, *two]])
    assert (made["value"], made["low"], made["met"]) == (0.5, 0.0, False)
    assert table(found)["rows"][1] == ["two", 2.0, 4.0, 0.0, 0.5, 0.12, "there"]


def test_a_section_is_written_beside_what_is_stored_of_the_other(tmp_path: Path) -> None:
    rows = [{"engine": "zero2", "ranks": ranks, "losses": [2.0, 1.0], "loss_error": error, "weight_error": 0.0}
            for ranks, error in ((2, 1e-7), (1, 2e-5))]  # fmt: skip
    parts = {"resume": {"made": "On one.", "figures": {"resumed_loss_error": resume.figure(rows)},
                        "tables": [resume.table(rows)]}}  # fmt: skip
    ranks = [{"planned": 90, "measured": 100, "process": 200, "cpu_seconds": 1.0}]
    found = {"one": {"made": "there", "ranks": ranks}}
    memory = {"made": "On another.", "figures": {"planned_memory_error": figure([0.1])}, "tables": [table(found)]}
    path = write_parts(parts, tmp_path)
    write_parts({"memory": memory, **stored_parts(path)}, tmp_path)
    stored = json.loads(path.read_text())
    assert stored["figures"]["resumed_loss_error"] == resume.figure(rows)
    assert (stored["figures"]["resumed_loss_error"]["value"], resume.figure(rows)["met"]) == (2e-5, False)
    assert [one["title"].split(". ")[-1] for one in stored["tables"]] == ["On another.", "On one."]
    assert stored["tables"][1]["rows"][0] == ["zero2", 4, 2, "2, 1", 1e-7, 0.0]
    assert set(stored_parts(tmp_path / "sizes.json")) == {"memory", "resume"}


@pytest.mark.slow
def test_checkpoints_of_a_tiny_network_go_on_on_fewer_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert resume.measure(["--quick"]) is None
    printed = capsys.readouterr().out
    part = json.loads(printed[printed.index("{") :])
    assert [row["ranks"] for row in part["runs"]] == [2, 1]
    assert part["figures"]["resumed_loss_error"]["met"]


@pytest.mark.slow
def test_it_runs_on_a_tiny_network() -> None:
    command = [sys.executable, "-m", "benchmarks.sizes.sizes", "--quick", "SFT, fp32", "PPO"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "planned_memory_error" in done.stdout
