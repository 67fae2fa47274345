"""What a reward model of small sums is worth on ProcessBench's GSM8K, from its published layout to a table.

    bash scripts/bench.sh road processbench [--run experiments/quickstart] [--data FOLDER] [--work FOLDER] [--seed S]

Scores ProcessBench's 400 judged solutions (FOLDER/processbench/gsm8k.json, of ESPALIER_DATA or ../shared/datasets) by a
finished quick start's process reward model and by one of the same shape with random weights, in one command:

    bash scripts/prm_benchmark.sh prm=RUN/prm/model,WORK/random read_as=task task=word_arithmetic file=FILE run=WORK

Both read a solution behind the prompt of the quick start's task; its tokenizer falls back to bytes, so that any text
can be read, and what is longer than the model's positions is left out and counted. Beside both stands the score that
knows a step's index and nothing else. F1 is of first errors, over the problems that no threshold was chosen on.

The index alone is no floor of F1: scores that vary mark some step as wrong by chance, and an F1 of about 20 % comes of
that. So each scorer's own scores are dealt out anew, 200 times, among all steps of the same index, and a threshold is
chosen each time: what these reach, the scorer would reach if it knew nothing of a solution. A scorer is worthless where
its F1 is not above 97.5 % of the deals; the index, whose scores are the same however they are dealt, has no such test
and no goal. Both models should be worthless: the quick start has seen nothing but sums in one form of words, in a
vocabulary of its own. Three minutes on a core; a run that was stopped goes on by the same command.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from espalier.data.examples.token_examples import is_held_out
from espalier.data.jsonl import read_records
from espalier.data.records import AnnotatedSolution, StepScores
from espalier.models.load import load_config, load_tokenizer
from espalier.pipeline.prm.step_score_metrics import first_error_counts, first_error_figures, tune_first_error

ROOT = Path(__file__).resolve().parents[2]
HOW = "bash scripts/bench.sh road processbench"
TASK = "word_arithmetic"
TRAINED, RANDOM, INDEX = "the quick start's reward model", "random weights, the same shape", "a step's index alone"
DEALS = 200
_ENDS = ("mean", "low", "high")


def write_random(trained: Path, folder: Path, seed: int) -> Path:
    """Write a model of the shape of a trained one, its head too, with random weights, and the tokenizer; its folder."""
    torch.manual_seed(seed)
    AutoModelForTokenClassification.from_config(load_config(str(trained))).save_pretrained(folder)
    load_tokenizer(str(trained)).save_pretrained(folder)
    return folder


def f1_of(judged: Sequence[AnnotatedSolution], scores: Sequence[Sequence[float]], tune_share: float) -> float:
    """Return the F1 of first errors, from 0 to 1, with the threshold that is best on `tune_share` of the problems, over
    the others. Raises ValueError where no threshold can be chosen."""
    firsts = [-1 if row.first_error is None else row.first_error for row in judged]
    both: dict[bool, list[int]] = {True: [], False: []}
    for place, row in enumerate(judged):
        both[is_held_out(row.problem_id, tune_share)].append(place)
    tuned = tune_first_error([scores[n] for n in both[True]], [firsts[n] for n in both[True]], "f1")
    if tuned is None:
        raise ValueError("no threshold can be chosen: the tuning share lacks solutions with or without an error")
    counts = [first_error_counts(scores[n], firsts[n], tuned[0]) for n in both[False]]
    return float(first_error_figures(np.asarray(counts).sum(axis=0))["f1"])


def deal(scores: Sequence[Sequence[float]], draw: np.random.Generator) -> list[list[float]]:
    """Return the scores dealt out anew among all steps of the same index: what they knew of a solution is gone."""
    dealt = [list(row) for row in scores]
    for step in range(max(map(len, scores), default=0)):
        places = [number for number, row in enumerate(scores) if len(row) > step]
        for place, other in zip(places, draw.permutation(places), strict=True):
            dealt[place][step] = scores[other][step]
    return dealt


def by_chance(
    judged: Sequence[AnnotatedSolution], scores: Sequence[Sequence[float]], tune_share: float, deals: int = DEALS
) -> dict[str, float]:
    """Return the F1 of scores that are dealt out anew: `{"mean", "low", "high"}`, the median and the percentiles 2.5
    and 97.5 of so many deals."""
    draw = np.random.default_rng(0)
    found = [f1_of(judged, deal(scores, draw), tune_share) for _ in range(deals)]
    low, middle, high = (round(float(value), 5) for value in np.quantile(found, (0.025, 0.5, 0.975)))
    return {"mean": middle, "low": low, "high": high}


def rows_of(
    judged: Sequence[AnnotatedSolution],
    tables: Mapping[str, Mapping[str, Any]],
    scores: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, dict[str, Any]]:
    """Return scorer → `{"f1", "by_chance", "inner_auc", "threshold"}`, the index alone last, from `tables` of
    `prm/evaluate_prm_benchmarks` and `scores`, solution → scores of its steps. Solutions without scores are left out.
    Raises SystemExit where the scorers were not judged on the same solutions, or the F1 of a table is another one than
    that which is computed here. The index is dealt by no chance: its `by_chance` is None."""
    first_table, first_scores = next(iter(tables.values())), next(iter(scores.values()))
    kept = [row for row in judged if first_scores.get(row.id)]
    share = float(first_table["first_error"]["tuning"]["share"])
    rows = {}
    for name, table in tables.items():
        if table["left_out"] != first_table["left_out"]:
            raise SystemExit(f"error: {table['left_out']} and {first_table['left_out']} are left out: these F1 do not "
                             "compare: remove --work and run again")  # fmt: skip
        if apart := [row.id for row in judged if bool(scores[name].get(row.id)) != bool(first_scores.get(row.id))]:
            raise SystemExit(f"error: {apart[0]} and {len(apart) - 1} more have scores of one scorer alone: these F1 "
                             "do not compare: remove --work and run again")  # fmt: skip
        own = [scores[name][row.id] for row in kept]
        rows[name] = {**_cells(table["first_error"], (table["separation"] or {}).get("inner_auc")),
                      "by_chance": by_chance(kept, own, share)}  # fmt: skip
        if abs(f1_of(kept, own, share) - rows[name]["f1"]["mean"]) > 1e-4:
            raise SystemExit(f"error: {name}: the table's F1 is not that of its scores: remove --work and run again")
    auc = (first_table["separation"] or {}).get("inner_auc_of_the_index")
    index = _cells(first_table["index"]["first_error"], auc)
    rows[INDEX] = {**index, "by_chance": None}  # alike at every index: no deal changes them
    return rows


def _cells(first_error: Mapping[str, Any], auc: Mapping[str, float] | None) -> dict[str, Any]:
    return {"f1": first_error["overall"]["f1"], "threshold": first_error["threshold"], "inner_auc": auc}


def is_worthless(row: Mapping[str, Any]) -> bool:
    """Say whether an F1 is not above 97.5 % of those of its own scores, dealt out anew."""
    return bool(row["f1"]["mean"] <= row["by_chance"]["high"])


def figures_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the F1 of each scorer in per cent, with its 95 % interval over problems; the goal is what it may be where
    the scorer is worthless. The index has none: it cannot be dealt out."""
    figures = {}
    for name, scorer in (("quickstart", TRAINED), ("random", RANDOM), ("index", INDEX)):
        row = rows[scorer]
        value, low, high = (round(100 * row["f1"][end], 2) for end in _ENDS)
        chance = row["by_chance"]
        figures[f"processbench_f1_{name}"] = {
            "value": value, "low": low, "high": high, "unit": "% F1, by chance no more" if chance else "% F1",
            "goal": round(100 * chance["high"], 2) if chance else None, "better": "lower",
            "met": is_worthless(row) if chance else None, "how": HOW,
        }  # fmt: skip
    return figures


def table_of(rows: Mapping[str, Mapping[str, Any]], numbers: str) -> dict[str, Any]:
    """Return the table: F1, what the same scores reach by chance, and AUC; `numbers` of solutions are in its title."""

    def cell(interval: Mapping[str, float] | None, factor: float, digits: int) -> str:
        if interval is None:
            return "-"
        value, low, high = (f"{factor * interval[end]:.{digits}f}" for end in _ENDS)
        return f"{value} [{low}, {high}]"

    shown = [
        [name, cell(row["f1"], 100, 1), cell(row["by_chance"], 100, 1), cell(row["inner_auc"], 1, 3),
         ("yes" if is_worthless(row) else "**no**") if row["by_chance"] else ""]
        for name, row in rows.items()
    ]  # fmt: skip
    columns = ["scorer", "F1 of first errors, %", "its scores dealt out anew, %", "AUC of inner steps", "worthless"]
    return {"title": f"ProcessBench, GSM8K: {numbers}", "columns": columns, "rows": shown}


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Score and evaluate what is missing; the section's figures and table."""
    parser = argparse.ArgumentParser(prog=HOW)
    parser.add_argument("--run", type=Path, default=Path("experiments/quickstart"), help="a finished quick start")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ESPALIER_DATA", "../shared/datasets")))
    parser.add_argument("--work", type=Path, default=Path("experiments/processbench"), help="what is there is kept")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    arguments = parser.parse_args(words)
    trained, work = arguments.run.resolve() / "prm" / "model", arguments.work.resolve()
    file = arguments.data.resolve() / "processbench" / "gsm8k.json"
    if not (trained / "config.json").is_file():
        parser.error(f"{trained} is no model: run bash scripts/quickstart.sh first, or give --run")
    if not file.is_file():
        parser.error(f"there is no {file}: set ESPALIER_DATA, or --data, to the folder of published data")
    random = write_random(trained, work / f"random-{arguments.seed}", arguments.seed)
    command = ["bash", "scripts/prm_benchmark.sh", f"prm={trained},{random}", "read_as=task", f"task={TASK}",
               f"file={file}", f"run={work}"]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, timeout=3600)
    judged = read_records(AnnotatedSolution, str(work / "solutions.jsonl"))
    places = {TRAINED: work / "1", RANDOM: work / "2"}
    tables = {name: json.loads((folder / "prm_benchmark.json").read_text()) for name, folder in places.items()}
    scores = {
        name: {row.id: row.scores for row in read_records(StepScores, str(folder / "step_scores.jsonl"))}
        for name, folder in places.items()
    }
    rows, table = rows_of(judged, tables, scores), tables[TRAINED]
    numbers = (f"{table['num_rows']} solutions, {sum(table['left_out'].values())} longer than the model takes, "
               f"{table['first_error']['num_rows']} of problems that no threshold was chosen on")  # fmt: skip
    return {
        "figures": figures_of(rows),
        "tables": [table_of(rows, numbers)],
        "command": f"bash scripts/prm_benchmark.sh prm=RUN/prm/model,RANDOM read_as=task task={TASK} file=F run=WORK",
        "seed": arguments.seed,
        "deals": DEALS,
        "left_out": table["left_out"],
        "scorers": rows,
    }
