"""Preference pairs as text → pair accuracy of a reward model of steps and of one of whole responses, by one command."""

import json
from pathlib import Path

from benchmarks.processes.forked import run_ranks
from espalier.data.jsonl import read_records
from espalier.data.ranked_responses import ResponseScores
from espalier.data.records import StepScores
from tests.support.scripts import Script

TURN = {"role": "user", "content": "Tom has 4 pens and loses 1."}
ROWS = [
    {"prompt": "Mia has 3 apples and buys 4.", "chosen": "3 + 4 = 7\n#### 7", "rejected": "3 + 4 = 8\n\n#### 8"},
    {"chosen": [TURN, {"role": "assistant", "content": "4 - 1 = 3\n#### 3"}],
     "rejected": [TURN, {"role": "assistant", "content": "#### 5"}]},
    {"prompt": "Two and two?", "chosen": "4", "rejected": "5", "score_chosen": 9.0, "score_rejected": 2.0},
    {"chosen": "How many are 1 + 1? 2", "rejected": "How many are 1 + 1? 3"},
]  # fmt: skip


def test_pairs_of_texts_reach_pair_accuracy_with_an_interval_by_one_command(
    tiny_prm: Path, script: Script, tmp_path: Path
) -> None:
    """The commands of the script, each in a forked child: the libraries are loaded once."""
    pairs, run = tmp_path / "pairs.jsonl", tmp_path / "run"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    commands = script(f"prm={tiny_prm},{tiny_prm}", "read_as=task,whole", "task=word_arithmetic", f"pairs={pairs}",
                      f"run={run}", name="prm_benchmark.sh")  # fmt: skip
    for program, *settings in commands:
        assert run_ranks(program, settings, tmp_path / "log", 1) == [0], (tmp_path / "log").read_text()
    of_steps, whole = (json.loads((run / number / "pairs.json").read_text()) for number in "12")
    scores = {row.id: row.scores for row in read_records(StepScores, str(run / "1" / "pair_scores.jsonl"))}
    lowest = [[min(scores[f"line-{line}/{side}"]) for side in ("chosen", "rejected")] for line in range(1, 5)]
    won = [1.0 if one > other else 0.5 if one == other else 0.0 for one, other in lowest]
    by_minimum = of_steps["pairs"]["minimum"]["overall"]["pair_accuracy"]
    assert [len(scores[f"line-1/{side}"]) for side in ("chosen", "rejected")] == [2, 2]
    assert by_minimum["mean"] == sum(won) / 4
    assert by_minimum["low"] <= by_minimum["mean"] <= by_minimum["high"]
    rows = read_records(ResponseScores, str(run / "2" / "response_scores.jsonl"))
    assert whole["accuracy"]["mean"] == sum(row.chosen[0] > row.rejected[0] for row in rows) / 4
    assert (whole["accuracy"]["n"], whole["num_rows"]) == (4, 4)
    page = (run / "scorers.html").read_text()
    for shown in ("Preference pairs", "by minimum", "the response as a whole", "whole, as plain text"):
        assert shown in page, shown
