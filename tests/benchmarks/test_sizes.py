"""The benchmark of sizes: what counts tensors, by hand, and that it runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.sizes.sizes import figure, table
from benchmarks.sizes.tensor_memory import live_bytes, measured

ROOT = Path(__file__).resolve().parent.parent.parent


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
    smaller, larger = ({"planned": 2**20, "measured": 2**size, "process": 0} for size in (20, 22))
    found = {"one": [{"planned": 90, "measured": 100, "process": 200}],
             "two": [smaller, larger | {"planned": 2**21}]}  # fmt: skip
    made = figure([abs(rank["planned"] / rank["measured"] - 1) for ranks in found.values() for rank in ranks])
    assert (made["value"], made["low"], made["met"]) == (0.5, 0.0, False)
    assert table(found)["rows"][1] == ["two", 2.0, 4.0, 0.0, 0.5]


@pytest.mark.slow
def test_it_runs_on_a_tiny_network() -> None:
    command = [sys.executable, "-m", "benchmarks.sizes.sizes", "--quick", "SFT, fp32", "PPO"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "planned_memory_error" in done.stdout
